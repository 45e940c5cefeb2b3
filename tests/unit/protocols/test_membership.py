"""Who is there, who has started, how far each has come: counted, against counting."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from syncline.protocols.membership import Members


def test_members_have_started_when_every_initial_one_has_come_or_gone() -> None:
    members = Members({1: 0, 2: 1, 3: 2})
    members.join(9, 3, 0)
    members.join(2, 1, 0)
    assert members.leave(1) is None  # lost before it came
    assert not members.started and members.initial == 3 and len(members.live) == 2
    members.join(3, 2, 5).resting = True
    assert members.started and 3 in members.live and 1 not in members.live
    assert [member.learner for member in members.active()] == [9, 2]
    assert members.live[3].next_iteration == 5
    left = members.leave(9)
    assert left is not None and left.rank == 3
    assert members.leave(9) is None and members.started


moves = st.lists(
    st.tuples(
        st.sampled_from(["join", "leave", *["step"] * 4, "rest", "rouse", "restart"]), st.integers(0, 3)
    )
)


@given(moves)
def test_the_slowest_and_the_present_are_those_that_counting_finds(script: list[tuple[str, int]]) -> None:
    members = Members({})
    for move, learner in script:
        there, slowest = members.live.get(learner), members.slowest
        if move == "join" and there is None:
            assert members.join(learner, learner, 0).clock == (slowest or 0)  # M8
        elif move == "leave":
            members.leave(learner)
        elif move == "restart":
            members.restart(7)
            assert all((each.clock, each.next_iteration) == (0, 7) for each in members.live.values())
        elif there is not None and move == "step":
            members.step(there)
        elif there is not None and move == "rest":
            members.rest(there)
        elif there is not None and there.resting:
            members.rouse(there)
            assert there.clock >= (slowest or 0)  # nobody waits for what it missed
        active = [each.clock for each in members.live.values() if not each.resting]
        assert (members.slowest, members.present) == (min(active, default=None), len(active))


def test_a_warm_start_counts_learners_that_come_later_as_initial_ones() -> None:
    members = Members({5: 0}, learners=8)
    assert members.initial == 8 and not members.started
    members.excuse(5)
    assert members.started and Members({}).started


def test_who_rested_goes_on_beside_the_slowest_and_steps_while_it_rests_count() -> None:
    members = Members({})
    behind, ahead = members.join(1, 0, 0), members.join(2, 1, 0)
    members.rest(behind)
    members.step(ahead), members.step(ahead), members.step(behind)
    members.rouse(behind)
    assert behind.clock == 2 == members.slowest
    members.rest(behind)
    for _ in range(3):
        members.step(behind)
    members.rouse(behind)
    assert behind.clock == 5 and members.slowest == 2
