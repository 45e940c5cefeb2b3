"""`syncline tradeoff` with its worker processes: the same rows however it ran, going on after kill -9, failures, Ctrl-C."""

from __future__ import annotations

import contextlib
import csv
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from syncline.cli.app import app
from syncline.studies.store import CHANGING, read_rows
from tests.integration.small_runs import alive
from tests.ready_python import ReadyPython

JOB = """
epochs = 1
model = {name = "mlp", sizes = [64, 10]}
data = "digits"
evaluate = {name = "digits", split = "test"}
loss = "LOSS"
optimizer = {name = "sgd", lr = 0.1}
"""
LOSSES = """
import os, signal, time
import torch.nn.functional as F

plain = F.cross_entropy

def slow(output, target):
    time.sleep(0.01)
    return plain(output, target)

def picky(output, target):
    if output.requires_grad and len(target) == 64:
        raise ValueError("no luck with 64")
    if output.requires_grad and len(target) == 128:
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(output, target)
"""
SIM = ("--set", 'engine={name="sim",compute=0.5}')
GRID = ("--learners", "1,3", "--batch-size", "32,96", "--sync", "hardsync,async")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "losses_of_a_study.py").write_text(LOSSES)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A study of GRID by one worker, and what it printed."""
    folder = tmp_path_factory.mktemp("reference")
    with contextlib.chdir(folder):
        Path("losses_of_a_study.py").write_text(LOSSES)
        result = tradeoff(job("plain"), *GRID, "--jobs", "1", "--out", "one")
    assert result.exit_code == 0, result.output
    return folder / "one", result.output


def job(loss: str) -> str:
    path = Path(f"{loss}.toml")
    path.write_text(JOB.replace("LOSS", f"losses_of_a_study:{loss}"))
    return str(path)


def tradeoff(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["tradeoff", *arguments, *SIM], env={"COLUMNS": "120"})


def lasting(folder: Path) -> list[dict[str, str]]:
    """The table without what may differ between equal studies."""
    with (folder / "tradeoff.csv").open() as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    return [{key: value for key, value in row.items() if key not in CHANGING} for row in rows]


def test_a_row_for_every_combination(reference: tuple[Path, str]) -> None:
    folder, output = reference
    assert "8 runs with 1 worker" in output and len(re.findall(r"^\d/8 ", output, re.M)) == 8
    assert "lowest test error" in output and "about equal μλ" in output
    rows = read_rows(folder)
    assert [(row.sync, row.learners, row.batch_size) for row in rows] == [
        (sync, learners, size) for sync in ("hardsync", "async") for learners in (1, 3) for size in (32, 96)
    ]
    assert all(row.test_error is not None and row.epochs == 1.0 and row.wall_seconds for row in rows)
    assert rows[-1].n == 3 and rows[-1].mean_staleness > 1 and rows[0].mean_staleness == 0  # type: ignore[operator]


@pytest.mark.long
def test_the_same_rows_with_two_workers_and_none_is_run_again(reference: tuple[Path, str]) -> None:
    result = tradeoff(job("plain"), *GRID, "--jobs", "2", "--out", "two")
    assert result.exit_code == 0, result.output
    assert lasting(Path("two")) == lasting(reference[0])
    again = tradeoff(job("plain"), *GRID, "--out", "two")
    assert again.exit_code == 0 and "no run is left, 8 were done before" in again.output
    more = tradeoff(
        job("plain"), *GRID[:4], "--sync", "async", "--seeds", "0,1", "--jobs", "1", "--out", "two"
    )
    assert "4 runs with 1 worker, 4 were done before" in more.output, more.output
    assert len(read_rows(Path("two"))) == 12 and "over seeds" in more.output
    Path("two/tradeoff.svg").unlink()
    drawn = CliRunner().invoke(app, ["tradeoff", "--plot", "two"])
    assert drawn.exit_code == 0 and "(σ, μ, λ)" in Path("two/tradeoff.svg").read_text()


@pytest.mark.long
def test_a_run_that_fails_and_one_whose_process_dies_stop_no_other() -> None:
    arguments = (job("picky"), "--learners", "1", "--batch-size", "16,64,128,32", "--sync", "hardsync")
    result = tradeoff(*arguments, "--jobs", "1", "--out", "out")
    assert result.exit_code == 1, result.output
    rows = {row.batch_size: row for row in read_rows(Path("out"))}
    assert rows[64].error == "learner 0 raised ValueError: no luck with 64"
    assert rows[128].error.startswith("its process ended with SIGKILL")
    assert not rows[16].failed and not rows[32].failed and rows[64].seconds is None
    assert "failed: hardsync λ 1 μ 64 seed 0: learner 0 raised ValueError" in result.output


def started(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "syncline", "tradeoff", *arguments, *SIM]
    return ReadyPython(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def until(ready: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def workers_of(pid: int) -> list[int]:
    """Processes of ours whose parent it is."""
    found = []
    for each in Path("/proc").iterdir():
        try:
            parent = int((each / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and b"syncline.studies.worker_pool" in (each / "cmdline").read_bytes():
                found.append(int(each.name))
        except (OSError, ValueError, IndexError):
            continue
    return found


def gone(pids: list[int]) -> bool:
    return not any(map(alive, pids))


def ended(folder: str) -> int:
    return len(read_rows(Path(folder))) if Path(folder, "tradeoff.csv").exists() else 0


@pytest.mark.long
def test_after_kill_9_the_same_command_goes_on_and_gives_the_same_rows(reference: tuple[Path, str]) -> None:
    arguments = (job("slow"), *GRID, "--jobs", "2", "--out", "killed")
    process = started(*arguments)
    try:
        until(lambda: ended("killed") >= 2)
        workers = workers_of(process.pid)
        assert len(workers) == 2
    finally:
        process.kill()
        process.communicate()
    until(lambda: gone(workers))
    with Path("killed/tradeoff.csv").open("a") as file:
        file.write("async,3,3,32,96,0,1.0,12")  # as if it had been killed in mid-write
    done = ended("killed")
    assert 2 <= done < 8
    went_on = tradeoff(*arguments[:-3], "1", *arguments[-2:])
    assert went_on.exit_code == 0, went_on.output
    assert f"{8 - done} runs with 1 worker, {done} were done before" in went_on.output
    assert lasting(Path("killed")) == lasting(reference[0])


def test_ctrl_c_ends_promptly_and_keeps_what_is_done() -> None:
    process = started(
        job("slow"), "--learners", "1,2,3,4", "--batch-size", "8,16,32", "--jobs", "1", "--out", "out"
    )
    try:
        until(lambda: ended("out") >= 1)
        workers = workers_of(process.pid)
        os.kill(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, output
    done = ended("out")
    assert f"{done} of 36 runs are done; the same command goes on" in output and "Traceback" not in output
    assert gone(workers) and Path("out/tradeoff.svg").exists()


def test_another_job_is_refused_and_combinations_that_cannot_be_are_said() -> None:
    small = ("--learners", "1,2", "--batch-size", "96", "--sync", "softsync:2", "--jobs", "1", "--out", "out")
    result = tradeoff(job("plain"), *small, "--steps", "3")
    assert result.exit_code == 0 and "left out: softsync:2 with 1 learners" in result.output, result.output
    (row,) = read_rows(Path("out"))
    assert row.updates == 3 and row.test_error is not None and 0 < (row.epochs or 0) < 1
    refused = tradeoff(job("plain"), *small, "--epochs", "2")
    assert (
        refused.exit_code == 2 and "(steps: 3 there, none here; epochs: none there, 2 here)" in refused.stderr
    )


def test_sizes_only_is_another_study() -> None:
    small = (
        job("plain"),
        "--learners",
        "1,200",
        "--batch-size",
        "8",
        "--sync",
        "async",
        "--jobs",
        "1",
        "--out",
        "out",
    )
    result = tradeoff(*small, "--timing")
    assert result.exit_code == 0 and "timed" in result.output and "lowest" not in result.output, result.output
    one, many = read_rows(Path("out"))
    assert one.test_error is None and many.mean_staleness > 10 and many.seconds < one.seconds / 50  # type: ignore[operator]
    assert "Speed-up at μ = 8" in Path("out/tradeoff.svg").read_text()
    refused = tradeoff(*small)
    assert refused.exit_code == 2 and "timing: True there, none here" in refused.stderr


def test_real_processes_too() -> None:
    arguments = (
        "--engine",
        "local",
        "--learners",
        "2",
        "--batch-size",
        "96",
        "--sync",
        "hardsync",
        "--out",
        "out",
    )
    result = CliRunner().invoke(app, ["tradeoff", job("plain"), *arguments])
    assert result.exit_code == 0, result.output
    (row,) = read_rows(Path("out"))
    assert row.epochs == 1.0 and row.mean_staleness == 0 and row.test_error is not None
