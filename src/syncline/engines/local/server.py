"""A shard's process: the server role on shared memory.

Reads learners' notes (the leading shard) or the log (the others) and hands them to the role; carries out its
effects. Not responsible for any decision.
"""

from __future__ import annotations

import gc
import threading
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from syncline import messages as m
from syncline.engines.checkpoint_writer import Writer, with_content, write_part
from syncline.engines.local.control_channel import Channel, Closed
from syncline.engines.local.exchange import DELIVERED, KEEP, LINE, Ring
from syncline.engines.local.record_codec import (
    ENTRY,
    NO_SLOT,
    Record,
    Whole,
    decode,
    decode_entry,
    encode_entry,
    speaks_of,
)
from syncline.engines.local.record_codec import Part as SumPart
from syncline.engines.local.shared_cuda_memory import StreamOrder
from syncline.engines.local.shared_memory import Region, SharedWords, Waiter, WakeUp
from syncline.engines.local.table_memory import DESK_PORTIONS, EVENT, Geometry, Lane, Mailbox, TableMemory
from syncline.engines.local.tree_root_end import AddNode, Branches, NodeGone, NodeTable, name_of
from syncline.engines.local.version_ring import RingPart
from syncline.messages import log
from syncline.messages.to_leader import NO_LOADER, Gradient, Put, Sum, ToLeader
from syncline.messages.to_tree_nodes import ToNodes
from syncline.ports import FIRST_VALUES, Computing, Portion, Reading, ServerPort, Serving, VersionMemory
from syncline.roles.server import ServerRole
from syncline.table.checkpoints import FIRST, Folder
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
    relay: (
        WakeUp | None
    )  # on a machine of several: wakes whoever tells the others how far this shard is; None: they need not know
    geometry: Geometry
    yields: int
    beats: Region  # a line for each shard: it counts there that it lives
    folder: str | None = None  # of checkpoints


@dataclass(frozen=True, slots=True)
class AddLearner:
    """From the supervisor: a new learner's desk and bell."""

    learner: int
    desk: Region
    bell: WakeUp


def _states(lane: Lane | None) -> Callable[[int, int], bytes]:
    """Of a slot, where it is known."""
    return lambda table, slot: lane.slots[slot].read_states() if lane is not None else b""


def _nap() -> None:
    time.sleep(0.001)


class LocalServerPort(ServerPort):
    """The role's effects, on shared memory."""

    def __init__(self, channel: Channel, spec: ServerSpec) -> None:
        self.shard, self.shards = spec.shard, spec.shards
        self._channel, self._spec = channel, spec
        self.log = (
            Ring(SharedWords(spec.log), 0, capacity=LOG_ENTRIES, form=ENTRY, readers=spec.readers)
            if spec.readers
            else None
        )
        self.desks: dict[int, Mailbox] = {}
        self._bells: dict[int, WakeUp] = {}
        self.shelves: dict[int, TableMemory] = {}
        self._layouts: dict[int, Layout] = {}
        self._lanes: dict[tuple[int, int], Lane] = {}
        self._memories: dict[int, RingPart] = {}
        self._orders: dict[int, StreamOrder] = {}  # of tables on a card
        self._unsignalled: set[int] = set()  # those with work that nobody was told of
        self._reading: dict[int, dict[int, int]] = defaultdict(dict)  # table -> learner -> its last release
        self.readers: set[tuple[int, int]] = set()  # (loader, learner)
        self.branches = Branches()
        self.gone: set[int] = set()  # learners that have left, which a leaf may not know yet
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

    def add_node(self, event: AddNode) -> None:
        self.branches.add(event)
        self._bells[name_of(event.node)] = event.bell

    def node_table(self, event: NodeTable) -> None:
        lane = Lane(event.lane, event.layout, slots=self._spec.geometry.sums)
        self._lanes[event.table, name_of(event.node)] = lane
        event.lane.close()

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

    def knows_sums(self, table: int, name: int) -> bool:
        """The supervisor has said where this node's sums of the table lie."""
        return (table, name) in self._lanes

    def take(self, learner: int, record: Record) -> ToLeader:
        """What a learner's record says; the place of its draft is kept here."""
        message, slot = decode(
            record, lambda table, slot: self._lanes[table, learner].slots[slot].read_states()
        )
        if isinstance(message, Gradient | Put):
            self.lies(message.table, learner, message.number, slot)
        if isinstance(message, Gradient) and message.table in self._orders:
            losses = self._lanes[message.table, learner].losses
            message = message._replace(loss=losses.of(message.number, float(message.loss)))
        return message

    def take_sum(self, name: int, parts: list[SumPart]) -> Sum:
        """What a node says; states and buffers are where their learners left them."""
        whole = Whole.of(parts[-1])
        table = whole.table
        self.lies(table, name, whole.number, whole.slot)
        gradients, buffers = [], []
        for part in parts[:-1]:
            lane = self._lanes.get((table, part.learner))  # None: it has left, and nothing of it counts
            said, slot = decode(part.said, _states(lane))
            assert isinstance(said, Gradient)
            gradients.append((part.learner, said))
            buffers.append(lane.slots[slot].buffers if lane else [])
        return Sum(
            table,
            whole.number,
            whole.iteration,
            tuple(gradients),
            whole.options,
            bool(whole.full),
            tuple(buffers),
        )

    def lies(self, table: int, learner: int, number: int, slot: int) -> None:
        """Where the draft is that a message or an entry speaks of."""
        lane = self._lanes[table, learner]
        lane.numbers[slot] = number
        if table in self._orders:
            self._orders[table].after(lane.handles, [EVENT])
            lane.reads = False  # what it has read, it had read before it published this
            self._work_on(table)

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
            self._wake_others()
        else:
            self.wake_shards = True

    def keeps_up(self) -> bool:
        """The others have room for more: while they have not, nothing further is taken (M12)."""
        if self.shards == 1:
            return True
        while self._beyond and self.log is not None and self.log.push(self._beyond[0]):
            self._beyond.popleft()
            self.wake_shards = True
        return not self._beyond and not self._far_ahead()

    def _far_ahead(self) -> bool:
        """Of the slowest shard, by nearly a ring: readers would find no version that all have (M13). The others follow it."""
        return self.shard == 0 and any(
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
            shelf.marks,
            partial(self._being_read, table),
            partial(self._signal, table),
            partial(self._before_writing, table),
        )
        return memory

    def _signal(self, table: int) -> None:
        """On a card: what was done there comes before whatever follows from what is said next."""
        if table in self._unsignalled:
            self._unsignalled.discard(table)
            self._orders[table].signal()

    def _work_on(self, table: int) -> None:
        """On a card: something follows there."""
        if table in self._orders:
            self._unsignalled.add(table)

    def _before_writing(self, table: int) -> None:
        """On a card: whoever reads has read before what is written next."""
        if table in self._orders:
            for (each, _), lane in self._lanes.items():
                if each == table and lane.reads:
                    self._orders[table].after(lane.handles, [EVENT])
            self._unsignalled.add(table)

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
            self._signal(table)
            if reading is None:
                lane.drafts.free(self.shard, lane.numbers.index(number), number)
            else:
                self._reading[table][learner] = number
                lane.reads = True
                if reading.delivered:
                    self._memories[table].deliver(lane.inbox)
                    self._work_on(table)
                    self._signal(table)
                flags = KEEP * reading.keep | DELIVERED * reading.delivered
                lane.replies.release(self.shard, number, reading.version, reading.dial, flags)
            self.to_wake.add(learner)

    def tell_nodes(self, message: ToNodes, node: int | None = None) -> None:
        self.to_wake.update(self.branches.tell(message, node))

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
        self._wake_others()

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
        if self._folder is None:
            self.tell(m.Save(number, name, tensors, notes))
            return
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

    def _wake_others(self) -> None:
        for bell in self._spec.others:
            bell.ring()

    def flush(self) -> None:
        """Ring the bells of everybody who got something."""
        if self.wake_shards:
            self.wake_shards = False
            self._wake_others()
        if self.to_wake:
            for learner in self.to_wake:
                if learner in self._bells:
                    self._bells[learner].ring()
            self.to_wake.clear()
        if self.branches.desks:
            self.to_wake.update(self.branches.flush())


class _Loop:
    """The shard's only loop: notes or log first, then the supervisor, then sleep."""

    def __init__(self, channel: Channel, spec: ServerSpec) -> None:
        self._channel = channel
        self.port = self._port = LocalServerPort(channel, spec)
        self._role = ServerRole(self._port)
        self._sleeper = Waiter(spec.bell, yields=spec.yields)
        self._sleeper.watch(channel.fileno())
        self._leads = spec.shard == 0
        self._reader = spec.reader
        self._relay = spec.relay
        self._beats = spec.beats.words[LINE * spec.shard : LINE * spec.shard + 1]

    def run(self) -> None:
        while True:
            self._beats[0] += 1
            keeps_up = self._port.keeps_up()
            worked = keeps_up and (self._read_notes() if self._leads else self._read_log())
            worked |= self._read_norms()
            if self._port.leaving and self._role.replay.settled:
                self._port.forget()
            self._port.flush()
            if worked and self._relay is not None:
                self._relay.ring()
            ready = self._sleeper.turn(worked=worked, seconds=1.0 if keeps_up else SLOW)
            if self._channel.fileno() in ready:
                self._control()
                self._port.flush()

    def _read_notes(self) -> bool:
        worked = bool(self._port.branches.desks) and self._read_sums()
        for learner, desk in list(self._port.desks.items()):
            while (record := desk.notes.pop()) is not None:
                self._hand_over(learner, record)
                worked = True
                if not self._port.keeps_up():
                    return True
            if worked:
                self._port.flush()
        return worked

    def _read_sums(self) -> bool:
        worked = False
        for name in list(self._port.branches.desks):
            worked |= self._drain_node(name)
        return worked

    def _drain_node(self, name: int) -> bool:
        worked = False
        while self._port.keeps_up() and (parts := self._port.branches.pop(name)) is not None:
            for part in parts[:-1]:
                while part.learner not in self._port.gone and not self._port.expects(part.learner, part.said):
                    self._control()
            while not self._port.knows_sums(Whole.of(parts[-1]).table, name):
                self._control()  # of a new node's table the supervisor speaks after the node itself
            self._role.note(name, self._port.take_sum(name, parts))
            worked = True
        return worked

    def _lose_node(self, name: int) -> None:
        """What it passed on before comes before its end; the others hear whom to wait for now."""
        self._drain_node(name)
        self._port.branches.forget(name)
        leaves = log.Leave(name)
        self._port.append(leaves)
        self._role.entry(leaves)
        self._role.handle(m.NodesMoved(name))

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
                self._port.lies(entry.table, entry.learner, entry.number, slot)
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
        if isinstance(event, AddNode | NodeTable | NodeGone):
            self._hear_of_node(event)
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
            self._port.gone.add(event.learner)
        self._role.handle(event)

    def _hear_of_node(self, event: AddNode | NodeTable | NodeGone) -> None:
        if isinstance(event, AddNode):
            self._port.add_node(event)
        elif isinstance(event, NodeTable):
            self._port.node_table(event)
        elif self._leads:
            self._lose_node(name_of(event.node))

    def _drain(self, learner: int) -> None:
        """What it committed before it left comes before its leaving."""
        desk = self._port.desks.get(learner)
        while desk is not None and (record := desk.notes.pop()) is not None:
            self._hand_over(learner, record)


def run_server(channel: Channel, spec: ServerSpec) -> None:
    """Serve until the supervisor closes the channel."""
    gc.disable()  # the loop makes no cycles; a collection in a fold would keep everybody waiting
    loop = _Loop(channel, spec)
    try:
        loop.run()
    except Closed:
        return
    except Exception:
        loop.port.tell(m.ShardRaised(spec.shard, None, traceback.format_exc()))
        raise
