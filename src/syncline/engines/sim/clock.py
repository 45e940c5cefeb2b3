"""Virtual time and threads that take turns: exactly one runs, in an order that is the same every time."""

from __future__ import annotations

import heapq
import itertools
import random
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of virtual time: one gradient's computation, one move of gradients or weights, one message."""

    compute: float = 1.0
    transfer: float = 0.01
    latency: float = 0.001


class Clock:
    """Virtual time: actions in the order of their time, then of their planning."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = itertools.count()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (max(time, self.now), next(self._order), action))

    def after(self, delay: float, action: Callable[[], None]) -> None:
        self.at(self.now + delay, action)

    def step(self) -> bool:
        """Run the next action; False if there is none."""
        if not self._queue:
            return False
        self.now, _, action = heapq.heappop(self._queue)
        action()
        return True


class Random:
    """The states of all random generators, one set per learner."""

    def __init__(self) -> None:
        self.save()

    def save(self) -> None:
        self._states = (torch.get_rng_state(), np.random.get_state(), random.getstate())

    @property
    def torch_state(self) -> torch.Tensor:
        return self._states[0]

    def restore(self) -> None:
        torch.set_rng_state(self._states[0])
        np.random.set_state(self._states[1])
        random.setstate(self._states[2])


class Fiber:
    """A thread that runs only between `resume` and its own `block`."""

    def __init__(self, main: Callable[[], None]) -> None:
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._random: Random | None = None
        self.done = False
        self._thread = threading.Thread(target=self._run, args=(main,), daemon=True)
        self._thread.start()

    def _run(self, main: Callable[[], None]) -> None:
        self._go.acquire()
        main()
        self.done = True
        self._back.release()

    def resume(self) -> None:
        """Let it run until it blocks or ends (from the scheduler)."""
        outside = Random()
        if self._random is not None:
            self._random.restore()
        self._go.release()
        self._back.acquire()
        self._random = Random()
        outside.restore()
        if self.done:
            self._thread.join()

    def block(self) -> None:
        """Give way (from inside)."""
        self._back.release()
        self._go.acquire()


class Handler:
    """A generator in a fiber's place: goes on when it is resumed, until it gives way. No thread."""

    def __init__(self, steps: Generator[None, None, None]) -> None:
        self._steps = steps
        self.done = False

    def resume(self) -> None:
        try:
            next(self._steps)
        except StopIteration:
            self.done = True

    def end(self) -> None:
        """It never goes on."""
        self.done = True
        self._steps.close()
