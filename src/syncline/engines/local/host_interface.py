"""The machines of a run over servers, as its supervisor has them: what each can be told, and what a relay between them is told.

The supervisor tells every machine the same in the same order, and each does what concerns it; a run on one machine has one.
Where there are several, a relay beside the shards (another engine's) keeps their memories alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from syncline import messages as m
from syncline.engines.local.processes import Process, Processes
from syncline.engines.local.shared_memory import Region, WakeUp
from syncline.engines.local.table_memory import Geometry
from syncline.engines.run import RunSpec
from syncline.roles.run_plan import Seat
from syncline.table.layout import Layout

Heard = Callable[[Process, Any], None]
Ended = Callable[[Process, str], None]


@dataclass(frozen=True, slots=True)
class Sites:
    """The machines of a run, by number: on which of them each shard is."""

    shards: tuple[int, ...]
    live: tuple[int, ...] = (0,)
    grows: bool = False  # others may join

    @property
    def servers(self) -> list[int]:
        """Those with shards; the leading one's first."""
        return list(dict.fromkeys(self.shards))

    def of(self, site: int) -> list[int]:
        """The shards there."""
        return [shard for shard, where in enumerate(self.shards) if where == site]

    def without(self, site: int) -> Sites:
        """That machine is lost: its shards go to those with the fewest, the first of them."""
        live = tuple(each for each in self.live if each != site)
        shards = [where for where in self.shards if where != site]
        for shard, where in enumerate(self.shards):
            if where == site:
                shards.insert(shard, min(live, key=shards.count))
        return replace(self, shards=tuple(shards), live=live)

    def joined_by(self, site: int) -> Sites:
        """One more, for learners."""
        return self if site in self.live else replace(self, live=(*self.live, site))


@dataclass(frozen=True, slots=True)
class RelayParts:
    """What a relay is given of its machine: memory and bells."""

    site: int
    sites: Sites
    generation: int
    geometry: Geometry
    log: Region
    readers: int  # of that log
    reader: int | None  # which of them the relay is; None: it writes that log, or there is none
    bell: WakeUp  # its own
    shards: dict[int, WakeUp]  # the bells of those here
    beats: Region  # its first word counts that it lives
    near: frozenset[int] = frozenset()  # machines with nodes of a tree above or below those here
    casts: bool = False  # versions flow down that tree unasked


@dataclass(frozen=True, slots=True)
class TableHere:
    """To the relay: a table's memory; what shards elsewhere have in it is void."""

    table: int
    layout: Layout
    region: Region
    made: bool = False  # all that a learner begins with lies in the leading shard's machine


@dataclass(frozen=True, slots=True)
class Begun:
    """From the relay: all that a learner begins a table with is here."""

    table: int


@dataclass(frozen=True, slots=True)
class LearnerKnown:
    """To the relay: a learner, wherever it is, and its mailbox here."""

    learner: int
    site: int
    desk: Region
    bell: WakeUp


@dataclass(frozen=True, slots=True)
class NodeKnown:
    """To the relay: a node of a tree, by its name, wherever it is; and the machine of the one above it (None: the root)."""

    name: int
    site: int
    parent: int | None
    desk: Region
    bell: WakeUp
    above: WakeUp | None  # of the one above, where that is here


@dataclass(frozen=True, slots=True)
class NodeMoved:
    """To the relay: the node above is another; what is said to former ones is void."""

    name: int
    parent: int | None
    way: int
    above: WakeUp | None


@dataclass(frozen=True, slots=True)
class LaneHere:
    """To the relay: memory between a learner, or a node of a tree, and the shards."""

    table: int
    learner: int
    layout: Layout
    region: Region


@dataclass(frozen=True, slots=True)
class Forget:
    """To the relay: a learner has left, or a node of a tree is gone."""

    learner: int


@dataclass(frozen=True, slots=True)
class SendOut:
    """To the relay: all that a learner here has said goes out before what follows; with a table: its first values, too."""

    learner: int
    table: int | None = None


@dataclass(frozen=True, slots=True)
class SentOut:
    """From the relay: done."""

    learner: int
    table: int | None


@dataclass(frozen=True, slots=True)
class SiteGone:
    """To the relay: that machine is lost."""

    site: int


@dataclass(frozen=True, slots=True)
class SiteJoined:
    """To the caller's relay: one more machine, to connect to."""

    site: int
    address: Any


@dataclass(frozen=True, slots=True)
class Linked:
    """From the relay: it has a way to all machines that it has to do with."""


@dataclass(frozen=True, slots=True)
class Vitals:
    """What a machine shows of its processes: notes of learners, and who of them waits; how often servers have looked for work."""

    learners: dict[int, tuple[int, bool]]
    shards: dict[int, int]
    nodes: dict[int, int]


class Host(ABC):
    """A machine, as the supervisor has it. Nothing here waits for another machine."""

    site: int
    processes: list[Process]  # all that were started

    @abstractmethod
    def start_servers(
        self, generation: int, sites: Sites, learners: Mapping[int, int], *, again: bool
    ) -> list[Process]:
        """Shards here, of whose tree these learners (with their machines) are part; `again`: in place of others."""

    @abstractmethod
    def end_servers(self) -> None:
        """At once, and nobody is to notice."""

    @abstractmethod
    def introduce(self, learner: int, rank: int, site: int) -> None:
        """A learner on that machine begins."""

    @abstractmethod
    def start_learner(self, learner: int, rank: int) -> Process:
        """Here; it is introduced already."""

    @abstractmethod
    def forget(self, learner: int) -> None:
        """It has left: nothing of it is needed any more."""

    @abstractmethod
    def initialise(self, learner: int, message: m.Initialise) -> None:
        """Memory for a table's first values, which come from this learner; it is told if it is here."""

    @abstractmethod
    def tell_shards(self, message: Any) -> None: ...

    @abstractmethod
    def reply(self, learner: int, message: Any) -> None:
        """To a learner here."""

    @abstractmethod
    def announce(self, word: int, value: int) -> None:
        """A word for all learners here."""

    @abstractmethod
    def kill(self, process: Process) -> None:
        """Its end will be noticed."""

    @abstractmethod
    def end(self, process: Process) -> None:
        """At once, and nobody is to notice."""

    @abstractmethod
    def vitals(self) -> Vitals: ...

    @abstractmethod
    def lose_site(self, site: int) -> None:
        """Another machine is gone."""

    @abstractmethod
    def gain_site(self, site: int) -> None:
        """Another machine has joined."""

    @abstractmethod
    def lose_node(self, node: int) -> str | None:
        """A node of the tree is gone: where those below it send now, in words; None: it was the last leaf."""

    @abstractmethod
    def close(self) -> None:
        """Nothing stays behind; the processes have ended, or end with it."""


class Seats:
    """What a learner knows from the start; on a cluster each machine deals its own GPUs."""

    def __call__(self, spec: RunSpec, learner: int, rank: int) -> Seat:
        return spec.seat(rank)

    def forget(self, learner: int) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Told:
    """Whom machines tell what happens, on the supervisor's thread."""

    heard: Heard
    ended: Ended
    lost: Callable[[int, str], None]  # a machine, and why
    joined: Callable[[Host, str], None]  # another one, and its name
    add: Callable[[int], None]  # so many learners may begin
    refused: Callable[[str], None]  # something that was not done, in words


class Machines(ABC):
    """The other machines of a run on several."""

    sites: Sites

    @abstractmethod
    def relay(self, parts: RelayParts) -> Any:
        """What this machine's relay runs."""

    @abstractmethod
    def hosts(self, processes: Processes, told: Told) -> Sequence[Host]:
        """In their order; what is heard of them comes with the processes' work."""

    @abstractmethod
    def where(self, rank: int) -> int:
        """The machine of the next learner of that rank."""

    def seats(self) -> Seats:
        """On this machine."""
        return Seats()

    @abstractmethod
    def address(self, site: int) -> Any:
        """Where the caller's relay finds it."""

    @abstractmethod
    def hear(self, relay: Process, word: Any) -> None:
        """What a machine's relay says."""
