"""Small runs that several files of tests start: points of two classes, a linear model, every preset."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import SGD
from torch.utils.data import TensorDataset

import syncline as sl
from syncline.testing import Faults

cloudpickle.register_pickle_by_value(sys.modules[__name__])

PATIENCE = 60.0  # seconds until a run counts as hung: a failure, not a measurement
PRESETS = [
    "hardsync",
    "softsync:1",
    "async",
    "ssp:2",
    "backup:1",
    "delayed:2",
    "downpour",
    "downpour:push=3,fetch=4,local_lr=0.1",
    "hardsync until 1 then softsync:1",
]


def points(size: int) -> TensorDataset:
    x = torch.randn(size, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.sum(1) > 0).long())


def unhurried(model: nn.Module, batch: Any) -> Tensor:
    """Slow enough for faults to come in time."""
    time.sleep(0.001)
    return F.cross_entropy(model(batch[0]), batch[1])


class PacedFaults(Faults):
    """No moment is missed: learners with its pace compute twice at most between two looks of the player."""

    def __init__(self, script: str) -> None:
        super().__init__(script)
        handle, looks = tempfile.mkstemp(prefix="syncline-looks-")
        os.close(handle)
        self.pace = Pace(looks)

    def _play(self, run: sl.Run) -> None:
        try:
            super()._play(run)
        finally:
            os.unlink(self.pace.looks)  # they run freely

    def _look(self, run: sl.Run, left: list[Any], now: float) -> None:
        super()._look(run, left, now)
        with open(self.pace.looks, "a") as file:
            file.write(".")


class Pace:
    """Of one learner: it is called before each of its losses."""

    def __init__(self, looks: str) -> None:
        self.looks, self.taken = looks, 0  # a file with a byte for each look

    def __call__(self) -> None:
        try:
            self.taken = max(self.taken + 1, 2 * os.path.getsize(self.looks) - 1)  # what was not used is lost
            while self.taken > 2 * os.path.getsize(self.looks):
                time.sleep(0.001)
        except FileNotFoundError:
            return

    def loss(self, objective: Callable[..., Tensor], model: nn.Module, batch: Any) -> Tensor:
        self()
        return objective(model, batch)

    def loop(self, function: Callable[..., Any], session: sl.Session, *arguments: Any) -> Any:
        """For own loops: a hook of torch stops their models."""
        with register_module_forward_pre_hook(lambda module, given: self()):
            return function(session, *arguments)


def start(data: Any, script: str = "", **options: Any) -> sl.Run:
    """Of real processes that take their time, with faults."""
    settings = {
        "objective": unhurried,
        "optimizer": partial(SGD, lr=0.1),
        "learners": 3,
        "topology": "servers:2",
        "batch_size": 8,
        "epochs": 2,
        "threads": 1,
    }
    torch.manual_seed(0)
    model = options.pop("model", None) or nn.Linear(4, 2)
    return with_faults(script, partial(sl.train, model, data, wait=False), **{**settings, **options})


def with_faults(script: str, begin: Callable[..., sl.Run], **options: Any) -> sl.Run:
    """A run on whose processes the script is played."""
    if not script:
        return begin(**options)
    faults, loss = PacedFaults(script), options.pop("loss", None)
    objective = options.get("objective") or (lambda model, batch: loss(model(batch[0]), batch[1]))
    run = begin(**{**options, "objective": partial(faults.pace.loss, objective)})
    faults.play(run)
    return run


def train(**changes: Any) -> Any:
    """A result, or a run with wait=False."""
    torch.manual_seed(0)
    given: dict[str, Any] = {
        "model": nn.Linear(4, 2),
        "loss": F.cross_entropy,
        "optimizer": partial(SGD, lr=0.1),
        "batch_size": 4,
        "threads": 1,
        **changes,
    }
    return sl.train(given.pop("model"), given.pop("data"), **given)


def launched(function: Callable[..., Any], *arguments: Any, script: str = "", **options: Any) -> sl.Result:
    """Faults are played on the processes, where there are any; a run that hangs is ended and fails."""
    if script and options.get("engine") == "local":
        faults = PacedFaults(script)
        run = sl.launch(partial(faults.pace.loop, function), *arguments, threads=1, wait=False, **options)
        faults.play(run)
    else:
        run = sl.launch(function, *arguments, threads=1, wait=False, **options)
    try:
        return run.wait(PATIENCE)
    except TimeoutError:
        run.stop()
        raise


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def check_accounts(result: sl.Result) -> None:
    """DESIGN.md 1: versions rise by one; every published gradient is folded once, or counted as dropped."""
    table = result.statistics.tables[0]
    assert result.gradients == result.staleness.gradients == sum(result.staleness.histogram.values())
    assert result.gradients + result.dropped == sum(result.statistics.steps.values())
    assert result.updates == result.version == table.version
    assert table.pending == 0 and min(result.staleness.histogram, default=0) >= 0


def kinds(result: sl.Result) -> list[str]:
    """What happened, checkpoints apart."""
    return [event.kind for event in result.events if event.kind != "checkpoint"]


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """To the bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def clouds(examples: int) -> TensorDataset:
    """Points with twelve features, for `network`."""
    x = torch.randn(examples, 12, generator=torch.Generator().manual_seed(7))
    return TensorDataset(x, (x.sum(1) > 0).long())


def network() -> nn.Module:
    """It draws numbers in training."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(12, 24), nn.Dropout(0.2), nn.ReLU(), nn.Linear(24, 2))


class Constant(nn.Module):
    """Its gradient is 1, whatever the weights: the weight counts the rate that was applied."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.expand(len(x))


def rising(model: nn.Module, batch: Any) -> Tensor:
    return -model(batch[0]).mean()


def alive(pid: int) -> bool:
    """It has not ended: one that nobody has reaped yet has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def until(ready: Callable[[], Any]) -> None:
    """Else the test's time is over."""
    while not ready():
        time.sleep(0.01)
