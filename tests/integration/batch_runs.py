"""Small runs of batch methods that several files of tests start: points of two classes, a small network in float64."""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Any

import cloudpickle
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import syncline as sl
from tests.integration.small_runs import with_faults

cloudpickle.register_pickle_by_value(sys.modules[__name__])

METHOD = sl.LBFGS(history=4, tolerance=0.0, decrease=0.0, deterministic=True)
LIMIT = 60.0  # seconds until a run counts as hung: a failure, not a measurement


def points(size: int = 90) -> TensorDataset:
    x = torch.randn(size, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return TensorDataset(x, (x[:, 0] * x[:, 1] + 0.3 * x[:, 2] > 0).long())


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 60), nn.Tanh(), nn.Linear(60, 2)).double()


def start(script: str = "", **changes: Any) -> sl.Run:
    given: dict[str, Any] = {
        "loss": F.cross_entropy,
        "sync": "sandblaster",
        "optimizer": METHOD,
        "steps": 4,
        "learners": 2,
        "topology": "servers:2",
        "batch_size": 4,
        "threads": 1,
        **changes,
    }
    if "objective" in given:
        given.pop("loss")
    model, data = given.pop("model", network), given.pop("data", points())
    return with_faults(script, partial(sl.train, model, data, wait=False), **given)


def train(**changes: Any) -> sl.Result:
    """A run that hangs is ended and fails."""
    run = start(**changes)
    try:
        return run.wait(LIMIT)
    except TimeoutError:
        run.stop()
        raise


def unhurried(model: nn.Module, batch: Any) -> Tensor:
    """Slow enough for what happens beside it."""
    time.sleep(0.005)
    return F.cross_entropy(model(batch[0]), batch[1])


def losses(result: sl.Result) -> list[float]:
    return [record.loss for record in result.history]


def kinds(result: sl.Result) -> list[str]:
    return [event.kind for event in result.events if event.kind != "checkpoint"]


def same(a: sl.Result, b: sl.Result) -> bool:
    """Weights and history, to the bit."""
    one, other = a.state_dict(), b.state_dict()
    equal = one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    return equal and [(r.epoch, r.loss, r.notes) for r in a.history] == [
        (r.epoch, r.loss, r.notes) for r in b.history
    ]
