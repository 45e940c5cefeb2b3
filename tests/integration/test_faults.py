"""Learners come and go (M8): deaths, exceptions, hangs, joins, replacements, under every preset."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

import syncline as sl
from syncline.engines.run import Event
from syncline.errors import LearnerError
from tests.integration import batch_runs, small_runs
from tests.integration.small_runs import PRESETS, points, until

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SIZE, EPOCHS, BATCH = 960, 2, 8


def start(**options: Any) -> sl.Run:
    return small_runs.start(points(SIZE), **{"epochs": EPOCHS, "batch_size": BATCH, **options})


def check_account(result: sl.Result, epochs: int = EPOCHS, size: int = SIZE) -> None:
    """Versions, gradients and examples add up: what was handed out is folded once, or counted as dropped.

    All batches are whole here, and where gradients are dropped each is of one batch.
    """
    table = result.statistics.tables[0]
    assert size % BATCH == 0
    assert [record.epoch for record in result.history] == list(range(epochs))
    assert max(record.version for record in result.history) == result.version
    assert result.staleness.gradients == result.gradients
    assert table.examples + BATCH * result.dropped == size * epochs
    assert table.pending == 0


def events(result: sl.Result, kind: str) -> list[Event]:
    return [event for event in result.events if event.kind == kind]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("sync", PRESETS)
def test_a_learner_dies_and_the_others_finish_its_work(sync: str) -> None:
    run = start(script="kill learner 1 at version 12", sync=sync)
    result = run.wait(timeout=60)
    (lost,) = events(result, "lost")
    assert lost.rank == 1 and "SIGKILL" in lost.what
    assert lost.details["handed_out_again"] >= 0 and lost.details["in_unfolded_gradients"] >= 0
    check_account(result)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("sync", PRESETS)
def test_a_lost_learner_is_replaced_under_its_rank(sync: str) -> None:
    script = "kill learner 2 at version 8; kill learner 0 at version 16"
    run = start(script=script, sync=sync, replace=True, epochs=5)
    result = run.wait(timeout=60)
    assert sorted(event.rank for event in events(result, "lost")) == [0, 2]
    assert sorted(event.rank for event in events(result, "replaced")) == [0, 2]
    states = [(p.rank, p.state) for p in result.statistics.processes if p.role == "learner"]
    assert sorted(states) == [(0, "lost"), (0, "returned"), (1, "returned"), (2, "lost"), (2, "returned")]
    check_account(result, epochs=5)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("sync", PRESETS)
def test_learners_join_during_a_run(sync: str) -> None:
    run = start(script="add 2 at version 10", sync=sync, learners=2)
    result = run.wait(timeout=60)
    assert [event.rank for event in events(result, "joined")] == [2, 3]
    assert {p.rank for p in result.statistics.processes if p.state == "returned"} == {0, 1, 2, 3}
    check_account(result)


def test_the_last_learner_may_be_replaced_too() -> None:
    script = "kill learner 0 at version 5; kill learner 0 at version 30"
    run = start(script=script, learners=1, replace=True)
    result = run.wait(timeout=60)
    assert len(events(result, "replaced")) == 2
    check_account(result)


def dies_at_once(session: sl.Session) -> None:
    if session.rank == 1:
        os._exit(7)
    optimizer = session.optimizer(nn.Linear(2, 1), partial(SGD, lr=0.1))
    optimizer.step()


def test_replacements_that_never_step_are_given_up() -> None:
    result = sl.launch(dies_at_once, learners=2, replace=True, threads=1)
    assert len(events(result, "lost")) == 3 and len(events(result, "replaced")) == 2
    (given_up,) = events(result, "given up")
    assert given_up.rank == 1 and "3 processes in a row" in given_up.what
    assert result.version == 1


# -- exceptions ----------------------------------------------------------------------------------------------


def raises_on_rank_one(session: sl.Session, data: TensorDataset, flag: Path) -> int:
    """Its third batch comes back before others are past the end: they wait for the flag (in lockstep for its round)."""
    model = nn.Linear(4, 2)
    optimizer = session.optimizer(model, partial(SGD, lr=0.1))
    count = 0
    for x, y in session.loader(data, batch_size=BATCH):
        count += 1
        if session.rank == 1 and count == 3:
            raise ValueError("the third is too many")
        while session.rank != 1 and session.sync.lead is None and count == 20 and not flag.exists():
            time.sleep(0.001)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return count


def test_an_exception_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(LearnerError, match="the third is too many") as caught:
        sl.launch(raises_on_rank_one, points(SIZE), tmp_path / "flag", learners=3, threads=1)
    assert caught.value.rank == 1


@pytest.mark.parametrize(
    "sync, batches", [("hardsync", 1), ("async", 1), ("downpour:push=3,fetch=4,local_lr=0.1", 0)]
)
def test_or_only_its_learner(sync: str, batches: int, tmp_path: Path) -> None:
    """What it had read and not published is handed out again; downpour pushes its rest when the loop ends."""
    run = sl.launch(
        raises_on_rank_one,
        points(SIZE),
        tmp_path / "flag",
        learners=3,
        sync=sync,
        on_error="continue",
        threads=1,
        wait=False,
    )
    while not any(process.state == "raised" for process in run.statistics().processes):
        time.sleep(0.001)
    run.statistics()  # answered after the leading shard has heard that it left
    (tmp_path / "flag").touch()
    result = run.wait(timeout=60)
    (raised,) = events(result, "raised")
    assert raised.rank == 1 and "the third is too many" in raised.what
    assert raised.details["handed_out_again"] == BATCH * batches
    assert raised.details["in_unfolded_gradients"] == 0
    assert result.returned[1] is None and result.returned[0] > 3
    assert result.statistics.tables[0].examples == SIZE


def always_raises(session: sl.Session) -> None:
    raise ValueError(f"rank {session.rank}")


def test_if_all_raise_the_run_fails_all_the_same() -> None:
    with pytest.raises(LearnerError, match="rank"):
        sl.launch(always_raises, learners=2, on_error="continue", threads=1)


# -- hangs ---------------------------------------------------------------------------------------------------


def hangs(session: sl.Session, data: TensorDataset) -> int:
    model = nn.Linear(4, 2)
    optimizer = session.optimizer(model, partial(SGD, lr=0.1))
    for index, (x, y) in enumerate(session.loader(data, batch_size=8)):
        if session.rank == 1 and index == 2:
            time.sleep(600 if session.learners == 3 else 2.5)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return session.rank


def test_a_learner_that_hangs_is_killed_on_request_and_its_work_done() -> None:
    result = sl.launch(hangs, points(SIZE), learners=3, patience=1.0, kill_hung=True, threads=1)
    assert [event.rank for event in events(result, "hangs")] == [1]
    assert [event.rank for event in events(result, "killed")] == [1]
    (lost,) = events(result, "lost")
    assert lost.details["handed_out_again"] >= BATCH
    assert result.statistics.tables[0].examples == SIZE


def test_without_it_is_only_named_and_who_waits_for_it_is_not() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = sl.launch(hangs, points(SIZE), learners=2, patience=1.0, threads=1)
    assert [event.rank for event in events(result, "hangs")] == [1]
    assert any("learner 1 hangs" in str(warning.message) for warning in said)
    assert result.returned == [0, 1] and result.statistics.tables[0].examples == SIZE


# -- statistics ----------------------------------------------------------------------------------------------


def test_statistics_list_learners_and_shards_with_pids_and_states() -> None:
    run = start(sync="hardsync", topology="servers:2", epochs=4)
    while not (statistics := run.statistics()).tables or statistics.tables[0].version < 3:
        time.sleep(0.005)
    found = {(process.role, process.rank): process for process in statistics.processes}
    assert set(found) == {("learner", 0), ("learner", 1), ("learner", 2), ("shard", 0), ("shard", 1)}
    for process in found.values():
        os.kill(process.pid, 0)  # it is there
    assert all(found["shard", index].state == "running" for index in (0, 1))
    assert all(found["learner", rank].steps > 0 for rank in range(3))
    result = run.wait(timeout=60)
    assert {p.state for p in result.statistics.processes if p.role == "learner"} == {"returned"}


# -- many kills ----------------------------------------------------------------------------------------------

KILLS, RUNS = 8, 5  # 40 kills here; 200 were played when this was written, see docs/measured/faults.md


@pytest.mark.sweep(2)
@pytest.mark.parametrize("number", range(RUNS))
def test_random_kills_with_three_learners(number: int) -> None:
    chance = random.Random(number)
    sync = PRESETS[number % len(PRESETS)]
    moments = sorted(chance.sample(range(3, 60), KILLS))
    script = "; ".join(f"kill learner {chance.randrange(3)} at version {moment}" for moment in moments)
    result = start(script=script, sync=sync, replace=True, epochs=3).wait(timeout=120)
    assert len(events(result, "lost")) == KILLS
    check_account(result, epochs=3)


# -- the evaluator -------------------------------------------------------------------------------------------


def kills_itself(model: nn.Module, folder: Path, times: int) -> dict[str, float]:
    """Die in the first evaluations, so many times."""
    deaths = len(list(folder.iterdir()))
    if deaths < times:
        (folder / f"{deaths}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return {"one": 1.0}


def evaluated(kind: str, folder: Path, times: int, **options: Any) -> sl.Run:
    """Start a short run; its evaluator dies so many times."""
    folder.mkdir()
    evaluate = partial(kills_itself, folder=folder, times=times)
    if kind == "batch method":
        return batch_runs.start(steps=3, evaluate=evaluate, **options)
    given = {"topology": "allreduce", "objective": None, "loss": F.cross_entropy} if kind == "peers" else {}
    return start(sync="hardsync", epochs=3, evaluate=evaluate, **given, **options)


RUNS = ["servers", "peers", "batch method"]


@pytest.mark.parametrize("kind", RUNS)
def test_an_evaluator_that_dies_is_replaced_and_every_epoch_is_evaluated(kind: str, tmp_path: Path) -> None:
    result = evaluated(kind, tmp_path / "deaths", 2).wait(timeout=60)
    assert [record.metrics for record in result.history] == [{"one": 1.0}] * 3
    lost = events(result, "evaluator lost")
    assert len(lost) == 2 and all("ended with signal SIGKILL" in event.what for event in lost)


@pytest.mark.parametrize("kind", RUNS)
def test_an_evaluation_that_kills_every_evaluator_is_skipped_with_a_warning(
    kind: str, tmp_path: Path
) -> None:
    run = evaluated(kind, tmp_path / "deaths", 3, run_dir=tmp_path / "run")
    with pytest.warns(
        sl.errors.SynclineWarning, match="is not evaluated: 3 evaluators in a row ended"
    ) as said:
        result = run.wait(timeout=60)
    first, *others = result.history
    assert first.skipped and first.metrics == {} and f"version {first.version} is not" in str(said[0].message)
    assert [record.metrics for record in others] == [{"one": 1.0}] * 2
    assert len(events(result, "evaluator lost")) == 3


@pytest.mark.parametrize("kind", RUNS)
def test_an_idle_evaluator_that_is_killed_is_replaced(kind: str, tmp_path: Path) -> None:
    run = evaluated(kind, tmp_path / "deaths", 0)

    def evaluator() -> int | None:
        found = [each.pid for each in run.statistics().processes if each.role == "evaluator"]
        return found[0] if found else None

    until(evaluator)
    if (pid := evaluator()) is not None:
        os.kill(pid, signal.SIGKILL)
    result = run.wait(timeout=60)
    assert [record.metrics for record in result.history] == [{"one": 1.0}] * 3
