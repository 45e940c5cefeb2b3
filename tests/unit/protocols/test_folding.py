"""Which gradients make the next update (M3), and whose options it uses (M4)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.dial import Sync
from syncline.protocols.folding import Folding, Ticket, leader
from syncline.protocols.membership import Members

tickets = st.builds(
    Ticket, st.integers(0, 5), st.integers(0, 5), st.integers(0, 9), st.just(0), st.integers(0, 4), st.just(1)
)


@given(st.lists(tickets, min_size=1))
def test_the_leader_is_furthest_along_then_of_lowest_rank(made: list[Ticket]) -> None:
    """M4."""
    found = leader(made)
    assert found.step == max(ticket.step for ticket in made)
    assert found.rank == min(ticket.rank for ticket in made if ticket.step == found.step)


def test_folding_waits_for_the_start_then_for_the_quorum() -> None:
    members, folding = Members({1: 0, 2: 1}), Folding(Sync.parse("softsync:1"))
    members.join(1, 0, 0)
    first, second = Ticket(1, 0, 1, 0, 0, 1), Ticket(2, 1, 1, 0, 0, 1)
    folding.add(first)
    assert folding.ready(0, members) == [] and folding.pending == 1
    members.join(2, 1, 0)
    assert folding.ready(0, members) == []
    folding.add(second)
    assert folding.ready(0, members) == [first, second]
    assert folding.pending == 0 and folding.rest(0) == []


def crew(dial: str, learners: int) -> tuple[Members, Folding]:
    members = Members({learner: learner for learner in range(learners)})
    for learner in range(learners):
        members.join(learner, learner, 0)
    return members, Folding(Sync.parse(dial))


def ticket(learner: int, *, number: int = 1, iteration: int = 0) -> Ticket:
    return Ticket(learner, learner, number, 0, 0, 1, iteration)


def test_a_round_of_lockstep_is_of_one_iteration_and_folded_by_rank() -> None:
    members, folding = crew("delayed:1", 3)
    ahead = ticket(1, number=2, iteration=1)
    for each in (ticket(2), ticket(1), ahead):
        folding.add(each)
    assert folding.ready(0, members) == [] and folding.missing(0, members) == [0]
    folding.add(ticket(0))
    assert folding.ready(0, members) == [ticket(0), ticket(1), ticket(2)]
    assert folding.pending == 1 and folding.unfolded(1) == [2] and folding.unfolded(2) == []
    assert folding.missing(1, members) == [0, 2]


def test_lockstep_does_not_wait_for_who_rests_and_keeps_what_it_brought() -> None:
    members, folding = crew("hardsync", 3)
    folding.add(ticket(0))
    members.rest(members.live[0])
    folding.add(ticket(1))
    assert folding.ready(0, members) == []  # two gradients for two that are present, but another is missing
    members.rest(members.live[2])
    assert folding.ready(0, members) == [ticket(0), ticket(1)]


@pytest.mark.parametrize(
    ("dial", "resting", "needed"),
    [
        ("async", 0, 1),
        ("softsync:1", 0, 4),
        ("softsync:2", 0, 2),
        ("softsync:1", 2, 4),  # nobody is waited for, so a split does not shrink
        ("backup:1", 0, 3),
        ("backup:1", 2, 2),  # the first of those that are there
    ],
)
def test_a_queue_is_folded_at_its_quorum(dial: str, resting: int, needed: int) -> None:
    members, folding = crew(dial, 4)
    for learner in range(resting):
        members.rest(members.live[learner])
    for count in range(1, needed + 1):
        assert folding.ready(0, members) == []
        folding.add(ticket(3, number=count))
    assert folding.unfolded(3) == list(range(1, needed + 1))
    assert [each.number for each in folding.ready(0, members)] == list(range(1, needed + 1))
