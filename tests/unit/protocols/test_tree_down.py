"""Versions down a tree (R7, R8, M14): fetched once, passed on unasked, swapped by pointer."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.protocols.tree_down import Buffers, Downcast, Fetch, Give, Relay, Send


def test_a_version_comes_from_above_once_and_answers_all_who_ask() -> None:
    relay = Relay()
    assert relay.ask(1, 10, 5) == [Fetch(5, False)]
    assert relay.ask(2, 20, 5) == []
    assert relay.ask(3, 30, 4) == []
    assert relay.arrived(6) == [Give(1, 10, 6), Give(2, 20, 6), Give(3, 30, 6)]  # a newer one does
    assert relay.ask(4, 40, 6) == [Give(4, 40, 6)]


def test_exact_versions_are_fetched_from_the_oldest_on() -> None:
    relay = Relay(keep=2)
    assert relay.ask(1, 1, 3, exact=True) == [Fetch(3, True)]
    assert relay.ask(2, 1, 4, exact=True) == []
    assert relay.arrived(3) == [Give(1, 1, 3), Fetch(4, True)]
    assert relay.arrived(4) == [Give(2, 1, 4)]
    assert relay.ask(3, 1, 3, exact=True) == [Give(3, 1, 3)] and relay.versions == [3, 4]


def test_what_was_asked_of_a_lost_node_is_asked_again() -> None:
    relay = Relay()
    relay.ask(1, 1, 2)
    assert relay.moved() == [Fetch(2, False)]
    relay.lose(1)
    assert relay.arrived(2) == []


@given(st.integers(0, 10**9), st.integers(1, 5), st.booleans())
def test_everybody_who_asks_gets_one_version_as_new_as_it_may_read(
    seed: int, children: int, exact: bool
) -> None:
    draw, relay = random.Random(seed), Relay(keep=3)
    root, fetches, owed, fetched = 0, [], {}, 0
    for number in range(60):
        out = []
        if draw.random() < 0.3:
            root += 1
        if fetches and draw.random() < 0.5:
            wanted = fetches.pop()
            out += relay.arrived(wanted.version if wanted.exact else root)
        child = draw.randrange(children)
        if child not in owed:
            owed[child] = (number, root)
            out += relay.ask(child, number, root, exact=exact)
        for each in out:
            if isinstance(each, Fetch):
                fetched += 1
                assert not fetches, "one at a time"
                fetches.append(each)
            else:
                asked, version = owed.pop(each.child)
                assert each.number == asked
                assert each.version == version if exact else version <= each.version <= root
    assert fetched <= root + 1, "each version at most once"


def test_versions_flow_down_unasked_and_a_slow_child_misses_some() -> None:
    cast = Downcast([1, 2])
    assert cast.arrived(1) == [Send(1, 1), Send(2, 1)]
    assert cast.arrived(2) == []
    assert cast.sent(1) == [Send(1, 2)]
    assert cast.arrived(3) == []
    assert cast.sent(2) == [Send(2, 3)]
    assert cast.join(3) == [Send(3, 3)]
    cast.lose(1)
    assert cast.sent(2) == []


def test_a_learner_swaps_without_waiting_and_is_not_passed_by_for_ever() -> None:
    buffers = Buffers(0)
    buffers.begin(1)
    assert buffers.swap() == 0, "half filled: it goes on with what it has"
    buffers.complete()
    assert not buffers.room, "held until it is used"
    with pytest.raises(AssertionError, match="version 2 would overwrite 1"):
        buffers.begin(2)
    assert buffers.swap() == 1 and buffers.room


def test_what_does_not_come_leaves_room_for_another() -> None:
    buffers = Buffers(0)
    buffers.begin(3)
    assert buffers.fills(3) and not buffers.fills(2) and not buffers.room and buffers.swap() == 0
    buffers.drop()
    assert buffers.room and not buffers.fills(3)
    buffers.begin(5)
    buffers.complete()
    assert buffers.swap() == 5


@given(st.integers(0, 10**9))
def test_a_learner_computes_on_whole_versions_that_never_go_back(seed: int) -> None:
    draw, buffers, newest, held, behind = random.Random(seed), Buffers(0), 0, 0, 0
    for _ in range(80):
        newest += draw.random() < 0.6
        if buffers._filling is not None and draw.random() < 0.5:
            buffers.complete()
        elif buffers.room and draw.random() < 0.7:
            buffers.begin(newest)
        if draw.random() < 0.3:
            before, there = held, buffers.next
            held = buffers.swap()
            assert held >= before and (there is None or held == max(before, there))
            behind = behind + 1 if there is None else 0
