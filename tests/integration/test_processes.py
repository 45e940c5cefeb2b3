"""Processes: what travels, what comes back, who is lost, and that nothing stays behind (M11; DESIGN.md 4, 6)."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
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
from syncline.engines.local.control_channel import Channel
from syncline.engines.local.shared_memory import Region, WakeUp
from syncline.errors import LostError, UsageError
from tests.integration.small_runs import alive
from tests.ready_python import ReadyPython

cloudpickle.register_pickle_by_value(sys.modules[__name__])

HANG = 60.0  # seconds after which something that takes milliseconds has failed
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(sl.__file__).parents[1])}
launch = partial(sl.launch, threads=1)
train = partial(sl.train, threads=1)


def until(condition: Callable[[], Any], what: str, limit: float = HANG) -> Any:
    deadline = time.monotonic() + limit
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {limit} s for: {what}"
        time.sleep(0.01)
    return value


def descendants(pid: int) -> set[int]:
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    found, fresh = set(), {pid}
    while fresh:
        fresh = {child for child, parent in parents.items() if parent in fresh} - found
        found |= fresh
    return found


def counting(session: sl.Session, steps: int, pause: float = 0.0) -> int:
    """A learner that takes some steps."""
    model = nn.Linear(2, 1)
    opt = session.optimizer(model, partial(SGD, lr=0.01))
    for _ in range(steps):
        opt.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        opt.step()
        time.sleep(pause)
    return steps


def version(run: sl.Run) -> int:
    tables = run.statistics().tables
    return tables[0].version if tables else 0


def pids(run: sl.Run, role: str = "") -> dict[str, int]:
    return {name: pid for name, pid in run._handle.pids().items() if name.startswith(role)}


# -- scripts ---------------------------------------------------------------------------------------------------

SCRIPT = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run as a shell's background job
from functools import partial
import torch
from torch import nn
import syncline as sl
"""


def write(folder: Path, code: str) -> Path:
    path = folder / "script.py"
    path.write_text(SCRIPT + textwrap.dedent(code))
    return path


def start(path: Path, kind: type[subprocess.Popen[str]] = ReadyPython) -> subprocess.Popen[str]:
    """A script in a process group of its own, as a terminal does it."""
    return kind(
        [sys.executable, "-u", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=ENVIRONMENT,
    )


def finish(process: subprocess.Popen[str], limit: float = HANG) -> str:
    try:
        return process.communicate(timeout=limit)[0]
    finally:
        process.kill()


TRAVELS = """
    import helpers                                  # a module of the user's, beside the script

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(SIZE, 1)
        def forward(self, x):
            return scale(self.layer(x))

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 12
        def __getitem__(self, index):
            return torch.full((SIZE,), float(index)), torch.zeros(1)

    SIZE = 3
    scale = lambda x: 0.5 * x
    result = sl.train(Net(), Data(), loss=lambda a, b: helpers.loss(a, b), optimizer=partial(torch.optim.SGD, lr=1e-3),
                      sync="hardsync", learners=2, batch_size=2, epochs=2, evaluate=Data())
    print("trained", result.version, type(result.model).__name__, sorted(result.history[-1].metrics))

    def learner(session, name):
        print(f"hello from {name} {session.rank}")
        return Net
    returned = sl.launch(learner, "learner", learners=2).returned
    print("same class", all(kind is Net for kind in returned))
"""


def test_a_script_needs_no_main_guard_and_its_definitions_travel(tmp_path: Path) -> None:
    (tmp_path / "helpers.py").write_text("def loss(a, b): return ((a - b) ** 2).mean()\n")
    out = finish(start(write(tmp_path, TRAVELS), subprocess.Popen))
    assert "trained 6 Net ['loss']" in out
    assert out.count("hello from learner") == 2
    assert "same class True" in out
    assert out.count("trained") == 1  # the script itself ran once


@pytest.mark.long
def test_code_without_a_file_works(tmp_path: Path) -> None:
    """A notebook's cell, or `python - < script`."""
    (tmp_path / "helpers.py").write_text("def loss(a, b): return ((a - b) ** 2).mean()\n")
    done = subprocess.run(
        [sys.executable, "-"],
        input=SCRIPT + textwrap.dedent(TRAVELS),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=ENVIRONMENT,
        timeout=HANG,
    )
    assert "trained 6 Net" in done.stdout and "same class True" in done.stdout, done.stderr


def test_kill_9_of_the_parent_ends_all_its_processes(tmp_path: Path) -> None:
    """M11: every process watches a pipe whose only write end is the parent's. A quiet machine takes less than 2 s."""
    process = start(
        write(
            tmp_path,
            """
            def learner(session):
                opt = session.optimizer(nn.Linear(2, 1), partial(torch.optim.SGD, lr=0.1))
                if session.rank:
                    opt.step()          # waits for the other one
                print("here", session.rank)
                while True:
                    time.sleep(1) if session.rank == 1 else None    # one sleeps, one computes

            sl.launch(learner, learners=3, sync="hardsync", topology="servers:2")
            """,
        )
    )
    assert process.stdout is not None
    while "here" not in process.stdout.readline():
        pass
    children = until(lambda: len(found := descendants(process.pid)) >= 6 and found, "all processes")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    until(lambda: not any(map(alive, children)), "all processes to end after kill -9 of the parent")
    process.stdout.close()


# -- exceptions and prints -------------------------------------------------------------------------------------


class OwnError(Exception):
    def __init__(self, code: int, why: str) -> None:
        super().__init__(f"{why} ({code})")
        self.code = code

    def __reduce__(self) -> Any:
        return OwnError, (self.code, "again")


def test_an_exception_reaches_the_caller_with_its_traceback() -> None:
    def deeper(rank: int) -> None:
        raise OwnError(rank, "no luck")

    def learner(session: sl.Session) -> None:
        opt = session.optimizer(nn.Linear(2, 1), partial(SGD, lr=0.1))
        if session.rank == 1:
            deeper(session.rank)
        opt.step()  # the others wait: they must be ended

    with pytest.raises(sl.LearnerError, match=r"no luck \(1\)") as caught:
        launch(learner, learners=3)
    error = caught.value
    assert error.rank == 1
    assert "in deeper" in error.traceback and "raise OwnError(rank" in error.traceback
    assert isinstance(error.__cause__, OwnError) and error.__cause__.code == 1
    assert "learner 1 raised" in str(error)


@pytest.mark.parametrize("what", ["unpicklable", "exit", "constructor"])
def test_exceptions_that_do_not_travel_well(what: str) -> None:
    """The traceback comes even where the exception object cannot."""

    class Picky(Exception):
        def __init__(self, one: int, two: int) -> None:  # unpickling calls it with one argument
            super().__init__("picky words")

    def learner(session: sl.Session) -> None:
        if what == "exit":
            sys.exit("exit words")
        if what == "constructor":
            raise Picky(1, 2)
        error = ValueError("unpicklable words")
        error.lock = threading.Lock()  # type: ignore[attr-defined]
        raise error

    with pytest.raises(sl.LearnerError, match="words"):
        launch(learner, learners=1)


def test_results_that_do_not_pickle_are_left_out_and_such_arguments_refused() -> None:
    def returns(session: sl.Session) -> Any:
        return threading.Lock()

    with pytest.warns(RuntimeWarning, match="could not travel.*lock"):
        assert launch(returns, learners=1).returned == [None]
    with pytest.raises(UsageError, match=r"argument 1 cannot travel.*lock"):
        launch(counting, threading.Lock(), learners=1)
    assert launch(counting, 1, learners=1).returned == [1]  # and nothing is broken


def test_prints_come_through(capsys: pytest.CaptureFixture[str]) -> None:
    def learner(session: sl.Session) -> None:
        print(f"to stdout {session.rank}")
        print(f"to stderr {session.rank}", file=sys.stderr)
        os.write(1, b"from below\n")
        print("x" * 300_000)  # more than a pipe holds
        print("no end of line", end="")

    launch(learner, learners=2)
    out, err = capsys.readouterr()
    for rank in (0, 1):
        assert f"to stdout {rank}\n" in out
        assert f"to stderr {rank}\n" in err
    assert out.count("from below\n") == 2
    assert out.count("x") == 600_000
    assert out.count("no end of line") == 2


def test_options_that_differ_cause_one_warning() -> None:
    """M4: lockstep learners that disagree; the message names the ranks."""

    def learner(session: sl.Session) -> None:
        model = nn.Linear(2, 1)
        opt = session.optimizer(model, partial(SGD, lr=0.1 * (1 + session.rank)))
        opt.param_groups[0]["lr"] = 0.1 * (1 + session.rank)
        for _ in range(4):
            opt.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            opt.step()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        launch(learner, learners=2)
    texts = [str(warning.message) for warning in caught if "disagree" in str(warning.message)]
    assert len(texts) == 1 and "[0, 1]" in texts[0]


# -- handles ---------------------------------------------------------------------------------------------------


def test_a_handle_waits_tells_and_stops() -> None:
    run = launch(counting, 10**9, 0.001, learners=2, sync="async", wait=False)
    with pytest.raises(TimeoutError):
        run.wait(timeout=0.05)
    seen = until(lambda: version(run), "a first version")
    until(lambda: version(run) > seen, "a further version")
    until(lambda: set(run.statistics().steps) == {0, 1}, "steps of both")
    run.stop()
    result = run.wait(timeout=HANG)
    assert result.version > seen and not result.interrupted
    assert result.returned == [None, None]
    assert run.wait().version == result.version  # asking again is allowed
    assert run.statistics().tables[0].version == result.version


def test_statistics_say_who_waits_for_whom(tmp_path: Path) -> None:
    """DESIGN.md: `statistics()` also says who waits for whom; an idle waiting process uses < 5 % of a core (M11)."""

    def learner(session: sl.Session) -> None:
        model = nn.Linear(2, 1)
        opt = session.optimizer(model, partial(SGD, lr=0.1))
        for step in range(3):
            if step == 2 and session.rank == 2:
                while not release.exists():
                    time.sleep(0.05)
            opt.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            opt.step()

    release = tmp_path / "go on"
    run = launch(learner, learners=3, sync="hardsync", topology="servers:2", wait=False)
    try:

        def stuck() -> bool:
            table = run.statistics().tables.get(0)
            if table is None or table.version < 2:
                return False
            return table.missing == [2] and table.waiting == {0: 3, 1: 3}

        until(stuck, "learners 0 and 1 to wait for 2")
        waiting = {name: pid for name, pid in pids(run).items() if name != "learner 2"}
        assert len(waiting) == 4
        used = busy_share(waiting)
        assert all(share < 0.05 for share in used.values()), used
    finally:
        release.touch()
        result = run.wait(timeout=HANG)
    assert result.version == 3


def busy_share(processes: dict[str, int], seconds: float = 1.0) -> dict[str, float]:
    """Share of one core that each used; the better of two looks, since a tick is 10 ms."""

    def ticks(pid: int) -> int:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    best: dict[str, float] = {}
    for _ in range(2):
        before = {name: ticks(pid) for name, pid in processes.items()}
        time.sleep(seconds)
        for name, pid in processes.items():
            share = (ticks(pid) - before[name]) / os.sysconf("SC_CLK_TCK") / seconds
            best[name] = min(share, best.get(name, share))
    return best


def test_two_runs_at_once() -> None:
    runs = [launch(counting, 50, learners=2, sync=sync, wait=False) for sync in ("hardsync", "async")]
    results = [run.wait(timeout=HANG) for run in runs]
    assert [result.gradients for result in results] == [100, 100]


# -- losses ----------------------------------------------------------------------------------------------------


def slow_loss(output: Tensor, target: Tensor) -> Tensor:
    time.sleep(0.003)
    return F.mse_loss(output, target)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("sync", ["hardsync", "softsync:1", "async", "delayed:1"])
def test_a_killed_learner_is_survived(sync: str, victim: int) -> None:
    """DESIGN.md 4, M7, M8: the others go on, and what it had not delivered is handed out again."""
    data = TensorDataset(torch.randn(240, 3), torch.randn(240, 1))
    run = train(
        nn.Linear(3, 1),
        data,
        loss=slow_loss,
        optimizer=partial(SGD, lr=0.01),
        sync=sync,
        topology="servers:2",
        learners=3,
        batch_size=4,
        epochs=2,
        wait=False,
    )
    until(lambda: version(run) >= 4, "a few versions")
    os.kill(pids(run)[f"learner {victim}"], signal.SIGKILL)
    result = run.wait(timeout=HANG)
    (event,) = result.events
    assert event.rank == victim and "SIGKILL" in event.what
    assert result.statistics.tables[0].examples == 2 * len(data)
    assert result.dropped == 0
    assert result.staleness.gradients == result.gradients
    assert [record.epoch for record in result.history] == [0, 1]
    assert len(result.returned) == 3 and result.returned[victim] is None


@pytest.mark.parametrize("role", ["learner", "shard"])
def test_a_loss_that_cannot_be_survived_is_one_error(role: str) -> None:
    """All learners, or a process that the run needs: the message says which, and nothing hangs."""
    run = train(
        nn.Linear(3, 1),
        TensorDataset(torch.randn(400, 3), torch.randn(400, 1)),
        loss=slow_loss,
        optimizer=partial(SGD, lr=0.01),
        sync="hardsync",
        learners=2,
        batch_size=4,
        epochs=100,
        evaluate=lambda model: {"zero": 0.0},
        wait=False,
    )
    until(lambda: version(run) >= 2, "a few versions")
    processes = pids(run)
    for name, pid in processes.items():
        if name.startswith(role):
            os.kill(pid, signal.SIGKILL)
    with pytest.raises(LostError, match=f"{role}.*SIGKILL"):
        run.wait(timeout=HANG)
    until(lambda: not any(map(alive, processes.values())), "all processes to end")


def test_a_learner_lost_before_it_opened_its_table_is_survived() -> None:
    """M3, M8: the first fold waits for all initial learners' start, but not for the dead."""

    def learner(session: sl.Session) -> int:
        if session.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return counting(session, 5)

    for sync in ("hardsync", "async"):
        result = launch(learner, learners=3, sync=sync)
        assert result.returned == [None, 5, 5]
        assert result.gradients == 10


def test_a_learner_that_does_not_stop_is_ended() -> None:
    """M8: after a few seconds of grace; the rest is the result."""

    def learner(session: sl.Session) -> str:
        counting(session, 3)
        if session.rank == 1:
            time.sleep(1000)
        return "done"

    run = launch(learner, learners=2, sync="async", wait=False)
    until(lambda: version(run) == 6, "all versions")
    run.stop()
    result = run.wait(timeout=HANG)
    assert result.returned == ["done", None] and result.version == 6
    (event,) = {event.rank: event for event in result.events}.values()
    assert event.rank == 1


# -- nothing stays behind --------------------------------------------------------------------------------------


def left_behind() -> tuple[set[int], list[str], int, int]:
    """Processes below this one, shared memory, descriptors, threads."""
    return (
        descendants(os.getpid()),
        sorted(
            name for name in os.listdir("/dev/shm") if not name.startswith(("syncline-hunt", "sem."))
        ),  # others'
        len(os.listdir("/proc/self/fd")),
        threading.active_count(),
    )


def raising(session: sl.Session) -> None:
    session.optimizer(nn.Linear(2, 1), partial(SGD, lr=0.1))
    raise ValueError("on purpose")


def test_nothing_stays_behind() -> None:
    """DESIGN.md 6: no process, no shared memory, no descriptor, no thread after runs of every kind."""
    launch(counting, 1, learners=1)
    before = left_behind()
    for index in range(10):
        launch(counting, 3, learners=2, sync=("hardsync", "async")[index % 2], topology="servers:2")
    assert left_behind() == before
    for _ in range(3):
        with pytest.raises(sl.LearnerError, match="on purpose"):
            launch(raising, learners=2)
    assert left_behind() == before
    run = launch(counting, 10**9, learners=2, sync="async", wait=False)
    until(lambda: version(run), "a version")
    os.kill(pids(run)["learner 1"], signal.SIGKILL)
    run.stop()
    run.wait(timeout=HANG)
    assert left_behind() == before


def test_a_data_set_lies_in_memory_once() -> None:
    """M11: tensors in arguments are shared, not copied per learner."""

    def learner(session: sl.Session, data: TensorDataset) -> float:
        total = data.tensors[0].sum().item()  # every page is in this process now
        session.mean(0.0)
        while not session.ending:
            time.sleep(0.01)
        return total

    size = 200 << 20
    data = TensorDataset(torch.ones(size // 4096, 1024))
    run = launch(learner, data, learners=3, wait=False)
    try:
        until(lambda: len(pids(run, "learner")) == 3, "learners")
        learners = pids(run, "learner").values()
        until(lambda: all(resident(pid)["Rss"] > size for pid in learners), "learners to have read all")
        own = sum(resident(pid)["Private_Dirty"] + resident(pid)["Private_Clean"] for pid in learners)
        assert own < size, f"{own >> 20} MB of the learners' own"
    finally:
        run.stop()
        run.wait(timeout=HANG)


def resident(pid: int) -> dict[str, int]:
    """Bytes by kind, as the kernel sums them up."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines}


def one_step_or_more(session: sl.Session, gate: Path) -> None:
    """Step once; rank 0 goes on until the gate is there."""
    model = nn.Linear(2, 1)
    optimizer = session.optimizer(model, partial(SGD, lr=0.1))
    while True:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        if session.rank or gate.exists():
            return
        time.sleep(0.01)


def test_the_caller_holds_no_channel_and_no_memory_of_learners_that_have_left(tmp_path: Path) -> None:
    def held() -> Counter[str]:
        gc.collect()
        kinds = {Channel, Region, WakeUp}
        return Counter(type(each).__name__ for each in gc.get_objects() if type(each) in kinds)

    def left() -> int:
        return sum(each.state == "returned" for each in run.statistics().processes)

    run = launch(one_step_or_more, tmp_path / "gate", learners=1, sync="async", wait=False)
    allowed = Counter[str]()
    for came in (2, 4, 6, 8):
        run.add_learners(2)
        until(lambda came=came: left() == came, f"{came} learners that have returned")  # type: ignore[misc]
        allowed = allowed or held()
    until(lambda: held() <= allowed, "what the caller held of the last six is freed")
    (tmp_path / "gate").touch()
    assert len(run.wait(HANG).returned) == 9
