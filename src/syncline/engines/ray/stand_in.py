"""A learner's stand-in beside the shards: a local process that does for a learner on another node what its port would do here.

To shards and supervisor it is that learner: it fills the slots, posts the notes, reads the versions. A gradient's note is posted
when all of it lies in the slot (M12). One thread, nothing waits: both directions of the connection and the shared memory are
looked at in turn. It ends with its connection.
"""

from __future__ import annotations

import os
import select
import socket
import sys
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

from syncline import messages as m
from syncline.dial import Sync
from syncline.engines.local.control_channel import NOTHING, Channel, Closed
from syncline.engines.local.exchange import DELIVERED
from syncline.engines.local.learner import CALLS, GENERATION, STOP, TRIES, ControlBlock, LearnerSpec
from syncline.engines.local.packing import Parcel, unpack
from syncline.engines.local.record_codec import NOTE, Record, decode
from syncline.engines.local.shared_memory import WakeUp
from syncline.engines.local.table_memory import PORTION, Lane, Mailbox, TableMemory
from syncline.engines.local.version_ring import Reader
from syncline.engines.ray.agent import Order
from syncline.engines.ray.authentication import Secret, Stranger, connect
from syncline.engines.ray.bulk_connection import Connection, Frame, Head, Lost, bytes_of
from syncline.engines.ray.frame_kinds import AGENT, OBJECTS, WORDS, Kind, Objects, place_of
from syncline.engines.ray.node_versions import MIRRORED, SHARED
from syncline.engines.ray.remote_learner import OVERTAKEN, PLACES
from syncline.engines.ray.version_courier import Have, Versions, Want, bodies, choose, whole
from syncline.messages.to_leader import Await, Blocked, Gradient, Load, Meet, Put, Reread, Rest
from syncline.table.layout import Layout

ASKED = -1  # in place of a frame: the courier brings it
LOOK = 1000  # milliseconds without anything to do
WAITS = (Gradient, Put, Rest, Reread, Load, Blocked, Await, Meet)  # after which a learner waits


@dataclass(frozen=True, slots=True)
class StandIn:
    """What a local process runs in place of a learner on another node."""

    address: tuple[str, int]
    host: str
    secret: Secret
    threads: int | None
    lost: WakeUp  # rings when its node is declared dead
    refusals: WakeUp  # rings for every frame that was turned away
    courier: WakeUp  # a channel to its node's: it travels as a descriptor, as bells do

    def __call__(self, channel: Channel, spec: LearnerSpec) -> int:
        order = Order(spec.learner, spec.seat, spec.geometry.slots, self.threads, spec.geometry.places)
        try:
            end = connect(self.address, self.secret)
            agent = Connection(end, run=self.secret.run, incarnation=AGENT, into=lambda head: None)
            agent.wait_sent(Objects().send(agent, Kind.ORDER, order))
        except (OSError, Stranger, Lost) as error:
            words = f"no way to node {self.host} at {self.address[0]}:{self.address[1]} for learner {spec.seat.rank}"
            print(f"syncline: {words}: {error}", file=sys.stderr, flush=True)
            self.lost.ring()
            return 1
        return _Relay(channel, spec, end, self).run()


@dataclass(slots=True)
class _Sending:
    """A version that is on its way to the learner, and the reading that goes with it."""

    reading: tuple[int, int, int]  # version, dial, flags
    version: int
    places: list[int] | None  # in the ring; None: it lies in the inbox, where nobody overwrites it
    frame: int
    tries: int = 1


class _Table:
    """One table's memory here, and how far its learner has been told of it."""

    def __init__(self, opened: m.Opened | m.Initialise, spec: LearnerSpec) -> None:
        geometry, layout = spec.geometry, opened.layout
        self.layout: Layout = layout
        self.shelf = TableMemory(opened.handle, layout, places=geometry.places)
        self.lane = Lane(opened.lane, layout, slots=geometry.slots)
        self.reader = Reader(layout, self.shelf.ring, self.shelf.versions, self.lane.inbox)
        opened.handle.close()
        opened.lane.close()
        self.ready = False  # the learner has memory for versions
        self.released = 0  # tickets, as the learner knows
        self.published: dict[int, int] = {}  # slot -> ticket, until it is free
        self.version, self.place = -1, -1  # that the learner has, and where
        self.sending: _Sending | None = None

    def freed(self) -> list[int]:
        """Slots that the learner may use again, each once."""
        found = [slot for slot, number in self.published.items() if self.lane.drafts.freed(slot, number)]
        for slot in found:
            del self.published[slot]
        return found

    def bodies(self, places: list[int] | None) -> list[memoryview]:
        """A version as it lies in memory."""
        if places is None:
            return bytes_of([whole(self.lane.inbox, self.layout.parameters.nbytes)])
        return bodies(self.layout, self.shelf.ring, places)


class _Relay:
    def __init__(self, channel: Channel, spec: LearnerSpec, end: Any, node: StandIn) -> None:
        self._channel, self._spec, self._node = channel, spec, node
        self._objects = Objects()
        self._connection = Connection(end, run=node.secret.run, incarnation=spec.learner, into=self._into)
        self._desk, self._hub = Mailbox(spec.desk), ControlBlock(spec.hub)
        self._generation = spec.generation
        self._words: list[int] = []  # as the learner knows them
        self._tables: dict[int, _Table] = {}
        self._waiting: deque[Record] = deque()  # for room on the desk
        self._ended = False
        self._refused = 0  # frames
        self._courier = Channel(socket.socket(fileno=os.dup(node.courier.fd)))
        self._dials = {0: spec.seat.plan.course.first}  # by number, as learners know them
        self._dial = 0  # that the learner has asked for
        self._poll = select.poll()
        for fd in (spec.bell.fd, channel.fileno(), self._courier.fileno(), node.lost.fd):
            self._poll.register(fd, select.POLLIN)

    def run(self) -> int:
        try:
            while True:
                busy = self._up()
                self._answers()
                self._brought()
                self._down()
                self._sleep(0 if busy else LOOK)
        except Lost as error:
            self._count_refused()
            if self._ended:
                return 0
            words = f"learner {self._spec.seat.rank} on {self._node.host} is gone: {error}"
            print(f"syncline: {words}", file=sys.stderr)
            return 1

    def _sleep(self, milliseconds: int) -> None:
        out = select.POLLOUT if self._connection.unsent else 0
        self._poll.register(self._connection.fileno(), select.POLLIN | out)
        if self._waiting:
            milliseconds = min(milliseconds, 1)
        if self._node.lost.fd in dict(self._poll.poll(milliseconds)):
            raise Lost("its node was declared dead")
        self._spec.bell.quiet()
        self._connection.flush()

    # -- from the learner --------------------------------------------------------------------------------

    def _into(self, head: Head) -> memoryview | None:
        if head.kind == Kind.SLOT:
            table, index = self._tables.get(head.place >> 16), head.place & 0xFFFF
            if table is None or index >= len(table.lane.slots):
                return None
            return bytes_of([table.lane.slots[index].memory])[0]
        if head.kind == Kind.FIRST and head.place in self._tables:
            return memoryview(bytearray(head.length))
        return self._objects.into(head)

    def _up(self) -> bool:
        """All that has come; True if there is more."""
        self._post_waiting()
        self._count_refused()
        while (frame := self._connection.receive(0)) is not None:
            self._heard(frame)
        return False

    def _count_refused(self) -> None:
        for _ in range(self._connection.refused.total() - self._refused):
            self._refused += 1
            self._node.refusals.ring()

    def _heard(self, frame: Frame) -> None:
        kind = frame.kind
        if kind == Kind.FIRST:
            self._fill(self._tables[frame.place].shelf, frame.body)
        elif (kind in OBJECTS or kind == Kind.CARGO) and (found := self._objects.gather(frame)):
            self._object(*found)
        elif frame.generation != self._generation:
            return  # of servers that are gone
        elif kind == Kind.NOTE:
            self._note(NOTE.unpack(frame.body), ring=bool(frame.place))
        elif kind == Kind.STATES:
            self._tables[frame.place].lane.slots[0].write_states(bytes(frame.body))
        elif kind == Kind.READY:
            self._tables[frame.place].ready = True

    def _note(self, record: Record, *, ring: bool) -> None:
        message, slot = decode(record, lambda table, slot: b"")
        if isinstance(message, Gradient | Put):
            self._tables[message.table].published[slot] = message.number
        if isinstance(message, WAITS) and not (isinstance(message, Gradient) and message.silent):
            self._desk.wait(True)
        self._waiting.append(record)
        self._post_waiting(ring=ring)

    def _post_waiting(self, *, ring: bool = True) -> None:
        while self._waiting and self._desk.notes.push(self._waiting[0]):
            self._waiting.popleft()
        if ring or self._waiting:
            self._spec.shard_bell.ring()

    def _object(self, kind: int, parcel: Parcel) -> None:
        if kind == Kind.OPEN:
            message = unpack(parcel)
            self._dial = message.number
            self._channel.send(message)
        else:
            self._ended |= kind == Kind.LAST
            self._channel.send(parcel)
            parcel.close()
        if kind != Kind.TELL:
            self._desk.wait(True)

    def _fill(self, shelf: TableMemory, values: memoryview) -> None:
        """First buffers and other tensors of a table, by the learner that initialises it."""
        for target in bytes_of([*shelf.buffers, *shelf.others]):
            target[:], values = values[: len(target)], values[len(target) :]

    # -- from the coordinator ----------------------------------------------------------------------------

    def _answers(self) -> None:
        while (message := self._channel.take()) is not NOTHING:
            self._tell_words()
            self._objects.send(self._connection, Kind.ANSWER, self._stripped(message))
            self._desk.wait(False)

    def _stripped(self, message: Any) -> Any:
        """What is this node's own stays here."""
        if isinstance(message, m.Opened | m.Initialise):
            return self._opened(message)
        if isinstance(message, Sync):
            self._dials[self._dial] = message
        if isinstance(message, m.Rejoined):
            self._generation, desk = message.desk
            self._desk = Mailbox(desk)
            self._waiting.clear()
            return replace(message, tables=list(map(self._opened, message.tables)), desk=self._generation)
        return message

    def _opened(self, message: Any) -> Any:
        if isinstance(message, m.Opened) and message.layout.parameters.nbytes >= SHARED:
            places = self._spec.geometry.places
            self._tell_courier(
                Versions(message.table, self._generation, message.layout, places, message.handle)
            )
        table = self._tables[message.table] = _Table(message, self._spec)
        values = [each.clone() for each in table.shelf.buffers], [each.clone() for each in table.shelf.others]
        return replace(message, handle=values, lane=None)

    # -- from the shards ---------------------------------------------------------------------------------

    def _down(self) -> None:
        self._tell_words()
        while (record := self._desk.portions.pop()) is not None:
            self._connection.send(Kind.PORTION, PORTION.pack(*record))
            self._desk.wait(False)
        for number, table in self._tables.items():
            for slot in table.freed():
                place = place_of(number, slot)
                self._connection.send(Kind.FREED, place=place, generation=self._generation)
            while table.ready and self._read(number, table):
                pass

    def _tell_words(self) -> None:
        words = [self._hub.words[word] for word in (STOP, GENERATION, CALLS)]
        if words != self._words:
            self._words = words
            self._connection.send(Kind.WORDS, WORDS.pack(*words, *[0] * 5))

    def _read(self, number: int, table: _Table) -> bool:
        """What was released is sent as it lies in the ring, and told when it still lies there (M13); False: nothing to do."""
        sending = table.sending
        if sending is not None:
            if sending.frame == ASKED or not self._connection.sent(sending.frame):
                return False
            if sending.places is None or table.reader.hold(sending.version, sending.places):
                table.version = sending.version
                self._tell_reading(number, table, sending.reading)
            elif sending.tries < TRIES:
                self._send(number, table, sending.reading, sending.tries + 1)
            else:
                self._overtaken(number, table, sending.reading)
        elif (released := table.lane.replies.so_far()) > table.released:
            table.released = released
            reading = table.lane.replies.released(released - 1)
            assert reading is not None
            if reading[0] == table.version:
                self._tell_reading(number, table, reading)
            else:
                self._send(number, table, reading, 1)
        else:
            return False
        return True

    def _send(self, number: int, table: _Table, reading: tuple[int, int, int], tries: int) -> None:
        version, places = reading[0], None
        if not reading[2] & DELIVERED:
            if table.layout.parameters.nbytes >= SHARED:
                self._ask(number, table, reading)
                return
            chosen = choose(table.reader, version)
            if chosen is None:
                self._overtaken(number, table, reading)
                return
            version, places = chosen
        if tries == 1:
            table.place = (table.place + 1) % PLACES
        table.version = -1  # nothing whole lies there
        place = place_of(number, table.place)
        frame = self._connection.send(Kind.VERSION, *table.bodies(places), place=place)
        table.sending = _Sending(reading, version, places, frame, tries)

    def _ask(self, number: int, table: _Table, reading: tuple[int, int, int]) -> None:
        """The node's courier for this version."""
        dial = self._dials.get(reading[1])
        self._tell_courier(Want(number, self._generation, reading[0], dial is None or dial.lockstep))
        table.sending = _Sending(reading, reading[0], None, ASKED)

    def _tell_courier(self, message: Versions | Want) -> None:
        """It reads all the time; where it does not, it is killed."""
        try:
            self._courier.send(message)
        except Closed as error:
            raise Lost("the courier of its node is gone") from error

    def _brought(self) -> None:
        try:
            while (have := self._courier.take()) is not NOTHING:
                self._have(have)
        except Closed as error:
            raise Lost("the courier of its node is gone") from error

    def _have(self, have: Have) -> None:
        table = self._tables.get(have.table)
        if table is None or table.sending is None or have.generation != self._generation:
            return
        table.version, table.place = have.version, MIRRORED + have.place
        self._tell_reading(have.table, table, table.sending.reading)

    def _overtaken(self, number: int, table: _Table, reading: tuple[int, int, int]) -> None:
        table.version = -1
        self._tell_reading(number, table, reading)

    def _tell_reading(self, number: int, table: _Table, reading: tuple[int, int, int]) -> None:
        table.sending = None
        table.lane.replies.has_read(table.released - 1)
        place = table.place if table.version >= 0 else OVERTAKEN
        words = (number, table.released, *reading, table.version, place, self._generation)
        self._connection.send(Kind.READING, WORDS.pack(*words))
        self._desk.wait(False)
