"""What every engine is given and gives back: a run's specification, records and outcome.

Engines differ in how they run a `RunSpec`; `Outcome` and `History` are the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from syncline.dial import SANDBLASTER, Sync
from syncline.engines.simulated_times import SimulatedTimes
from syncline.learn.portion_worker import BatchPlan
from syncline.messages import Statistics
from syncline.protocols.lifecycle import Faults
from syncline.protocols.staleness import Staleness
from syncline.roles.checkpoint_manifest import EpochRecord as EpochRecord
from syncline.roles.checkpoint_manifest import Restored
from syncline.roles.run_plan import RunPlan, Seat

if TYPE_CHECKING:
    from syncline.engines.checkpoint_options import RunLock

Evaluate = Callable[[dict[str, Tensor]], dict[str, float]]
Callback = Callable[["EpochRecord"], bool | None]
Listener = Callable[[Any], None]  # gets Began, EpochRecord, Snapshot, Event, Logged and Clocks, as they come


@dataclass(frozen=True, slots=True)
class Task:
    """What a learner runs, after its session."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    keywords: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Storage:
    """Where a run's checkpoints are, and the one it goes on from."""

    folder: str | None = None  # of checkpoints
    keep: int = 2  # checkpoints
    lock: RunLock | None = None  # of the run folder, released with its record
    restored: Restored | None = None  # where the run goes on
    refused: Exception | None = None  # why this process cannot begin, where others must hear it


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """One run, as an engine gets it."""

    task: Task
    plan: RunPlan
    devices: tuple[str, ...] = ("cpu",)  # dealt out to learners in turn
    card: str | None = None  # the GPU that tables lie on
    group: int = 1  # processes of a learner
    cut: Any = None  # how its model is cut over them
    threads: int | None = None
    faults: Faults = Faults()  # noqa: RUF009 - frozen
    storage: Storage = Storage()
    batch: BatchPlan | None = None  # a batch method in place of folds (M18)
    evaluate: Evaluate | None = None
    callbacks: tuple[Callback, ...] = ()
    listeners: tuple[Listener, ...] = ()
    name: str = ""  # in process titles

    @property
    def sync(self) -> str:
        """In words."""
        return SANDBLASTER if self.batch is not None else str(self.plan.course)

    @property
    def processes(self) -> int:
        """Of all learners, to begin with."""
        return self.plan.learners * self.group

    def seat(self, rank: int) -> Seat:
        """What one learner knows."""
        first = rank * self.group
        devices = tuple(self.devices[(first + seat) % len(self.devices)] for seat in range(self.group))
        return Seat(
            plan=self.plan, rank=rank, device=devices[0], seats=self.group, devices=devices, cut=self.cut
        )


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
    simulated: SimulatedTimes | None = None  # where the time of a simulated run went

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
    deals_devices = False  # GPUs are those of other machines: "cuda" is one of the node's

    @abstractmethod
    def start(self, spec: RunSpec) -> Handle: ...
