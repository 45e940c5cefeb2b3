"""Where checkpoints go and how often, and who may write there: decided before anything starts."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from syncline.dial import Course
from syncline.engines.checkpoint_options import LOCK, Checkpoints, RunLock, checkpoints_of
from syncline.engines.run import Storage
from syncline.errors import UsageError
from syncline.roles.run_plan import RunPlan, Saving
from syncline.table.checkpoints import CheckpointError
from tests.ready_python import run_ready


def opened(folder: Path | None, every: Any, **options: Any) -> tuple[Saving, Storage]:
    plan = RunPlan(course=Course.of("async"), learners=2)
    saving, storage = Checkpoints(folder, None, every, 2, **options).opened(plan)
    if storage.lock is not None:
        storage.lock.release()
    return saving, storage


@pytest.mark.parametrize(
    "every, virtual, updates, seconds",
    [
        ("auto", False, None, 60.0),
        ("auto", True, None, None),
        ("end", False, None, None),
        (None, False, None, None),
        ("2.5s", True, None, 2.5),
        (7, False, 7, None),
    ],
)
def test_how_often(
    every: Any, virtual: bool, updates: int | None, seconds: float | None, tmp_path: Path
) -> None:
    saving, storage = opened(tmp_path, every, virtual=virtual)
    assert saving == Saving(cuts=True, every=updates, seconds=seconds)
    assert storage.folder == str(tmp_path / "checkpoints")


@pytest.mark.parametrize("where", ["runs/a", "runs/a/checkpoints", "runs/a/checkpoints/000000007"])
def test_a_run_and_each_of_its_checkpoints_mean_the_same_folder(where: str) -> None:
    assert checkpoints_of(Path(where)) == Path("runs/a/checkpoints")


def test_without_a_folder_there_is_nothing_to_write_to() -> None:
    saving, storage = opened(None, "auto")
    assert not saving.cuts and storage.folder is None
    with pytest.raises(UsageError, match="checkpoint_every=7 needs run_dir="):
        opened(None, 7)


def test_the_first_rank_of_torchrun_has_the_folder_and_all_know_of_it(tmp_path: Path) -> None:
    first, second = (opened(tmp_path, "auto", rank=rank) for rank in (0, 1))
    assert first[0].cuts and second[0].cuts
    assert first[1].folder is not None and second[1].folder is None
    (tmp_path / "events.jsonl").write_text("{}\n")
    assert "holds a run already" in str(opened(tmp_path, "auto", rank=0)[1].refused)


@pytest.mark.parametrize(
    ("lines", "refused"),
    [
        ([], False),
        ([{"kind": "start"}], False),  # killed at once
        ([{"kind": "start"}, {"kind": "end", "how": "failed"}, {"kind": "start"}], False),
        ([{"kind": "start"}, {"kind": "statistics", "examples": 0}, {"kind": "end", "how": "failed"}], False),
        ([{"kind": "start"}, {"kind": "statistics", "examples": 8}, {"kind": "end", "how": "failed"}], True),
        ([{"kind": "start"}, {"kind": "end", "how": "ended"}], True),
        ([{"kind": "start"}, {"kind": "event", "event": "lost"}], True),
        ([{}], True),
    ],
)
def test_a_folder_whose_run_trained_nothing_is_used_again(
    lines: list[Any], refused: bool, tmp_path: Path
) -> None:
    events = tmp_path / "events.jsonl"
    events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if refused:
        with pytest.raises(UsageError, match="holds a run already"):
            opened(tmp_path, "auto")
    else:
        opened(tmp_path, "auto")
    assert events.exists() == refused


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (
            [{"kind": "start"}, {"kind": "end", "how": "failed", "error": "learner 1: no"}],
            r"failed before .* \(learner 1: no\)",
        ),
        (
            [{"kind": "start"}, {"kind": "statistics", "version": 7}],
            "was killed, or is still running, after 7 updates",
        ),
        (
            [
                {"kind": "start"},
                {"kind": "event", "event": "checkpoint failed", "what": "disk full"},
                {"kind": "end", "version": 9},
            ],
            r"finished after 9 updates, and no checkpoint was written \(disk full\)",
        ),
    ],
)
def test_where_a_checkpoint_is_missing_the_error_says_what_happened_to_the_run(
    lines: list[Any], words: str, tmp_path: Path
) -> None:
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, 7]) + "{")
    plan = RunPlan(course=Course.of("async"), learners=2)
    with pytest.raises(
        CheckpointError, match=rf"no checkpoint at {tmp_path}: the run there {words}.*start it without resume"
    ):
        Checkpoints(None, tmp_path, "auto", 2).opened(plan)


def test_one_holds_the_lock_and_its_file_goes_with_it(tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "run")
    with pytest.raises(UsageError, match=rf"alive: process {os.getpid()} on \S+ since .*run_dir"):
        RunLock(tmp_path / "run")
    lock.release()
    lock.release()
    assert list((tmp_path / "run").iterdir()) == []
    RunLock(tmp_path / "run").release()


def test_the_loser_waits_until_the_record_of_the_owner_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner has the lock before its record is written; until then the file names a process that has ended."""
    (ended := subprocess.Popen(["true"])).wait()
    path, host = tmp_path / LOCK, socket.gethostname()
    path.write_text(json.dumps({"pid": ended.pid, "host": host, "started": 1.0}))
    with path.open("a+") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        records = ["", '{"pid": ', json.dumps({"pid": os.getpid(), "host": host, "started": 2.0})]
        monkeypatch.setattr(time, "sleep", lambda seconds: path.write_text(records.pop(0)))
        with pytest.raises(
            UsageError, match=rf"alive: process {os.getpid()} on {host} since .*kill {os.getpid()} "
        ):
            RunLock(tmp_path)
    assert records == []


def test_of_many_that_begin_at_once_one_wins_and_all_others_hear_who_it_is(tmp_path: Path) -> None:
    gate = threading.Barrier(8)

    def begin(number: int) -> RunLock | str:
        gate.wait()
        try:
            return RunLock(tmp_path / f"{number}")
        except UsageError as error:
            return str(error)

    with ThreadPoolExecutor(8) as threads:
        for number in range(50):
            found = list(threads.map(begin, [number] * 8))
            (winner,) = [each for each in found if isinstance(each, RunLock)]
            losers = [each for each in found if isinstance(each, str)]
            assert all(f"process {os.getpid()} on {socket.gethostname()} since" in each for each in losers)
            winner.release()


def test_a_process_that_was_killed_holds_no_lock(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from syncline.engines.checkpoint_options import RunLock; "
        "lock = RunLock(Path(sys.argv[1])); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = run_ready(["-c", code, tmp_path], timeout=100)
    assert done.returncode == -9 and (tmp_path / LOCK).exists()
    RunLock(tmp_path).release()
