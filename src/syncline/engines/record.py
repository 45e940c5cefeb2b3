"""Gathers a run's outcome from what the coordinator emits; the same for every engine.

Not responsible for where evaluation runs: the engine passes a function that starts it.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor

from syncline.engines.run import Callback, EpochRecord, Event, Outcome
from syncline.errors import LearnerError, RunError
from syncline.table.layout import Layout
from syncline.topology import messages as m
from syncline.topology.weights import Assembly


class Recorder:
    """History, logs, events and final weights of one run."""

    def __init__(
        self,
        *,
        now: Callable[[], float],
        evaluate: Callable[[int, dict[str, Tensor]], None],
        stop: Callable[[], None],
        layouts: Callable[[], dict[int, Layout]],
        callbacks: tuple[Callback, ...],
    ) -> None:
        self.outcome = Outcome()
        self.error: BaseException | None = None
        self._now, self._evaluate, self._stop, self._layouts = now, evaluate, stop, layouts
        self._callbacks = callbacks
        self._assembly = Assembly()
        self._open: dict[int, EpochRecord] = {}  # epochs whose evaluation is not there yet
        self._sent: set[int] = set()
        self._finished = False

    def emit(self, record: Any) -> None:
        """What the coordinator passes on."""
        if isinstance(record, m.WeightsPart):
            self._assembly.add(record)
            self._evaluate_ready()
        elif isinstance(record, m.EpochEnd):
            self._epoch(record)
        elif isinstance(record, m.Finished):
            self.outcome.statistics = record.statistics
            self._finished = True
        elif isinstance(record, m.Warned):
            warnings.warn(record.text, RuntimeWarning, stacklevel=2)
        elif isinstance(record, tuple):
            rank, log = record
            self.outcome.logs.append((rank, self._now(), log.metrics))

    def event(self, what: str, rank: int | None = None) -> None:
        self.outcome.events.append(Event(seconds=self._now(), what=what, rank=rank))

    def complete(self) -> bool:
        """Everything has come in; the final weights are in the outcome."""
        layouts = self._layouts()
        if not self._finished or self._open or not self._assembly.complete("final", layouts):
            return False
        self.outcome.tables = self._assembly.take("final", layouts)
        return True

    def _epoch(self, end: m.EpochEnd) -> None:
        if end.loader != 0:
            return
        record = EpochRecord(
            epoch=end.epoch,
            version=end.version,
            seconds=self._now(),
            examples=end.examples,
            loss=end.loss,
            losses=end.losses,
        )
        if end.tables:
            self._open[end.epoch] = record
            self._evaluate_ready()
        else:
            self._close(record)

    def _evaluate_ready(self) -> None:
        layouts = self._layouts()
        for epoch in sorted(self._open.keys() - self._sent):
            if self._assembly.complete(f"epoch:{epoch}", layouts):
                self._sent.add(epoch)
                self._evaluate(epoch, self._assembly.take(f"epoch:{epoch}", layouts)[0][1])

    def evaluated(self, epoch: int, metrics: dict[str, float]) -> None:
        record = self._open.pop(epoch)
        record.metrics.update(metrics)
        self._close(record)

    def _close(self, record: EpochRecord) -> None:
        self.outcome.history.append(record)
        self.outcome.history.sort(key=lambda each: each.epoch)
        for callback in self._callbacks:
            try:
                if callback(record):
                    self._stop()
            except Exception:
                self.error = self.error or RunError(f"a callback failed:\n{traceback.format_exc()}")


def learner_error(rank: int, error: BaseException | None, text: str) -> LearnerError:
    """A learner's exception, for the caller."""
    told = LearnerError(rank=rank, traceback=text)
    told.__cause__ = error
    return told
