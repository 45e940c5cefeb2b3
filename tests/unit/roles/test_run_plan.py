"""What follows from a run's description alone."""

from __future__ import annotations

from syncline.dial import Course
from syncline.roles.run_plan import RunPlan
from syncline.topologies import Servers, Trees


def plan(dials: str | dict[int, str], **options: object) -> RunPlan:
    return RunPlan(course=Course.of(dials), learners=2, **options)  # type: ignore[arg-type]


def test_versions_are_kept_for_the_dial_that_runs_furthest_ahead() -> None:
    assert (plan("hardsync").delay, plan("hardsync").kept) == (0, 0)
    assert (plan("delayed:3").delay, plan("delayed:3").kept) == (3, 7)
    turning = plan({0: "hardsync", 4: "delayed:2", 9: "delayed:1"})
    assert (turning.delay, turning.kept) == (2, 5)


def test_the_servers_of_a_tree_are_those_at_its_root() -> None:
    root = Servers(3, True)
    assert plan("hardsync", topology=Trees(fan_in=4, root=root)).servers is root
    assert plan("hardsync", topology=root).servers is root
