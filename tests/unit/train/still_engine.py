"""An engine that starts nothing: it keeps the specification it was given, and its handle hears what is asked of it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from syncline.dial import Sync
from syncline.engines.run import Engine, Handle, Outcome, RunSpec
from syncline.errors import UsageError
from syncline.messages import Statistics

DATA = TensorDataset(torch.zeros(12, 3), torch.zeros(12, 1))
PLAIN = partial(torch.optim.SGD, lr=0.1)


def squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


class StillHandle(Handle):
    """`ends` is given back by `wait`, or raised where it is an exception."""

    def __init__(self, ends: Outcome | BaseException) -> None:
        self.ends = ends
        self.ended = False
        self.heard: list[Any] = []

    def wait(self, timeout: float | None = None) -> Outcome:
        if isinstance(self.ends, TimeoutError):
            raise self.ends
        self.ended = True
        if isinstance(self.ends, BaseException):
            raise self.ends
        return self.ends

    @property
    def done(self) -> bool:
        return self.ended

    def stop(self) -> None:
        self.heard.append("stop")

    def end(self, seconds: float) -> None:
        self.heard.append(("end", seconds))
        self.ended = True

    def add_learners(self, count: int) -> None:
        self.heard.append(("add", count))

    def change(self, sync: Sync) -> None:
        self.heard.append(("change", str(sync)))

    def statistics(self) -> Statistics:
        return Statistics(-1)


class StillEngine(Engine):
    """`spec` is that of the last run."""

    def __init__(self, ends: Outcome | BaseException | None = None) -> None:
        self.handle = StillHandle(ends if ends is not None else Outcome())
        self.refuses = False
        self.spec: RunSpec

    def start(self, spec: RunSpec) -> StillHandle:
        if self.refuses:
            raise UsageError("nothing can be started")
        self.spec = spec
        return self.handle


def good(**changes: Any) -> dict[str, Any]:
    """Arguments of `train` that are as they should be, but for these."""
    plain: dict[str, Any] = {"model": nn.Linear(3, 1), "data": DATA, "loss": squares, "optimizer": PLAIN}
    return {**plain, "batch_size": 4, **changes}
