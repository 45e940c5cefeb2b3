"""`python -m syncline` as people run it: in processes of its own, on a terminal and not, interrupted, on a full disk."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import resource
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from fcntl import ioctl
from pathlib import Path

import pytest
from safetensors.torch import load_file

from syncline.jobs import Job
from syncline.report import read_run
from syncline.report.event_lines import read_lines
from tests.ready_python import ReadyPython, run_ready

TINY = ("--learners", "2", "--batch-size", "32", "--topology", "servers:1")
COMMAND = (sys.executable, "-m", "syncline", "train")


def trained(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "120"}
    return run_ready([*COMMAND[1:], *arguments], timeout=100, cwd=folder, env=environment)


def trained_from_nothing(
    folder: Path, *arguments: str, limit: Callable[[], None] | None = None
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "120"}
    return subprocess.run(
        [*COMMAND, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        preexec_fn=limit,
        env=environment,
    )


def test_the_built_in_job_without_a_terminal(tmp_path: Path) -> None:
    done = trained_from_nothing(tmp_path, *TINY, "--epochs", "3", "--run-dir", "out")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "\x1b" not in done.stdout, "no colours, no cursor"
    epochs = re.findall(
        r"^epoch (\d)/3  version \d+  loss \d.*test accuracy [\d.]+ %", done.stdout, re.MULTILINE
    )
    assert sorted(epochs) == ["1", "2", "3"]  # of free learners a later one may end first
    assert re.search(
        r"^  staleness +mean \d\.\d\d, max \d+, over \d+ gradients *$", done.stdout, re.MULTILINE
    )
    assert "run folder" in done.stdout and "syncline train --sync hardsync" in done.stdout
    folder = tmp_path / "out"
    job = Job.load(folder / "job.toml")
    assert job.learners == 2 and job.epochs == 3
    job.build()["model"].load_state_dict(load_file(folder / "model.safetensors"))
    record = read_run(folder)
    assert record.state == "finished" and len(record.epochs) == 3
    assert f"{100 * record.metric('test accuracy')[-1][2]:.2f} %" in done.stdout
    assert f"{record.last['gradients']:,}" in (folder / "report.html").read_text()
    refused = trained(tmp_path, *TINY, "--run-dir", "out")
    assert refused.returncode == 2 and "holds a run already" in refused.stderr
    assert "Traceback" not in refused.stderr and refused.stdout == ""


@pytest.mark.long
def test_output_where_not_every_letter_can_be_written(tmp_path: Path) -> None:
    """λ, ×, … and what learners print become letters that can."""
    plain = {
        "PYTHONIOENCODING": "ascii",
        "LANG": "C",
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
    }
    environment = {**os.environ, "COLUMNS": "120", **plain}
    prints = "import syncline as sl; sl.launch(lambda session: print('\\u03bb ran'), learners=1)"
    for arguments, words in (
        (("-m", "syncline", "presets"), "lambda learners with batches of mu examples"),
        (
            ("-m", "syncline", "train", *TINY, "--set", "steps=5", "--set", "epochs=", "--run-dir", "out"),
            "5 updates",
        ),
        (("-m", "syncline", "show", "out"), "finished"),
        (("-m", "syncline", "compare", "out", "out"), "examples/s"),
        (("-m", "syncline", "train", "--help"), "one line per learner"),
        (("-c", prints), "\\u03bb ran"),
    ):
        done = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, capture_output=True, timeout=100, env=environment
        )
        assert done.returncode == 0, done.stderr
        assert words in done.stdout.decode("ascii")


class Terminal:
    """A run on a pseudo-terminal."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.output = ""
        parent, child = pty.openpty()
        ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        environment = {**os.environ, "TERM": "xterm-256color"}
        environment.pop("COLUMNS", None)
        self.process = ReadyPython(
            [*COMMAND, *arguments],
            cwd=folder,
            stdin=child,
            stdout=child,
            stderr=child,
            start_new_session=True,
            env=environment,
        )
        os.close(child)
        self._fd = parent

    def read_until(self, ready: Callable[[str], bool], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not ready(self.plain) and time.monotonic() < deadline:
            if select.select([self._fd], [], [], 0.1)[0]:
                try:
                    self.output += os.read(self._fd, 65536).decode("utf-8", "replace")
                except OSError:  # the other side is closed
                    return
        assert ready(self.plain), self.plain[-3000:]

    @property
    def plain(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.output)

    def end(self) -> int:
        with contextlib.suppress(AssertionError):
            self.read_until(lambda _: False, 60.0 if self.process.poll() is None else 0.5)
        os.close(self._fd)
        return self.process.wait(30)


def test_on_a_terminal_with_ctrl_c_and_resume(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, *TINY, "--epochs", "100000", "--run-dir", "out")
    try:
        terminal.read_until(lambda text: "test accuracy" in text and "computing" in text and "ETA" in text)
        os.kill(terminal.process.pid, signal.SIGINT)
        terminal.read_until(lambda text: "go on with:" in text, 60.0)
        assert terminal.end() == 130
    finally:
        if terminal.process.poll() is None:
            terminal.process.kill()
    text = terminal.plain
    assert "syncline train --resume out" in text and "Traceback" not in text
    assert "staleness" in text and "█" in text and "updates/s" in text
    record = read_run(tmp_path / "out")
    assert record.state == "stopped" and (tmp_path / "out" / "model.safetensors").exists()
    done = len(record.epochs)
    went_on = trained(tmp_path, "--resume", "out", "--epochs", str(done + 2))
    assert went_on.returncode == 0, went_on.stderr
    record = read_run(tmp_path / "out")
    assert [each["epoch"] for each in record.epochs] == list(range(done + 2))
    assert record.state == "finished" and len(record.starts) == 2


def test_a_full_disk_is_one_warning(tmp_path: Path) -> None:
    def small() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2500, 2500))

    # simulated: the limit would hit shared memory too
    done = trained_from_nothing(
        tmp_path, *TINY, "--engine", "sim", "--epochs", "2", "--run-dir", "out", limit=small
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("the run folder is not complete") == 1
    assert "test accuracy" in done.stdout
    folder = tmp_path / "out"
    assert next(read_lines(folder / "events.jsonl"))["kind"] == "start"
    assert (folder / "events.jsonl").read_bytes().endswith(b"\n")
    assert not (folder / "report.html").exists() and not (folder / "model.safetensors").exists()
    assert not [path for path in folder.iterdir() if path.name.endswith(".tmp")]


@pytest.mark.long
def test_a_lost_learner_is_shown_and_the_run_goes_on(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, *TINY, "--epochs", "100000", "--run-dir", "out")
    try:
        terminal.read_until(lambda text: "computing" in text)
        found = [
            line for line in read_lines(tmp_path / "out" / "events.jsonl") if line["kind"] == "statistics"
        ]
        os.kill(found[-1]["learners"][1]["pid"], signal.SIGKILL)
        terminal.read_until(lambda text: "lost: its process" in text, 30.0)
        os.kill(terminal.process.pid, signal.SIGINT)
        assert terminal.end() == 130
    finally:
        if terminal.process.poll() is None:
            terminal.process.kill()
    assert "learner 1: lost" in terminal.plain
    assert [each["event"] for each in read_run(tmp_path / "out").faults] == ["lost"]


BROKEN = {
    "unknown key": 'colour = "red"',
    "no module": 'model = "nowhere:Net"',
}


def test_broken_jobs_end_with_one_line(tmp_path: Path) -> None:
    for name, line in BROKEN.items():
        job = tmp_path / "job.toml"
        job.write_text(
            f'{line}\ndata = "digits"\nloss = "cross_entropy"\noptimizer = {{name = "sgd", lr = 0.1}}\n'
        )
        if "model" not in line:
            job.write_text(job.read_text() + 'model = {name = "mlp", sizes = [64, 10]}\n')
        done = trained(tmp_path, "job.toml")
        assert done.returncode == 2, (name, done.stderr)
        assert "job.toml:1: " in done.stderr and "Traceback" not in done.stderr, name
        assert len(done.stderr.strip().splitlines()) == 1 and done.stdout == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.toml"]


SPY = """
import sys, torch
sys.stderr.write("the folder's module runs\\n")

def model():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
"""
SPIED = """
model = "spy:model"
data = "digits"
loss = "cross_entropy"
optimizer = "sgd"
learners = 1
epochs = 1
run_dir = "run"
"""


def test_job_files_are_code_and_a_run_folder_runs_it_only_where_it_goes_on(tmp_path: Path) -> None:
    """The table of docs/howto/security.md."""
    (tmp_path / "job.toml").write_text(SPIED)
    (tmp_path / "spy.py").write_text(SPY)
    home, away = tmp_path / "run", tmp_path / "away"
    assert trained(tmp_path, "job.toml").returncode == 0
    away.mkdir()
    (tmp_path / "spy.py").rename(home / "spy.py")

    def runs(*arguments: object) -> bool:
        command = ["-m", "syncline", *map(str, arguments)]
        done = run_ready(command, timeout=100, cwd=away, env={**os.environ, "COLUMNS": "120"})
        assert done.returncode == 0, done.stderr
        return "the folder's module runs" in done.stderr

    assert not runs("show", home) and not runs("compare", home, home)
    assert runs("show", home / "job.toml")
    assert runs("train", "--resume", home, "--epochs", "2")
