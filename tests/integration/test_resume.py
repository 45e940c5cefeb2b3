"""Checkpoints and resume (S7): same bits under hardsync, other numbers of learners and shards, bad folders."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import Dataset, TensorDataset

import syncline as sl
from syncline.dial import Course
from syncline.engines import checkpoint_writer as files
from syncline.engines.checkpoint_options import Checkpoints
from syncline.errors import LearnerError, LostWarning, RunError, UsageError
from syncline.report.run_record import read_run
from syncline.roles.run_plan import RunPlan
from syncline.table.checkpoints import CheckpointError, Folder
from tests.integration.small_runs import until

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ENGINES = ["sim", "local"]
SIZE = 204  # 12 batches of 16 and one of 12: rounds and the last batch are uneven


def points() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SIZE, 6, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long())


def net() -> nn.Module:
    """Everything that has a state of its own: batch statistics, dropout."""
    return nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Dropout(0.4), nn.Linear(40, 2))


def train(**options: Any) -> sl.Result:
    settings = {
        "loss": F.cross_entropy,
        "optimizer": partial(Adam, lr=0.01),
        "schedule": partial(StepLR, step_size=1, gamma=0.6),
        "sync": "hardsync",
        "topology": "servers:2",
        "learners": 3,
        "batch_size": 16,
        "epochs": 4,
        "seed": 5,
        "threads": 1,
    }
    model, data = options.pop("model", net), options.pop("data", points())
    return sl.train(model, data, **{**settings, **options})


def unhurried(model: nn.Module, batch: Any) -> Tensor:
    """The same loss, slowly: a stop comes before the end."""
    time.sleep(0.01)
    return F.cross_entropy(model(batch[0]), batch[1])


def same(one: sl.Result, other: sl.Result) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def kept(folder: Path) -> list[Path]:
    return sorted((folder / "checkpoints").iterdir())


@pytest.mark.sweep(3)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "optimizer",
    [
        partial(SGD, lr=0.1, momentum=0.9),
        partial(Adam, lr=0.01),
        partial(torch.optim.Adamax, lr=torch.tensor(0.01)),
    ],
    ids=["SGD", "Adam", "Adamax of a tensor"],
)
def test_from_any_checkpoint_to_the_same_bits(engine: str, optimizer: Any, tmp_path: Path) -> None:
    whole = train(engine=engine, optimizer=optimizer)
    stopped = train(
        engine=engine,
        optimizer=optimizer,
        loss=None,
        objective=unhurried,
        run_dir=tmp_path / "a",
        checkpoint_every=3,
        keep_checkpoints=99,
        callbacks=[lambda record: record.epoch == 1],
    )
    assert stopped.version < whole.version
    folders = kept(tmp_path / "a")
    assert (
        len(folders) >= 2 and int(folders[-1].name) <= stopped.version
    )  # of a whole round, where learners left in one
    for folder in folders:
        result = train(
            engine=engine, optimizer=optimizer, resume=folder, run_dir=tmp_path / f"b{folder.name}"
        )
        assert same(result, whole), folder.name
        assert (result.version, result.gradients) == (whole.version, whole.gradients)
        assert result.staleness == whole.staleness
        assert [r.version for r in result.history] == [r.version for r in whole.history]
        assert [r.loss for r in result.history] == [r.loss for r in whole.history]


def test_the_local_engine_goes_on_with_a_simulated_run_to_the_same_bits(tmp_path: Path) -> None:
    whole = train(engine="sim")
    train(engine="sim", run_dir=tmp_path, checkpoint_every=4, callbacks=[lambda record: record.epoch == 0])
    assert same(train(engine="local", resume=tmp_path), whole)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("sync", ["hardsync", "softsync:1", "async", "delayed:2", "ssp:1", "backup:1"])
@pytest.mark.parametrize("learners, shards", [(2, 3), (4, 1)])
def test_with_another_number_of_learners_or_shards(
    sync: str, learners: int, shards: int, tmp_path: Path
) -> None:
    stop = {"callbacks": [lambda record: record.epoch == 1], "loss": None, "objective": unhurried}
    part = train(sync=sync, run_dir=tmp_path, checkpoint_every=5, **stop)
    before = part.statistics.tables[0].examples
    result = train(sync=sync, resume=tmp_path, learners=learners, topology=f"servers:{shards}")
    assert [record.epoch for record in result.history] == [0, 1, 2, 3]
    examples = result.statistics.tables[0].examples
    assert before <= examples <= 4 * SIZE
    assert examples == 4 * SIZE or result.dropped > 0
    assert result.version >= part.version


@pytest.mark.parametrize("engine", ENGINES)
def test_a_finished_run_has_nothing_left_to_do(engine: str, tmp_path: Path) -> None:
    whole = train(engine=engine, run_dir=tmp_path)
    again = train(engine=engine, resume=tmp_path)
    assert same(whole, again) and again.version == whole.version
    longer = train(engine=engine, resume=tmp_path, epochs=5)
    assert same(longer, train(engine=engine, epochs=5))


def test_only_the_last_checkpoints_stay_and_they_hold_no_pickle(tmp_path: Path) -> None:
    result = train(run_dir=tmp_path, checkpoint_every=2, keep_checkpoints=2)
    assert 1 <= len(kept(tmp_path)) <= 2
    assert kept(tmp_path)[-1].name == f"{result.version:09d}"
    names = sorted(path.name for path in kept(tmp_path)[-1].iterdir())
    tables = ["table0-shard0.safetensors", "table0-shard1.safetensors"]
    assert names == ["checkpoint.json", "learners.safetensors", *tables]
    for name in names[1:]:
        assert safetensors.torch.load_file(kept(tmp_path)[-1] / name)
    json.loads((kept(tmp_path)[-1] / "checkpoint.json").read_text())
    events = [event for event in result.events if event.kind == "checkpoint"]
    assert [event.details["version"] for event in events] == sorted(e.details["version"] for e in events)


def test_every_so_many_seconds(tmp_path: Path) -> None:
    """In virtual time a step takes a second."""
    result = train(engine="sim", run_dir=tmp_path, checkpoint_every="10s", keep_checkpoints=99)
    versions = [event.details["version"] for event in result.events if event.kind == "checkpoint"]
    assert len(versions) >= 2 and versions[-1] == result.version


class Shaky(Dataset[Any]):
    """Random numbers in the data: numpy's and Python's own."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Any:
        import random

        import numpy as np

        shift = random.random() + float(np.random.rand())
        return torch.full((3,), index / 60 + shift), torch.tensor(index % 2)


def own_loop(session: sl.Session, epochs: int, stop_after: int | None) -> int:
    model = nn.Linear(3, 2)
    optimizer = session.optimizer(model, partial(SGD, lr=0.1, momentum=0.9))
    loader = session.loader(Shaky(), batch_size=5, ahead=0)
    while loader.epoch < epochs:
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        if stop_after is not None and loader.epoch == stop_after:
            return loader.epoch
    return loader.epoch


@pytest.mark.parametrize("engine", ENGINES)
def test_own_loops_go_on_where_their_loader_stands(engine: str, tmp_path: Path) -> None:
    launch = partial(sl.launch, own_loop, learners=2, sync="hardsync", engine=engine, threads=1)
    whole = launch(3, None)
    launch(3, 1, run_dir=tmp_path, checkpoint_every=4, keep_checkpoints=99)
    for index, folder in enumerate(kept(tmp_path)):
        result = launch(3, None, resume=folder, run_dir=tmp_path / f"b{index}")
        assert result.returned == [3, 3]
        assert same(result, whole), folder.name


def two_tables(session: sl.Session, data: TensorDataset) -> None:
    one, two = nn.Linear(6, 4), nn.Linear(4, 2)
    first = session.optimizer(one, partial(SGD, lr=0.1, momentum=0.9))
    second = session.optimizer(two, partial(Adagrad, lr=0.1))
    loader = session.loader(data, batch_size=12)
    while loader.epoch < 2:
        for x, y in loader:
            first.zero_grad()
            second.zero_grad()
            F.cross_entropy(two(one(x)), y).backward()
            first.step()
            second.step()


def test_several_tables_are_cut_together(tmp_path: Path) -> None:
    launch = partial(sl.launch, two_tables, points(), learners=2, engine="sim", sync="hardsync")
    whole = launch()
    part = launch(run_dir=tmp_path, checkpoint_every=4, keep_checkpoints=99)
    assert same(part, whole)
    for index, folder in enumerate(kept(tmp_path)):
        result = launch(resume=folder, run_dir=tmp_path / f"b{index}")
        for table in (0, 1):
            a, b = result.state_dict(table), whole.state_dict(table)
            assert all(torch.equal(a[name], b[name]) for name in a), (folder.name, table)


# -- what cannot be resumed ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "one"
    train(engine="sim", run_dir=folder, checkpoint_every=10, epochs=2)
    return folder


def test_another_model_is_refused_and_named(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(LearnerError, match=r"was made by another model.*0\.weight.*\[40, 6\].*\[41, 6\]"):
        train(
            model=lambda: nn.Sequential(nn.Linear(6, 41), nn.Linear(41, 2)),
            resume=run_dir,
            run_dir=tmp_path,
            engine="sim",
        )


def test_another_optimizer_seed_or_data_set_is_refused(run_dir: Path, tmp_path: Path) -> None:
    def elsewhere(name: str) -> dict[str, Any]:
        return {"resume": run_dir, "run_dir": tmp_path / name, "engine": "sim"}

    with pytest.raises(LearnerError, match=r"holds the state of .*Adam, this run has .*SGD"):
        train(optimizer=partial(SGD, lr=0.1), **elsewhere("a"))
    with pytest.raises(UsageError, match="was made with seed=5, this run has seed=6"):
        train(seed=6, **elsewhere("b"))
    with pytest.raises(LearnerError, match="204 examples in loader 0"):
        train(data=TensorDataset(torch.zeros(50, 6), torch.zeros(50, dtype=torch.long)), **elsewhere("c"))


def test_a_folder_that_holds_a_run_is_not_overwritten(run_dir: Path) -> None:
    with pytest.raises(UsageError, match=r"holds a run already. if_exists .* 'resume' continues it"):
        train(run_dir=run_dir)


def fails(model: Any, batch: Any) -> Any:
    raise ValueError("a slip")


@pytest.mark.parametrize("engine", ["local", "sim"])
def test_a_script_that_failed_in_its_first_step_is_mended_and_run_again(engine: str, tmp_path: Path) -> None:
    with pytest.raises(LearnerError, match="a slip"):
        train(run_dir=tmp_path / "run", engine=engine, loss=None, objective=fails)
    result = train(run_dir=tmp_path / "run", engine=engine)
    record = read_run(tmp_path / "run")
    assert len(record.starts) == 1 and [each["epoch"] for each in record.epochs] == [0, 1, 2, 3]
    assert result.version > 0


def test_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing"):
        train(resume=tmp_path / "nothing")


def test_a_damaged_checkpoint_names_the_older_good_one_which_works(tmp_path: Path) -> None:
    train(engine="sim", run_dir=tmp_path, checkpoint_every=8, keep_checkpoints=99)
    older, newest = kept(tmp_path)[-2:]
    victim = newest / "table0-shard1.safetensors"
    with victim.open("r+b") as file:
        file.truncate(victim.stat().st_size - 7)
    with pytest.raises(CheckpointError, match=rf"table0-shard1.*{older.name}"):
        train(engine="sim", resume=tmp_path)
    result = train(engine="sim", resume=older, run_dir=tmp_path / "b")
    assert same(result, train(engine="sim"))


def test_an_unwritable_folder_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(CheckpointError, match="cannot use"):
        train(run_dir=tmp_path / "file" / "run")


def test_a_full_disk_is_a_warning_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(engine="sim")
    written = files.write_tensors
    calls = []

    def full(path: Path, *rest: Any) -> Any:
        calls.append(path)
        if 3 < len(calls) <= 6:  # the second checkpoint
            raise CheckpointError(f"cannot write {path}: No space left on device")
        return written(path, *rest)

    monkeypatch.setattr(files, "write_tensors", full)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = train(engine="sim", run_dir=tmp_path, checkpoint_every=5, keep_checkpoints=99)
    (failed,) = [event for event in result.events if event.kind == "checkpoint failed"]
    good = kept(tmp_path)[0]
    text = " ".join(str(warning.message) for warning in said)
    assert "No space left" in failed.what
    assert f"the last good one is {good}" in text and "The run goes on" in text
    assert same(result, whole)
    assert not [name for name in os.listdir(tmp_path / "checkpoints") if name.startswith(".")]


def test_going_on_from_a_live_run_that_prunes_meanwhile(tmp_path: Path) -> None:
    """A resume takes the newest checkpoint it finds, and keeps it when the live run removes it."""
    live = tmp_path / "live"
    options: dict[str, Any] = {
        "sync": "softsync:1",
        "learners": 2,
        "checkpoint_every": 1,
        "keep_checkpoints": 1,
    }
    run: Any = train(
        model=partial(nn.Linear, 6, 2), epochs=100_000, seed=0, run_dir=live, wait=False, **options
    )
    plan = RunPlan(course=Course.of("async"), learners=2)
    versions = []
    try:
        until(Folder(live / "checkpoints").all)
        for number in range(64):
            _, storage = Checkpoints(tmp_path / f"{number}", live, "end", 2).opened(plan)
            assert storage.lock is not None and storage.restored is not None
            storage.lock.release()
            versions.append(storage.restored.version)
            found = storage.restored.tables[0].content
            assert [tuple(value.shape) for value in found.values.values()] == [(2, 6), (2,)]
    finally:
        run.stop()
        run.wait(timeout=60)
    assert versions == sorted(versions) and versions[-1] > versions[0]


# -- runs that fail --------------------------------------------------------------------------------------------


def linear(**options: Any) -> sl.Result:
    """Train what draws no random numbers, so that runs can be compared to the bit."""
    given = {"optimizer": partial(SGD, lr=0.1, momentum=0.9), "schedule": None, "learners": 2, "epochs": 3}
    return train(model=partial(nn.Linear, 6, 2), **{**given, **options})


def fails_at(model: nn.Module, batch: Any, update: int, how: str) -> Tensor:
    """Raise, or end the process, in the forward pass after so many in this process."""
    fails_at.passes = getattr(fails_at, "passes", 0) + 1  # type: ignore[attr-defined]
    if fails_at.passes > update:  # type: ignore[attr-defined]
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("a bad example")
    return F.cross_entropy(model(batch[0]), batch[1])


def raises(record: Any) -> None:
    raise ValueError(f"in epoch {record.epoch}")


FAILURES: dict[str, tuple[dict[str, Any], str]] = {
    "a learner raises": (
        {"loss": None, "objective": partial(fails_at, update=9, how="raises")},
        "a bad example",
    ),
    "all learners die": (
        {"loss": None, "objective": partial(fails_at, update=9, how="dies")},
        "all learners are lost",
    ),
    "a callback fails": ({"callbacks": [raises]}, "a callback failed"),
    "the evaluation fails": ({"evaluate": raises}, "evaluation failed"),
}


@pytest.mark.parametrize("topology", ["servers:2", "tree:2,servers=2"])
@pytest.mark.parametrize("why", FAILURES)
def test_a_run_that_fails_leaves_a_checkpoint_of_what_its_shards_hold(
    why: str, topology: str, tmp_path: Path
) -> None:
    options, words = FAILURES[why]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LostWarning)
        with pytest.raises(RunError, match=words):
            linear(run_dir=tmp_path, topology=topology, **options)
    (path,) = Folder(tmp_path / "checkpoints").all()
    assert int(path.name) >= 6
    resumed = linear(resume=tmp_path, topology=topology)
    assert resumed.statistics.tables[0].examples == 3 * SIZE
    # the gradient of a learner that outlives another is an update by itself (M8)
    assert same(resumed, linear(topology=topology)) or why == "all learners die"


def test_a_run_that_fails_before_its_first_update_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(LearnerError, match="a bad example"):
        linear(run_dir=tmp_path, loss=None, objective=partial(fails_at, update=0, how="raises"))
    assert Folder(tmp_path / "checkpoints").all() == []
    with pytest.raises(
        CheckpointError, match=r"the run there failed before its first update \(learner . raised Value"
    ):
        linear(resume=tmp_path)
    linear(run_dir=tmp_path)
