"""Cores with queues and slices: who runs where, that all work is done, and never faster than there are cores."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.cluster import Cluster
from syncline.errors import UsageError
from syncline.sim.machine_cores import Queues

Plan = list[tuple[float, float, int]]  # (begin, seconds, who)


def play(queues: Queues, plan: Plan) -> dict[int, float]:
    """When each job is done; a process's next job begins when its last is done, if that is later."""
    waiting = sorted((begin, index) for index, (begin, _, _) in enumerate(plan))
    busy: set[int] = set()
    ended: dict[int, float] = {}
    now = 0.0
    while waiting or queues.next() is not None:
        ready = next((entry for entry in waiting if plan[entry[1]][2] not in busy), None)
        moment = queues.next()
        if ready is not None and (moment is None or max(now, ready[0]) <= moment):
            now = max(now, ready[0])
            waiting.remove(ready)
            _, seconds, who = plan[ready[1]]
            busy.add(who)
            queues.add(now, seconds, ready[1], who)
        else:
            assert moment is not None
            assert moment >= now
            now = moment
            if (done := queues.done(now)) is not None:
                ended[done] = now
                busy.remove(plan[done][2])
    return ended


jobs = st.tuples(st.floats(0, 10), st.floats(0.01, 5), st.integers(0, 4))


@given(
    plan=st.lists(jobs, min_size=1, max_size=12),
    cores=st.integers(1, 3),
    slice=st.floats(0.05, 3),
    spin=st.floats(0, 3),
)
def test_all_work_is_done_and_no_core_does_two_things(
    plan: Plan, cores: int, slice: float, spin: float
) -> None:
    queues = Queues(cores, slice=slice, spin=spin)
    ended = play(queues, plan)
    assert ended.keys() == set(range(len(plan)))
    for index, (begin, seconds, _) in enumerate(plan):
        assert ended[index] >= begin + seconds - 1e-6
    work, last = sum(seconds for _, seconds, _ in plan), max(ended.values())
    assert work <= cores * (last - min(begin for begin, _, _ in plan)) + 1e-6
    for who in range(5):
        had = sum(seconds for _, seconds, each in plan if each == who)
        assert queues.served(last, who) == pytest.approx(had)


@given(plan=st.lists(jobs, min_size=1, max_size=5, unique_by=lambda job: job[2]))
def test_with_a_core_for_each_nobody_waits(plan: Plan) -> None:
    ended = play(Queues(5, slice=0.1, spin=0.0), plan)
    for index, (begin, seconds, _) in enumerate(plan):
        assert ended[index] == pytest.approx(begin + seconds)


def test_slices_take_turns() -> None:
    ended = play(Queues(1, slice=1.0, spin=0.0), [(0.0, 2.5, 0), (0.5, 1.0, 1)])
    assert ended == {1: 2.0, 0: 3.5}


def test_who_wakes_stays_where_it_was_behind_whoever_computes_there() -> None:
    plan = [
        (0.0, 1.0, 0),  # on the first core
        (0.0, 4.0, 1),  # on the second
        (1.0, 0.5, 2),  # on the first: the other is taken, and its learner waits there
        (1.5, 2.0, 0),
        (4.0, 1.0, 1),  # ends at 5 on the second
        (2.0, 0.5, 2),  # behind learner 0, though no slice is over
    ]
    ended = play(Queues(2, slice=3.0, spin=10.0), plan)
    assert ended[2] == 1.5
    assert ended[3] == 3.5
    assert ended[5] == 4.0


def test_a_core_that_nobody_keeps_is_used() -> None:
    plan = [(0.0, 1.0, 0), (0.0, 4.0, 1), (2.0, 1.0, 2), (2.0, 1.0, 3)]
    assert play(Queues(2, slice=9.0, spin=0.5), plan) == {0: 1.0, 1: 4.0, 2: 3.0, 3: 4.0}


def test_work_moves_to_a_core_when_its_keeper_sleeps() -> None:
    plan = [(0.0, 5.0, 0), (0.0, 1.0, 1), (0.5, 1.0, 2)]
    ended = play(Queues(2, slice=9.0, spin=1.0), plan)
    assert ended[2] == 3.0  # it was behind the long one until the other core's keeper slept, at 2


def test_removed_work_gives_its_place_to_the_next() -> None:
    queues = Queues(1, slice=9.0, spin=0.0)
    queues.add(0.0, 5.0, "a", 0)
    queues.add(1.0, 1.0, "b", 1)
    queues.remove(2.0, "a")
    assert queues.next() == 3.0
    assert queues.done(3.0) == "b"
    assert queues.next() is None


def test_bad_slices_are_refused() -> None:
    with pytest.raises(UsageError, match="slice"):
        Cluster(slice=0.0)
    with pytest.raises(UsageError, match="spin"):
        Cluster(spin=-1.0)
