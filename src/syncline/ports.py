"""The seam: all that sessions and roles may ask of an engine.

Small notes go one way in order, bulk data lies in slots and weights, waiting is for monotone counters.
An engine implements these classes (`local`: processes and shared memory; `sim`: virtual time); nothing above opens a socket,
maps memory or reads a clock by itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from syncline.dial import Sync

Layout = Any  # table.layout.Layout and table.slot.Slot: the table stands above the ports
Slot = Any


class RunStopped(BaseException):
    """Unwinds a learner's function when the run ends; not an error."""


class PeerLost(BaseException):
    """A collective failed because another learner is gone; who it was, the engine knows."""


class Reset(BaseException):
    """The servers were started anew: whatever was asked of the old ones is void, the learner rejoins."""


class Kind(IntEnum):
    """What a note or a log entry says."""

    # a learner to the leading shard
    GRADIENT = 1  # one gradient lies in a slot
    ASK = 2  # one more batch of this epoch
    USED = 3  # batches up to here belong to the next gradient
    CLOSE = 4  # left a loader's epoch early
    REST = 5  # waits for data: lockstep quorums need not wait for it
    PUT = 6  # parameters lie in a slot, to become global
    STATE = 7  # wants the optimizer's state
    LOAD = 8  # a new optimizer state lies ready at the coordinator
    FETCH = 9  # wants the newest weights without publishing
    FAREWELL = 10  # its function is over: its random states lie in a slot
    BLOCKED = 11  # does nothing until its portion of this number is there
    MEET = 12  # waits in a meeting, and does nothing until it is over
    AWAIT = 13  # does nothing until what it fetches is there
    ENDED = 14  # its stream's epoch ends after so many batches
    # the leading shard to the others
    TAKE = 20
    FOLD = 21
    RELEASE = 22
    SNAPSHOT = 23
    FINISH = 24
    LEAVE = 25
    CHANGE = 26  # another dial
    CUT = 27  # a checkpoint of the table as it is now


SILENT = 1  # the learner goes on without a reading
STATES = 2  # its random states lie in the slot
KEEP = 1  # in a reading: a checkpoint follows, the next gradient brings the learner's random states
DROPPED = 2  # in a reading: its last gradient is in no update, the slot is free already


GRADIENT = int(Kind.GRADIENT)  # an enum's member takes longer to look up, and this is on every step's path


class Note(NamedTuple):
    """What a learner tells the leading shard; fixed size, in order."""

    kind: int
    table: int = 0
    number: int = 0  # ticket: counts what this learner sent to this table
    stamp: int = 0
    step: int = 0
    examples: int = 0
    slot: int = 0
    serial: int = 0  # of the group options in the slot
    full: int = 1  # every parameter has a gradient
    loader: int = -1
    upto: int = 0  # batches of that loader used so far; for ASK the epoch
    flags: int = 0  # SILENT, STATES
    loss: float = float("nan")  # or something that `float` reads later, where no ring of words carries it


def gradient_note(
    table: int,
    number: int,
    stamp: int,
    step: int,
    usage: tuple[int, int, int],
    slot: tuple[int, int, bool],
    flags: int,
    loss: Any,
) -> Note:
    """Of a gradient that lies in a slot; `usage` is (examples, loader, upto), `slot` (its index, serial, full)."""
    (examples, loader, upto), (index, serial, full) = usage, slot
    return Note(
        GRADIENT, table, number, stamp, step, examples, index, serial, full, loader, upto, flags, loss
    )


class Entry(NamedTuple):
    """One decision of the leading shard, as the others replay it."""

    kind: int
    table: int = 0
    learner: int = 0
    number: int = 0
    slot: int = 0
    serial: int = 0
    full: int = 1  # of a release: 0 without a reading, 2 with the version that the learner has
    examples: int = 0
    rank: int = 0
    iteration: int = 0
    version: int = 0
    alone: int = 0
    factor: float = 1.0  # of a fold's rate; of a taken gradient in the mean


class Portion(NamedTuple):
    """One batch for a learner: positions start..stop of an epoch's order; `end` closes the epoch."""

    loader: int
    number: int
    epoch: int
    start: int
    stop: int
    end: int = 0


# The number of portions outside the count: the answer to joining (its epoch is the first to ask for) and the
# answer to CLOSE (its start is the number of portions given so far).
OUTSIDE = -1


class Reading(NamedTuple):
    """What a learner may read, and what it is told with it."""

    version: int
    dial: int = 0  # the number of the dial in force
    flags: int = 0  # KEEP, DROPPED


class TableLink(ABC):
    """A learner's end of one table."""

    layout: Layout
    slots: Sequence[Slot]
    buffers: Sequence[Tensor]  # first values of the model's buffers, and of its other tensors
    others: Sequence[Tensor]

    @abstractmethod
    def weights(self, version: int, sync: Sync) -> list[Tensor]:
        """One view per parameter of the version that was released; stable until the next publish."""

    @abstractmethod
    def released(self, number: int) -> Reading | None:
        """What to read, once all shards have released this ticket."""

    @abstractmethod
    def wait(self, number: int) -> Reading:
        """Block until all shards have released this ticket; raises what the coordinator has to say meanwhile."""

    @abstractmethod
    def free(self, number: int) -> bool:
        """The slot that this ticket was published with may be used again."""

    @abstractmethod
    def wait_free(self, number: int) -> None:
        """Block until it may; raises what the coordinator has to say meanwhile."""


class LearnerPort(ABC):
    """What a session may ask. Whatever waits raises `Reset` when the servers were started anew."""

    learner: int
    rank: int

    @abstractmethod
    def now(self) -> float: ...

    @abstractmethod
    def spend(self, examples: int) -> None:
        """The computation of one gradient is done; only a simulated clock cares."""

    @abstractmethod
    def post(self, note: Note, *, ring: bool = True) -> None:
        """Tell the leading shard, in order; without `ring` it may read it with the next note."""

    @abstractmethod
    def ring(self) -> None:
        """Make the leading shard read what was posted."""

    @abstractmethod
    def portion(self, loader: int, index: int, *, block: bool) -> Portion | None:
        """The portion of that number, if it is there; waits for it with `block`."""

    @abstractmethod
    def request(self, message: Any) -> Any:
        """Ask the coordinator and wait for its answer."""

    @abstractmethod
    def tell(self, message: Any) -> None:
        """Tell the coordinator."""

    @abstractmethod
    def first_values(self, handle: Any, layout: Layout) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Where to write a new table's first parameters, buffers and other tensors."""

    @abstractmethod
    def pin(self, link: TableLink) -> None:
        """Lock the link's memory for copies to and from a GPU."""

    @abstractmethod
    def attach(self, opened: Any) -> TableLink:
        """The table that the coordinator's answer describes."""

    @abstractmethod
    def rejoin(self, tables: int, loaders: int) -> list[Any]:
        """After a `Reset`: the tables that are open, as `attach` takes them."""

    @abstractmethod
    def dial(self, number: int) -> Sync:
        """The dial of that number."""

    @abstractmethod
    def stopping(self) -> bool:
        """The run is to end: loaders end, steps do not return."""


class ServerPort(ABC):
    """What a server role may ask. Nothing here blocks."""

    shard: int
    shards: int

    @abstractmethod
    def append(self, entry: Entry) -> None:
        """The leading shard's decision, for the others to replay."""

    @abstractmethod
    def weights(self, table: int) -> tuple[list[Tensor], list[list[Tensor]]]:
        """Segments of the whole table: the newest version, and the older ones that are kept."""

    @abstractmethod
    def slot(self, table: int, learner: int, index: int) -> Slot: ...

    @abstractmethod
    def inbox(self, table: int, learner: int, version: int) -> list[Tensor] | None:
        """Where this learner's copy of a version goes; None where there is nothing to copy."""

    @abstractmethod
    def release(self, table: int, learner: int, number: int, reading: Reading | None) -> None:
        """Let it go on and read; without a reading only its slot is free."""

    @abstractmethod
    def grant(self, learner: int, portion: Portion) -> None: ...

    @abstractmethod
    def share_norms(self, table: int, version: int, norms: Tensor) -> None:
        """Tell the other shards; when all have, each gets a `Norms` event."""

    @abstractmethod
    def spend(self, kind: int, table: int, times: int = 1) -> None:
        """Work on this shard's part of a table: gradients taken into a mean, or a fold; only a simulated clock cares."""

    @abstractmethod
    def forget(self, learner: int) -> None:
        """It has left and nothing of it is needed any more."""

    @abstractmethod
    def save(self, number: int, name: str, tensors: dict[str, Tensor], notes: dict[str, Any]) -> None:
        """Write a file of a checkpoint; reported as `Saved`, until then nobody changes the tensors."""

    @abstractmethod
    def report(self, message: Any) -> None:
        """Tell the coordinator."""


class CoordinatorPort(ABC):
    """What the coordinator role may ask. Nothing here blocks."""

    shards: int

    @abstractmethod
    def make_table(self, table: int, layout: Layout) -> Any:
        """Memory for the weights of a table."""

    @abstractmethod
    def fill_table(self, handle: Any, layout: Layout, values: Sequence[Tensor]) -> None:
        """Overwrite a table's weights, one value per parameter; what shards told each other of it is void."""

    @abstractmethod
    def read_table(self, handle: Any, layout: Layout) -> list[Tensor]:
        """A copy of a table's weights."""

    @abstractmethod
    def make_lane(self, table: int, learner: int, layout: Layout) -> Any:
        """Memory between one learner and the shards."""

    @abstractmethod
    def reply(self, learner: int, message: Any) -> None: ...

    @abstractmethod
    def tell_shards(self, message: Any) -> None:
        """All shards, the leading one last: what it decides upon, the others know already."""

    @abstractmethod
    def add_dial(self, number: int, sync: Sync) -> None:
        """Make a dial known to learners, before anybody can name it."""

    @abstractmethod
    def reset_learners(self) -> None:
        """Tell all learners that the servers are new ones."""

    @abstractmethod
    def call_learners(self) -> None:
        """Have learners that wait in a step ask why (`Called`)."""

    @abstractmethod
    def new_desk(self, learner: int) -> Any:
        """Introduce a learner to the new servers."""

    @abstractmethod
    def commit(self, number: int, manifest: dict[str, Any], files: Sequence[Any]) -> bool:
        """All files of a checkpoint are written: make it one, and emit `Checkpointed`; False if that failed."""

    @abstractmethod
    def abandon(self, number: int) -> None:
        """Remove what was written of a checkpoint."""

    @abstractmethod
    def history(self) -> list[dict[str, Any]]:
        """The records of the epochs so far, for a checkpoint."""

    @abstractmethod
    def stop_learners(self) -> None: ...

    @abstractmethod
    def emit(self, record: Any) -> None:
        """Something for the caller: a metric, an epoch's end, a failure."""


class Reduction(ABC):
    """A sum over all learners that is under way."""

    @abstractmethod
    def wait(self) -> None:
        """Block until the sum is in the buffer; raises `PeerLost`."""

    @abstractmethod
    def done(self) -> bool:
        """`wait` would not block."""


class Progress(NamedTuple):
    """What a learner among equals has done of its first table."""

    started: int  # reductions, of all its tables
    version: int
    gradients: int
    examples: int
    loss: float
    histogram: dict[int, int]  # of staleness


class CollectivePort(ABC):
    """What a learner among equals may ask: all call the same in the same order. Membership is fixed."""

    rank: int
    learners: int

    @abstractmethod
    def now(self) -> float: ...

    @abstractmethod
    def spend(self, examples: int, share: float = 1.0) -> None:
        """The computation of one gradient is done, or a share of it; only a simulated clock cares."""

    @abstractmethod
    def reduce(self, buffer: Tensor) -> Reduction:
        """Start to sum a flat buffer over all learners, in place; nobody touches it until it is done."""

    @abstractmethod
    def broadcast(self, buffer: Tensor) -> None:
        """Everybody's becomes learner 0's."""

    @abstractmethod
    def meet(self, what: str, value: Any) -> list[Any]:
        """What everybody brought to this meeting, by rank; for small things, seldom."""

    @abstractmethod
    def tell(self, message: Any) -> None:
        """Tell whoever keeps the run's record."""

    @abstractmethod
    def save(self, number: int, name: str, tensors: dict[str, Tensor], notes: dict[str, Any]) -> None:
        """Write a file of a checkpoint; whoever keeps the record hears `Saved`. Waits while the last one is written."""

    @abstractmethod
    def note(self, progress: Progress) -> None:
        """How far this learner is, for statistics; on every step's path."""

    @abstractmethod
    def stopping(self) -> bool:
        """The run is to end: to be agreed upon, since all leave at the same step."""
