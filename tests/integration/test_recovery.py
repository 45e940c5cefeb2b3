"""Lost shards (S7): all go back to the last checkpoint together, learners wait and go on."""

from __future__ import annotations

import errno
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
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD
from torch.utils.data import Dataset

import syncline as sl
from syncline.errors import LostError
from syncline.report.event_lines import read_lines
from syncline.table.checkpoints import Checkpoint, Folder
from syncline.testing import Faults
from tests.integration import small_runs
from tests.integration.small_runs import PRESETS, kinds, points, until

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SIZE = 960


def start(**options: Any) -> sl.Run:
    optimizer = partial(SGD, lr=0.1, momentum=0.9)
    return small_runs.start(options.pop("data", points(SIZE)), **{"optimizer": optimizer, **options})


@pytest.mark.sweep(5)
@pytest.mark.parametrize("shard", [0, 1])
@pytest.mark.parametrize("sync", PRESETS)
def test_a_lost_shard_comes_back_and_nothing_is_lost_but_time(sync: str, shard: int, tmp_path: Path) -> None:
    run = start(
        script=f"kill shard {shard} at version 25", sync=sync, run_dir=tmp_path, checkpoint_every=5, epochs=4
    )
    result = run.wait(timeout=60)
    assert kinds(result) == ["shard lost", "recovered"]
    table = result.statistics.tables[0]
    assert table.examples == 4 * SIZE or (result.dropped > 0 and table.examples < 4 * SIZE)
    assert [record.epoch for record in result.history] == [0, 1, 2, 3]
    assert result.staleness.gradients == result.gradients and table.pending == 0


def test_lockstep_gives_the_bits_of_an_undisturbed_run(tmp_path: Path) -> None:
    """The data that was lost is dealt out again in the same rounds."""
    calm = start(sync="hardsync", epochs=4).wait(timeout=60)
    for shard, version in ((0, 20), (1, 33)):
        run = start(
            script=f"kill shard {shard} at version {version}",
            sync="hardsync",
            run_dir=tmp_path / str(shard),
            checkpoint_every=7,
            epochs=4,
        )
        result = run.wait(timeout=60)
        assert kinds(result) == ["shard lost", "recovered"]
        for name, value in result.state_dict().items():
            assert torch.equal(value, calm.state_dict()[name])


def test_buffers_go_back_too(tmp_path: Path) -> None:
    """What BatchNorm saw of the batches that come again, it has not seen."""

    def trained(**options: Any) -> sl.Run:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
        return small_runs.start(points(SIZE), model=model, sync="hardsync", epochs=4, **options)

    calm = trained().wait(timeout=60).state_dict()
    run = trained(script="kill shard 1 at version 26", run_dir=tmp_path, checkpoint_every=7)
    result = run.wait(timeout=60)
    assert kinds(result) == ["shard lost", "recovered"]
    assert {
        name for name, value in result.state_dict().items() if not torch.equal(value, calm[name])
    } == set()


def test_before_the_first_checkpoint_all_begins_again(tmp_path: Path) -> None:
    run = start(script="kill shard 1 at version 12", sync="hardsync", run_dir=tmp_path, checkpoint_every=1000)
    result = run.wait(timeout=60)
    (recovered,) = [event for event in result.events if event.kind == "recovered"]
    assert recovered.details["version"] == 0
    calm = start(sync="hardsync").wait(timeout=60)
    assert all(torch.equal(v, calm.state_dict()[k]) for k, v in result.state_dict().items())


def counts_itself(session: sl.Session, data: Any, calls: Path, gate: Path) -> None:
    with calls.open("a") as file:
        file.write(f"{session.rank}\n")
    model = nn.Linear(4, 2)
    optimizer = session.optimizer(model, partial(SGD, lr=0.1))
    loader = session.loader(data, batch_size=8)
    while loader.epoch < 2:
        for batch in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(batch[0]), batch[1]).backward()
            optimizer.step()
            while optimizer.version > 12 and not gate.exists():
                time.sleep(0.002)


@pytest.mark.parametrize("every, times", [(1000, 2), (5, 1)])
def test_only_then_learners_are_started_again_too(every: int, times: int, tmp_path: Path) -> None:
    calls, gate = tmp_path / "calls", tmp_path / "open"
    given = {"learners": 2, "topology": "servers:2", "sync": "hardsync", "threads": 1, "wait": False}
    run = sl.launch(
        counts_itself, points(SIZE), calls, gate, run_dir=tmp_path / "run", checkpoint_every=every, **given
    )
    events = tmp_path / "run" / "events.jsonl"
    while every < 12 and not any(line.get("event") == "checkpoint" for line in read_lines(events)):
        time.sleep(0.002)  # a checkpoint is one when it is written
    Faults("kill shard 1 at version 12").play(run).join()
    gate.touch()
    result = run.wait(timeout=60)
    assert kinds(result) == ["shard lost", "recovered"]
    assert sorted(calls.read_text().split()) == ["0"] * times + ["1"] * times
    assert result.statistics.tables[0].examples == 2 * SIZE


class Read(Dataset[Any]):
    """Not in memory: read ahead by a thread."""

    def __init__(self) -> None:
        self.x, self.y = points(SIZE).tensors

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]


@pytest.mark.parametrize("sync", ["hardsync", "async"])
def test_what_was_read_ahead_is_void(sync: str, tmp_path: Path) -> None:
    run = start(
        script="kill shard 0 at version 15; kill shard 1 at version 40",
        sync=sync,
        data=Read(),
        run_dir=tmp_path,
        checkpoint_every=5,
        epochs=5,
    )
    result = run.wait(timeout=60)
    assert kinds(result).count("recovered") == 2
    assert result.statistics.tables[0].examples == 5 * SIZE


def test_schedules_go_back_with_the_epoch(tmp_path: Path) -> None:
    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    options: dict[str, Any] = {"sync": "hardsync", "epochs": 8, "schedule": schedule}
    calm = start(**options).wait(timeout=60)
    script = "kill shard 0 at version 50"  # in the second epoch, back to the first; or later, if it is late
    run = start(script=script, **options, run_dir=tmp_path, checkpoint_every=35)
    result = run.wait(timeout=60)
    (recovered,) = [event for event in result.events if event.kind == "recovered"]
    assert recovered.details["version"] < result.version
    assert all(torch.equal(v, calm.state_dict()[k]) for k, v in result.state_dict().items())


def test_learners_that_join_or_die_meanwhile(tmp_path: Path) -> None:
    script = "kill shard 1 at version 12; kill learner 1 at version 13; add 1 at version 13; kill shard 0 at version 40"
    run = start(script=script, sync="hardsync", run_dir=tmp_path, checkpoint_every=5, replace=True, epochs=12)
    result = run.wait(timeout=60)
    assert kinds(result).count("recovered") == 2 and "joined" in kinds(result)
    assert result.statistics.tables[0].examples == 12 * SIZE


def test_without_checkpoints_the_run_ends_and_says_what_to_do() -> None:
    run = start(script="kill shard 1 at version 10", sync="async")
    with pytest.raises(LostError, match=r"shard 1 .* SIGKILL, .*give run_dir= and checkpoint_every="):
        run.wait(timeout=60)


def test_going_back_works_while_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Going back only reads. The disk is full for this process alone, which commits checkpoints."""
    write = os.write

    def full(descriptor: int, data: Any) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(tmp_path)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sl.errors.SynclineWarning)  # of checkpoints that fail
        run = start(sync="softsync:1", run_dir=tmp_path, checkpoint_every=10, epochs=4)
        until(Folder(tmp_path / "checkpoints").all)
        monkeypatch.setattr(os, "write", full)
        shard = next(each for each in run.statistics().processes if each.role == "shard")
        os.kill(shard.pid, signal.SIGKILL)
        result = run.wait(timeout=60)
    assert {"shard lost", "recovered", "checkpoint failed"} <= set(kinds(result))
    assert result.statistics.tables[0].examples == 4 * SIZE
    (recovered,) = [event for event in result.events if event.kind == "recovered"]
    assert recovered.details["version"] > 0


def test_losses_without_a_checkpoint_in_between_are_bounded(tmp_path: Path) -> None:
    run = start(
        script="; ".join(["kill shard 1 at version 5"] * 4),
        sync="async",
        run_dir=tmp_path,
        checkpoint_every=100000,
        epochs=50,
    )
    with pytest.raises(LostError, match="4 times without a checkpoint in between; given up"):
        run.wait(timeout=60)


@pytest.mark.parametrize("lost", [None, 12, 30])
def test_shards_read_their_values_themselves(
    lost: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator, in this process, opens no file of a table: of a run that goes on, that goes back, that begins again."""
    options: dict[str, Any] = {
        "checkpoint_every": 20,
        "keep_checkpoints": 100,
        "run_dir": tmp_path / "run",
        "topology": "servers:2",
        "epochs": 8,  # well beyond the loss
    }
    calm = start(data=points(480), sync="hardsync", **options).wait(timeout=60)
    opened = Checkpoint.tensors

    def refused(self: Checkpoint, name: str) -> dict[str, torch.Tensor]:
        assert not name.startswith("table"), f"the coordinator reads {name}"
        return opened(self, name)

    monkeypatch.setattr(Checkpoint, "tensors", refused)
    if lost is None:
        options["resume"] = tmp_path / "run" / "checkpoints" / f"{20:09d}"
    if lost is not None:
        options["script"] = f"kill shard 1 at version {lost}"
    run = start(data=points(480), sync="hardsync", **{**options, "run_dir": tmp_path / "again"})
    result = run.wait(timeout=60)
    assert all(torch.equal(value, calm.state_dict()[name]) for name, value in result.state_dict().items())
    assert not (tmp_path / "again" / "checkpoints" / ".first").exists()
