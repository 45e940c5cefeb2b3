"""A real network on one GPU: ResNet-18 on CIFAR-10, two learners under several dials beside one process with the joint batch.

    python -m benchmarks.bench_resnet FILE.npz [--epochs 5] [--batch 128] [--json FILE]

FILE has `x_train`, `y_train`, `x_test`, `y_test` (images uint8, N x 32 x 32 x 3). Prints seconds
per epoch (median, the first left out) and test accuracy. Leave the machine alone meanwhile.
"""

from __future__ import annotations

import statistics
import sys
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import syncline as sl
from benchmarks import machine

cloudpickle.register_pickle_by_value(sys.modules[__name__])

DIALS = ["hardsync", "softsync:1", "async", "delayed:1"]
SGD = partial(torch.optim.SGD, momentum=0.9, weight_decay=5e-4)


class Block(nn.Module):
    def __init__(self, given: int, width: int, stride: int) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            nn.Conv2d(given, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        same = given == width and stride == 1
        self.way = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(given, width, 1, stride, bias=False), nn.BatchNorm2d(width))
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.convs(x) + self.way(x))


def resnet18() -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 3, 1, 1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
    ]
    for before, width, stride in ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)):
        layers += [Block(before, width, stride), Block(width, width, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def images(array: np.ndarray) -> Tensor:
    found = torch.from_numpy(array)
    if found.shape[-1] == 3:
        found = found.permute(0, 3, 1, 2)
    return (found.float() / 255 - 0.47).div_(0.25).contiguous()


def augmented(x: Tensor) -> Tensor:
    """Half of a batch mirrored, all of it shifted by up to four pixels."""
    if torch.rand(()) < 0.5:
        x = x.flip(3)
    dx, dy = (int(v) for v in torch.randint(-4, 5, (2,)))
    return torch.roll(F.pad(x, (4, 4, 4, 4)), (dy, dx), (2, 3))[:, :, 4:-4, 4:-4]


def objective(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(augmented(x)), y)


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    model.eval().cuda()
    right = sum(
        int((model(a.cuda()).argmax(1).cpu() == b).sum())
        for a, b in zip(x.split(1000), y.split(1000), strict=True)
    )
    return right / len(y)


def plain(data: tuple[Tensor, Tensor], batch: int, epochs: int, lr: float) -> tuple[nn.Module, list[float]]:
    torch.manual_seed(0)
    model = resnet18().cuda()
    optimizer, (x, y) = SGD(model.parameters(), lr=lr), (each.cuda() for each in data)
    ends = [time.perf_counter()]
    for _ in range(epochs):
        for indices in torch.randperm(len(x), device="cuda").split(batch):
            optimizer.zero_grad()
            loss = objective(model, (x[indices], y[indices]))
            loss.backward()
            optimizer.step()
        loss.item()
        ends.append(time.perf_counter())
    return model, [b - a for a, b in pairwise(ends)]


def ours(
    data: tuple[Tensor, Tensor], sync: str, batch: int, epochs: int, lr: float
) -> tuple[nn.Module, list[float], sl.Result]:
    torch.manual_seed(0)
    result = sl.train(
        resnet18,
        data,
        objective=objective,
        optimizer=partial(SGD, lr=lr),
        sync=sync,
        learners=2,
        batch_size=batch,
        epochs=epochs,
        device="cuda",
        data_device="cuda",
    )
    ends = [record.seconds for record in result.history]
    return result.model, [b - a for a, b in pairwise(ends)], result


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    head = machine.announce(" · ", gpu=torch.cuda.get_device_name())
    kept = np.load(given.file)
    data = images(kept["x_train"]), torch.from_numpy(kept["y_train"]).long()
    test = images(kept["x_test"]), torch.from_numpy(kept["y_test"]).long()
    rows: dict[str, Any] = {}

    def say(name: str, model: nn.Module, seconds: list[float], sigma: float) -> None:
        rows[name] = {"seconds": seconds, "accuracy": accuracy(model, *test), "sigma": sigma}
        middle = statistics.median(seconds[1:] or seconds)
        print(
            f"{name}: {middle:.2f} s an epoch, accuracy {rows[name]['accuracy']:.4f}, mean staleness {sigma:.2f}",
            flush=True,
        )
        machine.keep(given.json, {"head": head, "rows": rows})

    say("one process, joint batch", *plain(data, 2 * given.batch, given.epochs, given.lr), 0.0)
    for sync in DIALS:
        model, seconds, result = ours(data, sync, given.batch, given.epochs, given.lr)
        say(sync, model, seconds, result.staleness.mean)


if __name__ == "__main__":
    main()
