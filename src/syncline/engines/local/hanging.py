"""Learners and shards that are not heard of: named, and ended where the user wants that. When it is too long is `Patience`'s."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from syncline.engines.local.processes import Process
from syncline.engines.record import Recorder
from syncline.engines.run import RunSpec
from syncline.protocols.patience import Patience


class Hanging:
    """Looks at one run's learners, or shards; `others` and `end` say in its warning what it means, and what kill_hung does."""

    def __init__(
        self, spec: RunSpec, recorder: Recorder, *, others: str, end: str, least: float = 0.0
    ) -> None:
        self._patience = Patience(max(spec.patience, least)) if spec.patience else None
        self._kill, self._recorder = spec.kill_hung, recorder
        self._others, self._end = others, end

    def look(
        self,
        now: float,
        progress: Mapping[int, int],
        idle: set[int],
        processes: Mapping[int, Process],
        kill: Callable[[Process, str], None],
    ) -> None:
        """Who should compute and has not been heard of? Those that wait for others are `idle`."""
        if self._patience is None:
            return
        for number in self._patience.look(now, progress, idle):
            process = processes[number]
            silence = self._patience.silence(number, now)
            what = f"hangs: not heard of for {silence:.1f} s (pid {process.pid})"
            rank = process.rank if process.role == "learner" else None
            name = f"{process.role} {process.rank}"
            self._recorder.event(
                what if rank is not None else f"{name} {what}", rank, kind="hangs", pid=process.pid
            )
            if self._kill:
                kill(process, f"patience of {self._patience.seconds:g} s is over")
            else:
                self._recorder.warn(
                    f"{name} {what}; {self._others}. It is left alone: kill_hung=True {self._end}, "
                    "patience= sets the time",
                    said=True,
                )
