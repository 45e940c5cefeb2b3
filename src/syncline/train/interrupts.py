"""Ctrl-C and SIGTERM while a run is waited for: the first asks the run to end, a second Ctrl-C ends it at once.

Handlers are there only for that time, and only in the main thread, where Python has signals. Who has handlers of their own keeps
them: they are called, too, and what they raise is raised when the run has ended. Signals that are ignored stay ignored.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from syncline.errors import Terminated, interrupted

HEEDED = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Of one run; `stop` gets the first signal's number. Use it in a `with`, also inside itself."""

    def __init__(self, stop: Callable[[int], None]) -> None:
        self._stop = stop
        self.number = 0  # of the first signal
        self._raised: BaseException | None = None  # by the user's own handler
        self._before: dict[int, Any] = {}
        self._depth = 0

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._depth += 1
            if self._depth == 1:
                self._install()
        return self

    def __exit__(self, *raised: object) -> None:
        if threading.current_thread() is threading.main_thread():
            self._depth -= 1
            if self._depth == 0:
                self._restore()

    def _install(self) -> None:
        for number in HEEDED:
            before = signal.getsignal(number)
            if before is not None and before is not signal.SIG_IGN:
                self._before[number] = before
                signal.signal(number, self._heed)

    def _restore(self) -> None:
        before, self._before = self._before, {}
        for number, handler in before.items():
            signal.signal(number, handler)

    def _heed(self, number: int, frame: FrameType | None) -> None:
        if not self.number:
            self.number = number
            self._stop(number)
        elif number == signal.SIGINT:  # schedulers may send SIGTERM more than once
            raise KeyboardInterrupt
        own = self._before.get(number)
        if callable(own) and own is not signal.default_int_handler:
            try:
                own(number, frame)
            except BaseException as raised:
                self._raised = self._raised or raised

    def told(self, result: Any, number: int) -> BaseException | None:
        """What is raised at the end of a run that this signal has ended; 0: the one that was heard here, if any."""
        number = self.number or number
        if self._raised is not None:
            return self._raised
        if not number:
            return None
        return interrupted(result) if number == signal.SIGINT else Terminated(result)
