"""What is measured becomes a cluster; the measuring itself on a model that takes no time."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist

import pytest
import torch

from syncline.cluster import Jitter
from syncline.engines.local import supervisor
from syncline.engines.local.engine import LocalHandle
from syncline.errors import LearnerError, LostError, UsageError
from tools.calibration import calibrate
from tools.calibration import shard_benchmark as shard_work
from tools.calibration import window_benchmark as turns
from tools.calibration.calibrate import (
    Calibration,
    Measured,
    Sample,
    Workload,
    perceptron,
    spread_of,
    table_shards,
)
from tools.calibration.contention_benchmark import Contention
from tools.calibration.fitting import LEAST, simulate
from tools.calibration.shard_benchmark import Folding, Work
from tools.calibration.window_benchmark import Stage, Turns, Window, deal, inequality

SEEN = Measured(
    sync="async",
    shards=1,
    beside=1,
    cores=2,
    slice=3.0,
    spin=5.0,
    nbytes=100,
    step=14.5,
    spread=0.0,
    lost=1.45,
    one=Work(compute=10.0, copy=0.5, take=0.25, fold=1.0, serve=0.125),
    all=None,
    note=0.5,
    reply=0.0,
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
@pytest.mark.parametrize("cores", [pytest.param(2, marks=pytest.mark.long), 16])
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


def test_where_all_have_a_core_their_own_costs_count_and_not_what_loops_lost() -> None:
    slower = Work(compute=12.0, copy=0.75, take=0.5, fold=2.0, serve=0.25)
    seen = replace(SEEN, cores=16, step=20.0, all=slower)
    cluster = seen.cluster()
    assert cluster.compute.base == 12.0
    assert [cluster.copy.seconds(100), cluster.take.seconds(100), cluster.fold.seconds(100)] == [
        0.75,
        0.5,
        2.0,
    ]
    assert cluster.memory.latency == replace(seen, all=None).cluster().memory.latency  # of the one learner
    assert (
        simulate(cluster, seen, learners=2).step
        > simulate(replace(seen, all=None).cluster(), seen, learners=2).step
    )


def test_replies_take_the_leading_shards_time() -> None:
    seen = replace(SEEN, sync="hardsync", cores=16, lost=0.0, step=20.0, note=0.0)
    bare = seen.bare()
    told = simulate(replace(bare, reply=0.25), seen, learners=4).step
    assert told == pytest.approx(simulate(bare, seen, learners=4).step + 4 * 0.25, rel=0.01)


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


@pytest.mark.parametrize("sync", ["ssp:0", "ssp:1", "delayed:2"])
def test_who_waits_for_others_takes_as_many_steps(sync: str) -> None:
    with Turns(perceptron(SMALL, 4), learners=2, sync=sync) as together:
        for _ in range(4):
            steps = {window.steps for window in together.window(0.01)}
            assert len(steps) == 1


def test_learners_that_are_left_out_have_no_windows() -> None:
    with pytest.raises(UsageError, match="backup:1 leaves out"):
        Turns(perceptron(SMALL, 4), learners=2, sync="backup:1")
    with Turns(perceptron(SMALL, 4), sync="backup:1") as alone:
        assert alone.window(0.0)[0].steps == 3


def test_a_window_in_lockstep_is_as_long_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    with Turns(perceptron(SMALL, 4), sync="hardsync") as one:
        step = one.window(0.0)[0].step
        monkeypatch.setattr(one, "_tell", told.append)
        monkeypatch.setattr(one, "_answers", lambda: [{"steps": 9, "step": 1.0}])
        one.window(100 * step)
        one.window(7.0)
        monkeypatch.undo()
    assert [text.split()[-1] for text in told] == ["100", "7"]


def test_cores_are_dealt_until_none_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_deck", [])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(5)))
    for _ in range(3):
        assert sorted(core for _ in range(5) for core in deal(1)) == [0, 1, 2, 3, 4]
    assert deal(6) == [-1] * 6
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert deal(1) == [-1]


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where runs that take turns have their folders; none may be left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    assert list(tmp_path.glob("syncline-turns-*")) == []


def lose(stage: Stage, rank: int) -> None:
    run = stage._run
    assert isinstance(run, LocalHandle)
    os.kill(run.pids()[f"learner {rank}"], signal.SIGKILL)


def lose_a_loop(work: Workload) -> None:
    with Turns(work, learners=2) as loops:
        loops.window(0.0)
        loops.burn()
        lose(loops, 1)
        loops.rest()


def lose_one_of_a_crowd(work: Workload, rank: int) -> None:
    with Contention(work, learners=2, shards=1, sync="async") as few:
        few.window(1, 0.0)
        lose(few, rank)
        few.window(1, 0.0)


def fail_beside_a_loop(work: Workload) -> None:
    with Turns(work) as loop:
        loop.burn()
        raise ZeroDivisionError


def test_a_lost_process_is_an_error(places: Path) -> None:
    with pytest.raises(LostError, match=r"process 1 .* SIGKILL"):
        lose_a_loop(perceptron(SMALL, 4))


@pytest.mark.parametrize("rank", [0, 2])
def test_who_waits_for_a_lost_process_is_ended(
    rank: int, places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "GRACE", 0.1)
    with pytest.raises(LostError, match=rf"process {rank} .* SIGKILL"):
        lose_one_of_a_crowd(perceptron(SMALL, 4), rank)


def test_loops_end_where_something_fails_beside_them(places: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        fail_beside_a_loop(perceptron(SMALL, 4))


def test_nobody_stays_where_a_calibration_cannot_begin(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Folding) -> Work:
        raise ZeroDivisionError

    monkeypatch.setattr(Folding, "measure", fail)
    with pytest.raises(ZeroDivisionError):
        Calibration(perceptron(SMALL, 4), ["async"], learners=2)
    assert "syncline-supervisor" not in {thread.name for thread in threading.enumerate()}


def test_a_dial_whose_rate_depends_on_the_batch_size() -> None:
    sync = "hardsync:reference_batch=8"
    with Calibration(perceptron(SMALL, 4), [sync], learners=1) as calibration:
        calibration.fold()
        calibration.sample(sync, 0.0)
        assert calibration.measured(sync).cluster().cores == calibrate.cores()


def test_nothing_to_measure() -> None:
    with pytest.raises(UsageError, match="learners must be a whole number of at least 1, got 0"):
        Calibration(perceptron(SMALL, 4), ["async"], learners=0)
    with pytest.raises(UsageError, match="batch_size must be a whole number of at least 1, got 0"):
        Calibration(perceptron(SMALL, 0), ["async"], learners=1)


@pytest.mark.parametrize(
    "words, message",
    [
        ("--sync foo", "argument --sync: no preset is called 'foo'"),
        ("--sync softsync:9 --learners 2", "argument --sync: softsync:9 needs n <= learners"),
        ("--sync delayed:auto<=2", "argument --sync: 'delayed:auto<=2' cannot be measured"),
        ("--widths x", "argument --widths: expected at least two whole numbers"),
        ("--widths 10", "argument --widths: expected at least two whole numbers"),
        ("--widths 10,0", "argument --widths: expected at least two whole numbers"),
        ("--batch-size 0", "argument --batch-size: expected a whole number of at least 1, got '0'"),
        ("--learners 0", "argument --learners: expected a whole number of at least 1, got '0'"),
        ("--learners two", "argument --learners: expected a whole number of at least 1, got 'two'"),
        ("--lerners 2", "unrecognized arguments"),
    ],
)
def test_the_command_refuses_bad_input_in_one_line_before_it_measures(
    words: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibrate, "_measure", lambda *_: pytest.fail("it measures"))
    with pytest.raises(SystemExit) as exit_:
        calibrate.main(words.split())
    said = capsys.readouterr().err
    assert exit_.value.code == 2
    assert said.startswith(f"error: {message}") and said.count("\n") == 1


class Odd(torch.nn.Module):
    """A frozen parameter, an unused one, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)
        )
        self.layers[0].weight.requires_grad_(False)
        self.unused = torch.nn.Linear(3, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(inputs)
        return found


def by_name(model: torch.nn.Module) -> torch.optim.Optimizer:
    """A factory that asks for the model."""
    return torch.optim.SGD([parameter for _, parameter in model.named_parameters()], lr=0.1)


def test_parameters_without_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_work, "SECONDS", 0.002)
    work = replace(perceptron(SMALL, 4), model=Odd, optimizer=by_name)
    assert min(Folding(work).measure().copy, Folding(work).measure().fold) > 0
    with Contention(work, learners=2, shards=1, sync="async") as few:
        assert few.window(2, 0.0).copy > 0


@pytest.mark.parametrize("sync", ["hardsync", "async"])
def test_a_shard_that_holds_nothing(sync: str) -> None:
    """Tables of an optimizer that cannot be cut are dealt by whole parameters."""
    work = replace(perceptron((64, 512, 2), 4), optimizer=torch.optim.Adafactor)
    with Contention(work, learners=2, shards=4, sync=sync) as few:
        assert min(few._shares) == 0
        assert few.window(2, 0.0).fold > 0


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
    monkeypatch.setattr(calibrate, "cores", lambda: 2)
    with Calibration(work, ["async"], learners=2) as calibration:
        calibration.fold()
        sample = calibration.sample("async", 0.01)
        measured = calibration.measured("async")
    assert torch.get_num_threads() == threads
    assert len(sample.beside) == len(sample.before) == 1
    assert measured.nbytes == 4 * 4 * 64
    assert measured.step == pytest.approx(sample.one.step)
    assert 0 < measured.one.compute < measured.step
    assert min(measured.one.copy, measured.one.fold, measured.one.serve, measured.note) > 0
    assert measured.all is None  # the shard shares a core
    assert measured.cluster().name == "this-machine"


def test_measuring_where_each_process_has_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "cores", lambda: 8)
    monkeypatch.setattr(calibrate, "CROWDED", 0.005)
    with Calibration(perceptron(SMALL, 4), ["hardsync"], learners=2) as calibration:
        calibration.fold()
        calibration.look_at_crowd("hardsync")
        calibration.sample("hardsync", 0.01)
        measured = calibration.measured("hardsync")
    assert measured.all is not None
    assert min(measured.all.compute, measured.all.copy, measured.all.take, measured.all.fold) > 0
    assert measured.all.serve == measured.one.take == 0  # in lockstep the table is read where it lies
    assert min(measured.note, measured.reply) > 0


@pytest.mark.parametrize("sync", ["hardsync", "softsync:1", "async"])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_crowd(sync: str, shards: int) -> None:
    with Contention(perceptron((64, 512, 2), 4), learners=3, shards=shards, sync=sync) as crowd:
        one, everybody = (crowd.window(active, 0.01) for active in (1, 3))
    for work in (one, everybody):
        assert min(work.compute, work.copy, work.fold) > 0
        assert (work.serve > 0) == (sync != "hardsync")
    assert one.take == 0
    assert (everybody.take > 0) == (sync != "async")
    assert 0 < everybody.uneven < 1


@pytest.mark.parametrize("sync", ["hardsync", "softsync:1", "async"])
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("learners", [2, 5])
def test_decisions(sync: str, warm: bool, learners: int) -> None:
    found = shard_work.decisions(perceptron(SMALL, 4), sync, learners=learners, steps=10, warm=warm)
    assert found.note > 0
    assert (found.reply > 0) == (sync == "hardsync")
