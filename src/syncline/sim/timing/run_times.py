"""Timing only: how long a run would take, from sizes alone, with any number of learners and parameters.

No gradients and no model; learners, shards, protocols, ledger and network are those of any simulated run. Not responsible for
what the learners would learn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from syncline.cluster.record import Cluster
from syncline.dial import Course
from syncline.engines.run import EpochRecord, Event, RunSpec, Task
from syncline.engines.simulated_times import LearnerTimes
from syncline.errors import UsageError
from syncline.learn.server_session import check_batches, check_policy, check_whole
from syncline.protocols.staleness import Staleness
from syncline.roles.run_plan import RunPlan
from syncline.sim.fault_player import Script, check_script
from syncline.sim.garbage_collection import YOUNG, calm_collector
from syncline.sim.network import SimNetwork
from syncline.sim.timing.sized_simulation import OnUpdate, SizedPlan, SizedSimulation, Sizes
from syncline.topologies import Servers

OBJECTS = 200  # that a learner has, at most


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
class Length:
    """When a timing ends: after epochs, updates or virtual seconds; one of them."""

    epochs: int | None = None
    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        given = {name: value for name in self.__slots__ if (value := getattr(self, name)) is not None}
        if len(given) != 1:
            raise UsageError(f"timing: give one of epochs=, steps= or seconds=, got {given or 'none'}")
        for name in ("epochs", "steps"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name))
        if self.seconds is not None and not self.seconds > 0:
            raise UsageError(f"timing: seconds must be > 0, got {self.seconds!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRun:
    """What is timed; `on_update` gets each version, `follow` a function that says how far it is."""

    cluster: Cluster
    sizes: Sizes
    course: Course
    length: Length
    learners: int
    batch_size: int
    policy: str = "ledger"
    warm: int = 0
    seed: int = 0
    on_update: OnUpdate | None = None
    follow: Follow | None = None

    def __post_init__(self) -> None:
        check_whole("learners", self.learners)
        check_batches(self.sizes.examples, self.batch_size)
        check_policy(self.policy)

    def check_dials(self) -> None:
        for _, dial in self.course.dials:
            dial.check(self.learners, self.batch_size)

    def epoch(self, epoch: int, version: int, seconds: float, examples: int) -> EpochRecord:
        """One that is done; nothing is known of what was learned."""
        return EpochRecord(
            epoch=epoch, version=version, seconds=seconds, examples=examples, loss=float("nan"), losses={}
        )

    def begins(self, stands: Callable[[], tuple[int, float, int]]) -> None:
        """`stands`: updates, virtual seconds and examples so far."""
        if self.follow is not None:
            self.follow(lambda: self._so_far(*stands()))

    def _so_far(self, updates: int, seconds: float, examples: int) -> SoFar:
        length, epochs = self.length, examples / self.sizes.examples
        pairs = ((updates, length.steps), (seconds, length.seconds), (epochs, length.epochs))
        share = next(done / whole for done, whole in pairs if whole is not None)
        return SoFar(share=min(1.0, share), seconds=seconds, updates=updates)


def time_servers(run: TimedRun, shards: int, script: Script) -> Timing:
    """Over servers."""
    run.check_dials()
    length, seed = run.length, run.seed
    sized = SizedPlan(sizes=run.sizes, batch_size=run.batch_size, epochs=length.epochs, policy=run.policy)
    spec = RunSpec(
        task=Task(time_servers, (sized,)),
        plan=RunPlan(
            course=run.course,
            learners=run.learners,
            topology=Servers(shards, True),
            seed=seed,
            warm=run.warm,
            batch_size=run.batch_size,
            limit=length.steps,
            epochs=length.epochs,
        ),
    )
    _check_script(script, spec, run.cluster)
    with calm_collector(max(YOUNG, OBJECTS * run.learners)):  # no tensors: what waits for it is small
        world = SizedSimulation(spec, run.cluster, script=script, seed=seed)
        world.on_update = run.on_update
        if length.seconds is not None:
            world.clock.at(length.seconds, world.ask_stop)
        run.begins(lambda: (world.version, world.clock.now, world.servers[0].role.examples(0)))
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
