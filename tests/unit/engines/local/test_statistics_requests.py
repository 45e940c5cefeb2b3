"""What callers ask of a run that begins slowly."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from syncline import messages as m
from syncline.engines.local import statistics_requests as statistics
from syncline.engines.local.statistics_requests import Questions
from syncline.engines.local.supervisor_base import RunThread


def test_whoever_asks_while_processes_start_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "PATIENCE", 0.05)
    started, answered = threading.Event(), threading.Event()
    recorder: Any = SimpleNamespace(
        error=None, outcome=SimpleNamespace(statistics=m.Statistics(-1), seconds=0)
    )

    def loop() -> None:
        thread.children = None
        questions.answer(m.Statistics(1))
        answered.wait(10)

    thread = RunThread(recorder, 0.0, begin=lambda: started.wait(10) and None, loop=loop, end=lambda: None)
    questions = Questions(thread)
    running = threading.Thread(target=thread.main)
    running.start()
    found: list[m.Statistics] = []
    caller = threading.Thread(target=lambda: found.append(questions.ask()))
    caller.start()
    caller.join(0.3)  # longer than its patience with a run that has begun
    assert not found
    started.set()
    caller.join(10)
    answered.set()
    running.join(10)
    assert [each.number for each in found] == [1]
