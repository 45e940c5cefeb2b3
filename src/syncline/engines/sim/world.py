"""A simulated run: the ports of learners, shards and coordinator as events of one queue.

Everything that a process would do happens here in virtual time; sessions, roles and protocols are the local engine's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from syncline.dial import Sync
from syncline.engines.record import Recorder
from syncline.engines.run import Outcome, RunSpec
from syncline.engines.sim.builtin import Builtin
from syncline.engines.sim.clock import Clock, Times
from syncline.engines.sim.coordinator import SimCoordinator
from syncline.engines.sim.invariants.watch import Watch, WatchedRole
from syncline.engines.sim.learner import SimLearner
from syncline.engines.sim.memory import SimLane, SimTable
from syncline.engines.sim.promises import PromisedLane
from syncline.engines.sim.server import SimServer
from syncline.engines.sim.workshop import Workshop, can_handle
from syncline.errors import LostError
from syncline.table.checkpoints import Folder
from syncline.topology import messages as m
from syncline.topology.coordinator import Coordinator
from syncline.topology.servers import ServerRole


class World:
    """One simulated run."""

    def __init__(self, spec: RunSpec, times: Times, *, check: bool = False, handlers: bool = True) -> None:
        self.spec, self.times = spec, times
        self.watch = Watch(self) if check else None
        self.workshop = Workshop(spec) if handlers and can_handle(spec) else None
        self.clock = Clock()
        self.stopping = False
        self.tables: dict[int, SimTable] = {}
        self.lanes: dict[tuple[int, int], SimLane | PromisedLane] = {}
        self.dials: dict[int, Sync] = {}
        self._norms: dict[tuple[int, int], dict[int, Tensor]] = {}
        ids = {rank + 1: rank for rank in range(spec.learners)}
        self.folder = Folder(Path(spec.folder)) if spec.folder else None
        self.coordinator = Coordinator(SimCoordinator(self), spec.plan(), ids, spec.restored)
        self.roles = self._servers()
        self.recorder = Recorder(
            now=lambda: self.clock.now,
            evaluate=self._evaluate,
            stop=self.coordinator.stop,
            layouts=lambda: {table: self.coordinator.layout(table) for table in self.coordinator.tables},
            callbacks=spec.callbacks,
            listeners=spec.listeners,
            restored=spec.restored,
        )
        self.learners = {learner: self._make_learner(learner, rank) for learner, rank in ids.items()}
        self._left = 0
        self._cut_asked = 0.0
        self.commands: deque[Callable[[World], None]] = deque()  # from other threads

    def _servers(self) -> list[ServerRole]:
        ports = [SimServer(self, shard) for shard in range(self.spec.shards)]
        if self.watch is None:
            return [ServerRole(port) for port in ports]
        return [WatchedRole(port, self.watch) for port in ports]

    def _make_learner(self, learner: int, rank: int) -> SimLearner:
        """`train`'s own loop runs as a handler, any other on a fiber."""
        if self.workshop is None:
            return SimLearner(self, learner, rank)
        return Builtin(self, learner, rank, self.workshop)

    def soon(self, action: Callable[[], None]) -> None:
        self.clock.after(self.times.latency, action)

    def fail(self, error: BaseException) -> None:
        self.recorder.error = self.recorder.error or error

    def stop(self) -> None:
        if not self.stopping:
            self.stopping = True
            if self.watch is not None:
                self.watch.stopped()
            for learner in self.learners.values():
                self.soon(learner.wake)

    def returned(self, learner: SimLearner, value: Any) -> None:
        self.recorder.outcome.returned[learner.rank] = value
        self._left += 1
        self.coordinator.leave(learner.learner, lost=False)
        if self._left == len(self.learners):
            self.soon(self.coordinator.finish)

    def add_learner(self) -> None:
        """One more joins, now."""
        if self.stopping or self._left == len(self.learners):
            self.recorder.event("a learner not added: the run is ending", kind="refused")
            return
        learner, rank = 1 + max(self.learners), 1 + max(each.rank for each in self.learners.values())
        self.recorder.event("joined", rank, kind="joined")
        self.coordinator.join(learner, rank)
        self.learners[learner] = self._make_learner(learner, rank)
        self.soon(self.learners[learner].fiber.resume)

    def share_norms(self, shard: int, table: int, version: int, norms: Tensor) -> None:
        brought = self._norms.setdefault((table, version), {})
        brought[shard] = norms
        layout = self.tables[table].layout
        if len(brought) == layout.shards:
            del self._norms[table, version]
            event = m.Norms(table, version, [brought[index] for index in sorted(brought)])
            for role in self.roles[: layout.shards]:
                self.soon(lambda role=role: role.handle(event))  # type: ignore[misc]

    def _evaluate(self, epoch: int, state: dict[str, Tensor]) -> None:
        assert self.spec.evaluate is not None
        self.recorder.evaluated(epoch, self.spec.evaluate(state))

    def waiting(self) -> dict[int, str | None]:
        """Rank to what it waits for."""
        return {learner.rank: learner.waits_for for learner in self.learners.values()}

    def run(self) -> Outcome:
        self.coordinator.begin()
        for learner in self.learners.values():
            self.clock.at(0.0, learner.fiber.resume)
        while self.recorder.error is None and self.clock.step():
            if self.watch is not None:
                self.watch.after()
            while self.commands:
                self.commands.popleft()(self)
            seconds = self.spec.cut_seconds
            if seconds is not None and self.clock.now - self._cut_asked > seconds:
                self._cut_asked = self.clock.now
                self.coordinator.ask_cut()
        if self.recorder.error is not None:
            raise self.recorder.error
        if not self.recorder.complete():
            raise LostError(
                f"the simulated run stands still at {self.clock.now:g} s; who waits for what: {self.waiting()}"
            )
        if self.watch is not None:
            self.watch.over()
        self.recorder.outcome.seconds = self.clock.now
        return self.recorder.outcome
