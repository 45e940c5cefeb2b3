"""Which bytes of a machine's memory belong to which shards, and where in a lane what lies."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from syncline.engines.local.host_interface import TableHere
from syncline.engines.local.shared_memory import Region
from syncline.engines.local.table_memory import TableMemory
from syncline.engines.ray.relay_memory import Table, spans_of
from tests.unit.engines.ray.doubles import GEOMETRY, PLACES, Relayed, layout_over


@given(st.integers(1, 6), st.data())
def test_shards_share_a_table_out_without_gaps_and_neighbours_are_one_span(
    shards: int, data: st.DataObject
) -> None:
    layout = layout_over(shards)
    chosen = data.draw(st.sets(st.integers(0, shards - 1)))
    of = {shard: spans_of(layout, [shard]) for shard in range(shards)}
    used = sum(
        n * size for n, size in zip(layout.parameters.lengths, layout.parameters.item_sizes, strict=True)
    )
    every = sorted(span for spans in of.values() for span in spans)
    assert sum(high - low for low, high in every) == used
    assert all(before[1] <= after[0] for before, after in pairwise(every))
    found = spans_of(layout, sorted(chosen))
    assert sum(high - low for low, high in found) == sum(
        high - low for shard in chosen for low, high in of[shard]
    )
    assert all(
        any(low <= start and stop <= high for low, high in found)
        for shard in chosen
        for start, stop in of[shard]
    )
    assert all(before[1] < after[0] for before, after in pairwise(found))


def test_a_machine_beyond_the_tables_shards_has_none_of_it() -> None:
    layout = layout_over(2)
    assert spans_of(layout, [2, 3]) == []


def test_what_shards_elsewhere_had_offered_is_void_and_what_those_here_had_is_kept() -> None:
    machine = Relayed(0, (0, 1))
    region = Region(TableMemory.nbytes(machine.layout, places=PLACES))
    shelf = TableMemory(region, machine.layout, places=PLACES)
    for shard in (0, 1):
        for place in range(PLACES):
            shelf.versions.offer(shard, place, place)
    table = Table(TableHere(0, machine.layout, region), GEOMETRY, machine.running.sites, 0)
    assert (table.here, table.elsewhere) == ([0], [1])
    assert [shelf.versions.find(0, version) for version in range(PLACES)] == list(range(PLACES))
    assert [shelf.versions.find(1, version) for version in range(PLACES)] == [None] * PLACES


def test_a_table_of_fewer_shards_concerns_fewer_machines() -> None:
    machine = Relayed(0, (0, 1, 2))
    machine.layout = layout_over(2)
    table = machine.table()
    assert table.servers() == [0, 1] and table.spans[2] == []
    assert table.spans[1] == table.parts[1] == spans_of(machine.layout, [1])
    assert table.first == PLACES * machine.layout.parameters.nbytes
    assert table.end - table.first == machine.layout.buffers.nbytes


def test_slots_of_a_lane_follow_its_words_and_a_text_goes_with_its_length() -> None:
    lane = Relayed(0, (0, 1)).lane(7)
    assert lane.slot(1) - lane.slot(0) == lane.at.end and lane.inbox == lane.slot(2)
    lane.lane.slots[1].write_options(b"[{}, {}]")
    low, high = lane.text(1, lane.at.options)
    assert low == lane.slot(1) + lane.at.options
    assert bytes(lane.region.bytes[low + 8 : high]) == b"[{}, {}]"
