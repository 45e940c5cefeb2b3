"""A simulated shard's port: its effects as events of virtual time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from syncline.engines.files import write_part
from syncline.engines.sim.promises import PromisedLane, PromisedSlot
from syncline.ports import Entry, Portion, Reading, ServerPort
from syncline.table.slot import Slot

if TYPE_CHECKING:
    from syncline.engines.sim.world import World


class SimServer(ServerPort):
    """One simulated shard's effects."""

    def __init__(self, world: World, shard: int) -> None:
        self._world, self.shard, self.shards = world, shard, world.spec.shards

    def append(self, entry: Entry) -> None:
        for role in self._world.roles[1:]:
            self._world.soon(lambda role=role: role.entry(entry))  # type: ignore[misc]

    def weights(self, table: int) -> tuple[list[Tensor], list[list[Tensor]]]:
        memory = self._world.tables[table]
        return memory.weights, memory.history

    def slot(self, table: int, learner: int, index: int) -> Slot | PromisedSlot:
        return self._world.lanes[table, learner].slots[index]

    def inbox(self, table: int, learner: int, version: int) -> list[Tensor] | None:
        lane = self._world.lanes.get((table, learner))
        if isinstance(lane, PromisedLane):
            assert self._world.workshop is not None
            return lane.inbox(self._world.workshop.versions.get(version), self.shard)
        return lane.inbox if lane else None

    def release(self, table: int, learner: int, number: int, reading: Reading | None) -> None:
        lane = self._world.lanes.get((table, learner))
        if lane is not None:
            times = self._world.times

            def arrive() -> None:
                if reading is None:
                    lane.freed[self.shard] = number
                else:
                    lane.released[self.shard] = (number, reading)
                self._world.learners[learner].wake()

            self._world.clock.after(times.latency + times.transfer, arrive)

    def grant(self, learner: int, portion: Portion) -> None:
        self._world.soon(lambda: self._world.learners[learner].give(portion))

    def share_norms(self, table: int, version: int, norms: Tensor) -> None:
        self._world.share_norms(self.shard, table, version, norms)

    def forget(self, learner: int) -> None:
        if self.shard == self.shards - 1:  # the lanes are shared: the last to forget drops them
            for key in [key for key in self._world.lanes if key[1] == learner]:
                del self._world.lanes[key]

    def save(self, number: int, name: str, tensors: dict[str, Tensor], notes: dict[str, Any]) -> None:
        assert self._world.folder is not None
        self.report(write_part(self._world.folder, (number, name, tensors, notes)))

    def report(self, message: Any) -> None:
        self._world.soon(lambda: self._world.coordinator.from_shard(message))
