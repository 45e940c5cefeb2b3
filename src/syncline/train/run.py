"""A run in progress, and what it leaves (M10); Ctrl-C and SIGTERM while it is waited for.

The first signal asks the run to end, a second Ctrl-C ends it at once. Handlers are there only for that time, and only in the main thread,
where Python has signals. Who has handlers of their own keeps them: they are called, too, and what they raise is raised when the run has
ended. Signals that are ignored stay ignored.
"""

from __future__ import annotations

import dataclasses
import reprlib
import signal
import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from syncline.dial import Course, Sync, as_sync
from syncline.engines.local import forkserver
from syncline.engines.run import Engine, EpochRecord, Event, Handle, Listener, Outcome, RunSpec
from syncline.engines.simulated_times import SimulatedTimes
from syncline.engines.torchrun.engine import Torchrun
from syncline.errors import DialError, RunError, Terminated, UsageError, interrupted
from syncline.learn.model_factories import copied
from syncline.learn.server_session import check_whole, refuse_weighted
from syncline.learn.train_and_evaluate import Training
from syncline.messages import Statistics
from syncline.protocols.staleness import Staleness
from syncline.report.folder_writer import Recording
from syncline.report.progress import ProgressDisplay, progress_is_wanted
from syncline.topologies import Trees

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
            for number in HEEDED if self._depth == 1 else ():
                before = signal.getsignal(number)
                if before is not None and before is not signal.SIG_IGN:
                    self._before[number] = before
                    signal.signal(number, self._heed)
        return self

    def __exit__(self, *raised: object) -> None:
        if threading.current_thread() is threading.main_thread():
            self._depth -= 1
            if self._depth == 0:
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


MOST_DIALS = 64  # in one run


def shows_progress(progress: Any, engine: Engine) -> bool:
    """Return whether a run shows its progress: never a run that a learner starts, and of torchrun's ranks the first."""
    wanted = progress_is_wanted(progress)
    return wanted and not forkserver.is_child and not (isinstance(engine, Torchrun) and engine.place.rank)


@dataclass(frozen=True, kw_only=True, repr=False)
class Result:
    """What a run leaves (M10).

    `history` has a record for each epoch, or iteration of a batch method, in order. `record.epoch` counts from 0, as Python does and as
    `loader.epoch` does; the display, the report and all messages count from 1.
    """

    version: int
    updates: int
    gradients: int
    dropped: int
    staleness: Staleness
    throughput: float  # examples/s
    seconds: float
    history: list[EpochRecord]
    logs: list[tuple[int, float, dict[str, Any]]]
    events: list[Event]
    returned: list[Any]
    interrupted: bool
    statistics: Statistics
    simulated: SimulatedTimes | None = None  # where the time of a simulated run went
    model: nn.Module | None = None
    _tables: dict[int, tuple[int, dict[str, Tensor]]] = field(default_factory=dict, repr=False)

    def state_dict(self, table: int = 0) -> dict[str, Tensor]:
        """Parameters and buffers of one table at its last version, by name."""
        if table not in self._tables:
            raise UsageError(f"the run has tables {sorted(self._tables)}, not {table}")
        return self._tables[table][1]

    def __repr__(self) -> str:
        """Summarise the run in at most eight lines."""
        how = "interrupted" if self.interrupted else "finished"
        updates = f"{self.updates:,} updates of {self.gradients:,} gradients"
        dropped = f" ({self.dropped:,} dropped)" if self.dropped else ""
        unit = "virtual s" if self.simulated is not None else "s"
        lines = [
            f"Result: {how}, {updates}{dropped} in {self.seconds:.1f} {unit}, {self.throughput:,.0f} examples/s"
        ]
        if self.history:
            last = self.history[-1]
            metrics = "".join(f", test {name} {value:.4g}" for name, value in last.metrics.items())
            lines.append(f"epoch {last.epoch + 1}: loss {last.loss:.4g}{metrics}")
        lines.append(f"staleness: {self.staleness}")
        if self.events:
            lines.append(f"events: {len(self.events)}, the last: {self.events[-1].what}")
        if any(value is not None for value in self.returned):
            lines.append(f"returned: {reprlib.repr(self.returned)}")
        if self.model is not None:
            size = sum(parameter.numel() for parameter in self.model.parameters())
            lines.append(f"model: {type(self.model).__name__} with {size:,} parameters")
        return "\n  ".join(" ".join(line.split())[:200] for line in lines)


class _Standing:
    """A listener that counts epochs and learners alive, for `repr(run)`."""

    def __init__(self, learners: int) -> None:
        self._began_with, self.alive, self.epochs = learners, set(range(learners)), 0

    def __call__(self, record: Any) -> None:
        if isinstance(record, EpochRecord):
            self.epochs = max(self.epochs, record.epoch + 1)  # epochs need not end in order
        elif isinstance(record, Event) and record.kind == "begun anew":
            self.alive = set(range(self._began_with))
        elif isinstance(record, Event) and record.rank is not None:
            if record.kind in ("lost", "raised"):
                self.alive.discard(record.rank)
            elif record.kind in ("joined", "replaced"):
                self.alive.add(record.rank)


class Run:
    """A run in progress, from `wait=False`; as a context manager it stops what was not waited for.

    A run whose handle is gone is stopped, and so is one that goes on when the script ends.
    """

    def __init__(
        self,
        engine: Engine,
        spec: RunSpec,
        model: nn.Module | None,
        made: torch.optim.Optimizer | None = None,
        *,
        progress: bool = True,
    ) -> None:
        self._spec, self._model, self._made = spec, model, made
        plan = next(iter(spec.task.arguments), None)
        self._plan = plan if isinstance(plan, Training) else None
        self._own = self._plan is not None and not isinstance(self._plan.model, nn.Module)  # not the caller's
        self._changes = 0
        self._standing = _Standing(spec.plan.learners)
        try:
            progress = shows_progress(progress, engine)
            self.recording: Recording | None = None  # of a run that has a folder, or shows its progress
            listeners: tuple[Listener, ...] = (*spec.listeners, self._standing)
            if spec.storage.folder is not None or progress:
                self.recording = Recording(spec, engine, model)
                listeners = (*listeners, self.recording.heard)
            self._handle: Handle = engine.start(dataclasses.replace(spec, listeners=listeners))
        except BaseException:
            if spec.storage.lock is not None:
                spec.storage.lock.release()
            raise
        self._forgotten = weakref.finalize(self, _forget, self._handle)
        self._forgotten.atexit = False  # then all that go on are ended together
        self.interrupts = Interrupts(self._handle.interrupt)
        self._progress: ProgressDisplay | None = None
        if self.recording is not None:
            self.recording.follow(self._handle)
        if self.recording is not None and progress:
            # The display must not hold the run, which is stopped when its handle is gone.
            interrupts = self.interrupts
            self._progress = ProgressDisplay(
                self.recording.record,
                spec.name,
                note=lambda: "stopping: learners finish their step" if interrupts.number else "",
            )

    def __repr__(self) -> str:
        """Show name, state, epoch, learners alive and run folder."""
        plan, folder = self._spec.plan, self._spec.storage.folder
        word = "epoch" if self._spec.batch is None else "iteration"
        end = plan.epochs if self._spec.batch is None else plan.limit
        epochs = f"{self._standing.epochs} of {end} {word}s" if end else f"{self._standing.epochs} {word}s"
        state = self._state()
        alive = f", {len(self._standing.alive)} learners alive" if state == "running" else ""
        where = f", in {Path(folder).parent}" if folder is not None else ""
        return f"<Run {self._spec.name}: {state}, {epochs} done{alive}{where}>"

    def _state(self) -> str:
        if not self.done:
            return "running"
        try:
            outcome = self._handle.wait(0)
        except BaseException:
            return "failed"
        stopped = self.recording is not None and self.recording.stopped
        return "stopped" if stopped or outcome.interrupted else "finished"

    def wait(self, timeout: float | None = None) -> Result:
        """The result; raises what went wrong, and what ended it: after Ctrl-C KeyboardInterrupt, after SIGTERM SystemExit."""
        shown = self._progress.shown(live=timeout is None) if self._progress is not None else nullcontext()
        with self.interrupts, shown:
            outcome = self._outcome(timeout)
            result = self._result(outcome)
        told = self.interrupts.told(result, outcome.signal)
        if told is not None:
            raise told
        return result

    def _outcome(self, timeout: float | None) -> Outcome:
        try:
            outcome = self._handle.wait(timeout)
        except TimeoutError:
            raise
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                self._handle.end(0)
            self._recorded()
            if isinstance(error, RunError) and error.outcome is not None:
                try:
                    error.result = self._result(error.outcome)
                except RunError as modelless:
                    error.result = modelless.result
            told = self.interrupts.told(None, 0)
            if told is None or isinstance(error, KeyboardInterrupt):
                raise
            raise told from error
        self._recorded()
        return outcome

    def _result(self, outcome: Outcome) -> Result:
        """With the model; if that cannot be made the weights come back with the error."""
        before = self._spec.storage.restored.counts.examples.get(0, 0) if self._spec.storage.restored else 0
        if self._plan is not None and 0 in outcome.tables:
            version, state = outcome.tables[0]
            outcome.tables[0] = version, self._plan.way.kept(state)
        result = result_of(outcome, before=before)
        if self._model is None or 0 not in outcome.tables:
            return result
        try:
            model = self._model if self._own else copied(self._model).cpu()
            model.load_state_dict(outcome.tables[0][1], strict=False)
        except Exception as error:
            told = RunError(
                f"the run has ended, but no model could be made of its weights ({type(error).__name__}: {error}); they are "
                "in this error's .result.state_dict(). Give train a function that makes the model"
            )
            told.result = result
            raise told from error
        return dataclasses.replace(result, model=model)

    def _recorded(self) -> None:
        if self.recording is not None:
            self.recording.finish()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """What was not waited for is stopped; what goes wrong in it is raised, unless the block has raised already."""
        if not self.done:
            self.stop()
        try:
            self.wait()
        except BaseException:
            if kind is None:
                raise

    @property
    def done(self) -> bool:
        """The run has ended, well or not."""
        return self._handle.done

    def stop(self) -> None:
        """End soon: learners finish their step. Does nothing where the run has ended."""
        if self.done:
            return
        if self.recording is not None:
            self.recording.stopped = True
        self._handle.stop()

    def add_learners(self, count: int = 1) -> None:
        """More learners join the run; they count from the version they first read."""
        check_whole("count", count)
        self._refuse("add_learners")
        if self._plan is not None and isinstance(self._plan.data, IterableDataset):
            raise UsageError(
                f"an iterable data set is split over the {self._spec.plan.learners} learners of the start: "
                "a learner that joins would have no share of it"
            )
        self._handle.add_learners(count)

    def change(self, sync: str | Sync) -> None:
        """Another dial, from the next version on."""
        dial = as_sync(sync)
        self._refuse("change")
        self._changes += 1
        plan = self._spec.plan
        if self._changes + len(plan.course.dials) > MOST_DIALS:
            raise DialError(f"a run may have {MOST_DIALS} dials, this one has had them; start another run")
        dial.check(plan.learners, plan.batch_size)
        if isinstance(plan.topology, Trees):
            plan.topology.check(Course.of(dial), self._spec.faults, clip_norm=plan.clip_norm, warm=plan.warm)
        if dial.delay > plan.delay:
            raise DialError(
                f"{dial} keeps {dial.delay + 1} versions, this run was started to keep {plan.delay + 1}: "
                f"start it with a course that holds it, for example '{plan.course} until 100 then {dial}'"
            )
        if self._made is not None:
            refuse_weighted(dial, self._made)
        self._handle.change(dial)

    def _refuse(self, what: str) -> None:
        """What comes too late, or to learners that do not ask servers."""
        if self.done:
            raise UsageError(f"the run has ended: {what} comes too late; start another run")
        if self._spec.plan.local:
            raise UsageError(
                f"{what}: this run's one group updates what is cut over its seats by itself; start it with local_update=False"
            )

    def statistics(self) -> Statistics:
        """Versions, staleness, who waits for whom."""
        return self._handle.statistics()


def _forget(handle: Handle) -> None:
    """Nobody can wait for it any more."""
    if not handle.done:
        handle.stop()
        warnings.warn(
            "a run goes on whose handle is gone: it is stopped. Keep what train(wait=False) returns, use it in a `with` "
            "block, or call wait()",
            RuntimeWarning,
            stacklevel=2,
        )


def result_of(outcome: Outcome, *, before: int) -> Result:
    table = outcome.statistics.tables.get(0)
    seconds = outcome.seconds - outcome.began
    lost = [event.rank for event in outcome.events if event.rank is not None]
    ranks = 1 + max([*outcome.returned, *lost], default=-1)
    return Result(
        version=table.version if table else 0,
        updates=table.version if table else 0,
        gradients=table.gradients if table else 0,
        dropped=table.dropped if table else 0,
        staleness=outcome.staleness,
        throughput=(table.examples - before) / seconds if table and seconds else 0.0,
        seconds=outcome.seconds,
        history=outcome.history,
        logs=outcome.logs,
        events=outcome.events,
        returned=[outcome.returned.get(rank) for rank in range(ranks)],
        interrupted=outcome.interrupted,
        statistics=outcome.statistics,
        simulated=outcome.simulated,
        _tables=outcome.tables,
    )
