"""A learner's stand-in beside the shards: a local process that does for a learner on another node what its port would do here.

To shards and supervisor it is that learner: it fills the slots, posts the notes, reads the versions. A gradient's note is posted
when all of it lies in the slot (M12). One thread, nothing waits: both directions of the connection and the shared memory are
looked at in turn. It ends with its connection.
"""

from __future__ import annotations

import select
import sys
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from syncline.engines.local.cargo import Parcel, unpack
from syncline.engines.local.channel import NOTHING, Channel
from syncline.engines.local.exchange import Replies
from syncline.engines.local.learner import CALLS, GENERATION, STOP, Hub, LearnerSpec
from syncline.engines.local.server import NOTE, PORTION, Desk, Lane, Shelf
from syncline.engines.ray.agent import AGENT, Order
from syncline.engines.ray.away import PLACES, DialOf, place_of, slot_tail
from syncline.engines.ray.bulk import Connection, Frame, Head, Lost, bytes_of
from syncline.engines.ray.frames import OBJECTS, WORDS, Kind, Objects
from syncline.engines.ray.handshake import Secret, Stranger, connect
from syncline.ports import SILENT, Note
from syncline.ports import Kind as NoteKind
from syncline.table.layout import Layout
from syncline.topology import messages as m

LOOK = 1000  # milliseconds without anything to do
WAITS = {
    int(kind)
    for kind in (
        *(NoteKind.GRADIENT, NoteKind.REST, NoteKind.PUT, NoteKind.LOAD),
        *(NoteKind.BLOCKED, NoteKind.AWAIT, NoteKind.MEET),
    )
}


@dataclass(frozen=True, slots=True)
class StandIn:
    """What a local process runs in place of a learner on another node."""

    address: tuple[str, int]
    host: str
    secret: Secret
    threads: int | None

    def __call__(self, channel: Channel, spec: LearnerSpec) -> int:
        order = Order(spec.learner, spec.seat, spec.geometry.slots, self.threads)
        try:
            end = connect(self.address, self.secret)
            agent = Connection(end, run=self.secret.run, incarnation=AGENT, into=lambda head: None)
            agent.wait_sent(Objects().send(agent, Kind.ORDER, order))
        except (OSError, Stranger, Lost) as error:
            words = f"no way to node {self.host} at {self.address[0]}:{self.address[1]} for learner {spec.seat.rank}"
            print(f"syncline: {words}: {error}", file=sys.stderr, flush=True)
            return 1
        return _Relay(channel, spec, end, self.secret.run, self.host).run()


class _Table:
    """One table's memory here, and how far its learner has been told of it."""

    def __init__(self, opened: m.Opened, spec: LearnerSpec) -> None:
        geometry, layout = spec.geometry, opened.layout
        self.layout: Layout = layout
        self.shelf = Shelf(opened.handle, layout, kept=geometry.kept)
        self.lane = Lane(opened.lane, layout, slots=geometry.slots)
        opened.handle.close()
        opened.lane.close()
        self.attached = False
        self.released = self.freed = 0  # as the learner knows
        self.version, self.place = -1, -1  # that it has, and where

    def so_far(self) -> tuple[int, int]:
        """Tickets released, and freed, by all shards."""
        replies: Replies = self.lane.replies
        return replies.so_far()

    def weights(self, version: int, *, lockstep: bool, delay: int) -> list[Tensor]:
        if not lockstep:
            return self.lane.inbox
        history = self.shelf.history
        return history[version % len(history)] if delay else self.shelf.weights


class _Relay:
    def __init__(self, channel: Channel, spec: LearnerSpec, end: Any, run: bytes, host: str) -> None:
        self._channel, self._spec, self._host = channel, spec, host
        self._objects = Objects()
        self._connection = Connection(end, run=run, incarnation=spec.learner, into=self._into)
        self._desk, self._hub = Desk(spec.desk), Hub(spec.hub)
        self._generation = spec.generation
        self._words: list[int] = []  # as the learner knows them
        self._tables: dict[int, _Table] = {}
        self._opening: m.Open | None = None
        self._first: Shelf | None = None
        self._waiting: deque[Note] = deque()  # for room on the desk
        self._ended = False
        self._poll = select.poll()
        for fd in (spec.bell.fd, channel.fileno()):
            self._poll.register(fd, select.POLLIN)

    def run(self) -> int:
        try:
            while True:
                busy = self._up()
                self._answers()
                self._down()
                self._sleep(0 if busy else LOOK)
        except Lost as error:
            if self._ended:
                return 0
            print(
                f"syncline: learner {self._spec.seat.rank} on {self._host} is gone: {error}", file=sys.stderr
            )
            return 1

    def _sleep(self, milliseconds: int) -> None:
        out = select.POLLOUT if self._connection.unsent else 0
        self._poll.register(self._connection.fileno(), select.POLLIN | out)
        if self._waiting:
            milliseconds = min(milliseconds, 1)
        self._poll.poll(milliseconds)
        self._spec.bell.quiet()
        self._connection.flush()

    # -- from the learner --------------------------------------------------------------------------------

    def _into(self, head: Head) -> memoryview | None:
        if head.kind in (Kind.SLOT, Kind.TAIL):
            table = self._tables.get(head.place >> 16)
            index = head.place & 0xFFFF
            if table is None or index >= len(table.lane.slots):
                return None
            slot = table.lane.slots[index]
            return bytes_of([slot.memory if head.kind == Kind.SLOT else slot_tail(slot, table.layout)])[0]
        if head.kind == Kind.FIRST and self._opening is not None:
            return memoryview(bytearray(head.length))
        return self._objects.into(head)

    def _up(self) -> bool:
        """All that has come; True if there is more."""
        self._post_waiting()
        while (frame := self._connection.receive(0)) is not None:
            self._heard(frame)
        return False

    def _heard(self, frame: Frame) -> None:
        kind = frame.kind
        if kind == Kind.NOTE:
            self._note(frame)
        elif kind == Kind.FIRST:
            self._fill(frame.body)
        elif (kind in OBJECTS or kind == Kind.CARGO) and (found := self._objects.gather(frame)):
            self._object(*found)

    def _note(self, frame: Frame) -> None:
        if frame.generation != self._generation:
            return  # of servers that are gone
        if frame.place >= 2:
            self._tables[frame.place - 2].attached = True
        elif frame.body.nbytes == 0:
            self._spec.shard_bell.ring()
        else:
            note = Note._make(NOTE.unpack(frame.body))
            if note.kind in WAITS and not note.flags & SILENT:
                self._desk.wait(True)
            self._waiting.append(note)
            self._post_waiting(ring=bool(frame.place))

    def _post_waiting(self, *, ring: bool = True) -> None:
        while self._waiting and self._desk.notes.push(self._waiting[0]):
            self._waiting.popleft()
        if ring or self._waiting:
            self._spec.shard_bell.ring()

    def _object(self, kind: int, parcel: Parcel) -> None:
        if kind == Kind.OPEN:
            self._opening = unpack(parcel)
            self._channel.send(self._opening)
        elif kind == Kind.ASK and parcel.bulk < 0 and isinstance(asked := unpack(parcel), DialOf):
            self._objects.send(self._connection, Kind.ANSWER, self._hub.dial(asked.number))
            return
        else:
            self._ended |= kind == Kind.LAST
            self._channel.send(parcel)
            parcel.close()
        if kind != Kind.TELL:
            self._desk.wait(True)

    def _fill(self, values: memoryview) -> None:
        """First values of a table, by the learner that initialises it."""
        assert self._first is not None and self._opening is not None
        memory, layout = torch.frombuffer(values, dtype=torch.uint8), self._opening.layout
        start = 0
        targets = layout.parameters.views(self._first.weights), self._first.buffers, self._first.others
        for flat, into in zip((layout.parameters, layout.buffers, layout.others), targets, strict=True):
            for target, value in zip(into, flat.views(flat.segments(memory[start:])), strict=True):
                target.copy_(value)
            start += flat.nbytes
        self._first = None

    # -- from the coordinator ----------------------------------------------------------------------------

    def _answers(self) -> None:
        while (message := self._channel.take()) is not NOTHING:
            self._tell_words()
            self._objects.send(self._connection, Kind.ANSWER, self._stripped(message))
            self._desk.wait(False)

    def _stripped(self, message: Any) -> Any:
        """What is this node's own stays here."""
        if isinstance(message, m.Initialise):
            assert self._opening is not None
            layout = self._opening.layout
            self._first = Shelf(message.handle, layout, kept=self._spec.geometry.kept)
            return m.Initialise(self._opening.table)
        if isinstance(message, m.Opened):
            return self._opened(message)
        if isinstance(message, m.Rejoined):
            self._generation, desk = message.desk
            self._desk = Desk(desk)
            self._waiting.clear()
            return m.Rejoined(self._generation, [self._opened(each) for each in message.tables])
        return message

    def _opened(self, message: m.Opened) -> m.Opened:
        table = self._tables[message.table] = _Table(message, self._spec)
        values = [each.clone() for each in table.shelf.buffers], [each.clone() for each in table.shelf.others]
        return m.Opened(message.table, message.layout, values, None, message.personal)

    # -- from the shards ---------------------------------------------------------------------------------

    def _down(self) -> None:
        self._tell_words()
        while (record := self._desk.portions.pop()) is not None:
            self._connection.send(Kind.PORTION, PORTION.pack(*record))
            self._desk.wait(False)
        for number, table in self._tables.items():
            if table.attached:
                self._read(number, table)

    def _tell_words(self) -> None:
        words = [self._hub.words[word] for word in (STOP, GENERATION, CALLS)]
        if words != self._words:
            self._words = words
            self._connection.send(Kind.WORDS, WORDS.pack(*words, *[0] * 5))

    def _read(self, number: int, table: _Table) -> None:
        released, freed = table.so_far()
        if (released, freed) == (table.released, table.freed):
            return
        reading = (-1, 0, 0)
        if released > table.released:
            found = table.lane.replies.released(released - 1)
            assert found is not None
            reading = found
            self._send_version(number, table, reading[0], reading[1])
            self._desk.wait(False)
        table.released, table.freed = released, freed
        words = (number, released, freed, *reading, table.place, self._generation)
        self._connection.send(Kind.READING, WORDS.pack(*words))

    def _send_version(self, number: int, table: _Table, version: int, dial: int) -> None:
        if version == table.version:
            return
        sync = self._hub.dial(dial)
        table.version, table.place = version, (table.place + 1) % PLACES
        segments = table.weights(version, lockstep=sync.lockstep, delay=sync.delay)
        block = whole(segments, table.layout.parameters.nbytes)
        self._connection.send(Kind.VERSION, *bytes_of([block]), place=place_of(number, table.place))


def whole(segments: list[Tensor], nbytes: int) -> Tensor:
    """The block of bytes that these segments are views of."""
    first = segments[0]
    start = first.storage_offset() * first.element_size()
    return torch.empty(0, dtype=torch.uint8).set_(first.untyped_storage(), start, (nbytes,), (1,))
