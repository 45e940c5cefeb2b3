"""Bulk that comes after its note (M12): late, or never because its sender died. Seeded; on request.

A note is handed on when its bulk is there too, and so is whatever its sender said after it. Not responsible for what
either of them holds.
"""

from __future__ import annotations

import random
from collections import deque

from syncline.sim.clock import Action, Clock

SHARES = (0.0, 0.0, 0.01, 0.1, 1.0)  # of a step: how late bulk comes at most


class Late:
    """Draws how late bulk comes, and whether it does."""

    def __init__(self, seed: int, step: float) -> None:
        self._draw, self._step = random.Random(f"{seed}/late"), step

    def delay(self) -> float:
        return self._draw.choice(SHARES) * self._draw.random() * self._step

    def lost(self) -> bool:
        return self._draw.random() < 0.5


class Line:
    """What one learner says to the leading shard, in order."""

    def __init__(self, clock: Clock, late: Late) -> None:
        self._clock, self._late = clock, late
        self._waiting: deque[tuple[float, Action, Action | None]] = deque()
        self._dead = self._cut = False  # its sender is; and something of it never came

    def arrived(self, hand_on: Action, bulk: Action | None = None, least: float = 0.0) -> None:
        """A note is there; `bulk` puts in its place what comes with it, not before `least`."""
        if self._cut:
            return
        due = self._clock.now
        if bulk is not None and self._dead:
            if self._late.lost():
                self._cut = True
                return
        elif bulk is not None:
            due = max(least, due + self._late.delay())
        if self._waiting:
            due = max(due, self._waiting[-1][0])
        self._waiting.append((due, hand_on, bulk))
        if due > self._clock.now:
            self._clock.at(due, self._hand_on)
        else:
            self._hand_on()

    def _hand_on(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._clock.now:
            _, hand_on, bulk = self._waiting.popleft()
            if bulk is not None:
                bulk()
            hand_on()

    def end(self) -> float:
        """Its sender died: what has not come may never come. When the rest is there."""
        self._dead = True
        for index, (_, _, bulk) in enumerate(self._waiting):
            if bulk is not None and self._late.lost():
                self._cut = True
                self._waiting = deque(list(self._waiting)[:index])
                break
        return self._waiting[-1][0] if self._waiting else 0.0
