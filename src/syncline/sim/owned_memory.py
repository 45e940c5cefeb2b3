"""A simulated run's memory: tables, and each learner's slots and inbox. Not responsible for when anything moves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from syncline.messages.to_leader import Gradient
from syncline.ports import WRITTEN, Draft, Reading
from syncline.sim.clock import Action, Clock
from syncline.table.gradient_slot import private_slot
from syncline.table.layout import Layout
from syncline.table.store import OwnMemory

DRAFT = "a draft that is free"  # what a learner waits for
NEVER, HELD = -1, -2  # in place of a ticket: nothing was published there, or it is being filled


class SimTable:
    """What a table begins with: its learners get buffers and others from here, and who checks everything the weights."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout, self.device = layout, device
        memory = torch.zeros(layout.parameters.nbytes, dtype=torch.uint8, device=device)
        self.weights = layout.parameters.segments(memory)
        flats = (layout.buffers, layout.others)
        self.buffers, self.others = (
            flat.views(flat.segments(torch.zeros(flat.nbytes, dtype=torch.uint8))) for flat in flats
        )
        parts = [part.segments(self.weights) for part in layout.parts]
        self.part_bytes = [sum(segment.nbytes for segment in part) for part in parts]

    def begin(self, first: Draft) -> None:
        """As it was published."""
        targets = [*self.layout.parameters.views(self.weights), *self.buffers, *self.others]
        for target, value in zip(targets, [*first.gradients, *first.buffers, *first.others], strict=True):
            target.copy_(value)


class ShardMemory(OwnMemory):
    """A shard's versions; what others read of them is sent."""

    def __init__(self, table: SimTable, shard: int, places: int) -> None:
        super().__init__(table.layout, shard, places, table.device)
        self.part, self._entries = table.layout.parts[shard], table.layout.parameters.entries
        self.others = table.others
        self._offered: dict[int, int] = {}  # place -> version
        self.made: Callable[[int], None] = lambda version: None  # told of every version that is whole

    def offer(self, place: int, version: int) -> None:
        self._offered[place] = version
        if version != WRITTEN:
            self.made(version)

    def views(self, whole: list[Tensor]) -> list[Tensor]:
        """This shard's pieces of something as large as the table; what lies between them is nobody's."""
        return self.part.views(self.part.segments(whole), self._entries)

    def of(self, version: int) -> list[Tensor]:
        return next(self.places[place] for place, held in self._offered.items() if held == version)


class Traffic:
    """What goes to and fro between one learner and the shards of one table; which slots the learner may fill."""

    def __init__(self, slots: int, shards: int, clock: Clock) -> None:
        self._shards, self._clock = range(shards), clock
        self.slots: Sequence[Any] = range(slots)  # the learner's drafts; in a timing without memory
        self.numbers = [NEVER] * slots  # tickets whose drafts lie in the slots
        self.said: dict[int, Gradient] = {}  # over a tree: what was published with them
        self.released: dict[int, tuple[int, Reading]] = {}  # by shard, with its ticket
        self.freed: dict[tuple[int, int], float] = {}  # (shard, ticket) -> when the learner knows of it
        self.served: dict[int, int] = {}  # by shard: the version that was sent last
        self.under_way: dict[tuple[int, int], float] = {}  # (shard, ticket) -> when its part is there
        self.coming: dict[int, Tensor] = {}  # ticket -> what was sent, where bulk comes after its note
        self.due: dict[int, float] = {}  # by shard: when the last version that it sent is there
        self.sending: set[int] = set()  # over a tree: tickets that the leaf does not have yet

    def free_slot(self) -> int | None:
        """The first that is free, once the leaf of a tree has what was published before (R8)."""
        if self.sending:
            return None
        for place, number in enumerate(self.numbers):
            if number == NEVER or (number >= 0 and self._free(number)):
                return place
        return None

    def _free(self, number: int) -> bool:
        freed, now = self.freed, self._clock.now
        return all(freed.get((shard, number), math.inf) <= now for shard in self._shards)

    def delivered(self) -> bool:
        """Nothing that was published is under way."""
        return not any(number >= 0 and not self._free(number) for number in self.numbers)

    def plan(self, wake: Action) -> None:
        """When the learner will know of what has been freed."""
        for time in self.freed.values():
            if time > self._clock.now:
                self._clock.at(time, wake)

    def hold(self, place: int) -> None:
        """It is being filled."""
        for shard in self._shards:
            self.freed.pop((shard, self.numbers[place]), None)
        self.numbers[place] = HELD

    def reading(self, number: int) -> Reading | None:
        """What to read, once all shards have released this ticket."""
        readings = self.released
        if len(self._shards) == 1:
            last = readings.get(0)
            return last[1] if last is not None and last[0] >= number else None
        if len(readings) < len(self._shards) or any(done < number for done, _ in readings.values()):
            return None
        versions = {reading.version for _, reading in readings.values()}
        if len(versions) != 1:
            raise AssertionError(f"shards released ticket {number} with versions {sorted(versions)}")
        return readings[0][1]


class SimLane(Traffic):
    """One learner's slots and inbox of one table."""

    def __init__(self, layout: Layout, slots: int, clock: Clock) -> None:
        super().__init__(slots, layout.shards, clock)
        self.slots = [private_slot(layout) for _ in range(slots)]
        self.sent = [private_slot(layout) for _ in range(slots)]  # what the shards have of them
        flat = layout.parameters
        self.inbox = flat.segments(torch.zeros(flat.nbytes, dtype=torch.uint8))


def poison(tensors: Iterable[Tensor]) -> None:
    """What is not somebody's any more is no number to it."""
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
