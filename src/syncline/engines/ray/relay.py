"""A machine's relay: keeps the shared memory of a run's machines alike, so that learners and shards meet in it as on one machine.

What learners here say and publish goes to the machines with shards, what shards here say and offer to those with learners, from
memory into memory; every word and byte has one writer, and the relay writes on its behalf elsewhere. One thread, nothing waits
for a slow reader. It lives as long as one generation of servers. Not responsible for any decision.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from syncline import messages as m
from syncline.dial import Sync
from syncline.engines.authentication import Secret, Stranger, connect
from syncline.engines.local.control_channel import NOTHING, Channel, Closed
from syncline.engines.local.host_interface import (
    Forget,
    LaneHere,
    LearnerKnown,
    Linked,
    NodeKnown,
    NodeMoved,
    RelayParts,
    SendOut,
    SiteGone,
    SiteJoined,
    TableHere,
)
from syncline.engines.local.shared_memory import WakeUp
from syncline.engines.local.table_memory import Mailbox
from syncline.engines.local.tree_node import NodeDesk
from syncline.engines.ray.bulk_connection import Connection, Frame, Head, Lost
from syncline.engines.ray.frame_kinds import AGENT, LANE, TABLE, Kind, unplaced
from syncline.engines.ray.relay_down import Down
from syncline.engines.ray.relay_log import LogWays
from syncline.engines.ray.relay_memory import LaneMemory, Learner, Table
from syncline.engines.ray.relay_up import NodeWays, TreeNode, Up

LOOK = 1000  # milliseconds without anything to do
RETRY = 1  # milliseconds until what had no room is tried again


@dataclass(frozen=True, slots=True)
class Link:
    """To the relay: another machine's has connected."""

    site: int
    end: WakeUp  # a socket: it travels as a descriptor, as bells do


@dataclass(frozen=True, slots=True)
class LinkLost:
    """From the relay: the way to another machine is gone."""

    site: int
    why: str


@dataclass(frozen=True, slots=True)
class RefusedFrames:
    """From the relay: so many more frames were turned away."""

    count: int


@dataclass(frozen=True, slots=True)
class Relay:
    """What the process runs."""

    parts: RelayParts
    secret: Secret
    addresses: Mapping[int, tuple[str, int]]  # of machines; it connects to those that it has to do with

    def __call__(self, channel: Channel) -> int:
        try:
            Running(channel, self).run()
        except Closed:
            return 0
        return 1


class Running:
    """The process: peers, memory, and the ways that use them."""

    def __init__(self, channel: Channel, spec: Relay) -> None:
        self._channel, self.spec, self.parts = channel, spec, spec.parts
        self.site, self.sites = spec.parts.site, spec.parts.sites
        self.leader = self.sites.shards[0]  # the leading shard's machine
        self.tables: dict[int, Table] = {}
        self.lanes: dict[tuple[int, int], LaneMemory] = {}  # by table and learner
        self.learners: dict[int, Learner] = {}
        self.nodes: dict[int, TreeNode] = {}  # of a tree, by name
        self.dials: dict[int, Sync] = {}
        self.peers: dict[int, Connection] = {}
        self._made: list[int] = []  # tables whose first values are all there
        self._gone: set[int] = set()  # machines
        self._left: set[int] = set()  # learners, and nodes by name
        self.up = up = Up(self)
        self.down = down = Down(self)
        self.log = log = LogWays(self)
        self.tree = tree = NodeWays(self)
        self._handlers: dict[int, Callable[[int, Frame], None]] = {
            Kind.NOTE: up.note,
            Kind.MARK: up.mark,
            Kind.MARKED: up.marked,
            Kind.RELEASE: down.release,
            Kind.FREED: down.freed,
            Kind.PORTION: down.portion,
            Kind.VERSION: down.version,
            Kind.WANT: down.want,
            Kind.BRING: down.bring,
            Kind.BEGUN: down.begun,
            Kind.GOT: down.got,
            Kind.ENTRIES: log.entries,
            Kind.LOGGED: log.logged,
            Kind.NORMS: log.norms,
            Kind.REACHED: log.reached,
            **dict.fromkeys((Kind.SUM, Kind.OVER, Kind.ANSWER, Kind.BACK), tree.arrive),
        }
        self._poll = select.poll()
        for fd in (channel.fileno(), spec.parts.bell.fd):
            self._poll.register(fd, select.POLLIN)

    def run(self) -> None:
        for site, address in self.spec.addresses.items():
            if site in self.others():
                self._connect(site, address)
        beats, linked = self.parts.beats.words, False
        while True:
            beats[0] += 1
            if not linked and self.whole():
                linked = True
                self.say(Linked())
            waiting = self.tree.scan() | self.up.scan()
            self.down.scan()
            waiting |= self.log.scan()
            self._flush()
            wait = 0 if self.down.arrived() else RETRY if waiting else LOOK
            ready = dict(self._poll.poll(wait))
            self.parts.bell.quiet()
            if self._channel.fileno() in ready:
                while (message := self._channel.take()) is not NOTHING:
                    self._control(message)
            for site in [each for each, peer in self.peers.items() if peer.fileno() in ready]:
                self._receive(site)

    # -- other machines ----------------------------------------------------------------------------------

    def others(self) -> list[int]:
        """Machines that this one has to do with: where this has no shards, those that have, and its neighbours in a tree."""
        them = self.sites.live if self.sites.of(self.site) else {*self.sites.servers, *self.parts.near}
        return [site for site in them if site not in (self.site, *self._gone)]

    def whole(self) -> bool:
        """All of them have a connection."""
        return all(site in self.peers for site in self.others())

    def _connect(self, site: int, address: tuple[str, int]) -> None:
        try:
            end = connect(address, self.spec.secret)
            hello = Connection(end, run=self.spec.secret.run, incarnation=AGENT, into=lambda head: None)
            number = hello.send(Kind.LINK, place=self.site, generation=self.parts.generation)
            hello.wait_sent(number)
        except (OSError, Stranger, Lost) as error:
            self._lost(site, str(error))
        else:
            self._join(site, end)

    def _join(self, site: int, end: socket.socket) -> None:
        run, incarnation = self.spec.secret.run, 1 + self.parts.generation
        connection = Connection(end, run=run, incarnation=incarnation, into=self._into)
        self.peers[site] = connection
        self.sites = self.sites.joined_by(site)
        self._poll.register(connection.fileno(), select.POLLIN)
        for table in self._made:
            self.down.begin(table, site)

    def _lost(self, site: int, why: str) -> None:
        self._drop(site)
        self.say(LinkLost(site, why))

    def _drop(self, site: int) -> None:
        self._gone.add(site)
        peer = self.peers.pop(site, None)
        if peer is not None:
            self._poll.unregister(peer.fileno())
            peer.close()
        self.up.lose(site)
        self.down.lose(site)

    def send(self, site: int, kind: int, *bodies: Any, place: int = 0, offset: int = 0) -> int:
        """With the next flush; to a machine that is gone in vain."""
        peer = self.peers.get(site)
        if peer is None:
            assert site in self._gone, f"machine {site} has not connected yet: what is sent there is lost"
            return 0
        return peer.queue(kind, *bodies, place=place, offset=offset)

    def sent(self, site: int, frame: int) -> bool:
        peer = self.peers.get(site)
        return peer is None or peer.sent(frame)

    def write(self, site: int, place: int, memory: memoryview, spans: Iterable[tuple[int, int]]) -> None:
        """The same bytes, there."""
        for low, high in spans:
            self.send(site, Kind.WRITE, memory[low:high], place=place, offset=low)

    def _flush(self) -> None:
        for site, peer in list(self.peers.items()):
            try:
                unsent = not peer.flush()
                self._poll.register(peer.fileno(), select.POLLIN | (select.POLLOUT if unsent else 0))
            except Lost as error:
                self._lost(site, str(error))

    def _receive(self, site: int) -> None:
        peer = self.peers.get(site)
        try:
            while peer is not None and (frame := peer.receive(0)) is not None:
                if frame.kind != Kind.WRITE:
                    self._handlers[frame.kind](site, frame)
                peer = self.peers.get(site)
        except (Lost, KeyError) as error:
            self._lost(site, str(error))
        if peer is not None and peer.refused:
            self.say(RefusedFrames(peer.refused.total()))
            peer.refused.clear()

    def _into(self, head: Head) -> memoryview | None:
        """Where a body goes."""
        if head.kind != Kind.WRITE:
            return None
        what, table, learner = unplaced(head.place)
        stop = head.offset + head.length
        if what == LANE:
            lane = self.lane(table, learner)
            if lane is None:
                return memoryview(bytearray(head.length))
            return lane.region.bytes[head.offset : stop] if lane.start <= head.offset else None
        if what == TABLE:
            memory = self.table(table)
            return memory.region.bytes[head.offset : stop] if stop <= memory.end else None
        return None

    # -- memory ------------------------------------------------------------------------------------------

    def lane(self, table: int, learner: int) -> LaneMemory | None:
        """None: it has left."""
        return self.lanes.get((table, learner)) or self._await(self.lanes, (table, learner), learner)

    def table(self, table: int) -> Table:
        while table not in self.tables:
            self._control(self._channel.receive())
        return self.tables[table]

    def learner(self, learner: int) -> Learner | None:
        """None: it has left."""
        return self.learners.get(learner) or self._await(self.learners, learner, learner)

    def node(self, name: int) -> TreeNode | None:
        """None: it is gone."""
        return self.nodes.get(name) or self._await(self.nodes, name, name)

    def _await(self, known: Mapping[Any, Any], key: Any, who: int) -> Any:
        """Words of another machine may be faster than those of this one's supervisor."""
        while key not in known and who not in self._left:
            self._control(self._channel.receive())
        return known.get(key)

    def known(self, number: int) -> Learner | TreeNode | None:
        """A learner, or a node by its name; None: it has left, or was not heard of."""
        return self.learners.get(number) or self.nodes.get(number)

    def forget(self, learner: int) -> None:
        """Nothing of it is needed any more."""
        self._left.add(learner)
        self.learners.pop(learner, None)
        self.nodes.pop(learner, None)
        for key in [key for key in self.lanes if key[1] == learner]:
            del self.lanes[key]
        self.down.forget(learner)

    # -- this machine's supervisor -----------------------------------------------------------------------

    def say(self, message: Any) -> None:
        self._channel.send(message)

    def _control(self, message: Any) -> None:
        match message:
            case TableHere():
                if message.table not in self.tables:
                    self.tables[message.table] = Table(message, self.parts.geometry, self.sites, self.site)
                if message.made:
                    self._made.append(message.table)
                    self.down.begin(message.table, *self.peers)
            case LearnerKnown():
                desk = Mailbox(message.desk)
                message.desk.close()
                self.learners[message.learner] = Learner(message.site, desk, message.bell)
                self.sites = self.sites.joined_by(message.site)
            case LaneHere():
                geometry = self.parts.geometry
                slots = geometry.slots if message.learner >= 0 else geometry.sums
                self.lanes[message.table, message.learner] = LaneMemory(message, slots)
            case NodeKnown():
                site, parent, bell, above = message.site, message.parent, message.bell, message.above
                self.nodes[message.name] = TreeNode(site, parent, NodeDesk(message.desk), bell, above)
            case NodeMoved():
                if node := self.nodes.get(message.name):
                    node.parent, node.way, node.above = message.parent, message.way, message.above
            case m.Dial():
                self.dials[message.number] = message.sync
            case Forget():
                if not self.log.reads:  # else what the log says of it may be under way
                    self.forget(message.learner)
            case SendOut():
                self.up.send_out(message)
            case Link():
                self._join(message.site, socket.socket(fileno=os.dup(message.end.fd)))
                message.end.close()
            case SiteGone():
                self._drop(message.site)
            case SiteJoined():
                self._connect(message.site, message.address)
