"""What learners, shards and the coordinator say to each other outside the fast path.

Plain records; engines carry them (`handle` fields are the engine's own, opaque here).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from syncline.dial import Sync
from syncline.protocols.clocks import Staleness
from syncline.table.layout import Layout
from syncline.table.template import OptimizerTemplate, Options, PieceState

# -- a learner to the coordinator --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Open:
    """It calls `session.optimizer` for the table of this number; answered by Initialise or Opened."""

    table: int
    layout: Layout


@dataclass(frozen=True, slots=True)
class Initialised:
    """It has written the first weights; answered by Opened."""

    table: int
    template: OptimizerTemplate


@dataclass(frozen=True, slots=True)
class OpenLoader:
    """It calls `session.loader`; answered by True."""

    loader: int
    size: int
    batch_size: int
    policy: str
    epochs: int | None


@dataclass(frozen=True, slots=True)
class MeanOf:
    """`session.mean`: answered by the mean over live learners."""

    index: int
    value: Any


@dataclass(frozen=True, slots=True)
class Log:
    metrics: dict[str, Any]


@dataclass(frozen=True, slots=True)
class LoadState:
    """A new optimizer state for the shards; answered by True when all have it."""

    table: int
    number: int
    options: Options
    state: dict[int, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class AwaitState:
    """It has asked the shards for the optimizer's state; answered by the parts."""

    table: int
    number: int


@dataclass(frozen=True, slots=True)
class Returned:
    """Its function returned."""

    value: Any


@dataclass(frozen=True, slots=True)
class Raised:
    """Its function raised."""

    error: BaseException | None
    traceback: str


@dataclass(frozen=True, slots=True)
class Lost:
    """Its process ended without a word (said by the engine)."""

    reason: str


# -- answers -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Initialise:
    """You are the lowest live rank: write the first weights."""

    handle: Any


@dataclass(frozen=True, slots=True)
class Opened:
    """The table is there; ticket 0 is released when you may read."""

    table: int
    layout: Layout
    handle: Any
    lane: Any


@dataclass(frozen=True, slots=True)
class Refused:
    """The request fails with this error in the learner."""

    error: Exception


# -- the coordinator to the shards ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MakeTable:
    table: int
    layout: Layout
    template: OptimizerTemplate
    sync: Sync
    initial: dict[int, int]  # learner -> rank
    batch_size: int | None
    limit: int | None
    clip_norm: float | None
    handle: Any


@dataclass(frozen=True, slots=True)
class JoinTable:
    table: int
    learner: int
    rank: int
    lane: Any


@dataclass(frozen=True, slots=True)
class MakeLoader:
    loader: int
    size: int
    batch_size: int
    policy: str
    epochs: int | None
    lockstep: bool
    learners: int
    snapshot: bool


@dataclass(frozen=True, slots=True)
class JoinLoader:
    """These join at once: a joint round is cut for all that the ledger knows."""

    loader: int
    learners: dict[int, int]  # learner -> rank


@dataclass(frozen=True, slots=True)
class Leave:
    learner: int
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Finish:
    """All learners have left: fold what is there and report."""


@dataclass(frozen=True, slots=True)
class Norms:
    """All shards' gradient norms of one fold."""

    table: int
    version: int
    norms: list[Tensor]


@dataclass(frozen=True, slots=True)
class AskStatistics:
    number: int


# -- shards to the coordinator -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StatePart:
    table: int
    number: int
    learner: int
    shard: int
    options: Options
    state: PieceState


@dataclass(frozen=True, slots=True)
class Loaded:
    table: int
    number: int
    learner: int


@dataclass(frozen=True, slots=True)
class WeightsPart:
    """One shard's part of one version of one table."""

    tag: str
    table: int
    shard: int
    version: int
    segments: list[Tensor]
    buffers: list[Tensor] | None = None  # from the leading shard: mean over live learners


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


@dataclass(frozen=True, slots=True)
class Reached:
    """The set number of updates is there."""

    version: int


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
class Statistics:
    number: int
    tables: dict[int, TableStatistics] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)  # rank -> gradients published
    losses: dict[int, float] = field(default_factory=dict)  # rank -> last loss


@dataclass(frozen=True, slots=True)
class Finished:
    """The leading shard has folded all there is."""

    statistics: Statistics


@dataclass(frozen=True, slots=True)
class Warned:
    text: str


@dataclass(frozen=True, slots=True)
class ShardRaised:
    shard: int
    error: BaseException | None
    traceback: str
