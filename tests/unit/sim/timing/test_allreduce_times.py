"""Timing over all-reduce: an iteration follows from the one before, and delay and layers hide the rings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import syncline as sl
from syncline.cluster import Cluster, Compute, Link
from syncline.dial import Course
from syncline.learn.allreduce_reducer import FORWARD
from syncline.sim.timing.allreduce_times import TimedRings, time_all_reduce
from syncline.sim.timing.run_times import TimedRun
from syncline.topologies import parse_topology

RING = 2 * 0.5  # of two learners: two hops of this latency
CARDS = Cluster(compute=Compute(base=0.0, per_example=1.0), card=Link(latency=0.5))


def run_of(sync: str = "hardsync", *, cluster: Cluster = CARDS, learners: int = 2, **given: Any) -> TimedRun:
    sizes = (
        {"parameters": 100, "examples": 1000, "batch_size": 4}
        | ({} if given.keys() & {"epochs", "seconds"} else {"steps": 5})
        | given
    )
    return TimedRun(cluster=cluster, course=Course.of(sync), learners=learners, **sizes)


def rings_of(
    sync: str = "hardsync", topology: str = "allreduce", layers: tuple[int, ...] = (100,), **given: Any
) -> TimedRings:
    place: Any = parse_topology(topology)
    return TimedRings(run_of(sync, **given), layers, place)


def test_in_lockstep_all_wait_for_the_slowest_and_then_for_the_ring() -> None:
    rings = rings_of()
    rings.step([3, 5])
    assert rings.seconds == 5 + RING
    rings.step([4, 1])
    assert rings.seconds == 9 + 2 * RING
    times = rings.end()
    assert (times.compute, times.waiting, times.communication, times.steps) == (13, 2 + 3, 4 * RING, 4)
    assert (rings.iterations, rings.gradients, rings.examples, rings.busy) == (2, 4, 13, 2 * RING)
    assert rings.clock.account().histogram == {0: 4}


def test_with_a_delay_the_ring_goes_on_beside_the_next_computation() -> None:
    rings = rings_of("delayed:1")
    for _ in range(3):
        rings.step([4, 4])
    assert rings.end().communication == 2 * RING, "of the last one only, which nothing hides"
    assert rings.seconds == 12 + RING and rings.clock.account().histogram == {0: 2, 1: 4}


def test_layers_are_reduced_while_those_before_them_are_computed() -> None:
    """The gradient of the last layer is there first: its ring is over before all are."""
    whole, layers = (
        rings_of(layers=(100, 100)),
        rings_of("hardsync", "allreduce:layerwise,bucket=64", (100, 100)),
    )
    for rings in (whole, layers):
        rings.step([6, 6])
    assert len(layers.buckets) == 2 and len(whole.buckets) == 1
    assert whole.seconds == layers.seconds == 6 + RING, "one ring is hidden"
    slow = replace(CARDS, card=Link(latency=5.0))
    found = rings_of("hardsync", "allreduce:layerwise,bucket=64", (100, 100), cluster=slow)
    found.step([6, 6])
    half_back = FORWARD + (1 - FORWARD) / 2
    assert found.seconds == pytest.approx(6 * half_back + 2 * 2 * 5.0), (
        "the first begins there, the second follows"
    )


def test_who_has_no_data_left_computes_nothing_and_comes_to_the_ring() -> None:
    rings = rings_of()
    rings.step([4, 0])
    assert rings.seconds == 4 + RING and rings.gradients == 1 and rings.end().waiting == 4


@pytest.mark.parametrize(("policy", "updates", "examples"), [("ledger", 13, 100), ("partition", 13, 100)])
def test_an_epoch_is_every_example_once(policy: str, updates: int, examples: int) -> None:
    place: Any = parse_topology("allreduce")
    timing = time_all_reduce(run_of(examples=100, epochs=2, policy=policy), place, None)
    assert (timing.updates, timing.examples) == (2 * updates, 2 * examples)
    assert [each.examples for each in timing.history] == [examples, 2 * examples]
    assert timing.moved == timing.updates * 2 * 200 * 2


def test_it_ends_after_updates_or_seconds() -> None:
    place: Any = parse_topology("allreduce")
    assert time_all_reduce(run_of(steps=7), place, None).updates == 7
    assert time_all_reduce(run_of(seconds=11.0), place, None).seconds == 3 * (4 + RING)


@pytest.mark.parametrize(("run", "layers", "words"), [
    (run_of("hardsync until 1 then delayed:1"), None, "takes one dial"),
    (run_of("delayed:auto<=2"), None, "takes hardsync and delayed:k"),
    (run_of(), [99], "layers hold 99 parameters together, parameters= says 100"),
    (run_of(), [100, 0], "at least 1 each"),
    (run_of(), [99.0, 1], "are numbers of parameters"),
])  # fmt: skip
def test_what_cannot_be_timed_is_refused(run: TimedRun, layers: Any, words: str) -> None:
    place: Any = parse_topology("allreduce")
    with pytest.raises(sl.UsageError, match=words):
        time_all_reduce(run, place, layers)


@pytest.mark.parametrize("length", [{"epochs": 2}, {"steps": 7}, {"seconds": 30.0}])
def test_one_can_look_how_far_it_is(length: dict[str, Any]) -> None:
    looks: list[Any] = []
    place: Any = parse_topology("allreduce")

    def follow(found: Any) -> None:
        looks.append(found)
        assert (found().share, found().updates, found().seconds) == (0, 0, 0)

    timing = time_all_reduce(run_of(examples=100, follow=follow, **length), place, None)
    assert repr(timing) == repr(time_all_reduce(run_of(examples=100, **length), place, None))
    assert (looks[0]().share, looks[0]().updates, looks[0]().seconds) == (1, timing.updates, timing.seconds)


def test_delay_and_layers_hide_the_rings() -> None:
    engine = sl.Sim("ethernet-1g:jitter=none:0")
    sizes = {
        "parameters": 6 * 10**7,
        "layers": [10**7] * 6,
        "examples": 10**6,
        "learners": 8,
        "batch_size": 32,
    }
    blocking, layerwise, delayed = (
        engine.timing(topology=topology, sync=sync, steps=20, **sizes)
        for topology, sync in (
            ("allreduce", "hardsync"),
            ("allreduce:layerwise", "hardsync"),
            ("allreduce", "delayed:1"),
        )
    )
    compute = engine.cluster.compute.seconds(32)
    ring = 2 * 7 * (engine.cluster.card.latency + 6 * 10**7 * 4 / 8 / 125e6)
    assert blocking.seconds == pytest.approx(20 * (compute + ring), rel=1e-6)
    assert delayed.seconds == pytest.approx(compute + 19 * max(compute, ring) + ring, rel=0.02)
    assert max(compute, ring) * 20 < layerwise.seconds < blocking.seconds
    assert blocking.overlap < layerwise.overlap < delayed.overlap


def test_what_has_no_place_in_a_timing_over_all_reduce_is_said() -> None:
    sizes: dict[str, Any] = {"parameters": 100, "examples": 100, "learners": 2, "batch_size": 4, "steps": 3}
    options: list[tuple[sl.Sim, str, dict[str, Any], str]] = [
        (sl.Sim(script="kill learner 1 at 1 s"), "hardsync", {}, "leave a script out"),
        (sl.Sim(), "hardsync", {"on_update": print}, "leave on_update out"),
        (sl.Sim(), "async", {}, "a collective waits for everybody"),
    ]
    for engine, sync, more, words in options:
        with pytest.raises(sl.SynclineError, match=words):
            engine.timing(topology="allreduce", sync=sync, **sizes, **more)
