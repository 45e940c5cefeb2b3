"""The cores of one machine, shared evenly by whoever computes on it: n tasks on c cores each run at min(1, c/n).

Pure; time is passed in. Not responsible for waking anybody: `next` says when the first task is done, if nothing changes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable
from typing import Any


class Cores:
    """Tasks by the work that is left; `done` gives back what was passed to `add`."""

    def __init__(self, cores: int | None) -> None:
        self._cores = math.inf if cores is None else cores
        self._served = 0.0  # seconds of work that a task that was there from the beginning has had
        self._now = 0.0
        self._count = 0
        self._tasks: list[tuple[float, int, Any]] = []  # (served when it is done, order, task)

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def rate(self) -> float:
        """Seconds of work that every task gets in a second."""
        return min(1.0, self._cores / len(self._tasks)) if self._tasks else 1.0

    def add(self, now: float, seconds: float, task: Any, who: Hashable = None) -> None:
        self._advance(now)
        self._count += 1
        heapq.heappush(self._tasks, (self._served + seconds, self._count, task))

    def served(self, now: float, who: Hashable = None) -> float:
        """What a task that was there from the beginning has had by now, whosever it is."""
        self._advance(now)
        return self._served

    def next(self) -> float | None:
        """When the first task is done."""
        if not self._tasks:
            return None
        return self._now + max(0.0, self._tasks[0][0] - self._served) / self.rate

    def done(self, now: float) -> Any:
        """The task whose moment, as `next` said, has come."""
        finish, _, task = heapq.heappop(self._tasks)
        self._now, self._served = now, finish  # exactly: rounding must not leave a rest of work
        return task

    def remove(self, now: float, task: Any) -> None:
        """It ends before its work is done."""
        self._advance(now)
        self._tasks = [entry for entry in self._tasks if entry[2] != task]
        heapq.heapify(self._tasks)

    def _advance(self, now: float) -> None:
        if now > self._now:
            self._served += (now - self._now) * self.rate
            self._now = now
