"""A simulated run's memory: a draft is free when every shard has freed it, a version is read when every shard has sent it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from syncline.ports import WRITTEN, Draft, Reading
from syncline.sim.clock import Clock
from syncline.sim.owned_memory import ShardMemory, SimLane, SimTable, Traffic, poison
from syncline.table.layout import DTYPES, Layout, lay_out

CPU = torch.device("cpu")


class Model(nn.Module):
    """With buffers, and a parameter that no optimizer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(20, 9), nn.BatchNorm1d(9), nn.Linear(9, 5))
        self.held = nn.Parameter(torch.ones(3), requires_grad=False)


def layout_of(shards: int) -> Layout:
    model = Model()
    return lay_out(model, [model.layers.parameters()], cuttable=True, shards=shards)[0]


# -- drafts --------------------------------------------------------------------------------------------------

moves = st.lists(
    st.tuples(st.sampled_from(["fill", "publish", "free", "wait"]), st.integers(0, 9), st.integers(0, 3))
)


@given(st.integers(1, 3), st.integers(1, 3), moves)
def test_a_draft_is_free_when_its_learner_knows_that_all_shards_have_freed_it(
    slots: int, shards: int, moves: list[tuple[str, int, int]]
) -> None:
    clock = Clock()
    lane = Traffic(slots, shards, clock)
    held: list[int] = []  # places that are being filled
    known: dict[
        int, dict[int, float]
    ] = {}  # published ticket -> shard -> when the learner knows that it is free
    place_of: dict[int, int] = {}
    for number, (what, which, seconds) in enumerate(moves):
        out = {p for ticket, p in place_of.items() if max(known[ticket].values()) > clock.now}
        free = set(range(slots)) - out - set(held)
        assert lane.free_slot() == min(free, default=None)
        assert lane.delivered() == (not out)
        if what == "fill" and free:
            place = min(free)
            lane.hold(place)
            held.append(place)
            for ticket in [ticket for ticket, p in place_of.items() if p == place]:
                del place_of[ticket]
        elif what == "publish" and held:
            place = held.pop(which % len(held))
            lane.numbers[place] = number
            place_of[number], known[number] = place, dict.fromkeys(range(shards), math.inf)
        elif what == "free" and place_of:
            ticket = sorted(place_of)[which % len(place_of)]
            shard = which % shards
            lane.freed[shard, ticket] = known[ticket][shard] = clock.now + seconds
        elif what == "wait":
            clock.now += seconds
    assert {number for _, number in lane.freed} <= set(place_of), "what is filled anew is forgotten"


def test_over_a_tree_one_gradient_goes_to_the_leaf_at_a_time() -> None:
    lane = Traffic(2, 1, Clock())
    lane.sending.add(3)
    assert lane.free_slot() is None
    lane.sending.clear()
    assert lane.free_slot() == 0


def test_a_learner_is_woken_when_it_will_know() -> None:
    clock, woken = Clock(), list[float]()
    lane = Traffic(3, 1, clock)
    clock.now = 2.0
    lane.freed = {(0, 1): 1.0, (0, 2): 2.0, (0, 3): 3.5}
    lane.plan(lambda: woken.append(clock.now))
    while clock.step():
        pass
    assert woken == [3.5], "what it knows by now wakes nobody"


# -- readings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shards", "released", "number", "version"),
    [
        (1, {}, 4, None),
        (1, {0: (3, 7)}, 4, None),
        (1, {0: (4, 7)}, 4, 7),
        (1, {0: (6, 9)}, 4, 9),
        (2, {0: (4, 7)}, 4, None),
        (2, {0: (4, 7), 1: (3, 7)}, 4, None),
        (2, {0: (4, 7), 1: (4, 7)}, 4, 7),
    ],
)
def test_a_version_is_read_when_all_shards_have_released_the_ticket(
    shards: int, released: dict[int, tuple[int, int]], number: int, version: int | None
) -> None:
    lane = Traffic(2, shards, Clock())
    lane.released = {shard: (ticket, Reading(made)) for shard, (ticket, made) in released.items()}
    reading = lane.reading(number)
    assert (reading.version if reading is not None else None) == version


def test_shards_that_release_one_ticket_with_two_versions_are_caught() -> None:
    lane = Traffic(2, 2, Clock())
    lane.released = {0: (4, Reading(7)), 1: (4, Reading(8))}
    with pytest.raises(AssertionError, match=r"ticket 4 with versions \[7, 8\]"):
        lane.reading(4)


# -- tables and shards ---------------------------------------------------------------------------------------


def test_a_table_begins_with_what_was_published() -> None:
    layout = layout_of(2)
    table = SimTable(layout, CPU)
    flats = (layout.parameters, layout.buffers, layout.others)
    first = [[torch.full(each.shape, 2.0).to(DTYPES[each.dtype]) for each in flat.entries] for flat in flats]
    table.begin(Draft(first[0], first[1], 0, first[2]))
    lies = [layout.parameters.views(table.weights), table.buffers, table.others]
    for mine, values in zip(lies, first, strict=True):
        assert mine and all(map(torch.equal, mine, values))
    assert len(table.part_bytes) == 2 and min(table.part_bytes) > 0
    assert sum(table.part_bytes) == sum(segment.nbytes for segment in table.weights)


def test_a_shard_shows_the_versions_it_offers_and_says_which_are_whole() -> None:
    layout = layout_of(2)
    memory, made = ShardMemory(SimTable(layout, CPU), 1, 2), list[int]()
    memory.made = made.append
    for place, version in ((0, 5), (1, WRITTEN), (1, 6), (0, WRITTEN), (0, 7)):
        memory.offer(place, version)
    assert made == [5, 6, 7]
    assert memory.of(7) is memory.places[0] and memory.of(6) is memory.places[1]
    whole = layout.parameters.segments(torch.zeros(layout.parameters.nbytes, dtype=torch.uint8))
    for view in memory.views(whole):
        view.fill_(1.0)
    mine = sum(piece.stop - piece.start for piece in layout.parts[1].pieces)
    assert sum(float(segment.sum()) for segment in whole) == mine > 0, "its pieces, and nothing between them"


def test_what_a_learner_sends_is_not_what_it_fills_next() -> None:
    lane = SimLane(layout_of(1), 2, Clock())
    memories = [slot.memory.data_ptr() for slot in (*lane.slots, *lane.sent)]
    assert len(set(memories)) == 4


def test_poison_is_no_number_and_leaves_whole_numbers() -> None:
    tensors = [torch.ones(3), torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.float64)]
    poison(tensors)
    assert [bool(torch.isnan(each).all()) for each in tensors] == [True, False, True]
