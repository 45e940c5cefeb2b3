"""A batch method's parties in virtual time: what each command and portion takes, and what is lost with its party."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from syncline.batch import commands as c
from syncline.batch import messages as b
from syncline.batch.portions import Batch, Cancel
from syncline.cluster import Cluster, Compute, Cost, Link
from syncline.sim.batch_method_parties import Numbers, Play
from syncline.sim.clock import Clock

CLUSTER = Cluster(compute=Compute(base=0.0, per_example=1.0), card=Link(latency=0.25))
BATCH = Batch(examples=20, portions=5, drawn=None)


class Answers(Numbers):
    """Portions of four examples; notes who computed what."""

    def __init__(self) -> None:
        self.done: list[Any] = []

    def run(self, shard: int, commands: c.Program) -> tuple[float, ...]:
        self.done.append((shard, commands))
        return (float(shard),)

    def add(self, shard: int, message: b.Add) -> None:
        self.done.append((shard, message))

    def sum(self, task: b.Give) -> tuple[float, int]:
        self.done.append(task)
        return 1.0, 4 * (task.stop - task.start)

    def examples(self, task: b.Give, portion: int) -> int:
        return 4


class Coordinator:
    """Hears what comes in, and wants nothing but what the test says."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self.heard = clock, list[tuple[float, Any]]()

    def __getattr__(self, name: str) -> Callable[..., Iterable[b.Action]]:
        def hears(*what: Any) -> Iterable[b.Action]:
            self.heard.append((self._clock.now, (name, *what)))
            return ()

        return hears


def play(
    cluster: Cluster = CLUSTER, parts: tuple[int, ...] = (100, 100)
) -> tuple[Clock, Play, Coordinator, Answers]:
    clock, numbers = Clock(), Answers()
    coordinator: Any = Coordinator(clock)
    found = Play(clock, cluster, coordinator, numbers, list(parts), seed=0, learners=2, done=coordinator.done)
    for learner in (0, 1):
        found.join(learner, learner)
    run(clock)
    clock.now, coordinator.heard = 0.0, []
    return clock, found, coordinator, numbers


def run(clock: Clock, until: float = float("inf")) -> None:
    while clock._queue and clock._queue[0][0] <= until:
        clock.step()


def give(learner: int, task: int, start: int = 0, stop: int = 1, evaluation: int = 0) -> b.Give:
    return b.Give(learner, evaluation, task, start, stop, BATCH, slot=task)


def test_dots_read_each_vector_once_and_every_other_command_is_a_pass() -> None:
    dots = (c.Dot("xx", "x", "x"), c.Dot("xg", "x", "g"), c.Copy("old", "x"))  # x, g, and the copy
    clock, found, coordinator, _ = play(replace(CLUSTER, fold=Cost(per_byte=1.0), message=5.0), (100, 50))
    found.do([b.Run(1, dots)])
    run(clock)
    assert sorted(coordinator.heard) == [
        (0.25 + 5 + 3 * 50 + 0.25, ("ran", b.Ran(1, 1, (1.0,)))), (5 + 3 * 100, ("ran", b.Ran(0, 1, (0.0,))))
    ]  # fmt: skip


def test_a_shard_does_one_thing_after_another() -> None:
    clock, found, coordinator, numbers = play(
        replace(CLUSTER, fold=Cost(fixed=2.0), take=Cost(fixed=3.0)), (100,)
    )
    add = b.Add(0, "g", True)
    found.do([b.Run(1, (c.Copy("old", "x"),)), add])
    run(clock)
    assert [moment for moment, _ in coordinator.heard] == [2.0, 5.0]
    assert numbers.done[1] == (0, add)


def test_what_shards_were_doing_is_lost_with_them() -> None:
    clock, found, coordinator, numbers = play(replace(CLUSTER, fold=Cost(fixed=2.0)))
    found.do([b.Run(1, (c.Copy("old", "x"),))])
    run(clock, 1.0)
    found.lose_shards()
    found.do([b.Run(2, (c.Copy("old", "x"),))])
    run(clock)
    assert [what.number for _, (_, what) in coordinator.heard] == [2, 2] and len(numbers.done) == 2


def test_a_learner_reads_a_point_once_and_sends_the_sum_of_its_portions() -> None:
    cluster = replace(CLUSTER, card=Link(latency=0.25, setup=0.5), copy=Cost(fixed=1.0))
    clock, found, coordinator, _ = play(cluster)
    found.do([give(0, 7, 0, 2), give(0, 8, 2, 3)])
    run(clock)
    read = 0.25 + 0.75 + 1.0  # the task comes, then the point is read and copied
    first = read + 2 * 4
    second = first + 1.0 + 4  # after copying its sum; the point is there
    assert coordinator.heard == [
        (first + 0.75, ("answered", 0, b.Answered(0, 7, 1.0, 8))),
        (second + 0.75, ("answered", 0, b.Answered(0, 8, 1.0, 4))),
    ]
    learner = found.learners[0]
    assert (learner.times.compute, learner.times.steps, learner.steps) == (12.0, 2, 3)
    assert learner.times.communication == (read - 0.25) + 2 * 1.0


def test_another_point_is_read_again() -> None:
    clock, found, _, _ = play(replace(CLUSTER, card=Link(latency=0.25, setup=0.5)))
    found.do([give(0, 7), give(0, 8, evaluation=1)])
    run(clock)
    assert found.network.moved == 2 * 200 + 2 * 200, "two points and two sums"


def test_a_task_is_dropped_before_it_begins_or_before_its_next_portion() -> None:
    clock, found, coordinator, numbers = play()
    found.do([give(0, 7, 0, 3), give(0, 8)])
    run(clock, 2.0)  # in the middle of the first portion
    found.do([Cancel(0, 0, 8), Cancel(0, 0, 7), Cancel(9, 0, 7)])
    run(clock)
    assert [what for _, what in coordinator.heard] == [
        ("dropped", 0, b.Dropped(0, 8)), ("dropped", 0, b.Dropped(0, 7))
    ]  # fmt: skip
    assert not numbers.done and found.learners[0].times.compute == 4.0
    found.do([give(0, 9)])
    run(clock)
    assert coordinator.heard[-1][1] == ("answered", 0, b.Answered(0, 9, 1.0, 4))


def test_what_was_under_way_is_lost_with_its_learner() -> None:
    clock, found, coordinator, numbers = play()
    found.do([give(0, 7), give(1, 8)])
    run(clock, 4.6)  # sums are made, and on their way
    assert len(numbers.done) == 2 and not coordinator.heard
    found.leave(0)
    run(clock)
    assert [what for _, what in coordinator.heard] == [("answered", 1, b.Answered(0, 8, 1.0, 4))]
    assert [gone.number for gone in found.gone] == [0]


def test_iterations_and_the_end_are_the_runs() -> None:
    _, found, coordinator, _ = play()
    over = b.Over(None)
    found.do([over])
    assert coordinator.heard == [(0.0, ("done", over))]
