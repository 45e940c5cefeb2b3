"""Carries out what a run's lifecycle decides, the same for every engine with a coordinator: on its crew, its record, its checkpoints.

Not responsible for deciding (`protocols.lifecycle`), nor for how learners and shards are started and ended: that is the engine's `Crew`,
or where a batch method trains its `BatchCrew`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from syncline.batch import coordinator as batch
from syncline.batch import messages as b
from syncline.engines.batch_method_record import BatchRecord, read_batch
from syncline.engines.checkpoint_writer import commit
from syncline.engines.recorder import Recorder
from syncline.engines.run import RunSpec
from syncline.errors import LostError
from syncline.messages import Saved
from syncline.protocols import lifecycle as life
from syncline.roles.checkpoint_manifest import Restored, restored, upto
from syncline.roles.coordinator import Coordinator
from syncline.table.checkpoints import Checkpoint, CheckpointError, Folder, Written, find


class Crew(ABC):
    """The learners and shards of a run, real or simulated."""

    spec: RunSpec
    coordinator: Coordinator
    recorder: Recorder
    folder: Folder | None  # of checkpoints

    @abstractmethod
    def start_learner(self, learner: int, rank: int) -> None: ...

    @abstractmethod
    def end_learner(self, learner: int) -> None:
        """At once, and nobody is to notice."""

    @abstractmethod
    def forget_learner(self, learner: int) -> None:
        """It is gone: nothing of it is needed any more."""

    @abstractmethod
    def kill_learner(self, learner: int, why: str) -> None:
        """Its loss will be noticed."""

    @abstractmethod
    def tell_stop(self) -> None:
        """Learners leave after their step."""

    @abstractmethod
    def renew_shards(self) -> None:
        """The old ones end, and new ones know nothing."""

    @abstractmethod
    def finish(self) -> None:
        """All learners have left: the coordinator finishes, soon."""

    @abstractmethod
    def fail(self, error: BaseException) -> None: ...


class Supervision:
    """One run's lifecycle and those that it decides about."""

    def __init__(self, lifecycle: life.Lifecycle, crew: Crew, now: Callable[[], float]) -> None:
        self.lifecycle, self._crew, self._now = lifecycle, crew, now
        self._coordinator, self._recorder = crew.coordinator, crew.recorder
        self.last: Path | None = None  # checkpoint
        self._whole = True  # not in the middle of going back

    # -- events ------------------------------------------------------------------------------------------

    def returned(self, learner: int) -> None:
        self._carry_out(self.lifecycle.returned(learner, unaware=learner in self._coordinator.stale))

    def raised(self, learner: int, error: BaseException) -> None:
        self._carry_out(self.lifecycle.raised(learner, error, unaware=learner in self._coordinator.stale))

    def lost(self, learner: int, why: str, *, stepped: bool, **details: Any) -> None:
        unaware = learner in self._coordinator.stale
        how: dict[str, Any] = {"stepped": stepped, "unaware": unaware, "details": details}
        self._carry_out(self.lifecycle.lost(learner, why, now=self._now(), **how))

    def shard_lost(self, lost: str, **details: Any) -> None:
        self._carry_out(self.lifecycle.shard_lost(lost, self._now(), details))

    def commit(
        self, number: int, manifest: dict[str, Any] | None, files: Sequence[Written], *, prune: bool
    ) -> Path | None:
        """As the coordinator's port: the checkpoint, or None where there is none."""
        folder, spec = self._crew.folder, self._crew.spec
        assert folder is not None
        if manifest is None:
            folder.abandon(number)
            return None
        manifest["history"] = upto(number, self._recorder.history())
        done = commit(folder, number, manifest, files, spec.storage.keep if prune else None)
        self._recorder.emit(done)
        if done.problem:
            return None
        self.last = Path(done.path)
        self.lifecycle.checkpointed()
        return self.last

    def add(self, count: int) -> None:
        self._carry_out(self.lifecycle.add(count))

    def ask_stop(self) -> None:
        self._carry_out(self.lifecycle.ask_stop(self._now()))

    def stop(self) -> None:
        """The coordinator wants learners to stop."""
        self._carry_out(self.lifecycle.stop(self._now()))

    def tick(self) -> None:
        self._carry_out(self.lifecycle.tick(self._now()))

    def save_failed(self) -> None:
        """Begin the last checkpoint of a run that has failed, while all its shards live."""
        if self._whole:
            self._carry_out(self.lifecycle.save_failed(self._now()))

    @property
    def saving_failed(self) -> bool:
        """Return whether to wait for that checkpoint."""
        if not self._coordinator.saving_failed:
            return False
        return self.lifecycle.waits_to_save(self._now(), begun=self._coordinator.cutting)

    # -- decisions ---------------------------------------------------------------------------------------

    def _carry_out(self, decisions: Iterable[life.Decision]) -> None:
        for decision in decisions:
            match decision:
                case life.StartLearner(learner, rank):
                    self._coordinator.join(learner, rank)
                    self._crew.start_learner(learner, rank)
                case life.BeginAnew(learners):
                    self._coordinator.begin_anew(learners)
                    self._start_all(learners)
                case life.Leave(learner, lost):
                    self._coordinator.leave(learner, lost=lost)
                    self._crew.forget_learner(learner)
                case life.GoBack():
                    self._go_back(decision)
                case life.PrepareStop():
                    self._coordinator.stop()
                case life.StopLearners():
                    self._crew.tell_stop()
                case life.Kill(learner, why):
                    self._crew.kill_learner(learner, why)
                case life.Finish():
                    self._crew.finish()
                case life.SaveFailed():
                    self._coordinator.save_failed()
                case life.Fail(error):
                    self._crew.fail(error)
                case _:
                    self._recorder.say(decision)

    def _start_all(self, learners: Mapping[int, int]) -> None:
        for learner, rank in learners.items():
            self._crew.start_learner(learner, rank)

    def _go_back(self, decision: life.GoBack) -> None:
        began, self._whole = self._now(), False
        for learner in decision.ended:
            self._crew.end_learner(learner)
            self._coordinator.leave(learner, lost=False)
            self._crew.forget_learner(learner)
        self._crew.renew_shards()
        try:
            last = last_good(decision.lost, self._crew.folder, self.last, self._crew.spec.storage.restored)
        except LostError as error:
            self._carry_out(self.lifecycle.fail(error))
            return
        self._recorder.go_back(last)
        self._coordinator.recover(last, decision.learners)
        self._whole = True
        self._start_all(decision.learners)
        version, seconds = last.version if last else 0, self._now() - began
        anew = ", and all learners begin anew" if decision.start else ""
        what = f"recovered: all shards are back at version {version}{anew}"
        self._recorder.event(what, kind="recovered", version=version, seconds_taken=seconds)


def last_good(
    lost: str,
    folder: Folder | None,
    last: Path | None,
    start: Restored | None,
    read: Callable[[Checkpoint], Restored] = restored,
) -> Restored | None:
    """The state that new shards begin with; None: that of the start."""
    assert folder is not None
    try:
        found = read(find(last)) if last else start
    except CheckpointError as error:
        raise LostError(f"{lost}, and the last checkpoint cannot be read: {error}") from error
    with suppress(OSError):  # a full or failing disk is no reason not to go back: going back only reads
        folder.remove_unfinished()
    return found


# -- where a batch method trains -----------------------------------------------------------------------------


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
    """One run's lifecycle and those that it decides about. Learners outlive their shards: they know nothing but the point they read."""

    def __init__(self, crew: BatchCrew, record: BatchRecord) -> None:
        self._crew, self._record = crew, record
        self._coordinator, self._recorder = record.coordinator, record.recorder
        self._last: Path | None = None  # checkpoint
        plan, recovers = record.spec.plan, record.folder is not None
        self.lifecycle = life.Lifecycle(record.spec.faults, plan.learners, recovers=recovers, saved=True)

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
            self._crew.grow((1 + batch.AHEAD) * count)
            self._coordinator.grow((1 + batch.AHEAD) * count)
        self._carry_out(self.lifecycle.add(count))

    def ask_stop(self) -> None:
        self._carry_out(self.lifecycle.ask_stop(0.0))

    def saved(self, message: Saved) -> None:
        """One shard's file is there."""
        done = self._record.saved(message)
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
            last = last_good(
                lost, self._record.folder, self._last, self._record.spec.storage.restored, read_batch
            )
        except LostError as error:
            self._carry_out(self.lifecycle.fail(error))
            return
        version = last.version if last else 0
        self._record.go_back(last)
        self._coordinator.go_back(last.batch.state if last and last.batch else None, version)
        what = f"recovered: all shards are back at version {version}"
        self._recorder.event(what, kind="recovered", version=version)
        self._crew.renew_shards(last)
