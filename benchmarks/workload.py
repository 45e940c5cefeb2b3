"""The workload that every benchmark times: a multilayer perceptron on one fixed random batch.

Data loading is left out on purpose: what is compared is computing, exchanging and applying gradients.
"""

import time
from collections.abc import Callable, Iterable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


def make_model(dims: tuple[int, ...]) -> nn.Sequential:
    """Linear layers of these widths with ReLU between them; the same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for i, o in pairwise(dims):
            layers += [nn.Linear(i, o), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def make_batch(dims: tuple[int, ...], batch_size: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(batch_size, dims[0], generator=generator)
    labels = torch.randint(dims[-1], (batch_size,), generator=generator)
    return inputs, labels


def make_optimizer(parameters: Iterable[Tensor]) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=True)


def stepping(model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """A step of training."""
    inputs, labels = batch

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    return step


def rate(step: Callable[[], None], seconds: float) -> float:
    """Steps per second, in about so many seconds."""
    count = 0
    start = now = time.perf_counter()
    while now < start + seconds:
        step()
        count += 1
        now = time.perf_counter()
    return count / (now - start)


def backward(model: nn.Module, batch: Batch) -> None:
    """Leaves the batch's gradient in the parameters."""
    inputs, labels = batch
    F.cross_entropy(model(inputs), labels).backward()
