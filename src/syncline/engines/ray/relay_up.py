"""A relay's way up: what learners here say to the leading shard elsewhere, each gradient with its values before it (M12).

A gradient's note goes out when every machine whose shards it concerns has its part: nobody knows of one that is not whole. Over a
tree a node's sum goes in the same way, its values first, to every machine with shards or to that of the node above, then its
tickets, and answers come back (M14). What the leading shard reads in learners' own slots (random states, buffers) goes to its
machine before them.
"""

from __future__ import annotations

import struct
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from syncline.engines.local.exchange import Ring
from syncline.engines.local.host_interface import SendOut, SentOut
from syncline.engines.local.record_codec import ANSWER, BESIDE, NOTE, PART, WHOLE, Part, Record, Whole, decode
from syncline.engines.local.shared_memory import WakeUp
from syncline.engines.local.tree_node import NodeDesk
from syncline.engines.ray.bulk_connection import Frame
from syncline.engines.ray.frame_kinds import LANE, TABLE, Kind, place_of, unplaced
from syncline.engines.ray.relay_memory import Span
from syncline.messages.to_leader import Farewell, Gradient, Put, Reread, Rest

if TYPE_CHECKING:
    from syncline.engines.ray.relay import Running

_MARK = struct.Struct("=2q")  # learner, number


@dataclass(frozen=True, slots=True)
class Mark:
    """Another machine wants to know when all that it has sent before is here."""

    site: int
    body: bytes


@dataclass(frozen=True, slots=True)
class SumOut:
    """A sum that is to leave this machine."""

    kind: Kind
    site: int  # where its tickets go
    parts: list[Part]

    @property
    def body(self) -> bytes:
        return b"".join(PART.pack(*part.record(part.way)) for part in self.parts)


@dataclass(slots=True)
class TreeNode:
    """One that has to do with this machine."""

    site: int
    parent: int | None  # the machine of the one above; None: the root
    desk: NodeDesk
    bell: WakeUp
    above: WakeUp | None
    way: int = 0
    # of a sum, as far as read
    parts: dict[Kind, list[Part]] = field(default_factory=lambda: defaultdict(list))
    # to a node above that this machine has not heard of
    early: deque[list[Part]] = field(default_factory=deque)

    def ring_of(self, kind: int) -> tuple[Ring, WakeUp | None]:
        """What arrives here goes into which ring, and wakes whom; None: the leading shard."""
        if kind in (Kind.SUM, Kind.OVER):
            return (self.desk.sums, None) if kind == Kind.SUM else (self.desk.over, self.above)
        return (self.desk.answers if kind == Kind.ANSWER else self.desk.back), self.bell

    def pop(self, kind: Kind, ring: Ring) -> list[Part] | None:
        """All of its next sum."""
        parts = self.parts[kind]
        while (record := ring.pop()) is not None:
            parts.append(Part.of(record))
            if parts[-1].learner == WHOLE:
                return self.parts.pop(kind)
        return None


class Up:
    """Of all learners here."""

    def __init__(self, relay: Running) -> None:
        self._relay = relay
        self._notes: dict[int, deque[Record | SendOut | SumOut]] = defaultdict(deque)  # to go out, in order
        self._awaited: dict[int, dict[int, int]] = {}  # learner -> machine -> the mark that is to come back
        self._marks: dict[int, int] = defaultdict(int)
        self._arrived: dict[int, deque[Record | Mark]] = defaultdict(deque)  # for the leading shard here

    # -- from learners here ------------------------------------------------------------------------------

    def scan(self) -> bool:
        """True if something waits for room."""
        relay = self._relay
        if relay.whole():  # else what is sent to a machine without a connection would be lost
            for number, learner in list(relay.learners.items()) if relay.site != relay.leader else ():
                if learner.site == relay.site:
                    self._collect(number)
            for number in list(self._notes):
                self._go_on(number)
        return self._deliver()

    def _collect(self, number: int) -> None:
        ring = self._relay.learners[number].desk.notes
        while (record := ring.pop()) is not None:
            self._notes[number].append(record)

    def pass_on(self, name: int, out: SumOut) -> None:
        """A node's sum, after those before it."""
        self._notes[name].append(out)

    def _go_on(self, number: int) -> None:
        """Each goes out when what belongs before it is there; that was sent when it was first looked at."""
        relay, notes = self._relay, self._notes[number]
        while notes and not self._awaited.get(number):
            note = notes[0]
            if number not in self._awaited:
                self._awaited[number] = self._send_before(number, note)
                continue
            if isinstance(note, SendOut):
                relay.say(SentOut(number, note.table))
            elif isinstance(note, SumOut):
                relay.send(note.site, note.kind, note.body, place=place_of(0, 0, number))
            else:
                relay.send(relay.leader, Kind.NOTE, NOTE.pack(*note), place=number)
            notes.popleft()
            del self._awaited[number]
        if not notes:
            del self._notes[number]

    def _send_before(self, number: int, note: Record | SendOut | SumOut) -> dict[int, int]:
        """Machines to wait for, with the mark that each will say."""
        relay = self._relay
        if isinstance(note, SumOut):
            sites = list(relay.tree.send_values(number, note))
        elif not isinstance(note, SendOut):
            sites = self._send_values(number, note)
        elif note.table is None:
            known = number in relay.learners and relay.site != relay.leader and relay.leader in relay.peers
            sites = [relay.leader] if known else []
        elif (note.table, number) not in relay.lanes:
            sites = []
        else:
            table = relay.table(note.table)
            sites = [site for site in table.servers() if site in relay.others()]
            for site in sites:
                self.send_slot(site, note.table, number, 0, table.spans[site], full=True, options=None)
            if relay.leader in sites:
                self.send_first(relay.leader, note.table)
        return {site: self._send_mark(site, number) for site in sites}

    def _send_values(self, number: int, record: Record) -> list[int]:
        """To all machines with shards; those to wait for."""
        relay, beside = self._relay, int(record[BESIDE])
        message, slot = decode(record, lambda table, slot: b"")
        if isinstance(message, Rest | Reread | Farewell):
            self.send_beside(message.table, number, beside, buffers=False)
            return []
        if not isinstance(message, Gradient | Put):
            return []
        table = relay.table(message.table)
        sites = [site for site in table.servers() if site != relay.site]
        full, options = (message.full, message.options) if isinstance(message, Gradient) else (True, None)
        for site in sites:
            self.send_slot(site, message.table, number, slot, table.spans[site], full=full, options=options)
        buffers = isinstance(message, Gradient) and table.layout.buffers.nbytes > 0
        self.send_beside(message.table, number, beside, buffers=buffers)
        return [site for site in sites if site != relay.leader]

    def send_slot(
        self,
        site: int,
        table: int,
        number: int,
        slot: int,
        parts: Sequence[Span],
        *,
        full: bool,
        options: int | None,
    ) -> None:
        """These parts of its values, and what goes with them."""
        relay = self._relay
        lane = relay.lanes[table, number]
        start = lane.slot(slot)
        spans = [(start + low, start + high) for low, high in parts]
        if not full:
            spans.append((start + lane.at.mask, start + lane.at.mask_end))
        if options is not None and lane.options.get((site, slot)) != options:
            lane.options[site, slot] = options
            spans.append(lane.text(slot, lane.at.options))
        relay.write(site, place_of(LANE, table, number), lane.region.bytes, spans)

    def send_beside(self, table: int, number: int, beside: int, *, buffers: bool) -> bool:
        """Random states and buffers in a learner's slot, to the leading shard's machine; whether there were any."""
        states = bool(beside & 1)
        if not states and not buffers:
            return False
        relay, lane, slot = self._relay, self._relay.lanes[table, number], beside >> 1
        start = lane.slot(slot)
        spans = [lane.text(slot, lane.at.states)] if states else []
        spans += [(start + lane.at.buffers, start + lane.at.mask)] if buffers else []
        relay.write(relay.leader, place_of(LANE, table, number), lane.region.bytes, spans)
        return True

    # -- marks: that something has arrived ---------------------------------------------------------------

    def _send_mark(self, site: int, number: int) -> int:
        self._marks[site] += 1
        self._relay.send(site, Kind.MARK, _MARK.pack(number, self._marks[site]))
        return self._marks[site]

    def mark(self, site: int, frame: Frame) -> None:
        number, _ = _MARK.unpack(frame.body)
        self._arrived[number].append(Mark(site, bytes(frame.body)))

    def marked(self, site: int, frame: Frame) -> None:
        number, mark = _MARK.unpack(frame.body)
        awaited = self._awaited.get(number, {})
        if awaited.get(site) == mark:
            del awaited[site]

    def send_out(self, order: SendOut) -> None:
        """All that its learner has said, then what is asked for."""
        relay, number = self._relay, order.learner
        if number in relay.learners and relay.site != relay.leader:
            self._collect(number)
        self._notes[number].append(order)

    def send_first(self, site: int, number: int) -> None:
        """All else that learners begin a table with: buffers and the like."""
        table = self._relay.table(number)
        spans = [(table.first, table.end)] if table.end > table.first else []
        self._relay.write(site, place_of(TABLE, number), table.region.bytes, spans)

    def lose(self, site: int) -> None:
        for awaited in self._awaited.values():
            awaited.pop(site, None)

    # -- for the leading shard here ----------------------------------------------------------------------

    def note(self, site: int, frame: Frame) -> None:
        self._arrived[frame.place].append(NOTE.unpack(frame.body))

    def _deliver(self) -> bool:
        """True if a mailbox has no room."""
        relay, rung = self._relay, False
        for number, arrived in list(self._arrived.items()):
            while arrived:
                if isinstance(arrived[0], Mark):
                    relay.send(arrived[0].site, Kind.MARKED, arrived[0].body)
                elif (learner := relay.learner(number)) is None or learner.desk.notes.push(arrived[0]):
                    rung = True
                else:
                    break
                arrived.popleft()
            if not arrived:
                del self._arrived[number]
        if rung:
            relay.parts.shards[0].ring()
        return bool(self._arrived)


class NodeWays:
    """Of all nodes of a tree on several machines."""

    def __init__(self, relay: Running) -> None:
        self._relay = relay
        self._arrived: dict[tuple[int, int], deque[Record]] = defaultdict(deque)  # by name and kind

    def scan(self) -> bool:
        """True if something waits for room."""
        relay = self._relay
        for name, node in list(relay.nodes.items()) if relay.whole() else ():
            if node.site == relay.site:
                self._collect(name, node)
                continue
            if relay.site == relay.leader:
                self._answer(name, node.site, Kind.ANSWER, node.desk.answers)
            if node.parent == relay.site:
                self._answer(name, node.site, Kind.BACK, node.desk.back)
        return self._deliver()

    def _answer(self, name: int, site: int, kind: Kind, ring: Ring) -> None:
        said = []
        while (record := ring.pop()) is not None:
            said.append(ANSWER.pack(*record))
        if said:
            self._relay.send(site, kind, b"".join(said), place=place_of(0, 0, name))

    # -- up ----------------------------------------------------------------------------------------------

    def _collect(self, name: int, node: TreeNode) -> None:
        relay = self._relay
        if relay.site != relay.leader:
            while (parts := node.pop(Kind.SUM, node.desk.sums)) is not None:
                relay.up.pass_on(name, SumOut(Kind.SUM, relay.leader, parts))
        if node.parent is None or node.parent == relay.site:
            return
        while (parts := node.pop(Kind.OVER, node.desk.over)) is not None:
            node.early.append(parts)
        while node.early and node.early[0][0].way <= node.way:
            parts = node.early.popleft()
            if parts[0].way == node.way:
                relay.up.pass_on(name, SumOut(Kind.OVER, node.parent, parts))

    def send_values(self, name: int, out: SumOut) -> set[int]:
        """To all who need them; the machines whose word is to be waited for."""
        relay, whole = self._relay, Whole.of(out.parts[-1])
        table = relay.table(whole.table)
        if out.kind == Kind.OVER:
            parts = {out.site: [(0, table.size)]}
        else:
            parts = {site: table.spans[site] for site in table.servers() if site != relay.site}
        full, options = bool(whole.full), whole.options
        for site, spans in parts.items():
            relay.up.send_slot(site, whole.table, name, whole.slot, spans, full=full, options=options)
        targets, buffers = set(parts), table.layout.buffers.nbytes > 0
        for part in out.parts[:-1]:  # what lies in slots of learners here goes to the leading shard's machine
            known = relay.learners.get(part.learner)
            if known is not None and known.site == relay.site != relay.leader:
                beside = int(part.said[BESIDE])
                if relay.up.send_beside(whole.table, part.learner, beside, buffers=buffers):
                    targets.add(relay.leader)
        return targets - {out.site}

    # -- what arrives ------------------------------------------------------------------------------------

    def arrive(self, site: int, frame: Frame) -> None:
        form = PART if frame.kind in (Kind.SUM, Kind.OVER) else ANSWER
        self._arrived[unplaced(frame.place)[2], frame.kind].extend(form.iter_unpack(frame.body))

    def _deliver(self) -> bool:
        for (name, kind), arrived in list(self._arrived.items()):
            node = self._relay.node(name)
            if node is None:
                arrived.clear()
            else:
                ring, bell = node.ring_of(kind)
                before = len(arrived)
                while arrived and ring.push(arrived[0]):
                    arrived.popleft()
                if len(arrived) < before:
                    (bell or self._relay.parts.shards[0]).ring()
            if not arrived:
                del self._arrived[name, kind]
        return bool(self._arrived)
