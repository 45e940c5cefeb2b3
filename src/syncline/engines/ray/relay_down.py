"""A relay's way down: versions, releases and portions of shards here, to learners elsewhere; and those of others, to learners here.

Each version crosses to a machine once, into the place of its ring that the version's number names, and a release is passed on
when its version is there. In lockstep that is the very version; otherwise a newer one does too, so that a slow link is not asked for
all of them. Which one it is the leading shard's relay says, so that parts of several machines fit together (M13). Over a tree with
`broadcast` it says so unasked, of the newest, to every machine that has all of the former one (R8).
"""

from __future__ import annotations

import struct
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from syncline.engines.local.exchange import DELIVERED
from syncline.engines.local.host_interface import Begun
from syncline.engines.local.table_memory import PORTION
from syncline.engines.ray.bulk_connection import Frame
from syncline.engines.ray.frame_kinds import LANE, TABLE, Kind, place_of
from syncline.ports import WRITTEN

if TYPE_CHECKING:
    from syncline.engines.ray.relay import Running
    from syncline.engines.ray.relay_memory import LaneMemory, Table

_RELEASE = struct.Struct("=7q")  # table, learner, shard, number, version, dial, flags
_FREED = struct.Struct("=5q")  # table, learner, shard, slot, number
_VERSION = struct.Struct("=5q")  # table, shard, place, version, whether it was asked for
_BRING = struct.Struct("=3q")  # table, machine, version
NEVER = -2  # in place of a version: it was overtaken


class Pending(NamedTuple):
    """A release by a shard here that waits for its version."""

    learner: int
    shard: int
    number: int
    version: int
    dial: int
    flags: int


@dataclass(slots=True)
class Flow:
    """One table's versions to one machine."""

    there: deque[int]  # versions that it got last, or will never get
    turn: int = 0  # counts what was brought: places of the ring are filled in turn
    wanted: list[int] = field(default_factory=list)  # versions, or newer ones
    # to be brought, and whether another machine has asked for it
    orders: deque[tuple[int, bool]] = field(default_factory=deque)
    version: int = NEVER  # on its way
    asked: bool = False
    places: dict[int, int] = field(default_factory=dict)  # shard -> its place here
    frame: int = 0
    unanswered: int = 0  # versions that were decided on and have not all arrived, where they flow unasked
    missing: int = 0  # parts of others, where it is this machine that gets them
    pending: list[Pending] = field(default_factory=list)
    kept: dict[int, int] = field(default_factory=dict)  # of this machine's own: shard -> place

    def has(self, version: int, *, exact: bool) -> bool:
        return version in self.there or (not exact and max(self.there, default=NEVER) >= version)

    def has_room_for(self, version: int) -> bool:
        """It is newer, and all that was brought before has arrived."""
        return not self.unanswered and not self.has(version, exact=False)

    def order(self, version: int, *, asked: bool = False) -> bool:
        """False: it is there, or on its way."""
        known = version in (self.version, *(each for each, _ in self.orders), *self.there)
        if not known:
            self.orders.append((version, asked))
        return not known


class Down:
    """To all machines with learners."""

    def __init__(self, relay: Running) -> None:
        self._relay = relay
        places = relay.parts.geometry.places
        self._flows: dict[tuple[int, int], Flow] = defaultdict(lambda: Flow(deque(maxlen=places)))
        self._readable = defaultdict[tuple[int, int], int](lambda: NEVER)  # by table and shard: the newest
        self._unasked: dict[int, bool] = {}  # by table: whether its versions flow so, by the dial in force

    # -- what shards here say ----------------------------------------------------------------------------

    def scan(self) -> None:
        relay = self._relay
        if not relay.parts.shards or not relay.whole():
            return
        for (number, learner), lane in list(relay.lanes.items()):
            known, table = relay.known(learner), relay.tables.get(number)
            if known is not None and table is not None:
                self._scan_lane(known.site, number, table, learner, lane)
        for number, known in relay.learners.items() if relay.site == relay.leader else ():
            if known.site != relay.site:
                while (record := known.desk.portions.pop()) is not None:
                    relay.send(known.site, Kind.PORTION, PORTION.pack(*record), place=number)
        for number in [number for number, unasked in self._unasked.items() if unasked]:
            table = relay.tables[number]
            for shard in table.here:  # once its first values were read, whatever it makes may be read
                if self._readable[number, shard] != NEVER:
                    self._readable[number, shard] = table.shelf.marks.reached(shard)
        for site, number in list(self._flows):
            while self._advance(site, number, relay.tables[number]):
                pass

    def _scan_lane(self, site: int, number: int, table: Table, learner: int, lane: LaneMemory) -> None:
        here = site == self._relay.site
        for shard in table.here:
            count, version, dial, flags = lane.lane.replies.of(shard)
            if count > lane.released.get(shard, 0):
                lane.released[shard] = count
                self._readable[number, shard] = max(self._readable[number, shard], version)
                self._unasked[number] = self._flows_unasked(dial)
                said = Pending(learner, shard, count - 1, version, dial, flags)
                self._released(site, number, table, lane, said)
            for slot in range(0 if here else lane.slots):
                freed = lane.lane.drafts.of(shard, slot)
                if freed > lane.freed.get((shard, slot), 0):
                    lane.freed[shard, slot] = freed
                    self._relay.send(site, Kind.FREED, _FREED.pack(number, learner, shard, slot, freed - 1))

    def _released(self, site: int, number: int, table: Table, lane: LaneMemory, said: Pending) -> None:
        """When its version is there; the values of one that was overtaken lie in the inbox."""
        relay, flow = self._relay, self._flows[site, number]
        if site == relay.site:
            return
        if said.flags & DELIVERED:
            spans = [(lane.inbox + low, lane.inbox + high) for low, high in table.parts[said.shard]]
            relay.write(site, place_of(LANE, number, said.learner), lane.region.bytes, spans)
            self._pass_on(site, number, lane, said)
            return
        flow.pending.append(said)
        if said.shard != table.here[0]:
            return
        if self._exact(said.dial):
            flow.order(said.version)
        elif relay.site == relay.leader:
            flow.wanted.append(said.version)
        elif site == relay.leader:  # of its own learners it does not hear
            relay.send(site, Kind.WANT, _BRING.pack(number, site, said.version))

    def _exact(self, dial: int) -> bool:
        sync = self._relay.dials.get(dial)
        return sync is None or sync.lockstep

    def _flows_unasked(self, dial: int) -> bool:
        sync = self._relay.dials.get(dial)
        return self._relay.parts.casts and sync is not None and not sync.waits

    def _pass_on(self, site: int, number: int, lane: LaneMemory, said: Pending) -> None:
        self._relay.send(site, Kind.RELEASE, _RELEASE.pack(number, *said))
        # where versions flow unasked its machine reads on: they are made beside each other (M13)
        if not self._flows_unasked(said.dial):
            lane.lane.replies.has_read(said.number)

    # -- versions ----------------------------------------------------------------------------------------

    def _advance(self, site: int, number: int, table: Table) -> bool:
        """False: there is nothing to do before something comes or is sent."""
        flow, relay = self._flows[site, number], self._relay
        waiting, flow.pending = flow.pending, []
        for said in waiting:
            if not flow.has(said.version, exact=self._exact(said.dial)):
                flow.pending.append(said)
            elif (lane := relay.lanes.get((number, said.learner))) is not None:
                self._pass_on(site, number, lane, said)
        if flow.version != NEVER:
            if not relay.sent(site, flow.frame) or flow.missing:
                return False
            self._complete(site, number, table, flow)
        elif flow.orders:
            return self._begin(site, number, table, flow)
        elif relay.site == relay.leader and (flow.wanted or self._casts(site, number, table, flow)):
            self._decide(site, number, table, flow)
        else:
            return False
        return True

    def arrived(self) -> bool:
        """Something that was on its way has been sent: there is more to do."""
        return any(
            flow.version != NEVER and not flow.missing and self._relay.sent(site, flow.frame)
            for (site, _), flow in self._flows.items()
        )

    def _casts(self, site: int, number: int, table: Table, flow: Flow) -> bool:
        """The newest is to go there, though nobody asks: it has learners, and all of the former one (R8)."""
        return (
            self._unasked.get(number, False)
            and flow.has_room_for(self._readable[number, 0])
            and (site != self._relay.site or bool(table.elsewhere))
            and any(learner.site == site for learner in self._relay.learners.values())
        )

    def _decide(self, site: int, number: int, table: Table, flow: Flow) -> None:
        """In the leading shard's relay: one for all that wait, and no older than what they wait for."""
        wanted, flow.wanted = flow.wanted, []
        if wanted and flow.has(max(wanted), exact=False):
            return
        version = max([self._readable[number, 0], *wanted])
        flow.unanswered += self._relay.parts.casts
        for other in table.servers():
            if other != self._relay.site:
                self._relay.send(other, Kind.BRING, _BRING.pack(number, site, version))
        flow.order(version, asked=True)  # where that machine has shards, too, it waits for all parts

    def want(self, site: int, frame: Frame) -> None:
        number, where, version = _BRING.unpack(frame.body)
        self._relay.table(number)
        self._flows[where, number].wanted.append(version)

    def bring(self, site: int, frame: Frame) -> None:
        number, where, version = _BRING.unpack(frame.body)
        table = self._relay.table(number)
        if not self._flows[where, number].order(version, asked=True):
            self._say_version(where, number, dict.fromkeys(table.here, NEVER), asked=True)

    def _begin(self, site: int, number: int, table: Table, flow: Flow) -> bool:
        """False: not all shards here have let somebody read it, so that one may still be filling its part."""
        (version, asked), versions, marks = flow.orders[0], table.shelf.versions, table.shelf.marks
        if any(self._readable[number, shard] < version for shard in table.here):
            return False
        flow.orders.popleft()
        found = {shard: versions.find(shard, version) for shard in table.here}
        places = {shard: place for shard, place in found.items() if place is not None}
        for shard, place in places.items():
            marks.keep(shard, place, True)
        flow.version, flow.places, flow.asked = version, places, asked
        if site == self._relay.site:
            flow.missing += len(table.elsewhere)
            return True
        flow.turn, flow.frame = flow.turn + 1, 0
        target, place_there = flow.turn % table.places, place_of(TABLE, number)
        self._say_version(site, number, dict.fromkeys(places, WRITTEN), target)
        for shard, source in places.items():
            memory = table.region.bytes[source * table.size : (source + 1) * table.size]
            for low, high in table.parts[shard]:
                body, offset = memory[low:high], target * table.size + low
                flow.frame = self._relay.send(site, Kind.WRITE, body, place=place_there, offset=offset)
        return True

    def _say_version(
        self, site: int, number: int, said: dict[int, int], place: int = 0, *, asked: bool = False
    ) -> None:
        """By shard: which lies there now."""
        if site != self._relay.site:
            for shard, version in said.items():
                words = _VERSION.pack(number, shard, place, version, asked)
                self._relay.send(site, Kind.VERSION, words)

    def _complete(self, site: int, number: int, table: Table, flow: Flow) -> None:
        version, places = flow.version, flow.places
        if site != self._relay.site:
            whole = table.shelf.versions.lies(version, places.items())
            said = {shard: version if whole and shard in places else NEVER for shard in table.here}
            self._say_version(site, number, said, flow.turn % table.places, asked=flow.asked)
            left = places
        else:  # it stays readable here until there is another
            left, flow.kept = flow.kept, places
        flow.there.append(version)
        flow.version, flow.places = NEVER, {}
        self._leave_off(number, table, left)

    def _leave_off(self, number: int, table: Table, places: dict[int, int]) -> None:
        """What nobody reads any more may be written again."""
        flows = [flow for (_, each), flow in self._flows.items() if each == number]
        read = {kept for flow in flows for held in (flow.kept, flow.places) for kept in held.items()}
        for shard, place in places.items():
            if (shard, place) not in read:
                table.shelf.marks.keep(shard, place, False)

    # -- what a table begins with ------------------------------------------------------------------------

    def begin(self, number: int, *sites: int) -> None:
        """In the leading shard's relay: to these machines."""
        for site in sites if self._relay.site == self._relay.leader else ():
            self._relay.up.send_first(site, number)
            self._relay.send(site, Kind.BEGUN, place=number)

    def begun(self, site: int, frame: Frame) -> None:
        self._relay.say(Begun(frame.place))

    # -- for learners here -------------------------------------------------------------------------------

    def release(self, site: int, frame: Frame) -> None:
        number, learner, shard, *rest = _RELEASE.unpack(frame.body)
        lane, known = self._relay.lane(number, learner), self._relay.learners.get(learner)
        if lane is not None and known is not None:
            lane.lane.replies.release(shard, *rest)
            known.bell.ring()

    def freed(self, site: int, frame: Frame) -> None:
        number, learner, shard, slot, ticket = _FREED.unpack(frame.body)
        lane, known = self._relay.lane(number, learner), self._relay.known(learner)
        if lane is not None and known is not None:
            lane.lane.drafts.free(shard, slot, ticket)
            known.bell.ring()

    def portion(self, site: int, frame: Frame) -> None:
        known = self._relay.learner(frame.place)
        if known is not None:
            known.desk.portions.push(PORTION.unpack(frame.body))
            known.bell.ring()

    def version(self, site: int, frame: Frame) -> None:
        number, shard, place, version, asked = _VERSION.unpack(frame.body)
        table = self._relay.table(number)
        if version != NEVER:
            table.shelf.versions.offer(shard, place, version)
        if asked:
            flow = self._flows[self._relay.site, number]
            flow.missing -= 1
            if not self._relay.parts.casts or flow.missing % len(table.elsewhere):
                return
            if self._relay.site == self._relay.leader:  # all parts of what was brought have come
                flow.unanswered -= 1
            else:
                self._relay.send(self._relay.leader, Kind.GOT, place=number)

    def got(self, site: int, frame: Frame) -> None:
        self._flows[site, frame.place].unanswered -= 1

    # -- the end of others -------------------------------------------------------------------------------

    def forget(self, learner: int) -> None:
        for flow in self._flows.values():
            flow.pending = [each for each in flow.pending if each.learner != learner]

    def lose(self, site: int) -> None:
        for key in [key for key in self._flows if key[0] == site]:
            flow = self._flows.pop(key)
            self._leave_off(key[1], self._relay.tables[key[1]], flow.places)
