"""Learners and shards that are not heard of: looked for here. When it is too long is `Watchdog`'s, what then the lifecycle's."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from syncline.engines.local.processes import Process
from syncline.engines.recorder import Recorder
from syncline.protocols.lifecycle import Faults, Hangs, Kill, Watchdog


class HangDetection:
    """Looks at one run's learners, or shards; `others` and `end` say in its warning what it means, and what kill_hung does."""

    def __init__(
        self, faults: Faults, recorder: Recorder, *, others: str, end: str, least: float = 0.0
    ) -> None:
        seconds = max(faults.patience, least) if faults.patience else 0.0
        self._patience = Watchdog(seconds) if seconds else None
        self._hangs = Hangs(seconds, faults.kill_hung, others, end)
        self._recorder = recorder

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
            rank = process.rank if process.role == "learner" else None
            silence = self._patience.silence(number, now)
            name = f"{process.role} {process.rank}"
            decided = self._hangs.decide(number, name, rank, silence, process.pid)
            for decision in decided:
                if isinstance(decision, Kill):
                    kill(process, decision.why)
                else:
                    self._recorder.say(decision)
