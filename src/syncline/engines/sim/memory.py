"""A simulated run's memory: tables, and each learner's slots and inbox. Not responsible for when anything moves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from syncline.ports import Reading
from syncline.table.layout import Layout
from syncline.table.slot import private_slot

if TYPE_CHECKING:
    from syncline.engines.sim.promises import PromisedLane


class SimTable:
    """One table's memory."""

    def __init__(self, layout: Layout, kept: int) -> None:
        self.layout = layout
        self.weights = self._segments()
        self.history = [self._segments() for _ in range(kept)]
        flats = (layout.buffers, layout.others)
        self.buffers, self.others = (
            flat.views(flat.segments(torch.zeros(flat.nbytes, dtype=torch.uint8))) for flat in flats
        )

    def _segments(self) -> list[Tensor]:
        flat = self.layout.parameters
        return flat.segments(torch.zeros(flat.nbytes, dtype=torch.uint8))


class SimLane:
    """One learner's slots and inbox of one table."""

    def __init__(self, layout: Layout, slots: int) -> None:
        self.slots = [private_slot(layout) for _ in range(slots)]
        flat = layout.parameters
        self.inbox = flat.segments(torch.zeros(flat.nbytes, dtype=torch.uint8))
        self.released: dict[int, tuple[int, Reading]] = {}  # by shard, with its ticket
        self.freed: dict[int, int] = {}  # by shard


class Releases:
    """What the shards have released to a learner through its lane."""

    def __init__(self, lane: SimLane | PromisedLane, shards: int) -> None:
        self._lane, self._shards = lane, range(shards)

    def reading(self, number: int) -> Reading | None:
        """What to read, once all shards have released this ticket."""
        readings = self._lane.released
        if len(readings) < len(self._shards) or any(done < number for done, _ in readings.values()):
            return None
        versions = {reading.version for _, reading in readings.values()}
        if len(versions) != 1:
            raise AssertionError(f"shards released ticket {number} with versions {sorted(versions)}")
        return readings[0][1]

    def free(self, number: int) -> bool:
        """The slot that this ticket was published with may be used again."""
        return all(self._last(shard) >= number for shard in self._shards)

    def _last(self, shard: int) -> int:
        lane = self._lane
        last = lane.released[shard][0] if shard in lane.released else -1
        return max(last, lane.freed.get(shard, -1))
