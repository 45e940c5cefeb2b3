"""GPU learners go through pinned buffers; skipped where there is no GPU."""

import sys
from collections import UserDict
from dataclasses import dataclass
from functools import partial

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import syncline as sl

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a GPU"),
]


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(512, 20, generator=generator)
    return TensorDataset(inputs, (inputs[:, 0] > 0).long())


@pytest.mark.parametrize("sync", ["hardsync", "softsync:1", "async", "delayed:1"])
def test_training_on_a_gpu(sync: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 2))
    result = sl.train(
        model,
        data(),
        loss=F.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        sync=sync,
        device="cuda",
        learners=2,
        batch_size=32,
        epochs=4,
        evaluate=data(),
    )
    assert result.gradients == 64
    assert result.history[-1].metrics["accuracy"] > 0.9
    assert all(not tensor.is_cuda for tensor in result.state_dict().values())


@dataclass(frozen=True)
class Batch:
    name: str
    content: UserDict[str, torch.Tensor]


def as_object(items: list[tuple[torch.Tensor, torch.Tensor]]) -> Batch:
    x, y = zip(*items, strict=True)
    return Batch("a batch", UserDict(x=torch.stack(x), y=torch.stack(y)))


def of_object(model: nn.Module, batch: Batch) -> torch.Tensor:
    assert batch.content["x"].device == next(model.parameters()).device and batch.name == "a batch"
    return F.cross_entropy(model(batch.content["x"]), batch.content["y"])


@pytest.mark.parametrize("topology", ["servers", "allreduce"])
def test_batches_of_any_kind_are_on_the_gpu(topology: str) -> None:
    torch.manual_seed(0)
    result = sl.train(
        nn.Linear(20, 2),
        data(),
        objective=of_object,
        collate=as_object,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        sync="hardsync",
        topology=topology,
        device="cuda",
        learners=1,
        batch_size=32,
        epochs=2,
        evaluate=data(),
    )
    assert result.gradients == 32 and result.history[-1].metrics["loss"] < 0.7


def one_gpu_learner(session: sl.Session) -> list[torch.Tensor]:
    assert session.device.type == "cuda"
    torch.manual_seed(0)
    model = nn.Linear(20, 2).to(session.device)
    optimizer = session.optimizer(model, partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    inputs = torch.ones(8, 20, device=session.device)
    for _ in range(10):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def test_one_gpu_learner_agrees_with_plain_pytorch() -> None:
    torch.manual_seed(0)
    model = nn.Linear(20, 2).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs = torch.ones(8, 20, device="cuda")
    for _ in range(10):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    result = sl.launch(one_gpu_learner, learners=1, device="cuda")
    for mine, theirs in zip(result.returned[0], model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.detach().cpu(), rtol=1e-5, atol=1e-6)
