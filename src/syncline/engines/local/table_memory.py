"""The shared memory between a learner and the shards: desks for words, lanes for gradients and replies, a shelf for a table's versions.

Not responsible for who reads and writes it when.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from syncline.engines.local.exchange import LINE, Drafts, Marks, Replies, Ring, Shares, Words
from syncline.engines.local.record_codec import NOTE
from syncline.engines.local.shared_cuda_memory import LOSSES, Handles, LateLosses, share
from syncline.engines.local.shared_memory import Region, SharedWords
from syncline.table.gradient_slot import Slot, slot_bytes
from syncline.table.layout import Layout

PORTION = struct.Struct("=6q")
DESK_NOTES, DESK_PORTIONS = 64, 256
# a word of a desk: its learner waits for others, and does not hang
WAITS = Ring.words(DESK_NOTES) + Ring.words(DESK_PORTIONS)
LEAF = WAITS + LINE  # another, the supervisor's: who is to be woken for a gradient
GRADIENTS = LEAF + LINE  # counts the gradients that it has put into outboxes for its leaf


class Mailbox:
    """Between one learner and the leading shard: notes there, portions back."""

    def __init__(self, region: Region) -> None:
        cells, self.words = SharedWords(region), region.words
        self.notes = Ring(cells, 0, capacity=DESK_NOTES, form=NOTE)
        self.portions = Ring(cells, Ring.words(DESK_NOTES), capacity=DESK_PORTIONS, form=PORTION)

    @staticmethod
    def nbytes() -> int:
        return 8 * (GRADIENTS + LINE)

    @staticmethod
    def heard(region: Region) -> tuple[int, bool]:
        """Return, to an observer outside, how many notes and gradients the learner has sent, and whether it waits."""
        return region.words[0] + region.words[GRADIENTS], bool(region.words[WAITS])


class Lane:
    """Between one learner and all shards of one table: replies, gradient slots, an inbox.

    Over a tree the learner's notes of gradients lie in the outbox, one record per slot. The root takes a learner's gradients in
    their order and a slot is reused after that, so no record is overwritten that a leaf may still need.
    What the dial in force does not use is never touched, and takes no memory.
    """

    def __init__(self, region: Region, layout: Layout, *, slots: int) -> None:
        memory, size = region.tensor(), slot_bytes(layout)
        cells, shards, drafts = SharedWords(region), layout.shards, Replies.words(layout.shards)
        self.replies = Replies(cells, 0, shards=shards)
        self.drafts = Drafts(cells, drafts, shards=shards, slots=slots)
        passed = drafts + Drafts.words(shards, slots)
        self.passed = Drafts(cells, passed, shards=1, slots=slots)  # over a tree: the leaf's word
        outbox = passed + Drafts.words(1, slots)
        self.outbox = Ring(cells, outbox, capacity=slots, form=NOTE, readers=0)
        self.handles = Handles(region, 8 * (outbox + Ring.words(slots, 0)))
        self.start = self._start(layout, slots)
        self.losses = LateLosses(region, self.start - LOSSES)
        self.numbers = [-1] * slots  # a shard's own: tickets whose drafts lie in the slots
        self.reads = True  # a shard's own, on a card: it may be reading since it published last
        self.memory, self._layout = memory, layout
        self.slots = [Slot(layout, memory[self.start + index * size :][:size]) for index in range(slots)]
        self.inbox = layout.parameters.segments(memory[self.start + slots * size :])

    def to_card(self, device: str, *, owner: bool, check: Callable[[], None] | None = None) -> None:
        """Gradients and inbox lie there from now on."""
        layout, slots = self._layout, self.slots
        size = layout.parameters.nbytes + layout.buffers.nbytes
        nbytes = len(slots) * size + layout.parameters.nbytes
        what = f"{len(slots)} gradients and an inbox of a learner"
        card = share(self.handles, device, nbytes, what, owner=owner, check=check)
        self.slots = [Slot(layout, slot.memory, card[index * size :]) for index, slot in enumerate(slots)]
        self.inbox = layout.parameters.segments(card[len(slots) * size :])

    @staticmethod
    def _start(layout: Layout, slots: int) -> int:
        """Of the first slot, in bytes."""
        words = Replies.words(layout.shards) + Drafts.words(layout.shards + 1, slots) + Ring.words(slots, 0)
        return -(-(8 * words + Handles.nbytes(2)) // 4096) * 4096 + LOSSES

    @classmethod
    def nbytes(cls, layout: Layout, *, slots: int) -> int:
        return cls._start(layout, slots) + slots * slot_bytes(layout) + layout.parameters.nbytes


class TableMemory:
    """One table's weights: a ring of places for versions, first values of all else, norms."""

    def __init__(self, region: Region, layout: Layout, *, places: int) -> None:
        memory, size = region.tensor(), layout.parameters.nbytes
        self.memory, self._layout, self._places = memory, layout, places
        self.ring = [layout.parameters.segments(memory[place * size :]) for place in range(places)]
        position = places * size
        self.buffers = layout.buffers.views(layout.buffers.segments(memory[position:]))
        position += layout.buffers.nbytes
        self.others = layout.others.views(layout.others.segments(memory[position:]))
        position += layout.others.nbytes
        cells, sizes = SharedWords(region, position // 8), [len(part.pieces) for part in layout.parts]
        self.norms = Shares(cells, 0, sizes=sizes)
        self.versions = Words(cells, Shares.words(sizes), shards=layout.shards, places=places)
        words = Shares.words(sizes) + Words.words(layout.shards, places)
        self.marks = Marks(cells, words, shards=layout.shards, places=places)
        words += Marks.words(layout.shards, places)
        self.handles = Handles(region, position + 8 * words)

    def to_card(self, device: str, *, owner: bool, check: Callable[[], None] | None = None) -> None:
        """The ring lies there from now on."""
        layout, size = self._layout, self._layout.parameters.nbytes
        what = f"{self._places} versions of a table"
        card = share(self.handles, device, self._places * size, what, owner=owner, check=check)
        self.ring = [layout.parameters.segments(card[place * size :]) for place in range(self._places)]

    def clear(self) -> None:
        """What shards told each other, and of their memory, is void."""
        self.norms.clear()
        self.marks.clear()
        self.handles.clear(1 + self._layout.shards)

    @staticmethod
    def nbytes(layout: Layout, *, places: int) -> int:
        words = Shares.words([len(part.pieces) for part in layout.parts]) + Words.words(layout.shards, places)
        words += Marks.words(layout.shards, places)
        values = places * layout.parameters.nbytes + layout.buffers.nbytes + layout.others.nbytes
        return values + 8 * words + Handles.nbytes(1 + layout.shards)


@dataclass(frozen=True, slots=True)
class Geometry:
    """What follows from the dials: how many slots there are, and places for versions; and where they lie."""

    slots: int
    places: int
    card: str | None = None  # a GPU, in place of shared memory
    sums: int = 0  # slots of each node of a tree
