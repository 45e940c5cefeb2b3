"""The supervisor of a batch method's run: starts its shards and learners, hosts the coordinator, and ends them.

Scalars and decisions pass here, never a vector. Decisions are the coordinator's (`batch.coordinator`); what is recorded is
`engines.batch_method_record`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from syncline import messages as m
from syncline.batch import messages as b
from syncline.batch.coordinator import slots_of
from syncline.batch.portions import Cancel
from syncline.dial import Sync
from syncline.engines.batch_method_record import BatchRecord, coordinator_of, state_of, write_first
from syncline.engines.local.batch_processes import (
    BatchLearnerSpec,
    BatchShardSpec,
    run_batch_learner,
    run_batch_shard,
)
from syncline.engines.local.processes import Process
from syncline.engines.local.shared_memory import Region, whole_pages
from syncline.engines.local.shared_pickle import Parcel, pack
from syncline.engines.local.supervisor_base import SHARD_PATIENCE, HangDetection, RunSupervisor
from syncline.engines.recorder import Recorder, learner_error
from syncline.engines.run import RunSpec
from syncline.engines.supervision import BatchCrew, BatchSupervision
from syncline.errors import RunError, UsageError
from syncline.roles.checkpoint_manifest import Restored


class BatchSupervisor(RunSupervisor, BatchCrew):
    """A batch method's run."""

    def __init__(self, spec: RunSpec, crashes: Mapping[str, int] | None = None) -> None:
        assert spec.batch is not None
        super().__init__(spec, crashes)
        self._plan = spec.batch
        self.recorder = Recorder(spec, now=self.now, evaluate=self._evaluate, stop=self._stop)
        self._coordinator = coordinator_of(spec)
        self._record = BatchRecord(spec, self.recorder, self._coordinator, self.now)
        self._life = BatchSupervision(self, self._record)
        self._point = Region(self._plan.layout.parameters.nbytes)
        self._pools: list[Region] = []
        self._beats: dict[tuple[str, int], Region] = {}
        self._shards: list[Process] = []
        self._ready = 0  # shards that have their vectors
        self._learners: dict[int, Process] = {}  # by id, while running
        self._steps: dict[int, int] = {}  # rank -> sums
        self._losses: dict[int, float] = {}
        self._finished: b.Over | None = None
        self._hanging = HangDetection(self, "the others compute its portions", "ends such a learner")
        self._hanging_shards = HangDetection(
            self, "all wait for it", "goes back to the last checkpoint", least=SHARD_PATIENCE
        )

    # -- the run -----------------------------------------------------------------------------------------

    def _start(self, task: Parcel) -> None:
        self.grow(slots_of(self.spec.plan.learners, deterministic=self._plan.deterministic))
        self._start_shards(self.spec.storage.restored)
        self._life.begin()

    def grow(self, slots: int) -> None:
        """More room for sums, known to all."""
        region = Region(slots * whole_pages(self._plan.layout.parameters.nbytes))
        self._pools.append(region)
        for process in (*self._shards, *self._learners.values()):
            process.channel.post(region)

    def _start_shards(self, restored: Restored | None) -> None:
        """With the vectors of a checkpoint, or with the model's own weights."""
        plan = self._plan
        if restored is None:
            write_first(plan, self._x())
        source = (restored.path, restored.batch.files) if restored and restored.batch else None
        self._shards, self._ready = [], 0
        names, folder = tuple(plan.method.vectors), self.spec.storage.folder
        for shard in range(plan.layout.shards):
            common = plan.layout, names, self._point, self._pools, self._beat("shard", shard)
            run = partial(run_batch_shard, spec=BatchShardSpec(shard, *common, folder, source))
            self._shards.append(self._processes.fork("shard", shard, shard, run, None, 1))

    def start_learner(self, learner: int, rank: int) -> None:
        device = self.spec.devices[rank % len(self.spec.devices)]
        spec = BatchLearnerSpec(device, self._point, self._pools, self._beat("learner", learner))
        run = partial(run_batch_learner, spec=spec)
        part = f"portion worker {rank}"
        process = self._processes.fork("learner", learner, rank, run, None, self._threads(), part)
        self._learners[learner] = process
        assert self._task is not None
        process.channel.post(self._task)

    def renew_shards(self, restored: Restored | None) -> None:
        self._processes.kill_and_reap(self._shards)
        self._finished = None
        self._start_shards(restored)

    def _beat(self, role: str, number: int) -> Region:
        return self._beats.setdefault((role, number), Region(8))

    def _threads(self) -> int:
        """Bits must not depend on how many there are."""
        return 1 if self._plan.deterministic and self.spec.threads is None else super()._threads()

    def _x(self) -> list[Tensor]:
        return self._plan.layout.parameters.segments(self._point.tensor())

    def _over(self) -> bool:
        return self._finished is not None and not self._record.cutting and not self.recorder.evaluating

    def _look(self, now: float) -> None:
        busy = self._coordinator.busy()
        progress = {each: self._beats["learner", each].words[0] for each in self._learners}
        self._hanging.look(now, progress, self._learners.keys() - busy, self._learners)
        shards = dict(enumerate(self._shards))
        beats = {each: self._beats["shard", each].words[0] for each in shards}
        idle = shards.keys() - self._coordinator.awaited()
        self._hanging_shards.look(now, beats, set(idle), shards)

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
        if self.error is None:
            self.do(self._coordinator.proceed())

    def _finish(self, over: b.Over) -> None:
        self._finished = over
        self.outcome.tables = {0: (self._coordinator.iteration, state_of(self._plan, self._x()))}
        self.outcome.statistics = self._statistics(-1)
        if self._coordinator.still and self._record.due(last=True):
            self._to_shards(self._record.cut())
        try:
            self._record.ended(over)
        except RunError as error:
            error.outcome = self.outcome
            self.fail(error)

    # -- what is heard -------------------------------------------------------------------------------------

    def _heard(self, process: Process, message: Any) -> None:
        if process.role == "learner":
            if self._finished is None:
                self._from_learner(process, message)
        elif isinstance(message, b.Ready):
            self._ready += 1
            if self._ready == len(self._shards):
                self.do(self._coordinator.begin())
        elif isinstance(message, b.Ran):
            self.do(self._coordinator.ran(message))
        elif isinstance(message, b.Added):
            self.do(self._coordinator.added(message))
        elif isinstance(message, m.Saved):
            self._life.saved(message)
        elif isinstance(message, m.ShardRaised):
            self.fail(RunError(f"shard {message.shard} failed:\n{message.traceback}"))

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
        process.state = "lost"
        role, rank, pid = process.role, process.rank, process.pid
        if role == "learner":
            self._learners.pop(process.number, None)
            why = f"its process (pid {pid}) ended with {how}"
            if self._finished is not None:
                self.recorder.event(f"lost: {why}", rank, kind="lost", pid=pid)
                return
            stepped = self._beats["learner", process.number].words[0] > 0
            self._life.lost(process.number, why, stepped=stepped, pid=pid)
            return
        lost = f"{role} {rank} (pid {pid}) ended with {how}"
        if self._finished is not None and not self._record.cutting:
            self.recorder.event(lost, kind="shard lost", shard=rank, pid=pid)
        else:  # all shards go back to the last checkpoint together, with its history vectors (S7)
            self._life.shard_lost(lost, shard=rank, pid=pid)

    # -- the caller's --------------------------------------------------------------------------------------

    def add_learners(self, count: int) -> None:
        self.command(lambda: self._life.add(count))

    def change(self, sync: Sync) -> None:
        raise UsageError("sandblaster has no dial to change: every iteration takes all portions of its batch")

    def _stop(self) -> None:
        self._life.ask_stop()

    def _questioned(self, number: int) -> None:
        self._answer(self._statistics(number))

    def _statistics(self, number: int) -> m.Statistics:
        busy = self._coordinator.busy()
        return self._with_processes(
            self._record.statistics(number, self._steps, self._losses),
            lambda process: "computing" if process.number in busy else "waits",
        )

    def _end(self) -> None:
        if self.error is None:
            for process in self.processes:
                process.state = "returned" if process.state == "running" else process.state
        self.outcome.statistics = self._statistics(-1)
        for number in self._coordinator.busy() & self._learners.keys():
            self._processes.kill(self._learners[number])  # nobody wants what it computes
        self._close()
        for region in (self._point, *self._pools, *self._beats.values()):
            region.close()
