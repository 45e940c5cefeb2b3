"""The cores of simulated machines: shared evenly by whoever computes, or dealt in slices as an operating system does.

Evenly (`Cores`): n tasks on c cores each run at min(1, c/n). In slices (`Queues`): each core has a queue. A process that wakes goes to
the core where it last ran, if that is idle, else to an idle one, else to the queue of the core where it last ran; nobody is interrupted
before the slice is over. A process that waits keeps its core for a while (it yields in a loop), gives way to whoever is queued there,
but others see no idle core. Both are pure, time is passed in: `next` says when something happens, if nothing changes.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

from syncline.cluster import Cluster
from syncline.sim.clock import Action, Clock


class Machines:
    """Work that takes time: at once where cores are not counted, else shared by all that work on a machine."""

    def __init__(self, clock: Clock, cluster: Cluster) -> None:
        self._clock, self._cluster, self._count = clock, cluster, cluster.cores
        self._cores: dict[int, Cores | Queues] = {}
        self.shared = cluster.cores is not None  # else work just takes its time
        self._planned: dict[int, int] = {}  # machine -> which of its plans is the last

    def run(self, machine: int, seconds: float, then: Action, who: Hashable) -> None:
        """`then` happens when so many seconds of this process's work are done."""
        if self._count is None:
            self._clock.after(seconds, then)
            return
        if machine not in self._cores:
            slice, spin = self._cluster.slice, self._cluster.spin
            self._cores[machine] = (
                Cores(self._count) if slice is None else Queues(self._count, slice=slice, spin=spin)
            )
        self._cores[machine].add(self._clock.now, seconds, then, who)
        self._plan(machine)

    def served(self, machine: int, who: Hashable) -> float:
        """Seconds of work that a process which has worked from the beginning has had."""
        return self._cores[machine].served(self._clock.now, who)

    def cancel(self, machine: int, then: Action) -> None:
        """That work ends where it is; without counted cores it stays planned, and must not mind."""
        if machine in self._cores:
            self._cores[machine].remove(self._clock.now, then)
            self._plan(machine)

    def _plan(self, machine: int) -> None:
        number = self._planned[machine] = self._planned.get(machine, 0) + 1
        moment = self._cores[machine].next()

        def happened() -> None:
            if number == self._planned[machine]:  # else others came or went since
                then = self._cores[machine].done(self._clock.now)
                self._plan(machine)
                if then is not None:
                    then()

        if moment is not None:
            self._clock.at(moment, happened)


class InTurn:
    """One piece of a process's work after another, in the order they came; what takes no time waits its turn, too."""

    def __init__(self, machines: Machines, machine: int, who: Hashable) -> None:
        self._machines, self._machine, self._who = machines, machine, who
        self._line: deque[tuple[float, Action]] = deque()
        self.busy = False

    def add(self, seconds: float, then: Action) -> None:
        self._line.append((seconds, then))
        self._go_on()

    def _go_on(self) -> None:
        while self._line and not self.busy:
            seconds, then = self._line.popleft()
            if seconds:
                self.busy = True
                self._machines.run(self._machine, seconds, partial(self._done, then), self._who)
            else:
                then()

    def _done(self, then: Action) -> None:
        self.busy = False
        then()
        self._go_on()


class Cores:
    """Tasks by the work that is left; `done` gives back what was passed to `add`."""

    def __init__(self, cores: int) -> None:
        self._cores = cores
        self._served = 0.0  # seconds of work that a task that was there from the beginning has had
        self._now = 0.0
        self._count = 0
        self._tasks: list[tuple[float, int, Any]] = []  # (served when it is done, order, task)

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
    """In the place of `Cores` where a cluster has slices."""

    def __init__(self, cores: int, *, slice: float, spin: float) -> None:
        self._slice, self._spin = slice, spin
        self._cores = [Core() for _ in range(cores)]
        self._place: dict[Hashable, Core] = {}
        self._served: dict[Hashable, float] = {}
        self._now = 0.0
        self._due: Core | None = None  # where something happens at the moment that `next` said
        self._over = False  # it is the end of a slice, not of a job

    def add(self, now: float, seconds: float, task: Any, who: Hashable) -> None:
        self._advance(now)
        mine = self._place.get(who)
        if mine is not None and not mine.queue and (mine.last == who or self._idle(mine)):
            core = mine
        else:
            idle = next((each for each in self._cores if self._idle(each)), None)
            core = idle or mine or min(self._cores, key=lambda each: len(each.queue))
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
        if any(len(core.queue) > 1 for core in self._cores):
            idle = (max(self._now, self._spins_until(core)) for core in self._cores if not core.queue)
            if (first := min(idle, default=math.inf)) < moment:
                moment, self._due = first, None
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
            job = core.queue.popleft()
            core.last, core.left = job.who, self._now
            self._begin(core)
            return job.task
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

    def _spins_until(self, core: Core) -> float:
        """Whoever ran here last keeps the core until then, if it has not gone elsewhere."""
        stays = self._place.get(core.last) is core
        return core.left + self._spin if stays else core.left

    def _idle(self, core: Core) -> bool:
        return not core.queue and self._spins_until(core) <= self._now

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
