"""Statistics of a running run: the caller's questions, their answers, and the processes in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from syncline import messages as m
from syncline.engines.local.processes import Process
from syncline.engines.local.supervisor_base import RunThread

PATIENCE = 10.0  # seconds that a caller waits for an answer
SILENCE = 2.0  # seconds that the leading shard gets for one


def with_processes(
    statistics: m.Statistics, processes: Iterable[Process], state: Callable[[Process], str]
) -> m.Statistics:
    """The same with all processes in it; `state` says what a running learner does."""
    found = []
    for process in processes:
        learner = process.role == "learner"
        now = state(process) if learner and process.state == "running" else process.state
        steps = statistics.steps.get(process.rank, 0) if learner else 0
        loss = statistics.losses.get(process.rank) if learner else None
        machine = process.machine
        found.append(m.ProcessStatistics(process.role, process.rank, process.pid, now, steps, loss, machine))
    return dataclasses.replace(statistics, processes=tuple(found))


class Questions:
    """Asked by callers on their own threads, answered on the run's."""

    def __init__(self, thread: RunThread) -> None:
        self._thread = thread
        self._asked = 0
        self._answers: dict[int, m.Statistics | None] = {}  # of whom a caller waits for
        self._last = m.Statistics(-1)
        self.open: dict[int, float] = {}  # passed on to the leading shard, and when

    def ask(self) -> m.Statistics:
        """At the end of a run, those of its end."""
        with self._thread.changed:
            self._asked += 1
            number = self._asked
            self._answers[number] = None
            self._thread.command(m.AskStatistics(number))
            self._thread.changed.wait_for(
                lambda: self._thread.begun
            )  # a busy machine starts processes slowly
            self._thread.changed.wait_for(
                lambda: self._answers[number] is not None or self._thread.done.is_set(), PATIENCE
            )
            return self._answers.pop(number) or self._thread.outcome.statistics

    def answer(self, statistics: m.Statistics) -> None:
        self.open.pop(statistics.number, None)
        self._last = statistics
        with self._thread.changed:
            if statistics.number in self._answers:
                self._answers[statistics.number] = statistics
                self._thread.changed.notify_all()

    def overdue(self, now: float) -> list[m.Statistics]:
        """The last answer for all that the leading shard does not answer, be it stopped."""
        late = [number for number, asked in self.open.items() if now - asked > SILENCE]
        return [dataclasses.replace(self._last, number=number) for number in late]
