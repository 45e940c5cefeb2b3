"""Simulated collectives: all get the sum in rank order, when a ring over the slowest link is over, one ring at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from syncline.cluster import Cluster, Link
from syncline.sim.allreduce import BROADCAST, Rings
from syncline.sim.clock import Clock

CARDS = Cluster(card=Link(latency=0.5, bandwidth=8.0, setup=0.25), memory=Link(latency=0.125))


def rings(learners: int = 2, cluster: Cluster = CARDS) -> tuple[Clock, Rings, list[float]]:
    clock, woken = Clock(), list[float]()
    return clock, Rings(clock, cluster, learners, lambda: woken.append(clock.now)), woken


def run(clock: Clock) -> None:
    while clock.step():
        pass


def test_all_have_the_sum_when_the_ring_is_over() -> None:
    clock, found, woken = rings(3)
    buffers = [torch.full((3,), float(10**rank)) for rank in range(3)]
    for rank, moment in ((2, 1.0), (0, 2.0), (1, 4.0)):  # in any order
        clock.now = moment
        ring = found.start(rank, buffers[rank])
        assert ring.done is False
    run(clock)
    seconds = 0.25 + 4 * (0.5 + 4 / 8)  # twice two hops of a third of twelve bytes
    assert woken == [4.0 + seconds] and ring.done and ring.met == 4.0
    assert all(torch.equal(each, torch.full((3,), 111.0)) for each in buffers)


def test_a_broadcast_gives_all_what_the_first_has() -> None:
    clock, found, _ = rings()
    buffers = [torch.full((2,), 5.0 + rank) for rank in range(2)]
    for rank in (1, 0):
        found.start(rank, buffers[rank], BROADCAST)
    run(clock)
    assert buffers[0].tolist() == buffers[1].tolist() == [5.0, 5.0]


def test_rounding_does_not_depend_on_who_came_when() -> None:
    values, sums = [1e8, 1.0, -1e8, 1.0], set[float]()
    for order in ((0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)):
        clock, found, _ = rings(4)
        buffers = [torch.tensor([value]) for value in values]
        for rank in order:
            found.start(rank, buffers[rank])
        run(clock)
        sums.add(float(buffers[3]))
    assert len(sums) == 1


@given(st.lists(st.integers(0, 2), max_size=30))
@settings(max_examples=50)
def test_rings_are_made_in_the_order_in_which_all_start_them_one_at_a_time(starts: list[int]) -> None:
    clock, found, woken = rings(3)
    made: dict[int, list[Tensor]] = {rank: [] for rank in range(3)}
    for rank in starts:
        made[rank].append(torch.tensor([float(10**rank * (len(made[rank]) + 1))]))
        found.start(rank, made[rank][-1])
    run(clock)
    whole = min(len(each) for each in made.values())
    for each in made.values():
        assert [float(buffer) for buffer in each[:whole]] == [111.0 * (number + 1) for number in range(whole)]
    assert woken == pytest.approx([found.seconds(4) * (number + 1) for number in range(whole)])
    assert found.started == [len(made[rank]) for rank in range(3)]


@pytest.mark.parametrize(("learners", "cluster", "seconds", "moved"), [
    (1, CARDS, 0.0, 0),
    (2, CARDS, 0.25 + 2 * (0.5 + 50 / 8), 2 * 50 * 2),
    (3, CARDS, 0.25 + 4 * (0.5 + 34 / 8), 4 * 34 * 3),  # parts are rounded up
    (2, replace(CARDS, learners_per_machine=2), 2 * 0.125, 2 * 50 * 2),  # inside a machine
])  # fmt: skip
def test_a_ring_passes_parts_on_over_the_slowest_link(
    learners: int, cluster: Cluster, seconds: float, moved: int
) -> None:
    _, found, _ = rings(learners, cluster)
    assert (found.seconds(100), found.moved) == (seconds, moved)


@pytest.mark.parametrize("other", [(torch.ones(3), "sum"), (torch.ones(2), BROADCAST)])
def test_who_comes_with_something_else_is_named(other: tuple[Tensor, str]) -> None:
    _, found, _ = rings()
    found.start(0, torch.ones(2))
    with pytest.raises(AssertionError, match="learner 1 comes to collective 0 with something else"):
        found.start(1, *other)
