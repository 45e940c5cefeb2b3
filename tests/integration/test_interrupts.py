"""Ctrl-C, SIGTERM, and two runs in one folder: what was trained is kept, and whoever asked for the end gets it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD

import syncline as sl
from syncline.engines import checkpoint_options as options
from syncline.engines.local import supervisor
from syncline.errors import LostWarning, UsageError
from syncline.report.run_record import read_run
from syncline.table.checkpoints import find
from tests.integration.small_runs import alive, points, start, unhurried
from tests.ready_python import ReadyPython

cloudpickle.register_pickle_by_value(sys.modules[__name__])

HANG = 60.0  # seconds after which something that takes a moment has failed
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(sl.__file__).parents[1])}

SCRIPT = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run as a shell's background job
from functools import partial
import torch
from torch import nn
import syncline as sl

def learner(session, pause=0.0):
    model = nn.Linear(2, 1)
    opt = session.optimizer(model, partial(torch.optim.SGD, lr=0.1))
    for step in range(10**9):
        opt.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        opt.step()
        time.sleep(pause)
        if step == 20 and session.rank == 0:
            print("going")
"""


def script(folder: Path, code: str) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    path = folder / "script.py"
    path.write_text(SCRIPT + textwrap.dedent(code))
    return running(folder, "-u", str(path), word="going")


@contextlib.contextmanager
def running(folder: Path, *arguments: str, word: str) -> Iterator[subprocess.Popen[str]]:
    """In a session of its own, as a terminal or a scheduler starts it; it has said the word when this begins."""
    process = ReadyPython(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=ENVIRONMENT,
        cwd=folder,
    )
    with process:
        try:
            heard(process, word)
            yield process
        finally:
            process.kill()


def heard(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    said = [process.stdout.readline()]
    while word not in said[-1]:
        assert said[-1], "".join(said)
        said.append(process.stdout.readline())


def descendants(pid: int) -> set[int]:
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found |= {child} | descendants(child)
    return found


def ended(process: subprocess.Popen[str]) -> str:
    return process.communicate(timeout=HANG)[0]


ENGINES = {
    "servers": 'sync="async"',
    "allreduce": 'topology="allreduce"',
    "sim": 'engine="sim"',
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("where", ENGINES)
def test_ctrl_c_ends_a_sweep_and_carries_what_was_trained(where: str, tmp_path: Path) -> None:
    code = f"""
    for lr in (0.1, 0.2):
        print("lr", lr)
        try:
            sl.launch(learner, learners=2, {ENGINES[where]})
        except KeyboardInterrupt as stop:
            result = stop.result
            print("has", result.interrupted, result.version >= 20, sorted(result.state_dict()))
            raise
    """
    with script(tmp_path, code) as process:
        children = descendants(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        out = ended(process)
    assert not [pid for pid in children if alive(pid)]
    assert "has True True ['bias', 'weight']" in out, out
    assert "lr 0.2" not in out
    assert process.returncode == -signal.SIGINT  # as a shell's own loop needs it


LOOPS = """
data = torch.utils.data.TensorDataset(torch.ones(64, 2))

def train(session, model, opt):
    for epoch in range(10**9):
        total, batches = 0.0, 0
        for (x,) in session.loader(data, batch_size=4):
            opt.zero_grad()
            model(x).sum().backward()
            opt.step()
            total, batches = total + 1, batches + 1
        total / batches
        if epoch == 3 and session.rank == 0:
            print("going")

def loops(session):
    model = nn.Linear(2, 1)
    opt = session.optimizer(model, partial(torch.optim.SGD, lr=0.1))
    if session.rank == 0:
        train(session, model, opt)
    try:
        train(session, model, opt)
    except Exception:
        return "swallowed"
    except KeyboardInterrupt:
        return "tested"

def exits(session):
    try:
        learner(session)
    except KeyboardInterrupt:
        sys.exit(0)
"""
PLACES = [
    'sync="hardsync"',
    'sync="downpour:push=2,fetch=2,local_lr=0.01"',
    'topology="tree:2"',
    'topology="allreduce"',
    'topology="allreduce", sync="delayed:1"',
    'engine="sim"',
    'engine="sim", topology="allreduce"',
]


@pytest.mark.parametrize("where", PLACES)
def test_ctrl_c_ends_a_loop_over_epochs_at_once(where: str, tmp_path: Path) -> None:
    """A loop that divides by its number of batches, in a learner that catches KeyboardInterrupt and in one that does not."""
    code = f"""
    try:
        sl.launch(loops, learners=2, {where})
    except KeyboardInterrupt as stop:
        events = [event.kind for event in stop.result.events]
        print("has", stop.result.returned, stop.result.version >= 20, events)
    """
    with script(tmp_path, LOOPS + textwrap.dedent(code)) as process:
        process.send_signal(signal.SIGINT)
        out = ended(process)
    assert "has [None, 'tested'] True []" in out, out


@pytest.mark.parametrize("where", [PLACES[0], PLACES[3]])
def test_a_script_may_exit_when_it_catches_ctrl_c(where: str, tmp_path: Path) -> None:
    code = f"""
    try:
        sl.launch(exits, learners=2, {where})
    except KeyboardInterrupt as stop:
        print("has", stop.result.returned)
    """
    with script(tmp_path, LOOPS + textwrap.dedent(code)) as process:
        process.send_signal(signal.SIGINT)
        out = ended(process)
    assert "has [None, None]" in out, out


def finishes(session: sl.Session, folder: str) -> str:
    """Train until the run is stopped; learner 0 returns late, learner 1 does not notice the stop."""
    model = nn.Linear(2, 1)
    opt = session.optimizer(model, partial(SGD, lr=0.1))
    try:
        while True:
            opt.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            opt.step()
            if session.rank == 1:
                Path(folder, "stuck").touch()
                threading.Event().wait()
    except KeyboardInterrupt:
        while not Path(folder, "killed").exists():
            threading.Event().wait(0.01)
    return "tested"


def test_only_a_learner_that_does_not_notice_a_stop_is_ended_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The killed learner is no loss, and its rank has an event that says why; the other one takes its time."""
    monkeypatch.setattr(supervisor, "GRACE", 0.5)
    run = sl.launch(finishes, str(tmp_path), learners=2, sync="async", wait=False)
    while not (tmp_path / "stuck").exists():
        threading.Event().wait(0.01)
    run.stop()
    stuck = run._handle.pids()["learner 1"]
    while alive(stuck):
        threading.Event().wait(0.01)
    (tmp_path / "killed").touch()
    with warnings.catch_warnings():
        warnings.simplefilter("error", LostWarning)
        result = run.wait(HANG)
    assert result.returned == ["tested", None]
    assert [(event.kind, event.rank) for event in result.events] == [("killed", 1)]


def test_a_second_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    code = """
    def stubborn(session):
        model = nn.Linear(2, 1)
        opt = session.optimizer(model, partial(torch.optim.SGD, lr=0.1))
        model(torch.ones(1, 2)).sum().backward()
        opt.step()
        if session.rank == 0:
            print("going")
        time.sleep(10**6)

    run = sl.launch(stubborn, learners=2, wait=False)
    heard = run._handle.interrupt
    run.interrupts._stop = lambda number: (heard(number), print("first"))
    try:
        run.wait()
    except KeyboardInterrupt as stop:
        print("without a result", not hasattr(stop, "result"))
        raise
    """
    with script(tmp_path, code) as process:
        children = descendants(process.pid)
        os.kill(process.pid, signal.SIGINT)
        heard(process, "first")
        os.kill(process.pid, signal.SIGINT)
        out = ended(process)
    assert "without a result True" in out, out
    assert process.returncode == -signal.SIGINT
    assert not [pid for pid in children if alive(pid)]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("where", ["servers", "allreduce"])
def test_sigterm_to_all_processes_leaves_a_last_checkpoint_and_a_complete_folder(
    where: str, tmp_path: Path
) -> None:
    """As schedulers send it: to the script, its fork server, learners and shards at once."""
    code = f"""
    sl.launch(learner, 0.001, learners=2, run_dir="run", {ENGINES[where]})
    print("went on")
    """
    with script(tmp_path, code) as process:
        for pid in (*descendants(process.pid), process.pid):
            os.kill(pid, signal.SIGTERM)
        out = ended(process)
    assert process.returncode == 128 + signal.SIGTERM, out
    assert "went on" not in out and "Traceback" not in out
    record = read_run(tmp_path / "run")
    assert record.state == "stopped"
    assert (tmp_path / "run" / "model.safetensors").exists()
    assert (tmp_path / "run" / "report.html").exists()
    assert find(tmp_path / "run").number >= 20


def test_sigterm_ends_the_command_line_with_143_and_a_checkpoint(tmp_path: Path) -> None:
    command = ("-m", "syncline", "train", "--epochs", "100000", "--run-dir", "run")
    with running(tmp_path, *command, word="accuracy") as process:
        process.send_signal(signal.SIGTERM)
        out = ended(process)
    assert process.returncode == 128 + signal.SIGTERM, out
    assert "go on with:" in out and "Traceback" not in out
    assert read_run(tmp_path / "run").state == "stopped" and find(tmp_path / "run").number > 0


def small(**changes: Any) -> sl.Run:
    return start(points(64), learners=2, epochs=10**6, **changes)


def going(run: sl.Run) -> None:
    while not run.statistics().tables or run.statistics().tables[0].version < 3:
        threading.Event().wait(0.01)


def while_it_waits(run: sl.Run, number: int) -> None:
    """This process gets a signal when it has begun to wait."""
    wait = run._handle.wait

    def signalled(timeout: float | None = None) -> Any:
        if threading.current_thread() is threading.main_thread():
            signal.raise_signal(number)
        return wait(timeout)

    run._handle.wait = signalled  # type: ignore[method-assign]


def test_handlers_are_restored_and_the_user_s_own_is_called_too() -> None:
    heard: list[int] = []

    def own(number: int, frame: Any) -> None:
        heard.append(number)

    before = signal.signal(signal.SIGTERM, own)
    try:
        run = small()
        going(run)
        assert signal.getsignal(signal.SIGTERM) is own  # only while it is waited for
        while_it_waits(run, signal.SIGTERM)
        with pytest.raises(SystemExit) as told:
            run.wait()
        assert heard == [signal.SIGTERM] and told.value.code == 143
        assert told.value.result.interrupted and told.value.result.version >= 3
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


def test_what_the_user_s_own_handler_raises_is_raised_when_the_run_has_ended() -> None:
    def own(number: int, frame: Any) -> None:
        raise OSError("mine")

    before = signal.signal(signal.SIGTERM, own)
    try:
        run = small()
        going(run)
        while_it_waits(run, signal.SIGTERM)
        with pytest.raises(OSError, match="mine"):
            run.wait()
        assert run.done
    finally:
        signal.signal(signal.SIGTERM, before)


def test_no_handler_is_installed_outside_the_main_thread() -> None:
    found: list[Any] = []

    def elsewhere() -> None:
        run = small()
        going(run)
        with run.interrupts:
            found.append(signal.getsignal(signal.SIGTERM))
        run.stop()
        found.append(run.wait().interrupted)

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(HANG)
    assert found == [before, False]


# -- two runs in one folder --------------------------------------------------------------------------------------


def test_a_folder_in_which_a_run_is_alive_is_refused_until_that_has_ended(tmp_path: Path) -> None:
    run = small(run_dir=tmp_path / "run", checkpoint_every=2)
    try:
        while not any((tmp_path / "run" / "checkpoints").glob("0*")):
            threading.Event().wait(0.01)
        again = partial(
            sl.train,
            nn.Linear(4, 2),
            points(64),
            objective=unhurried,
            optimizer=partial(SGD, lr=0.1),
            topology="servers:2",
            batch_size=8,
            epochs=1,
        )
        with pytest.raises(UsageError, match=rf"run that is alive: process {os.getpid()} on .*since"):
            again(resume=tmp_path / "run")
        other = again(
            resume=tmp_path / "run", run_dir=tmp_path / "other", wait=False
        )  # nothing is written here
        other.wait()
    finally:
        run.stop()
    while not run.done:  # it need not be waited for
        threading.Event().wait(0.01)
    run.recording.finish()  # type: ignore[union-attr]
    again(resume=tmp_path / "run")


def test_a_killed_run_s_folder_can_be_resumed_at_once(tmp_path: Path) -> None:
    code = 'sl.launch(learner, 0.001, learners=2, run_dir="run", checkpoint_every=2)'
    with script(tmp_path, code) as process:
        while not any((tmp_path / "run" / "checkpoints").glob("0*")):
            threading.Event().wait(0.01)
        with pytest.raises(UsageError, match=f"process {process.pid} on"):
            sl.launch(print, resume=tmp_path / "run")
        process.kill()
    assert json.loads((tmp_path / "run" / "run.lock").read_text())["pid"] == process.pid
    resumed = sl.launch(a_few_steps, learners=2, resume=tmp_path / "run")
    assert resumed.version > 3


def a_few_steps(session: sl.Session) -> None:
    model = nn.Linear(2, 1)
    opt = session.optimizer(model, partial(SGD, lr=0.1))
    for _ in range(3):
        opt.zero_grad()
        F.mse_loss(model(torch.ones(1, 2)), torch.ones(1, 1)).backward()
        opt.step()


def test_where_nothing_is_resumed_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(sl.RunError, match="no checkpoint"):
        sl.launch(a_few_steps, resume=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("topology", ["servers:2", "allreduce"])
def test_with_a_folder_there_are_checkpoints_without_asking(
    topology: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "MINUTE", 0.05)
    run = small(run_dir=tmp_path, topology=topology, sync="hardsync", keep_checkpoints=99)
    while len(list((tmp_path / "checkpoints").glob("0*"))) < 3:
        assert not run.done
        threading.Event().wait(0.01)
    run.stop()
    run.wait()
