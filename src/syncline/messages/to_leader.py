"""What a learner tells the leading shard, in order.

Bulk goes beside it: a gradient and its group options lie in a draft, whose place is the engine's own matter. Numbers are tickets:
they count what a learner asks of one table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, SupportsFloat

if TYPE_CHECKING:
    from torch import Tensor

NO_LOADER = -1  # in place of a loader's number: it has no batches of one, or waits for others and for no data


class Gradient(NamedTuple):
    """A draft is published as a gradient. On every step's path: a tuple is made four times as fast as a frozen record."""

    table: int
    number: int
    stamp: int  # the version it was computed on
    step: int
    examples: int
    loader: int  # the last whose batches are in it; `Used` names the others before
    upto: int  # batches of that loader used so far
    options: int  # counts the changes of the group options that go with it
    full: bool  # every parameter has a gradient
    silent: bool  # its learner goes on without a reading
    states: bytes  # of its random generators, where a checkpoint follows
    loss: SupportsFloat  # read as a number when it is needed: a simulated one may not be made yet


class Sum(NamedTuple):
    """A node of a tree has published the mean of these gradients as one draft (M14)."""

    table: int
    number: int
    iteration: int  # of all of them, in lockstep, as the node counts
    gradients: tuple[tuple[int, Gradient], ...]  # the learner of each, and what it said
    options: int  # counts the changes of the group options that go with it
    full: bool
    counted: int  # number of the `Count` that it was formed under
    buffers: tuple[Sequence[Tensor], ...] = ()  # of each, where the table has any


@dataclass(frozen=True, slots=True)
class OfTable:
    """It concerns one table."""

    table: int
    number: int  # of the ticket


@dataclass(frozen=True, slots=True)
class OfLoader:
    """It concerns one loader."""

    loader: int
    upto: int  # batches


@dataclass(frozen=True, slots=True)
class AskBatch:
    """One more batch of this epoch."""

    loader: int
    epoch: int


class Used(OfLoader):
    """Batches up to here belong to the next gradient, beside those that it names itself."""


class CloseLoader(OfLoader):
    """It has left a loader's epoch early, having used so many batches; a portion outside the count answers."""


class StreamEnded(OfLoader):
    """Its stream's epoch ends after so many batches."""


@dataclass(frozen=True, slots=True)
class Blocked:
    """It does nothing until its portion of this index is there."""

    loader: int
    index: int


@dataclass(frozen=True, slots=True)
class Rest(OfTable):
    """It has nothing to compute until its portion of this index is there, or (NO_LOADER) others are: quorums go on without it."""

    loader: int
    index: int
    states: bytes = b""  # of its random generators, where checkpoints are written


@dataclass(frozen=True, slots=True)
class Reread(OfTable):
    """It rested, and is there again: it reads what it would read after a step."""

    states: bytes = b""


class Put(OfTable):
    """The parameters in a draft are to become global."""


class AskState(OfTable):
    """It wants the optimizer's state."""


class Load(OfTable):
    """A new optimizer state of this number has gone to the shards: from here on it holds."""


@dataclass(frozen=True, slots=True)
class Fetch(OfTable):
    """It wants the newest weights without publishing."""

    # sent to it, whatever the dial: it was overtaken while it read what was released before
    deliver: bool = False
    # versions come unasked, it has this one: it only wants to hear of the dial, and of checkpoints
    has: int = -1


class Await(OfTable):
    """It does nothing until this ticket, of a fetch or of a gradient whose draft it needs, is let go."""


@dataclass(frozen=True, slots=True)
class Meet:
    """It waits in a meeting, and does nothing until that is over."""


@dataclass(frozen=True, slots=True)
class Farewell:
    """Its function is over: nothing more will be published to this table."""

    table: int
    states: bytes  # of its random generators, as of its last gradient


ToLeader = (
    Gradient
    | Sum
    | AskBatch
    | Used
    | CloseLoader
    | StreamEnded
    | Blocked
    | Rest
    | Reread
    | Put
    | AskState
    | Load
    | Fetch
    | Await
    | Meet
    | Farewell
)
