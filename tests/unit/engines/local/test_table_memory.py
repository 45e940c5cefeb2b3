"""What lies in the memory between learners and shards: everything has bytes of its own, and there is room for all of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from syncline.engines.local.shared_memory import Region
from syncline.engines.local.table_memory import (
    DESK_NOTES,
    DESK_PORTIONS,
    GRADIENTS,
    LEAF,
    WAITS,
    Lane,
    Mailbox,
    TableMemory,
)
from tests.unit.engines.local.doubles import layout_of

NOTE = (1, *range(11), 0.5)
LAYOUTS = [
    layout_of(3),
    layout_of(3, 5000, 7, shards=3, buffers=5),
    layout_of(9000, 9000, shards=2),
]
layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=["tiny", "buffers", "two shards"])


def distinct(parts: dict[str, list[Tensor]]) -> None:
    """Each is filled with a number of its own, and has it still when all are filled."""
    flat = [(f"{name} {index}", each) for name, of in parts.items() for index, each in enumerate(of)]
    for number, (_, each) in enumerate(flat):
        each.fill_(number + 1)
    for number, (name, each) in enumerate(flat):
        assert bool((each == number + 1).all()), f"something else lies in {name}"


@layouts
@pytest.mark.parametrize("slots", [1, 4])
def test_a_lanes_slots_inbox_and_words_share_no_byte(layout: Any, slots: int) -> None:
    region = Region(Lane.nbytes(layout, slots=slots))
    lane = Lane(region, layout, slots=slots)
    parts = {"inbox": lane.inbox}
    for index, slot in enumerate(lane.slots):
        parts |= {f"gradients {index}": slot.segments, f"buffers {index}": slot.buffers}
        parts |= {f"mask {index}": [slot.mask]}
        slot.write_options(b"o" * 50 + bytes([index])), slot.write_states(b"s" * 50 + bytes([index]))
    for slot in range(slots):
        for shard in range(layout.shards):
            lane.drafts.free(shard, slot, 100 * shard + slot)
        lane.passed.free(0, slot, 70 + slot)
    for shard in range(layout.shards):
        lane.replies.release(shard, 5, 17, 2, 1)
    lane.replies.has_read(4)
    lane.handles.put(0, b"h" * 64), lane.handles.put(1, b"i" * 64)
    lane.losses.page.fill_(99)
    distinct(parts)
    assert bool((lane.losses.page == 99).all())
    assert lane.replies.released(5) == (17, 2, 1) and lane.replies.reads(5) and not lane.replies.reads(4)
    assert (lane.handles.get(0), lane.handles.get(1)) == (b"h" * 64, b"i" * 64)
    for index, slot in enumerate(lane.slots):
        assert (slot.options_text()[-1], slot.read_states()[-1]) == (index, index)
        assert lane.passed.of(0, index) == 71 + index
        assert [lane.drafts.of(s, index) for s in range(layout.shards)] == [
            100 * s + index + 1 for s in range(layout.shards)
        ]
    again = Lane(region, layout, slots=slots)  # another process's
    assert all(map(torch.equal, again.inbox, lane.inbox))
    assert again.replies.released(5) == (17, 2, 1)


@layouts
@pytest.mark.parametrize("places", [1, 3])
def test_a_tables_versions_first_values_and_words_share_no_byte(layout: Any, places: int) -> None:
    shelf = TableMemory(Region(TableMemory.nbytes(layout, places=places)), layout, places=places)
    for shard in range(layout.shards):
        shelf.marks.reach(shard, 10 + shard)
        shelf.norms.tell(shard, 3, [float(shard)] * len(layout.parts[shard].pieces))
        shelf.handles.put(1 + shard, bytes([shard]) * 64)
        for place in range(places):
            shelf.versions.offer(shard, place, 20 + place)
            shelf.marks.keep(shard, place, True)
    shelf.handles.put(0, b"m" * 64)
    distinct({"ring": [s for place in shelf.ring for s in place], "buffers": shelf.buffers})
    for shard, part in enumerate(layout.parts):
        assert shelf.marks.reached(shard) == 10 + shard
        assert shelf.versions.held(shard) == {20 + place: place for place in range(places)}
        assert shelf.handles.get(1 + shard) == bytes([shard]) * 64
        assert shelf.norms.of(shard) == (3, [float(shard)] * len(part.pieces))
        assert all(shelf.marks.kept(shard, place) for place in range(places))
    assert shelf.handles.get(0) == b"m" * 64


@layouts
def test_clearing_voids_what_shards_told_each_other_and_no_value(layout: Any) -> None:
    shelf = TableMemory(Region(TableMemory.nbytes(layout, places=2)), layout, places=2)
    last = layout.shards - 1
    shelf.norms.tell(last, 3, [1.0] * len(layout.parts[last].pieces))
    shelf.marks.reach(last, 8), shelf.marks.keep(last, 1, True), shelf.handles.put(1 + last, b"e" * 64)
    shelf.versions.offer(last, 1, 8)
    shelf.ring[1][0].fill_(4.0)
    shelf.clear()
    assert shelf.norms.of(last)[0] == 0 and shelf.marks.reached(last) == -1
    assert not shelf.marks.kept(last, 1) and shelf.handles.get(1 + last) is None
    assert shelf.versions.find(last, 8) == 1 and bool((shelf.ring[1][0] == 4.0).all())


def test_a_mailbox_takes_as_much_as_it_says_each_way_and_its_words_stay() -> None:
    region = Region(Mailbox.nbytes())
    desk = Mailbox(region)
    desk.words[WAITS], desk.words[LEAF] = 1, 3
    assert [desk.notes.push(NOTE) for _ in range(DESK_NOTES + 1)] == [True] * DESK_NOTES + [False]
    assert [desk.portions.push((0, n, 0, 0, 0, 0)) for n in range(DESK_PORTIONS + 1)][-2:] == [True, False]
    assert (desk.words[WAITS], desk.words[LEAF]) == (1, 3)
    assert GRADIENTS * 8 < Mailbox.nbytes() <= region.nbytes
    assert [desk.portions.pop()[1] for _ in range(DESK_PORTIONS)] == list(range(DESK_PORTIONS))  # type: ignore[index]
    assert desk.notes.pop() == NOTE


def test_whoever_looks_at_a_mailbox_from_outside_sees_notes_gradients_and_whether_it_waits() -> None:
    region = Region(Mailbox.nbytes())
    desk = Mailbox(region)
    assert Mailbox.heard(region) == (0, False)
    desk.notes.push(NOTE), desk.notes.push(NOTE)
    desk.words[WAITS] = desk.words[GRADIENTS] = 1
    assert Mailbox.heard(region) == (3, True)
