"""What is measured becomes a cluster; the measuring itself on a model that takes no time."""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist

import pytest
import torch

from syncline.engines.sim import shard_work
from syncline.engines.sim.calibrate import (
    Calibration,
    Measured,
    Sample,
    Workload,
    perceptron,
    spread_of,
    table_shards,
)
from syncline.engines.sim.cluster import Jitter
from syncline.engines.sim.fitting import LEAST, simulate
from syncline.engines.sim.turns import Turns, Window, inequality
from syncline.errors import LearnerError

SEEN = Measured(
    sync="async",
    shards=1,
    beside=1,
    cores=2,
    slice=3.0,
    spin=5.0,
    nbytes=100,
    step=14.5,
    compute=10.0,
    spread=0.0,
    lost=1.45,
    copy=0.5,
    take=0.25,
    fold=1.0,
    serve=0.125,
    handle=0.5,
)
SMALL = (8, 4, 2)


def test_what_is_left_of_a_step_is_latency() -> None:
    cluster = replace(SEEN, sync="hardsync", lost=0.0).cluster()
    assert cluster.memory.latency == pytest.approx((14.5 - 10 - 1 - 0.5 - 1) / 2, rel=0.05)
    assert cluster.cores == 2
    assert cluster.fold.seconds(50) == pytest.approx(0.5)
    assert {cluster.machine_of_learner(5), cluster.machine_of_shard(2)} == {0}


@pytest.mark.parametrize("sync", ["hardsync", "softsync:1", "async"])
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("cores", [2, 16])
def test_the_cluster_does_what_the_one_learner_did(sync: str, shards: int, cores: int) -> None:
    seen = replace(SEEN, sync=sync, shards=shards, cores=cores, step=20.0, lost=0.0)
    cluster = seen.cluster()
    assert cluster.memory.latency > LEAST
    close = 0.1 if shards == cores else 0.02  # where shards wait for the loop's slice the time jumps
    assert simulate(cluster, seen, learners=1, loops=1).step == pytest.approx(seen.step, rel=close)


def test_what_the_loops_lost_is_taken_from_computations_while_others_compute() -> None:
    told = simulate(SEEN.bare(), SEEN, learners=1, loops=1)
    assert told.lost == pytest.approx(0.0, abs=1e-9)  # a core for the loop, one for learner or shard
    assert SEEN.cluster().compute.base == pytest.approx(10.0 + 1.45 * 10 / 14.5)
    assert replace(SEEN, sync="hardsync").cluster().compute.base == 10.0
    assert replace(SEEN, lost=-1.0).cluster().compute.base == 10.0


def test_shards_that_share_cores_with_the_loops_slow_them_in_the_simulation() -> None:
    seen = replace(SEEN, shards=2, slice=None)
    assert simulate(seen.bare(), seen, learners=1, loops=1).lost > 0.1
    assert simulate(seen.bare(), replace(seen, cores=16), learners=1, loops=0).lost == 0.0


def test_two_learners_are_never_faster_than_one() -> None:
    for sync in ("hardsync", "async"):
        seen = replace(SEEN, sync=sync, spread=0.1)
        cluster = seen.cluster()
        assert cluster.jitter == Jitter(kind="lognormal", spread=0.1)
        assert simulate(cluster, seen, learners=2).step > 0.98 * seen.step


def test_inequality() -> None:
    assert inequality([3.0] * 5) == 0.0
    assert inequality([1.0]) == 0.0
    assert inequality([1.0, 3.0]) == pytest.approx(
        0.5
    )  # they differ by 2 on average: half of it over the mean of 2
    draws = [NormalDist(100, 10).inv_cdf((index + 0.5) / 2000) for index in range(2000)]
    assert inequality(draws) == pytest.approx(10 / 100 / 3.14159265**0.5, rel=0.01)


def test_the_spread_of_a_lognormal_is_found_again() -> None:
    jitter = Jitter(kind="lognormal", spread=0.3)
    factors = [jitter.factor((index + 0.5) / 4000) for index in range(4000)]
    assert spread_of([0.0, inequality(factors), 0.9]) == pytest.approx(0.3, rel=0.02)


def test_lost_shares_add_up() -> None:
    before, beside = Window(steps=1, step=1.0), Window(steps=1, step=1.25)
    sample = Sample(plain=before, one=before, beside=(beside, before), before=(before, before))
    assert sample.lost == pytest.approx(0.2)


def test_shards_of_the_table() -> None:
    assert table_shards(perceptron(SMALL, 4), 2, "hardsync") == 1  # small tables are not cut


def test_taking_turns() -> None:
    work = perceptron(SMALL, 4)
    with (
        Turns(work) as plain,
        Turns(work, learners=2, sync="hardsync") as lockstep,
        Turns(work, learners=2, sync="async") as free,
    ):
        for _ in range(2):
            plain.burn()
            windows = lockstep.window(0.01)
            (burnt,) = plain.rest()
            assert windows[0].steps == windows[1].steps >= 3
            assert burnt.steps >= 1
            assert len(free.window(0.01)) == 2
        one = windows[0]
        assert one.compute + one.publish + one.wait + one.read <= one.step
        assert min(one.compute, one.publish, one.wait, one.read) > 0
        assert one.rate == 1 / one.step


def test_a_model_that_cannot_be_made_is_an_error() -> None:
    def model() -> torch.nn.Module:
        raise ValueError("no such model")

    work = replace(perceptron((2, 2), 1), model=model)
    with pytest.raises(LearnerError, match="no such model"), Turns(work) as turns:
        turns.window(0.01)


def test_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_work, "SECONDS", 0.002)
    threads = torch.get_num_threads()
    work: Workload = perceptron(SMALL, 4)
    with Calibration(work, ["async"], learners=2) as calibration:
        calibration.fold()
        sample = calibration.sample("async", 0.01)
        measured = calibration.measured("async")
    assert torch.get_num_threads() == threads
    assert len(sample.beside) == len(sample.before) == 1
    assert measured.nbytes == 4 * 4 * 64
    assert measured.step == pytest.approx(sample.one.step)
    assert 0 < measured.compute < measured.step
    assert min(measured.copy, measured.fold, measured.serve) > 0
    assert measured.cluster().name == "this-machine"
