"""What every engine is given and gives back: a run's specification, records and outcome.

Engines differ in how they run a `RunSpec`; `Outcome` and `History` are the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from syncline.dial import SANDBLASTER, Course, Sync
from syncline.engines.lock import RunLock
from syncline.engines.sim.account import Simulated
from syncline.learn.evaluating import BatchPlan
from syncline.learn.peers import PeerConfig
from syncline.learn.session import SessionConfig
from syncline.protocols.clocks import Staleness
from syncline.topology.messages import Statistics
from syncline.topology.parse import AllReduce
from syncline.topology.plan import Plan
from syncline.topology.restore import Restored

Evaluate = Callable[[dict[str, Tensor]], dict[str, float]]
Callback = Callable[["EpochRecord"], bool | None]
Listener = Callable[[Any], None]  # gets Began, EpochRecord, Snapshot, Event, Logged and Clocks, as they come


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """One run: what each learner executes, under which dial, on how many processes."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    keywords: dict[str, Any] = field(default_factory=dict)
    learners: int
    course: Course
    warm: int = 0
    shards: int
    fixed_shards: bool
    allreduce: AllReduce | None = None  # in place of servers
    batch: BatchPlan | None = None  # a batch method in place of folds (M18)
    joint_batch: int | None = None  # examples of one update, where known
    devices: tuple[str, ...]  # one per learner
    seed: int = 0
    threads: int | None = None
    batch_size: int | None = None
    limit: int | None = None
    epochs: int | None = None
    clip_norm: float | None = None
    on_error: str = "raise"  # or "continue": an exception ends only its learner
    replace: bool = False  # lost learners are replaced
    patience: float | None = 60.0  # seconds without a word until a learner is said to hang
    kill_hung: bool = False
    folder: str | None = None  # of checkpoints
    lock: RunLock | None = None  # of the run folder, released with its record
    cut_every: int | None = None  # versions between checkpoints
    cut_seconds: float | None = None
    keep: int = 2  # checkpoints
    clocks: bool = False  # the run folder keeps the vector clock of every update
    recorded_elsewhere: bool = False  # another process has the run folder
    refused: Exception | None = None  # why this process cannot begin, where others must hear it
    restored: Restored | None = None  # where the run goes on
    evaluate: Evaluate | None = None
    callbacks: tuple[Callback, ...] = ()
    listeners: tuple[Listener, ...] = ()

    @property
    def sync(self) -> str:
        """In words."""
        return SANDBLASTER if self.batch is not None else str(self.course)

    @property
    def cuts(self) -> bool:
        """Checkpoints are written, be it by another process."""
        return self.folder is not None or self.recorded_elsewhere

    @property
    def delay(self) -> int:
        """Of the dial that runs furthest ahead."""
        return max(sync.delay for _, sync in self.course.dials)

    @property
    def kept(self) -> int:
        """Versions that stay readable: where the dial changes, up to `delay` updates follow at once while the slowest
        still reads the oldest."""
        return 2 * self.delay + 1 if self.delay else 0

    def session(self, rank: int) -> SessionConfig:
        """What the session of one learner knows."""
        return SessionConfig(
            rank=rank,
            learners=self.learners,
            sync=self.course.first,
            seed=self.seed,
            shards=self.shards,
            fixed_shards=self.fixed_shards,
            device=self.devices[rank % len(self.devices)],
            limit=self.limit,
            epochs=self.epochs,
            cuts=self.cuts,
            delay=self.delay,
        )

    def peer(self, rank: int) -> PeerConfig:
        """What the session of one learner among equals knows."""
        assert self.allreduce is not None
        return PeerConfig(
            rank=rank,
            learners=self.learners,
            course=self.course,
            topology=self.allreduce,
            seed=self.seed,
            device=self.devices[rank % len(self.devices)],
            limit=self.limit,
            clip_norm=self.clip_norm,
            joint_batch=self.joint_batch,
            snapshots=self.evaluate is not None,
            cuts=self.cuts,
            every=self.cut_every,
            seconds=self.cut_seconds,
        )

    def plan(self) -> Plan:
        """What the coordinator knows."""
        return Plan(
            course=self.course,
            learners=self.learners,
            seed=self.seed,
            cuts=self.cuts,
            every=self.cut_every,
            clocks=self.clocks,
            warm=self.warm,
            batch_size=self.batch_size,
            limit=self.limit,
            clip_norm=self.clip_norm,
            snapshots=self.evaluate is not None,
        )


@dataclass(slots=True, kw_only=True)
class EpochRecord:
    """One epoch, at the version that folded its last example (M10)."""

    epoch: int
    version: int
    seconds: float
    examples: int
    loss: float
    losses: dict[int, float]
    metrics: dict[str, float] = field(default_factory=dict)
    notes: dict[str, float] = field(
        default_factory=dict
    )  # of a batch method's iteration: step, evaluations …

    def __getitem__(self, key: str) -> Any:
        known = {**self.notes, **self.metrics}
        return known[key] if key in known else getattr(self, key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to a learner, a shard or the run."""

    seconds: float
    what: str
    rank: int | None = None
    kind: str = ""  # "lost", "raised", "killed", "joined", "replaced", "hangs", "checkpoint", "recovered" …
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Began:
    """A run begins; `now` is its clock, in seconds since then."""

    now: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The weights that an epoch's metrics are of."""

    record: EpochRecord
    state: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Logged:
    """What a learner gave to `session.log`."""

    rank: int
    seconds: float
    metrics: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sampled:
    """The account of a simulated run at some version: its listeners cannot ask by a clock of their own."""

    seconds: float
    statistics: Statistics


@dataclass(slots=True, kw_only=True)
class Outcome:
    """All that is left of a run."""

    returned: dict[int, Any] = field(default_factory=dict)
    tables: dict[int, tuple[int, dict[str, Tensor]]] = field(default_factory=dict)
    statistics: Statistics = field(default_factory=lambda: Statistics(-1))
    history: list[EpochRecord] = field(default_factory=list)
    logs: list[tuple[int, float, dict[str, Any]]] = field(default_factory=list)  # (rank, seconds, metrics)
    events: list[Event] = field(default_factory=list)
    seconds: float = 0.0
    began: float = 0.0  # seconds of a simulated run before it went on from a checkpoint
    interrupted: bool = False
    signal: int = 0  # that ended it, where another process heard it
    simulated: Simulated | None = None  # where the time of a simulated run went

    @property
    def staleness(self) -> Staleness:
        table = self.statistics.tables.get(0)
        return table.staleness if table else Staleness(gradients=0, mean=0.0, max=0, histogram={})


class Handle(ABC):
    """A run in progress."""

    @abstractmethod
    def wait(self, timeout: float | None = None) -> Outcome:
        """Block until the run has ended; raises what went wrong."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """It has ended."""

    @abstractmethod
    def stop(self) -> None:
        """End the run soon; learners finish the step they are in."""

    def interrupt(self, signal: int) -> None:
        """The same, because of a signal; called in its handler."""
        self.stop()

    @abstractmethod
    def end(self, seconds: float) -> None:
        """Wait so long for a run that was stopped, then end it in the middle; nothing of it goes on afterwards."""

    @abstractmethod
    def add_learners(self, count: int) -> None:
        """More learners join the run."""

    @abstractmethod
    def change(self, sync: Sync) -> None:
        """Another dial, from the next version on."""

    @abstractmethod
    def statistics(self) -> Statistics: ...


class Engine(ABC):
    """Something that can run a `RunSpec`."""

    virtual = False  # its seconds are not the machine's, and its runs tell listeners how they stand
    cluster_name: str | None = None  # of the simulated one

    @abstractmethod
    def start(self, spec: RunSpec) -> Handle: ...
