"""What callers ask of a run that begins slowly."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from syncline import messages as m
from syncline.engines.local import supervisor_base
from syncline.engines.local.supervisor_base import RunSupervisor


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
