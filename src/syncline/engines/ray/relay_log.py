"""A relay's way between shards: the leading shard's log to those of other machines, their norms and how far they are.

What an entry needs goes before it: gradients that learners on the leading shard's machine have published there. The log is
bounded: as much is under way as the other machine's shards have room for.
"""

from __future__ import annotations

import struct
from collections import Counter, deque
from typing import TYPE_CHECKING

from syncline.engines.local.exchange import RECORD, Ring
from syncline.engines.local.record_codec import ENTRY, Record, decode_entry
from syncline.engines.local.server import LOG_ENTRIES
from syncline.engines.local.shared_memory import SharedWords
from syncline.engines.ray.bulk_connection import Frame
from syncline.engines.ray.frame_kinds import WORD, Kind
from syncline.messages import log

if TYPE_CHECKING:
    from syncline.engines.ray.relay import Running
    from syncline.engines.ray.relay_memory import Table

assert ENTRY.size <= RECORD * 8
_NORMS = struct.Struct("=3q")  # table, shard, number; then the values
_REACHED = struct.Struct("=3q")  # table, shard, version
MOST = LOG_ENTRIES // 2  # entries under way to a machine


class LogWays:
    """Of the machines with shards."""

    def __init__(self, relay: Running) -> None:
        self._relay, parts = relay, relay.parts
        self._others = [site for site in relay.sites.servers if site != relay.site] if parts.shards else []
        self.reads = parts.reader is not None
        self._ring = Ring(
            SharedWords(parts.log), 0, capacity=LOG_ENTRIES, form=ENTRY, readers=max(1, parts.readers)
        )
        self._under_way: Counter[int] = Counter()
        self._arrived: deque[Record] = deque()  # for shards here
        self._norms: Counter[tuple[int, int]] = Counter()  # by table and shard: rounds that were passed on
        self._reached: dict[tuple[int, int], int] = {}

    def scan(self) -> bool:
        """True if something waits for room."""
        if not self._others or not self._relay.whole():
            return bool(self._arrived)
        self._send_log()
        for number, table in self._relay.tables.items():
            for shard in table.here:
                self._tell(number, table, shard)
        return self._log_here()

    # -- the log -----------------------------------------------------------------------------------------

    def _send_log(self) -> None:
        """In the leading shard's relay."""
        reader = self._relay.parts.reader
        room = MOST - max((self._under_way[site] for site in self._others), default=0)
        if reader is None or room <= 0:
            return
        records: list[bytes] = []
        while len(records) < room and (record := self._ring.pop(reader)) is not None:
            self._send_needed(*decode_entry(record))
            records.append(ENTRY.pack(*record))
        for site in self._others if records else ():
            self._relay.send(site, Kind.ENTRIES, b"".join(records))
            self._under_way[site] += len(records)

    def _send_needed(self, entry: log.Entry, slot: int) -> None:
        relay = self._relay
        if isinstance(entry, log.Leave):
            relay.forget(entry.learner)
            return
        if not isinstance(entry, log.Take | log.PutValues):
            return
        number, table, who = entry.table, relay.table(entry.table), entry.learner
        known = relay.learner(who) if who >= 0 else relay.node(who)
        if known is None or known.site != relay.site:
            return  # it has sent it itself
        full, options = (entry.full, entry.options) if isinstance(entry, log.Take) else (True, None)
        for site in table.servers():
            if site != relay.site:
                relay.up.send_slot(site, number, who, slot, table.spans[site], full=full, options=options)

    def entries(self, site: int, frame: Frame) -> None:
        self._arrived.extend(ENTRY.iter_unpack(frame.body))

    def _log_here(self) -> bool:
        count = 0
        while self._arrived and self._ring.push(self._arrived[0]):
            self._arrived.popleft()
            count += 1
        if count:
            self._relay.send(self._relay.leader, Kind.LOGGED, WORD.pack(count))
            self._ring_shards()
        return bool(self._arrived)

    def logged(self, site: int, frame: Frame) -> None:
        self._under_way[site] -= WORD.unpack(frame.body)[0]

    def _ring_shards(self) -> None:
        for bell in self._relay.parts.shards.values():
            bell.ring()

    # -- what shards tell each other ---------------------------------------------------------------------

    def _tell(self, number: int, table: Table, shard: int) -> None:
        relay, key = self._relay, (number, shard)
        reached = table.shelf.marks.reached(shard)
        if relay.site != relay.leader and reached != self._reached.get(key, -1):
            self._reached[key] = reached
            relay.send(relay.leader, Kind.REACHED, _REACHED.pack(number, shard, reached))
        round_, values = table.shelf.norms.of(shard)
        if round_ != self._norms[key]:
            self._norms[key] = round_
            body = _NORMS.pack(number, shard, round_) + struct.pack(f"={len(values)}d", *values)
            for site in self._others:
                relay.send(site, Kind.NORMS, body)

    def norms(self, site: int, frame: Frame) -> None:
        number, shard, round_ = _NORMS.unpack(frame.body[: _NORMS.size])
        values = frame.body[_NORMS.size :]
        table = self._relay.table(number)
        table.shelf.norms.tell(shard, round_, struct.unpack(f"={len(values) // 8}d", values))
        self._ring_shards()

    def reached(self, site: int, frame: Frame) -> None:
        number, shard, version = _REACHED.unpack(frame.body)
        self._relay.table(number).shelf.marks.reach(shard, version)
        self._ring_shards()
