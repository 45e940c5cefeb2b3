"""Timing over servers: what theory says of them, how long they are, and what they refuse."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import syncline as sl
from syncline.cluster import Compute, Link
from syncline.dial import Course
from syncline.sim.timing.run_times import TimedRun

SLOW = "p775:stragglers=0.3,bandwidth=1e6,jitter=exponential:0.5"


def timed(engine: sl.Sim, sync: str, **options: Any) -> Any:
    given = {"learners": 4, "batch_size": 4, "seed": 3, **options}
    return engine.timing(parameters=2048, examples=130, sync=sync, **given)


def bandwidth_only(*, compute: float, bandwidth: float, latency: float = 0.0, **more: Any) -> sl.Cluster:
    return sl.Cluster(compute=Compute(base=compute), card=Link(bandwidth=bandwidth, latency=latency), **more)


@settings(max_examples=40)
@given(st.integers(1, 10**6), st.integers(1, 9), st.sampled_from([1, 2, 4, 8]))
def test_shards_have_all_bytes_in_parts_of_nearly_equal_size(
    parameters: int, shards: int, itemsize: int
) -> None:
    sizes: dict[str, Any] = {"examples": 8, "learners": 1, "batch_size": 1, "steps": 1}
    run = TimedRun(
        cluster=sl.Cluster(), course=Course.of("async"), parameters=parameters, itemsize=itemsize, **sizes
    )
    parts = run.part_bytes(shards)
    assert len(parts) == shards and sum(parts) == parameters * itemsize and min(parts) >= 0
    assert max(parts) - parameters * itemsize / shards <= 1024
    cuts = list(accumulate(parts))
    assert all(cut % 1024 == 0 or cut == parameters * itemsize for cut in cuts), "where a table may be cut"


def test_virtual_seconds_end_it() -> None:
    timing = timed(sl.Sim(compute=1.0, transfer=0.0, latency=0.0), "async", seconds=20.5)
    assert timing.gradients == pytest.approx(4 * 20, abs=4)
    assert 20.0 <= timing.seconds < 23


@pytest.mark.parametrize(("learners", "slow"), [(2, 1.0), (8, 1.0), (8, 0.5)])
def test_a_hardsync_step_is_the_slowest_computation_and_its_transfers(learners: int, slow: float) -> None:
    """All weights through the server's card, then all gradients, both in the order of arrival: who is served i transfers
    later finds the card free as much later. One transfer more than there are learners remains."""
    seconds, latency, size = 1.0, 0.01, 4_000_000
    cluster = bandwidth_only(compute=seconds, bandwidth=size / 0.02, latency=latency, speeds=(slow,))
    runs = [
        sl.Sim(cluster).timing(
            parameters=size // 4,
            examples=10**6,
            learners=learners,
            batch_size=1,
            sync="hardsync",
            steps=steps,
        )
        for steps in (10, 30)
    ]
    period = (runs[1].seconds - runs[0].seconds) / 20
    expected = seconds / slow + 2 * latency + (learners + 1) * 0.02
    assert period == pytest.approx(expected, rel=1e-3)


def test_a_server_is_bound_by_its_card() -> None:
    size = 40_000_000
    cluster = bandwidth_only(compute=0.001, bandwidth=1e9, latency=1e-5)
    short, long = (
        sl.Sim(cluster).timing(
            parameters=size // 4, examples=10**6, learners=20, batch_size=16, sync="async", steps=steps
        )
        for steps in (200, 600)
    )
    assert 400 / (long.seconds - short.seconds) == pytest.approx(1e9 / size, rel=1e-3)
    assert long.throughput == pytest.approx(16 * 1e9 / size, rel=0.1)
    machine, share = long.busiest
    assert machine == -1
    assert share > 0.95
    assert long.overlap < 0.1


def test_billions_of_parameters() -> None:
    timing = sl.Sim("dgx-1").timing(
        parameters=175 * 10**9,
        examples=10**6,
        learners=16,
        batch_size=8,
        sync="delayed:1",
        steps=5,
        shards=16,
    )
    assert timing.updates == 5
    assert timing.moved > 5 * 15 * 175 * 10**9 * 4  # all but the parts that lie on the learner's own machine


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "one of epochs=, steps= or seconds="),
        ({"epochs": 1, "steps": 2}, "one of epochs=, steps= or seconds="),
        ({"seconds": -1}, "seconds must be > 0"),
        ({"epochs": 1, "sync": "softsync:9"}, "needs n <= learners"),
        ({"epochs": 1, "batch_size": 1000}, "larger than the data set"),
        ({"epochs": 1, "shards": 3, "topology": "servers:2"}, "not both"),
        ({"epochs": 1, "layers": [1024, 1024]}, "layers= are those of all-reduce"),
        ({"epochs": 1, "shards": 0}, "shards must be a whole number"),
    ],
)
def test_bad_input(options: dict[str, Any], message: str) -> None:
    with pytest.raises(sl.SynclineError, match=message):
        timed(sl.Sim("p775"), **{"sync": "async", **options})


def test_a_script_is_checked_before_a_timing_and_told_after_it() -> None:
    script = "kill learner 1 at 0.1 s; add 1 at 1000 s"
    timing = timed(sl.Sim("p775", script=script), "async", epochs=2)
    assert [each.kind for each in timing.happened] == ["lost", "missed"]
    for line, words in (
        ("change to delayed:3 at 0.1 s", "keeps 4 versions"),
        ("change to backup:4 at 0.1 s", "backup:4"),
        ("kill shard 0 at 0.1 s", "no checkpoints to go back to"),
    ):
        with pytest.raises(sl.SynclineError, match=words):
            timed(sl.Sim("p775", script=line), "async", epochs=2)


@pytest.mark.parametrize("length", [{"epochs": 2}, {"steps": 7}, {"seconds": 3.0}])
def test_one_can_look_how_far_it_is(length: dict[str, Any]) -> None:
    engine, looks, seen = sl.Sim(SLOW), [], []
    given: dict[str, Any] = {"shards": 2, **length}

    def look(version: int, seconds: float, staleness: float) -> None:
        seen.append(looks[0]())
        assert (seen[-1].updates, seen[-1].seconds) == (version, seconds)

    def follow(found: Any) -> None:
        looks.append(found)
        assert (found().share, found().updates, found().seconds) == (0, 0, 0)

    timing = timed(engine, "hardsync", follow=follow, on_update=look, **given)
    assert repr(timing) == repr(timed(engine, "hardsync", **given))
    assert (looks[0]().share, looks[0]().updates) == (1, timing.updates)
    shares = [each.share for each in seen]
    assert shares == sorted(shares)
