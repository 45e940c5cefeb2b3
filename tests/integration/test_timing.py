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
from syncline.cluster import Compute, Jitter, Link
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


def test_a_checked_run_over_all_reduce_is_refused() -> None:
    with pytest.raises(sl.UsageError, match="over all-reduce there are none: leave check out"):
        two_layers(sl.Sim(check=True), "allreduce", "hardsync", 2)
