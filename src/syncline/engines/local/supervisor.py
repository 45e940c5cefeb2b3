"""The supervisor: a thread of the caller's that starts a run's processes, hosts the coordinator, and ends them.

It hears every process and notices every end, brings lost shards back, and gathers the outcome. Decisions are the
coordinator's; the learners' fast path does not pass here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from syncline import messages as m
from syncline.dial import Sync
from syncline.engines.local.cargo import Parcel
from syncline.engines.local.evaluator import Evaluator
from syncline.engines.local.hanging import Hanging
from syncline.engines.local.office import Office
from syncline.engines.local.packing import pack_task
from syncline.engines.local.processes import Process
from syncline.engines.local.staff import Staff
from syncline.engines.local.statistics import Questions, with_processes
from syncline.engines.local.thread import RunThread
from syncline.engines.record import Recorder, last_line, learner_error
from syncline.engines.recovery import Recovery
from syncline.engines.run import RunSpec
from syncline.errors import LostError, RunError
from syncline.protocols.restarts import begins_anew
from syncline.table.checkpoints import Folder
from syncline.topology.coordinator import Coordinator

GRACE = 5.0  # seconds that learners get to finish their step after a stop
LAST_CUT = 1.0  # seconds that a stop waits for a checkpoint to begin
LOOK = 0.25  # seconds between looks at timers
SHARD_PATIENCE = 5.0  # seconds at least: an idle shard shows once a second that it lives


class Supervisor:
    """One run, from its first process to its last; `thread.main` runs on a thread of the caller's."""

    def __init__(self, spec: RunSpec, crashes: Mapping[str, int] | None = None) -> None:
        self.spec = spec
        self._crashes = crashes or {}
        self._started = time.monotonic()
        self.recorder = Recorder(
            now=lambda: time.monotonic() - self._started,
            evaluate=lambda epoch, state: self._evaluator.give(epoch, state),  # type: ignore[union-attr]
            stop=self._stop,
            layouts=lambda: {table: self._coordinator.layout(table) for table in self._coordinator.tables},
            callbacks=spec.callbacks,
            listeners=spec.listeners,
            restored=spec.restored,
        )
        self.thread = RunThread(
            self.recorder, self._started, begin=self._begin, loop=self._loop, end=self._end
        )
        self.folder = Folder(Path(spec.folder)) if spec.folder else None
        self._task: Parcel | None = None
        self._evaluator: Evaluator | None = None
        self._questions = Questions(self.thread)
        self._deadline: float | None = None
        self._finishing = self._stopping = False
        self._recovery = Recovery(self.folder, spec.restored)
        self._hanging = Hanging(
            spec, self.recorder, others="the others may wait for it", end="ends such a learner"
        )
        self._hanging_shards = Hanging(
            spec,
            self.recorder,
            others="all learners wait for it",
            end="goes back to the last checkpoint",
            least=SHARD_PATIENCE,
        )
        self._looked = self._cut_asked = self._started
        self.staff: Staff
        self._coordinator: Coordinator

    def command(self, command: Any) -> None:
        """What the caller asks for."""
        self.thread.command(command)

    def ask_statistics(self) -> m.Statistics:
        return self._questions.ask()

    # -- the run -----------------------------------------------------------------------------------------

    def _begin(self) -> None:
        spec = self.spec
        self._task, evaluate = pack_task(spec)
        self._processes = self.thread.open(self._heard, self._ended, self._asked)
        self.staff = Staff(spec, self._processes, self._task, self._crashes)
        ids = {rank + 1: rank for rank in range(spec.learners)}
        self._coordinator = Coordinator(Office(self), spec.plan(), ids, spec.restored)
        self.staff.start_shards()
        self._coordinator.begin()
        for learner, rank in ids.items():
            self.staff.start_learner(learner, rank)
        if evaluate is not None:
            self._evaluator = Evaluator(self._processes, evaluate, self.recorder)

    def _new_learner(self, rank: int) -> None:
        self.staff.ids += 1
        self._coordinator.join(self.staff.ids, rank)
        self.staff.start_learner(self.staff.ids, rank)

    def _loop(self) -> None:
        while not self._over():
            self._processes.work(LOOK)
            now = time.monotonic()
            if now - self._looked > LOOK:
                self._looked = now
                self._check_timers(now)

    def _over(self) -> bool:
        if self.thread.error is not None:
            return True
        if self.staff.learners:
            return False
        if not self._finishing:
            self._finishing = True
            self._coordinator.finish()
        return self.recorder.complete() and not self._coordinator.cutting

    def _check_timers(self, now: float) -> None:
        if self._deadline is not None and now > self._deadline and not self._stopping:
            self.stop_learners()  # the checkpoint takes too long
        elif self._deadline is not None and now > self._deadline and self.staff.learners:
            self._deadline = None
            for process in list(self.staff.learners.values()):
                self._kill(process, f"did not finish its step within {GRACE:.0f} s of the stop")
        if not self._finishing:
            progress, waiting = self.staff.heard()
            idle = waiting | self._coordinator.meeting()
            self._hanging.look(now, progress, idle, self.staff.learners, self._kill)
        shards = dict(enumerate(self.staff.shards))
        self._hanging_shards.look(now, self.staff.beats(), set(), shards, self._kill)
        for last in self._questions.overdue(now):
            self._questions.answer(self._with_processes(last))
        seconds = self.spec.cut_seconds
        if seconds is not None and now - self._cut_asked > seconds:
            self._cut_asked = now
            self._coordinator.ask_cut()

    def _kill(self, process: Process, why: str) -> None:
        self.recorder.event(
            f"killed: {why}", process.rank, kind="killed", learner=process.number, pid=process.pid
        )
        self._processes.kill(process)

    def _asked(self, command: Any) -> None:
        if isinstance(command, m.AskStatistics):
            self._questions.open[command.number] = time.monotonic()
            self.staff.shards[0].channel.post(command)
        elif isinstance(command, Sync):
            self.recorder.event(f"dial: {command} from the next version on", kind="dial")
            self._coordinator.change(command)
        elif isinstance(command, int):
            self._add_learners(command)
        elif command == "kill":
            self.thread.fail(KeyboardInterrupt())
        else:
            self.thread.outcome.interrupted |= command == "interrupt"
            self._stop()

    def _add_learners(self, count: int) -> None:
        if self._stopping or self._finishing or self._deadline is not None:
            self.recorder.event(f"{count} learners not added: the run is ending", kind="refused")
            return
        for _ in range(count):
            rank = 1 + max(process.rank for process in self.thread.processes if process.role == "learner")
            self.recorder.event("joined", rank, kind="joined")
            self._new_learner(rank)

    def _stop(self) -> None:
        """After a last checkpoint, where that is soon there."""
        if self._deadline is None:
            self._deadline = time.monotonic() + LAST_CUT
        self._coordinator.stop()

    def stop_learners(self) -> None:
        self._deadline = None if not self._stopping else self._deadline
        self._stopping = True
        self.staff.stop_learners()
        if self._deadline is None:
            self._deadline = time.monotonic() + GRACE

    # -- processes ---------------------------------------------------------------------------------------

    def _heard(self, process: Process, message: Any) -> None:
        if process.role == "shard":
            self._from_shard(message)
        elif process.role == "evaluator":
            assert self._evaluator is not None
            self._evaluator.hear(message)
        else:
            self._from_learner(process, message)

    def _from_learner(self, process: Process, message: Any) -> None:
        if isinstance(message, m.Returned):
            process.state = "returned"
            self.recorder.returned(process.rank, message)
            self._gone(process, lost=False)
        elif isinstance(message, m.Raised):
            process.state = "raised"
            self._raised(process, learner_error(process.rank, message.error, message.traceback))
        else:
            self._coordinator.from_learner(process.number, message)

    def _raised(self, process: Process, error: RunError) -> None:
        if self.spec.on_error == "raise":
            self.thread.fail(error)
            return
        self.recorder.event(f"raised: {error}", process.rank, kind="raised", learner=process.number)
        self._gone(process, lost=True)
        if not self.staff.learners and not self.thread.outcome.returned and not self._stopping:
            self.thread.fail(error)
        else:
            self.recorder.lost(process.rank, f"raised {last_line(error)}", len(self.staff.learners))

    def _from_shard(self, envelope: tuple[int, Any]) -> None:
        shard, message = envelope
        if isinstance(message, m.ShardRaised):
            self.thread.fail(RunError(f"shard {shard} failed:\n{message.traceback}"))
        elif isinstance(message, m.Statistics):
            self._questions.answer(self._with_processes(message))
        else:
            self._coordinator.from_shard(message)

    def _ended(self, process: Process, how: str) -> None:
        """A process ended without a word."""
        process.state = "lost"
        if process.role == "shard":
            self._shard_lost(process, how)
        elif process.role == "learner":
            self._learner_lost(process, how)
        else:
            self.thread.fail(LostError(f"{process.role} {process.rank} (pid {process.pid}) ended with {how}"))

    def _learner_lost(self, process: Process, how: str) -> None:
        what = f"lost: its process (pid {process.pid}) ended with {how}"
        self.recorder.event(what, process.rank, kind="lost", learner=process.number, pid=process.pid)
        stepped = self.staff.stepped(process.number)
        self._gone(process, lost=True)
        if self.spec.replace and not self._stopping and not self._finishing:
            if self._recovery.restarts.learner_lost(process.rank, stepped=stepped):
                self.recorder.event("replaced", process.rank, kind="replaced")
                self._new_learner(process.rank)
                self.recorder.lost(process.rank, what, len(self.staff.learners), "another takes its place")
                return
            failures = self._recovery.restarts.learners[process.rank]
            what = f"given up: {failures} processes in a row were lost before their first step"
            self.recorder.event(what, process.rank, kind="given up")
        if not self.staff.learners and not self.thread.outcome.returned and not self._stopping:
            self.thread.fail(LostError(f"all learners are lost, the last was rank {process.rank}: {how}"))
        else:
            self.recorder.lost(process.rank, what, len(self.staff.learners))

    def _gone(self, process: Process, *, lost: bool) -> None:
        self.staff.learners.pop(process.number, None)
        unaware = self._coordinator.stale(process.number)
        self._coordinator.leave(process.number, lost=lost)
        self.staff.release(process.number)
        if begins_anew(
            unaware=unaware,
            lost=lost,
            others=bool(self.staff.learners),
            stopping=self._stopping,
            returned=bool(self.thread.outcome.returned),
            replace=self.spec.replace,
        ):
            self._begin_anew()
        if process.bell is not None:
            process.bell.close()

    # -- lost shards -------------------------------------------------------------------------------------

    def _shard_lost(self, process: Process, how: str) -> None:
        """All shards go back to the last checkpoint together (S7); learners wait and go on."""
        lost = f"shard {process.rank} (pid {process.pid}) ended with {how}"
        self.recorder.event(lost, kind="shard lost", shard=process.rank, pid=process.pid)
        if (refused := self._recovery.refuse(lost)) is not None:
            self.thread.fail(refused)
            return
        started = time.monotonic()
        self._processes.kill_and_reap(self.staff.shards)
        try:
            last = self._recovery.go_back(lost)
        except LostError as error:
            self.thread.fail(error)
            return
        self.staff.start_shards()
        self.recorder.go_back(last)
        anew = {} if self.staff.learners else self.staff.new_ids()
        self._finishing = False
        self._coordinator.recover(last, anew)
        for number in self._questions.open:  # the old ones did not answer
            self.staff.shards[0].channel.post(m.AskStatistics(number))
        for learner, rank in anew.items():
            self.staff.start_learner(learner, rank)
        self.recorder.event(
            f"recovered: all shards are back at version {last.version if last else 0}",
            kind="recovered",
            version=last.version if last else 0,
            seconds_taken=time.monotonic() - started,
        )

    def checkpointed(self, path: Path) -> None:
        self._recovery.checkpointed(path)

    def _begin_anew(self) -> None:
        """The last learner returned without having noticed that its updates were lost: they are made again."""
        self.recorder.event("learners begin anew: nobody was left to repeat what was lost", kind="begun anew")
        anew = self.staff.new_ids()
        self._coordinator.begin_anew(anew)
        for learner, rank in anew.items():
            self.staff.start_learner(learner, rank)

    # -- statistics and the end --------------------------------------------------------------------------

    def _with_processes(self, statistics: m.Statistics) -> m.Statistics:
        waits: dict[int, int] = {}
        for table in statistics.tables.values():
            waits.update(table.waiting)
        meeting = self._coordinator.meeting() if "_coordinator" in self.__dict__ else set()

        def state(process: Process) -> str:
            if process.number in meeting:
                return "waits for the others"
            version = waits.get(process.rank)
            if version is None:
                return "computing"
            return f"waits for version {version}" if version >= 0 else "has no data"

        return with_processes(statistics, self.thread.processes, state)

    def _end(self) -> None:
        """Nothing stays behind, however it ended."""
        outcome = self.thread.outcome
        outcome.statistics = self._with_processes(outcome.statistics)
        self.thread.close()
        if self._task is not None:
            self._task.close()
        if "staff" in self.__dict__:
            self.staff.close()
