"""What stands for a model, its data and its gradients where only their sizes matter (timing only).

The learners, shards, protocols and network of any simulated run, without tensors. Tests compare the times with those of runs with
real gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

from syncline import messages as m
from syncline.errors import UsageError
from syncline.messages import log
from syncline.ports import Draft, Portion, Reading, ServerPort, Serving
from syncline.roles.server import LogApplier, ServerRole
from syncline.sim.batched.lazy_gradients import Own, Promise, Version
from syncline.sim.builtin_learner import Builtin
from syncline.sim.builtin_replica import PromisedReplica
from syncline.sim.owned_memory import Traffic
from syncline.sim.simulation import Simulation
from syncline.table.layout import LINE, Flat, Layout, Part


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """All that a timing knows of a model and its data."""

    parameters: int
    examples: int  # of an epoch
    itemsize: int = 4  # bytes of a parameter

    def __post_init__(self) -> None:
        for name in ("parameters", "examples", "itemsize"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(f"timing: {name} must be a whole number of at least 1, got {value!r}")

    def part_bytes(self, shards: int) -> list[int]:
        """Cut as the table of one flat tensor is."""
        size = self.parameters * self.itemsize
        cuts = ((size * index // shards + LINE // 2) // LINE * LINE for index in range(1, shards))
        return [high - low for low, high in pairwise([0, *(min(size, cut) for cut in cuts), size])]


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedPlan:
    """Stands for `learn.training.Training`."""

    sizes: Sizes
    batch_size: int
    epochs: int | None
    policy: str = "ledger"


class SizedLayout:
    """Stands for a layout, and for a table's memory: how many bytes each shard has, and no tensors."""

    def __init__(self, part_bytes: list[int]) -> None:
        self.layout = self
        self.shards, self.part_bytes = len(part_bytes), part_bytes
        self.parameters = self.buffers = Flat(())
        self.aliases = ()
        self.parts = (Part((), ()),) * self.shards

    def difference(self, other: SizedLayout) -> str | None:
        return (
            None if self.part_bytes == other.part_bytes else f"{self.part_bytes} against {other.part_bytes}"
        )


class SizedLane(Traffic):
    """Slots without memory."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.slots = range(slots)


class SizedSharedModel:
    """Stands for a workshop."""

    def __init__(self, plan: SizedPlan, shards: int) -> None:
        self.plan = plan
        self.layout = SizedLayout(plan.sizes.part_bytes(shards))
        self.size, self.ahead = plan.sizes.examples, 0
        self.template = object()


OnUpdate = Callable[[int, float, float], None]  # version, seconds, mean staleness of its gradients
PROMISE = cast(Promise, type("Nothing", (), {"loss": float("nan")})())
WEIGHTS = cast(Version, object())


class SizedReplica(PromisedReplica):
    """Of a table that has no weights."""

    def _initialise(self, answer: m.Initialise) -> None:
        pass

    def _begin(self, opened: m.Opened) -> None:
        pass

    def fill(self, draft: Draft) -> list[bool]:
        return []

    def add(self, draft: Draft, *, first: bool) -> None:
        pass

    def added(self) -> list[bool]:
        return []

    def move(self, rate: float) -> None:
        pass

    def seal(self, draft: Draft) -> int:
        return 0

    def _whole(self, number: int) -> Version:
        return WEIGHTS


class SizedLearner(Builtin):
    """A built-in learner that computes nothing."""

    def _make_own(self) -> Own:
        return cast(Own, None)

    def _make_replica(self) -> PromisedReplica:
        return SizedReplica(self)

    def _promise(self, table: PromisedReplica, portion: Portion, parts: int) -> Promise:
        return PROMISE


class SizedLogApplier(LogApplier):
    """Carries out the log on shards that have no weights: only what it costs, and who goes on."""

    def __init__(self, port: ServerPort) -> None:
        super().__init__(port)
        self._lockstep = False
        self._rounds: Counter[int] = Counter()  # iteration -> gradients taken
        self._shards_of: dict[int, int] = {}

    def make_table(self, make: m.MakeTable) -> None:
        if self._port.shard < make.layout.shards:
            self._shards_of[make.table] = make.layout.shards
            self._turn(make.table, make.dial)

    def _turn(self, table: int, dial: int) -> None:
        self._dial[table] = dial
        self._lockstep = self.dials[dial].lockstep

    def replay(self, entry: log.Entry) -> None:
        if isinstance(entry, log.Leave) or entry.table not in self._shards_of:
            return
        elif isinstance(entry, log.Take):
            self._take_sized(entry)
        elif isinstance(entry, log.Fold):
            self._fold_sized(entry)
        elif isinstance(entry, log.Release):
            reading = Reading(entry.version, self._dial[entry.table], entry.keep)
            self._port.release(entry.table, entry.learner, entry.number, reading)
        elif isinstance(entry, log.Free):
            self._port.release(entry.table, entry.learner, entry.number, None)
        elif isinstance(entry, log.Change):
            self._turn(entry.table, entry.dial)
        elif isinstance(entry, log.Finish):
            self._port.tell(m.WeightsPart("final", entry.table, self._port.shard, entry.version, []))

    def _take_sized(self, entry: log.Take) -> None:
        if self._lockstep:
            self._rounds[entry.iteration] += 1
        elif not (entry.alone and entry.weight == 1.0):
            self._port.spend(Serving(log.Take, entry.table))
        self._port.release(entry.table, entry.learner, entry.number, None)

    def _fold_sized(self, entry: log.Fold) -> None:
        added = self._rounds.pop(entry.iteration, 0) if self._lockstep else 0
        if added > 1:
            self._port.spend(Serving(log.Take, entry.table, added))
        self._port.spend(Serving(log.Fold, entry.table))


class SizedSimulation(Simulation):
    """A simulated run of sizes."""

    on_update: OnUpdate | None = None

    def make_workshop(self, ways: Any) -> tuple[Any, str | None]:
        return SizedSharedModel(self.spec.task.arguments[0], self.spec.plan.topology.shards), None

    def make_table(self, layout: Layout) -> Any:
        return layout

    def make_lane(self, layout: Layout) -> Any:
        return SizedLane(max(2, self.spec.plan.delay + 1))

    def make_role(self, port: ServerPort) -> ServerRole:
        return ServerRole(port, SizedLogApplier(port))

    def make_learner(self, learner: int, rank: int) -> Builtin:
        assert self.workshop is not None
        return SizedLearner(self, learner, rank, self.workshop)

    def fail(self, error: BaseException) -> None:
        """Nobody's own code runs here: what goes wrong is raised where it happens."""
        raise error

    def _run(self) -> None:
        self.clock.run(self.live)
        super()._run()

    def folded(self) -> None:
        """The first table has another version; nobody looks at samples on the way."""
        self.version += 1
        if self.on_update is not None:
            self.on_update(self.version, self.clock.now, self.servers[0].role.leader.last_staleness(0))
        if self.script.faults:
            version = self.version
            self.clock.at(self.clock.now, lambda: self.script.reached(version, self.play))
