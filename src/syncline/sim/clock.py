"""Virtual time: a queue of actions, and the machines whose cores they share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sized
from heapq import heappop, heappush

from syncline.cluster.record import Cluster
from syncline.sim.run_queues import Queues
from syncline.sim.shared_cores import Cores

Action = Callable[[], None]


class Clock:
    """Actions in the order of their time, then of their planning."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0  # actions so far
        self._planned = 0  # counts what was planned
        self._queue: list[tuple[float, int, Action]] = []

    def at(self, time: float, action: Action) -> None:
        self._planned += 1
        now = self.now
        heappush(self._queue, (time if time > now else now, self._planned, action))

    def after(self, delay: float, action: Action) -> None:
        self._planned += 1
        heappush(self._queue, (self.now + delay, self._planned, action))

    def run(self, going: Sized) -> None:
        """Actions for as long as there are any, and somebody is left in `going`."""
        queue, pop = self._queue, heappop
        while queue and going:
            self.now, _, action = pop(queue)
            self.events += 1
            action()

    def step(self) -> bool:
        """Run the next action; False if there is none."""
        if not self._queue:
            return False
        self.now, _, action = heappop(self._queue)
        self.events += 1
        action()
        return True


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
            self._cores[machine] = self._make(self._count)
        self._cores[machine].add(self._clock.now, seconds, then, who)
        self._plan(machine)

    def _make(self, count: int) -> Cores | Queues:
        cluster = self._cluster
        if cluster.slice is None:
            return Cores(count)
        return Queues(count, slice=cluster.slice, spin=cluster.spin)

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
        if moment is not None:
            self._clock.at(moment, lambda: self._done(machine, number))

    def _done(self, machine: int, number: int) -> None:
        if number == self._planned[machine]:  # else others came or went since
            then = self._cores[machine].done(self._clock.now)
            self._plan(machine)
            if then is not None:
                then()


class ClockPause:
    """Somebody is held for a while; work that is under way is done so much later."""

    __slots__ = ("debt", "until", "working")

    def __init__(self) -> None:
        self.until = 0.0
        self.working = False
        self.debt = 0.0  # seconds to wait at the end of the work

    def begin(self, now: float, seconds: float) -> None:
        self.until = max(self.until, now) + seconds
        if self.working:
            self.debt += seconds

    def owed(self) -> float:
        """Seconds to wait at the end of a piece of work, once."""
        owed, self.debt = self.debt, 0.0
        return owed
