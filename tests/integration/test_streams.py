"""Iterable data sets over servers (M7): epochs with records, evaluation, callbacks and early stopping, as of any other data."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, IterableDataset

import syncline as sl
from syncline.errors import UsageError
from tests.integration.small_runs import PATIENCE, PRESETS, Constant, launched, rising, step, with_faults

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ENGINES = ["local", "sim"]


class Stream(IterableDataset[Tensor]):
    """So many numbers, each time it is iterated."""

    def __init__(self, size: int, pace: float = 0.0) -> None:
        self.size, self.pace = size, pace

    def __iter__(self) -> Iterator[Tensor]:
        for index in range(self.size):
            if self.pace:
                time.sleep(self.pace)
            yield torch.tensor([index / self.size])


class Once(IterableDataset[Tensor]):
    """A generator: the second time it is empty."""

    def __init__(self) -> None:
        self.rest = list(torch.arange(24.0)[:, None])

    def __iter__(self) -> Iterator[Tensor]:
        while self.rest:
            yield self.rest.pop()


class Endless(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor([1.0 / (1 + index)]) for index in itertools.count())


class Loaded(IterableDataset[Tensor]):
    """Read by a process of its own."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Tensor]:
        for batch in DataLoader(Stream(self.size), batch_size=2, num_workers=1):
            yield from batch


def objective(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch).square().mean()


def train(data: Any, script: str = "", **options: Any) -> Any:
    """Three learners; the first has one batch more than the others of 13 examples, of two the last has none."""
    settings = {"objective": objective, "optimizer": partial(SGD, lr=0.1), "learners": 3, "batch_size": 4}
    torch.manual_seed(0)
    begin = partial(sl.train, options.pop("model", nn.Linear(1, 1)), data, threads=1)
    return with_faults(script, begin, **{**settings, **options})


@pytest.mark.parametrize("engine, size", [("local", 13), ("sim", 13), ("sim", 2)])
@pytest.mark.parametrize("sync", PRESETS)
def test_epochs_of_streams_have_records(engine: str, sync: str, size: int) -> None:
    told: list[int] = []
    result = train(
        Stream(size),
        sync=sync,
        engine=engine,
        epochs=3,
        evaluate=Stream(5),
        callbacks=[lambda record: told.append(record.epoch)],
    )
    assert told == [record.epoch for record in result.history] == [0, 1, 2]
    assert all(record.metrics["loss"] >= 0 for record in result.history)
    last = result.history[-1]
    assert (last.version, last.examples) == (result.version, result.statistics.tables[0].examples)
    assert [record.version for record in result.history] == sorted(r.version for r in result.history)
    if result.dropped == 0:
        assert last.examples == 3 * size
    if sync == "hardsync":  # the epoch ends for all at once
        rounds = 2 if size == 13 else 1
        assert [record.version for record in result.history] == [rounds, 2 * rounds, 3 * rounds]
        assert [record.examples for record in result.history] == [size, 2 * size, 3 * size]
        assert sorted(last.losses) == ([0, 1, 2] if size == 13 else [0, 1])


def last_versions(session: sl.Session, epochs: int) -> list[int]:
    """The version that folded its last gradient of each epoch; learner 1 takes its time."""
    model = nn.Linear(1, 1)
    optimizer: Any = session.optimizer(model, partial(SGD, lr=0.1))
    loader = session.loader(Stream(40, pace=0.004 * session.rank), batch_size=4)
    found = []
    for _ in range(epochs):
        for batch in loader:
            step(model, optimizer, batch)
        found.append(optimizer.version)
    return found


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("sync", ["async", "hardsync", "downpour"])
def test_an_epoch_ends_with_the_version_that_folded_its_last_gradient(engine: str, sync: str) -> None:
    """Also where others are further on by then."""
    result = launched(last_versions, 3, learners=2, sync=sync, engine=engine)
    last = [max(versions) for versions in zip(*result.returned, strict=True)]
    assert [record.version for record in result.history] == last


@pytest.mark.parametrize("engine", ENGINES)
def test_a_stream_s_epochs_are_evaluated_at_their_versions(engine: str) -> None:
    """The weight counts the updates."""
    result = train(
        Stream(13),
        model=Constant(),
        objective=rising,
        optimizer=partial(SGD, lr=1.0),
        sync="hardsync",
        engine=engine,
        epochs=3,
        evaluate=lambda model: {"weight": model.weight.item()},
    )
    assert [record["weight"] for record in result.history] == [2.0, 4.0, 6.0]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("sync", ["hardsync", "async"])
def test_a_callback_stops_a_run_over_an_endless_number_of_epochs(engine: str, sync: str) -> None:
    result = train(
        Stream(13, pace=0.001), sync=sync, engine=engine, epochs=10_000, callbacks=[lambda r: r.epoch == 1]
    )
    assert [record.epoch for record in result.history][:2] == [0, 1]
    assert len(result.history) < 100


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("sync", ["hardsync", "async"])
@pytest.mark.parametrize("data", [Stream(2), Endless()], ids=["short", "endless"])
def test_steps_over_streams_end_the_run(engine: str, sync: str, data: Any) -> None:
    """Also where a learner finds nothing in its share, again and again, or nobody comes to an end."""
    assert train(data, sync=sync, engine=engine, steps=20).version == 20


@pytest.mark.parametrize("topology", ["servers", "allreduce"])
def test_schedules_go_with_a_stream_s_epochs(topology: str) -> None:
    """Without a warning that lockstep learners disagree: those with shorter shares wait for the others' epoch."""
    result = train(
        Stream(13),
        model=Constant(),
        objective=rising,
        optimizer=partial(SGD, lr=1.0),
        schedule=partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5),
        sync="hardsync",
        topology=topology,
        epochs=2,
    )
    assert result.model.weight.item() == 2 * 1.0 + 2 * 0.5


def test_a_data_set_that_can_be_read_only_once_says_so() -> None:
    with pytest.raises(sl.LearnerError, match="__iter__ must begin anew each time it is called") as caught:
        train(Once(), epochs=2)
    assert isinstance(caught.value.__cause__, UsageError)


def test_learners_that_join_would_have_no_share() -> None:
    run = train(Stream(13), epochs=2, wait=False)
    with pytest.raises(UsageError, match="split over the 3 learners of the start"):
        run.add_learners(1)
    assert len(run.wait(PATIENCE).history) == 2


@pytest.mark.parametrize("sync", ["hardsync", "async"])
def test_a_stream_may_be_read_by_processes_of_its_own(sync: str) -> None:
    result = train(Loaded(26), sync=sync, epochs=2)
    assert [record.epoch for record in result.history] == [0, 1]
    assert result.history[-1].examples == 52


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("sync", ["hardsync", "ssp:2", "async"])
def test_a_loop_may_leave_a_stream_early(engine: str, sync: str) -> None:
    def learner(session: sl.Session) -> list[int]:
        model = nn.Linear(1, 1)
        optimizer = session.optimizer(model, partial(SGD, lr=0.0))
        loader, counts = session.loader(data, batch_size=2), []
        for limit in (2, 0, 100):
            taken = 0
            for batch in loader:
                if taken == limit:
                    break
                taken += 1
                step(model, optimizer, batch)
            counts.append(taken)
        return counts

    data = Stream(16)
    result = launched(learner, learners=2, sync=sync, engine=engine)
    assert result.returned == [[2, 0, 4]] * 2
    assert [record.epoch for record in result.history] == [0, 1, 2]


@pytest.mark.parametrize("sync", ["hardsync", "async", "downpour"])
@pytest.mark.parametrize("replace", [False, True])
def test_a_lost_learner_s_share_is_lost_and_the_epochs_end(sync: str, replace: bool) -> None:
    options = {"sync": sync, "epochs": 3, "replace": replace, "wait": False}
    run = train(Stream(120, pace=0.001), "kill learner 1 at version 4", **options)
    result = run.wait(PATIENCE)
    assert [record.epoch for record in result.history] == [0, 1, 2]
    assert [event.rank for event in result.events if event.kind == "lost"] == [1]
    assert result.history[-1].version == result.version
    if not replace:
        assert result.history[-1].examples < 360


@pytest.mark.parametrize("sync", ["hardsync", "softsync:1"])
def test_a_lost_shard_sends_the_epochs_of_a_stream_back(sync: str, tmp_path: Path) -> None:
    options = {"sync": sync, "epochs": 3, "run_dir": tmp_path / "run", "checkpoint_every": 3, "wait": False}
    run = train(Stream(120, pace=0.001), "kill shard 0 at version 14", **options)
    result = run.wait(PATIENCE)
    assert [record.epoch for record in result.history] == [0, 1, 2]
    assert "recovered" in [event.kind for event in result.events]
    assert result.history[-1].version == result.version


@pytest.mark.parametrize("engine", ENGINES)
def test_a_resumed_run_goes_on_with_the_stream_s_next_epoch(engine: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = train(Stream(13), sync="hardsync", engine=engine, epochs=2, run_dir=folder)
    result = train(Stream(13), sync="hardsync", engine=engine, epochs=4, resume=folder)
    assert [(record.epoch, record.version) for record in result.history] == [(0, 2), (1, 4), (2, 6), (3, 8)]
    assert first.version == 4 and result.history[-1].examples == 4 * 13


def test_checked_simulated_runs_lose_and_gain_learners_over_streams() -> None:
    for sync in PRESETS:
        for script in ("kill learner 1 at version 2", "add 1 at version 2", "kill learner 0 at version 1"):
            result = train(
                Stream(29),
                sync=sync,
                engine=sl.Sim("p775", check=True, script=script),
                epochs=3,
                replace=True,
            )
            assert [record.epoch for record in result.history] == [0, 1, 2], (sync, script)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("sync", ["hardsync", "async"])
def test_an_empty_share_keeps_nobody(engine: str, sync: str) -> None:
    """Learner 1 finds nothing, and loops longer than the one that does."""

    def learner(session: sl.Session) -> int:
        model = nn.Linear(1, 1)
        optimizer = session.optimizer(model, partial(SGD, lr=0.1))
        loader, count = session.loader(data, batch_size=1), 0
        for _ in range(2 + 2 * session.rank):
            for batch in loader:
                count += len(batch)
                step(model, optimizer, batch)
        return count

    data = Stream(1)
    result = launched(learner, learners=2, sync=sync, engine=engine)
    assert result.returned == [2, 0] and [record.epoch for record in result.history] == [0, 1]


def test_a_run_whose_examples_are_all_lost_ends_with_an_error() -> None:
    with pytest.raises(sl.LearnerError, match="no learner that is left finds an example in its share"):
        train(Stream(1), sync="async", engine=sl.Sim("p775", script="kill learner 0 at version 5"), steps=50)
