"""The simulated coordinator's port: its effects as events of virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from syncline import messages as m
from syncline.engines.files import commit
from syncline.engines.sim.memory import SimTable, Traffic
from syncline.engines.sim.states import OUTSIDE
from syncline.ports import CoordinatorPort
from syncline.table.checkpoints import Written, find
from syncline.table.layout import Layout
from syncline.topology.restore import restored

if TYPE_CHECKING:
    from syncline.engines.sim.server import SimServer
    from syncline.engines.sim.world import World


class SimCoordinator(CoordinatorPort):
    """The simulated coordinator's effects."""

    def __init__(self, world: World) -> None:
        self._world, self.shards = world, world.spec.plan.topology.shards

    def make_table(self, table: int, layout: Layout) -> SimTable:
        memory = self._world.tables[table] = self._world.make_table(layout)
        return memory

    def make_lane(self, table: int, learner: int, layout: Layout) -> Traffic:
        lane = self._world.lanes[table, learner] = self._world.make_lane(layout)
        return lane

    def reply(self, learner: int, message: Any) -> None:
        target = self._world.learners[learner]
        self._world.soon(lambda: target.answer(message))

    def tell_shards(self, message: Any) -> None:
        if isinstance(message, m.MakeTable) and message.table == 0:
            self._world.version = message.account.version
        elif isinstance(message, m.Dial):
            self._world.dials[message.number] = message.sync
        for server in reversed(self._world.servers):
            self._world.soon(lambda server=server: server.handle(message))  # type: ignore[misc]

    def fill_table(self, handle: SimTable, layout: Layout, values: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for view, value in zip(layout.parameters.views(handle.weights), values, strict=True):
                view.copy_(value)

    def read_table(self, handle: SimTable, layout: Layout) -> list[Tensor]:
        return [view.clone().cpu() for view in layout.parameters.views(handle.weights)]

    def reset_learners(self) -> None:
        for learner in self._world.live.values():
            self._world.soon(learner.wake)

    def call_learners(self) -> None:
        for learner in self._world.live.values():
            self._world.soon(learner.call)

    def new_desk(self, learner: int) -> SimServer:
        return self._world.servers[0]

    def commit(self, number: int, manifest: dict[str, Any], files: Sequence[Written]) -> bool:
        world = self._world
        assert world.folder is not None
        exact = world.goes_on()
        manifest["simulated"] = world.moment(exact=exact).record()
        done = commit(world.folder, number, manifest, files, world.spec.storage.keep)
        self.emit(done)
        if not done.problem:
            world.supervision.checkpointed(Path(done.path))
            if exact:
                world.next = restored(find(Path(done.path)))
        return not done.problem

    def abandon(self, number: int) -> None:
        assert self._world.folder is not None
        self._world.folder.abandon(number)

    def history(self) -> list[dict[str, Any]]:
        return self._world.recorder.history()

    def stop_learners(self) -> None:
        self._world.stop()

    def emit(self, record: Any) -> None:
        self._world.streams.enter(OUTSIDE)
        self._world.recorder.emit(record)
