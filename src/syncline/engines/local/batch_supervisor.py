"""The supervisor of a batch method's run: starts its shards and learners, hosts the coordinator, and ends them.

A thread of the caller's, as the servers' supervisor is. Scalars and decisions pass here, never a vector. Decisions are the
coordinator's (`batch.coordinator`); what is recorded is `engines.batch`'s.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from syncline import messages as m
from syncline.batch import messages as b
from syncline.batch.coordinator import slots_of
from syncline.batch.portions import Cancel
from syncline.dial import Sync
from syncline.engines.batch_record import BatchRecord, coordinator_of, state_of, write_first
from syncline.engines.batch_supervision import BatchCrew, BatchSupervision
from syncline.engines.local.batch_learner import BatchLearnerSpec
from syncline.engines.local.batch_memory import slot_bytes
from syncline.engines.local.batch_shard import BatchShardSpec, Pool
from syncline.engines.local.evaluator import Evaluator
from syncline.engines.local.hang_detection import HangDetection
from syncline.engines.local.packing import Parcel, pack
from syncline.engines.local.processes import Process
from syncline.engines.local.shared_memory import Region
from syncline.engines.local.statistics_requests import Questions, with_processes
from syncline.engines.local.supervisor_base import RunThread
from syncline.engines.local.task_packing import pack_task
from syncline.engines.recorder import Recorder, learner_error
from syncline.engines.run import RunSpec
from syncline.errors import LostError, RunError, UsageError
from syncline.roles.checkpoint_manifest import Restored

LOOK = 0.25  # seconds between looks at timers
SHARD_PATIENCE = 5.0  # seconds at least


class BatchSupervisor(BatchCrew):
    """One run, from its first process to its last; `thread.main` runs on a thread of the caller's."""

    def __init__(self, spec: RunSpec, crashes: Mapping[str, int] | None = None) -> None:
        assert spec.batch is not None
        self.spec, self._plan = spec, spec.batch
        self._crashes = dict(crashes or {})  # for tests: process name -> the operation it dies in, once
        self._started = time.monotonic()
        self.recorder = Recorder(
            now=self._now,
            evaluate=lambda epoch, state: self._evaluator.give(epoch, state),  # type: ignore[union-attr]
            stop=self._stop,
            layouts=lambda: {},
            callbacks=spec.callbacks,
            listeners=spec.listeners,
            restored=spec.storage.restored,
        )
        self.thread = RunThread(
            self.recorder, self._started, begin=self._begin, loop=self._loop, end=self._end
        )
        self._coordinator = coordinator_of(spec)
        self._record = BatchRecord(spec, self.recorder, self._coordinator, self._now)
        self._life = BatchSupervision(spec, self, self._coordinator, self.recorder, self._record)
        self._questions = Questions(self.thread)
        self._point = Region(self._plan.layout.parameters.nbytes)
        self._pools: list[Region] = []
        self._beats: dict[tuple[str, int], Region] = {}
        self._shards: list[Process] = []
        self._ready = 0  # shards that have their vectors
        self._learners: dict[int, Process] = {}  # by id, while running
        self._steps: dict[int, int] = {}  # rank -> sums
        self._losses: dict[int, float] = {}
        self._evaluator: Evaluator | None = None
        self._task: Parcel | None = None
        self._over: b.Over | None = None
        self._hanging = HangDetection(
            spec.faults, self.recorder, others="the others compute its portions", end="ends such a learner"
        )
        self._hanging_shards = HangDetection(
            spec.faults,
            self.recorder,
            others="all wait for it",
            end="goes back to the last checkpoint",
            least=SHARD_PATIENCE,
        )
        self._looked = self._started

    def _now(self) -> float:
        return time.monotonic() - self._started

    def command(self, command: Any) -> None:
        """What the caller asks for."""
        if isinstance(command, Sync):
            raise UsageError(
                "sandblaster has no dial to change: every iteration takes all portions of its batch"
            )
        self.thread.command(command)

    def ask_statistics(self) -> m.Statistics:
        return self._questions.ask()

    # -- the run -----------------------------------------------------------------------------------------

    def _begin(self) -> None:
        spec = self.spec
        self._task, evaluate = pack_task(spec)
        self._processes = self.thread.open(self._heard, self._ended, self._asked)
        self.grow(slots_of(spec.plan.learners, deterministic=self._plan.deterministic))
        self._start_shards(spec.storage.restored)
        self._life.begin()
        if evaluate is not None:
            self._evaluator = Evaluator(self._processes, evaluate, self.recorder)

    def grow(self, slots: int) -> None:
        """More room for sums, known to all."""
        region = Region(slots * slot_bytes(self._plan.layout.parameters.nbytes))
        self._pools.append(region)
        for process in (*self._shards, *self._learners.values()):
            process.channel.post(Pool(region))

    def _start_shards(self, restored: Restored | None) -> None:
        """With the vectors of a checkpoint, or with the model's own weights."""
        plan = self._plan
        if restored is None:
            write_first(plan, self._x())
        source = (restored.name, restored.batch["files"]) if restored and restored.batch else None
        self._shards, self._ready = [], 0
        for shard in range(plan.layout.shards):
            spec = BatchShardSpec(
                shard,
                plan.layout,
                tuple(plan.method.vectors),
                self._point,
                self._pools,
                self._beat("shard", shard),
                self.spec.storage.folder,
                source,
                self._crashes.pop(f"shard {shard}", None),
            )
            self._shards.append(self._processes.fork("shard", shard, shard, spec, None, 1))

    def start_learner(self, learner: int, rank: int) -> None:
        spec = BatchLearnerSpec(
            self.spec.devices[rank % len(self.spec.devices)],
            self._point,
            self._pools,
            self._beat("learner", learner),
            self._crashes.pop(f"learner {rank}", None),
        )
        process = self._processes.fork("learner", learner, rank, spec, None, self._threads())
        self._learners[learner] = process
        assert self._task is not None
        process.channel.post(self._task)

    def renew_shards(self, restored: Restored | None) -> None:
        self._processes.kill_and_reap(self._shards)
        self._over = None
        self._start_shards(restored)

    def fail(self, error: BaseException) -> None:
        self.thread.fail(error)

    def _beat(self, role: str, number: int) -> Region:
        return self._beats.setdefault((role, number), Region(8))

    def _threads(self) -> int:
        """Of a learner; bits must not depend on how many there are."""
        if self.spec.threads is not None:
            return self.spec.threads
        return (
            1 if self._plan.deterministic else max(1, len(os.sched_getaffinity(0)) // self.spec.plan.learners)
        )

    def _x(self) -> list[Tensor]:
        return self._plan.layout.parameters.segments(self._point.tensor())

    def _loop(self) -> None:
        while self.thread.error is None and not self._complete():
            self._processes.work(LOOK)
            now = time.monotonic()
            if now - self._looked > LOOK:
                self._looked = now
                self._look(now)

    def _complete(self) -> bool:
        return self._over is not None and not self._record.cutting and not self.recorder.evaluating

    def _look(self, now: float) -> None:
        """Who should work and has not been heard of?"""
        busy = self._coordinator.busy()
        progress = {each: self._beats["learner", each].words[0] for each in self._learners}
        self._hanging.look(now, progress, self._learners.keys() - busy, self._learners, self._kill)
        shards = dict(enumerate(self._shards))
        beats = {each: self._beats["shard", each].words[0] for each in shards}
        idle = shards.keys() - self._coordinator.awaited()
        self._hanging_shards.look(now, beats, set(idle), shards, self._kill)

    def _kill(self, process: Process, why: str) -> None:
        rank = process.rank if process.role == "learner" else None
        self.recorder.event(
            f"killed: {why}", rank, kind="killed", role=process.role, number=process.number, pid=process.pid
        )
        self._processes.kill(process)

    # -- what the coordinator wants ------------------------------------------------------------------------

    def do(self, actions: Iterable[b.Action]) -> None:
        for action in actions:
            if isinstance(action, b.Run | b.Add):
                self._to_shards(action)
            elif isinstance(action, b.Give | Cancel):
                if (process := self._learners.get(action.learner)) is not None:
                    process.channel.post(action)
            elif isinstance(action, b.Reached):
                self._reached(action)
            else:
                self._finish(action)

    def _to_shards(self, message: Any) -> None:
        parcel = pack(message)
        for shard in self._shards:
            shard.channel.post(parcel)
        parcel.close()

    def _reached(self, reached: b.Reached) -> None:
        """The vectors stay as they are until the coordinator goes on; shards write them first."""
        wanted = self.spec.evaluate is not None
        self._record.iteration(reached, state_of(self._plan, self._x()) if wanted else None)
        if self._record.due(last=self._coordinator.done()):
            self._to_shards(self._record.cut())
        if self.thread.error is None:
            self.do(self._coordinator.proceed())

    def _finish(self, over: b.Over) -> None:
        self._over = over
        self.recorder.outcome.tables = {0: (self._coordinator.iteration, state_of(self._plan, self._x()))}
        self.recorder.outcome.statistics = self._statistics(-1)
        if self._coordinator.still and self._record.due(last=True):
            self._to_shards(self._record.cut())
        try:
            self._record.ended(over)
        except RunError as error:
            error.outcome = self.recorder.outcome
            self.thread.fail(error)

    # -- what is heard -------------------------------------------------------------------------------------

    def _heard(self, process: Process, message: Any) -> None:
        if process.role == "shard":
            self._from_shard(message)
        elif process.role == "evaluator":
            assert self._evaluator is not None
            self._evaluator.hear(message)
        elif self._over is None:
            self._from_learner(process, message)

    def _from_shard(self, message: Any) -> None:
        if isinstance(message, b.Ready):
            self._ready += 1
            if self._ready == len(self._shards):
                self.do(self._coordinator.begin())
        elif isinstance(message, b.Ran):
            self.do(self._coordinator.ran(message))
        elif isinstance(message, b.Added):
            self.do(self._coordinator.added(message))
        elif isinstance(message, m.Saved):
            self._life.checkpointed(self._record.saved(message))
        elif isinstance(message, m.ShardRaised):
            self.thread.fail(RunError(f"shard {message.shard} failed:\n{message.traceback}"))

    def _from_learner(self, process: Process, message: Any) -> None:
        number = process.number
        if isinstance(message, b.Ready):
            self.do(self._coordinator.join(number))
        elif isinstance(message, b.Answered):
            self._steps[process.rank] = self._steps.get(process.rank, 0) + 1
            self._losses[process.rank] = message.loss / message.examples
            self.do(self._coordinator.answered(number, message))
        elif isinstance(message, b.Dropped):
            self.do(self._coordinator.dropped(number, message))
        elif isinstance(message, m.Raised):
            process.state = "raised"
            self._learners.pop(number, None)
            self._life.raised(number, learner_error(process.rank, message.error, message.traceback))

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
        self._learners.pop(process.number, None)
        why = f"its process (pid {process.pid}) ended with {how}"
        if self._over is not None:
            self.recorder.event(f"lost: {why}", process.rank, kind="lost", pid=process.pid)
            return
        stepped = self._beats["learner", process.number].words[0] > 0
        self._life.lost(process.number, why, stepped=stepped, pid=process.pid)

    def _shard_lost(self, process: Process, how: str) -> None:
        """All shards go back to the last checkpoint together, with its history vectors (S7)."""
        lost = f"shard {process.rank} (pid {process.pid}) ended with {how}"
        if self._over is not None and not self._record.cutting:
            self.recorder.event(lost, kind="shard lost", shard=process.rank, pid=process.pid)
            return
        self._life.shard_lost(lost, shard=process.rank, pid=process.pid)

    # -- the caller's --------------------------------------------------------------------------------------

    def _asked(self, command: Any) -> None:
        if isinstance(command, m.AskStatistics):
            self._questions.answer(self._statistics(command.number))
        elif isinstance(command, int):
            self._life.add(command)
        elif command == "kill":
            self.thread.fail(KeyboardInterrupt())
        else:
            self.thread.outcome.interrupted |= command == "interrupt"
            self._stop()

    def _stop(self) -> None:
        self._life.ask_stop()

    def _statistics(self, number: int) -> m.Statistics:
        busy = self._coordinator.busy()
        return with_processes(
            self._record.statistics(number, self._steps, self._losses),
            self.thread.processes,
            lambda process: "computing" if process.number in busy else "waits",
        )

    def _end(self) -> None:
        """Nothing stays behind, however it ended."""
        if self.thread.error is None:
            for process in self.thread.processes:
                process.state = "returned" if process.state == "running" else process.state
        self.thread.outcome.statistics = self._statistics(-1)
        for number in self._coordinator.busy() & self._learners.keys():
            self._processes.kill(self._learners[number])  # nobody wants what it computes
        self.thread.close()
        if self._task is not None:
            self._task.close()
        for region in (self._point, *self._pools, *self._beats.values()):
            region.close()
