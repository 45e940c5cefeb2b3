"""The supervisor of an all-reduce run: starts its learners, keeps their record, and ends them all when one is gone.

A thread of the caller's, as the servers' supervisor is. Nothing of a step passes here: learners reduce among themselves.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from syncline.dial import Sync
from syncline.engines.collectives import wants_nccl
from syncline.engines.local.cargo import pack
from syncline.engines.local.evaluator import Evaluator
from syncline.engines.local.learner import Task
from syncline.engines.local.memory import Bell, Region
from syncline.engines.local.peer import Board, Broken, PeerSpec
from syncline.engines.local.processes import Process, Processes
from syncline.engines.record import Recorder, learner_error
from syncline.engines.run import Outcome, RunSpec
from syncline.errors import LostError, RunError, UsageError
from syncline.protocols.clocks import StalenessClock
from syncline.protocols.patience import Patience
from syncline.topology import messages as m
from syncline.topology.keeper import Keeper, apart, early

GRACE = 10.0  # seconds that learners get to finish their step after a stop
LOOK = 0.25  # seconds between looks at timers
BLAME = 2.0  # seconds that a broken collective waits for whoever broke it


class PeerSupervisor:
    """One run, from its first process to its last; `main` runs on a thread of the caller's."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec
        self.done = threading.Event()
        self._started = time.monotonic()
        self.recorder = Recorder(
            now=lambda: time.monotonic() - self._started,
            evaluate=lambda epoch, state: self._evaluator.give(epoch, state),  # type: ignore[union-attr]
            stop=self._stop,
            layouts=lambda: self._keeper.layouts,
            callbacks=spec.callbacks,
            listeners=spec.listeners,
        )
        self._keeper = Keeper(
            spec.learners,
            emit=self.recorder.emit,
            event=self.recorder.event,
            reply=self._reply,
            fail=self._fail,
        )
        self.learners: dict[int, Process] = {}  # by rank
        self._meeting = os.memfd_create("syncline-meeting", os.MFD_CLOEXEC)
        self._stop_word = Region(8)
        self._boards = [Region(Board.nbytes()) for _ in range(spec.learners)]
        self._evaluator: Evaluator | None = None
        self._commands: list[Any] = []
        self._lock = threading.Lock()
        self._wake = Bell()
        self._deadline: float | None = None
        self._broken: tuple[float, int, str] | None = None  # (when, rank, what it said)
        self._patience = Patience(spec.patience) if spec.patience else None
        self._looked = self._started
        self._processes: Processes

    @property
    def outcome(self) -> Outcome:
        return self.recorder.outcome

    @property
    def error(self) -> BaseException | None:
        return self.recorder.error

    @property
    def processes(self) -> list[Process]:
        return list(self._processes.by_pid.values()) if "_processes" in self.__dict__ else []

    def _fail(self, error: BaseException) -> None:
        """The first failure is the one that is told."""
        self.recorder.error = self.recorder.error or error

    # -- the thread --------------------------------------------------------------------------------------

    def main(self) -> None:
        for part in (self._begin, self._loop, self._end):
            if self.error is None or part == self._end:
                try:
                    part()
                except BaseException as error:
                    self._fail(error)
        self.outcome.seconds = time.monotonic() - self._started
        self.done.set()

    def command(self, command: Any) -> None:
        """What the caller asks for."""
        if isinstance(command, int):
            raise UsageError(
                "all-reduce has fixed membership: no learners can be added; use topology='servers'"
            )
        if isinstance(command, Sync):
            raise UsageError(
                "all-reduce cannot change its dial in the middle; give a course, such as 'hardsync until 1 then delayed:1'"
            )
        with self._lock:
            self._commands.append(command)
            if self._wake.fd >= 0:
                self._wake.ring()

    def _begin(self) -> None:
        spec = self.spec
        task = pack(Task(spec.function, spec.arguments, spec.keywords))
        evaluate = pack(spec.evaluate) if spec.evaluate is not None else None
        self._processes = Processes(self._heard, self._ended)
        self._processes.watch(self._wake.fd, self._from_caller)
        meeting = f"/proc/{os.getpid()}/fd/{self._meeting}"
        nccl = wants_nccl(spec.devices)
        for rank in range(spec.learners):
            peer = PeerSpec(spec.peer(rank), meeting, self._boards[rank], self._stop_word, nccl)
            self.learners[rank] = self._processes.fork("learner", rank, rank, peer, None, self._threads())
            self.learners[rank].channel.try_send(task)
        task.close()
        if evaluate is not None:
            self._evaluator = Evaluator(self._processes, evaluate, self.recorder)

    def _threads(self) -> int:
        """Of a learner."""
        if self.spec.threads is not None:
            return self.spec.threads
        return max(1, len(os.sched_getaffinity(0)) // self.spec.learners)

    def _loop(self) -> None:
        while self.error is None and not (self._all_returned() and self.recorder.complete()):
            self._processes.work(LOOK)
            now = time.monotonic()
            if now - self._looked > LOOK or self._broken is not None:
                self._looked = now
                self._check(now)

    def _all_returned(self) -> bool:
        return all(process.state == "returned" for process in self.learners.values())

    def _from_caller(self) -> None:
        self._wake.quiet()
        with self._lock:
            commands, self._commands = self._commands, []
        for command in commands:
            if command == "kill":
                self._fail(KeyboardInterrupt())
            else:
                self.outcome.interrupted |= command == "interrupt"
                self._stop()

    def _stop(self) -> None:
        """Learners agree on the step after which they leave."""
        self._stop_word.words[0] = 1
        if self._deadline is None:
            self._deadline = time.monotonic() + GRACE

    # -- processes ---------------------------------------------------------------------------------------

    def _reply(self, rank: int, message: Any) -> None:
        self.learners[rank].channel.try_send(message)

    def _heard(self, process: Process, message: Any) -> None:
        if process.role == "evaluator":
            assert self._evaluator is not None
            self._evaluator.hear(message)
        elif isinstance(message, m.Returned):
            process.state = "returned"
            self.outcome.returned[process.rank] = message.value
        elif isinstance(message, m.Raised):
            process.state = "raised"
            self.recorder.event("raised", process.rank, kind="raised")
            self._fail(learner_error(process.rank, message.error, message.traceback))
        elif isinstance(message, Broken):
            process.state = "broken"
            self._broken = self._broken or (time.monotonic(), process.rank, message.text)
        else:
            self._keeper.hear(process.rank, message)

    def _ended(self, process: Process, how: str) -> None:
        """A process ended without a word."""
        process.state = "lost"
        if process.role == "learner":
            what = f"lost: its process (pid {process.pid}) ended with {how}"
            self.recorder.event(what, process.rank, kind="lost", pid=process.pid)
        self._fail(
            LostError(
                f"{process.role} {process.rank} (pid {process.pid}) ended with {how}; under all-reduce the others "
                "cannot go on without it"
            )
        )

    def _check(self, now: float) -> None:
        self._check_early()
        if self._broken is not None and now - self._broken[0] > BLAME:
            _, rank, text = self._broken
            self._fail(RunError(f"a collective failed in learner {rank}: {text}"))
        running = [process for process in self.learners.values() if process.state == "running"]
        if self._deadline is not None and now > self._deadline and running:
            ranks = ", ".join(str(process.rank) for process in running)
            self._fail(
                RunError(f"learners {ranks} did not finish their step within {GRACE:.0f} s of the stop")
            )
        if self._patience is not None and running:
            self._look(now, self._patience, running)

    def _check_early(self) -> None:
        """Somebody returned, or waits in a meeting, and another needs it for a collective."""
        calls = {rank: self._boards[rank].words[Board.CALLS] for rank in self.learners}
        for rank, process in self.learners.items():
            other = max(calls, key=lambda each: calls[each])
            if process.state == "returned" and calls[other] > calls[rank]:
                self._fail(early(rank, self._keeper.closed[rank].steps, other, "a further step"))
        meeting = self._keeper.waiting()
        for rank, meet in meeting.items():
            for other, count in calls.items():
                if other not in meeting and count > calls[rank]:
                    self._fail(apart(rank, meet.what, other))

    def _look(self, now: float, patience: Patience, running: list[Process]) -> None:
        """Who should compute and has not been heard of?"""
        ranks = [process.rank for process in running]
        progress = {rank: self._boards[rank].words[Board.CALLS] for rank in ranks}
        waiting = {rank for rank in ranks if self._boards[rank].words[Board.WAITS]}
        waiting |= self._keeper.waiting().keys()
        for rank in patience.look(now, progress, waiting):
            process = self.learners[rank]
            what = f"hangs: not heard of for {patience.silence(rank, now):.1f} s (pid {process.pid})"
            self.recorder.event(what, rank, kind="hangs", pid=process.pid)
            if self.spec.kill_hung:
                what = f"killed: patience of {patience.seconds:g} s is over"
                self.recorder.event(what, rank, kind="killed", pid=process.pid)
                self._processes.kill(process)
            else:
                self.recorder.warn(
                    f"learner {rank} {what}; the others wait for it. It is left alone: kill_hung=True ends such a "
                    "learner, and the run, patience= sets the time"
                )

    # -- statistics --------------------------------------------------------------------------------------

    def ask_statistics(self) -> m.Statistics:
        """As the learners' boards show it; at the end exact."""
        if self.done.is_set():
            return self.outcome.statistics
        try:
            shown = [Board(region).read() for region in self._boards]
        except ValueError:  # the run has just ended
            return self.outcome.statistics
        first = shown[0]
        clock = StalenessClock()
        clock.histogram.update(first.histogram)
        waiting = {rank: first.version for rank in self.learners if self._boards[rank].words[Board.WAITS]}
        missing = [rank for rank in self.learners if rank not in waiting] if waiting else []
        table = m.TableStatistics(
            first.version, first.gradients, 0, first.examples, clock.account(), waiting, missing, 0
        )
        steps = {rank: progress.started for rank, progress in enumerate(shown)}
        losses = {
            rank: each.loss for rank, each in enumerate(shown) if each.loss == each.loss and each.started
        }
        tables = {0: table} if self._keeper.layouts else {}
        return self._with_processes(m.Statistics(0, tables, steps, losses), waiting)

    def _with_processes(self, statistics: m.Statistics, waiting: dict[int, int]) -> m.Statistics:
        found = []
        for process in self.processes:
            learner = process.role == "learner"
            state = process.state
            if learner and state == "running":
                state = "waits for the others" if process.rank in waiting else "computing"
            steps = statistics.steps.get(process.rank, 0) if learner else 0
            loss = statistics.losses.get(process.rank) if learner else None
            found.append(m.ProcessStatistics(process.role, process.rank, process.pid, state, steps, loss))
        return m.Statistics(
            statistics.number, statistics.tables, statistics.steps, statistics.losses, tuple(found)
        )

    # -- end ---------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """Nothing stays behind, however it ended."""
        self.outcome.statistics = self._with_processes(self.outcome.statistics, {})
        with self._lock:
            self._wake.close()
        if "_processes" in self.__dict__:
            if self.error is None:
                for process in self.learners.values():
                    process.channel.try_send(None)  # they may leave
            self._processes.close(kill=self.error is not None)
        os.close(self._meeting)
        for region in (self._stop_word, *self._boards):
            region.release()
