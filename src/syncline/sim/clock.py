"""Virtual time: a queue of actions, and pauses of whoever acts."""

from __future__ import annotations

from collections.abc import Callable, Sized
from heapq import heappop, heappush

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


def last_of(count: int, then: Action) -> Action:
    """An action for so many events: the last of them does it."""
    left = [count]

    def happened() -> None:
        left[0] -= 1
        if not left[0]:
            then()

    return happened


class Worker:
    """One thing after another."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._free = clock, 0.0

    def do(self, seconds: float, then: Action) -> None:
        self._free = max(self._free, self._clock.now) + seconds
        self._clock.at(self._free, then)


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
