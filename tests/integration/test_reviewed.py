"""What a review found: loops with two loaders, waiting while servers come back, leaks, numbers after going back."""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

import syncline as sl
from syncline.report.event_lines import read_lines
from syncline.testing import Faults
from tests.integration.small_runs import with_faults

cloudpickle.register_pickle_by_value(sys.modules[__name__])

PRESETS = [
    "hardsync",
    "softsync:1",
    "async",
    "ssp:0",
    "backup:1",
    "delayed:1",
    "downpour:push=2,fetch=3,local_lr=0.1",
]
ENGINES = ["sim", "local"]


def points(size: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(size)
    return TensorDataset(torch.randn(size, 4, generator=generator), torch.arange(size) % 3)


def two_loaders(session: sl.Session, what: str) -> int:
    """24 examples in batches of 8 for two learners: the last round has one part."""
    model = nn.Linear(4, 3)
    optimizer = session.optimizer(model, partial(SGD, lr=0.1))

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    for _ in range(2):
        for x, y in session.loader(points_of["train"], batch_size=8):
            step(x, y)
        if what == "train":
            for x, y in session.loader(points_of["more"], batch_size=8):
                step(x, y)
        elif what == "validate":
            for x, _y in session.loader(points_of["more"], batch_size=8):
                with torch.no_grad():
                    model(x)
    if what == "optimizer":
        session.optimizer(nn.Linear(2, 2), partial(SGD, lr=0.1))
    return optimizer.version


points_of = {"train": points(24), "more": points(16)}


@pytest.mark.sweep(10)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("what", ["train", "validate", "optimizer"])
@pytest.mark.parametrize("sync", PRESETS)
def test_one_loader_after_another_holds_nobody(sync: str, what: str, engine: str) -> None:
    run = sl.launch(two_loaders, what, learners=2, sync=sync, engine=engine, threads=1, wait=False)
    result = run.wait(timeout=60)
    trained = 2 * (24 + (16 if what == "train" else 0))
    counted = result.statistics.tables[0].examples
    assert counted >= trained or result.dropped > 0  # validation batches count for the next gradient
    assert result.statistics.tables[0].pending == 0


def mean_of_many(session: sl.Session, folder: str) -> list[float]:
    model = nn.Linear(4, 3)
    optimizer = session.optimizer(model, partial(SGD, lr=0.1))
    loader = session.loader(points_of["train"], batch_size=2)
    seen = []
    while loader.epoch < 6:
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        if session.rank == 1 and loader.epoch == 3:
            time.sleep(0.5)  # the other one waits in mean while a shard dies
        seen.append(session.mean(1.0))
    return seen


@pytest.mark.parametrize("sync", ["hardsync", "async"])
def test_a_shard_may_die_while_somebody_waits_for_the_mean(sync: str, tmp_path: Path) -> None:
    run = sl.launch(
        mean_of_many,
        str(tmp_path),
        learners=2,
        sync=sync,
        topology="servers:2",
        run_dir=tmp_path,
        checkpoint_every=4,
        threads=1,
        wait=False,
    )
    while not run.done and not (
        (seen := run.statistics()).tables
        and seen.tables[0].version >= 12
        and any(process.state == "waits for the others" for process in seen.processes)
    ):
        time.sleep(0.002)
    Faults("kill shard 1 at version 0").play(run)
    result = run.wait(timeout=60)
    assert [event.kind for event in result.events if "shard" in event.kind] == ["shard lost"]
    assert all(value == 1.0 for seen in result.returned for value in seen)
    assert result.statistics.tables[0].examples == 6 * 24


def lingering(session: sl.Session, folder: Path) -> int:
    """It never waits again after its loop, and lingers until the run has recovered."""
    model = nn.Linear(4, 3)
    optimizer = session.optimizer(model, partial(SGD, lr=0.1))
    loader = session.loader(points_of["train"], batch_size=2)
    while loader.epoch < 2:
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    (folder / f"over{session.rank}").touch()
    while not (folder / "recovered").exists():
        time.sleep(0.01)
    return optimizer.version


def test_learners_that_did_not_notice_the_loss_begin_anew(tmp_path: Path) -> None:
    run = sl.launch(
        lingering,
        tmp_path,
        learners=2,
        run_dir=tmp_path / "run",
        checkpoint_every=8,
        threads=1,
        topology="servers:2",
        wait=False,
    )
    while not all((tmp_path / f"over{rank}").exists() for rank in (0, 1)):
        time.sleep(0.01)

    def heard(word: str) -> bool:
        return any(line.get("event") == word for line in read_lines(tmp_path / "run" / "events.jsonl"))

    while not heard("checkpoint"):  # of version 8: without it all would begin as it began
        time.sleep(0.01)
    Faults("kill shard 0 at version 12").play(run).join()
    while not heard("recovered"):
        time.sleep(0.01)
    (tmp_path / "recovered").touch()
    result = run.wait(timeout=60)
    kinds = [event.kind for event in result.events if event.kind != "checkpoint"]
    assert kinds == ["shard lost", "recovered", "begun anew"]
    assert result.version == 12 and result.statistics.tables[0].examples == 48
    assert result.returned == [12, 12]


def unhurried(model: nn.Module, batch: Any) -> Tensor:
    time.sleep(0.002)
    return F.cross_entropy(model(batch[0]), batch[1])


def train(script: str = "", **options: Any) -> sl.Run:
    torch.manual_seed(0)
    settings = {
        "objective": unhurried,
        "optimizer": partial(SGD, lr=0.1, momentum=0.9),
        "sync": "hardsync",
        "topology": "servers:2",
        "learners": 2,
        "batch_size": 4,
        "epochs": 2,
        "threads": 1,
    }
    begin = partial(sl.train, nn.Linear(4, 3), points(400), wait=False)
    return with_faults(script, begin, **{**settings, **options})


def test_clipping_is_right_after_going_back(tmp_path: Path) -> None:
    """Shards tell each other norms by version: those of versions that were lost must not count."""
    calm = train(clip_norm=0.05, epochs=4).wait(timeout=60)
    script = "kill shard 1 at version 35; kill shard 0 at version 70"
    run = train(script, clip_norm=0.05, epochs=4, run_dir=tmp_path, checkpoint_every=20)
    result = run.wait(timeout=60)
    assert [event.kind for event in result.events].count("recovered") == 2
    for name, value in result.state_dict().items():
        assert torch.equal(value, calm.state_dict()[name])


def test_replaced_learners_and_recovered_shards_leave_no_descriptors(tmp_path: Path) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    def whole(version: int) -> bool:
        """The shards have made this version since, and two learners run."""
        seen = run.statistics()
        gone = ("lost", "killed")
        alive = [each for each in seen.processes if each.role == "learner" and each.state not in gone]
        return bool(seen.tables) and seen.tables[0].version > version and len(alive) == 2

    run = train(replace=True, run_dir=tmp_path, checkpoint_every=10, epochs=100)
    first = 0
    for moment in (20, 60, 100, 140, 180):
        Faults(f"kill learner 1 at version {moment}; kill shard 1 at version {moment + 5}").play(run).join()
        while not whole(moment + 12):
            time.sleep(0.02)
        first = first or descriptors()
        while descriptors() > first + 2:  # until the lost ones are reaped
            time.sleep(0.01)
    run.stop()
    result = run.wait(timeout=60)
    assert len([event for event in result.events if event.kind == "replaced"]) == 5


def slow_test(model: nn.Module) -> dict[str, float]:
    time.sleep(0.3)
    return {"accuracy": 1.0}


def test_epochs_under_evaluation_are_in_the_checkpoint(tmp_path: Path) -> None:
    train(evaluate=slow_test, run_dir=tmp_path, epochs=2).wait(timeout=60)
    result = train(evaluate=slow_test, resume=tmp_path, epochs=3).wait(timeout=60)
    assert [record.epoch for record in result.history] == [0, 1, 2]


def test_going_on_from_an_older_checkpoint_leaves_the_newer_ones_behind(tmp_path: Path) -> None:
    train(run_dir=tmp_path, checkpoint_every=30, keep_checkpoints=9, epochs=2).wait(timeout=60)
    folders = sorted((tmp_path / "checkpoints").iterdir())
    assert len(folders) > 2
    script = f"kill shard 0 at version {int(folders[0].name) + 15}"
    run = train(script, resume=folders[0], run_dir=tmp_path, checkpoint_every=10, keep_checkpoints=9)
    result = run.wait(timeout=60)
    (recovered,) = [event for event in result.events if event.kind == "recovered"]
    assert recovered.details["version"] <= int(folders[0].name) + 40
    assert result.version == 100


class Odd(SGD):
    """Optimizer state that no checkpoint can hold."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        result = super().step(closure)
        for state in self.state.values():
            state["odd"] = {"a": 1}
        return result


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.filterwarnings("ignore:checkpoint of version")
def test_state_that_cannot_be_kept_is_a_failed_checkpoint_not_a_failed_run(
    engine: str, tmp_path: Path
) -> None:
    run = train(
        optimizer=partial(Odd, lr=0.1, momentum=0.9), run_dir=tmp_path, checkpoint_every=20, engine=engine
    )
    result = run.wait(timeout=60)
    failed = [event for event in result.events if event.kind == "checkpoint failed"]
    assert failed and "odd" in failed[0].what
    assert result.version == 100
