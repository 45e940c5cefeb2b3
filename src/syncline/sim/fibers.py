"""Functions that take turns: exactly one runs, until it gives way. Threads, whose modes of torch are their own, or generators."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator


class Killed(BaseException):
    """Unwinds a fiber that is ended from outside."""


class Fiber(ABC):
    """Runs only between `resume` and its own `block`."""

    done = False

    @abstractmethod
    def resume(self) -> None:
        """Let it run until it blocks or ends (from the scheduler)."""

    @abstractmethod
    def block(self) -> None:
        """Give way (from inside); raises `Killed` if it was ended meanwhile."""

    @abstractmethod
    def end(self) -> None:
        """It runs no further than to unwind."""


class Thread(Fiber):
    """A thread of the system's."""

    def __init__(self, main: Callable[[], None]) -> None:
        self._main, self._ending = main, False
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread: threading.Thread | None = None

    def _run(self) -> None:
        self._go.acquire()
        if not self._ending:
            self._main()
        self.done = True
        self._back.release()

    def resume(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        self._go.release()
        self._back.acquire()
        if self.done:
            self._thread.join()

    def block(self) -> None:
        if not self._ending:
            self._back.release()
            self._go.acquire()
        if self._ending:
            raise Killed

    def end(self) -> None:
        self._ending = True
        if not self.done:
            self.resume()


class Handler(Fiber):
    """A generator in a fiber's place: goes on when it is resumed, until it yields. No stack of its own."""

    def __init__(self, steps: Generator[None, None, None]) -> None:
        self._steps = steps

    def resume(self) -> None:
        try:
            next(self._steps)
        except StopIteration:
            self.done = True

    def block(self) -> None:
        raise AssertionError("a handler gives way by yielding")

    def end(self) -> None:
        self.done = True
        self._steps.close()
