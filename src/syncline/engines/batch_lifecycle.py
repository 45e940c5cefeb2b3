"""Carries out what a run's lifecycle decides where a batch method trains: the same on processes and in virtual time.

Learners outlive their shards, whatever these go back to: they know nothing but the point they read. Not responsible for deciding
(`protocols.lifecycle`), nor for how learners and shards are started (the engine's `BatchCrew`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from syncline.batch import messages as b
from syncline.batch.coordinator import AHEAD, Coordinator
from syncline.engines.batch_record import BatchRecord, read_batch
from syncline.engines.recorder import Recorder
from syncline.engines.run import RunSpec
from syncline.engines.supervision import last_good
from syncline.errors import LostError
from syncline.protocols import lifecycle as life
from syncline.roles.checkpoint_manifest import Restored
from syncline.table.checkpoints import Folder


class BatchCrew(ABC):
    """The learners and shards of a run, real or simulated."""

    @abstractmethod
    def start_learner(self, learner: int, rank: int) -> None: ...

    @abstractmethod
    def renew_shards(self, restored: Restored | None) -> None:
        """The old ones end; new ones have the vectors of a checkpoint, or (None) the first weights. Then the coordinator begins."""

    @abstractmethod
    def grow(self, slots: int) -> None:
        """More room for sums."""

    @abstractmethod
    def do(self, actions: Iterable[b.Action]) -> None: ...

    @abstractmethod
    def fail(self, error: BaseException) -> None: ...


class BatchSupervision:
    """One run's lifecycle and those that it decides about."""

    def __init__(
        self,
        spec: RunSpec,
        crew: BatchCrew,
        coordinator: Coordinator,
        recorder: Recorder,
        record: BatchRecord,
    ) -> None:
        folder = spec.storage.folder
        self._folder = Folder(Path(folder)) if folder else None
        self._start = spec.storage.restored
        self._last: Path | None = None  # checkpoint
        self._crew, self._coordinator, self._recorder, self._record = crew, coordinator, recorder, record
        self.lifecycle = life.Lifecycle(
            spec.faults, spec.plan.learners, recovers=self._folder is not None, saved=True
        )

    def begin(self) -> None:
        """All learners of the start."""
        for learner, rank in self.lifecycle.live.items():
            self._crew.start_learner(learner, rank)

    def raised(self, learner: int, error: BaseException) -> None:
        self._carry_out(self.lifecycle.raised(learner, error))

    def lost(self, learner: int, why: str, *, stepped: bool, **details: Any) -> None:
        self._carry_out(self.lifecycle.lost(learner, why, stepped=stepped, details=details))

    def shard_lost(self, lost: str, **details: Any) -> None:
        self._carry_out(self.lifecycle.shard_lost(lost, details=details))

    def add(self, count: int) -> None:
        if not self._coordinator.stopping:
            self._crew.grow((1 + AHEAD) * count)
            self._coordinator.grow((1 + AHEAD) * count)
        self._carry_out(self.lifecycle.add(count))

    def ask_stop(self) -> None:
        self._carry_out(self.lifecycle.ask_stop(0.0))

    def checkpointed(self, done: Any) -> None:
        """A checkpoint was written, or failed."""
        if done is not None and not done.problem:
            self._last = Path(done.path)
            self.lifecycle.checkpointed()

    def _carry_out(self, decisions: Iterable[life.Decision]) -> None:
        for decision in decisions:
            match decision:
                case life.StartLearner(learner, rank):
                    self._crew.start_learner(learner, rank)
                case life.Leave(learner, _):
                    self._crew.do(self._coordinator.leave(learner))
                case life.GoBack(lost, _, _, _):
                    self._go_back(lost)
                case life.PrepareStop():
                    self._coordinator.stop()  # after this iteration: in the middle of one x is a trial
                case life.Fail(error):
                    self._crew.fail(error)
                case _:
                    self._recorder.say(decision)

    def _go_back(self, lost: str) -> None:
        try:
            last = last_good(lost, self._folder, self._last, self._start, read_batch)
        except LostError as error:
            self._carry_out(self.lifecycle.fail(error))
            return
        version = last.version if last else 0
        self._record.go_back(last)
        self._coordinator.go_back(last.batch["state"] if last and last.batch else None, version)
        what = f"recovered: all shards are back at version {version}"
        self._recorder.event(what, kind="recovered", version=version)
        self._crew.renew_shards(last)
