"""A simulated run of a batch method: real gradients and vectors in virtual time, with the coordinator of every engine.

Not responsible for how long anything takes (`batch_method_parties`).
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from syncline import messages as m
from syncline.batch import messages as b
from syncline.batch.commands import Program
from syncline.cluster import Cluster
from syncline.dial import Sync
from syncline.engines.batch_method_record import BatchRecord, coordinator_of, state_of, write_first
from syncline.engines.checkpoint_writer import write_part
from syncline.engines.event_script import Fault
from syncline.engines.recorder import Recorder, learner_error
from syncline.engines.run import Outcome, RunSpec
from syncline.engines.simulated_times import LearnerTimes, SimulatedTimes
from syncline.engines.supervision import BatchCrew, BatchSupervision
from syncline.errors import LostError, RunError, UsageError
from syncline.learn.model_factories import seed_random
from syncline.learn.portion_worker import BatchPlan, PortionWorker
from syncline.roles.checkpoint_manifest import Restored
from syncline.sim.batch_method_parties import Numbers, Play
from syncline.sim.clock import Clock
from syncline.sim.fault_player import Script
from syncline.table.checkpoint_content import table_file
from syncline.table.checkpoints import Folder
from syncline.table.vectors import Vectors, read_vectors, vector_tensors


class Arithmetic(Numbers):
    """One model for all learners, the vectors of all shards; sums exist from their task to their last shard."""

    def __init__(
        self,
        plan: BatchPlan,
        device: str,
        *,
        current: Callable[[], int],
        fail: Callable[[int, BaseException], None],
    ) -> None:
        self._plan, self._flat, self.current, self._fail = plan, plan.layout.parameters, current, fail
        self.x = self._flat.segments(torch.zeros(self._flat.nbytes, dtype=torch.uint8))
        self._worker = PortionWorker(plan, torch.device(device), ahead=False, own=False)
        self._at = -1
        self._sums: dict[int, tuple[list[Tensor], set[int]]] = {}  # slot -> sum, shards that have added it
        self.shards: list[Vectors] = []

    def start(self, restored: Restored | None) -> None:
        """Shards with the vectors of a checkpoint, or with the model's own weights."""
        if restored is None:
            write_first(self._plan, self.x)
        self.shards = [
            Vectors(self._plan.method.vectors, part.segments(self.x)) for part in self._plan.layout.parts
        ]
        if restored is not None and restored.batch is not None:
            for shard, vectors in enumerate(self.shards):
                read_vectors(Path(restored.path), restored.batch.files, self._plan.layout, shard, vectors)

    def run(self, shard: int, commands: Program) -> tuple[float, ...]:
        return self.shards[shard].run(commands)

    def add(self, shard: int, message: b.Add) -> None:
        total, added = self._sums[message.slot]
        self.shards[shard].add(
            message.to, self._plan.layout.parts[shard].segments(total), first=message.first
        )
        added.add(shard)
        if len(added) == len(self.shards):
            del self._sums[message.slot]

    def sum(self, task: b.Give) -> tuple[float, int]:
        """x stays the same while anybody can want the answer; later nothing is computed."""
        if task.evaluation != self.current():
            return 0.0, 1
        if self._at != task.evaluation:
            self._worker.move(self.x)
            self._at = task.evaluation
        total = self._flat.segments(torch.zeros(self._flat.nbytes, dtype=torch.uint8))
        self._worker.begin(total)
        loss, examples = 0.0, 0
        try:
            for portion in range(task.start, task.stop):
                more, count = self._worker.add(task.batch, portion)
                loss, examples = loss + more, examples + count
        except Exception as error:  # the user's code runs here
            self._fail(task.learner, error)
        self._worker.end(total)
        self._sums[task.slot] = total, set()
        return loss, max(1, examples)

    def examples(self, task: b.Give, portion: int) -> int:
        size = self._plan.samples.portion
        return min((portion + 1) * size, task.batch.examples) - portion * size


class BatchSimulation(BatchCrew):
    """One simulated run."""

    def __init__(self, spec: RunSpec, cluster: Cluster, *, script: Script, seed: int) -> None:
        assert spec.batch is not None
        self.spec, self._plan, self.cluster = spec, spec.batch, cluster
        self.clock = Clock()
        self._script = script
        if spec.storage.restored is not None:
            self.clock.now = spec.storage.restored.virtual
            self._script = script.after(spec.storage.restored.version, spec.storage.restored.virtual)
        self.recorder = Recorder(
            spec, now=lambda: self.clock.now, evaluate=self._evaluate, stop=self.ask_stop
        )
        self.recorder.outcome.began = self.clock.now
        self._coordinator = coordinator_of(spec)
        self._record = BatchRecord(spec, self.recorder, self._coordinator, lambda: self.clock.now)
        self._folder = Folder(Path(spec.storage.folder)) if spec.storage.folder else None
        self._life = BatchSupervision(self, self._record)
        seed_random(spec.plan.seed)
        self._numbers = Arithmetic(
            self._plan,
            spec.devices[0],
            current=lambda: self._coordinator.evaluation,
            fail=self._raised,
        )
        slices = [part.segments(self._numbers.x) for part in self._plan.layout.parts]
        self._play = Play(
            self.clock,
            cluster,
            self._coordinator,
            self._numbers,
            [sum(segment.nbytes for segment in part) for part in slices],
            seed=seed,
            learners=spec.plan.learners,
            done=lambda said: self._reached(said) if isinstance(said, b.Reached) else self._finish(said),
        )
        self._over: b.Over | None = None
        self._played: list[str] = []
        self.commands: deque[Callable[[Any], None]] = deque()  # from other threads

    def fail(self, error: BaseException) -> None:
        self.recorder.error = self.recorder.error or error

    def _raised(self, learner: int, error: BaseException) -> None:
        rank, text = self._play.learners[learner].rank, "".join(traceback.format_exception(error))
        told = learner_error(rank, error, text)
        self._play.leave(learner)
        self._life.raised(learner, told)

    # -- the crew ------------------------------------------------------------------------------------------

    def start_learner(self, learner: int, rank: int) -> None:
        self._play.join(learner, rank)

    def renew_shards(self, restored: Restored | None) -> None:
        self._play.lose_shards()
        self._numbers.start(restored)
        self._play.do(self._coordinator.begin())

    def grow(self, slots: int) -> None:
        """Sums are made as they are needed."""

    def do(self, actions: Iterable[b.Action]) -> None:
        self._play.do(actions)

    # -- iterations ----------------------------------------------------------------------------------------

    def _reached(self, reached: b.Reached) -> None:
        wanted = self.spec.evaluate is not None
        self._record.iteration(reached, state_of(self._plan, self._numbers.x) if wanted else None)
        self.recorder.sample(self.statistics())
        if self._record.due(last=self._coordinator.done()):
            self._save()
        self._script.reached(reached.iteration.record.iteration, self._play_fault)
        if self.recorder.error is None and self._over is None:
            self._play.do(self._coordinator.proceed())

    def _save(self) -> None:
        """In no virtual time."""
        assert self._folder is not None
        number = self._record.cut().number
        for shard, vectors in enumerate(self._numbers.shards):
            tensors = vector_tensors(self._plan.layout, shard, vectors)
            saved = write_part(self._folder, (number, table_file(0, shard), tensors, {}))
            self._life.saved(saved)

    def _finish(self, over: b.Over) -> None:
        self._over = over
        outcome = self.recorder.outcome
        outcome.tables = {0: (self._coordinator.iteration, state_of(self._plan, self._numbers.x))}
        outcome.statistics = self.statistics()
        if self._coordinator.still and self._record.due(last=True):
            self._save()
        try:
            self._record.ended(over)
        except RunError as error:
            error.outcome = outcome
            self.fail(error)

    def _evaluate(self, epoch: int, state: dict[str, Tensor]) -> None:
        assert self.spec.evaluate is not None
        self.recorder.test(epoch, state, self.spec.evaluate)

    # -- what others ask -----------------------------------------------------------------------------------

    def ask_stop(self) -> None:
        self._life.ask_stop()

    def ask_add(self, count: int) -> None:
        self._life.add(count)

    def change(self, sync: Sync) -> None:
        self.fail(UsageError("sandblaster has no dial to change"))

    def statistics(self) -> m.Statistics:
        everybody = [*self._play.gone, *self._play.learners.values()]
        steps: dict[int, int] = {}
        for learner in everybody:
            steps[learner.rank] = steps.get(learner.rank, 0) + learner.times.steps
        return self._record.statistics(0, steps, {})

    # -- the script ----------------------------------------------------------------------------------------

    def _play_fault(self, fault: Fault) -> None:
        self._played.append(fault.text)
        learners = [each for each in self._play.learners.values() if each.rank == fault.rank]
        if fault.action == "stop":
            self.ask_stop()
        elif fault.action == "add":
            self.ask_add(fault.count)
        elif fault.role == "shard" and fault.rank < len(self._numbers.shards):
            why = f"shard {fault.rank} is lost: killed by the script"
            self.clock.at(self.clock.now, lambda: self._life.shard_lost(why, shard=fault.rank))
        elif fault.role == "learner" and learners:
            self._play.leave(learners[0].number)
            self._life.lost(learners[0].number, "killed by the script", stepped=learners[0].times.steps > 0)
        else:
            self.recorder.event(f"not played, nobody is there: {fault.text}", kind="missed")

    # -- the run -------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        for fault in self._script.timed:
            self.clock.at(fault.seconds or 0.0, partial(self._play_fault, fault))
        self._numbers.start(self.spec.storage.restored)
        self._play.do(self._coordinator.begin())
        self._life.begin()
        while self.recorder.error is None and self._over is None and self.clock.step():
            while self.commands:
                self.commands.popleft()(self)
        if self.recorder.error is not None:
            raise self.recorder.error
        if self._over is None:
            raise LostError(f"the simulated run stands still at {self.clock.now:g} s")
        for what in self._script.missed(self._played):
            self.recorder.event(what, kind="missed")
        outcome, network = self.recorder.outcome, self._play.network
        outcome.seconds = self.clock.now
        times: dict[int, LearnerTimes] = {}
        for learner in (*self._play.gone, *self._play.learners.values()):
            times[learner.rank] = times.get(learner.rank, LearnerTimes()) + learner.times
        outcome.simulated = SimulatedTimes(
            learners=times, moved=network.moved, copied=network.copied, events=self.clock.events
        )
        return outcome
