"""The simulated coordinator's port: its effects as events of virtual time; and what a checkpoint holds beside the run itself, its moment.

With it a run goes on to the same bits: the run that wrote it does so from it too, as a resumed one would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from syncline import messages as m
from syncline.engines.run import RunSpec
from syncline.ports import CoordinatorPort
from syncline.roles.checkpoint_manifest import Seconds, decoded, restored
from syncline.sim.random_states import OUTSIDE
from syncline.table.checkpoints import Written, find

if TYPE_CHECKING:
    from syncline.sim.simulation import Simulation


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Where a simulated run stands."""

    learners: int  # the run was started with
    seconds: Seconds = 0.0
    ranks: list[int] = field(default_factory=list)  # that live
    last_rank: int = -1  # the highest that was ever given
    returned: list[int] = field(default_factory=list)  # ranks
    losses: list[tuple[int, int]] = field(default_factory=list)  # (rank, in a row without a step)
    cut_asked: Seconds = 0.0
    played: list[str] = field(default_factory=list)  # lines of the script

    @classmethod
    def of(cls, spec: RunSpec) -> Moment:
        """Where this run begins: at a checkpoint's moment, unless it is to have another number of learners."""
        restored = spec.storage.restored
        simulated = restored is not None and restored.simulated is not None
        kept = decoded(restored.name, cls, restored.simulated) if restored is not None and simulated else None
        if kept is not None and kept.learners == spec.plan.learners and kept.ranks:
            return kept
        seconds = kept.seconds if kept is not None else 0.0
        return cls(learners=spec.plan.learners, seconds=seconds, ranks=list(range(spec.plan.learners)))


class SimCoordinator(CoordinatorPort):
    """The simulated coordinator's effects."""

    def __init__(self, world: Simulation) -> None:
        self._world, self.shards = world, world.spec.plan.topology.shards

    def reply(self, learner: int, message: Any) -> None:
        target, told = self._world.learners[learner], self._with_own(learner, message)
        self._world.soon_at(target, lambda: target.answer(told))

    def _with_own(self, learner: int, message: Any) -> Any:
        world = self._world
        if isinstance(message, m.Initialise):
            table = world.tables.setdefault(message.table, world.make_table(message.layout))
            lane = world.lanes[message.table, learner] = world.make_lane(message.layout)
            return replace(message, handle=table, lane=lane)
        if isinstance(message, m.Opened):
            return replace(
                message, handle=world.tables[message.table], lane=world.lanes[message.table, learner]
            )
        if isinstance(message, m.Rejoined):
            tables = [self._with_own(learner, opened) for opened in message.tables]
            return replace(message, tables=tables, desk=world.servers[0])
        return message

    def tell_shards(self, message: Any) -> None:
        if isinstance(message, m.MakeTable) and message.table == 0:
            self._world.version = message.account.version
        elif isinstance(message, m.JoinTable) and not message.first:
            memory = self._world.tables[message.table]
            self._world.lanes[message.table, message.learner] = self._world.make_lane(memory.layout)
        elif isinstance(message, m.Dial):
            self._world.dials[message.number] = message.sync
        for server in reversed(self._world.servers):
            self._world.soon(partial(server.handle, message))

    def announce(self, what: m.Stop | m.Renewed | m.Call) -> None:
        world = self._world
        if isinstance(what, m.Stop):
            world.supervision.stop()
            return
        for learner in world.live.values():
            world.soon_at(learner, learner.call if isinstance(what, m.Call) else learner.wake)

    def commit(
        self, number: int, manifest: dict[str, Any] | None, files: Sequence[Written], *, prune: bool = True
    ) -> bool:
        world = self._world
        exact = manifest is not None and world.goes_on()
        if manifest is not None:
            manifest["simulated"] = asdict(world.moment(exact=exact))
            world.streams.enter(OUTSIDE)  # listeners hear of it
        path = world.supervision.commit(number, manifest, files, prune=prune)
        if path is not None and exact:
            world.next = restored(find(path))
        return path is not None

    def tell(self, message: Any) -> None:
        self._world.streams.enter(OUTSIDE)
        self._world.recorder.emit(message)
