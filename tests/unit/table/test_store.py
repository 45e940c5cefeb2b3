"""The ring of a shard's versions: readers never see one that is being written, kept ones stay as they were."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from syncline.table.layout import Layout, lay_out
from syncline.table.store import WRITTEN, OnePlace, OwnMemory, Store, VersionMemory, fill, places_for


def layout_of(shards: int = 1) -> Layout:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    return lay_out(model, [model.parameters()], cuttable=True, shards=shards)[0]


class Watched(VersionMemory):
    """One number in each place; what is offered is remembered, and readers are there if the test says so."""

    def __init__(self, places: int) -> None:
        self.places: list[list[Tensor]] = [[torch.zeros(1)] for _ in range(places)]
        self.offered = [0] * places
        self.reading = False
        self.held: set[int] = set()

    def offer(self, place: int, version: int) -> None:
        self.offered[place] = version

    def being_read(self) -> bool:
        return self.reading

    def kept(self, place: int) -> bool:
        return place in self.held


STEPS = st.lists(
    st.tuples(st.booleans(), st.sets(st.integers(0, 3)), st.sampled_from(["step", "step", "fill"])),
    max_size=12,
)


@settings(max_examples=50)
@given(st.integers(1, 4), st.booleans(), st.booleans(), STEPS)
def test_what_is_offered_holds_its_version_and_is_not_written_while_it_may_be_read(
    places: int, movable: bool, keep: bool, steps: list[tuple[bool, set[int], str]]
) -> None:
    memory = Watched(places)
    store = Store(memory, 0, movable=movable)
    store.keep(keep)
    right = {0: 0.0}  # the value of every version
    for reading, held, what in steps:
        memory.reading, memory.held = reading, held & set(range(places))
        before = store.version
        if what == "fill":
            right[before] = before + 1000.0
            store.fill([torch.tensor([right[before]])])
        else:
            store.prepare()
            assert float(store.segments[0]) == right[before], (
                "the next version begins with the newest's values"
            )
            readable = [place for place, version in enumerate(memory.offered) if version != WRITTEN]
            assert all(memory.places[place] is not store.segments for place in readable)
            if places > 1 and (reading or keep):
                assert before in memory.offered or movable is False, "readers go on with the newest"
            right[before + 1] = before + 1.0
            store.segments[0].fill_(right[before + 1])
            store.complete()
            assert store.version == before + 1
        for place, version in enumerate(memory.offered):
            assert version == WRITTEN or float(memory.places[place][0]) == right[version]
        assert store.version in memory.offered and store.of(store.version) is not None


@given(st.integers(0, 3), st.integers(1, 10))
def test_as_many_older_versions_stay_as_a_delay_reads(delay: int, updates: int) -> None:
    memory = Watched(places_for(delay))
    store = Store(memory, 0, movable=True)
    store.keep(True)
    for _ in range(updates):
        store.prepare()
        store.segments[0].fill_(store.version + 1)
        store.complete()
        for version in range(max(0, store.version - delay), store.version + 1):
            assert float(store.of(version)[0]) == version


def test_without_readers_the_next_version_is_made_in_place() -> None:
    memory = Watched(3)
    store = Store(memory, 5, movable=True)
    first = store.segments
    store.prepare()
    assert store.segments is first and memory.offered == [WRITTEN] * 3
    store.complete()
    assert memory.offered == [6, WRITTEN, WRITTEN]
    with pytest.raises(ValueError, match="not in list"):
        store.of(5)


def test_a_place_that_is_read_for_long_is_written_last() -> None:
    memory = Watched(3)
    store = Store(memory, 0, movable=True)
    memory.reading, memory.held = True, {1}
    for version in (1, 2, 3):
        store.prepare()
        store.complete()
        assert memory.offered[1] == WRITTEN and store.version == version


@pytest.mark.parametrize("shards", [1, 2])
def test_a_shards_part_is_filled_by_entry_and_lies_in_one_place_where_that_is_there_already(
    shards: int,
) -> None:
    layout = layout_of(shards)
    values = {number: torch.randn(entry.shape) for number, entry in enumerate(layout.parameters.entries)}
    whole = layout.parameters.segments(torch.zeros(layout.parameters.nbytes, dtype=torch.uint8))
    for shard in range(shards):
        memory = OwnMemory(layout, shard, 2)
        assert len(memory.places) == 2 and not memory.being_read()
        fill(memory.places[1], layout, shard, values)
        assert not any(bool(segment.any()) for segment in memory.places[0])
        fill(OnePlace(layout, shard, whole).places[0], layout, shard, values)
    for view, value in zip(layout.parameters.views(whole), values.values(), strict=True):
        assert torch.equal(view, value)
