"""What every supervisor has: the parts of a run in turn on one thread, its processes, the caller's commands, the first failure.

Not responsible for what a run consists of: that is the supervisor's, which gives its parts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import chain
from typing import Any

from syncline.engines.local.processes import Process, Processes
from syncline.engines.local.shared_memory import WakeUp
from syncline.engines.recorder import Recorder
from syncline.engines.run import Outcome

Part = Callable[[], None]


class RunThread:
    """One run's thread; `main` is its function. `end` is run in any case, the others until something fails."""

    def __init__(self, recorder: Recorder, began: float, *, begin: Part, loop: Part, end: Part) -> None:
        self._recorder, self._began = recorder, began
        self._parts, self._end = (begin, loop), end
        self.begun = False  # its processes are started
        self.done = threading.Event()
        self.children: Processes | None = None
        self.elsewhere: list[list[Process]] = []
        self._commands: list[Any] = []
        self.changed = threading.Condition()  # commands and their answers; notified at the end
        self._wake = WakeUp()

    @property
    def outcome(self) -> Outcome:
        return self._recorder.outcome

    @property
    def error(self) -> BaseException | None:
        return self._recorder.error

    @property
    def processes(self) -> list[Process]:
        """All that were started, on whatever machine, in that order."""
        here = list(self.children.by_pid.values()) if self.children is not None else []
        return sorted([*here, *chain.from_iterable(self.elsewhere)], key=lambda process: process.order)

    def fail(self, error: BaseException) -> None:
        """The first failure is the one that is told."""
        self._recorder.error = self._recorder.error or error

    def main(self) -> None:
        begin, loop = self._parts
        self._guard(begin)
        with self.changed:
            self.begun = True
            self.changed.notify_all()
        if self.error is None:
            self._guard(loop)
        self._guard(self._end)
        self.outcome.seconds = time.monotonic() - self._began
        self.done.set()
        with self.changed:
            self.changed.notify_all()

    def _guard(self, part: Part) -> None:
        try:
            part()
        except BaseException as error:
            self.fail(error)

    # -- processes ---------------------------------------------------------------------------------------

    def open(
        self,
        heard: Callable[[Process, Any], None],
        ended: Callable[[Process, str], None],
        asked: Callable[[Any], None],
    ) -> Processes:
        """Processes can be started from now on; `asked` gets what the caller wants, on this thread."""
        self.children = Processes(heard, ended)
        self.children.watch(self._wake.fd, lambda: self._pass_on(asked))
        return self.children

    def close(self) -> None:
        """Nothing stays behind: those that still run are ended if the run has failed."""
        with self.changed:
            self._wake.close()
        if self.children is not None:
            self.children.close(kill=self.error is not None)

    # -- the caller's ------------------------------------------------------------------------------------

    def command(self, command: Any) -> None:
        """From any thread; in vain when the run has ended."""
        with self.changed:
            self._commands.append(command)
            if self._wake.fd >= 0:
                self._wake.ring()

    def _pass_on(self, asked: Callable[[Any], None]) -> None:
        self._wake.quiet()
        with self.changed:
            commands, self._commands = self._commands, []
        for command in commands:
            asked(command)
