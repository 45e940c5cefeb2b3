"""Functions that take turns: exactly one runs, until it gives way. Greenlets where they are installed, else threads.

Both run in the same order and give the same bits. A fiber keeps its own gradient and autocast modes; other modes of torch
(inference mode, default devices) must not be open while it gives way.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import Any

import torch

try:
    import greenlet
except ImportError:  # an extra
    greenlet = None  # type: ignore[assignment]


class Killed(BaseException):
    """Unwinds a fiber that is ended from outside."""


class Fiber(ABC):
    """Runs only between `resume` and its own `block`."""

    def __init__(self) -> None:
        self.done = False
        self.ending = False

    @abstractmethod
    def resume(self) -> None:
        """Let it run until it blocks or ends (from the scheduler)."""

    @abstractmethod
    def _give_way(self) -> None: ...

    def block(self) -> None:
        """Give way (from inside); raises `Killed` if it was ended meanwhile."""
        if self.ending:
            raise Killed
        self._give_way()
        if self.ending:
            raise Killed

    def end(self) -> None:
        """It runs no further than to unwind."""
        self.ending = True
        if not self.done:
            self.resume()


class Thread(Fiber):
    """A thread of the system's."""

    def __init__(self, main: Callable[[], None]) -> None:
        super().__init__()
        self._main = main
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread: threading.Thread | None = None

    def _run(self) -> None:
        self._go.acquire()
        if not self.ending:
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

    def _give_way(self) -> None:
        self._back.release()
        self._go.acquire()


def _modes() -> tuple[bool, list[tuple[str, bool, torch.dtype]]]:
    """Torch's modes of the running thread, which a fiber takes with it."""
    kinds = ("cpu", "cuda")
    casts = [(each, torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in kinds]
    return torch.is_grad_enabled(), casts


def _set_modes(gradients: bool, casts: list[tuple[str, bool, torch.dtype]]) -> None:
    torch.set_grad_enabled(gradients)
    for kind, enabled, dtype in casts:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)


class Green(Fiber):
    """A greenlet: a switch takes well under a microsecond, and its modes two."""

    def __init__(self, main: Callable[[], None]) -> None:
        super().__init__()
        self._main = main
        self._inside: Any = (True, [])  # its modes: at first torch's defaults
        self._green: Any = None

    def _run(self) -> None:
        if not self.ending:
            self._main()
        self.done = True

    def resume(self) -> None:
        if self._green is None:
            self._green = greenlet.greenlet(self._run, parent=greenlet.getcurrent())
        outside = _modes()
        _set_modes(*self._inside)
        self._green.switch()
        self._inside = _modes()
        _set_modes(*outside)

    def _give_way(self) -> None:
        self._green.parent.switch()


class Handler(Fiber):
    """A generator in a fiber's place: goes on when it is resumed, until it yields. No stack of its own."""

    def __init__(self, steps: Generator[None, None, None]) -> None:
        super().__init__()
        self._steps = steps

    def resume(self) -> None:
        try:
            next(self._steps)
        except StopIteration:
            self.done = True

    def end(self) -> None:
        self.done = True
        self._steps.close()

    def _give_way(self) -> None:
        raise AssertionError("a handler gives way by yielding")


def make_fiber(main: Callable[[], None]) -> Fiber:
    """Not started yet."""
    return Green(main) if greenlet is not None else Thread(main)
