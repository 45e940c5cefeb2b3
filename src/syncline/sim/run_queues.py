"""The cores of one machine as an operating system deals them: a queue for each, slices, and processes that stay where they were.

A process that wakes goes to the core where it last ran, if that is idle, else to an idle one, else to the queue of the core where it last
ran; nobody is interrupted before the slice is over. A process that waits keeps its core for a while (it yields in a loop), gives way to
whoever is queued there, but others see no idle core. Pure; time is passed in.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, eq=False)
class Job:
    """A piece of a process's work."""

    who: Hashable
    left: float  # seconds
    task: Any


class Core:
    """Whoever is first in the queue runs."""

    def __init__(self) -> None:
        self.queue: deque[Job] = deque()
        self.until = math.inf  # the slice's end
        self.last: Hashable = None  # who ran here last
        self.left = -math.inf  # when it stopped


class Queues:
    """Takes the place of `cores.Cores` where a cluster has slices."""

    def __init__(self, cores: int, *, slice: float, spin: float) -> None:
        self._slice, self._spin = slice, spin
        self._cores = [Core() for _ in range(cores)]
        self._place: dict[Hashable, Core] = {}
        self._served: dict[Hashable, float] = {}
        self._now = 0.0
        self._due: Core | None = None  # where something happens at the moment that `next` said
        self._over = False  # it is the end of a slice, not of a job

    def __len__(self) -> int:
        return sum(len(core.queue) for core in self._cores)

    def add(self, now: float, seconds: float, task: Any, who: Hashable) -> None:
        self._advance(now)
        core = self._choose(who)
        self._place[who] = core
        core.queue.append(Job(who, seconds, task))
        if len(core.queue) == 1:
            self._begin(core)

    def next(self) -> float | None:
        """When something happens: a job is done, a slice over, a core idle that others' work can go to."""
        moment, self._due = math.inf, None
        for core in self._cores:
            if not core.queue:
                continue
            end = self._now + core.queue[0].left
            over = len(core.queue) > 1 and core.until < end
            end = max(self._now, core.until) if over else end
            if end < moment:
                moment, self._due, self._over = end, core, over
        idle = self._next_idle()
        if idle < moment:
            moment, self._due = idle, None
        return moment if moment < math.inf else None

    def done(self, now: float) -> Any:
        """The task that is done at the moment that `next` said; None where none is."""
        self._advance(now)
        core = self._due
        if core is None:
            self._balance()
        elif self._over:
            core.queue.rotate(-1)
            self._begin(core)
        else:
            return self._finish(core)
        return None

    def remove(self, now: float, task: Any) -> None:
        """It ends before its work is done."""
        self._advance(now)
        for core in self._cores:
            first = core.queue[0] if core.queue else None
            core.queue = deque(job for job in core.queue if job.task != task)
            if core.queue and core.queue[0] is not first:
                self._begin(core)

    def served(self, now: float, who: Hashable) -> float:
        """Seconds of work that this process has had."""
        self._advance(now)
        return self._served.get(who, 0.0)

    # -- inside ------------------------------------------------------------------------------------------

    def _choose(self, who: Hashable) -> Core:
        mine = self._place.get(who)
        if mine is not None and (not mine.queue and (mine.last == who or self._idle(mine))):
            return mine
        for core in self._cores:
            if self._idle(core):
                return core
        return mine or min(self._cores, key=lambda core: len(core.queue))

    def _spins_until(self, core: Core) -> float:
        """Whoever ran here last keeps the core until then, if it has not gone elsewhere."""
        stays = self._place.get(core.last) is core
        return core.left + self._spin if stays else core.left

    def _idle(self, core: Core) -> bool:
        return not core.queue and self._spins_until(core) <= self._now

    def _next_idle(self) -> float:
        """When a core is free for those that are queued elsewhere."""
        if all(len(core.queue) < 2 for core in self._cores):
            return math.inf
        free = (max(self._now, self._spins_until(core)) for core in self._cores if not core.queue)
        return min(free, default=math.inf)

    def _balance(self) -> None:
        longest = max(self._cores, key=lambda core: len(core.queue))
        for core in self._cores:
            if self._idle(core) and len(longest.queue) > 1:
                job = longest.queue[1]
                longest.queue.remove(job)
                core.queue.append(job)
                self._place[job.who] = core
                self._begin(core)
                return

    def _finish(self, core: Core) -> Any:
        job = core.queue.popleft()
        core.last, core.left = job.who, self._now
        self._begin(core)
        return job.task

    def _begin(self, core: Core) -> None:
        core.until = self._now + self._slice

    def _advance(self, now: float) -> None:
        past = now - self._now
        if past <= 0:
            return
        for core in self._cores:
            if core.queue:
                job = core.queue[0]
                job.left = max(0.0, job.left - past)
                self._served[job.who] = self._served.get(job.who, 0.0) + past
        self._now = now
