"""A learner's process: the port of its session on shared memory, and the call of the user's function.

Also the evaluator's process, which tests snapshots beside the learners (R6).
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from syncline import messages as m
from syncline.engines.local.control_channel import Channel, Closed
from syncline.engines.local.exchange import DELIVERED, KEEP, Replies
from syncline.engines.local.record_codec import Record, encode
from syncline.engines.local.shared_cuda_memory import EVENT, StreamOrder
from syncline.engines.local.shared_memory import YIELDS, Region, Waiter, WakeUp
from syncline.engines.local.shared_pickle import Parcel, pack, unpack
from syncline.engines.local.table_memory import GRADIENTS, LEAF, WAITS, Geometry, Lane, Mailbox, TableMemory
from syncline.engines.local.version_reader import Reader, VersionFlow, swappable
from syncline.engines.run import Task
from syncline.learn.allreduce_session import AllReduceSession
from syncline.learn.server_session import ServerSession
from syncline.learn.session import UNSAID
from syncline.messages.to_leader import Farewell, Gradient, Put, Reread, Rest, ToLeader
from syncline.ports import Draft, LearnerPort, Portion, Reading, Reset, TablePort
from syncline.roles.run_plan import Seat

# words of the hub: the run is to end; how often the servers were started; how often learners were called
STOP, GENERATION, CALLS = 0, 1, 2
TRIES = 4  # to read a version before it is asked for

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class LearnerSpec:
    """A learner's own part of its setup."""

    learner: int
    hub: Region  # what the supervisor tells all learners, in words
    desk: Region
    bell: WakeUp
    shard_bell: WakeUp  # of the leading shard
    geometry: Geometry
    generation: int
    seat: Seat
    leaves: Sequence[WakeUp] = ()  # over a tree


class LocalTable(TablePort):
    """One table, seen from its learner."""

    def __init__(self, opened: m.Opened | m.Initialise, geometry: Geometry, port: LocalLearnerPort) -> None:
        self.layout, self._first = opened.layout, isinstance(opened, m.Initialise)
        self.shelf = TableMemory(opened.handle, opened.layout, places=geometry.places)
        self.lane = Lane(opened.lane, opened.layout, slots=geometry.slots)
        self._replies: Replies = self.lane.replies
        self._port = port
        self._order: StreamOrder | None = None
        if geometry.card is not None and not self._first:  # else the shards have nothing there yet
            for block in (self.shelf, self.lane):
                block.to_card(geometry.card, owner=False, check=port.check)
            self._order = StreamOrder(geometry.card, self.lane.handles, EVENT)
            _pin([self.lane.losses.page])
        self._inbox = opened.layout.parameters.views(self.lane.inbox)
        self._reader = Reader(opened.layout, self.shelf.ring, self.shelf.versions, self.lane.inbox)
        self._number = 0  # of the last ticket that was released
        self._has = -1  # the version that was read last
        self._flow: VersionFlow | None = None
        self.buffers, self.others = self.shelf.buffers, self.shelf.others
        self._published: list[int | None] = [-1] * geometry.slots  # tickets by slot; None: being filled
        self._written = [-1] * geometry.slots  # which group options lie in each slot
        self._ordered = [-1] * geometry.slots  # on a card: after these tickets' use comes what is done here
        self._own: Callable[[list[Tensor]], list[Tensor]] = list  # what is read of a version
        opened.handle.close()
        opened.lane.close()

    def _after_shards(self, order: StreamOrder) -> None:
        """What shards did before they said so comes before what is done now."""
        for place, number in enumerate(self._published):
            if number is not None and number >= 0 and self._freed(place, number):
                self._ordered[place] = number
        order.after(self.shelf.handles, range(EVENT, EVENT + self.layout.shards))

    # -- what is published -------------------------------------------------------------------------------

    def draft(self, *, block: bool = True) -> Draft | None:
        place = self._free()
        if place is None:
            if not block:
                return None
            place = self._port.until(self._free)
        number, self._published[place] = self._published[place], None
        if self._order is not None and number != self._ordered[place]:
            self._after_shards(self._order)
        return self.at(place)

    def at(self, place: int) -> Draft:
        """A draft by its place."""
        slot = self.lane.slots[place]
        if self._first:
            return Draft(slot.gradients, self.shelf.buffers, place, self.shelf.others)
        return Draft(slot.gradients, slot.buffers, place)

    def _free(self) -> int | None:
        """The first: what the dial in force does not need is never touched."""
        for place, number in enumerate(self._published):
            if number is not None and (number < 0 or self._freed(place, number)):
                return place
        return None

    def _freed(self, place: int, number: int) -> bool:
        return self.lane.drafts.freed(place, number) or self.lane.passed.freed(place, number)

    def publish(
        self,
        draft: Draft,
        message: Gradient | Put | m.Initialised,
        options: bytes = b"",
        present: Sequence[bool] = (),
    ) -> None:
        place, port = draft.place, self._port
        if isinstance(message, m.Initialised):  # its shards look there when they hear of it
            return
        if isinstance(message, Gradient):
            slot = self.lane.slots[place]
            if self._written[place] != message.options:
                slot.write_options(options)
                self._written[place] = message.options
            if not message.full:
                slot.mask.copy_(torch.tensor(present, dtype=torch.uint8))
            if message.states:
                slot.write_states(message.states)
            if self._order is not None and isinstance(message.loss, Tensor):
                self.lane.losses.write(message.number, message.loss)
                message = message._replace(loss=UNSAID)
        if self._order is not None:
            self._order.signal()  # what was done comes before what shards do once they hear of it
        if port.leaves and isinstance(message, Gradient):  # over a tree
            self.lane.outbox.push(encode(message, place))
            port.desk.words[GRADIENTS] += 1
            port.leaves[port.desk.words[LEAF]].ring()
        else:
            port.push(encode(message, place))
        self._published[place] = message.number

    # -- what is read ------------------------------------------------------------------------------------

    def narrow_to(
        self, own: Callable[[list[Tensor]], list[Tensor]], reads: Sequence[Sequence[tuple[int, int]]]
    ) -> None:
        """Only this is read; in memory of its own, since other processes of this learner read at the same time."""
        self._own, scratch = own, self.layout.parameters.new(torch.device("cpu"))
        self._reader = Reader(self.layout, self.shelf.ring, self.shelf.versions, scratch, reads)

    def close(self) -> None:
        """Nothing is read any more."""
        if self._flow is not None:
            self._flow.close()

    @property
    def overtaken(self) -> bool:  # type: ignore[override]
        return self._flow is not None and self._flow.overtaken

    def _all_freed(self) -> bool | None:
        """Nothing is under way any more; None: something is."""
        for place, number in enumerate(self._published):
            if number is not None and number >= 0 and not self._freed(place, number):
                return None
        return True

    def wait(self, number: int | None, *, block: bool = True) -> Reading | None:
        if number is None:
            self._port.until(self._all_freed)
            return None
        found = self._replies.released(number)
        if found is None:
            if not block:
                return None
            found = self._port.until(partial(self._replies.released, number))
        elif block:
            self._port.sleeper.busy()
        self._number = number
        version, dial, flags = found
        return Reading(version, dial, bool(flags & KEEP), bool(flags & DELIVERED))

    def read(self, reading: Reading | None, into: list[Tensor]) -> int | None:
        if reading is None:
            return self._read_newest(into)
        version = self.copy(reading, into) if into else reading.version
        self._replies.has_read(self._number)
        if version is not None and into:
            self._has = version
            if self._flow is not None:
                self._flow.has(version)
        return version

    def has_read(self) -> None:
        self._replies.has_read(self._number)

    def copy(self, reading: Reading, into: list[Tensor]) -> int | None:
        """`read`, without saying so."""
        if reading.delivered:
            self._take(into, None)
            return reading.version
        for _ in range(TRIES):
            found = self._reader.choose(reading.version)
            if found is None:  # shards are between two versions
                os.sched_yield()
                continue
            self._take(into, found[1])
            if self._reader.hold(*found):
                return found[0]
        return None

    def _take(self, into: list[Tensor], places: list[int] | None) -> None:
        """What lies in these places, or was delivered. All of it is there afterwards; from card to card, for what follows on the stream."""
        if self._order is not None:
            self._after_shards(self._order)
        source = self._own(self._inbox if places is None else self._reader.sources(places))
        on_gpu = any(tensor.is_cuda for tensor in into)
        torch._foreach_copy_(into, source, non_blocking=on_gpu)
        if on_gpu and not any(tensor.is_cuda for tensor in source):
            torch.cuda.current_stream().synchronize()
        if self._order is not None:
            self._order.signal()

    def _read_newest(self, parameters: list[Tensor]) -> int | None:
        """Not said to the shards: what they said last stays unread, so that they make versions beside each other (M13)."""
        if self._flow is None and swappable(parameters):
            scratch = self.layout.parameters.new(torch.device("cpu"))
            reader = Reader(self.layout, self.shelf.ring, self.shelf.versions, scratch)
            self._flow = VersionFlow(reader, parameters, self._has)
        if self._flow is not None:
            return self._flow.swap(parameters)
        for _ in range(TRIES):
            if (found := self._reader.newest(self._has)) is None:
                return None
            self._take([parameter.data for parameter in parameters], found[1])
            if self._reader.hold(*found):
                self._has = found[0]
                return self._has
        return None


class LocalLearnerPort(LearnerPort):
    """All that a session asks, on shared memory and one control channel."""

    def __init__(self, channel: Channel, spec: LearnerSpec) -> None:
        self.learner, self.rank, self.leaves = spec.learner, spec.seat.rank, spec.leaves
        self._channel, self._spec = channel, spec
        self.desk = Mailbox(spec.desk)
        self._hub = spec.hub.words
        self.sleeper = Waiter(spec.bell, yields=YIELDS["learner"])
        self._generation, self._calls = spec.generation, self._hub[CALLS]
        self._portions: dict[int, dict[int, Portion]] = {}
        self._tables: dict[int, LocalTable] = {}

    def check(self) -> None:
        """Nobody waits for servers that are gone."""
        if self._hub[GENERATION] != self._generation:
            raise Reset

    def until(self, attempt: Callable[[], Found | None]) -> Found:
        """Wait in a step for others; raises what it is refused with when it was called meanwhile."""
        words, hub = self.desk.words, self._hub
        words[WAITS] = True
        try:
            while (found := attempt()) is None:
                if hub[GENERATION] != self._generation:
                    raise Reset
                if hub[CALLS] != self._calls:
                    self._calls = hub[CALLS]
                    self.ask(m.Called())
                self.sleeper.wait()
        finally:
            words[WAITS] = False
        self.sleeper.busy()
        return found

    def post(self, message: ToLeader, *, later: bool = False) -> None:
        if isinstance(message, Rest | Reread | Farewell) and message.states:  # it has no draft
            self._tables[message.table].lane.slots[0].write_states(message.states)
        self.push(encode(message), later=later)

    def push(self, record: Record, *, later: bool = False) -> None:
        while not self.desk.notes.push(record):
            self.check()
            self._spec.shard_bell.ring()
            self.sleeper.wait(0.01)
        if not later:
            self._spec.shard_bell.ring()

    def portion(self, loader: int, index: int, *, block: bool) -> Portion | None:
        mine, words = self._portions.setdefault(loader, {}), self.desk.words
        words[WAITS] = block
        try:
            while True:
                while (record := self.desk.portions.pop()) is not None:
                    portion = Portion._make(record)  # type: ignore[arg-type]
                    self._portions.setdefault(portion.loader, {})[portion.number] = portion
                if index in mine or not block or self.stopping():
                    return mine.pop(index, None)
                self.check()
                self.sleeper.wait()
        finally:
            words[WAITS] = False

    def ask(self, message: Any) -> Any:
        self._channel.send(message)
        answer = self._channel.receive()
        if isinstance(answer, m.Refused):
            raise answer.error
        if isinstance(answer, m.Stale):
            raise Reset
        if isinstance(answer, m.Rejoined):  # new servers read what is said from here on elsewhere
            self._generation, desk = answer.desk
            self.desk = Mailbox(desk)
            desk.close()
            self._portions.clear()
        return answer

    def tell(self, message: Any) -> None:
        self._channel.send(message)

    def left_loop(self, *, again: bool) -> None:
        self._channel.send(m.LeftLoop(again))

    def open(self, opened: m.Opened | m.Initialise) -> LocalTable:
        table = LocalTable(opened, self._spec.geometry, self)
        if isinstance(opened, m.Initialise):
            return table
        if opened.table in self._tables:
            self._tables[opened.table].close()
        self._tables[opened.table] = table
        if torch.device(self._spec.seat.device).type == "cuda" and self._spec.geometry.card is None:
            _pin([table.lane.memory, table.shelf.memory])  # the blocks that a GPU copies to and from
        return table

    def stopping(self) -> bool:
        return self._hub[STOP] != 0


def _pin(blocks: Sequence[Tensor]) -> None:
    """Lock memory for copies to and from a GPU."""
    for block in blocks:
        if block.numel():
            error = torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.nbytes, 0)
            if int(error) != 0:
                return  # unpinned memory works too, only slower


def run_learner(channel: Channel, spec: LearnerSpec) -> int:
    """Call the user's function; say how it ended."""
    try:
        task = channel.receive()
        if not isinstance(task, Task):  # it stands in for a learner elsewhere
            return int(task(channel, spec))
        session = ServerSession(LocalLearnerPort(channel, spec), spec.seat)
        try:
            value = call(task, session)
        finally:
            session.close()
        channel.send(returned(value))
    except Closed:
        return 1
    except BaseException as error:
        say(channel, error)
        return 1
    return 0


def call(task: Task, session: ServerSession | AllReduceSession) -> Any:
    """What the user's function gives back."""
    session.seed()
    with session.until_stopped():
        return task.function(session, *task.arguments, **task.keywords)


def returned(value: Any) -> Parcel:
    """What its function gave back; where that cannot travel, why: nothing else of the run may be lost with it."""
    try:
        return pack(m.Returned(value))
    except Exception as error:
        return pack(m.Returned(None, f"{type(value).__name__}: {' '.join(str(error).split())}"))


def say(channel: Channel, error: BaseException) -> None:
    """How a learner's function ended."""
    text = "".join(traceback.format_exception(error))
    sys.stdout.flush()
    told: BaseException | None = error
    try:
        unpack(pack(error))
    except Exception:  # the exception itself does not travel, or does not arrive
        told = None
    channel.try_send(m.Raised(told, text))


def run_evaluator(channel: Channel) -> None:
    """Test snapshots until the supervisor closes the channel."""
    try:
        evaluate = channel.receive()
        os.nice(1)
        while True:
            tag, state = channel.receive()
            with torch.no_grad():
                channel.send((tag, evaluate(state)))
    except Closed:
        return
    except Exception as error:
        say(channel, error)
