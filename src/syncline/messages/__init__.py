"""What the parties of a run say to each other outside the fast path: small classes, one meaning each. Engines carry them.

What learners tell the leading shard is in `to_leader`, its decisions in `log`. `handle`, `lane` and `desk` are the engine's own, and
added by it: opaque to roles.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from syncline.dial import Sync
from syncline.protocols.epoch_positions import Standing
from syncline.protocols.meetings import MeetingPlace
from syncline.protocols.sequence import Account
from syncline.protocols.staleness import Staleness
from syncline.table.checkpoints import Content, Source, Written
from syncline.table.layout import Layout
from syncline.table.optimizer_template import OptimizerTemplate, Options, PieceState

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
    """For the user, once for each cause."""

    text: str
    cause: str


STREAM = (
    "stream"  # in place of a loader's policy: every learner reads its own share, of a size that nobody knows
)


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
class WeightsPart:
    """One shard's part of one version of one table."""

    tag: str
    table: int
    shard: int
    version: int
    segments: list[Tensor]
    buffers: list[Tensor] | None = None  # from the leading shard: mean over live learners
    own: Options = field(default_factory=list)  # of the groups, what the optimizer itself has changed


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


# -- the coordinator to learners -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Initialise:
    """You are the lowest live rank: publish the table's first values, then say `Initialised`."""

    table: int
    layout: Layout
    handle: Any = None
    lane: Any = None


@dataclass(frozen=True, slots=True)
class Personal:
    """What a checkpoint holds of one rank."""

    steps: int = 0
    random: bytes = b""  # states of its random generators
    buffers: dict[int, list[Tensor]] = field(default_factory=dict)  # by table


@dataclass(frozen=True, slots=True)
class Opened:
    """The table is there; ticket 0 is released when you may read."""

    table: int
    layout: Layout
    personal: Personal | None = None  # of a run that goes on
    handle: Any = None
    lane: Any = None


@dataclass(frozen=True, slots=True)
class Rejoined:
    """You are among the learners again: what you do from here on reaches the new servers."""

    tables: list[Opened]
    desk: Any = None


@dataclass(frozen=True, slots=True)
class Stop:
    """To all: the run ends."""


@dataclass(frozen=True, slots=True)
class Renewed:
    """To all: the servers are new ones, whatever was asked of the old ones is void."""


@dataclass(frozen=True, slots=True)
class Call:
    """To all: who waits in a step asks why (`Called`)."""


@dataclass(frozen=True, slots=True)
class Stale:
    """The servers were started anew since: rejoin, then ask again."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The request fails with this error in the learner."""

    error: Exception


# -- the coordinator to shards, and shards to each other outside the log ---------------------------------------


@dataclass(frozen=True, slots=True)
class Dial:
    """A dial by its number; in force from that epoch of the first loader on, None: at once."""

    number: int
    sync: Sync
    epoch: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MakeTable:
    table: int
    layout: Layout
    template: OptimizerTemplate
    dial: int  # the number of the dial to begin with
    initial: dict[int, int]  # learner -> rank, of those that the first fold waits for
    learners: int
    warm: int
    batch_size: int | None
    limit: int | None
    clip_norm: float | None
    source: Source | None = None  # of a run that goes on: each shard reads its part itself
    content: Content | None = None  # what it has read there; added by the engine
    first: bool = False  # the first weights are written down, for shards that are lost before a checkpoint
    account: Account = field(default_factory=Account)
    handle: Any = None
    tree: bool = False  # gradients come in sums


@dataclass(frozen=True, slots=True)
class NodesMoved:
    """A node of a tree is lost: those below it have another above them, and publish again what was under way."""

    lost: int | None = None  # its name, where nothing that it has sent may be read any more


@dataclass(frozen=True, slots=True)
class JoinTable:
    table: int
    learner: int
    rank: int
    buffers: list[Tensor] | None = None  # of a run that goes on
    first: bool = False  # what it has published already are the table's first values
    lane: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MakeLoader:
    opened: OpenLoader
    dial: int
    parts: int  # of the `partition` policy
    snapshot: bool
    standing: Standing | None = None


@dataclass(frozen=True, slots=True)
class JoinLoader:
    """These join at once: a joint round is cut for all that the ledger knows."""

    loader: int
    learners: dict[int, int]  # learner -> rank


@dataclass(frozen=True, slots=True)
class Leave:
    learner: int
    rank: int
    lost: bool = False
    closed: bool = False  # its function has come to its end by itself


@dataclass(frozen=True, slots=True)
class Resume:
    """Counts of a run that goes on, how often checkpoints are cut, and who begins."""

    every: int | None = None  # versions
    cuts: bool = False
    counts: Counts = field(default_factory=Counts)
    initial: tuple[int, ...] = ()  # learners that all wait for in the beginning
    back: bool = False  # these are in the middle of their loops: the servers were lost
    clocks: bool = False  # vector clocks of updates are reported


@dataclass(frozen=True, slots=True)
class Opening:
    """Who waits from now on for others to open the same table or loader, or (None) no more; counts what was told of it."""

    number: int
    learners: dict[int, MeetingPlace | None]


@dataclass(frozen=True, slots=True)
class Standstill:
    """All of these wait, those that open something as that number said. A question of the leading shard's; the answer, if it is so."""

    number: int
    learners: set[int]


@dataclass(frozen=True, slots=True)
class AskCut:
    """A checkpoint as soon as can be."""


@dataclass(frozen=True, slots=True)
class CutDone:
    """The last checkpoint is on the disk, or failed: there may be another."""


@dataclass(frozen=True, slots=True)
class Finish:
    """All learners have left: fold what is there and report; with `cut` after a last checkpoint."""

    cut: bool = True


@dataclass(frozen=True, slots=True)
class Norms:
    """All shards' gradient norms of one fold."""

    table: int
    version: int
    norms: list[Tensor]


@dataclass(frozen=True, slots=True)
class AskStatistics:
    number: int
