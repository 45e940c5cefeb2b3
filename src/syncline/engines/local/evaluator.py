"""The supervisor's end of the evaluator: a process that tests snapshots beside the learners, one at a time (R6)."""

from __future__ import annotations

from collections import deque
from typing import Any

from torch import Tensor

from syncline import messages as m
from syncline.engines.local.packing import Parcel
from syncline.engines.local.processes import Processes
from syncline.engines.recorder import Recorder, said
from syncline.errors import RunError, raised_in


class Evaluator:
    """Snapshots wait here for their turn: a slow test must not fill its channel."""

    def __init__(self, processes: Processes, evaluate: Parcel, recorder: Recorder) -> None:
        self._recorder = recorder
        self._waiting: deque[tuple[int, dict[str, Tensor]]] = deque()  # the first is being tested
        self._process = processes.fork("evaluator", 0, 0, None, None, 1)
        self._process.channel.post(evaluate)
        evaluate.close()

    def give(self, epoch: int, state: dict[str, Tensor]) -> None:
        self._waiting.append((epoch, state))
        if len(self._waiting) == 1:
            self._next()

    def _next(self) -> None:
        if self._waiting:
            self._process.channel.post(self._waiting[0])

    def hear(self, message: Any) -> None:
        if isinstance(message, m.Raised):
            what = said(message.error) if message.error is not None else raised_in(message.traceback)
            error = RunError(f"evaluation failed: {what}\n\n{message.traceback}")
            self._recorder.error = self._recorder.error or error
            return
        self._waiting.popleft()
        self._next()
        self._recorder.evaluated(*message)
