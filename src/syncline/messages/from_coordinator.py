"""What the coordinator tells learners and shards; and shards each other outside the log.

`handle`, `lane` and `desk` are the engine's own, and added by it: opaque to roles.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from syncline.dial import Sync
from syncline.messages.to_coordinator import Counts, OpenLoader
from syncline.protocols.epoch_positions import Standing
from syncline.protocols.meetings import MeetingPlace
from syncline.protocols.sequence import Account
from syncline.table.checkpoint_content import Content, Source
from syncline.table.layout import Layout
from syncline.table.optimizer_template import OptimizerTemplate

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
    """Cut a checkpoint at the next version; or `now`, in the middle of a round, because the run has failed."""

    now: bool = False


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
