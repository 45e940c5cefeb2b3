"""A process of a tree's node (R7, M14): it adds what its children published where that lies in shared memory, and publishes the mean in a slot of its own.

When is decided by `protocols.tree_up`. A gradient stays its learner's until the root has taken it, so nothing is lost with a node: whoever
takes a leaf's learners over reads the same outboxes, one for each table. Versions do not pass here: learners read the shards' ring. Also the desk of a node,
and the leading shard's end of it.
"""

from __future__ import annotations

import gc
import traceback
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from syncline import messages as m
from syncline.engines.local.control_channel import Channel, Closed
from syncline.engines.local.exchange import Ring
from syncline.engines.local.record_codec import (
    ANSWER,
    PART,
    WHOLE,
    Answers,
    Part,
    Record,
    Whole,
    decode,
    encode_answer,
)
from syncline.engines.local.shared_memory import YIELDS, Region, SharedWords, Waiter, WakeUp
from syncline.engines.local.table_memory import Geometry, Lane
from syncline.messages.to_leader import Gradient
from syncline.messages.to_tree_nodes import Refused, Taken, ToNodes
from syncline.protocols.folding import Ticket
from syncline.protocols.tree_shape import ROOT
from syncline.protocols.tree_up import Again, Count, Node, Passed, Sum, SumDone, Up, weight
from syncline.table.accumulator import Mean, add_up
from syncline.table.gradient_slot import Slot
from syncline.table.layout import Layout

FREE = -1  # in place of a sum's number
PARTS, ANSWERS = 64, 256  # records of a desk; what has no room waits with who writes


def name_of(node: int) -> int:
    """Where learners have theirs."""
    return -1 - node


class NodeDesk:
    """Between one node and the leading shard: sums there, answers back; and the same with the node above it."""

    def __init__(self, region: Region) -> None:
        cells = SharedWords(region)
        both = Ring.words(PARTS) + Ring.words(ANSWERS)
        self.sums = Ring(cells, 0, capacity=PARTS, form=PART)
        self.answers = Ring(cells, Ring.words(PARTS), capacity=ANSWERS, form=ANSWER)
        self.over = Ring(cells, both, capacity=PARTS, form=PART)
        self.back = Ring(cells, both + Ring.words(PARTS), capacity=ANSWERS, form=ANSWER)
        region.close()

    @staticmethod
    def nbytes() -> int:
        return 16 * (Ring.words(PARTS) + Ring.words(ANSWERS))


class NodeEnd:
    """A node, for the leading shard or the node above it: its sums come in, answers go out.

    A sum is many records, the last of which makes it one. With a `way` those of another are void.
    """

    def __init__(self, sums: Ring, answers: Ring, way: int | None = None) -> None:
        self._sums, self._answers, self._way = sums, answers, way
        self._parts: list[Part] = []
        self._unsaid: deque[Record] = deque()  # what there is no room for

    def pop(self) -> list[Part] | None:
        """All of its next sum."""
        while (record := self._sums.pop()) is not None:
            part = Part.of(record)
            if self._way in (None, part.way):
                self._parts.append(part)
                if part.learner == WHOLE:
                    parts, self._parts = self._parts, []
                    return parts
        return None

    def tell(self, records: Iterable[Record]) -> None:
        self._unsaid.extend(records)

    def flush(self) -> bool:
        """Say what there is room for; it has something to read now."""
        said = False
        while self._unsaid and self._answers.push(self._unsaid[0]):
            self._unsaid.popleft()
            said = True
        return said


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """A node's own part of its setup."""

    node: int
    leaf: bool
    parent: int
    desk: Region
    bell: WakeUp
    root: WakeUp  # of the leading shard
    above: WakeUp  # of the node above, or of the leading shard; on another machine the relay's
    geometry: Geometry
    beats: Region  # its first word counts that it lives


# -- what it has ---------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Brought:
    """A child's gradient or sum, where it lies."""

    child: LearnerBelow | NodeBelow
    table: int
    number: int
    parts: list[Part]  # what learners said of it
    place: int  # of its slot
    full: bool
    tickets: tuple[Ticket, ...]
    counted: int = 0  # of a sum

    @property
    def slot(self) -> Slot:
        return self.child.lanes[self.table].slots[self.place]

    def weighted(self, *, equal: bool) -> tuple[Lying, tuple[bool, ...], int]:
        slot = self.slot
        mask = (True,) * len(slot.mask) if self.full else tuple(map(bool, slot.mask.tolist()))
        return Lying(slot.segments, slot.gradients, mask), mask, weight(self.tickets, equal=equal)


@dataclass(slots=True, eq=False)
class Lying:
    """Values over the whole table."""

    segments: list[Tensor]
    views: list[Tensor]
    mask: tuple[bool, ...]

    def present(self) -> tuple[bool, ...]:
        return self.mask


class LearnerBelow:
    """A leaf's child."""

    def __init__(self, child: int, bell: WakeUp, rank: int) -> None:
        self.child, self._rank, self.bell = child, rank, bell
        self.lanes: dict[int, Lane] = {}
        self._next: dict[int, int] = {}  # by table: the record of the outbox to read

    def add(self, table: int, lane: Lane) -> None:
        """Begin with the oldest record that an earlier leaf may not have passed on: there is one for each slot."""
        self.lanes[table], self._next[table] = lane, max(0, lane.outbox.written - len(lane.slots))

    def pop(self) -> Brought | None:
        unread = (table for table, lane in self.lanes.items() if self._next[table] < lane.outbox.written)
        if (table := next(unread, None)) is None:
            return None
        record = self.lanes[table].outbox.read(self._next[table])
        self._next[table] += 1
        said, place = decode(record, lambda table, slot: b"")  # the root reads states where they lie
        assert isinstance(said, Gradient)
        part = Part(0, self.child, self._rank, record)
        return Brought(self, said.table, said.number, [part], place, said.full, (part.ticket(),))

    def passed(self, brought: Brought) -> bool:
        """By the leaf that it had before."""
        return self.lanes[brought.table].passed.freed(brought.place, brought.number)

    def free(self, brought: Brought) -> None:
        """The root has it."""
        self.lanes[brought.table].passed.free(0, brought.place, brought.number)
        self.bell.ring()


class NodeBelow:
    """An inner node's child."""

    def __init__(self, child: int, desk: Region, bell: WakeUp, way: int) -> None:
        self.child, self._way, self.bell = child, way, bell
        own = NodeDesk(desk)
        self._end = NodeEnd(own.over, own.back, way)
        self.lanes: dict[int, Lane] = {}

    def add(self, table: int, lane: Lane) -> None:
        self.lanes[table] = lane

    def pop(self) -> Brought | None:
        if (found := self._end.pop()) is None:
            return None
        *parts, last = found
        whole = Whole.of(last)
        tickets = tuple(each.ticket(whole.iteration) for each in parts)
        full = bool(whole.full)
        return Brought(self, whole.table, whole.number, parts, whole.slot, full, tickets, whole.counted)

    def passed(self, brought: Brought) -> bool:
        return False

    def free(self, brought: Brought) -> None:
        self.tell(Taken(brought.table, brought.number))

    def tell(self, message: ToNodes) -> None:
        self._end.tell(encode_answer(message, self._way))
        self.flush()

    def flush(self) -> None:
        if self._end.flush():
            self.bell.ring()


@dataclass(slots=True, eq=False)
class Table:
    """One table's way through the node."""

    node: Node
    lane: Lane
    published: list[int]  # sums by slot
    brought: dict[tuple[int, int], Brought] = field(default_factory=dict)  # by child and number
    unsent: Sum | None = None  # no slot is free
    count: Count | None = None
    options: int = 0
    text: bytes = b""

    def free(self) -> int | None:
        for place, number in enumerate(self.published):
            if number == FREE or self.lane.drafts.freed(place, number):
                return place
        return None

    def clear(self, number: int) -> None:
        """Nobody needs this sum."""
        self.published = [FREE if each == number else each for each in self.published]


class LocalNode:
    """One node."""

    def __init__(self, channel: Channel, spec: NodeSpec) -> None:
        self._channel, self._spec = channel, spec
        self._parent, self._way, self._above = spec.parent, 0, spec.above
        self._desk = NodeDesk(spec.desk)
        self._from_root, self._from_parent = Answers(), Answers()
        self._children: dict[int, LearnerBelow | NodeBelow] = {}
        self._below: Mapping[int, Sequence[int]] = {}
        self._tables: dict[int, Table] = {}
        self._outgoing: deque[Record] = deque()
        self._sleeper = Waiter(spec.bell, yields=YIELDS["shard"])
        self._sleeper.watch(channel.fileno())

    def run(self) -> None:
        beats = self._spec.beats.words
        while True:
            beats[0] += 1
            worked = self._read_answers() | self._read_children() | self._send()
            if self._channel.fileno() in self._sleeper.turn(worked=worked):
                self._control()

    # -- up --------------------------------------------------------------------------------------------------

    def _read_children(self) -> bool:
        worked = False
        for child in list(self._children.values()):
            if isinstance(child, NodeBelow):
                child.flush()
            while (brought := child.pop()) is not None:
                while brought.table not in child.lanes and child.child in self._children:
                    self._control()  # it was sent before the child could say this
                if child.child in self._children and not child.passed(brought):
                    table = self._tables[brought.table]
                    table.brought[child.child, brought.number] = brought
                    sum_ = Sum(child.child, brought.number, brought.tickets, counted=brought.counted)
                    self._pass_on(table, table.node.publish(sum_))
                worked = True
        return worked

    def _pass_on(self, table: Table, passed: Iterable[Passed]) -> None:
        for each in passed:
            if isinstance(each, Up):
                table.unsent = each.sum
                continue
            brought = table.brought.pop((each.child, each.number), None)
            child = self._children.get(each.child)
            if brought is None or child is None:
                continue
            if isinstance(each, SumDone):
                child.free(brought)
            elif isinstance(each, Again) and isinstance(child, NodeBelow):
                child.tell(Refused(brought.table, each.number, each.without, each.counted))

    def _send(self) -> bool:
        for number, table in self._tables.items():
            if table.unsent is not None and (place := table.free()) is not None:
                sum_, table.unsent = table.unsent, None
                self._publish(number, table, sum_, place)
        up = self._desk.sums if self._parent == ROOT else self._desk.over
        sent = False
        while self._outgoing and up.push(self._outgoing[0]):
            self._outgoing.popleft()
            sent = True
        if sent:
            (self._spec.root if self._parent == ROOT else self._above).ring()
        return sent

    def _publish(self, number: int, table: Table, sum_: Sum, place: int) -> None:
        """Write the mean of its parts, in the order of the sum."""
        brought, slot = [table.brought[key] for key in sum_.parts], table.lane.slots[place]
        mean = Mean(slot.segments, slot.gradients)
        add_up(mean, [each.weighted(equal=sum_.equal) for each in brought])
        full = all(mean.present)
        if not full:
            slot.mask.copy_(torch.tensor(mean.present, dtype=torch.uint8))
        furthest = min(brought, key=lambda each: min((-ticket.step, ticket.rank) for ticket in each.tickets))
        text = furthest.slot.options_text()  # those options hold
        if text != table.text:
            table.options, table.text = table.options + 1, text
        slot.write_options(text)
        table.published[place] = sum_.number
        self._outgoing += [part.record(self._way) for each in brought for part in each.parts]
        whole = Whole(number, sum_.number, sum_.iteration, table.options, full, place, sum_.counted)
        self._outgoing.append(whole.record(self._way))

    # -- what comes back -------------------------------------------------------------------------------------

    def _read_answers(self) -> bool:
        worked, desk = False, self._desk
        for ring in (desk.answers, desk.back):
            while (record := ring.pop()) is not None:
                if ring is desk.back and int(record[3]) != self._way:
                    continue  # of a node that was above before
                answers = self._from_root if ring is desk.answers else self._from_parent
                if (message := answers.add(record)) is not None:
                    while message.table not in self._tables:
                        self._control()
                    self._hear(message)
                worked = True
        return worked

    def _hear(self, message: ToNodes) -> None:
        table = self._tables[message.table]
        if isinstance(message, Taken):
            if self._parent != ROOT:  # else shards say when they need it no more
                table.clear(message.number)
            self._pass_on(table, table.node.taken(message.number))
        elif isinstance(message, Refused):
            table.clear(message.number)
            again = table.node.again(message.number, message.without, message.counted)
            self._pass_on(table, again)
        else:
            table.count = message.count
            self._count(table)
        self._forget(table)

    def _count(self, table: Table) -> None:
        """Whom the leader waits for, as far as they are below."""
        if (count := table.count) is None:
            return
        first = {}
        every = {*self._children, *self._below}  # whom it has not heard of, too: a new leaf's come one by one
        for child in every:
            below = self._below.get(child, (child,))
            if active := [count.active[each] for each in below if each in count.active]:
                first[child] = min(active)
        self._pass_on(table, table.node.count(replace(count, active=first)))

    def _forget(self, table: Table) -> None:
        """What lost children had here, unless it is in a sum that is still to be made."""
        needed = table.unsent.parts if table.unsent is not None else ()
        for key in [key for key in table.brought if key[0] not in self._children and key not in needed]:
            del table.brought[key]

    # -- the supervisor: what it says is a call of one of these -----------------------------------------------

    def _control(self) -> None:
        method, *arguments = self._channel.receive()
        method(self, *arguments)

    def add_child(
        self, child: int, desk: Region | None, bell: WakeUp, rank: int | None, way: int = 0
    ) -> None:
        """Serve a further child: a learner of that rank, with an outbox in each lane, or a node with a desk.

        `way` counts a node's parents so far: what it sent to another is void.
        """
        if desk is not None:
            self._children[child] = NodeBelow(child, desk, bell, way)
        else:
            assert rank is not None
            self._children[child] = LearnerBelow(child, bell, rank)
        for table in self._tables.values():
            table.node.welcome(child)
            self._count(table)

    def add_lane(self, child: int, table: int, layout: Layout, lane: Region) -> None:
        """Where a child's gradients of a table, or its sums, lie."""
        slots = self._spec.geometry.slots if self._spec.leaf else self._spec.geometry.sums
        found = Lane(lane, layout, slots=slots)
        lane.close()
        if child in self._children:
            self._children[child].add(table, found)

    def add_table(self, table: int, layout: Layout, lane: Region) -> None:
        """Where its own sums of it lie."""
        sums = self._spec.geometry.sums
        node = Node(self._spec.node, leaf=self._spec.leaf)
        self._tables[table] = Table(node, Lane(lane, layout, slots=sums), [FREE] * sums)
        lane.close()

    def lose_child(self, child: int) -> None:
        lost = self._children.pop(child, None)
        if lost is not None:
            lost.bell.close()
            for table in self._tables.values():
                self._pass_on(table, table.node.lose(child))
                self._forget(table)

    def hear_below(self, learners: Mapping[int, Sequence[int]]) -> None:
        """Whose gradients each child passes on."""
        self._below = learners
        for table in self._tables.values():
            self._count(table)

    def move(self, parent: int, way: int, above: WakeUp) -> None:
        """The node above is another; what was said to the one that is lost, and by it, is void."""
        self._above.close()
        self._parent, self._way, self._above = parent, way, above
        self._outgoing.clear()
        self._from_parent = Answers()
        for table in self._tables.values():
            table.published = [FREE] * len(table.published)
            self._pass_on(table, table.node.moved({}))


def run_node(channel: Channel, spec: NodeSpec) -> None:
    """Serve until the supervisor closes the channel."""
    gc.disable()  # the loop makes no cycles
    try:
        LocalNode(channel, spec).run()
    except Closed:
        return
    except Exception:
        channel.try_send(m.ShardRaised(spec.node, None, traceback.format_exc()))
        raise
