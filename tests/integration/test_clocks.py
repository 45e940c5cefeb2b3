"""clocks.bin: which gradients, computed on which version, are in each update (R6), kept by request."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from typer.testing import CliRunner

import syncline as sl
from syncline.cli.app import app
from syncline.errors import UsageError
from syncline.report import read_clocks
from syncline.report.clock_file import CLOCKS, append_clocks, cut_clocks
from syncline.roles import counters
from tests.integration import small_runs
from tests.integration.small_runs import points

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def train(folder: Path, **changes: Any) -> sl.Result:
    given = {"data": points(120), "learners": 3, "epochs": 2, "run_dir": folder, "clocks": True}
    result: sl.Result = small_runs.train(**given | changes)
    return result


def check(folder: Path, result: sl.Result) -> None:
    """The file says the same as the account of the run."""
    rows = read_clocks(folder)
    assert sorted(set(rows["version"].tolist())) == list(range(1, result.version + 1))
    assert len(rows) == result.gradients
    sigma = rows["version"].astype(int) - 1 - rows["stamp"]
    assert Counter(sigma.tolist()) == result.staleness.histogram
    assert (np.diff(rows["version"].astype(int)) >= 0).all()


@pytest.mark.parametrize("engine", ["local", "sim"])
@pytest.mark.parametrize("sync", ["hardsync", "softsync:1", "async", "delayed:2"])
def test_the_stamps_of_every_update_are_kept(engine: str, sync: str, tmp_path: Path) -> None:
    result = train(tmp_path, sync=sync, engine=engine)
    check(tmp_path, result)
    if sync == "hardsync":
        rows = read_clocks(tmp_path)
        assert rows["rank"].tolist() == [0, 1, 2] * result.version
        assert (rows["stamp"] + 1 == rows["version"]).all()


def test_without_the_request_there_is_no_such_file(tmp_path: Path) -> None:
    train(tmp_path, clocks=False, engine="sim")
    assert not (tmp_path / CLOCKS).exists()
    with pytest.raises(UsageError, match=r"no clocks\.bin there; a run keeps vector clocks with clocks=True"):
        read_clocks(tmp_path)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"run_dir": None}, "clocks=True needs run_dir="),
        ({"clocks": 1}, "clocks is True or False, got 1"),
        ({"topology": "allreduce", "sync": "hardsync"}, "with clocks=True: vector clocks are the servers'"),
    ],
)
def test_what_cannot_be_kept_is_refused(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        train(tmp_path, **options)


@pytest.mark.parametrize("engine", ["local", "sim"])
def test_a_run_that_goes_on_appends_to_what_is_in_its_checkpoint(engine: str, tmp_path: Path) -> None:
    """What the run before made after its last checkpoint is not in the file any more."""
    options: dict[str, Any] = {
        "sync": "async",
        "engine": engine,
        "checkpoint_every": 7,
        "keep_checkpoints": 99,
    }
    first = train(tmp_path, **options)
    check(tmp_path, first)
    before = read_clocks(tmp_path).copy()
    place = sorted((tmp_path / "checkpoints").iterdir())[0]
    version = int(place.name)
    with (tmp_path / CLOCKS).open("ab") as file:
        file.write(b"torn")
    again = train(tmp_path, resume=place, **options)
    assert 7 <= version < first.version == again.version
    check(tmp_path, again)
    kept = before["version"] <= version
    assert (read_clocks(tmp_path)[: kept.sum()] == before[kept]).all()


def test_a_run_that_goes_on_without_clocks_leaves_those_of_its_checkpoint(tmp_path: Path) -> None:
    options: dict[str, Any] = {"engine": "sim", "checkpoint_every": 7, "keep_checkpoints": 99}
    train(tmp_path, **options)
    place = sorted((tmp_path / "checkpoints").iterdir())[0]
    train(tmp_path, resume=place, clocks=False, **options)
    assert read_clocks(tmp_path)["version"].max() == int(place.name)


@pytest.mark.parametrize("handlers", [True, False])
def test_a_lost_shard_takes_its_updates_out_again(handlers: bool, tmp_path: Path) -> None:
    engine = sl.Sim(script="kill shard 1 at version 12", check=True, handlers=handlers)
    result = train(tmp_path, sync="async", engine=engine, topology="servers:2", checkpoint_every=5)
    assert "recovered" in small_runs.kinds(result)
    check(tmp_path, result)


def test_a_lost_shard_of_processes_too(tmp_path: Path) -> None:
    options = {"sync": "async", "run_dir": tmp_path, "clocks": True, "checkpoint_every": 10, "epochs": 3}
    run = small_runs.start(points(400), "kill shard 1 at version 25", **options)
    result = run.wait(small_runs.PATIENCE)
    assert "recovered" in small_runs.kinds(result)
    check(tmp_path, result)


def test_the_leading_shard_reports_in_pieces_of_bounded_size(tmp_path: Path, monkeypatch: Any) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(counters, "ROWS", 16)
    monkeypatch.setattr(
        "syncline.report.folder_writer.append_clocks",
        lambda folder, rows: (sizes.append(len(rows) // 12), append_clocks(folder, rows)),
    )
    check(tmp_path, train(tmp_path, sync="hardsync", engine="sim"))
    assert max(sizes) <= 16 + 2  # whole updates
    assert len(sizes) > 1


def test_a_full_disk_leaves_whole_updates(tmp_path: Path) -> None:
    rows = np.array([(1, 0, 0), (2, 1, 0), (2, 0, 1), (3, 0, 2)], dtype="<u4").tobytes()
    append_clocks(tmp_path, rows)
    (tmp_path / "full").mkdir()
    os.symlink("/dev/full", tmp_path / "full" / CLOCKS)
    with pytest.raises(OSError):
        append_clocks(tmp_path / "full", rows)
    cut_clocks(tmp_path, 2)
    assert read_clocks(tmp_path / CLOCKS).tolist() == [(1, 0, 0), (2, 1, 0), (2, 0, 1)]


def test_the_command_keeps_and_shows_them(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    options = [
        "--set",
        "epochs=",
        "--set",
        "steps=3",
        "--engine",
        "sim",
        "--sync",
        "hardsync",
        "--learners",
        "2",
        "--clocks",
    ]
    made = CliRunner().invoke(app, ["train", *options, "--run-dir", folder])
    assert made.exit_code == 0, made.output
    assert "clocks = true" in (tmp_path / "run" / "job.toml").read_text()
    shown = CliRunner().invoke(app, ["show", folder, "--clocks"])
    assert shown.output.splitlines() == ["1 0:0 1:0", "2 0:1 1:1", "3 0:2 1:2"]
