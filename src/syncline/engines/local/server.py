"""A shard's process: the server role on shared memory.

Reads learners' notes (the leading shard) or the log (the others) and hands them to the role; carries out its
effects. Not responsible for any decision.
"""

from __future__ import annotations

import gc
import struct
import threading
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from syncline import messages as m
from syncline.engines.checkpoint_files import with_content, write_part
from syncline.engines.checkpoint_writer import Writer
from syncline.engines.local.control_channel import Channel, Closed
from syncline.engines.local.cuda_memory import Handles, StreamOrder, share
from syncline.engines.local.exchange import DELIVERED, KEEP, LINE, Drafts, Replies, Ring, Shares
from syncline.engines.local.record_codec import (
    ENTRY,
    NO_SLOT,
    NOTE,
    Record,
    decode,
    decode_entry,
    encode_entry,
    speaks_of,
)
from syncline.engines.local.shared_memory import Region, SharedWords, Waiter, WakeUp, crash_at
from syncline.engines.local.version_ring import RingPart, Words
from syncline.messages import log
from syncline.messages.to_leader import NO_LOADER, Gradient, Put, ToLeader
from syncline.ports import FIRST_VALUES, Computing, Portion, Reading, ServerPort, Serving, VersionMemory
from syncline.roles.server import ServerRole
from syncline.table.checkpoints import FIRST, Folder
from syncline.table.layout import Layout
from syncline.table.slot import Slot, slot_bytes
from syncline.table.store import copy_segments

PORTION = struct.Struct("=6q")
DRAFTED = (log.Take, log.PutValues, log.Free)  # entries that speak of a draft
DESK_NOTES, DESK_PORTIONS, LOG_ENTRIES = 64, 256, 1024
WAITS = Ring.words(DESK_NOTES) + Ring.words(DESK_PORTIONS)  # a word of a desk
MEMORY, EVENT = 0, 1  # handles of a lane: its block, its learner; of a shelf: its block, its shards
LISTEN_EVERY = 0.002  # seconds of work between looks at the supervisor's channel
SLOW = 0.002  # seconds between looks at a full log


@dataclass(slots=True)
class Mailbox:
    """Between one learner and the leading shard: notes there, portions back."""

    region: Region
    notes: Ring = field(init=False)
    portions: Ring = field(init=False)
    _words: memoryview = field(init=False)

    def __post_init__(self) -> None:
        cells = SharedWords(self.region)
        self.notes = Ring(cells, 0, capacity=DESK_NOTES, form=NOTE)
        self.portions = Ring(cells, Ring.words(DESK_NOTES), capacity=DESK_PORTIONS, form=PORTION)
        self._words = self.region.words

    @staticmethod
    def nbytes() -> int:
        return 8 * (Ring.words(DESK_NOTES) + Ring.words(DESK_PORTIONS) + LINE)

    def wait(self, waiting: bool) -> None:
        """The learner says that it waits for others, so that nobody takes it for hanging."""
        self._words[WAITS] = waiting

    @staticmethod
    def heard(region: Region) -> tuple[int, bool]:
        """From outside: how many notes it has sent, and whether it waits."""
        return region.words[0], bool(region.words[WAITS])


class Lane:
    """Between one learner and all shards of one table: replies, gradient slots, an inbox.

    What the dial in force does not use is never touched, and takes no memory.
    """

    def __init__(self, region: Region, layout: Layout, *, slots: int) -> None:
        memory = region.tensor()
        cells, shards = SharedWords(region), layout.shards
        self.replies = Replies(cells, 0, shards=shards)
        self.drafts = Drafts(cells, Replies.words(shards), shards=shards, slots=slots)
        self.handles = Handles(region, 8 * self._words(layout, slots))
        self._layout, self._slots, self._start = layout, slots, self._head(layout, slots)
        self.numbers = [-1] * slots  # a shard's own: tickets whose drafts lie in the slots
        self.memory = memory
        self._lay(None)

    def _lay(self, card: Tensor | None) -> None:
        """Slots and inbox, in the shared memory or with their values on a card."""
        layout, size, values = self._layout, slot_bytes(self._layout), self._values(self._layout)
        host = [self.memory[self._start + index * size :][:size] for index in range(self._slots)]
        if card is None:
            self.slots = [Slot(layout, block) for block in host]
            inbox = self.memory[self._start + self._slots * size :]
        else:
            self.slots = [Slot(layout, block, card[index * values :]) for index, block in enumerate(host)]
            inbox = card[self._slots * values :]
        self.inbox = layout.parameters.segments(inbox)

    def to_card(self, device: str, *, owner: bool, wait: Callable[[], None]) -> None:
        """Gradients and inbox lie there from now on."""
        nbytes = self._slots * self._values(self._layout) + self._layout.parameters.nbytes
        what = f"{self._slots} gradients and an inbox of a learner"
        self._lay(share(self.handles, MEMORY, device, nbytes, what, owner=owner, wait=wait))

    @staticmethod
    def _values(layout: Layout) -> int:
        return layout.parameters.nbytes + layout.buffers.nbytes

    @staticmethod
    def _words(layout: Layout, slots: int) -> int:
        return Replies.words(layout.shards) + Drafts.words(layout.shards, slots)

    @classmethod
    def _head(cls, layout: Layout, slots: int) -> int:
        head = 8 * cls._words(layout, slots) + Handles.nbytes(2)
        return -(-head // 4096) * 4096

    @classmethod
    def nbytes(cls, layout: Layout, *, slots: int) -> int:
        return cls._head(layout, slots) + slots * slot_bytes(layout) + layout.parameters.nbytes


class TableMemory:
    """One table's weights: a ring of places for versions, first values of all else, norms."""

    def __init__(self, region: Region, layout: Layout, *, places: int) -> None:
        memory, size = region.tensor(), layout.parameters.nbytes
        self.memory, self._layout, self._places = memory, layout, places
        self.ring = [layout.parameters.segments(memory[place * size :]) for place in range(places)]
        position = places * size
        self.buffers = layout.buffers.views(layout.buffers.segments(memory[position:]))
        position += layout.buffers.nbytes
        self.others = layout.others.views(layout.others.segments(memory[position:]))
        position += layout.others.nbytes
        cells, sizes = SharedWords(region, position // 8), [len(part.pieces) for part in layout.parts]
        self.norms = Shares(cells, 0, sizes=sizes)
        self.versions = Words(cells, Shares.words(sizes), shards=layout.shards, places=places)
        words = Shares.words(sizes) + Words.words(layout.shards, places)
        self.handles = Handles(region, position + 8 * words)

    def to_card(self, device: str, *, owner: bool, wait: Callable[[], None]) -> None:
        """The ring lies there from now on."""
        layout, size = self._layout, self._layout.parameters.nbytes
        what = f"{self._places} versions of a table"
        card = share(self.handles, MEMORY, device, self._places * size, what, owner=owner, wait=wait)
        self.ring = [layout.parameters.segments(card[place * size :]) for place in range(self._places)]

    def clear(self) -> None:
        """What shards told each other, and of their memory, is void."""
        self.norms.clear()
        self.handles.clear(1 + self._layout.shards)

    @staticmethod
    def nbytes(layout: Layout, *, places: int) -> int:
        words = Shares.words([len(part.pieces) for part in layout.parts]) + Words.words(layout.shards, places)
        values = places * layout.parameters.nbytes + layout.buffers.nbytes + layout.others.nbytes
        return values + 8 * words + Handles.nbytes(1 + layout.shards)


@dataclass(frozen=True, slots=True)
class MemoryGeometry:
    """What follows from the dials: how many slots there are, and places for versions; and where they lie."""

    slots: int
    places: int
    card: str | None = None  # a GPU, in place of shared memory


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """A shard's own part of its setup."""

    shard: int
    shards: int
    log: Region
    bells: list[WakeUp]  # of the shards
    geometry: MemoryGeometry
    yields: int
    beats: Region  # a line for each shard: it counts there that it lives
    folder: str | None = None  # of checkpoints
    crash: int | None = None  # for tests


@dataclass(frozen=True, slots=True)
class AddLearner:
    """From the supervisor: a new learner's desk and bell."""

    learner: int
    desk: Region
    bell: WakeUp


class _CardOrder(NamedTuple):
    """Of a shard's part of a ring on a card."""

    port: LocalServerPort
    table: int

    def written(self) -> None:
        """A version is whole."""
        self.port.signal(self.table)

    def write(self) -> None:
        """A place is about to be written."""
        self.port.after_readers(self.table)


def _nap() -> None:
    time.sleep(0.001)


class LocalServerPort(ServerPort):
    """The role's effects, on shared memory."""

    def __init__(self, channel: Channel, spec: ServerSpec) -> None:
        self.shard, self.shards = spec.shard, spec.shards
        self._channel, self._spec = channel, spec
        self.log = (
            Ring(SharedWords(spec.log), 0, capacity=LOG_ENTRIES, form=ENTRY, readers=spec.shards - 1)
            if spec.shards > 1
            else None
        )
        self.desks: dict[int, Mailbox] = {}
        self._bells: dict[int, WakeUp] = {}
        self.shelves: dict[int, TableMemory] = {}
        self._layouts: dict[int, Layout] = {}
        self._lanes: dict[tuple[int, int], Lane] = {}
        self._memories: dict[int, RingPart] = {}
        self._orders: dict[int, StreamOrder] = {}  # of tables on a card
        self._reading: dict[int, dict[int, int]] = defaultdict(dict)  # table -> learner -> its last release
        self.readers: set[tuple[int, int]] = set()  # (loader, learner)
        self.dials: set[int] = set()  # those that the supervisor has named
        self._beyond: deque[Record] = deque()  # what the log has no room for: followers are slow, or stopped
        self.leaving: list[int] = []  # learners whose leaving is in the log
        self.to_wake: set[int] = set()
        self.wake_shards = False
        self.norms_wanted: tuple[int, int] | None = None
        self._sending = threading.Lock()  # the writer reports too
        self._folder = Folder(Path(spec.folder)) if spec.folder is not None else None
        self._writer: Writer | None = None

    # -- set up by the supervisor ------------------------------------------------------------------------

    def add_learner(self, event: AddLearner) -> None:
        self.desks[event.learner] = Mailbox(event.desk)
        self._bells[event.learner] = event.bell
        event.desk.close()

    def make_table(self, make: m.MakeTable) -> None:
        self._layouts[make.table] = make.layout
        shelf = self.shelves[make.table] = TableMemory(
            make.handle, make.layout, places=self._spec.geometry.places
        )
        make.handle.close()
        if self._spec.geometry.card is not None and self.shard < make.layout.shards:
            self._to_card(make.table, shelf, self._spec.geometry.card)

    def _to_card(self, table: int, shelf: TableMemory, card: str) -> None:
        shelf.to_card(card, owner=self.shard == 0, wait=_nap)
        self._orders[table] = StreamOrder(card, shelf.handles, EVENT + self.shard)

    def join_table(self, join: m.JoinTable) -> None:
        geometry = self._spec.geometry
        layout = self._layouts[join.table]
        lane = self._lanes[join.table, join.learner] = Lane(join.lane, layout, slots=geometry.slots)
        join.lane.close()
        published = lane.slots[0]
        if join.first:
            lane.numbers[0] = FIRST_VALUES
        if join.table in self._orders:
            assert geometry.card is not None
            lane.to_card(geometry.card, owner=self.shard == 0, wait=_nap)
            if join.first:  # which were written before there was memory on the card
                part = layout.parts[self.shard]
                copy_segments(part.segments(lane.slots[0].segments), part.segments(published.segments))

    def knows(self, entry: log.Entry) -> bool:
        """Everything that the entry needs has arrived from the supervisor."""
        if isinstance(entry, log.Leave):
            return True
        if isinstance(entry, log.Change) and entry.dial not in self.dials:
            return False
        if isinstance(entry, log.Fold | log.Snapshot | log.Finish | log.Change | log.Cut):
            return entry.table in self.shelves
        return (entry.table, entry.learner) in self._lanes

    def expects(self, learner: int, record: Record) -> bool:
        """The supervisor has introduced the table and the loader that the record speaks of."""
        table, loader = speaks_of(record)
        if loader != NO_LOADER and (loader, learner) not in self.readers:
            return False
        return table is None or (table, learner) in self._lanes

    def take(self, learner: int, record: Record) -> ToLeader:
        """What a learner's record says; the place of its draft is kept here."""
        message, slot = decode(
            record, lambda table, slot: self._lanes[table, learner].slots[slot].read_states()
        )
        if isinstance(message, Gradient | Put):
            self._lies(message.table, learner, message.number, slot)
        return message

    def _lies(self, table: int, learner: int, number: int, slot: int) -> None:
        lane = self._lanes[table, learner]
        lane.numbers[slot] = number
        if table in self._orders:
            self._orders[table].after(lane.handles, [EVENT])

    def lies_in(self, entry: log.Take | log.PutValues | log.Free, slot: int) -> None:
        """Where the draft is that an entry speaks of, as the leading shard says."""
        self._lies(entry.table, entry.learner, entry.number, slot)

    # -- effects -----------------------------------------------------------------------------------------

    def append(self, entry: log.Entry) -> None:
        if isinstance(entry, log.Leave):
            self.leaving.append(entry.learner)
        if self.log is None:
            return
        slot = NO_SLOT
        if isinstance(entry, DRAFTED):
            slot = self._lanes[entry.table, entry.learner].numbers.index(entry.number)
        record = encode_entry(entry, slot)
        if self._beyond or not self.log.push(record):
            self._beyond.append(record)
        elif isinstance(entry, log.Fold):  # the heavy one: all shards at the same time
            self._wake_replicas()
        else:
            self.wake_shards = True

    def keeps_up(self) -> bool:
        """The others have room for more: while they have not, nothing further is taken (M12)."""
        while self._beyond and self.log is not None and self.log.push(self._beyond[0]):
            self._beyond.popleft()
            self.wake_shards = True
        return not self._beyond and not self._far_ahead()

    def _far_ahead(self) -> bool:
        """Of the slowest shard, by nearly a ring: readers would find no version that all have (M13)."""
        return any(
            memory.ahead() > len(memory.places) - 2
            for table, memory in self._memories.items()
            if self._layouts[table].shards > 1
        )

    def memory(self, table: int) -> VersionMemory:
        shelf = self.shelves[table]
        memory = self._memories[table] = RingPart(
            self._layouts[table],
            self.shard,
            shelf.ring,
            shelf.versions,
            lambda: self._being_read(table),
            _CardOrder(self, table) if table in self._orders else None,
        )
        return memory

    def signal(self, table: int) -> None:
        """On a card: what was done there comes before whatever follows from what is said next."""
        if table in self._orders:
            self._orders[table].signal()

    def after_readers(self, table: int) -> None:
        """On a card: whoever reads has read before what is written next."""
        for (each, _), lane in self._lanes.items():
            if each == table:
                self._orders[table].after(lane.handles, [EVENT])

    def _being_read(self, table: int) -> bool:
        reading = self._reading[table]
        for learner, number in list(reading.items()):
            lane = self._lanes.get((table, learner))
            if lane is not None and lane.replies.reads(number):
                return True
            del reading[learner]
        return False

    def receive(self, table: int, learner: int, number: int) -> Slot:
        lane = self._lanes[table, learner]
        return lane.slots[lane.numbers.index(number)]

    def release(self, table: int, learner: int, number: int, reading: Reading | None) -> None:
        lane = self._lanes.get((table, learner))
        if lane is not None:
            self.signal(table)
            if reading is None:
                lane.drafts.free(self.shard, lane.numbers.index(number), number)
            else:
                self._reading[table][learner] = number
                if reading.delivered:
                    self._memories[table].deliver(lane.inbox)
                    self.signal(table)
                flags = KEEP * reading.keep | DELIVERED * reading.delivered
                lane.replies.release(self.shard, number, reading.version, reading.dial, flags)
            self.to_wake.add(learner)

    def tell_nodes(self, message: Any, node: int | None = None) -> None:
        raise AssertionError("processes have no trees yet")

    def grant(self, learner: int, portion: Portion) -> None:
        desk = self.desks.get(learner)
        if desk is not None:
            if not desk.portions.push(portion):
                raise AssertionError(f"learner {learner} asked for more than {DESK_PORTIONS} portions ahead")
            self.to_wake.add(learner)

    def share(self, table: int, version: int, norms: Tensor) -> None:
        self.shelves[table].norms.tell(self.shard, version, norms.tolist())
        self.norms_wanted = (table, version)
        self.flush()
        for shard, bell in enumerate(self._spec.bells):
            if shard != self.shard:
                bell.ring()

    def spend(self, work: Computing | Serving) -> None:
        pass

    def forget(self) -> None:
        """The log is carried out as far as it is written: nothing is needed of those that have left."""
        while self.leaving:
            self._forget(self.leaving.pop())

    def _forget(self, learner: int) -> None:
        self.desks.pop(learner, None)
        bell = self._bells.pop(learner, None)
        if bell:
            bell.close()
        self._lanes = {key: lane for key, lane in self._lanes.items() if key[1] != learner}

    def with_content(self, make: m.MakeTable) -> m.MakeTable:
        return with_content(make, self._folder, self.shard)

    def save(self, number: int, name: str, tensors: dict[str, Tensor], notes: dict[str, Any]) -> None:
        assert self._folder is not None
        if number == FIRST:
            self.tell(write_part(self._folder, (number, name, tensors, notes)))
            return
        if self._writer is None:
            self._writer = Writer(self._folder.root, self.tell)
        self._writer.write(number, name, tensors, notes)

    def tell(self, message: Any) -> None:
        with self._sending:
            self._channel.try_send((self.shard, message))

    # -- waking ------------------------------------------------------------------------------------------

    def _wake_replicas(self) -> None:
        for bell in self._spec.bells[1:]:
            bell.ring()

    def flush(self) -> None:
        """Ring the bells of everybody who got something."""
        if self.wake_shards:
            self.wake_shards = False
            self._wake_replicas()
        if self.to_wake:
            for learner in self.to_wake:
                if learner in self._bells:
                    self._bells[learner].ring()
            self.to_wake.clear()


class _Loop:
    """The shard's only loop: notes or log first, then the supervisor, then sleep."""

    def __init__(self, channel: Channel, spec: ServerSpec) -> None:
        self._channel = channel
        self._port = LocalServerPort(channel, spec)
        self._role = ServerRole(self._port)
        self._sleeper = Waiter(spec.bells[spec.shard], yields=spec.yields)
        self._sleeper.watch(channel.fileno())
        self._leads = spec.shard == 0
        self._reader = spec.shard - 1
        self._heard = 0.0  # when the supervisor was last listened to
        self._beats = spec.beats.words[LINE * spec.shard : LINE * spec.shard + 1]

    def report(self, message: Any) -> None:
        self._port.tell(message)

    def run(self) -> None:
        while True:
            self._beats[0] += 1
            keeps_up = self._port.keeps_up()
            worked = keeps_up and (self._read_notes() if self._leads else self._read_log())
            worked |= self._read_norms()
            if self._port.leaving and self._role.settled:
                self._port.forget()
            self._port.flush()
            if worked:
                self._sleeper.busy()
                if time.monotonic() - self._heard < LISTEN_EVERY:
                    continue
            self._heard = time.monotonic()
            ready = self._sleeper.peek() if worked else self._sleeper.wait(1.0 if keeps_up else SLOW)
            if self._channel.fileno() in ready:
                self._control()
                self._port.flush()

    def _read_notes(self) -> bool:
        worked = False
        for learner, desk in list(self._port.desks.items()):
            while (record := desk.notes.pop()) is not None:
                self._hand_over(learner, record)
                worked = True
                if not self._port.keeps_up():
                    return True
            if worked:
                self._port.flush()
        return worked

    def _hand_over(self, learner: int, record: Record) -> None:
        """To the role, after what the supervisor had said before the learner could say this."""
        while not self._port.expects(learner, record):
            self._control()
        self._role.note(learner, self._port.take(learner, record))

    def _read_log(self) -> bool:
        assert self._port.log is not None
        worked = False
        while (record := self._port.log.pop(self._reader)) is not None:
            entry, slot = decode_entry(record)
            while not self._port.knows(entry):
                self._control()  # it was sent before the leader knew: it is on its way
            if isinstance(entry, DRAFTED):
                self._port.lies_in(entry, slot)
            self._role.entry(entry)
            if isinstance(entry, log.Leave):
                self._port.leaving.append(entry.learner)
            worked = True
        return worked

    def _read_norms(self) -> bool:
        wanted = self._port.norms_wanted
        if wanted is None:
            return False
        table, version = wanted
        values = self._port.shelves[table].norms.all(version)
        if values is None:
            return False
        self._port.norms_wanted = None
        self._role.handle(m.Norms(table, version, [torch.tensor(v, dtype=torch.float64) for v in values]))
        return True

    def _control(self) -> None:
        event = self._channel.receive()
        if isinstance(event, AddLearner):
            self._port.add_learner(event)
            return
        if isinstance(event, m.MakeTable):
            self._port.make_table(event)
            event = self._port.with_content(event)
        elif isinstance(event, m.Dial):
            self._port.dials.add(event.number)
        elif isinstance(event, m.JoinTable):
            self._port.join_table(event)
        elif isinstance(event, m.JoinLoader):
            self._port.readers.update((event.loader, learner) for learner in event.learners)
        elif isinstance(event, m.Leave) and self._leads:
            self._drain(event.learner)
        self._role.handle(event)

    def _drain(self, learner: int) -> None:
        """What it committed before it left comes before its leaving."""
        desk = self._port.desks.get(learner)
        while desk is not None and (record := desk.notes.pop()) is not None:
            self._hand_over(learner, record)


def run_server(channel: Channel, spec: ServerSpec) -> None:
    """Serve until the supervisor closes the channel."""
    gc.disable()  # the loop makes no cycles; a collection in a fold would keep everybody waiting
    if spec.crash is not None:
        crash_at(spec.crash)
    loop = _Loop(channel, spec)
    try:
        loop.run()
    except Closed:
        return
    except Exception:
        loop.report(m.ShardRaised(spec.shard, None, traceback.format_exc()))
        raise
