"""Losses that stay where they are computed, and are read out many at a time.

Reading a number from a GPU waits for everything before it; once for thousands of gradients that costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

ROOM = 1 << 15


class Loss:
    """A loss whose value comes later: `float` of it reads it, with all others that are there by then."""

    __slots__ = ("_log", "_make", "place", "value")

    def __init__(self, log: LossLog, make: Callable[[], object]) -> None:
        self._log, self._make = log, make
        self.place = -1  # on the device, once it is computed
        self.value: float | None = None

    def __float__(self) -> float:
        if self.value is None and self.place < 0:
            self._make()
        if self.value is None and self.place >= 0:
            self._log.read()
        return float("nan") if self.value is None else self.value


class LossLog:
    """Places on the device for losses that nobody has read; the last place is nobody's."""

    def __init__(self, device: torch.device, room: int = ROOM) -> None:
        self.values = torch.full((room + 1,), float("nan"), dtype=torch.float64, device=device)
        self._room = room
        self._written: list[Loss] = []

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
        self._written.clear()
