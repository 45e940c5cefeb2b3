"""What learners and shards tell the coordinator, and it whoever started the run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from syncline.protocols.epoch_positions import Standing
from syncline.protocols.meetings import MeetingPlace
from syncline.protocols.sequence import Account
from syncline.protocols.staleness import Staleness
from syncline.table.checkpoints import Written
from syncline.table.layout import Layout
from syncline.table.optimizer_template import OptimizerTemplate, Options, PieceState

STREAM = (
    "stream"  # in place of a loader's policy: every learner reads its own share, of a size that nobody knows
)


# -- what is counted in a run ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Counts:
    """What the leading shard has counted, beside the tables' and loaders' own accounts."""

    examples: dict[int, int] = field(default_factory=dict)  # by table
    losses: dict[int, dict[int, list[float]]] = field(default_factory=dict)  # epoch -> rank -> [sum, count]
    steps: dict[int, int] = field(default_factory=dict)  # by rank


@dataclass(frozen=True, slots=True)
class TableStatistics:
    version: int
    gradients: int
    dropped: int
    examples: int
    staleness: Staleness
    waiting: dict[int, int]  # rank -> version it waits for (-1: for data)
    missing: list[int]  # ranks that the next lockstep update waits for
    pending: int


@dataclass(frozen=True, slots=True)
class ProcessStatistics:
    """One process of a run, or one simulated."""

    role: str  # "learner", "shard" or "evaluator"
    rank: int
    pid: int
    state: str  # "computing", "waits for version 7", "returned", "lost" …
    steps: int = 0
    loss: float | None = None
    machine: str = ""  # its name, where it is another than the caller's


@dataclass(frozen=True, slots=True)
class Statistics:
    number: int
    tables: dict[int, TableStatistics] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)  # rank -> gradients published
    losses: dict[int, float] = field(default_factory=dict)  # rank -> last loss
    processes: tuple[ProcessStatistics, ...] = ()
    refused: int = 0  # connections and frames on a cluster that were not the run's own, or no frames at all


# -- the coordinator to whoever started the run ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Checkpointed:
    """A checkpoint is complete (said by the coordinator), or failed."""

    number: int
    path: str
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Warned:
    """A warning for the user, given once for each cause; with `data`, once two learners report the same."""

    text: str
    cause: str
    data: tuple[int, str] | None = None  # a rank, and what identifies the data that its learner reads


# -- learners to the coordinator ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Open:
    """It calls `session.optimizer` for the table of this number; answered by Initialise or Opened."""

    table: int
    layout: Layout


@dataclass(frozen=True, slots=True)
class Initialised:
    """It has published the first values; answered by Opened."""

    table: int
    template: OptimizerTemplate


@dataclass(frozen=True, slots=True)
class OpenLoader:
    """It calls `session.loader`; answered by the parts of the `partition` policy."""

    loader: int
    size: int
    batch_size: int
    policy: str
    epochs: int | None

    def __str__(self) -> str:
        if self.policy == STREAM:
            return f"a stream in batches of {self.batch_size}"
        return f"{self.size} examples in batches of {self.batch_size} ({self.policy})"


@dataclass(frozen=True, slots=True)
class MeanOf:
    """`session.mean`: answered by the mean over live learners."""

    value: Tensor


@dataclass(frozen=True, slots=True)
class Closed:
    """Its function has come to its end, by itself: nobody told it to."""


@dataclass(frozen=True, slots=True)
class Log:
    metrics: dict[str, Any]


@dataclass(frozen=True, slots=True)
class LoadState:
    """A new optimizer state for the shards; answered when all have it."""

    table: int
    number: int
    options: Options
    state: dict[int, dict[str, Any]]
    whole: dict[str, Any] | None = None  # in place of them, for an optimizer that holds others


@dataclass(frozen=True, slots=True)
class AwaitState:
    """It has asked the shards for the optimizer's state; answered by the parts."""

    table: int
    number: int


@dataclass(frozen=True, slots=True)
class Rejoin:
    """The servers were started anew; it has so many tables and loaders open. Answered by Rejoined."""

    tables: int
    loaders: int


@dataclass(frozen=True, slots=True)
class AskDial:
    """It was told of a dial that it does not know; answered by the dial."""

    number: int


@dataclass(frozen=True, slots=True)
class Called:
    """It waits in a step, and was called; answered by Refused, or by None where others were meant."""


@dataclass(frozen=True, slots=True)
class Returned:
    """Its function returned."""

    value: Any
    problem: str = ""  # why the value is not here


@dataclass(frozen=True, slots=True)
class Raised:
    """Its function raised."""

    error: BaseException | None
    traceback: str


# -- shards to the coordinator -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StatePart:
    table: int
    number: int
    learner: int
    shard: int
    options: Options
    state: PieceState
    whole: dict[str, Any] | None = None  # the `state_dict` of an optimizer that holds others


@dataclass(frozen=True, slots=True)
class Loaded:
    """A state has come, to be loaded when the log says so."""

    table: int
    number: int
    learner: int
    shard: int


@dataclass(frozen=True, slots=True)
class LeftLoop:
    """A stop has unwound a learner's loop, and its function finishes; `again`: it went on with its loop nevertheless."""

    again: bool


@dataclass(frozen=True, slots=True)
class WeightsPart:
    """One shard's part of one version of one table."""

    tag: str
    table: int
    shard: int
    version: int
    segments: list[Tensor]
    buffers: list[Tensor] | None = None  # from the leading shard: mean over live learners
    own: Options = field(default_factory=list)  # of the groups, what the optimizer itself has changed
    others: list[Tensor] | None = (
        None  # from the leading shard, at the end: tensors of the model that no update changes
    )


@dataclass(frozen=True, slots=True)
class EpochEnd:
    """The version that folded the last example of an epoch (M10)."""

    loader: int
    epoch: int
    version: int
    examples: int
    loss: float
    losses: dict[int, float]  # by rank
    tables: int
    done: int  # epochs up to here, in order: this one may be done before an earlier one


@dataclass(frozen=True, slots=True)
class Clocks:
    """Vector clocks of updates, by request (R6): rows of version, rank, stamp, four bytes each."""

    rows: bytes


@dataclass(frozen=True, slots=True)
class Left:
    """What was lost with a learner: positions handed out again, and positions in gradients not yet folded."""

    learner: int
    rank: int
    back: int
    pending: int


@dataclass(frozen=True, slots=True)
class Cut:
    """A checkpoint was cut: the files that belong to it, and everything that is no tensor."""

    number: int
    files: list[str]
    accounts: dict[int, Account]
    standings: dict[int, Standing]
    counts: Counts
    failed: bool = False  # it was cut because the run has failed


@dataclass(frozen=True, slots=True)
class Save:
    """A file of a checkpoint, from a machine that does not see their folder."""

    number: int
    name: str
    tensors: dict[str, Tensor]
    notes: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Saved:
    """A file of a checkpoint is on the disk, or is not."""

    number: int
    name: str
    written: Written | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Met:
    """A meeting of these learners is over; with others, because their loops differ: who waits where."""

    learners: tuple[int, ...]
    others: dict[int, MeetingPlace] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reached:
    """The set number of updates is there."""

    version: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The leading shard has folded all there is."""

    statistics: Statistics


@dataclass(frozen=True, slots=True)
class ShardRaised:
    shard: int
    error: BaseException | None
    traceback: str
