"""Timing only: the same times as runs with gradients, what theory says of them, and memory that does not grow."""

import sys
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import syncline as sl
from syncline.cluster.record import Compute, Jitter, Link
from syncline.dial import Course
from syncline.engines.run import RunSpec, Task
from syncline.roles.run_plan import RunPlan
from syncline.sim.timing.run_times import SizedSimulation, TimedRun
from syncline.topologies import Servers

PRESETS = [
    "hardsync",
    "softsync:1",
    "softsync:3,rate=staleness",
    "async",
    "downpour:push=1,fetch=1",
    "downpour:push=2,fetch=3,local_lr=0.05",
    "ssp:1",
    "backup:1",
    "delayed:1",
    "delayed:3",
    "hardsync until 1 then softsync:1",
]
INPUTS, OUTPUTS, EXAMPLES = 64, 32, 130
SLOW = "p775:stragglers=0.3,bandwidth=1e6,jitter=exponential:0.5"

SLICED = "p775:cores=2,slice=0.01,spin=0.005"


def squares(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).square().mean()


def with_gradients(engine: sl.Sim, sync: str, **options: Any) -> sl.Result:
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(EXAMPLES, INPUTS))
    given = {"learners": 4, "batch_size": 4, "seed": 3, **options}
    optimizer = partial(torch.optim.SGD, lr=0.01)
    model = nn.Linear(INPUTS, OUTPUTS, bias=False)
    return sl.train(model, data, objective=squares, optimizer=optimizer, engine=engine, sync=sync, **given)


def timed(engine: sl.Sim, sync: str, **options: Any) -> Any:
    given = {"learners": 4, "batch_size": 4, "seed": 3, **options}
    return engine.timing(parameters=INPUTS * OUTPUTS, examples=EXAMPLES, sync=sync, **given)


def assert_same(timing: Any, result: sl.Result) -> None:
    assert timing.seconds == result.seconds
    for what in ("updates", "gradients", "dropped", "staleness"):
        assert getattr(timing, what) == getattr(result, what), what
    marks = [[(each.seconds, each.version) for each in run.history] for run in (timing, result)]
    assert marks[0] == marks[1]
    assert timing.throughput == pytest.approx(result.throughput)
    assert timing.moved == result.simulated.moved > 0
    assert timing.times == result.simulated.total


@pytest.mark.parametrize("sync", PRESETS)
@pytest.mark.parametrize(("cluster", "shards"), [("p775", 1), (SLOW, 2), (SLICED, 2)])
def test_times_are_those_of_a_run_with_gradients(sync: str, cluster: str, shards: int) -> None:
    result = with_gradients(sl.Sim(cluster), sync, epochs=2, topology=f"servers:{shards}")
    assert_same(timed(sl.Sim(cluster), sync, epochs=2, shards=shards), result)


@pytest.mark.parametrize(
    "sync", ["hardsync", "softsync:1", "backup:1", "downpour:push=2,fetch=2,local_lr=0.1"]
)
def test_with_deaths_joins_pauses_and_another_dial(sync: str) -> None:
    script = "kill learner 1 at 0.1 s; add 2 at 0.15 s; pause shard 0 for 0.05 s at 0.2 s; change to async at 0.3 s"
    result = with_gradients(sl.Sim("p775", script=script), sync, epochs=3, topology="servers:1")
    assert {"lost", "joined", "paused", "dial"} <= {event.kind for event in result.events}
    assert_same(timed(sl.Sim("p775", script=script), sync, epochs=3), result)


@pytest.mark.parametrize("sync", ["hardsync", "softsync:2", "async"])
def test_a_set_number_of_updates(sync: str) -> None:
    result = with_gradients(sl.Sim("p775"), sync, steps=21, topology="servers:1")
    assert_same(timed(sl.Sim("p775"), sync, steps=21), result)


def test_virtual_seconds_end_it() -> None:
    timing = timed(sl.Sim(compute=1.0, transfer=0.0, latency=0.0), "async", seconds=20.5)
    assert timing.gradients == pytest.approx(4 * 20, abs=4)
    assert 20.0 <= timing.seconds < 23


@pytest.mark.parametrize("learners", [8, 30])
@pytest.mark.parametrize("splits", [1, 2, 4])
def test_staleness_is_as_expected(learners: int, splits: int) -> None:
    cluster = replace(sl.Cluster.named("p775"), jitter=Jitter(kind="normal", spread=0.1))
    timing = sl.Sim(cluster).timing(
        parameters=100,
        examples=10**6,
        learners=learners,
        batch_size=8,
        sync=f"softsync:{splits}",
        steps=60 * splits,
    )
    quorum = max(1, learners // splits)
    assert timing.staleness.mean == pytest.approx((learners - 1) / quorum, rel=0.08)
    beyond = sum(n for sigma, n in timing.staleness.histogram.items() if sigma > 2 * learners / quorum)
    assert beyond < 0.01 * timing.gradients


def bandwidth_only(*, compute: float, bandwidth: float, latency: float = 0.0, **more: Any) -> sl.Cluster:
    return sl.Cluster(compute=Compute(base=compute), card=Link(bandwidth=bandwidth, latency=latency), **more)


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


def test_several_shards_share_the_load() -> None:
    cluster = bandwidth_only(compute=0.001, bandwidth=1e9, latency=1e-5)
    one, four = (
        sl.Sim(cluster).timing(
            parameters=10**7,
            examples=10**6,
            learners=20,
            batch_size=16,
            sync="async",
            steps=300,
            shards=shards,
        )
        for shards in (1, 4)
    )
    assert four.throughput == pytest.approx(4 * one.throughput, rel=0.1)


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


@pytest.mark.parametrize("sync", ["hardsync", "softsync:1", "async"])
def test_memory_does_not_grow_with_the_run(sync: str) -> None:
    cluster, course = sl.Cluster.named("p775"), Course.of(sync)
    sizes: dict[str, Any] = {"parameters": 1000, "examples": 400, "learners": 10, "batch_size": 4}
    run = TimedRun(cluster=cluster, course=course, seconds=float("inf"), **sizes)
    plan = RunPlan(course=course, learners=10, topology=Servers(2, True))
    world = SizedSimulation(RunSpec(task=Task(timed, (run,)), plan=plan), cluster, seed=1)
    world.start()
    blocks = []
    for events in (10_000, 60_000):
        while world.clock.events < events:
            world.clock.step()
        blocks.append(sys.getallocatedblocks())
    world.end()
    assert blocks[1] - blocks[0] < 0.01 * blocks[0]


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


# -- all-reduce ----------------------------------------------------------------------------------------------


def two_layers(engine: sl.Sim, topology: str, sync: str, steps: int) -> sl.Result:
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(4096, INPUTS))
    model = nn.Sequential(nn.Linear(INPUTS, INPUTS, bias=False), nn.Linear(INPUTS, INPUTS, bias=False))
    return sl.train(
        model,
        data,
        objective=squares,
        optimizer=partial(torch.optim.SGD, lr=0.01),
        engine=engine,
        topology=topology,
        sync=sync,
        learners=4,
        batch_size=4,
        steps=steps,
        seed=3,
    )


@pytest.mark.parametrize("sync", ["hardsync", "delayed:1", "delayed:3"])
@pytest.mark.parametrize("topology", ["allreduce", "allreduce:layerwise,bucket=16KiB"])
def test_rings_take_the_time_of_simulated_collectives(topology: str, sync: str) -> None:
    engine = sl.Sim("ethernet-1g:bandwidth=2e5,base=0.1,per_example=0.01,stragglers=0.25,slowdown=1.3")
    runs = [two_layers(engine, topology, sync, steps) for steps in (5, 25)]
    sizes = {"parameters": 2 * INPUTS**2, "layers": [INPUTS**2] * 2, "examples": 4096, "seed": 3}
    timings = [
        engine.timing(topology=topology, sync=sync, learners=4, batch_size=4, steps=steps, **sizes)
        for steps in (5, 25)
    ]
    real, timed = (pair[1].seconds - pair[0].seconds for pair in (runs, timings))
    assert timed == pytest.approx(real, rel=0.01)  # headers and flags travel with real gradients
    assert timings[1].staleness == runs[1].staleness
    real_times, timed_times = (
        [getattr(pair[1], part) - getattr(pair[0], part) for part in ("compute", "communication")]
        for pair in ([run.simulated.total for run in runs], [timing.times for timing in timings])
    )
    assert timed_times == pytest.approx(real_times, rel=0.02, abs=0.02)


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


def test_a_checked_run_over_all_reduce_is_refused() -> None:
    with pytest.raises(sl.UsageError, match="over all-reduce there are none: leave check out"):
        two_layers(sl.Sim(check=True), "allreduce", "hardsync", 2)


@pytest.mark.parametrize("topology", ["servers:2", "allreduce"])
@pytest.mark.parametrize("length", [{"epochs": 2}, {"steps": 7}, {"seconds": 3.0}])
def test_one_can_look_how_far_it_is(topology: str, length: dict[str, Any]) -> None:
    engine, looks, seen = sl.Sim(SLOW), [], []
    given: dict[str, Any] = {"topology": topology, **length}

    def look(version: int, seconds: float, staleness: float) -> None:
        seen.append(looks[0]())
        assert (seen[-1].updates, seen[-1].seconds) == (version, seconds)

    def follow(found: Any) -> None:
        looks.append(found)
        assert (found().share, found().updates, found().seconds) == (0, 0, 0)

    if topology != "allreduce":
        given["on_update"] = look
    timing = timed(engine, "hardsync", follow=follow, **given)
    assert repr(timing) == repr(timed(engine, "hardsync", topology=topology, **length))
    assert (looks[0]().share, looks[0]().updates) == (1, timing.updates)
    shares = [each.share for each in seen]
    assert shares == sorted(shares)


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
    with pytest.raises(sl.UsageError, match="leave a script out"):
        timed(sl.Sim("p775", script=script), "hardsync", topology="allreduce", steps=3)
    with pytest.raises(sl.UsageError, match="leave on_update out"):
        timed(sl.Sim("p775"), "hardsync", topology="allreduce", steps=3, on_update=print)


def test_async_over_all_reduce_is_refused() -> None:
    with pytest.raises(sl.SynclineError, match="a collective waits for everybody"):
        timed(sl.Sim("p775"), "async", topology="allreduce", steps=3)
    with pytest.raises(sl.UsageError, match="layers hold 3 parameters together"):
        timed(sl.Sim("p775"), "hardsync", topology="allreduce", layers=[1, 2], steps=3)
