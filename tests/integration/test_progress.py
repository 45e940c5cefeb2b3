"""Progress of runs that Python starts: real processes, on a terminal, in a pipe, blocked, switched off; and what `repr` shows."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import syncline as sl
from syncline.engines.process_titles import name_of_run
from tests.integration.small_runs import launched, points, start, train, until
from tests.ready_python import ReadyPython, run_ready

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(sl.__file__).parents[1]), "SYNCLINE_PROGRESS": ""}

HEAD = """
import sys
from functools import partial
import torch
import torch.nn.functional as F
from torch import nn
import syncline as sl

x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
data = x, (x.sum(1) > 0).long()
train = partial(
    sl.train, nn.Linear(4, 2), data, loss=F.cross_entropy, optimizer=partial(torch.optim.SGD, lr=0.1),
    sync="hardsync", learners=2, batch_size=8, threads=1,
)
"""


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(HEAD + text)
    return path


def test_plain_lines_go_to_stderr_and_the_result_has_few_lines(tmp_path: Path) -> None:
    path = script(tmp_path, "print(train(epochs=3, run_dir='runs/first'))")
    done = run_ready([path], timeout=110, cwd=tmp_path, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert lines[0].startswith("first: Linear (10 parameters) · hardsync · 2 learners × batch 8 · 3 epochs")
    assert [line.split("  ")[0] for line in lines if line.startswith("epoch")] == [
        "epoch 1/3",
        "epoch 2/3",
        "epoch 3/3",
    ]
    assert lines[-1].startswith("finished: 3 epochs in ")
    assert done.stdout.startswith("Result: finished, ") and len(done.stdout.splitlines()) <= 8
    assert "epoch 3: loss " in done.stdout and "Linear with 10 parameters" in done.stdout


@pytest.mark.parametrize("call", ["train(epochs=1, progress=False)", "sl.launch(print, progress=False)"])
def test_progress_false_is_silent(call: str, tmp_path: Path) -> None:
    done = run_ready([script(tmp_path, call)], timeout=110, env=ENVIRONMENT)
    assert done.returncode == 0 and done.stderr == ""


def test_runs_that_learners_start_are_silent(tmp_path: Path) -> None:
    text = """
def learner(session):
    return sl.launch(lambda inner: inner.rank, learners=1).returned

print(sl.launch(learner, learners=1).returned)
"""
    done = run_ready([script(tmp_path, text)], timeout=110, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[[0]]\n"
    assert [line.split(":")[0] for line in done.stderr.splitlines()][1:] == ["finished"]


def test_one_rank_of_torchrun_shows(tmp_path: Path) -> None:
    path = script(tmp_path, "train(epochs=1, topology='allreduce', learners=2)")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("epoch 1/1") == 1


class Terminal:
    """A script with a pseudo-terminal as stderr and a pipe as stdout."""

    def __init__(self, path: Path) -> None:
        self.parent, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        environment = {**ENVIRONMENT, "TERM": "xterm-256color"}
        self.process = ReadyPython(
            [sys.executable, path], stdout=subprocess.PIPE, stderr=child, env=environment, text=True
        )
        os.close(child)
        self.output = ""

    def read(self) -> Iterator[str]:
        """Yield all that was shown so far, again and again until the other end is closed."""
        with contextlib.suppress(OSError):
            while data := os.read(self.parent, 65536):
                self.output += data.decode("utf-8", "replace")
                yield self.plain
        os.close(self.parent)

    @property
    def plain(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.output)


def test_a_terminal_has_a_live_panel_and_stdout_only_what_the_script_prints(tmp_path: Path) -> None:
    text = """
result = train(epochs=40, callbacks=lambda record: print("called", record.epoch))
print("result", file=sys.stderr)
print("printed", len(result.history))
"""
    terminal = Terminal(script(tmp_path, text))
    shown = list(terminal.read())[-1]
    out = terminal.process.communicate()[0].splitlines()
    assert terminal.process.returncode == 0
    assert out == [*(f"called {epoch}" for epoch in range(40)), "printed 40"]
    assert "staleness σ" in shown and "learner" in shown
    panel, after = shown.rsplit("finished ─╯", 1)
    assert "epoch 40/40" in panel and after.strip() == "result", "nothing follows the result"


def test_ctrl_c_on_a_terminal_raises_after_the_panel(tmp_path: Path) -> None:
    text = """
try:
    train(epochs=1_000_000)
except KeyboardInterrupt as stop:
    print(stop.result)
"""
    terminal = Terminal(script(tmp_path, text))
    sent = False
    for shown in terminal.read():
        if not sent and "computing" in shown:
            sent = True
            os.kill(terminal.process.pid, signal.SIGINT)
    assert terminal.process.communicate()[0].startswith("Result: interrupted, ")
    assert terminal.process.returncode == 0 and "stopped ─╯" in terminal.plain


def test_a_pipe_that_nobody_reads_ends_no_run(tmp_path: Path) -> None:
    end, blocked = os.pipe()
    os.set_blocking(blocked, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(blocked, bytes(4096))
    os.set_blocking(blocked, True)
    path = script(tmp_path, "print(train(epochs=2))")
    process = ReadyPython(
        [sys.executable, path], stdout=subprocess.PIPE, stderr=blocked, env=ENVIRONMENT, text=True
    )
    os.close(blocked)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("Result: finished, ")
    os.close(end)
    process.communicate()


def test_a_closed_stderr_ends_no_run(tmp_path: Path) -> None:
    path = script(
        tmp_path, "sys.stderr.close()\nprint(train(epochs=2))\nsys.stderr = None\nprint(train(epochs=2))"
    )
    done = run_ready([path], timeout=110, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Result: finished, ") == 2


def test_a_handle_shows_when_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SYNCLINE_PROGRESS", "on")
    run = start(points(64), epochs=100_000, loss=None)
    until(lambda: run.statistics().tables and run.statistics().tables[0].version > 30)
    assert capsys.readouterr().err == ""
    shown = ""
    while "epoch 1/100000" not in shown:
        with pytest.raises(TimeoutError):
            run.wait(0.05)
        shown += capsys.readouterr().err
    run.stop()
    run.wait()
    shown += capsys.readouterr().err
    assert shown.count("epoch 1/100000") == 1 and shown.splitlines()[-1].startswith("stopped: ")
    assert run.wait() is not None and capsys.readouterr().err == ""


def test_repr_of_a_run_has_name_state_epoch_learners_and_folder(tmp_path: Path) -> None:
    folder = tmp_path / "first"
    run = start(points(64), "kill learner 1 at version 20", epochs=100_000, run_dir=folder)
    until(lambda: "2 learners alive" in repr(run) and "1 of 100000 epochs" not in repr(run))
    assert re.fullmatch(
        rf"<Run first: running, \d+ of 100000 epochs done, 2 learners alive, in {folder}>", repr(run)
    )
    run.stop()
    run.wait()
    assert repr(run).startswith("<Run first: stopped, ")
    run = start(points(64), objective=lambda model, batch: 1 / 0, progress=False)
    with pytest.raises(sl.LearnerError):
        run.wait()
    assert repr(run) == f"<Run {name_of_run(None)}: failed, 0 of 2 epochs done>"


def long_returns(session: Any) -> list[int]:
    session.log(a=1)
    return list(range(1000))


def test_repr_of_any_result_has_at_most_eight_lines() -> None:
    results = [
        launched(long_returns, learners=3),
        train(data=points(64), epochs=2, evaluate=points(8), engine="sim", learners=2),
    ]
    for result in results:
        lines = repr(result).splitlines()
        assert 1 < len(lines) <= 8 and all(len(line) <= 210 for line in lines)
