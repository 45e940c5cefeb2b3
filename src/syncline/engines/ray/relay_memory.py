"""What a relay has mapped of its machine: tables, mailboxes, lanes; and which bytes of them belong to which shards.

Not responsible for what is sent when.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from syncline.engines.local.host_interface import LaneHere, LearnerKnown, Sites, TableHere
from syncline.engines.local.shared_memory import Region, WakeUp
from syncline.engines.local.table_memory import Geometry, Lane, Mailbox, TableMemory
from syncline.ports import WRITTEN
from syncline.table.gradient_slot import SlotOffsets
from syncline.table.layout import Layout

Span = tuple[int, int]  # bytes from, to


def spans_of(layout: Layout, shards: Sequence[int]) -> list[Span]:
    """Which bytes of a table's weights, or of a gradient, are these shards'; neighbours are one."""
    flat, found = layout.parameters, []
    for shard in shards:
        if shard < layout.shards:
            for segment, low, high in layout.parts[shard].slices:
                if high > low:
                    offset, size = flat.offsets[segment], flat.item_sizes[segment]
                    found.append((offset + low * size, offset + high * size))
    joined: list[Span] = []
    for low, high in sorted(found):
        if joined and low <= joined[-1][1]:
            joined[-1] = (joined[-1][0], high)
        else:
            joined.append((low, high))
    return joined


@dataclass(slots=True)
class Learner:
    """One that is known here."""

    site: int
    desk: Mailbox
    bell: WakeUp


class Table:
    """One table's memory here."""

    def __init__(self, event: TableHere, geometry: Geometry, sites: Sites, site: int) -> None:
        self.layout, self.region, self._sites = event.layout, event.region, sites
        self.shelf = TableMemory(event.region, event.layout, places=geometry.places)
        self.places, self.size = geometry.places, event.layout.parameters.nbytes
        here = sites.of(site)
        self.here = [shard for shard in here if shard < event.layout.shards]
        self.elsewhere = [shard for shard in range(event.layout.shards) if shard not in here]
        for shard in self.elsewhere:  # what they had offered is void
            for place in range(self.places):
                self.shelf.versions.offer(shard, place, WRITTEN)
        event.region.close()

    @cached_property
    def spans(self) -> dict[int, list[Span]]:
        """By machine."""
        return {site: spans_of(self.layout, self._sites.of(site)) for site in self._sites.servers}

    @cached_property
    def parts(self) -> list[list[Span]]:
        """By shard."""
        return [spans_of(self.layout, [shard]) for shard in range(self.layout.shards)]

    @property
    def end(self) -> int:
        """Of all values: versions, first buffers and other tensors."""
        return self.first + self.layout.buffers.nbytes + self.layout.others.nbytes

    @property
    def first(self) -> int:
        return self.places * self.size

    def servers(self) -> list[int]:
        """Machines with shards of it, be their parts empty."""
        return [site for site in self._sites.servers if self._sites.of(site)[0] < self.layout.shards]


@dataclass(slots=True)
class LaneMemory:
    """Between one learner and the shards, of one table."""

    lane: Lane
    region: Region
    layout: Layout
    slots: int
    at: SlotOffsets
    released: dict[int, int] = field(default_factory=dict)  # shard -> tickets that were passed on
    freed: dict[tuple[int, int], int] = field(default_factory=dict)  # by shard and slot
    options: dict[tuple[int, int], int] = field(default_factory=dict)  # by machine and slot: what lies there

    @classmethod
    def of(cls, event: LaneHere, slots: int) -> LaneMemory:
        lane = Lane(event.region, event.layout, slots=slots)
        event.region.close()
        return cls(lane, event.region, event.layout, slots, SlotOffsets(event.layout))

    @property
    def start(self) -> int:
        """Of the first slot: words come before."""
        return self.lane.start

    def slot(self, index: int) -> int:
        return self.lane.start + index * self.at.end

    @property
    def inbox(self) -> int:
        return self.slot(self.slots)

    def text(self, index: int, room: int) -> Span:
        """A text in a slot, with its length before it."""
        start = self.slot(index) + room
        return start, start + 8 + int.from_bytes(self.region.bytes[start : start + 8], "little")


def of_learner(event: LearnerKnown) -> Learner:
    desk = Mailbox(event.desk)
    event.desk.close()
    return Learner(event.site, desk, event.bell)
