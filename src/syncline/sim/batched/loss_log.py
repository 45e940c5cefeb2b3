"""Losses that stay where they are computed, and are read out many at a time.

Reading a number from a GPU waits for everything before it; once for thousands of gradients that costs nothing.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from syncline.sim.batched.lazy_gradients import Promise

ROOM = 1 << 15


class Loss:
    """A loss whose value comes later: `float` of it reads it, with all others that are there by then."""

    __slots__ = ("_log", "_need", "place", "promise", "value")

    def __init__(self, log: LossLog, promise: weakref.ref[Promise], need: Callable[[Promise], None]) -> None:
        self._log, self.promise, self._need = log, promise, need
        self.place = -1  # on the device, once it is computed
        self.value: float | None = None

    @property
    def computed(self) -> bool:
        return self.place >= 0

    def __float__(self) -> float:
        promise = self.promise()
        if self.place < 0 and promise is not None:
            self._need(promise)
        if self.value is None and self.place >= 0:
            self._log.read()
        return float("nan") if self.value is None else self.value


class LossLog:
    """Places on the device for losses that nobody has read; the last place is nobody's."""

    def __init__(self, device: torch.device, room: int = ROOM) -> None:
        self.values = torch.full((room + 1,), float("nan"), dtype=torch.float64, device=device)
        self._room = room
        self._written: list[Loss] = []
        self.alarm: Callable[[int | None, float], None] = lambda rank, loss: None  # of one that is not finite

    def place(self, loss: Loss) -> int:
        """Where it goes: it is being computed."""
        if len(self._written) == self._room:
            self.read()
        loss.place = len(self._written)
        self._written.append(loss)
        return loss.place

    def read(self) -> None:
        """All that were computed since the last time."""
        values = self.values[: len(self._written)].tolist()
        for loss, value in zip(self._written, values, strict=True):
            loss.value = value
        written, self._written = self._written, []
        if not all(map(math.isfinite, values)):
            bad = next(loss for loss in written if loss.value is not None and not math.isfinite(loss.value))
            promise = bad.promise()
            self.alarm(promise.own.rank if promise is not None else None, float(bad))
