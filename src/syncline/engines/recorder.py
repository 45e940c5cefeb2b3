"""Gathers a run's outcome from what the coordinator emits; the same for every engine.

Not responsible for where evaluation runs: the engine passes a function that starts it.
"""

from __future__ import annotations

import bisect
import dataclasses
import logging
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from syncline import messages as m
from syncline.engines.checkpoint_writer import commit, write_part
from syncline.engines.run import (
    Began,
    EpochRecord,
    Evaluate,
    Event,
    Logged,
    Outcome,
    RunSpec,
    Sampled,
    Snapshot,
)
from syncline.errors import LearnerError, LostWarning, RunError, SynclineError, SynclineWarning
from syncline.learn.usage_warnings import not_finite
from syncline.protocols import lifecycle as life
from syncline.roles.allreduce_coordinator import AllReduceCoordinator, GatheredCut
from syncline.roles.checkpoint_manifest import Restored
from syncline.roles.version_assembly import Assembly
from syncline.table.checkpoints import Folder
from syncline.table.layout import Layout
from syncline.table.optimizer_template import Options

LOGGER = logging.getLogger("syncline")
# Events that a log shows as warnings.
FAULTS = (
    "lost",
    "raised",
    "killed",
    "hangs",
    "given up",
    "shard lost",
    "node lost",
    "machine lost",
    "checkpoint failed",
    "warning",
)


class Recorder:
    """History, logs, events and final weights of one run."""

    def __init__(
        self,
        spec: RunSpec,
        *,
        now: Callable[[], float],
        evaluate: Callable[[int, dict[str, Tensor]], None],
        stop: Callable[[], None],
        layouts: Callable[[], dict[int, Layout]] = dict,
    ) -> None:
        self.outcome = Outcome()
        if spec.storage.restored is not None:
            self.outcome.history += spec.storage.restored.history
        self.error: BaseException | None = None
        self._now, self._evaluate, self._stop, self._layouts = now, evaluate, stop, layouts
        self._callbacks, self._listeners = spec.callbacks, spec.listeners
        self._assembly = Assembly()
        self._open: dict[int, EpochRecord] = {}  # epochs whose evaluation is not there yet
        self._sent: dict[int, dict[str, Tensor] | None] = {}  # of them on its way: its weights, for listeners
        self._void: list[int] = []  # epochs whose evaluation is on its way and no longer wanted
        self._finished = self._complete = False
        self._deaf = False  # a listener failed, and that was said
        self.causes: set[str] = set()  # of warnings that were given
        self._readers: defaultdict[str, set[int]] = defaultdict(
            set
        )  # ranks, by the data that each reads by itself
        self._own: dict[tuple[str, int], Options] = {}  # of the first shard of a table's parts
        self._name = spec.name or "run"
        if spec.storage.restored is not None:
            self._log(
                "continues from version %d of %s", spec.storage.restored.version, spec.storage.restored.name
            )
        self._tell(Began(now))

    def _log(self, text: str, *given: Any, level: int = logging.INFO) -> None:
        LOGGER.log(level, "%s: " + text, self._name, *given)

    def _tell(self, record: Any) -> None:
        """Listeners are no part of the run: it goes on whatever they do."""
        for listener in self._listeners:
            try:
                listener(record)
            except Exception:
                if not self._deaf:
                    self._deaf = True
                    self.warn(f"a listener failed, the run goes on:\n{traceback.format_exc()}")

    def emit(self, record: Any) -> None:
        """What the coordinator passes on."""
        if isinstance(record, m.WeightsPart):
            self._assembly.add(record)
            self._compare(record)
            self._evaluate_ready()
        elif isinstance(record, m.EpochEnd):
            if record.loader == 0:
                self._epoch(record)
        elif isinstance(record, m.Finished):
            self.outcome.statistics = record.statistics
            self._finished = True
        elif isinstance(record, m.Warned):
            rank, data = record.data or (0, "")
            self._readers[data].add(rank)
            if record.data is None or len(self._readers[data]) > 1:
                self.warn(record.text, record.cause)
        elif isinstance(record, m.Clocks):
            self._tell(record)
        elif isinstance(record, m.Left):
            self._left(record)
        elif isinstance(record, m.Checkpointed):
            self._checkpointed(record)
        elif isinstance(record, tuple):
            rank, log = record
            self.outcome.logs.append((rank, self._now(), log.metrics))
            self._tell(Logged(*self.outcome.logs[-1]))

    def event(self, what: str, rank: int | None = None, *, kind: str = "", **details: Any) -> None:
        event = Event(seconds=self._now(), what=what, rank=rank, kind=kind, details=details)
        self.outcome.events.append(event)
        who = f"learner {rank}: " if rank is not None else ""
        self._log("%s%s", who, what, level=logging.WARNING if kind in FAULTS else logging.INFO)
        self._tell(dataclasses.replace(event, details=dict(details)))  # its own: more may be added here

    def say(self, decision: life.Decision) -> None:
        """What the lifecycle wants to be known."""
        match decision:
            case life.Say(what, rank, kind, details):
                self.event(what, rank, kind=kind, **details)
            case life.WarnLost(rank, how, others, then):
                goes_on = f"{others} other learner{'s go' if others > 1 else ' goes'} on"
                left = then or (goes_on if others else "no other is left")
                self.warn(f"learner {rank} {how}; {left}", kind=LostWarning, said=True)
            case life.Warn(text):
                self.warn(text, said=True)

    def sample(self, statistics: m.Statistics) -> None:
        """How a simulated run stands, for listeners."""
        self._tell(Sampled(self._now(), statistics))

    def warn(
        self, text: str, cause: str = "", *, kind: type[Warning] = SynclineWarning, said: bool = False
    ) -> None:
        """For the user, once for each cause; `said`: an event says the same to listeners."""
        if cause and cause in self.causes:
            return
        self.causes.add(cause)
        if not said:
            self._log("%s", text, level=logging.WARNING)
            self._tell(Event(seconds=self._now(), what=text, kind="warning"))
        warnings.warn(text, kind, stacklevel=2)

    def bad_loss(self, rank: int | None, loss: float) -> None:
        """Of a simulated gradient; learners with a session say it themselves."""
        who = f"learner {rank}: " if rank is not None else ""
        self.warn(f"{who}{not_finite('a gradient', len(self.outcome.history), loss)}", "loss")

    def _compare(self, part: m.WeightsPart) -> None:
        """What an optimizer keeps in its groups is the same on all shards, unless it computes over all parameters."""
        first = self._own.setdefault((part.tag, part.table), part.own)
        differ = sorted(
            {key for a, b in zip(first, part.own, strict=True) for key in a | b if a.get(key) != b.get(key)}
        )
        if differ:
            self.warn(
                f"the optimizer of table {part.table} has other values of {', '.join(map(repr, differ))} on shard {part.shard} "
                "than on another: it computes over all its parameters, and each shard has a part of them. Use "
                "topology='servers' or 'servers:1', which gives such an optimizer one shard",
                "shards",
            )

    def returned(self, rank: int, message: m.Returned) -> None:
        """A learner's function is over."""
        self.outcome.returned[rank] = message.value
        if message.problem:
            self.warn(
                f"what learner {rank} returned could not travel, result.returned[{rank}] is None: {message.problem}"
            )

    def _left(self, left: m.Left) -> None:
        """What was lost with a learner belongs to the event of its loss."""
        for event in reversed(self.outcome.events):
            if event.details.get("learner") == left.learner:
                event.details.update(handed_out_again=left.back, in_unfolded_gradients=left.pending)
                what = f"{left.back} examples are handed out again, {left.pending} were in unfolded gradients"
                self._tell(Event(seconds=self._now(), what=what, rank=left.rank, kind="left"))
                return

    def _checkpointed(self, done: m.Checkpointed) -> None:
        if done.problem:
            paths = [event.details["path"] for event in self.outcome.events if event.kind == "checkpoint"]
            good = f"the last good one is {paths[-1]}" if paths else "there is none yet"
            self.event(f"checkpoint failed: {done.problem}", kind="checkpoint failed", version=done.number)
            text = f"checkpoint of version {done.number} failed: {done.problem}; {good}. The run goes on."
            self.warn(text, f"checkpoint: {done.problem}", said=True)
        else:
            what = f"checkpoint of version {done.number}: {done.path}"
            self.event(what, kind="checkpoint", version=done.number, path=done.path)

    def history(self) -> list[dict[str, Any]]:
        """The records so far, for a checkpoint."""
        known = {record.epoch: record for record in (*self._open.values(), *self.outcome.history)}
        return [dataclasses.asdict(known[epoch]) for epoch in sorted(known)]

    def go_back(self, restored: Restored | None) -> None:
        """The run goes on from a checkpoint: what came after it is forgotten."""
        known = (*self._open, *(record.epoch for record in self.outcome.history))
        done = {epoch for epoch in known if restored and restored.has_done(epoch)}
        self.outcome.history = [record for record in self.outcome.history if record.epoch in done]
        self._void += [epoch for epoch in self._open if epoch in self._sent and epoch not in done]
        self._open = {epoch: record for epoch, record in self._open.items() if epoch in done}
        self._sent = {epoch: state for epoch, state in self._sent.items() if epoch in self._open}
        for epoch in self._open.keys() - self._sent:  # its snapshot is lost
            self.outcome.history.append(self._open.pop(epoch))
        self.outcome.history.sort(key=lambda each: each.epoch)
        self._own.clear()
        self._assembly = Assembly()
        self._finished = self._complete = False

    def complete(self) -> bool:
        """Everything has come in; the final weights are in the outcome."""
        self._complete = self._complete or (not self._open and self._take_final())
        return self._complete

    def _take_final(self) -> bool:
        layouts = self._layouts()
        if not self._finished or not self._assembly.complete("final", layouts):
            return False
        self.outcome.tables = self._assembly.take("final", layouts)
        return True

    def keep_weights(self, error: BaseException) -> None:
        """The run fails; if its last weights are there they come back with the error."""
        if isinstance(error, RunError) and self._take_final():
            self.outcome.seconds = self._now()
            error.outcome = self.outcome

    def _epoch(self, end: m.EpochEnd) -> None:
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

    def iteration(self, record: EpochRecord, state: dict[str, Tensor] | None) -> None:
        """Of a batch method; `state` is to be evaluated."""
        if state is None:
            self._close(record)
            return
        self._open[record.epoch] = record
        self._send(record.epoch, state)

    def _send(self, epoch: int, state: dict[str, Tensor]) -> None:
        self._sent[epoch] = state if self._listeners else None
        self._evaluate(epoch, state)

    @property
    def evaluating(self) -> bool:
        return bool(self._open)

    def _evaluate_ready(self) -> None:
        layouts = self._layouts()
        for epoch in sorted(self._open.keys() - self._sent):
            if self._assembly.complete(f"epoch:{epoch}", layouts):
                self._send(epoch, self._assembly.take(f"epoch:{epoch}", layouts)[0][1])

    def test(self, epoch: int, state: dict[str, Tensor], evaluate: Evaluate) -> None:
        """Evaluate here and now, where no process does it."""
        try:
            metrics = evaluate(state)
        except Exception as error:
            words = f"evaluation failed: {said(error)}\n\n{traceback.format_exc()}"
            self.error = self.error or RunError(words)
        else:
            self.evaluated(epoch, metrics)

    def evaluated(self, epoch: int, metrics: dict[str, float]) -> None:
        if epoch in self._void:  # of a version that was lost
            self._void.remove(epoch)
            return
        record, state = self._open.pop(epoch), self._sent.pop(epoch, None)
        record.metrics.update(metrics)
        self._close(record)
        if state is not None:
            self._tell(Snapshot(record, state))

    def version_of(self, epoch: int) -> int | None:
        """Return the version of an epoch, if its evaluation is not finished."""
        return self._open[epoch].version if epoch in self._open and epoch not in self._void else None

    def skip_evaluation(self, epoch: int) -> None:
        """Close an epoch's record without metrics."""
        if epoch in self._open and epoch not in self._void:
            self._open[epoch].skipped = True
        self.evaluated(epoch, {})

    def _close(self, record: EpochRecord) -> None:
        """An epoch that is made again takes the place of the old."""
        history = self.outcome.history
        place = bisect.bisect_left(history, record.epoch, key=lambda each: each.epoch)
        again = place < len(history) and history[place].epoch == record.epoch
        history[place : place + again] = [record]
        self._log("epoch %d: version %d, loss %.4g", record.epoch + 1, record.version, record.loss)
        self._tell(record)
        for callback in self._callbacks:
            try:
                if callback(record):
                    self._stop()
            except Exception as error:
                words = f"a callback failed: {said(error)}\n\n{traceback.format_exc()}"
                self.error = self.error or RunError(words)


def said(error: BaseException) -> str:
    """What was raised: type and words; of this library's own errors only the words."""
    return str(error) if isinstance(error, SynclineError) else _raised(error)


def _raised(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()


def learner_error(rank: int, error: BaseException | None, text: str) -> LearnerError:
    """A learner's exception, for the caller."""
    told = LearnerError(rank, text, _raised(error) if error is not None else "")
    told.__cause__ = error
    return told


def peer_record(
    spec: RunSpec,
    *,
    now: Callable[[], float],
    evaluate: Callable[[int, dict[str, Tensor]], None],
    stop: Callable[[], None],
    reply: Callable[[int, Any], None],
    fail: Callable[[BaseException], None],
    virtual: bool = False,
) -> tuple[Recorder, AllReduceCoordinator]:
    """The recorder of an all-reduce run, and the keeper to whom its learners report; it writes checkpoints."""
    recorder = Recorder(spec, now=now, evaluate=evaluate, stop=stop, layouts=lambda: keeper.layouts)

    def failed(error: BaseException) -> None:
        recorder.keep_weights(error)
        fail(error)

    def keep(cut: GatheredCut) -> None:
        recorder.emit(_kept(spec, cut, keeper.layouts, recorder.history(), now() if virtual else 0.0))

    keeper = AllReduceCoordinator(
        spec.plan.learners,
        spec.processes,
        emit=recorder.emit,
        event=recorder.event,
        reply=reply,
        fail=failed,
        keep=keep,
    )
    return recorder, keeper


def _kept(
    spec: RunSpec, cut: GatheredCut, layouts: dict[int, Layout], history: list[dict[str, Any]], virtual: float
) -> m.Checkpointed:
    """The last file of a checkpoint, and its commit."""
    assert spec.storage.folder is not None
    folder = Folder(Path(spec.storage.folder))
    name, tensors = cut.learners()
    own = write_part(folder, (cut.number, name, tensors, {}))
    if problem := cut.problem or own.problem:
        folder.abandon(cut.number)
        return m.Checkpointed(cut.number, "", problem)
    assert own.written is not None
    manifest = cut.manifest(seed=spec.plan.seed, sync=str(spec.plan.course), layouts=layouts, history=history)
    manifest["virtual"] = virtual
    return commit(folder, cut.number, manifest, [*cut.files, own.written], spec.storage.keep)
