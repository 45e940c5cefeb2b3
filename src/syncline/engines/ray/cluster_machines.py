"""The machines of a run on a cluster, as its supervisor has them: who is where, who of them lives, who joins.

Not responsible for how they are told what to do (remote_host.py), nor for noticing that one is gone (heartbeat.py).
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

from syncline.engines.authentication import Secret
from syncline.engines.local.host_interface import Host, Linked, Machines, RelayParts, Seats, Sites, Told
from syncline.engines.local.processes import Process, Processes
from syncline.engines.local.shared_memory import WakeUp
from syncline.engines.ray.heartbeat import Heartbeat
from syncline.engines.ray.placement import GpuDealer, Node, next_node
from syncline.engines.ray.relay import LinkLost, RefusedFrames, Relay
from syncline.engines.ray.remote_host import RemoteHost

MOMENT = 0.3  # seconds after a way is cut until one of its ends is lost: the cause may be on its way
Newcomer = tuple[Node, RemoteHost, int]  # and the learners it has room for


class ClusterMachines(Machines):
    """The nodes of a run; `addresses` are those of their agents."""

    def __init__(
        self,
        nodes: list[Node],
        dealt: list[int],
        sites: Sites,
        remote: list[RemoteHost],
        pulse: Heartbeat,
        secret: Secret,
        addresses: dict[int, tuple[str, int]],
    ) -> None:
        self._nodes, self.sites, self._remote, self._pulse = nodes, sites, remote, pulse
        self._secret, self.addresses = secret, addresses
        self._of = dict(enumerate(dealt))
        self._home = dealt.count(0) > 0
        self._dead: set[int] = set()
        self._frames: dict[int, int] = {}  # that relays have turned away
        self._cut: deque[tuple[float, Process, LinkLost]] = deque()  # ways, and when to judge
        self._bell, self._newcomers = WakeUp(), queue.SimpleQueue[Newcomer | str]()
        self._room: dict[int, int] = {}  # machine -> learners that begin when its relay has all its ways
        self._promised: deque[int] = deque()  # the machines of the next learners
        self._told: Told
        pulse.look = self._judge

    @property
    def refused(self) -> int:
        """Connections and frames that were turned away, on all nodes."""
        return self._pulse.refused + sum(self._frames.values())

    def relay(self, parts: RelayParts) -> Relay:
        return Relay(parts, self._secret, self.addresses)

    def seats(self) -> Seats:
        return GpuDealer(self._nodes[0].gpus)

    def hosts(self, processes: Processes, told: Told) -> Sequence[Host]:
        self._told = told
        for host in self._remote:
            self._watch(processes, host)
        processes.watch(self._pulse.lost.fd, partial(self._bury, processes))
        processes.watch(self._bell.fd, partial(self._welcome, processes))
        return list(self._remote)

    def _watch(self, processes: Processes, host: RemoteHost) -> None:
        told = self._told
        processes.watch(host.listen(told.heard, told.ended, self._pulse.declare), host.receive)

    def _bury(self, processes: Processes) -> None:
        self._pulse.lost.quiet()
        while not self._pulse.dead.empty():
            site, why = self._pulse.dead.get()
            self._dead.add(site)
            self._room.pop(site, None)
            self.sites = self.sites.without(site)
            processes.unwatch(self._remote[site - 1].fileno())
            self._told.lost(site, why)

    # -- who joins ---------------------------------------------------------------------------------------

    def gain(self, newcomer: Newcomer | str) -> None:
        """From any thread: a node whose agent is ready, or in words why one is not used."""
        self._newcomers.put(newcomer)
        self._bell.ring()

    def _welcome(self, processes: Processes) -> None:
        self._bell.quiet()
        while not self._newcomers.empty():
            found = self._newcomers.get()
            if isinstance(found, str):
                self._told.refused(found)
                continue
            node, host, room = found
            self._nodes.append(node)
            self._remote.append(host)
            self.sites, self._room[host.site] = self.sites.joined_by(host.site), room
            self._watch(processes, host)
            self._told.joined(host, f"{node}, {room} learner{'s' * (room > 1)}")

    def address(self, site: int) -> tuple[str, int]:
        return self.addresses[site]

    # -- who is where ------------------------------------------------------------------------------------

    def where(self, rank: int) -> int:
        site = self._of.get(rank)
        if site is None or site in self._dead:
            site = self._of[rank] = self._another()
        return site

    def _another(self) -> int:
        while self._promised:
            if (site := self._promised.popleft()) not in self._dead:
                return site
        usable = [
            host.site for host in self._remote if host.site not in self._dead and host.site in self._used
        ]
        usable += [0] if self._home or not usable else []
        counts = [list(self._of.values()).count(node) for node in range(len(self._nodes))]
        found = next_node(counts, usable)
        return found if found is not None else 0

    @property
    def _used(self) -> set[int]:
        """Nodes for learners; the others are the shards' alone."""
        return set(self._of.values()) or {0}

    # -- what relays say ---------------------------------------------------------------------------------

    def hear(self, relay: Process, word: Any) -> None:
        if isinstance(word, RefusedFrames):
            self._frames[relay.number] = word.count
        elif isinstance(word, LinkLost):
            self._cut.append((time.monotonic() + MOMENT, relay, word))
        elif isinstance(word, Linked) and (room := self._room.pop(relay.number, 0)):
            self._promised.extend([relay.number] * room)
            self._told.add(room)

    def _judge(self) -> None:
        """Of ways that are cut, unless their relays have ended meanwhile, or one of the two machines is gone."""
        while self._cut and self._cut[0][0] <= time.monotonic():
            _, relay, word = self._cut.popleft()
            pair = {relay.number, word.site} - {0}
            if relay.state == "running" and all(map(self._pulse.alive, pair)):
                self._separate(relay.number, word.site, word.why)

    def _separate(self, site: int, other: int, why: str) -> None:
        """One of them is lost, rather one without shards, never the caller's."""
        lost = min({site, other} - {0}, key=lambda each: (bool(self.sites.of(each)), -each))
        left = other if lost == site else site
        self._pulse.declare(lost, f"no way between it and {self._nodes[left]}: {why}")
