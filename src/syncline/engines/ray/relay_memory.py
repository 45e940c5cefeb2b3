"""What a relay has mapped of its machine: tables, mailboxes, lanes; and which bytes of them belong to which shards.

Not responsible for what is sent when.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from syncline.engines.local.host_interface import LaneHere, Sites, TableHere
from syncline.engines.local.shared_memory import WakeUp
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
        # where all values but versions begin: first buffers and other tensors
        self.first = self.places * self.size
        self.end = self.first + event.layout.buffers.nbytes + event.layout.others.nbytes
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

    def servers(self) -> list[int]:
        """Machines with shards of it, be their parts empty."""
        return [site for site in self._sites.servers if self._sites.of(site)[0] < self.layout.shards]


class LaneMemory:
    """Between one learner and the shards, of one table."""

    def __init__(self, event: LaneHere, slots: int) -> None:
        self.region, self.slots = event.region, slots
        self.lane = Lane(event.region, event.layout, slots=slots)
        event.region.close()
        self.at = SlotOffsets(event.layout)
        self.start = self.lane.start  # of the first slot: words come before
        self.inbox = self.slot(slots)
        self.released: dict[int, int] = {}  # shard -> tickets that were passed on
        self.freed: dict[tuple[int, int], int] = {}  # by shard and slot
        self.options: dict[tuple[int, int], int] = {}  # by machine and slot: what lies there

    def slot(self, index: int) -> int:
        return self.start + index * self.at.end

    def text(self, index: int, room: int) -> Span:
        """A text in a slot, with its length before it."""
        start = self.slot(index) + room
        return start, start + 8 + int.from_bytes(self.region.bytes[start : start + 8], "little")
