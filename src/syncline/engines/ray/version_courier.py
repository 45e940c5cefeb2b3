"""A node's courier beside the shards: brings every version that learners of that node want there once, into its mirror.

Stand-ins say what they want and hear where it lies when it is there. In lockstep that is the very version; otherwise one that
is newer does too, so that a slow link is not asked for all of them. One thread, nothing waits. It ends with its connection,
and its node with it. Not responsible for what is read in place of a version that was overtaken.
"""

from __future__ import annotations

import os
import select
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from syncline.engines.local.control_channel import NOTHING, Channel, Closed
from syncline.engines.local.learner import TRIES
from syncline.engines.local.server import TableMemory
from syncline.engines.local.shared_memory import Region, WakeUp
from syncline.engines.local.version_ring import Reader
from syncline.engines.ray.authentication import Secret, Stranger, connect
from syncline.engines.ray.bulk_connection import Connection, Lost, bytes_of
from syncline.engines.ray.frame_kinds import AGENT, WORDS, Kind, place_of
from syncline.table.layout import Layout

LOOK = 1000  # milliseconds without anything to do


@dataclass(frozen=True, slots=True)
class Versions:
    """From a stand-in: where a table's lie, under these servers."""

    table: int
    generation: int
    layout: Layout
    places: int
    handle: Region


@dataclass(frozen=True, slots=True)
class Want:
    """From a stand-in."""

    table: int
    generation: int
    version: int
    exact: bool  # else a newer one will do


@dataclass(frozen=True, slots=True)
class Have:
    """To a stand-in: what it gets in place of what it wanted, and where; -1: it was overtaken."""

    table: int
    generation: int
    version: int
    place: int


@dataclass(frozen=True, slots=True)
class Courier:
    """What the process runs."""

    address: tuple[str, int]
    host: str
    secret: Secret
    lost: WakeUp  # rings when its node is declared dead
    beats: Region  # its first word counts how often it has looked for something to do

    def __call__(self, channel: Channel) -> int:
        try:
            with connect(self.address, self.secret) as end:
                _Courier(channel, end, self).run()
        except Closed:
            return 0
        except (OSError, Stranger, Lost) as error:
            print(f"syncline: no versions reach node {self.host}: {error}", file=sys.stderr, flush=True)
        self.lost.ring()
        return 1


@dataclass(slots=True)
class _Transfer:
    wanted: int
    version: int
    sources: list[int]  # places in the shards' ring
    place: int  # in the mirror
    frame: int
    tries: int = 1
    held: bool = False  # all of it was sent while it was whole


@dataclass(slots=True)
class _Table:
    generation: int
    layout: Layout
    ring: Sequence[Sequence[Tensor]]
    reader: Reader
    there: list[int]  # versions in the mirror, by place; -1: none
    transfer: _Transfer | None = None
    wants: list[tuple[Channel, Want]] = field(default_factory=list)

    @classmethod
    def of(cls, versions: Versions) -> _Table:
        shelf = TableMemory(versions.handle, versions.layout, places=versions.places)
        reader = Reader(versions.layout, shelf.ring, shelf.versions, shelf.ring[0])  # gathers nothing
        return cls(versions.generation, versions.layout, shelf.ring, reader, [-1] * versions.places)

    def found(self, want: Want) -> int | None:
        """Where what is wanted lies in the mirror."""
        if want.version in self.there:
            return self.there.index(want.version)
        newest = max(self.there)
        return self.there.index(newest) if newest > want.version and not want.exact else None

    def next(self) -> int:
        """Exact ones in their order first; of the others the last serves all."""
        exact = [want.version for _, want in self.wants if want.exact]
        return min(exact) if exact else max(want.version for _, want in self.wants)


class _Courier:
    def __init__(self, channel: Channel, end: socket.socket, spec: Courier) -> None:
        self._channel, self._beats = channel, spec.beats.words
        self._connection = Connection(end, run=spec.secret.run, incarnation=AGENT, into=lambda head: None)
        self._connection.send(Kind.MIRROR)
        self._tables: dict[int, _Table] = {}
        self._askers: dict[int, Channel] = {}  # by descriptor
        self._poll = select.poll()
        self._poll.register(channel.fileno(), select.POLLIN)

    def run(self) -> None:
        while True:
            out = select.POLLOUT if self._connection.unsent else 0
            self._poll.register(self._connection.fileno(), select.POLLIN | out)
            ready = dict(self._poll.poll(LOOK))
            self._beats[0] += 1
            if self._channel.fileno() in ready:
                self._join()
            for fd in ready.keys() & self._askers.keys():
                self._hear(self._askers[fd])
            self._arrived()
            self._connection.flush()
            for number, table in self._tables.items():
                while self._advance(number, table):
                    pass

    # -- stand-ins ---------------------------------------------------------------------------------------

    def _join(self) -> None:
        bell = self._channel.receive()
        asker = Channel(socket.socket(fileno=os.dup(bell.fd)))
        self._askers[asker.fileno()] = asker
        self._poll.register(asker.fileno(), select.POLLIN)

    def _hear(self, asker: Channel) -> None:
        try:
            while (said := asker.take()) is not NOTHING:
                table = self._tables.get(said.table)
                if isinstance(said, Versions):
                    if table is None or table.generation < said.generation:
                        self._tables[said.table] = _Table.of(said)
                    said.handle.close()
                elif table is not None and table.generation == said.generation:
                    table.wants.append((asker, said))
        except Closed:
            self._leave(asker)

    def _leave(self, asker: Channel) -> None:
        self._poll.unregister(asker.fileno())
        del self._askers[asker.fileno()]
        asker.close()
        for table in self._tables.values():
            table.wants = [each for each in table.wants if each[0] is not asker]

    # -- transfers ---------------------------------------------------------------------------------------

    def _advance(self, number: int, table: _Table) -> bool:
        """False: there is nothing to do before something comes or is sent."""
        for asker, want in list(table.wants):
            if (place := table.found(want)) is not None:
                self._tell(number, table, asker, want, table.there[place], place)
        transfer = table.transfer
        if transfer is None and table.wants:
            self._begin(number, table, table.next(), 1)
        elif transfer is not None and not transfer.held and self._connection.sent(transfer.frame):
            if table.reader.hold(transfer.version, transfer.sources):
                words = number, transfer.place, transfer.version, table.generation
                transfer.held = True
                self._connection.send(Kind.HELD, WORDS.pack(*words, *[0] * 4))
            else:
                self._begin(number, table, transfer.wanted, transfer.tries + 1)
        else:
            return False
        return True

    def _begin(self, number: int, table: _Table, wanted: int, tries: int) -> None:
        chosen = choose(table.reader, wanted) if tries <= TRIES else None
        if chosen is None:
            self._give(number, table, wanted, -1, 0)
            return
        version, sources = chosen
        place = table.there.index(min(table.there))
        table.there[place] = -1
        frame = self._connection.send(
            Kind.VERSION, *bodies(table.layout, table.ring, sources), place=place_of(number, place)
        )
        table.transfer = _Transfer(wanted, version, sources, place, frame, tries)

    def _arrived(self) -> None:
        while (frame := self._connection.receive(0)) is not None:
            number, place, version, generation, *_ = WORDS.unpack(frame.body)
            table = self._tables[number]
            if generation == table.generation and table.transfer is not None:
                table.there[place] = version
                self._give(number, table, table.transfer.wanted, version, place)

    def _give(self, number: int, table: _Table, wanted: int, version: int, place: int) -> None:
        """To all that wanted this one, be it another that they get."""
        table.transfer = None
        for asker, want in list(table.wants):
            if want.version == wanted or (not want.exact and want.version <= wanted):
                self._tell(number, table, asker, want, version, place)

    def _tell(self, number: int, table: _Table, asker: Channel, want: Want, version: int, place: int) -> None:
        table.wants.remove((asker, want))
        asker.post(Have(number, table.generation, version, place))


def choose(reader: Reader, wanted: int) -> tuple[int, list[int]] | None:
    """A version, and where it lies."""
    for _ in range(TRIES):
        if (found := reader.choose(wanted)) is not None:
            return found
        os.sched_yield()  # shards are between two versions
    return None


def bodies(layout: Layout, ring: Sequence[Sequence[Tensor]], places: Sequence[int]) -> list[memoryview]:
    """A version as it lies in memory, shard by shard."""
    flat = layout.parameters
    if len(set(places)) == 1:
        return bytes_of([whole(ring[places[0]], flat.nbytes)])
    parts = [part.segments(list(ring[place])) for part, place in zip(layout.parts, places, strict=True)]
    found: list[memoryview] = []
    ends = [*flat.offsets[1:], flat.nbytes]
    for index, (offset, end) in enumerate(zip(flat.offsets, ends, strict=True)):
        found += bytes_of([part[index] for part in parts])
        found.append(memoryview(bytes(end - offset - flat.lengths[index] * flat.item_sizes[index])))
    return found


def whole(segments: Sequence[Tensor], nbytes: int) -> Tensor:
    """The block of bytes that these segments are views of."""
    first = segments[0]
    start = first.storage_offset() * first.element_size()
    return torch.empty(0, dtype=torch.uint8).set_(first.untyped_storage(), start, (nbytes,), (1,))
