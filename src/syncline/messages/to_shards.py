"""What the coordinator tells the shards, and shards each other outside the log. `handle` and `lane` are the engine's own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from syncline.dial import Sync
from syncline.messages.statistics import Counts
from syncline.protocols.meetings import MeetingPlace
from syncline.protocols.sequence import Account
from syncline.protocols.spans import Standing
from syncline.table.checkpoints import Content, Source
from syncline.table.layout import Layout
from syncline.table.optimizer_template import OptimizerTemplate


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
    handle: Any = None  # the engine's own, and added by it
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
    lane: Any = None  # the engine's own, and added by it


@dataclass(frozen=True, slots=True, kw_only=True)
class MakeLoader:
    loader: int
    size: int
    batch_size: int
    policy: str
    epochs: int | None
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
