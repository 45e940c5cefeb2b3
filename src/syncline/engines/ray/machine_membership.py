"""The machines of a run on a cluster, as its supervisor has them: who is where, who of them lives, who joins.

Not responsible for how they are told what to do (remote_host.py), nor for noticing that one is gone (heartbeat.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from syncline.engines.local.host_interface import Host, Linked, Machines, RelayParts, Seats, Sites, Told
from syncline.engines.local.processes import Process, Processes
from syncline.engines.local.shared_memory import WakeUp
from syncline.engines.local.shared_pickle import Parcel
from syncline.engines.ray.agent import Begin, describe, versions
from syncline.engines.ray.cluster import READY, RayCluster
from syncline.engines.ray.heartbeat import Heartbeat
from syncline.engines.ray.placement import GpuDealer, Node
from syncline.engines.ray.relay import LinkLost, RefusedFrames, Relay
from syncline.engines.ray.remote_host import RemoteHost, Way
from syncline.engines.run import RunSpec, Storage
from syncline.errors import UsageError
from syncline.table.checkpoints import Folder

MOMENT = 0.3  # seconds after a way is cut until one of its ends is lost: the cause may be on its way
EVERY = 1.0  # seconds between two looks for nodes that have joined
Newcomer = tuple[Node, RemoteHost, int]  # and the learners it has room for


class ClusterMachines(Machines):
    """The nodes of a run, in their order; on all but the first, the caller's, an agent of `cluster` was started."""

    def __init__(
        self,
        spec: RunSpec,
        task: Parcel,
        cluster: RayCluster,
        nodes: list[Node],
        dealt: list[int],
        sites: Sites,
    ) -> None:
        self._spec, self._task, self.cluster = spec, task, cluster
        self._nodes, self.sites = nodes, sites
        self._ways: dict[int, Way] = {}
        self._remote: list[RemoteHost] = []
        self._of = dict(enumerate(dealt))
        self._home = dealt.count(0) > 0
        self._dead: set[int] = set()
        self._frames = 0  # that relays have turned away
        self._cut: deque[tuple[float, Process, LinkLost]] = deque()  # ways, and when to judge
        self._bell, self._newcomers = WakeUp(), queue.SimpleQueue[Newcomer | str]()
        self._room: dict[int, int] = {}  # machine -> learners that begin when its relay has all its ways
        self._promised: deque[int] = deque()  # the machines of the next learners
        self._told: Told

    def begin(self, undo: contextlib.ExitStack, grow: Callable[[Node], int] | None) -> None:
        """All agents are told of the run; what ends it goes to `undo`. Nodes that join have room for so many learners."""
        self._ways = {site: self._way(site, self._nodes[site]) for site in self.cluster.about}
        self.pulse = Heartbeat(self._ways)
        self.pulse.look = self._remind
        undo.callback(self.pulse.close)
        self._remote = self._begun(self._ways, self._ways, self.sites, self.pulse.alive)
        for host in self._remote:
            undo.callback(host.close)
        if grow is not None:
            known = {node.id for node in self.cluster.nodes()}
            thread = threading.Thread(
                target=self._grow, args=(known, grow), name="syncline-growth", daemon=True
            )
            thread.start()
            undo.callback(thread.join)
        undo.callback(self.cluster.closing.set)

    def _way(self, site: int, node: Node) -> Way:
        about, home = self.cluster.about[site], self._nodes[0]
        if differs := describe(about.versions, versions()):
            raise UsageError(f"node {node} has other versions: {differs}; install the same on all nodes")
        machine = "" if node.host == home.host else str(node)
        return Way(about.address, self.cluster.secret, str(node), str(home), machine)

    def _begun(
        self, ways: Mapping[int, Way], new: Iterable[int], sites: Sites, alive: Callable[[int], bool]
    ) -> list[RemoteHost]:
        """These new machines are told of the run and are ready. Each connects to the old ones, and to those that are told after it."""
        folder = Folder(Path(self._spec.storage.folder)) if self._spec.storage.folder else None
        made: list[RemoteHost] = []
        spec = dataclasses.replace(  # what other machines need of it
            self._spec,
            task=None,  # type: ignore[arg-type]
            storage=Storage(folder=self._spec.storage.folder),
            card=None,
            evaluate=None,
            callbacks=(),
            listeners=(),
        )
        others = {site: way.address for site, way in ways.items()}
        with _token(folder) as token, contextlib.ExitStack() as undo:
            for site in new:
                del others[site]
                made.append(RemoteHost(ways[site], self._task, Begin(spec, sites, site, dict(others), token)))
                undo.callback(made[-1].close)
            for host in made:
                host.wait_ready(partial(alive, host.site), folder, ways)
            undo.pop_all()
        return made

    @property
    def refused(self) -> int:
        """Connections and frames that were turned away, on all nodes."""
        return self.pulse.refused + self._frames

    def relay(self, parts: RelayParts) -> Relay:
        return Relay(parts, self.cluster.secret, {site: way.address for site, way in self._ways.items()})

    def seats(self) -> Seats:
        return GpuDealer(self._nodes[0].gpus)

    def hosts(self, processes: Processes, told: Told) -> Sequence[Host]:
        self._told = told
        for host in self._remote:
            self._watch(processes, host)
        processes.watch(self.pulse.lost.fd, partial(self._bury, processes))
        processes.watch(self._bell.fd, partial(self._welcome, processes))
        return list(self._remote)

    def _watch(self, processes: Processes, host: RemoteHost) -> None:
        host.listen(self._told.heard, self._told.ended, self.pulse.declare)
        processes.watch(host.fd, host.receive)

    def _bury(self, processes: Processes) -> None:
        self.pulse.lost.quiet()
        self._judge()
        while not self.pulse.dead.empty():
            site, why = self.pulse.dead.get()
            self._dead.add(site)
            self._room.pop(site, None)
            self.sites = self.sites.without(site)
            processes.unwatch(self._remote[site - 1].fd)
            self._told.lost(site, why)

    # -- who joins ---------------------------------------------------------------------------------------

    def _grow(self, known: set[str], room_on: Callable[[Node], int]) -> None:
        """A thread of its own looks for nodes that join the cluster; one that cannot be used is said once, and not tried again."""
        while not self.cluster.closing.wait(EVERY):
            try:
                found = self.cluster.nodes()
            except Exception:  # its account may be away for a while; whether nodes live is not its matter
                continue
            for node in found:
                if node.id not in known and not self.cluster.closing.is_set():
                    known.add(node.id)
                    self._newcomers.put(self._settled(node, room_on(node)))
                    self._bell.ring()

    def _settled(self, node: Node, room: int) -> Newcomer | str:
        """It becomes a machine of the run, or in words why not."""
        if room < 1:
            return f"node {node} joined the cluster and is not used: it has no core"
        site = 1 + len(self._ways)
        try:
            self.cluster.add(site, node, room * self._spec.group)
            ways, deadline = {**self._ways, site: self._way(site, node)}, time.monotonic() + READY

            def worth_waiting(site: int) -> bool:
                return time.monotonic() < deadline and not self.cluster.closing.is_set()

            (host,) = self._begun(ways, [site], self.sites.joined_by(site), worth_waiting)
            try:
                self.pulse.add(site, ways[site])
            except BaseException:
                host.close()
                raise
        except Exception as error:
            self.cluster.drop(site)
            return f"node {node} joined the cluster and is not used: {error}"
        self._ways = ways
        return node, host, room

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
        return self._ways[site].address

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
        used = set(self._of.values()) or {0}  # nodes for learners; the others are the shards' alone
        usable = [host.site for host in self._remote if host.site not in self._dead and host.site in used]
        usable += [0] if self._home or not usable else []
        return min(usable, key=lambda site: (list(self._of.values()).count(site), site))

    # -- what relays say ---------------------------------------------------------------------------------

    def hear(self, relay: Process, word: Any) -> None:
        if isinstance(word, RefusedFrames):
            self._frames += word.count
        elif isinstance(word, LinkLost):
            self._cut.append((time.monotonic() + MOMENT, relay, word))
        elif isinstance(word, Linked) and (room := self._room.pop(relay.number, 0)):
            self._promised.extend([relay.number] * room)
            self._told.add(room)

    def _remind(self) -> None:
        """On the pulse's thread. The supervisor judges, in order with relays' ends: while it ends all of them, ways are cut."""
        if self._cut:
            self.pulse.lost.ring()

    def _judge(self) -> None:
        """Of ways that are cut, unless their relays have ended meanwhile, or one of the two machines is gone: one end is lost,
        rather one without shards, never the caller's.
        """
        while self._cut and self._cut[0][0] <= time.monotonic():
            _, relay, word = self._cut.popleft()
            ends = {relay.number, word.site} - {0}
            if relay.state == "running" and all(map(self.pulse.alive, ends)):
                lost = min(ends, key=lambda each: (bool(self.sites.of(each)), -each))
                left = relay.number if lost == word.site else word.site
                self.pulse.declare(lost, f"no way between it and {self._nodes[left]}: {word.why}")


@contextlib.contextmanager
def _token(folder: Folder | None) -> Iterator[str | None]:
    """A file that machines which see the folder find there."""
    if folder is None:
        yield None
        return
    folder.root.mkdir(parents=True, exist_ok=True)
    token = folder.root / f".seen-{os.urandom(8).hex()}"
    token.touch()
    try:
        yield str(token)
    finally:
        token.unlink()
