"""What every supervisor has: its thread, its processes, the caller's commands and questions, a look at who hangs, the first failure.

Not responsible for what a run consists of.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

from torch import Tensor

from syncline import messages as m
from syncline.dial import Sync
from syncline.engines.local.learner import run_evaluator
from syncline.engines.local.processes import Process, Processes
from syncline.engines.local.shared_memory import WakeUp
from syncline.engines.local.shared_pickle import Parcel, pack_task
from syncline.engines.recorder import Recorder, said
from syncline.engines.run import Outcome, RunSpec
from syncline.errors import LostError, RunError, raised_in
from syncline.protocols.lifecycle import (
    EvaluatorLosses,
    Faults,
    Hangs,
    Kill,
    SkipEvaluation,
    StartEvaluator,
    Watchdog,
)
from syncline.table.checkpoints import CheckpointError

LOOK = 0.25  # seconds between looks at timers
PATIENCE = 10.0  # seconds that a caller waits for statistics
SHARD_PATIENCE = 5.0  # seconds at least: an idle shard shows once a second that it lives


class RunSupervisor(ABC):
    """One run, from its first process to its last; `main` runs on a thread of the caller's."""

    recorder: Recorder
    _processes: Processes

    def __init__(self, spec: RunSpec, crashes: Mapping[str, int] | None = None) -> None:
        self.spec, self._crashes = spec, crashes or {}
        self._started = self._looked = time.monotonic()
        self._begun = False  # its processes are started
        self._at_once = False  # a second Ctrl-C: nothing is saved any more
        self.done = threading.Event()
        self.elsewhere: list[list[Process]] = []  # what was started on other machines
        self._commands: list[Callable[[], None]] = []
        self._asked_for = 0  # statistics, so far
        self._answers: dict[int, m.Statistics | None] = {}  # of whom a caller waits for
        self._changed = threading.Condition()  # commands and their answers; notified at the end
        self._wake = WakeUp()
        self._task: Parcel | None = None
        self._evaluator: Process | None = None  # tests snapshots beside the learners (R6)
        self._evaluation: Parcel | None = None  # what it runs
        self._evaluator_losses = EvaluatorLosses()
        self._snapshots: deque[tuple[int, dict[str, Tensor]]] = deque()  # the first is being tested
        self._urgent = False  # timers are looked at whenever something has happened

    def now(self) -> float:
        """Of this run."""
        return time.monotonic() - self._started

    @property
    def outcome(self) -> Outcome:
        return self.recorder.outcome

    @property
    def error(self) -> BaseException | None:
        return self.recorder.error

    @property
    def processes(self) -> list[Process]:
        """All that were started, on whatever machine, in that order."""
        here = list(self._processes.by_pid.values()) if "_processes" in self.__dict__ else []
        return sorted([*here, *chain.from_iterable(self.elsewhere)], key=lambda process: process.order)

    def fail(self, error: BaseException) -> None:
        """The first failure is the one that is told."""
        self._at_once |= not isinstance(error, Exception)
        self.recorder.error = self.recorder.error or error

    def prepare(self) -> None:
        """Pickle what learners and the evaluator run; call it on the caller's thread, before `main` begins on another.

        A caller that is importing a module holds its import lock until the run has ended, and pickling by reference waits for
        that lock on any other thread.
        """
        self._guard(self._pack)

    def _pack(self) -> None:
        self._task, self._evaluation = pack_task(self.spec)

    # -- the thread --------------------------------------------------------------------------------------

    def main(self) -> None:
        """The end comes in any case, the rest until something fails."""
        if self.error is None:
            self._guard(self._begin)
        with self._changed:
            self._begun = True
            self._changed.notify_all()
        if self.error is None:
            self._guard(self._loop)
        if self.error is not None:
            self._guard(self._save_failed)
            self._name_last_checkpoint()
        self._guard(self._end)
        self.outcome.seconds = self.now()
        self.done.set()
        with self._changed:
            self._changed.notify_all()

    def _guard(self, part: Callable[[], None]) -> None:
        try:
            part()
        except BaseException as error:
            self.fail(error)

    def _begin(self) -> None:
        assert self._task is not None
        self._processes = Processes(self._hear, self._process_ended, self._crashes, self.spec.name)
        self._processes.watch(self._wake.fd, self._take_commands)
        self._start(self._task)
        if self._evaluation is not None:
            self._start_evaluator()

    def _loop(self) -> None:
        while self.error is None and not self._over():
            self._processes.work(LOOK)
            now = time.monotonic()
            if now - self._looked > LOOK or self._urgent:
                self._looked = now
                self._look(now)

    def _close(self) -> None:
        """Nothing stays behind: those that still run are ended if the run has failed."""
        with self._changed:
            self._wake.close()
        if "_processes" in self.__dict__:
            self._processes.close(kill=self.error is not None)
        for parcel in (self._task, self._evaluation):
            if parcel is not None:
                parcel.close()

    def _hear(self, process: Process, message: Any) -> None:
        if process.role != "evaluator":
            self._heard(process, message)
        elif isinstance(message, m.Raised):
            process.state = "raised"
            what = said(message.error) if message.error is not None else raised_in(message.traceback)
            self.fail(RunError(f"evaluation failed: {what}\n\n{message.traceback}"))
        else:
            self._evaluator_losses.evaluated()
            self._snapshots.popleft()
            if self._snapshots:
                process.channel.post(self._snapshots[0])
            self.recorder.evaluated(*message)

    def _process_ended(self, process: Process, how: str) -> None:
        if process.role == "evaluator":
            self._lose_evaluator(process, how)
        else:
            self._ended(process, how)

    def _start_evaluator(self) -> None:
        assert self._evaluation is not None
        self._evaluator = self._processes.fork("evaluator", 0, 0, run_evaluator, part="evaluator")
        self._evaluator.channel.post(self._evaluation)
        if self._snapshots:
            self._evaluator.channel.post(self._snapshots[0])

    def _lose_evaluator(self, process: Process, how: str) -> None:
        process.state, self._evaluator = "lost", None
        waiting = [(epoch, self.recorder.version_of(epoch)) for epoch, _ in self._snapshots]
        for decision in self._evaluator_losses.lost(how, process.pid, waiting):
            match decision:
                case StartEvaluator():
                    self._start_evaluator()
                case SkipEvaluation(epoch):
                    self._snapshots.popleft()
                    self.recorder.skip_evaluation(epoch)
                case _:
                    self.recorder.say(decision)

    def _evaluate(self, epoch: int, state: dict[str, Tensor]) -> None:
        """Queue a snapshot: the channel has one at a time, so that a slow evaluation does not fill it."""
        self._snapshots.append((epoch, state))
        if self._evaluator is None:
            self._start_evaluator()
        elif len(self._snapshots) == 1:
            self._evaluator.channel.post(self._snapshots[0])

    def kill(self, process: Process, why: str) -> None:
        """Its end will be noticed."""
        rank = process.rank if process.role == "learner" else None
        details = {process.role: process.number, "pid": process.pid}
        self.recorder.event(f"killed: {why}", rank, kind="killed", **details)
        self._kill(process)

    def _kill(self, process: Process) -> None:
        self._processes.kill(process)

    def _threads(self) -> int:
        """Of a learner that has no server beside it."""
        if self.spec.threads is not None:
            return self.spec.threads
        return max(1, len(os.sched_getaffinity(0)) // self.spec.plan.learners)

    def _name_last_checkpoint(self) -> None:
        """Say in the error which checkpoint to resume from, unless that is what could not be read."""
        error = self.error
        paths = [event.details["path"] for event in self.outcome.events if event.kind == "checkpoint"]
        if not paths or not isinstance(error, RunError) or isinstance(error.__cause__, CheckpointError):
            return
        resume = f"the last checkpoint is {paths[-1]}: resume= goes on from it"
        if isinstance(error, LostError):
            error.args = (f"{error}; {resume}",)
        else:
            error.add_note(resume)

    # -- what a run consists of --------------------------------------------------------------------------

    @abstractmethod
    def _start(self, task: Parcel) -> None:
        """Its processes."""

    @abstractmethod
    def _over(self) -> bool: ...

    @abstractmethod
    def _look(self, now: float) -> None:
        """At timers, and at who should work and has not been heard of."""

    @abstractmethod
    def _heard(self, process: Process, message: Any) -> None: ...

    @abstractmethod
    def _ended(self, process: Process, how: str) -> None:
        """A process ended without a word."""

    @abstractmethod
    def _stop(self) -> None: ...

    @abstractmethod
    def _questioned(self, number: int) -> None:
        """A caller waits for an answer of that number."""

    def _save_failed(self) -> None:  # noqa: B027 - a batch method's state is whole between iterations only
        """Write a last checkpoint of a run that has failed, where the processes that hold its state live."""

    @abstractmethod
    def _end(self) -> None:
        """Nothing stays behind, however it ended."""

    # -- the caller's ------------------------------------------------------------------------------------

    def command(self, action: Callable[[], None]) -> None:
        """To be done on the run's thread; in vain when the run has ended. The others, too, are for any thread."""
        with self._changed:
            self._commands.append(action)
            if self._wake.fd >= 0:
                self._wake.ring()

    def _take_commands(self) -> None:
        self._wake.quiet()
        with self._changed:
            commands, self._commands = self._commands, []
        for action in commands:
            action()

    def stop(self, *, interrupted: bool = False) -> None:
        def ask() -> None:
            self.outcome.interrupted |= interrupted
            self._stop()

        self.command(ask)

    @abstractmethod
    def add_learners(self, count: int) -> None: ...

    @abstractmethod
    def change(self, sync: Sync) -> None: ...

    def ask_statistics(self) -> m.Statistics:
        """At the end of a run, those of its end."""
        with self._changed:
            self._asked_for += 1
            number = self._asked_for
            self._answers[number] = None
            self.command(lambda: self._questioned(number))
            self._changed.wait_for(lambda: self._begun)  # a busy machine starts processes slowly
            self._changed.wait_for(lambda: self._answers[number] is not None or self.done.is_set(), PATIENCE)
            return self._answers.pop(number) or self.outcome.statistics

    def _answer(self, statistics: m.Statistics) -> None:
        with self._changed:
            if statistics.number in self._answers:
                self._answers[statistics.number] = statistics
                self._changed.notify_all()

    def _with_processes(self, statistics: m.Statistics, state: Callable[[Process], str]) -> m.Statistics:
        """The same with all processes in it; `state` says what a running learner does."""
        found = []
        for process in self.processes:
            now, steps, loss = process.state, 0, None
            if process.role == "learner":
                now = state(process) if now == "running" else now
                steps, loss = statistics.steps.get(process.rank, 0), statistics.losses.get(process.rank)
            numbers = process.rank, process.pid, now, steps, loss
            found.append(m.ProcessStatistics(process.role, *numbers, process.machine))
        return dataclasses.replace(statistics, processes=tuple(found))


class HangDetection:
    """Processes of one kind that are not heard of. When it is too long is `Watchdog`'s, what then the lifecycle's.

    `others` and `end` say in its warning what it means, and what kill_hung does.
    """

    def __init__(
        self, run: RunSupervisor, others: str, end: str, *, least: float = 0.0, faults: Faults | None = None
    ) -> None:
        faults = faults or run.spec.faults
        seconds = max(faults.patience, least) if faults.patience else 0.0
        self._patience = Watchdog(seconds) if seconds else None
        self._hangs = Hangs(seconds, faults.kill_hung, others, end)
        self._run = run

    def look(
        self, now: float, progress: Mapping[int, int], idle: set[int], processes: Mapping[int, Process]
    ) -> None:
        """Who should compute and has not been heard of? Those that wait for others are `idle`."""
        if self._patience is None:
            return
        for number in self._patience.look(now, progress, idle):
            process = processes[number]
            rank = process.rank if process.role == "learner" else None
            silence = self._patience.silence(number, now)
            name = f"{process.role} {process.rank}"
            for decision in self._hangs.decide(number, name, rank, silence, process.pid):
                if isinstance(decision, Kill):
                    self._run.kill(process, decision.why)
                else:
                    self._run.recorder.say(decision)
