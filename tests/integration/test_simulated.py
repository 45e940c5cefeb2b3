"""Simulated runs on clusters: the same every time, time that is spent where it is said, scripts of events."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import syncline as sl
from syncline.cluster import Compute, Cost, Jitter, Link
from syncline.errors import DialError, LostError
from syncline.sim import fibers
from tests.integration.small_runs import clouds, kinds, network, same

EVERY_DIAL = [
    "hardsync",
    "softsync:2",
    "async",
    "downpour:push=2,fetch=3,local_lr=0.05",
    "ssp:2",
    "backup:1",
    "delayed:2",
]
ROUGH = sl.Cluster(
    name="rough",
    compute=Compute(base=0.5, per_example=0.02),
    jitter=Jitter(kind="lognormal", spread=0.4),
    stragglers=0.3,
    slowdown=2.5,
    learners_per_machine=2,
    card=Link(latency=1e-3, bandwidth=4e4),
    memory=Link(latency=1e-4, bandwidth=1e6),
    copy=Cost(fixed=1e-3),
    take=Cost(per_byte=1e-5),
    fold=Cost(fixed=1e-3, per_byte=1e-5),
    serve=Cost(per_byte=1e-6),
    message=1e-4,
    cores=2,
)


def run(engine: sl.Sim, **options: Any) -> sl.Result:
    given = {"learners": 4, "batch_size": 6, "epochs": 2, "sync": "async", "seed": 5, **options}
    optimizer = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    return sl.train(network(), clouds(120), loss=F.cross_entropy, optimizer=optimizer, engine=engine, **given)


# -- the same every time -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("handlers", [True, False])
@pytest.mark.parametrize("sync", EVERY_DIAL)
def test_every_dial_on_a_rough_cluster_is_the_same_every_time(sync: str, handlers: bool) -> None:
    engine = sl.Sim(ROUGH, handlers=handlers, check=True)
    first, second = (run(engine, sync=sync, topology="servers:3") for _ in range(2))
    assert same(first.state_dict(), second.state_dict())
    assert first.staleness == second.staleness
    assert first.simulated == second.simulated
    assert first.history == second.history
    assert first.gradients + first.dropped >= 40 // (2 if sync.startswith("downpour") else 1)


@pytest.mark.parametrize("sync", ["softsync:2", "backup:1"])
def test_the_same_run_writes_the_same_lines(sync: str, tmp_path: Path) -> None:
    script = "kill learner 1 at 3 s; add 1 at 4 s; pause shard 1 for 1 s at version 3"
    for name in ("one", "two"):
        run(
            sl.Sim(ROUGH, script=script),
            sync=sync,
            topology="servers:2",
            evaluate=clouds(30),
            checkpoint_every=4,
            run_dir=tmp_path / name,
        )
    lines = [(tmp_path / name / "events.jsonl").read_text() for name in ("one", "two")]
    assert lines[0].replace(str(tmp_path / "one"), "") == lines[1].replace(str(tmp_path / "two"), "")
    assert '"time"' not in lines[0]
    assert '"statistics"' in lines[0]


@pytest.mark.skipif(fibers.greenlet is None, reason="greenlet is not installed")
@pytest.mark.parametrize("sync", ["softsync:1", "delayed:1"])
def test_greenlets_and_threads_give_the_same_bits(sync: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "kill learner 2 at 4 s; add 1 at 5 s"
    engine = sl.Sim(ROUGH, script=script, handlers=False)
    green = run(engine, sync=sync)
    monkeypatch.setattr(fibers, "greenlet", None)
    threads = run(engine, sync=sync)
    assert same(green.state_dict(), threads.state_dict())
    assert green.simulated == threads.simulated
    assert [(e.seconds, e.what) for e in green.events] == [(e.seconds, e.what) for e in threads.events]


def test_another_seed_of_the_cluster_is_another_course_of_events() -> None:
    times = [run(sl.Sim(ROUGH, seed=seed)).seconds for seed in (1, 2, 1)]
    assert times[0] == times[2] != times[1]


def draws(session: sl.Session) -> list[float]:
    """Takes turns with the others between any two draws."""
    optimizer = session.optimizer(nn.Linear(1, 1), partial(torch.optim.SGD, lr=0.1))
    drawn = []
    for _ in range(4):
        optimizer.zero_grad()
        optimizer.param_groups[0]["params"][0].sum().backward()
        drawn += [torch.rand(1).item(), float(np.random.rand()), random.random()]
        optimizer.step()
    return drawn


def expected(rank: int) -> list[float]:
    torch.manual_seed(9 + rank)
    np.random.seed(9 + rank)
    random.seed(9 + rank)
    nn.Linear(1, 1)
    found = []
    for _ in range(4):
        found += [torch.rand(1).item(), float(np.random.rand()), random.random()]
    return found


def test_every_learner_has_its_own_random_states() -> None:
    result = sl.launch(draws, learners=3, sync="async", engine=sl.Sim(ROUGH), seed=9)
    outside = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    assert result.returned == [expected(rank) for rank in range(3)]
    torch.set_rng_state(outside[0])


def gradient_mode(session: sl.Session) -> list[bool]:
    model = nn.Linear(2, 1)
    optimizer = session.optimizer(model, partial(torch.optim.SGD, lr=0.1))
    modes = []
    for _ in range(3):
        with torch.no_grad():
            session.put(model)  # gives way with gradients switched off
        modes.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    return modes


def test_a_learner_that_gives_way_takes_its_gradient_mode_with_it() -> None:
    result = sl.launch(gradient_mode, learners=3, sync="async", engine=sl.Sim(ROUGH))
    assert result.returned == [[True] * 3] * 3


# -- where the time goes -----------------------------------------------------------------------------------------


def test_computing_takes_the_clusters_time() -> None:
    cluster = sl.Cluster(compute=Compute(base=1.0, per_example=0.5))
    result = run(sl.Sim(cluster), learners=2, batch_size=6, epochs=1, sync="hardsync")
    times = result.simulated
    assert times is not None
    assert result.seconds == pytest.approx(10 * 4.0)  # 120 examples in 10 rounds of two batches of six
    assert [times.learners[rank].compute for rank in (0, 1)] == pytest.approx([40.0, 40.0])
    assert times.total.steps == 20
    assert times.overlap == 1.0
    assert result.throughput == pytest.approx(120 / 40.0)


def test_one_card_for_all_is_shared() -> None:
    """Gradients to the shard, and weights back, one after the other: the second learner is always one move late."""
    nbytes = 4 * (320 + 64 + 64 + 64)  # four parameters, each rounded up to 64 elements
    cluster = sl.Cluster(compute=Compute(base=1.0), card=Link(bandwidth=nbytes))
    result = run(sl.Sim(cluster), learners=2, epochs=1, sync="hardsync")
    assert result.seconds == pytest.approx(
        2 + (1 + 2) + 9 * (1 + 1 + 1 + 1) + 2
    )  # the first round begins for all at once
    times = result.simulated
    assert times is not None
    assert times.moved == nbytes * (2 * 10 + 2 * 11)
    assert times.total.communication > times.total.waiting
    assert times.overlap == pytest.approx(20 / (20 + times.total.communication))


def test_who_waits_for_a_straggler_waits_for_others() -> None:
    cluster = sl.Cluster(compute=Compute(base=1.0), speeds=(1.0, 0.25))
    times = run(sl.Sim(cluster), learners=2, epochs=1, sync="hardsync").simulated
    assert times is not None
    assert times.learners[0].waiting == pytest.approx(30.0)
    assert times.learners[1].waiting == pytest.approx(0.0)
    free = run(sl.Sim(cluster), learners=2, epochs=1, sync="async")
    assert free.seconds <= 0.5 * 40


def test_folds_take_time_on_the_shard() -> None:
    slow = sl.Cluster(compute=Compute(base=0.1), fold=Cost(fixed=1.0))
    result = run(sl.Sim(slow), epochs=1, sync="async")
    assert result.seconds == pytest.approx(20.0, rel=0.05)  # twenty folds, one after the other
    faster = run(sl.Sim(slow), epochs=1, sync="softsync:1")
    assert faster.seconds < 8  # five folds of four


def test_more_processes_than_cores_slow_each_other() -> None:
    alone = sl.Cluster(compute=Compute(base=1.0), learners_per_machine=None, cores=4)
    times = [run(sl.Sim(replace(alone, cores=cores)), epochs=1).seconds for cores in (4, 2, 1)]
    assert times == pytest.approx([5.0, 10.0, 20.0])


def test_slices_share_cores_too_and_killed_work_leaves_its_core() -> None:
    alone = sl.Cluster(compute=Compute(base=1.0), learners_per_machine=None, cores=4, slice=0.1)
    times = [run(sl.Sim(replace(alone, cores=cores)), epochs=1).seconds for cores in (4, 2, 1)]
    assert times == pytest.approx([5.0, 10.0, 20.0], rel=0.05)
    rough = replace(ROUGH, slice=0.05, spin=0.02)
    engine = sl.Sim(rough, script="kill learner 1 at 3 s; add 1 at 5 s")
    for sync in ("softsync:1", "hardsync"):
        first, again = (run(engine, sync=sync) for _ in range(2))
        assert first.gradients >= 40
        assert first.seconds == again.seconds
        assert same(first.state_dict(), again.state_dict())


@pytest.mark.parametrize("name", ["p775", "ethernet-1g", "dgx-1"])
def test_named_clusters_run(name: str) -> None:
    result = run(sl.Sim(f"{name}:stragglers=0.25"), sync="softsync:1")
    assert result.gradients == 40
    assert result.simulated is not None
    assert 0 < result.simulated.overlap <= 1


# -- scripts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("handlers", [True, False])
@pytest.mark.parametrize("sync", EVERY_DIAL)
def test_deaths_joins_and_pauses(sync: str, handlers: bool) -> None:
    script = "kill learner 1 at 2.2 s; pause learner 2 for 3 s at 2.5 s; add 2 at 3 s; pause shard 0 for 1 s at version 4"
    result = run(sl.Sim(ROUGH, script=script, handlers=handlers, check=True), sync=sync, epochs=3)
    assert {"lost", "joined", "paused"} <= set(kinds(result))
    lost = next(event for event in result.events if event.kind == "lost")
    assert (lost.rank, lost.details["learner"]) == (1, 2)
    assert "handed_out_again" in lost.details
    assert [record.epoch for record in result.history] == [0, 1, 2]


def test_everything_that_a_dead_learner_had_is_trained_on_by_the_others() -> None:
    result = run(sl.Sim(script="kill learner 0 at 2.5 s; kill learner 3 at 3.5 s", check=True))
    assert kinds(result) == ["lost", "lost"]
    assert result.history[-1].examples == 240
    assert result.returned[0] is None


def test_a_lost_learner_is_replaced() -> None:
    result = run(sl.Sim(script="kill learner 1 at 2.5 s"), replace=True)
    assert kinds(result) == ["lost", "replaced"]
    assert result.history[-1].examples == 240


def test_the_last_learners_death_ends_the_run() -> None:
    with pytest.raises(LostError, match="all learners are lost"):
        run(sl.Sim(script="kill learner 0 at 2.5 s; kill learner 1 at 2.5 s"), learners=2)


def test_a_pause_delays_by_its_length() -> None:
    calm = run(sl.Sim(), learners=1, sync="hardsync").seconds
    held = run(sl.Sim(script="pause learner 0 for 7 s at 1.5 s"), learners=1, sync="hardsync").seconds
    assert held == pytest.approx(calm + 7)
    shard = run(sl.Sim(script="pause shard 0 for 7 s at 1.5 s"), learners=1, sync="hardsync").seconds
    assert calm + 6 < shard <= calm + 7


def test_patience_is_of_virtual_time() -> None:
    script = "pause learner 1 for 50 s at 2.5 s"
    patient = run(sl.Sim(script=script), sync="hardsync", patience=60)
    assert kinds(patient) == ["paused"]
    ended = run(sl.Sim(script=script), sync="hardsync", patience=20, kill_hung=True)
    assert kinds(ended) == ["paused", "hangs", "lost"]
    assert ended.seconds < patient.seconds


def test_a_script_changes_the_dial_and_stops() -> None:
    result = run(sl.Sim(script="change to hardsync at version 8; stop at version 14"), epochs=50)
    assert kinds(result) == ["dial"]
    assert 14 <= result.version <= 18
    assert result.staleness.max > 0


def test_what_a_script_names_may_be_gone() -> None:
    result = run(sl.Sim(script="kill learner 9 at 1 s; pause shard 3 for 1 s at 1 s; add 1 at 1000 s"))
    assert kinds(result) == ["missed", "missed", "missed"]
    assert result.events[-1].what == "not played, the run was over before: add 1 at 1000 s"
    assert result.seconds < 100


def test_lines_of_a_script_that_were_not_played_are_said_once(tmp_path: Path) -> None:
    script = "add 1 at version 3; kill learner 1 at 1000 s; kill learner 1 at 1000 s; stop at 2000 s; add 1 at version 9999"
    folder = {"run_dir": str(tmp_path), "checkpoint_every": 5}
    for options in ({}, folder, {"topology": "allreduce", "sync": "hardsync"}):
        lines = script if "topology" not in options else script.replace("add 1", "kill learner 77")
        missed = [each.what for each in run(sl.Sim(script=lines), **options).events if each.kind == "missed"]
        assert (
            sum("at 1000 s" in each for each in missed) == 2 and sum("9999" in each for each in missed) == 1
        )
        assert len(missed) == (4 if "topology" in options else 3), "the stop is no fault; nobody has rank 77"


@pytest.mark.parametrize(
    "make, error, words",
    [
        (lambda: sl.Sim(script="kill everybody at 3 s"), sl.UsageError, "write for example"),
        (
            lambda: sl.Sim(script="kill learner 1 at 1.2.3 s"),
            sl.UsageError,
            "no fault: 'kill learner 1 at 1.2",
        ),
        (lambda: sl.Sim(script="add 0 at 3 s"), sl.UsageError, "no fault: 'add 0 at 3 s'"),
        (lambda: sl.Sim(script=["stop at 3 s"]), sl.UsageError, "one text with ; between"),  # type: ignore[arg-type]
        (lambda: sl.Sim(seed="a"), sl.UsageError, "seed is a whole number"),  # type: ignore[arg-type]
        (lambda: run("sim:p775"), sl.UsageError, "or sl.Sim"),  # type: ignore[arg-type]
        (lambda: sl.Sim("p775", compute=2.0), sl.UsageError, "not both: compute"),
        (lambda: sl.Sim(3), sl.UsageError, "takes a Cluster"),  # type: ignore[arg-type]
        (lambda: sl.Sim("cray"), sl.UsageError, "unknown cluster"),
        (lambda: run(sl.Sim(script="change to delayed:3 at 2 s")), DialError, "keeps 4 versions"),
        (lambda: run(sl.Sim(script="change to softsync:9 at 2 s")), DialError, "n <= learners"),
    ],
)
def test_what_cannot_be_is_refused_before_the_run(make: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        make()


def raises(session: sl.Session) -> int:
    optimizer = session.optimizer(nn.Linear(1, 1), partial(torch.optim.SGD, lr=0.1))
    for step in range(6):
        if session.rank == 1 and step == 3:
            raise KeyError("lost shoe")
        optimizer.zero_grad()
        optimizer.param_groups[0]["params"][0].sum().backward()
        optimizer.step()
    return session.rank


def test_an_exception_may_end_only_its_learner() -> None:
    result = sl.launch(raises, learners=3, sync="hardsync", engine="sim", on_error="continue")
    assert result.returned == [0, None, 2]
    assert kinds(result) == ["raised"]


def cleans_up(session: sl.Session) -> None:
    optimizer = session.optimizer(nn.Linear(1, 1), partial(torch.optim.SGD, lr=0.1))
    try:
        for _ in range(50):
            optimizer.zero_grad()
            optimizer.param_groups[0]["params"][0].sum().backward()
            optimizer.step()
    finally:
        session.log(ended=session.rank)
        optimizer.step()


def test_a_killed_learner_says_nothing_more() -> None:
    result = sl.launch(cleans_up, learners=3, sync="async", engine=sl.Sim(script="kill learner 1 at 9.5 s"))
    assert sorted(rank for rank, _, _ in result.logs) == [0, 2]


@pytest.mark.parametrize("handlers", [True, False])
def test_a_run_that_goes_on_draws_what_it_would_have_drawn(handlers: bool, tmp_path: Path) -> None:
    cluster = sl.Cluster(compute=Compute(base=1.0), jitter=Jitter(kind="exponential", spread=1.0))
    options: dict[str, Any] = {"sync": "hardsync", "learners": 2}
    whole = run(sl.Sim(cluster, handlers=handlers), epochs=4, **options)
    run(sl.Sim(cluster, handlers=handlers), epochs=2, run_dir=tmp_path / "first", **options)
    rest = run(sl.Sim(cluster, handlers=handlers), epochs=4, resume=tmp_path / "first", **options)
    took = [[b.seconds - a.seconds for a, b in pairwise(result.history[2:])] for result in (whole, rest)]
    assert took[0] == pytest.approx(took[1])
    assert rest.seconds == pytest.approx(whole.seconds)
    assert same(whole.state_dict(), rest.state_dict())


def rudra_loop(session: sl.Session, batch_size: int, steps: int) -> None:
    """Sizes of cifar10_full, about 90,000 parameters, without its computation."""
    model = nn.Linear(299, 299)
    optimizer = session.optimizer(model, partial(torch.optim.SGD, lr=0.0))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(steps):
        session.examples += batch_size
        optimizer.step()


@pytest.mark.parametrize(
    "sync, batch_size, learners, seconds",
    [
        ("hardsync", 128, 1, 22_392),
        ("softsync:1", 4, 30, 1_573),
        ("async", 4, 30, 2_073),
        ("hardsync", 8, 30, 1_995),
    ],
)
def test_rudras_times(sync: str, batch_size: int, learners: int, seconds: float) -> None:
    """Of 140 epochs of CIFAR-10; docs/measured/simulator.md says how far the other rows are."""
    steps = 20
    result = sl.launch(rudra_loop, batch_size, steps, learners=learners, sync=sync, engine=sl.Sim("p775"))
    told = result.seconds / steps * 140 * 50_000 / (batch_size * learners)
    assert told == pytest.approx(seconds, rel=0.15)


@pytest.mark.parametrize("sync", ["hardsync", "async", "backup:1"])
def test_norms_over_shards_that_are_at_different_places(sync: str) -> None:
    slow = replace(ROUGH, shards_per_machine=1, learners_per_machine=1)
    options: dict[str, Any] = {"sync": sync, "clip_norm": 0.5, "topology": "servers:3", "epochs": 3}
    script = "pause shard 1 for 2 s at 2 s; kill learner 1 at version 5; pause shard 2 for 1 s at version 9"
    first, second = (run(sl.Sim(slow, script=script, check=True), **options) for _ in range(2))
    assert same(first.state_dict(), second.state_dict())
    assert [record.epoch for record in first.history] == [0, 1, 2]
