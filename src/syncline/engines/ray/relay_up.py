"""A relay's way up: what learners here say to the leading shard elsewhere, each gradient with its values before it (M12).

A gradient's note goes out when every machine whose shards it concerns has its part: nobody knows of one that is not whole.
"""

from __future__ import annotations

import struct
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from syncline.engines.local.host_interface import SendOut, SentOut
from syncline.engines.local.record_codec import BESIDE, NOTE, Record, decode
from syncline.engines.ray.bulk_connection import Frame
from syncline.engines.ray.frame_kinds import LANE, TABLE, Kind, place_of
from syncline.engines.ray.relay_memory import Span
from syncline.engines.ray.relay_nodes import SumOut
from syncline.messages.to_leader import Farewell, Gradient, Put, Reread, Rest

if TYPE_CHECKING:
    from syncline.engines.ray.relay import Running

_MARK = struct.Struct("=2q")  # learner, number


@dataclass(frozen=True, slots=True)
class Mark:
    """Another machine wants to know when all that it has sent before is here."""

    site: int
    body: bytes


class Up:
    """Of all learners here."""

    def __init__(self, relay: Running) -> None:
        self._relay = relay
        self._notes: dict[int, deque[Record | SendOut | SumOut]] = defaultdict(deque)  # to go out, in order
        self._awaited: dict[int, dict[int, int]] = {}  # learner -> machine -> the mark that is to come back
        self._marks: dict[int, int] = defaultdict(int)
        self._arrived: dict[int, deque[Record | Mark]] = defaultdict(deque)  # for the leading shard here
        self.handlers: dict[int, Callable[[int, Frame], None]] = {
            Kind.NOTE: self._note,
            Kind.MARK: self._mark,
            Kind.MARKED: self._marked,
        }

    # -- from learners here ------------------------------------------------------------------------------

    def scan(self) -> bool:
        """True if something waits for room."""
        if self._relay.whole():  # else what is sent to a machine without a connection would be lost
            self._send_all()
        return self._deliver()

    def _send_all(self) -> None:
        relay = self._relay
        for number, learner in list(relay.learners.items()) if relay.site != relay.leader else ():
            if learner.site == relay.site:
                self._collect(number)
        for number in list(self._notes):
            self._go_on(number)

    def _collect(self, number: int) -> None:
        ring = self._relay.learners[number].desk.notes
        while (record := ring.pop()) is not None:
            self._notes[number].append(record)

    def pass_on(self, name: int, out: SumOut) -> None:
        """A node's sum, after those before it."""
        self._notes[name].append(out)

    def _go_on(self, number: int) -> None:
        """Send what does not wait for what was sent before it."""
        notes = self._notes[number]
        while notes and not self._awaited.get(number):
            note = notes[0]
            if isinstance(note, SendOut):
                if not self._sent_out(note):
                    return
            elif isinstance(note, SumOut):
                if not self._send_sum(number, note):
                    return
            elif not self._send(number, note):
                return
            notes.popleft()
            self._awaited.pop(number, None)
        if not notes:
            del self._notes[number]

    def _send(self, number: int, record: Record) -> bool:
        """False: its values are on their way to a machine that will say when it has them."""
        if number not in self._awaited:
            self._awaited[number] = self._send_values(number, record)
            if self._awaited[number]:
                return False
        self._relay.send(self._relay.leader, Kind.NOTE, NOTE.pack(*record), place=number)
        return True

    def _send_sum(self, name: int, out: SumOut) -> bool:
        """The same of a node's sum."""
        if name not in self._awaited:
            wait_for = self._relay.tree.send_values(name, out)
            self._awaited[name] = {site: self._send_mark(site, name) for site in wait_for}
            if wait_for:
                return False
        self._relay.send(out.site, out.kind, out.body, place=place_of(0, 0, name))
        return True

    def _send_values(self, number: int, record: Record) -> dict[int, int]:
        """To all machines with shards; those to wait for, with what they will say."""
        relay, beside = self._relay, int(record[BESIDE])
        message, slot = decode(record, lambda table, slot: b"")
        if isinstance(message, Rest | Reread | Farewell):
            self.send_beside(message.table, number, beside, buffers=False)
            return {}
        if not isinstance(message, Gradient | Put):
            return {}
        table, awaited = relay.table(message.table), {}
        for site in table.servers():
            if site == relay.site:
                continue
            full = isinstance(message, Put) or message.full
            options = message.options if isinstance(message, Gradient) else None
            spans = table.spans[site]
            self.send_slot(site, message.table, number, slot, spans, full=full, options=options)
            if site != relay.leader:
                awaited[site] = self._send_mark(site, number)
        buffers = isinstance(message, Gradient) and table.layout.buffers.nbytes > 0
        self.send_beside(message.table, number, beside, buffers=buffers)
        return awaited

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

    def _mark(self, site: int, frame: Frame) -> None:
        number, _ = _MARK.unpack(frame.body)
        self._arrived[number].append(Mark(site, bytes(frame.body)))

    def _marked(self, site: int, frame: Frame) -> None:
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

    def _sent_out(self, order: SendOut) -> bool:
        number, relay = order.learner, self._relay
        if number not in self._awaited:
            known = order.table is None or (order.table, number) in relay.lanes
            self._awaited[number] = self._mark_out(order) if known else {}
            if self._awaited[number]:
                return False
        relay.say(SentOut(number, order.table))
        return True

    def _mark_out(self, order: SendOut) -> dict[int, int]:
        relay, number = self._relay, order.learner
        if order.table is None:
            known = number in relay.learners and relay.site != relay.leader and relay.leader in relay.peers
            return {relay.leader: self._send_mark(relay.leader, number)} if known else {}
        servers = [site for site in relay.table(order.table).servers() if site in relay.others()]
        for site in servers:
            parts = relay.table(order.table).spans[site]
            self.send_slot(site, order.table, number, 0, parts, full=True, options=None)
        if relay.leader in servers:
            self.send_first(relay.leader, order.table)
        return {site: self._send_mark(site, number) for site in servers}

    def send_first(self, site: int, number: int) -> None:
        """All else that learners begin a table with: buffers and the like."""
        table = self._relay.table(number)
        spans = [(table.first, table.end)] if table.end > table.first else []
        self._relay.write(site, place_of(TABLE, number), table.region.bytes, spans)

    def lose(self, site: int) -> None:
        for awaited in self._awaited.values():
            awaited.pop(site, None)

    # -- for the leading shard here ----------------------------------------------------------------------

    def _note(self, site: int, frame: Frame) -> None:
        self._arrived[frame.place].append(NOTE.unpack(frame.body))

    def _deliver(self) -> bool:
        """True if a mailbox has no room."""
        rung = False
        for number, arrived in list(self._arrived.items()):
            while arrived and self._hand_over(number, arrived[0]):
                rung |= not isinstance(arrived.popleft(), Mark)
            if not arrived:
                del self._arrived[number]
        if rung:
            self._relay.parts.shards[0].ring()
        return bool(self._arrived)

    def _hand_over(self, number: int, arrived: Record | Mark) -> bool:
        if isinstance(arrived, Mark):
            self._relay.send(arrived.site, Kind.MARKED, arrived.body)
            return True
        learner = self._relay.learner(number)
        return learner is None or learner.desk.notes.push(arrived)
