"""Timing only: how long a run would take, from sizes alone, with any number of learners and parameters.

No gradients and no model; learners, shards, protocols, ledger and network are those of any simulated run, without tensors. Tests
compare the times with those of runs with real gradients. Not responsible for what the learners would learn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

from syncline import messages as m
from syncline.cluster import Cluster
from syncline.dial import Course
from syncline.engines.run import EpochRecord, Event, RunSpec, Task
from syncline.engines.simulated_times import LearnerTimes
from syncline.errors import UsageError
from syncline.learn.server_session import check_batches, check_whole
from syncline.learn.session import check_policy
from syncline.messages import log
from syncline.ports import Draft, Portion, Reading, ServerPort, Serving
from syncline.protocols.staleness import Staleness
from syncline.roles.run_plan import RunPlan
from syncline.roles.server import LogApplier, ServerRole
from syncline.sim.batched.lazy_gradients import Own, Promise, Version
from syncline.sim.builtin_learner import Builtin, PromisedReplica
from syncline.sim.fault_player import Script, check_script
from syncline.sim.garbage_collection import YOUNG, calm_collector
from syncline.sim.network import SimNetwork
from syncline.sim.owned_memory import Traffic
from syncline.sim.simulation import Simulation
from syncline.table.layout import LINE, Flat, Layout, Part
from syncline.topologies import Servers

OBJECTS = 200  # that a learner has, at most
OnUpdate = Callable[[int, float, float], None]  # version, seconds, mean staleness of its gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What a run of these sizes would do, in virtual seconds."""

    seconds: float
    updates: int
    gradients: int  # folded
    dropped: int
    examples: int  # in folded gradients
    staleness: Staleness
    times: LearnerTimes  # of all learners together
    cards: dict[int, tuple[float, float]]  # machine -> share of the time that its card sends, receives
    moved: int  # bytes between machines
    events: int  # of the clock's queue; over all-reduce computations and rings
    history: list[EpochRecord]
    happened: list[Event] = field(default_factory=list)  # by the script, and its lines that were not played

    @property
    def throughput(self) -> float:
        """Examples per second."""
        return self.examples / self.seconds if self.seconds else 0.0

    @property
    def overlap(self) -> float:
        """Compute / (compute + visible communication), over all learners (R8)."""
        return self.times.overlap

    @property
    def busiest(self) -> tuple[int, float]:
        """The machine whose card is used most, and its share of the time in that direction; shards' are -1, -2, …"""
        shares = ((machine, max(ways)) for machine, ways in self.cards.items())
        return max(shares, key=lambda pair: pair[1], default=(0, 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class SoFar:
    """How far a timing is."""

    share: float  # of its length, 0 to 1
    seconds: float  # virtual
    updates: int


Look = Callable[[], SoFar]  # cheap, from any thread
Follow = Callable[[Look], None]  # gets it before the timing begins


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRun:
    """What is timed, all that is known of a model and its data; stands for `learn.train_and_evaluate.Training`, too.

    `on_update` gets each version, `follow` a function that says how far it is.
    """

    cluster: Cluster
    course: Course
    parameters: int
    examples: int  # of an epoch
    learners: int
    batch_size: int
    itemsize: int = 4  # bytes of a parameter
    epochs: int | None = None  # it ends after epochs, updates or virtual seconds; one of them
    steps: int | None = None
    seconds: float | None = None
    policy: str = "ledger"
    warm: int = 0
    seed: int = 0
    on_update: OnUpdate | None = None
    follow: Follow | None = None

    def __post_init__(self) -> None:
        for name in ("parameters", "examples", "itemsize"):
            check_whole(f"timing: {name}", getattr(self, name))
        lengths = {"epochs": self.epochs, "steps": self.steps, "seconds": self.seconds}
        given = {name: value for name, value in lengths.items() if value is not None}
        if len(given) != 1:
            raise UsageError(f"timing: give one of epochs=, steps= or seconds=, got {given or 'none'}")
        if self.seconds is None:
            check_whole(*given.popitem())
        elif not self.seconds > 0:
            raise UsageError(f"timing: seconds must be > 0, got {self.seconds!r}")
        check_whole("learners", self.learners)
        check_batches(self.examples, self.batch_size)
        check_policy(self.policy)

    def check_dials(self) -> None:
        for _, dial in self.course.dials:
            dial.check(self.learners, self.batch_size)

    def part_bytes(self, shards: int) -> list[int]:
        """Cut as the table of one flat tensor is."""
        size = self.parameters * self.itemsize
        cuts = ((size * index // shards + LINE // 2) // LINE * LINE for index in range(1, shards))
        return [high - low for low, high in pairwise([0, *(min(size, cut) for cut in cuts), size])]

    def epoch(self, epoch: int, version: int, seconds: float, examples: int) -> EpochRecord:
        """One that is done; nothing is known of what was learned."""
        return EpochRecord(
            epoch=epoch, version=version, seconds=seconds, examples=examples, loss=float("nan"), losses={}
        )

    def begins(self, stands: Callable[[], tuple[int, float, int]]) -> None:
        """`stands`: updates, virtual seconds and examples so far."""

        def look() -> SoFar:
            updates, seconds, examples = stands()
            pairs = ((updates, self.steps), (seconds, self.seconds), (examples / self.examples, self.epochs))
            share = next(done / whole for done, whole in pairs if whole is not None)
            return SoFar(share=min(1.0, share), seconds=seconds, updates=updates)

        if self.follow is not None:
            self.follow(look)


# -- what stands for a model, its data and its gradients where only their sizes matter -------------------------


class SizedLayout:
    """Stands for a layout, and for a table's memory: how many bytes each shard has, and no tensors."""

    def __init__(self, part_bytes: list[int]) -> None:
        self.layout = self
        self.shards, self.part_bytes = len(part_bytes), part_bytes
        self.parameters = self.buffers = self.others = Flat(())
        self.keys, self.extra = (), b""
        self.parts = (Part((), ()),) * self.shards

    def difference(self, other: SizedLayout) -> str | None:
        return (
            None if self.part_bytes == other.part_bytes else f"{self.part_bytes} against {other.part_bytes}"
        )


class SizedSharedModel:
    """Stands for a workshop."""

    def __init__(self, plan: TimedRun, shards: int) -> None:
        self.plan = plan
        self.layout = SizedLayout(plan.part_bytes(shards))
        self.size, self.ahead = plan.examples, 0
        self.template = object()


PROMISE = cast(Promise, type("Nothing", (), {"loss": float("nan")})())
WEIGHTS = cast(Version, object())


class SizedReplica(PromisedReplica):
    """Of a table that has no weights."""

    def _begin(self, answer: m.Initialise | m.Opened) -> None:
        pass

    def fill(self, draft: Draft) -> list[bool]:
        return []

    def add(self, draft: Draft, *, first: bool) -> None:
        pass

    def added(self) -> list[bool]:
        return []

    def move(self, rate: float) -> None:
        pass

    def seal(self, draft: Draft, said: Any, *, keep: bool) -> tuple[tuple[int, int, int], int, bytes, Any]:
        return self._learner.take_usage(), 0, b"", said

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
            if self._lockstep:
                self._rounds[entry.iteration] += 1
            elif not (entry.alone and entry.weight == 1.0):
                self._port.spend(Serving(log.Take, entry.table))
            self._port.release(entry.table, entry.learner, entry.number, None)
        elif isinstance(entry, log.Fold):
            added = self._rounds.pop(entry.iteration, 0) if self._lockstep else 0
            if added > 1:
                self._port.spend(Serving(log.Take, entry.table, added))
            self._port.spend(Serving(log.Fold, entry.table))
        elif isinstance(entry, log.Release):
            reading = Reading(entry.version, self._dial[entry.table], entry.keep)
            self._port.release(entry.table, entry.learner, entry.number, reading)
        elif isinstance(entry, log.Free):
            self._port.release(entry.table, entry.learner, entry.number, None)
        elif isinstance(entry, log.Change):
            self._turn(entry.table, entry.dial)
        elif isinstance(entry, log.Finish):
            self._port.tell(m.WeightsPart("final", entry.table, self._port.shard, entry.version, []))


class SizedSimulation(Simulation):
    """A simulated run of sizes."""

    on_update: OnUpdate | None = None

    def make_workshop(self, ways: Any) -> tuple[Any, str | None]:
        return SizedSharedModel(self.spec.task.arguments[0], self.spec.plan.topology.shards), None

    def make_table(self, layout: Layout) -> Any:
        return layout

    def make_lane(self, layout: Layout) -> Any:
        return Traffic(max(2, self.spec.plan.delay + 1), layout.shards, self.clock)

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
        super().folded()
        if self.on_update is not None:
            staleness = self.servers[0].role.leader.sequences[0].clock.last_update
            self.on_update(self.version, self.clock.now, staleness)

    def sample(self) -> None:
        """Nobody looks on the way."""


# -- over servers ------------------------------------------------------------------------------------------------


def time_servers(run: TimedRun, shards: int, script: Script) -> Timing:
    """Over servers."""
    run.check_dials()
    spec = RunSpec(
        task=Task(time_servers, (run,)),
        plan=RunPlan(
            course=run.course,
            learners=run.learners,
            topology=Servers(shards, True),
            seed=run.seed,
            warm=run.warm,
            batch_size=run.batch_size,
            limit=run.steps,
            epochs=run.epochs,
        ),
    )
    _check_script(script, spec, run.cluster)
    with calm_collector(max(YOUNG, OBJECTS * run.learners)):  # no tensors: what waits for it is small
        world = SizedSimulation(spec, run.cluster, script=script, seed=run.seed)
        world.on_update = run.on_update
        if run.seconds is not None:
            world.clock.at(run.seconds, world.ask_stop)
        run.begins(
            lambda: (world.version, world.clock.now, world.servers[0].role.leader.counters.examples[0])
        )
        outcome = world.run()
    table, simulated = outcome.statistics.tables[0], world.simulated()
    return Timing(
        seconds=outcome.seconds,
        updates=table.version,
        gradients=table.gradients,
        dropped=table.dropped,
        examples=table.examples,
        staleness=table.staleness,
        times=simulated.total,
        cards=shares(world.network, outcome.seconds),
        moved=simulated.moved,
        events=simulated.events,
        history=outcome.history,
        happened=outcome.events,
    )


def _check_script(script: Script, spec: RunSpec, cluster: Cluster) -> None:
    check_script(script, spec, cluster)
    homes = {cluster.machine_of_shard(shard) for shard in range(spec.plan.topology.shards)}
    for fault in script.faults:
        if fault.action == "kill" and (
            fault.role == "shard" or (fault.role == "node" and fault.rank in homes)
        ):
            raise UsageError(
                f"script, '{fault.text}': a timing has no checkpoints to go back to; pause the shard, or run with gradients"
            )


def shares(network: SimNetwork, seconds: float) -> dict[int, tuple[float, float]]:
    """Of the time that each machine's card sends and receives."""
    whole = seconds or 1.0
    return {machine: (out / whole, into / whole) for machine, (out, into) in network.cards().items()}
