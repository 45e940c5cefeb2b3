"""A shard's process: the server role on shared memory.

Reads learners' notes (the leading shard) or the log (the others) and hands them to the role; carries out its
effects. Not responsible for any decision.
"""

from __future__ import annotations

import gc
import threading
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from syncline import messages as m
from syncline.engines.checkpoint_writer import Writer, with_content
from syncline.engines.local.control_channel import Channel, Closed
from syncline.engines.local.exchange import DELIVERED, KEEP, LINE, Ring
from syncline.engines.local.record_codec import (
    ENTRY,
    NO_SLOT,
    Record,
    Whole,
    decode,
    decode_entry,
    encode_answer,
    encode_entry,
    speaks_of,
)
from syncline.engines.local.record_codec import Part as SumPart
from syncline.engines.local.shared_cuda_memory import EVENT, StreamOrder
from syncline.engines.local.shared_memory import Region, SharedWords, Waiter, WakeUp
from syncline.engines.local.table_memory import DESK_PORTIONS, Geometry, Lane, Mailbox, TableMemory
from syncline.engines.local.tree_node import NodeDesk, NodeEnd, name_of
from syncline.messages import log
from syncline.messages.to_leader import NO_LOADER, Gradient, Put, Sum
from syncline.messages.to_tree_nodes import ToNodes
from syncline.ports import FIRST_VALUES, WRITTEN, Portion, Reading, ServerPort, VersionMemory
from syncline.roles.server import ServerRole
from syncline.table.checkpoints import Folder
from syncline.table.gradient_slot import Slot
from syncline.table.layout import Layout
from syncline.table.store import copy_segments

DRAFTED = (log.Take, log.PutValues, log.Free)  # entries that speak of a draft
LOG_ENTRIES = 1024
SLOW = 0.002  # seconds between looks at a full log


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """A shard's own part of its setup."""

    shard: int
    shards: int
    log: Region
    readers: int  # of that log
    reader: int  # which of them it is; the leading shard is none
    bell: WakeUp
    others: list[WakeUp]  # whom it wakes for the other shards
    relay: WakeUp | None  # of several machines: tells others how far this shard is; None: they need not know
    geometry: Geometry
    yields: int
    beats: Region  # a line for each shard: it counts there that it lives
    folder: str | None = None  # of checkpoints


class Call(NamedTuple):
    """From the engine to the process itself: of one of its methods."""

    method: Callable[..., None]
    arguments: tuple[Any, ...]


class ServedTable(VersionMemory):
    """A shard's part of one table: the ring that it writes versions into, and what it shares with learners and a tree's nodes.

    On a card copies go on after words are said: `signal` puts all that was begun there before whatever follows from what is said next.
    """

    def __init__(self, region: Region, layout: Layout, shard: int, geometry: Geometry) -> None:
        self.layout, self._shard = layout, shard
        self.shelf = TableMemory(region, layout, places=geometry.places)
        self.others = self.shelf.others
        region.close()
        self.order: StreamOrder | None = None
        self.unsignalled = False  # there is work on the card that nobody was told of
        if geometry.card is not None and shard < layout.shards:
            self.shelf.to_card(geometry.card, owner=shard == 0)
            self.order = StreamOrder(geometry.card, self.shelf.handles, EVENT + shard)
        self.places = []
        if shard < layout.shards:
            self.places = [layout.parts[shard].segments(segments) for segments in self.shelf.ring]
        self._newest = 0  # the place that was offered last
        self.lanes: dict[int, Lane] = {}  # by learner, or a node's name
        self.reading: dict[int, int] = {}  # learner -> its last release

    def join(self, join: m.JoinTable, geometry: Geometry) -> None:
        lane = self.lanes[join.learner] = Lane(join.lane, self.layout, slots=geometry.slots)
        join.lane.close()
        published = lane.slots[0]
        if join.first:
            lane.numbers[0] = FIRST_VALUES
        if self.order is not None:
            assert geometry.card is not None
            lane.to_card(geometry.card, owner=self._shard == 0)
            if join.first:  # which were written before there was memory on the card
                part = self.layout.parts[self._shard]
                copy_segments(part.segments(lane.slots[0].segments), part.segments(published.segments))

    def lies(self, learner: int, number: int, slot: int) -> None:
        """Where the draft is that a message or an entry speaks of."""
        lane = self.lanes[learner]
        lane.numbers[slot] = number
        if self.order is not None:
            self.order.after(lane.handles, [EVENT])
            lane.reads = False  # what it has read, it had read before it published this
            self.unsignalled = True

    def signal(self) -> None:
        assert self.order is not None
        self.unsignalled = False
        self.order.signal()

    def offer(self, place: int, version: int) -> None:
        if self.unsignalled and version != WRITTEN:
            self.signal()
        self.shelf.versions.offer(self._shard, place, version)
        if version != WRITTEN:
            self._newest = place
            self.shelf.marks.reach(self._shard, version)
        elif self.order is not None:  # whoever reads has read before what is written next
            for lane in self.lanes.values():
                if lane.reads:
                    self.order.after(lane.handles, [EVENT])
            self.unsignalled = True

    def being_read(self) -> bool:
        for learner, number in list(self.reading.items()):
            lane = self.lanes.get(learner)
            if lane is not None and lane.replies.reads(number):
                return True
            del self.reading[learner]
        return False

    def kept(self, place: int) -> bool:
        return self.shelf.marks.kept(self._shard, place)

    def far_ahead(self) -> bool:
        """Of the slowest shard, by nearly a ring: readers would find no version that all have (M13)."""
        return self.layout.shards > 1 and self.shelf.marks.ahead(self._shard) > len(self.places) - 2

    def deliver(self, lane: Lane) -> None:
        """The newest version into a learner's own memory."""
        inbox = self.layout.parts[self._shard].segments(lane.inbox)
        copy_segments(inbox, self.places[self._newest])
        self.unsignalled = self.order is not None


class LocalServer(ServerPort):
    """One shard: its only loop, and the role's effects on shared memory."""

    def __init__(self, channel: Channel, spec: ServerSpec) -> None:
        self.shard, self.shards = spec.shard, spec.shards
        self._channel, self._spec, self._leads = channel, spec, spec.shard == 0
        self._log: Ring | None = None
        if spec.readers:
            cells = SharedWords(spec.log)
            self._log = Ring(cells, 0, capacity=LOG_ENTRIES, form=ENTRY, readers=spec.readers)
        self._tables: dict[int, ServedTable] = {}
        self._desks: dict[int, Mailbox] = {}
        self._bells: dict[int, WakeUp] = {}
        self._readers: set[tuple[int, int]] = set()  # (loader, learner)
        self._nodes: dict[int, NodeEnd] = {}  # of a tree, by name
        self._gone: set[int] = set()  # learners that have left, which a leaf may not know yet
        self._beyond: deque[Record] = deque()  # what the log has no room for: followers are slow, or stopped
        self._leaving: list[int] = []  # learners whose leaving is in the log
        self._to_wake: set[int] = set()
        self._wake_shards = False
        self._norms_wanted: tuple[int, int] | None = None
        self._sending = threading.Lock()  # the writer reports too
        self._folder = Folder(Path(spec.folder)) if spec.folder is not None else None
        self._writer: Writer | None = None
        self._sleeper = Waiter(spec.bell, yields=spec.yields)
        self._sleeper.watch(channel.fileno())
        self._role = ServerRole(self)

    def run(self) -> None:
        """Notes or log first, then the supervisor, then sleep."""
        beats, beat, relay = self._spec.beats.words, LINE * self.shard, self._spec.relay
        control = self._channel.fileno()
        while True:
            beats[beat] += 1
            keeps_up = self._keeps_up()
            worked = keeps_up and (self._read_notes() if self._leads else self._read_log())
            if self._norms_wanted is not None:
                worked |= self._read_norms(*self._norms_wanted)
            if self._leaving and self._role.replay.settled:
                self._forget_left()
            self._flush()
            if worked and relay is not None:
                relay.ring()
            ready = self._sleeper.turn(worked=worked, seconds=1.0 if keeps_up else SLOW)
            if control in ready:
                self._control()
                self._flush()

    def _keeps_up(self) -> bool:
        """The others have room for more: while they have not, nothing further is taken (M12)."""
        if self.shards == 1:
            return True
        while self._beyond and self._log is not None and self._log.push(self._beyond[0]):
            self._beyond.popleft()
            self._wake_shards = True
        if self._beyond:
            return False
        return not (self._leads and any(table.far_ahead() for table in self._tables.values()))

    def _forget_left(self) -> None:
        """The log is carried out as far as it is written: nothing is needed of those that have left."""
        while self._leaving:
            learner = self._leaving.pop()
            self._desks.pop(learner, None)
            if (bell := self._bells.pop(learner, None)) is not None:
                bell.close()
            for table in self._tables.values():
                table.lanes.pop(learner, None)

    def _flush(self) -> None:
        """Ring the bells of everybody who got something."""
        for name, node in self._nodes.items():
            if node.flush():
                self._to_wake.add(name)
        if self._wake_shards:
            self._wake_shards = False
            self._wake_others()
        if self._to_wake:
            for learner in self._to_wake:
                if learner in self._bells:
                    self._bells[learner].ring()
            self._to_wake.clear()

    def _wake_others(self) -> None:
        for bell in self._spec.others:
            bell.ring()

    # -- what is read ------------------------------------------------------------------------------------

    def _read_notes(self) -> bool:
        worked = False
        for name in list(self._nodes):
            worked |= self._drain_node(name)
        for learner, desk in list(self._desks.items()):
            while (record := desk.notes.pop()) is not None:
                self._hand_over(learner, record)
                worked = True
                if not self._keeps_up():
                    return True
            if worked:
                self._flush()
        return worked

    def _hand_over(self, learner: int, record: Record) -> None:
        """To the role, after what the supervisor had said before the learner could say this."""
        while not self._expects(learner, record):
            self._control()
        tables = self._tables
        message, slot = decode(
            record, lambda table, slot: tables[table].lanes[learner].slots[slot].read_states()
        )
        if isinstance(message, Gradient | Put):
            table = tables[message.table]
            table.lies(learner, message.number, slot)
            if table.order is not None and isinstance(message, Gradient):
                losses = table.lanes[learner].losses
                message = message._replace(loss=losses.of(message.number, float(message.loss)))
        self._role.note(learner, message)

    def _expects(self, learner: int, record: Record) -> bool:
        """The supervisor has introduced the table and the loader that the record speaks of."""
        table, loader = speaks_of(record)
        if loader != NO_LOADER and (loader, learner) not in self._readers:
            return False
        return table is None or self._has_lane(table, learner)

    def _has_lane(self, table: int, learner: int) -> bool:
        return table in self._tables and learner in self._tables[table].lanes

    def _drain_node(self, name: int) -> bool:
        worked, node = False, self._nodes.get(name)  # None: lost while another's sums were read
        while node is not None and self._keeps_up() and (parts := node.pop()) is not None:
            *said, last = parts
            for part in said:
                while part.learner not in self._gone and not self._expects(part.learner, part.said):
                    self._control()
            whole = Whole.of(last)
            while not self._has_lane(whole.table, name):
                self._control()  # of a new node's table the supervisor speaks after the node itself
            self._role.note(name, self._sum(name, said, whole))
            worked = True
        return worked

    def _sum(self, name: int, parts: list[SumPart], whole: Whole) -> Sum:
        """What a node says; states and buffers are where their learners left them."""
        table = self._tables[whole.table]
        table.lies(name, whole.number, whole.slot)
        gradients, buffers = [], []
        for part in parts:
            lane = table.lanes.get(part.learner)  # None: it has left, and nothing of it counts
            said, slot = decode(
                part.said,
                lambda _, slot, lane=lane: lane.slots[slot].read_states() if lane is not None else b"",  # type: ignore[misc]
            )
            assert isinstance(said, Gradient)
            gradients.append((part.learner, said))
            buffers.append(lane.slots[slot].buffers if lane else [])
        numbers = whole.table, whole.number, whole.iteration
        full = bool(whole.full)
        return Sum(*numbers, tuple(gradients), whole.options, full, whole.counted, tuple(buffers))

    def _read_log(self) -> bool:
        assert self._log is not None
        worked = False
        while (record := self._log.pop(self._spec.reader)) is not None:
            entry, slot = decode_entry(record)
            while not self._knows(entry):
                self._control()  # it was sent before the leader knew: it is on its way
            if isinstance(entry, DRAFTED):
                self._tables[entry.table].lies(entry.learner, entry.number, slot)
            self._role.entry(entry)
            if isinstance(entry, log.Leave):
                self._leaving.append(entry.learner)
            worked = True
        return worked

    def _knows(self, entry: log.Entry) -> bool:
        """Everything that the entry needs has arrived from the supervisor."""
        if isinstance(entry, log.Leave):
            return True
        if isinstance(entry, log.Change) and entry.dial not in self._role.replay.dials:
            return False
        if isinstance(entry, log.Fold | log.Snapshot | log.Finish | log.Change | log.Cut):
            return entry.table in self._tables
        return self._has_lane(entry.table, entry.learner)

    def _read_norms(self, table: int, version: int) -> bool:
        values = self._tables[table].shelf.norms.all(version)
        if values is None:
            return False
        self._norms_wanted = None
        self._role.handle(m.Norms(table, version, [torch.tensor(v, dtype=torch.float64) for v in values]))
        return True

    # -- the supervisor ----------------------------------------------------------------------------------

    def _control(self) -> None:
        """A message for the role; or a call of one of the methods below, by the engine itself."""
        event = self._channel.receive()
        if isinstance(event, Call):
            event.method(self, *event.arguments)
        else:
            self._role.handle(self._prepared(event))

    def add_learner(self, learner: int, desk: Region, bell: WakeUp) -> None:
        self._desks[learner], self._bells[learner] = Mailbox(desk), bell
        desk.close()

    def add_node(self, node: int, desk: Region, bell: WakeUp) -> None:
        own = NodeDesk(desk)
        self._nodes[name_of(node)], self._bells[name_of(node)] = NodeEnd(own.sums, own.answers), bell

    def add_node_table(self, node: int, table: int, layout: Layout, lane: Region) -> None:
        """Where its sums of a table lie."""
        sums = self._spec.geometry.sums
        self._tables[table].lanes[name_of(node)] = Lane(lane, layout, slots=sums)
        lane.close()

    def lose_node(self, node: int) -> None:
        """What it passed on before comes before its end; the leading shard's log tells the others whom to wait for now."""
        if self._leads:
            name, leaves = name_of(node), log.Leave(name_of(node))
            self._drain_node(name)
            self._nodes.pop(name, None)
            self.append(leaves)
            self._role.entry(leaves)
            self._role.handle(m.NodesMoved())

    def _prepared(self, event: Any) -> Any:
        """What the role is told, when all that belongs to it is here."""
        geometry = self._spec.geometry
        if isinstance(event, m.MakeTable):
            self._tables[event.table] = ServedTable(event.handle, event.layout, self.shard, geometry)
            return with_content(event, self._folder, self.shard)
        if isinstance(event, m.JoinTable):
            self._tables[event.table].join(event, geometry)
        elif isinstance(event, m.JoinLoader):
            self._readers.update((event.loader, learner) for learner in event.learners)
        elif isinstance(event, m.Leave) and self._leads:
            desk = self._desks.get(event.learner)
            while desk is not None and (record := desk.notes.pop()) is not None:
                self._hand_over(event.learner, record)  # committed before it left
            self._gone.add(event.learner)
        return event

    # -- effects -----------------------------------------------------------------------------------------

    def append(self, entry: log.Entry) -> None:
        if isinstance(entry, log.Leave):
            self._leaving.append(entry.learner)
        if self._log is None:
            return
        slot = NO_SLOT
        if isinstance(entry, DRAFTED):
            slot = self._tables[entry.table].lanes[entry.learner].numbers.index(entry.number)
        record = encode_entry(entry, slot)
        if self._beyond or not self._log.push(record):
            self._beyond.append(record)
        elif isinstance(entry, log.Fold):  # the heavy one: all shards at the same time
            self._wake_others()
        else:
            self._wake_shards = True

    def memory(self, table: int) -> VersionMemory:
        return self._tables[table]

    def receive(self, table: int, learner: int, number: int) -> Slot:
        lane = self._tables[table].lanes[learner]
        return lane.slots[lane.numbers.index(number)]

    def release(self, table: int, learner: int, number: int, reading: Reading | None) -> None:
        served = self._tables[table]
        if (lane := served.lanes.get(learner)) is None:
            return
        if reading is not None and reading.delivered:
            served.deliver(lane)
        if served.unsignalled:
            served.signal()
        if reading is None:
            lane.drafts.free(self.shard, lane.numbers.index(number), number)
        else:
            served.reading[learner] = number
            lane.reads = True
            flags = KEEP * reading.keep | DELIVERED * reading.delivered
            lane.replies.release(self.shard, number, reading.version, reading.dial, flags)
        self._to_wake.add(learner)

    def tell_nodes(self, message: ToNodes, node: int | None = None) -> None:
        records = encode_answer(message)
        for name in self._nodes.keys() if node is None else self._nodes.keys() & {node}:
            self._nodes[name].tell(records)
            if self._nodes[name].flush():
                self._to_wake.add(name)

    def grant(self, learner: int, portion: Portion) -> None:
        desk = self._desks.get(learner)
        if desk is not None:
            if not desk.portions.push(portion):
                raise AssertionError(f"learner {learner} asked for more than {DESK_PORTIONS} portions ahead")
            self._to_wake.add(learner)

    def share(self, table: int, version: int, norms: Tensor) -> None:
        self._tables[table].shelf.norms.tell(self.shard, version, norms.tolist())
        self._norms_wanted = (table, version)
        self._flush()
        self._wake_others()

    def save(self, number: int, name: str, tensors: dict[str, Tensor], notes: dict[str, Any]) -> None:
        if self._folder is None:
            self.tell(m.Save(number, name, tensors, notes))
            return
        if self._writer is None:
            self._writer = Writer(self._folder.root, self.tell)
        self._writer.write(number, name, tensors, notes)

    def tell(self, message: Any) -> None:
        with self._sending:
            self._channel.try_send((self.shard, message))


def run_server(channel: Channel, spec: ServerSpec) -> None:
    """Serve until the supervisor closes the channel."""
    gc.disable()  # the loop makes no cycles; a collection in a fold would keep everybody waiting
    shard = LocalServer(channel, spec)
    try:
        shard.run()
    except Closed:
        return
    except Exception:
        shard.tell(m.ShardRaised(spec.shard, None, traceback.format_exc()))
        raise
