"""Virtual time: actions in order, whoever plans them; work one piece after another; pauses that are paid once."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.sim.clock import Clock, ClockPause, Worker, last_of

plans = st.lists(st.tuples(st.booleans(), st.integers(-3, 6), st.integers(0, 3)), max_size=8)


@given(plans)
def test_actions_happen_in_the_order_of_their_time_then_of_their_planning(
    plan: list[tuple[bool, int, int]],
) -> None:
    """Each may plan others: at a moment (one that is past is now), or after a while."""
    clock, happened, planned = Clock(), [], [0]

    def act(due: float, number: int, depth: int) -> None:
        assert clock.now == due
        happened.append((due, number))
        if depth:
            plan_all(depth - 1)

    def plan_all(depth: int) -> None:
        for fixed, moment, more in plan[:3] if planned[0] else plan:
            planned[0] += 1
            number = planned[0]
            if fixed:
                due = max(clock.now, moment)
                clock.at(moment, partial(act, due, number, min(more, depth)))
            else:
                due = clock.now + abs(moment)
                clock.after(abs(moment), partial(act, due, number, min(more, depth)))

    plan_all(2)
    while clock.step():
        pass
    assert happened == sorted(happened) and len(happened) == planned[0] == clock.events


def test_a_run_ends_when_nobody_is_left_or_nothing_to_do() -> None:
    clock, going = Clock(), {1, 2}
    clock.after(2.0, lambda: going.discard(2))
    clock.after(1.0, lambda: going.discard(1))
    clock.after(3.0, lambda: going.add(3))
    clock.run(going)
    assert not going and (clock.now, clock.events) == (2.0, 2)
    clock.run({"somebody"})
    assert going == {3} and clock.now == 3.0 and not clock.step()


def test_the_last_of_several_events_does_it() -> None:
    done: list[int] = []
    happened = last_of(3, lambda: done.append(1))
    happened(), happened()
    assert not done
    happened(), happened()
    assert done == [1]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=12))
def test_a_worker_does_one_thing_after_another(jobs: list[tuple[int, int]]) -> None:
    clock, ends = Clock(), []
    worker = Worker(clock)
    begin = 0.0
    for wait, seconds in jobs:
        begin += wait
        clock.at(begin, partial(worker.do, float(seconds), lambda: ends.append(clock.now)))
    while clock.step():
        pass
    free, begin = 0.0, 0.0
    for (wait, seconds), end in zip(jobs, ends, strict=True):
        begin += wait
        assert end - seconds >= max(begin, free) - 1e-9, "before it was asked, or while it did something else"
        assert end == max(begin, free) + seconds, "it stood idle"
        free = end


@pytest.mark.parametrize("working", [True, False])
def test_a_pause_holds_and_work_that_is_under_way_is_done_so_much_later(working: bool) -> None:
    pause = ClockPause()
    pause.working = working
    pause.begin(10.0, 2.0)
    assert pause.until == 12.0
    pause.begin(11.0, 3.0)  # paused again meanwhile
    assert pause.until == 15.0
    assert [pause.owed(), pause.owed()] == [5.0 if working else 0.0, 0.0]
    pause.begin(20.0, 1.0)
    assert pause.until == 21.0
