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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from syncline import messages as m
from syncline.engines.local.control_channel import Channel
from syncline.engines.local.exchange import DELIVERED, KEEP
from syncline.engines.local.learner import CALLS, GENERATION, STOP, TRIES, perform, say
from syncline.engines.local.packing import unpack
from syncline.engines.local.record_codec import NOTE, encode
from syncline.engines.local.shared_memory import WakeUp
from syncline.engines.local.table_memory import PORTION
from syncline.engines.ray.bulk_connection import Connection, Frame, Head, Lost, bytes_of
from syncline.engines.ray.frame_kinds import OBJECTS, WORDS, Kind, Objects, place_of
from syncline.engines.ray.node_versions import MIRRORED, SHARED, Mirror, MirrorOf
from syncline.engines.run import Task
from syncline.messages.to_leader import Farewell, Gradient, Put, Reread, Rest, ToLeader
from syncline.ports import Computing, Draft, LearnerPort, Portion, Reading, Reset, Serving, TablePort
from syncline.roles.run_plan import Seat
from syncline.table.gradient_slot import private_slot

PLACES = 3  # versions of a table that may have arrived here
OVERTAKEN = -1  # in place of a version's place


class RemoteTable(TablePort):
    """One table, seen from its learner."""

    def __init__(
        self, opened: m.Opened | m.Initialise, slots: int, port: RemotePort, mirror: Mirror | None
    ) -> None:
        self.layout, self._first = opened.layout, isinstance(opened, m.Initialise)
        self._number = opened.table
        self._slots = [private_slot(opened.layout) for _ in range(slots)]
        self._free = set(range(slots))
        self._written = [-1] * slots  # which group options lie in each slot
        self.buffers, self.others = opened.handle
        self._port = port
        flat = opened.layout.parameters
        self.places = [torch.zeros(flat.nbytes, dtype=torch.uint8) for _ in range(PLACES)]
        self._views = [flat.views(flat.segments(place)) for place in self.places]
        self._mirror, self._generation = mirror, port.generation
        mirrored = mirror.places if mirror is not None else []
        self._mirrored = [flat.views(flat.segments(place)) for place in mirrored]
        self._released = 0  # tickets, from the first on
        self._reading, self._found = (
            Reading(-1),
            (-1, OVERTAKEN),
        )  # the last, and the version and place that came with it

    def heard(self, released: int, reading: Reading, found: tuple[int, int]) -> None:
        """From the stand-in, on the receiving thread, as the next."""
        self._released, self._reading, self._found = released, reading, found

    def freed(self, slot: int) -> None:
        self._free.add(slot)

    def draft(self, *, block: bool = True) -> Draft | None:
        if block:
            self._port.wait(lambda: bool(self._free))
        with self._port.changed:
            if not self._free:
                return None
            place = min(self._free)
            self._free.discard(place)
        slot = self._slots[place]
        return Draft(slot.gradients, slot.buffers, place, self.others if self._first else ())

    def publish(
        self,
        draft: Draft,
        message: Gradient | Put | m.Initialised,
        options: bytes = b"",
        present: Sequence[bool] = (),
    ) -> None:
        slot = self._slots[draft.place]
        if isinstance(message, Gradient):
            if self._written[draft.place] != message.options:
                slot.write_options(options)
                self._written[draft.place] = message.options
            if not message.full:
                slot.mask.copy_(torch.tensor(present, dtype=torch.uint8))
            if message.states:
                slot.write_states(message.states)
        self._port.send(Kind.SLOT, *bytes_of([slot.memory]), place=place_of(self._number, draft.place))
        if isinstance(message, m.Initialised):
            self._port.send(Kind.FIRST, *bytes_of([*draft.buffers, *draft.others]), place=self._number)
            return
        self._port.send(Kind.NOTE, NOTE.pack(*encode(message, draft.place)), place=1)

    def wait(self, number: int, *, block: bool = True) -> Reading | None:
        if block:
            self._port.wait(lambda: self._released > number)
        with self._port.changed:
            return self._reading if self._released > number else None

    def read(self, reading: Reading, into: list[Tensor]) -> int | None:
        if not into:
            return reading.version
        version, place = self._found
        if place == OVERTAKEN:
            return None
        if place >= MIRRORED:
            return self._read_mirror(version, place - MIRRORED, into)
        torch._foreach_copy_(into, self._views[place])
        return version

    def _read_mirror(self, version: int, place: int, into: list[Tensor]) -> int | None:
        """What was overwritten meanwhile has a newer one in its place."""
        assert self._mirror is not None
        for _ in range(TRIES):
            if self._mirror.holds(place, self._generation, version):
                torch._foreach_copy_(into, self._mirrored[place])
                if self._mirror.holds(place, self._generation, version):
                    return version
            if (found := self._mirror.newest(self._generation, version)) is None:
                return None
            version, place = found
        return None


class RemotePort(LearnerPort):
    """All that a session asks, on one connection."""

    def __init__(self, end: socket.socket, spec: RemoteLearner, agent: Channel | None = None) -> None:
        self.learner, self.rank = spec.learner, spec.seat.rank
        self._agent, self._places = agent, spec.places
        self._slots = spec.slots
        self.changed = threading.Condition()
        self._objects = Objects()
        self._connection = Connection(end, run=spec.run, incarnation=spec.learner, into=self._into)
        self._words = [0] * 3  # of the hub
        self._generation = self._calls = 0
        self._began = False  # the hub's words have come
        self._tables: dict[int, RemoteTable] = {}
        self._portions: dict[int, dict[int, Portion]] = {}
        self._answers: list[Any] = []
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
            table, index = self._tables.get(head.place >> 16), head.place & 0xFFFF
            return bytes_of([table.places[index]])[0] if table is not None and index < PLACES else None
        return self._objects.into(head)

    def _heard(self, frame: Frame) -> None:
        kind = frame.kind
        with self.changed:
            if kind == Kind.READING:
                table, released, version, dial, flags, found, place, generation = WORDS.unpack(frame.body)
                if generation == self._generation and table in self._tables:
                    reading = Reading(version, dial, bool(flags & KEEP), bool(flags & DELIVERED))
                    self._tables[table].heard(released, reading, (found, place))
            elif kind == Kind.FREED:
                table = frame.place >> 16
                if frame.generation == self._generation and table in self._tables:
                    self._tables[table].freed(frame.place & 0xFFFF)
            elif kind == Kind.PORTION:
                portion = Portion._make(PORTION.unpack(frame.body))
                self._portions.setdefault(portion.loader, {})[portion.number] = portion
            elif kind == Kind.WORDS:
                self._words, self._began = list(WORDS.unpack(frame.body)[:3]), True
            elif (kind in OBJECTS or kind == Kind.CARGO) and (found := self._objects.gather(frame)):
                self._answered(unpack(found[1]))
            self.changed.notify_all()

    def _answered(self, answer: Any) -> None:
        self._answers.append(answer)
        if isinstance(
            answer, m.Rejoined
        ):  # before what the new servers say: what the old ones have said is void
            self._generation = answer.desk
            self._portions.clear()
            self._tables.clear()

    # -- waiting -----------------------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        return self._generation

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
            self.ask(m.Called())

    def wait(self, ready: Callable[[], bool]) -> None:
        """For the shards; raises what the coordinator has to say meanwhile."""
        while True:
            with self.changed:
                self.changed.wait_for(lambda: ready() or self.disturbed)
                if ready():
                    return
            self.check()
            self.answer_call()

    # -- verbs -------------------------------------------------------------------------------------------

    def spend(self, work: Computing | Serving) -> None:
        pass

    def send(self, kind: int, *bodies: Any, place: int = 0) -> int:
        return self._connection.send(kind, *bodies, place=place, generation=self._generation)

    def post(self, message: ToLeader, *, later: bool = False) -> None:
        if isinstance(message, Rest | Reread | Farewell) and message.states:
            self.send(Kind.STATES, message.states, place=message.table)
        self.send(Kind.NOTE, NOTE.pack(*encode(message)), place=int(not later))

    def portion(self, loader: int, index: int, *, block: bool) -> Portion | None:
        with self.changed:
            mine = self._portions.setdefault(loader, {})
            if block:
                self.changed.wait_for(lambda: index in mine or self.stopping() or self.reset)
            if index not in mine and block and not self.stopping():
                raise Reset
            return mine.pop(index, None)

    def ask(self, message: Any) -> Any:
        understood = isinstance(message, m.AskDial)
        self._objects.send(self._connection, Kind.OPEN if understood else Kind.ASK, message)
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

    def open(self, opened: m.Opened | m.Initialise) -> RemoteTable:
        if isinstance(opened, m.Initialise):
            return RemoteTable(opened, self._slots, self, None)
        table = RemoteTable(opened, self._slots, self, self._mirror(opened))
        with self.changed:
            self._tables[opened.table] = table
        self.send(Kind.READY, place=opened.table)
        return table

    def _mirror(self, opened: m.Opened) -> Mirror | None:
        """The node's memory for a large table's versions."""
        nbytes = opened.layout.parameters.nbytes
        if nbytes < SHARED or self._agent is None:
            return None
        self._agent.send(MirrorOf(opened.table, nbytes, self._places))
        return Mirror(nbytes, self._places, self._agent.receive())

    def stopping(self) -> bool:
        return self._words[STOP] != 0

    # -- the end -----------------------------------------------------------------------------------------

    def try_send(self, message: Any) -> None:
        """Its last word."""
        with contextlib.suppress(Lost):
            number = self._objects.send(self._connection, Kind.LAST, message)
            self._over = True
            self._connection.wait_sent(number)


@contextlib.contextmanager
def _connected(spec: RemoteLearner, agent: Channel) -> Iterator[RemotePort]:
    end = socket.socket(fileno=os.dup(spec.end.fd))
    spec.end.close()
    port = RemotePort(end, spec, agent)
    try:
        yield port
    finally:
        end.close()


@dataclass(frozen=True, slots=True)
class RemoteLearner:
    """What a learner's process on another node runs; an agent makes it."""

    learner: int
    seat: Seat
    slots: int
    run: bytes
    end: WakeUp  # the connection: it travels as a descriptor, as bells do
    places: int  # for versions in a mirror

    def __call__(self, channel: Channel) -> int:
        task: Task = channel.receive()
        with _connected(self, channel) as port:
            try:
                port.try_send(perform(task, port, self.seat))
            except BaseException as error:
                say(port, error)  # type: ignore[arg-type]
                return 1
        return 0
