"""The shared memory of a batch method's run: the point that learners read, and the slots that they put sums in.

Not responsible for who may write where: the coordinator gives slots out one by one.
"""

from __future__ import annotations

import os
import signal

from torch import Tensor

from syncline.engines.local.shared_memory import Region
from syncline.table.layout import Layout


class BatchMemory:
    """Slots by number, over regions that may become more."""

    def __init__(self, layout: Layout, regions: list[Region]) -> None:
        self._flat = layout.parameters
        self._slots: list[list[Tensor]] = []
        for region in regions:
            self.extend(region)

    def extend(self, region: Region) -> None:
        memory, size = region.tensor(), slot_bytes(self._flat.nbytes)
        for low in range(0, len(memory) - size + 1, size):
            self._slots.append(self._flat.segments(memory[low : low + size]))
        region.close()

    def __getitem__(self, slot: int) -> list[Tensor]:
        return self._slots[slot]


def slot_bytes(nbytes: int) -> int:
    """Of one slot: whole pages, so that a region holds just as many as were asked for."""
    return max(4096, -(-nbytes // 4096) * 4096)


class Crash:
    """For tests: this process dies in its n-th operation."""

    def __init__(self, operation: int | None) -> None:
        self._left = operation or 0

    def tick(self) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
