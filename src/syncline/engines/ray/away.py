"""A learner on another node than the shards: its port on a connection to its stand-in there.

What it publishes goes from its own slots onto the wire while it goes on; versions and portions arrive on a thread of their own.
The stand-in does what a local learner's port would do (relay.py); a lost connection ends this process.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from syncline.dial import Sync
from syncline.engines.local.cargo import unpack
from syncline.engines.local.channel import Channel
from syncline.engines.local.learner import CALLS, GENERATION, STOP, perform, say
from syncline.engines.local.memory import Bell
from syncline.engines.local.server import NOTE, PORTION
from syncline.engines.ray.bulk import Connection, Frame, Head, Lost, bytes_of
from syncline.engines.ray.frames import OBJECTS, WORDS, Kind, Objects
from syncline.engines.run import Task
from syncline.ports import (
    STATES,
    LearnerPort,
    Note,
    Portion,
    Reading,
    Reset,
    TableLink,
)
from syncline.ports import Kind as NoteKind
from syncline.table.layout import Layout
from syncline.table.slot import Slot, private_slot
from syncline.topology import messages as m
from syncline.topology.plan import Seat

PLACES = 3  # versions of a table that may have arrived here


@dataclass(frozen=True, slots=True)
class DialOf:
    """Asked of the stand-in itself."""

    number: int


def place_of(table: int, index: int) -> int:
    """A frame's place: a slot, or a version's, of a table."""
    return table << 16 | index


class AwayLink(TableLink):
    """One table, seen from its learner."""

    def __init__(self, opened: m.Opened, slots: int, port: AwayPort) -> None:
        self.layout = opened.layout
        self.slots = [private_slot(opened.layout) for _ in range(slots)]
        self.buffers, self.others = opened.handle
        self._port = port
        flat = opened.layout.parameters
        self.places = [torch.zeros(flat.nbytes, dtype=torch.uint8) for _ in range(PLACES)]
        self._views = [flat.views(flat.segments(place)) for place in self.places]
        self._found: dict[int, int] = {}  # version -> place, of the last ones
        self._released = self._freed = 0  # tickets, from the first on
        self._reading = Reading(-1)

    def heard(self, released: int, freed: int, reading: Reading, place: int) -> None:
        """From the stand-in, on the receiving thread."""
        self._freed = freed
        if released > self._released:
            self._found = {version: at for version, at in self._found.items() if at != place}
            self._found[reading.version] = place
            self._released, self._reading = released, reading

    def weights(self, version: int, sync: Sync) -> list[Tensor]:
        return self._views[self._found[version]]

    def released(self, number: int) -> Reading | None:
        with self._port.changed:
            return self._reading if self._released > number else None

    def wait(self, number: int) -> Reading:
        port = self._port
        while True:
            with port.changed:
                port.changed.wait_for(lambda: self._released > number or port.disturbed)
                if self._released > number:
                    return self._reading
            port.check()
            port.answer_call()

    def free(self, number: int) -> bool:
        return max(self._freed, self._released) > number

    def wait_free(self, number: int) -> None:
        port = self._port
        while True:
            with port.changed:
                port.changed.wait_for(lambda: self.free(number) or port.disturbed)
                if self.free(number):
                    return
            port.check()
            port.answer_call()


class AwayPort(LearnerPort):
    """All that a session asks, on one connection."""

    def __init__(self, end: socket.socket, spec: AwayLearner) -> None:
        self.learner, self.rank = spec.learner, spec.seat.rank
        self._slots = spec.slots
        self.changed = threading.Condition()
        self._objects = Objects()
        self._connection = Connection(end, run=spec.run, incarnation=spec.learner, into=self._into)
        self._words = [0] * 3  # of the hub
        self._generation = self._calls = 0
        self._began = False  # the hub's words have come
        self._links: dict[int, AwayLink] = {}
        self._first: dict[int, Tensor] = {}
        self._portions: dict[int, dict[int, Portion]] = {}
        self._answers: list[Any] = []
        self._dials: dict[int, Sync] = {}
        self._over = False
        for target in (self._listen, self._keep_sending):
            threading.Thread(target=target, daemon=True).start()
        with self.changed:
            self.changed.wait_for(lambda: self._began)
            self._generation, self._calls = self._words[GENERATION], self._words[CALLS]

    # -- arriving ----------------------------------------------------------------------------------------

    def _listen(self) -> None:
        try:
            while (frame := self._connection.receive()) is not None:
                self._heard(frame)
        except Lost:
            if not self._over:
                with contextlib.suppress(Exception):
                    sys.stdout.flush()
                os._exit(3)

    def _keep_sending(self) -> None:
        with contextlib.suppress(Lost):
            self._connection.keep_sending()

    def _into(self, head: Head) -> memoryview | None:
        if head.kind == Kind.VERSION:
            link = self._links.get(head.place >> 16)
            index = head.place & 0xFFFF
            return bytes_of([link.places[index]])[0] if link is not None and index < PLACES else None
        return self._objects.into(head)

    def _heard(self, frame: Frame) -> None:
        kind = frame.kind
        with self.changed:
            if kind == Kind.READING:
                table, released, freed, version, dial, flags, place, generation = WORDS.unpack(frame.body)
                if generation == self._generation and table in self._links:
                    self._links[table].heard(released, freed, Reading(version, dial, flags), place)
            elif kind == Kind.PORTION:
                portion = Portion._make(PORTION.unpack(frame.body))
                self._portions.setdefault(portion.loader, {})[portion.number] = portion
            elif kind == Kind.WORDS:
                self._words, self._began = list(WORDS.unpack(frame.body)[:3]), True
            elif (kind in OBJECTS or kind == Kind.CARGO) and (found := self._objects.gather(frame)):
                self._answers.append(unpack(found[1]))
            self.changed.notify_all()

    # -- waiting -----------------------------------------------------------------------------------------

    @property
    def reset(self) -> bool:
        return self._words[GENERATION] != self._generation

    @property
    def disturbed(self) -> bool:
        return self.reset or self._words[CALLS] != self._calls

    def check(self) -> None:
        if self.reset:
            raise Reset

    def answer_call(self) -> None:
        """Ask, where it was called while it waits in a step; raises what it is refused with."""
        if self._words[CALLS] != self._calls:
            self._calls = self._words[CALLS]
            self.request(m.Called())

    # -- verbs -------------------------------------------------------------------------------------------

    def now(self) -> float:
        return time.monotonic()

    def spend(self, examples: int) -> None:
        pass

    def post(self, note: Note, *, ring: bool = True) -> None:
        if note.kind in (NoteKind.GRADIENT, NoteKind.PUT):
            slot: Slot = self._links[note.table].slots[note.slot]
            self._send(Kind.SLOT, *bytes_of([slot.memory]), place=place_of(note.table, note.slot))
        elif note.flags & STATES:
            slot = self._links[note.table].slots[note.slot]
            place = place_of(note.table, note.slot)
            sent = self._send(
                Kind.TAIL, *bytes_of([slot_tail(slot, self._links[note.table].layout)]), place=place
            )
            self._connection.wait_sent(sent)
        self._send(Kind.NOTE, NOTE.pack(*note), place=int(ring))

    def ring(self) -> None:
        self._send(Kind.NOTE, b"")

    def _send(self, kind: int, *bodies: Any, place: int = 0) -> int:
        return self._connection.send(kind, *bodies, place=place, generation=self._generation)

    def portion(self, loader: int, index: int, *, block: bool) -> Portion | None:
        with self.changed:
            mine = self._portions.setdefault(loader, {})
            if block:
                self.changed.wait_for(lambda: index in mine or self.stopping() or self.reset)
            if index not in mine and block and not self.stopping():
                raise Reset
            return mine.pop(index, None)

    def request(self, message: Any) -> Any:
        if isinstance(message, m.Initialised):
            self._send(Kind.FIRST, *bytes_of([self._first.pop(message.table)]), place=message.table)
        self._objects.send(self._connection, Kind.OPEN if isinstance(message, m.Open) else Kind.ASK, message)
        with self.changed:
            self.changed.wait_for(lambda: self._answers)
            answer = self._answers.pop(0)
        if isinstance(answer, m.Refused):
            raise answer.error
        if isinstance(answer, m.Stale):
            raise Reset
        return answer

    def tell(self, message: Any) -> None:
        self._objects.send(self._connection, Kind.TELL, message)

    def first_values(self, handle: Any, layout: Layout) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        flats = layout.parameters, layout.buffers, layout.others
        memory = self._first[handle] = torch.zeros(sum(flat.nbytes for flat in flats), dtype=torch.uint8)
        views, start = [], 0
        for flat in flats:
            views.append(flat.views(flat.segments(memory[start:])))
            start += flat.nbytes
        return views[0], views[1], views[2]

    def pin(self, link: TableLink) -> None:
        pass  # unpinned memory works too, only slower

    def attach(self, opened: m.Opened) -> AwayLink:
        link = AwayLink(opened, self._slots, self)
        with self.changed:
            self._links[opened.table] = link
        self._send(Kind.NOTE, b"", place=2 + opened.table)  # versions may come from here on
        return link

    def rejoin(self, tables: int, loaders: int) -> list[Any]:
        answer: m.Rejoined = self.request(m.Rejoin(tables, loaders))
        with self.changed:
            self._generation = answer.desk
            self._portions.clear()
            self._links.clear()
        return answer.tables

    def dial(self, number: int) -> Sync:
        if number not in self._dials:
            self._dials[number] = self.request(DialOf(number))
        return self._dials[number]

    def stopping(self) -> bool:
        return self._words[STOP] != 0

    # -- the end -----------------------------------------------------------------------------------------

    def try_send(self, message: Any) -> None:
        """Its last word."""
        with contextlib.suppress(Lost):
            number = self._objects.send(self._connection, Kind.LAST, message)
            self._over = True
            self._connection.wait_sent(number)


def slot_tail(slot: Slot, layout: Layout) -> Tensor:
    """All but the gradients' values and the buffers."""
    return slot.memory[layout.parameters.nbytes + layout.buffers.nbytes :]


@contextlib.contextmanager
def _connected(spec: AwayLearner) -> Iterator[AwayPort]:
    end = socket.socket(fileno=os.dup(spec.end.fd))
    spec.end.close()
    port = AwayPort(end, spec)
    try:
        yield port
    finally:
        end.close()


@dataclass(frozen=True, slots=True)
class AwayLearner:
    """What a learner's process on another node runs; an agent makes it."""

    learner: int
    seat: Seat
    slots: int
    run: bytes
    end: Bell  # the connection: it travels as a descriptor, as bells do

    def __call__(self, channel: Channel) -> int:
        task: Task = channel.receive()
        with _connected(self) as port:
            try:
                port.try_send(perform(task, port, self.seat))
            except BaseException as error:
                say(port, error)  # type: ignore[arg-type]
                return 1
        return 0
