"""The seam: all that sessions and roles may ask of an engine.

Small messages go one way in order; bulk is published and read. Each piece of memory has one owner.
An engine implements these classes (`local`: processes and shared memory; `sim`: virtual time); nothing above opens a socket,
maps memory or reads a clock by itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from syncline.table.layout import Layout
from syncline.table.store import WRITTEN as WRITTEN
from syncline.table.store import VersionMemory as VersionMemory

if TYPE_CHECKING:
    from torch import Tensor

    from syncline.messages import Call, Initialise, Initialised, Opened, Renewed, Stop
    from syncline.messages.log import Entry, Fold, Take
    from syncline.messages.to_leader import Gradient, Put, ToLeader
    from syncline.messages.to_tree_nodes import ToNodes

Slot = Any


class RunStopped(KeyboardInterrupt):
    """Unwind a learner's function when the run ends.

    A loop sees what Ctrl-C would raise in a single process: `except KeyboardInterrupt` in it works, `except Exception` does not
    swallow it.
    """


class PeerLost(BaseException):
    """A collective failed because another learner is gone; who it was, the engine knows."""


class Reset(BaseException):
    """The servers were started anew: whatever was asked of the old ones is void, the learner rejoins."""


class Portion(NamedTuple):
    """One batch for a learner: positions start..stop of an epoch's order; `end` closes the epoch."""

    loader: int
    number: int
    epoch: int
    start: int
    stop: int
    end: int = 0


FIRST_VALUES = 0  # the ticket of the draft with a table's first values
# The number of portions outside the count: the answer to joining (its epoch is the first to ask for) and the
# answer to CLOSE (its start is the number of portions given so far).
OUTSIDE = -1


class Reading(NamedTuple):
    """What a learner may read, and what it is told with it."""

    version: int
    dial: int = 0  # the number of the dial in force
    keep: bool = False  # a checkpoint follows: the next gradient brings the learner's random states
    delivered: bool = False  # that version was sent to the learner, which was overtaken


@dataclass(slots=True, eq=False)
class Draft:
    """Where a learner puts what it publishes: one tensor per parameter, one per buffer; of first values the other tensors too."""

    gradients: list[Tensor]
    buffers: list[Tensor]
    place: Any  # the engine's own
    others: Sequence[Tensor] = ()


class TablePort(ABC):
    """A learner's end of one table."""

    layout: Layout
    buffers: Sequence[Tensor]  # first values of the model's buffers, and of its other tensors
    others: Sequence[Tensor]
    overtaken = False  # of what comes unasked nothing can be read: newer versions come faster

    @abstractmethod
    def draft(self, *, block: bool = True) -> Draft | None:
        """The learner's from here on until it is published; None if none is free, unless it waits for one."""

    @abstractmethod
    def publish(
        self,
        draft: Draft,
        message: Gradient | Put | Initialised,
        options: bytes = b"",
        present: Sequence[bool] = (),
    ) -> None:
        """With the group options as text and, where the gradient is not full, which parameters have one.

        First values only go there: the learner says `Initialised` to the coordinator afterwards.
        """

    @abstractmethod
    def wait(self, number: int | None, *, block: bool = True) -> Reading | None:
        """What to read, once all shards have released this ticket; raises what the coordinator has to say meanwhile.

        Without a number: nothing that was published is under way any more.
        """

    @abstractmethod
    def read(self, reading: Reading | None, into: list[Tensor]) -> int | None:
        """Copy the version that was released, or where that is gone a newer one, into the parameters; which one it is.

        None: it was overtaken again and again, and wants one delivered. Without parameters it only says that it has read.
        Without a reading the newest that has come unasked; the parameters may get other memory. None: there is none that is newer.
        """


class Computing(NamedTuple):
    """A gradient's computation, or a share of it."""

    examples: int
    share: float = 1.0


class Serving(NamedTuple):
    """Work on a shard's part of a table: gradients taken into a mean, or folds."""

    kind: type[Take | Fold]
    table: int
    times: int = 1


class Teller(ABC):
    """Every party has somebody to tell."""

    @abstractmethod
    def tell(self, message: Any) -> None:
        """Learners and shards tell the coordinator, or whoever keeps the run's record; the coordinator tells the caller."""


class Worker(Teller):
    """One that does work."""

    def spend(self, work: Computing | Serving) -> None:
        """This much is done; only a simulated clock cares."""


class LearnerEnd(Worker):
    """What the sessions of all topologies may ask."""

    rank: int

    @abstractmethod
    def stopping(self) -> bool:
        """Return whether the run is to end: batches and steps raise then; among equals all agree on the step first."""

    def left_loop(self, *, again: bool) -> None:
        """Report that a stop has unwound the loop: the learner is finishing. `again`: it went on with its loop."""


class Saver(ABC):
    """One that writes files of checkpoints."""

    @abstractmethod
    def save(self, number: int, name: str, tensors: dict[str, Tensor], notes: dict[str, Any]) -> None:
        """Told as `Saved` when it is on the disk, until then nobody changes the tensors; a learner waits for its last one.

        Under the number FIRST the first values of a table: they are on the disk when it returns.
        """


class LearnerPort(LearnerEnd):
    """What a session may ask. Whatever waits raises `Reset` when the servers were started anew."""

    learner: int

    @abstractmethod
    def ask(self, message: Any) -> Any:
        """Ask the coordinator and wait for its answer; raises what is refused."""

    @abstractmethod
    def post(self, message: ToLeader, *, later: bool = False) -> None:
        """Tell the leading shard, in order; `later`: it may be read with the next."""

    @abstractmethod
    def portion(self, loader: int, index: int, *, block: bool) -> Portion | None:
        """The portion of that number, if it is there; waits for it with `block`."""

    @abstractmethod
    def open(self, opened: Opened | Initialise) -> TablePort:
        """The learner's end of the table that the coordinator's answer describes; one to initialise takes only first values."""


class ServerPort(Worker, Saver):
    """What a server role may ask. Nothing here blocks."""

    shard: int
    shards: int

    @abstractmethod
    def append(self, entry: Entry) -> None:
        """The leading shard's decision, for the others to replay."""

    @abstractmethod
    def memory(self, table: int) -> VersionMemory:
        """For this shard's part."""

    @abstractmethod
    def receive(self, table: int, learner: int, number: int) -> Slot:
        """What was published with this ticket; this shard's until it releases it."""

    @abstractmethod
    def release(self, table: int, learner: int, number: int, reading: Reading | None) -> None:
        """Let it go on and read what the memory of this table offers; without a reading: the draft of this ticket is free."""

    @abstractmethod
    def tell_nodes(self, message: ToNodes, node: int | None = None) -> None:
        """Of a tree: this one, or all."""

    @abstractmethod
    def grant(self, learner: int, portion: Portion) -> None: ...

    @abstractmethod
    def share(self, table: int, version: int, norms: Tensor) -> None:
        """Tell the other shards; when all have, each gets a `Norms` event."""


class CoordinatorPort(Teller):
    """What the coordinator role may ask. Nothing here blocks."""

    shards: int

    @abstractmethod
    def reply(self, learner: int, message: Any) -> None:
        """Answer a learner; to what it opens the engine adds its own (memory, mailboxes)."""

    @abstractmethod
    def tell_shards(self, message: Any) -> None:
        """All shards, in order; whoever acts on what another says of it has heard of it first."""

    @abstractmethod
    def announce(self, what: Stop | Renewed | Call) -> None:
        """To all learners."""

    @abstractmethod
    def commit(
        self, number: int, manifest: dict[str, Any] | None, files: Sequence[Any], *, prune: bool = True
    ) -> bool:
        """All files of a checkpoint are written: make it one, and tell `Checkpointed`; False if that failed.

        Without a manifest what was written of it is removed. With `prune` old ones go.
        """


class Reduction(ABC):
    """A sum over all learners that is under way."""

    @abstractmethod
    def wait(self, *, block: bool = True) -> bool:
        """Until the sum is in the buffer; raises `PeerLost`. Without `block` it only says whether it is."""


class Progress(NamedTuple):
    """What a learner among equals has done of its first table."""

    started: int  # reductions, of all its tables
    version: int
    gradients: int
    examples: int
    loss: float
    histogram: dict[int, int]  # of staleness


class CollectivePort(LearnerEnd, Saver):
    """What a learner among equals may ask: all call the same in the same order. Membership is fixed.

    It tells `Progress` after every step, which is cheap.
    """

    learners: int

    @abstractmethod
    def now(self) -> float: ...

    @abstractmethod
    def reduce(self, buffer: Tensor) -> Reduction:
        """Start to sum a flat buffer over all learners, in place; nobody touches it until it is done."""

    @abstractmethod
    def broadcast(self, buffer: Tensor) -> None:
        """Everybody's becomes learner 0's."""

    @abstractmethod
    def meet(self, what: str, value: Any) -> list[Any]:
        """What everybody brought to this meeting, by rank; for small things, seldom."""
