"""The supervisor: a thread of the caller's that starts a run's processes, hosts the coordinator, and ends them.

It hears every process and notices every end, brings lost shards back, and gathers the outcome. Decisions are the
coordinator's; the learners' fast path does not pass here.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from syncline.dial import Sync
from syncline.engines.local.cargo import pack
from syncline.engines.local.evaluator import Evaluator
from syncline.engines.local.exchange import Ring
from syncline.engines.local.learner import GENERATION, STOP, Hub, LearnerSpec, Task
from syncline.engines.local.memory import Bell, Region
from syncline.engines.local.office import Office
from syncline.engines.local.processes import Process, Processes
from syncline.engines.local.server import LOG_ENTRIES, AddLearner, Desk, Geometry, ServerSpec
from syncline.engines.record import Recorder, learner_error
from syncline.engines.recovery import Recovery
from syncline.engines.run import Outcome, RunSpec
from syncline.errors import LostError, RunError
from syncline.protocols.patience import Patience
from syncline.protocols.restarts import begins_anew
from syncline.table.checkpoints import Folder
from syncline.topology import messages as m
from syncline.topology.coordinator import Coordinator

GRACE = 5.0  # seconds that learners get to finish their step after a stop
LAST_CUT = 1.0  # seconds that a stop waits for a checkpoint to begin
LOOK = 0.25  # seconds between looks at timers
SHARED, SERVERS = 0, -1  # owners of memory that are no learners


@dataclass(slots=True)
class _Shared:
    """What all processes of a run share."""

    hub: Region
    shard_bells: list[Bell]


def geometry_of(spec: RunSpec) -> Geometry:
    """How many slots and kept versions the dials need (M11); two slots, so that any dial may follow."""
    delay = spec.delay
    return Geometry(slots=max(2, delay + 1), kept=spec.kept)


class Supervisor:
    """One run, from its first process to its last; `main` runs on a thread of the caller's."""

    def __init__(self, spec: RunSpec, crashes: Mapping[str, int] | None = None) -> None:
        self.spec = spec
        self._crashes = dict(crashes or {})  # for tests: process name -> the operation it dies in, once
        self.geometry = geometry_of(spec)
        self.done = threading.Event()
        self._started = time.monotonic()
        self.recorder = Recorder(
            now=self._now,
            evaluate=lambda epoch, state: self._evaluator.give(epoch, state),  # type: ignore[union-attr]
            stop=self._stop,
            layouts=lambda: {table: self._coordinator.layout(table) for table in self._coordinator.tables},
            callbacks=spec.callbacks,
            listeners=spec.listeners,
            restored=spec.restored,
        )
        self.learners: dict[int, Process] = {}  # by learner id, while running
        self.shards: list[Process] = []
        self.generation = 0  # how often the servers were started anew
        self.folder = Folder(Path(spec.folder)) if spec.folder else None
        self._evaluator: Evaluator | None = None
        self._commands: list[Any] = []
        self._wake = Bell()
        self._answers: dict[int, Any] = {}
        self._answered = threading.Condition()  # reentrant
        self._asked = 0
        self._asking: list[m.AskStatistics] = []  # not answered yet
        self._deadline: float | None = None
        self._finishing = self._stopping = False
        self._ids = spec.learners  # given so far
        self._recovery = Recovery(self.folder, spec.restored)
        self._patience = Patience(spec.patience) if spec.patience else None
        self._looked = self._cut_asked = self._started
        self._desks: dict[int, Region] = {}
        self._coordinator: Coordinator
        self._processes: Processes
        self._regions: dict[int, list[Region]] = defaultdict(list)  # by learner; SHARED, and SERVERS' own

    def _now(self) -> float:
        return time.monotonic() - self._started

    def region(self, nbytes: int, owner: int = SHARED) -> Region:
        """Shared memory that goes with the run, or with its owner."""
        self._regions[owner].append(Region(nbytes))
        return self._regions[owner][-1]

    def _release(self, owner: int) -> None:
        """Whoever got it has mapped it; here it is needed no more."""
        for region in self._regions.pop(owner, ()):
            region.release()

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
        self.outcome.seconds = self._now()
        self.done.set()
        with self._answered:
            self._answered.notify_all()

    def command(self, command: Any) -> None:
        with self._answered:
            self._commands.append(command)
            if self._wake.fd >= 0:  # the run has not ended
                self._wake.ring()

    def ask_statistics(self) -> m.Statistics:
        with self._answered:
            self._asked += 1
            number = self._asked
            self.command(m.AskStatistics(number))
            self._answered.wait_for(lambda: number in self._answers or self.done.is_set(), timeout=10)
            return self._with_processes(self._answers.pop(number, self.outcome.statistics))

    # -- start -------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        spec = self.spec
        self._task = pack(Task(spec.function, spec.arguments, spec.keywords))
        evaluate = pack(spec.evaluate) if spec.evaluate is not None else None
        self._processes = Processes(self._heard, self._ended)
        self._processes.watch(self._wake.fd, self._from_caller)
        self._shared = _Shared(
            hub=self.region(Hub.nbytes()), shard_bells=[Bell() for _ in range(spec.shards)]
        )
        self.hub = Hub(self._shared.hub)
        ids = {rank + 1: rank for rank in range(spec.learners)}
        self._coordinator = Coordinator(Office(self), spec.plan(), ids, spec.restored)
        self._start_shards()
        self._coordinator.begin()
        for learner, rank in ids.items():
            self._start_learner(learner, rank)
        if evaluate is not None:
            self._evaluator = Evaluator(self._processes, evaluate, self.recorder)

    def _threads(self) -> int:
        """Of a learner."""
        if self.spec.threads is not None:
            return self.spec.threads
        spare = len(os.sched_getaffinity(0)) - 1  # the leading shard works while learners compute
        return max(1, spare // self.spec.learners)

    def _yields(self, role: str) -> int:
        """A learner yields for the length of a small fold, a shard for the time between two learners' gradients:
        waking a sleeping core costs more than either."""
        return 1000 if role == "learner" else 200

    def _start_shards(self) -> None:
        count = self.spec.shards
        self._release(SERVERS)
        log = self.region(8 * Ring.words(LOG_ENTRIES, max(1, count - 1)), SERVERS)
        self.shards = []
        for shard in range(count):
            spec = ServerSpec(
                shard,
                count,
                log,
                self._shared.shard_bells,
                self.geometry,
                self._yields("shard"),
                self.spec.folder,
                self._crashes.pop(f"shard {shard}", None),
            )
            self.shards.append(self._processes.fork("shard", shard, shard, spec, None, 1))

    def introduce(self, learner: int, bell: Bell | None = None) -> Region:
        """A desk between a learner and the shards; its bell stays the same."""
        self._release(learner)  # what it had with servers that are gone
        desk = self._desks[learner] = self.region(Desk.nbytes(), learner)
        bell = bell or self.learners[learner].bell
        assert bell is not None
        for shard in self.shards:
            shard.channel.try_send(AddLearner(learner, desk, bell))
        return desk

    def _start_learner(self, learner: int, rank: int) -> None:
        bell = Bell()
        desk = self.introduce(learner, bell)
        spec = LearnerSpec(
            learner,
            self._shared.hub,
            desk,
            bell,
            self._shared.shard_bells[0],
            self.geometry,
            self._yields("learner"),
            self.generation,
            self.spec.session(rank),
            self._crashes.pop(f"learner {rank}", None),
        )
        process = self._processes.fork("learner", learner, rank, spec, bell, self._threads())
        self.learners[learner] = process
        process.channel.try_send(self._task)

    def _new_learner(self, rank: int) -> None:
        self._ids += 1
        self._coordinator.join(self._ids, rank)
        self._start_learner(self._ids, rank)

    # -- the loop ----------------------------------------------------------------------------------------

    def _loop(self) -> None:
        while not self._over():
            self._processes.work(LOOK)
            now = time.monotonic()
            if now - self._looked > LOOK:
                self._looked = now
                self._check_timers(now)

    def _over(self) -> bool:
        if self.error is not None:
            return True
        if self.learners:
            return False
        if not self._finishing:
            self._finishing = True
            self._coordinator.finish()
        return self.recorder.complete() and not self._coordinator.cutting

    def _check_timers(self, now: float) -> None:
        if self._deadline is not None and now > self._deadline and not self._stopping:
            self.stop_learners()  # the checkpoint takes too long
        elif self._deadline is not None and now > self._deadline and self.learners:
            self._deadline = None
            for process in list(self.learners.values()):
                self._kill(process, f"did not finish its step within {GRACE:.0f} s of the stop")
        if self._patience is not None and not self._finishing:
            self._look(now, self._patience)
        seconds = self.spec.cut_seconds
        if seconds is not None and now - self._cut_asked > seconds:
            self._cut_asked = now
            self._coordinator.ask_cut()

    def _kill(self, process: Process, why: str) -> None:
        self.recorder.event(f"killed: {why}", process.rank, kind="killed", pid=process.pid)
        self._processes.kill(process)

    def _from_caller(self) -> None:
        self._wake.quiet()
        with self._answered:
            commands, self._commands = self._commands, []
        for command in commands:
            if isinstance(command, m.AskStatistics):
                self._asking.append(command)
                self.shards[0].channel.try_send(command)
            elif isinstance(command, Sync):
                self.recorder.event(f"dial: {command} from the next version on", kind="dial")
                self._coordinator.change(command)
            elif isinstance(command, int):
                self._add_learners(command)
            elif command == "kill":
                self._fail(KeyboardInterrupt())
            else:
                self.outcome.interrupted |= command == "interrupt"
                self._stop()

    def _add_learners(self, count: int) -> None:
        if self._stopping or self._finishing or self._deadline is not None:
            self.recorder.event(f"{count} learners not added: the run is ending", kind="refused")
            return
        for _ in range(count):
            rank = 1 + max(process.rank for process in self.processes if process.role == "learner")
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
        self.hub.words[STOP] = 1
        self._ring_learners()
        if self._deadline is None:
            self._deadline = time.monotonic() + GRACE

    def _ring_learners(self) -> None:
        for process in self.learners.values():
            if process.bell is not None:
                process.bell.ring()

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
            self.outcome.returned[process.rank] = message.value
            self._gone(process, lost=False)
        elif isinstance(message, m.Raised):
            process.state = "raised"
            self._raised(process, learner_error(process.rank, message.error, message.traceback))
        else:
            self._coordinator.from_learner(process.number, message)

    def _raised(self, process: Process, error: RunError) -> None:
        if self.spec.on_error == "raise":
            self._fail(error)
            return
        self.recorder.event(f"raised: {error}", process.rank, kind="raised")
        self._gone(process, lost=True)
        if not self.learners and not self.outcome.returned and not self._stopping:
            self._fail(error)

    def _from_shard(self, envelope: tuple[int, Any]) -> None:
        shard, message = envelope
        if isinstance(message, m.ShardRaised):
            self._fail(RunError(f"shard {shard} failed:\n{message.traceback}"))
        elif isinstance(message, m.Statistics):
            self._asking = [asked for asked in self._asking if asked.number != message.number]
            with self._answered:
                self._answers[message.number] = message
                self._answered.notify_all()
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
            self._fail(LostError(f"{process.role} {process.rank} (pid {process.pid}) ended with {how}"))

    def _learner_lost(self, process: Process, how: str) -> None:
        what = f"lost: its process (pid {process.pid}) ended with {how}"
        self.recorder.event(what, process.rank, kind="lost", learner=process.number, pid=process.pid)
        stepped = self._desks[process.number].words[0] > 0  # it has sent a note
        self._gone(process, lost=True)
        if self.spec.replace and not self._stopping and not self._finishing:
            if self._recovery.restarts.learner_lost(process.rank, stepped=stepped):
                self.recorder.event("replaced", process.rank, kind="replaced")
                self._new_learner(process.rank)
                return
            failures = self._recovery.restarts.learners[process.rank]
            what = f"given up: {failures} processes in a row were lost before their first step"
            self.recorder.event(what, process.rank, kind="given up")
        if not self.learners and not self.outcome.returned and not self._stopping:
            self._fail(LostError(f"all learners are lost, the last was rank {process.rank}: {how}"))

    def _gone(self, process: Process, *, lost: bool) -> None:
        self.learners.pop(process.number, None)
        unaware = self._coordinator.stale(process.number)
        self._coordinator.leave(process.number, lost=lost)
        self._release(process.number)
        if begins_anew(
            unaware=unaware,
            lost=lost,
            others=bool(self.learners),
            stopping=self._stopping,
            returned=bool(self.outcome.returned),
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
            self._fail(refused)
            return
        started = time.monotonic()
        self._processes.kill_and_reap(self.shards)
        try:
            last = self._recovery.go_back(lost)
        except LostError as error:
            self._fail(error)
            return
        self._start_shards()
        self.recorder.go_back(last)
        anew = {} if self.learners else self._ranks_anew()
        self._finishing = False
        self._coordinator.recover(last, anew)
        for asked in self._asking:  # the old ones did not answer
            self.shards[0].channel.try_send(asked)
        for learner, rank in anew.items():
            self._start_learner(learner, rank)
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
        anew = self._ranks_anew()
        self._coordinator.begin_anew(anew)
        for learner, rank in anew.items():
            self._start_learner(learner, rank)

    def _ranks_anew(self) -> dict[int, int]:
        """Nobody is left to go on: as many learners as in the beginning."""
        first = self._ids + 1
        self._ids += self.spec.learners
        return {first + rank: rank for rank in range(self.spec.learners)}

    def next_generation(self) -> None:
        """Learners notice that the servers are new ones."""
        self.generation += 1
        self.hub.words[GENERATION] = self.generation
        self._ring_learners()

    # -- statistics and patience -------------------------------------------------------------------------

    def _look(self, now: float, patience: Patience) -> None:
        """Who should compute and has not been heard of?"""
        heard = {number: Desk.heard(self._desks[number]) for number in self.learners}
        idle = {number for number, (_, waits) in heard.items() if waits} | self._coordinator.meeting()
        for number in patience.look(now, {number: count for number, (count, _) in heard.items()}, idle):
            process = self.learners[number]
            what = f"hangs: not heard of for {patience.silence(number, now):.1f} s (pid {process.pid})"
            self.recorder.event(what, process.rank, kind="hangs", pid=process.pid)
            if self.spec.kill_hung:
                self._kill(process, f"patience of {patience.seconds:g} s is over")
            else:
                self.recorder.warn(
                    f"learner {process.rank} {what}; the others may wait for it. It is left alone: "
                    "kill_hung=True ends such a learner, patience= sets the time"
                )

    def _with_processes(self, statistics: m.Statistics) -> m.Statistics:
        waits: dict[int, int] = {}
        for table in statistics.tables.values():
            waits.update(table.waiting)
        meeting = self._coordinator.meeting() if "_coordinator" in self.__dict__ else set()

        def state(process: Process) -> str:
            if process.state != "running" or process.role != "learner":
                return process.state
            if process.number in meeting:
                return "waits for the others"
            version = waits.get(process.rank)
            if version is None:
                return "computing"
            return f"waits for version {version}" if version >= 0 else "has no data"

        found = [
            m.ProcessStatistics(
                process.role,
                process.rank,
                process.pid,
                state(process),
                statistics.steps.get(process.rank, 0) if process.role == "learner" else 0,
                statistics.losses.get(process.rank) if process.role == "learner" else None,
            )
            for process in self.processes
        ]
        return dataclasses.replace(statistics, processes=tuple(found))

    # -- end ---------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """Nothing stays behind, however it ended."""
        self.outcome.statistics = self._with_processes(self.outcome.statistics)
        with self._answered:
            self._wake.close()
        if "_task" in self.__dict__:
            self._task.close()
        if "_processes" not in self.__dict__:  # not even begun
            return
        self._processes.close(kill=self.error is not None)
        for bell in self._shared.shard_bells:
            bell.close()
        del self.hub
        for owner in list(self._regions):
            self._release(owner)
