"""Losses that a GPU writes into shared memory by itself, after the note of their gradient: no host waits for them.

A learner says of which ticket a loss is, and has its card copy the value behind that; the leading shard looks whether it has
come. A page of memory for each learner and table, locked for the card by the learner.
"""

from __future__ import annotations

import time
from collections import deque

import torch
from torch import Tensor

from syncline.engines.local.shared_memory import Region

NBYTES = 4096
ROOM = NBYTES // 16  # tickets whose losses may be on their way
PATIENCE = 5.0  # seconds; a learner that is gone leaves a loss unsaid
_NOT_YET = 0x7FF8DEAD00000001  # the bits of a value that is on its way: no computation gives them


class LateLosses:
    """Both ends of the page at `offset`."""

    def __init__(self, region: Region, offset: int) -> None:
        first = offset // 8
        self._tickets = region.words[first : first + ROOM]
        self._bits = region.words[first + ROOM : first + 2 * ROOM]
        self.page = region.tensor()[offset : offset + NBYTES]
        self._values = self.page[NBYTES // 2 :].view(torch.float64)
        self._unread: deque[LateLoss] = deque()

    # -- the learner's end -------------------------------------------------------------------------------

    def write(self, number: int, loss: Tensor) -> None:
        """This ticket's, when the card has it."""
        place = number % ROOM
        if self._bits[place] == _NOT_YET:  # the card is as many steps behind as there is room for
            torch.cuda.current_stream(loss.device).synchronize()
        self._bits[place] = _NOT_YET
        self._tickets[place] = number + 1
        self._values[place].copy_(loss.detach().reshape(()).double(), non_blocking=True)

    # -- the shard's -------------------------------------------------------------------------------------

    def of(self, number: int, said: float) -> float | LateLoss:
        """What was said with the ticket, or what comes later."""
        while self._unread and self._unread[0].come():
            self._unread.popleft()
        if self._tickets[number % ROOM] != number + 1:
            return said
        self._unread.append(LateLoss(self, number))
        return self._unread[-1]

    def look(self, number: int) -> float | None:
        """None: it is on its way."""
        place = number % ROOM
        if self._tickets[place] != number + 1:
            return float("nan")
        return None if self._bits[place] == _NOT_YET else self._values[place].item()


class LateLoss:
    """A number, from when it is needed on."""

    def __init__(self, losses: LateLosses, number: int) -> None:
        self._losses, self._number = losses, number
        self._value: float | None = None

    def come(self) -> bool:
        if self._value is None:
            self._value = self._losses.look(self._number)
        return self._value is not None

    def __float__(self) -> float:
        deadline = time.monotonic() + PATIENCE
        while not self.come() and time.monotonic() < deadline:
            time.sleep(0.0002)
        return float("nan") if self._value is None else self._value
