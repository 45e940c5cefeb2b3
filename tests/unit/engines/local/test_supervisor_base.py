"""What callers ask of a run that begins slowly."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from syncline import messages as m
from syncline.engines.local import supervisor_base
from syncline.engines.local.processes import Process
from syncline.engines.local.supervisor_base import HangDetection, RunSupervisor
from syncline.protocols.lifecycle import Faults


class Slow(RunSupervisor):
    def __init__(self) -> None:
        spec: Any = None
        super().__init__(spec)
        outcome = SimpleNamespace(statistics=m.Statistics(-1), seconds=0)
        self.recorder: Any = SimpleNamespace(error=None, outcome=outcome)
        self.started, self.answered = threading.Event(), threading.Event()

    def _begin(self) -> None:
        self.started.wait(10)

    def _loop(self) -> None:
        self._answer(m.Statistics(1))
        self.answered.wait(10)

    def _end(self) -> None:
        pass

    add_learners = change = None  # type: ignore[assignment]
    _start = _over = _look = _heard = _ended = _stop = _questioned = None  # type: ignore[assignment]


def test_whoever_asks_while_processes_start_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_base, "PATIENCE", 0.05)
    run = Slow()
    running = threading.Thread(target=run.main)
    running.start()
    found: list[m.Statistics] = []
    caller = threading.Thread(target=lambda: found.append(run.ask_statistics()))
    caller.start()
    caller.join(0.3)  # longer than its patience with a run that has begun
    assert not found
    run.started.set()
    caller.join(10)
    run.answered.set()
    running.join(10)
    assert [each.number for each in found] == [1]


class Watched:
    """A run in which processes may hang."""

    def __init__(self, **faults: Any) -> None:
        self.spec = SimpleNamespace(faults=Faults(**faults))
        self.recorder, self.killed = (
            SimpleNamespace(say=lambda decision: self.said.append(decision)),
            list[str](),
        )
        self.said: list[Any] = []

    def kill(self, process: Process, why: str) -> None:
        self.killed.append(f"{process.role} {process.rank}: {why}")


def looked(run: Any, detection: HangDetection, idle: set[int]) -> None:
    """Twice, eleven seconds apart; only process 2 has done something."""
    channel: Any = None
    processes = {number: Process("learner", number, number - 1, 7, channel) for number in (1, 2, 3)}
    detection.look(100.0, {1: 5, 2: 5, 3: 5}, idle, processes)
    detection.look(111.0, {1: 5, 2: 6, 3: 5}, idle, processes)


def test_who_computes_and_is_not_heard_of_is_named_and_left_alone() -> None:
    run: Any = Watched(patience=10.0)
    looked(run, HangDetection(run, "the others may wait", "ends such a learner"), idle={3})
    event, warning = run.said
    assert (event.rank, event.kind) == (0, "hangs") and not run.killed
    assert warning.text == (
        "learner 0 hangs: not heard of for 11.0 s (pid 7); the others may wait. "
        "It is left alone: kill_hung=True ends such a learner, patience= sets the time"
    )


def test_who_hangs_is_killed_where_the_user_wants_that() -> None:
    run: Any = Watched(patience=10.0, kill_hung=True)
    looked(run, HangDetection(run, "", ""), idle=set())
    assert run.killed == [f"learner {rank}: patience of 10 s is over" for rank in (0, 2)]


@pytest.mark.parametrize("faults, least", [({"patience": None}, 5.0), ({"patience": 10.0}, 20.0)])
def test_nobody_hangs_before_the_least_patience_of_its_kind_is_over(faults: Any, least: float) -> None:
    run: Any = Watched(**faults)
    looked(run, HangDetection(run, "", "", least=least), idle=set())
    assert not run.said and not run.killed
