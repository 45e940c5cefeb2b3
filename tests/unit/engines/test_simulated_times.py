"""The account of a simulated run's time."""

from __future__ import annotations

import pytest

from syncline.engines.simulated_times import LearnerTimes, SimulatedTimes


def test_overlap_is_of_computing_and_what_was_seen_of_communication() -> None:
    assert LearnerTimes(compute=3.0, communication=1.0, waiting=96.0).overlap == 0.75
    assert LearnerTimes(waiting=2.0).overlap == 1.0, "nothing stood in the way"
    assert LearnerTimes(communication=2.0).overlap == 0.0


def test_a_run_s_times_are_the_sums_of_its_learners() -> None:
    fast = LearnerTimes(compute=6.0, communication=0.0, waiting=0.5, steps=4)
    slow = LearnerTimes(compute=2.0, communication=8.0, waiting=0.25, steps=1)
    run = SimulatedTimes(learners={0: fast, 3: slow})
    assert run.total == LearnerTimes(compute=8.0, communication=8.0, waiting=0.75, steps=5)
    assert run.overlap == pytest.approx(0.5), "not the mean over learners"
    assert SimulatedTimes().total == LearnerTimes() and SimulatedTimes().overlap == 1.0
