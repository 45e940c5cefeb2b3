"""Timing only: how long a run would take, from sizes alone, with any number of learners and parameters.

No gradients and no model; learners, shards, protocols, ledger and network are those of any simulated run. Not responsible for
what the learners would learn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from syncline.cluster.record import Cluster
from syncline.dial import Course
from syncline.engines.run import EpochRecord, Event, Outcome, RunSpec, Task
from syncline.engines.simulated_times import LearnerTimes
from syncline.errors import UsageError
from syncline.learn.server_session import check_batches, check_policy, check_whole
from syncline.protocols.staleness import Staleness
from syncline.roles.run_plan import RunPlan
from syncline.sim.fault_player import Script, check_script
from syncline.sim.gc_during_run import YOUNG, calm_collector
from syncline.sim.timing.ring_times import Buckets, TimedRings, even_layers, run_rings
from syncline.sim.timing.sizes_only import OnUpdate, SizedPlan, SizedSimulation, Sizes
from syncline.sim.timing.tree_times import TimedTree
from syncline.topologies import AllReduce, Servers, Trees

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

    def so_far(self, *, updates: int, seconds: float, epochs: float) -> SoFar:
        """After so much."""
        pairs = ((updates, self.steps), (seconds, self.seconds), (epochs, self.epochs))
        share = next(done / whole for done, whole in pairs if whole is not None)
        return SoFar(share=min(1.0, share), seconds=seconds, updates=updates)


def time_run(
    cluster: Cluster,
    sizes: Sizes,
    course: Course,
    length: Length,
    *,
    learners: int,
    shards: int,
    batch_size: int,
    policy: str = "ledger",
    warm: int = 0,
    script: Script | None = None,
    seed: int = 0,
    on_update: OnUpdate | None = None,
    follow: Follow | None = None,
) -> Timing:
    """Run it in virtual time."""
    check_whole("learners", learners)
    check_batches(sizes.examples, batch_size)
    check_policy(policy)
    for _, dial in course.dials:
        dial.check(learners, batch_size)
    sized = SizedPlan(sizes=sizes, batch_size=batch_size, epochs=length.epochs, policy=policy)
    spec = RunSpec(
        task=Task(time_run, (sized,)),
        plan=RunPlan(
            course=course,
            learners=learners,
            topology=Servers(shards, True),
            seed=seed,
            warm=warm,
            batch_size=batch_size,
            limit=length.steps,
            epochs=length.epochs,
        ),
    )
    _check_script(script or Script(()), spec, cluster)
    with calm_collector(max(YOUNG, OBJECTS * learners)):  # no tensors: what waits for it is small
        world = SizedSimulation(spec, cluster, script=script, seed=seed)
        world.on_update = on_update
        if length.seconds is not None:
            world.clock.at(length.seconds, world.ask_stop)

        def look() -> SoFar:
            epochs = world.servers[0].role.examples(0) / sizes.examples
            return length.so_far(updates=world.version, seconds=world.clock.now, epochs=epochs)

        if follow is not None:
            follow(look)
        outcome = world.run()
    return _timing(world, outcome)


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


def _timing(world: SizedSimulation, outcome: Outcome) -> Timing:
    table = outcome.statistics.tables[0]
    simulated, seconds = world.simulated(), outcome.seconds
    cards = {
        machine: (sending / seconds, receiving / seconds) if seconds else (0.0, 0.0)
        for machine, (sending, receiving) in world.network.cards().items()
    }
    return Timing(
        seconds=seconds,
        updates=table.version,
        gradients=table.gradients,
        dropped=table.dropped,
        examples=table.examples,
        staleness=table.staleness,
        times=simulated.total,
        cards=cards,
        moved=simulated.moved,
        events=simulated.events,
        history=outcome.history,
        happened=outcome.events,
    )


def time_all_reduce(
    cluster: Cluster,
    sizes: Sizes,
    course: Course,
    length: Length,
    *,
    topology: AllReduce,
    layers: Sequence[int] | None,
    learners: int,
    batch_size: int,
    policy: str = "ledger",
    seed: int,
    follow: Follow | None = None,
) -> Timing:
    """The same over all-reduce: lockstep, without servers."""
    check_whole("learners", learners)
    check_batches(sizes.examples, batch_size)
    check_policy(policy)
    if len(course.dials) > 1:
        raise UsageError(f"timing over all-reduce takes one dial, got {course}")
    buckets = Buckets(cluster, learners, even_layers(sizes.parameters, sizes.itemsize, layers), topology)
    rings = TimedRings(cluster, buckets, course.first, learners, seed)

    def look() -> SoFar:
        epochs = rings.examples / sizes.examples
        return length.so_far(updates=rings.iterations, seconds=rings.seconds, epochs=epochs)

    if follow is not None:
        follow(look)
    history = run_rings(
        rings,
        examples=sizes.examples,
        batch_size=batch_size,
        epochs=length.epochs,
        steps=length.steps,
        seconds=length.seconds,
        policy=policy,
    )
    rings.flush()
    share = rings.busy / rings.seconds if rings.seconds else 0.0
    machines = {cluster.machine_of_learner(rank) for rank in range(learners)}
    return Timing(
        seconds=rings.seconds,
        updates=rings.iterations,
        gradients=rings.gradients,
        dropped=0,
        examples=rings.examples,
        staleness=rings.clock.account(),
        times=rings.times(),
        cards=dict.fromkeys(sorted(machines), (share, share)) if len(machines) > 1 else {},
        moved=buckets.moved * rings.iterations if len(machines) > 1 else 0,
        events=rings.iterations * (learners + len(buckets.seconds)),
        history=history,
    )


def time_tree(
    cluster: Cluster,
    sizes: Sizes,
    course: Course,
    length: Length,
    *,
    topology: Trees,
    learners: int,
    batch_size: int,
    policy: str = "ledger",
    warm: int = 0,
    seed: int = 0,
    on_update: OnUpdate | None = None,
    follow: Follow | None = None,
) -> Timing:
    """The same over a tree of servers."""
    check_whole("learners", learners)
    check_batches(sizes.examples, batch_size)
    if len(course.dials) > 1 or policy == "partition":
        what = f"the course '{course}'" if len(course.dials) > 1 else "policy='partition'"
        raise UsageError(f"timing over a tree takes one dial and data for whoever asks, got {what}")
    course.first.check(learners, batch_size)
    tree = TimedTree(
        cluster,
        sizes,
        course.first,
        topology,
        learners=learners,
        batch_size=batch_size,
        epochs=length.epochs,
        limit=length.steps,
        warm=warm,
        seed=seed,
    )
    tree.on_update = on_update
    if follow is not None:
        follow(
            lambda: length.so_far(
                updates=tree.sequence.version,
                seconds=tree.clock.now,
                epochs=tree.examples / sizes.examples,
            )
        )
    with calm_collector(max(YOUNG, OBJECTS * learners)):
        tree.run(length.seconds)
    seconds = tree.clock.now
    return Timing(
        seconds=seconds,
        updates=tree.sequence.version,
        gradients=tree.sequence.gradients,
        dropped=tree.sequence.dropped,
        examples=tree.examples,
        staleness=tree.sequence.clock.account(),
        times=tree.times(),
        cards={
            machine: (sending / seconds, receiving / seconds)
            for machine, (sending, receiving) in tree.network.cards().items()
        },
        moved=tree.network.moved,
        events=tree.clock.events,
        history=tree.history,
    )
