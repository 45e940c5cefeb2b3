"""The cluster engine's front door: checks, room on the nodes, what learners run to every node; then a run over their machines.

The caller's own node has the supervisor and the leading shard; the other nodes' agents do what it says.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from syncline.cluster.calibration_file import keep as keep_cluster
from syncline.cluster.record import Cluster
from syncline.engines.local.engine import LocalHandle, check_platform
from syncline.engines.local.host import Ended, Heard, Host, Machines, RelayParts, Seats, Sites
from syncline.engines.local.packing import Parcel, pack
from syncline.engines.local.processes import Process, Processes
from syncline.engines.local.task_packing import pack_task
from syncline.engines.ray.agent import About, Begin, describe, versions
from syncline.engines.ray.agent_client import Way
from syncline.engines.ray.authentication import Secret
from syncline.engines.ray.cluster import Agents, RayCluster, load_ray
from syncline.engines.ray.heartbeat import Heartbeat
from syncline.engines.ray.link_measurement import Echoes, measure_way, measured
from syncline.engines.ray.placement import GpuDealer, Node, chosen_nodes, deal, next_node, spread
from syncline.engines.ray.relay import LinkLost, RefusedFrames, Relay
from syncline.engines.ray.remote_host import RemoteHost
from syncline.engines.run import Engine, RunSpec, Storage
from syncline.errors import NotYetError, UsageError
from syncline.learn.server_session import check_whole
from syncline.messages import Statistics
from syncline.table.checkpoints import Folder

MOMENT = 0.3  # seconds after a way is cut until one of its ends is lost: the cause may be on its way


class ClusterMachines(Machines):
    """The nodes of a run: who is where, and who of them lives."""

    def __init__(
        self,
        nodes: list[Node],
        dealt: list[int],
        sites: Sites,
        remote: Sequence[RemoteHost],
        pulse: Heartbeat,
        secret: Secret,
        addresses: dict[int, tuple[str, int]],
    ) -> None:
        self._nodes, self.sites, self._remote, self._pulse = nodes, sites, remote, pulse
        self._secret, self._addresses = secret, addresses
        self._of = dict(enumerate(dealt))
        self._home = dealt.count(0) > 0
        self._dead: set[int] = set()
        self._frames: dict[int, int] = {}  # that relays have turned away
        self._cut: deque[tuple[float, Process, LinkLost]] = deque()  # ways, and when to judge
        pulse.look = self._judge

    @property
    def refused(self) -> int:
        """Connections and frames that were turned away, on all nodes."""
        return self._pulse.refused + sum(self._frames.values())

    def relay(self, parts: RelayParts) -> Relay:
        return Relay(parts, self._secret, self._addresses)

    def seats(self) -> Seats:
        return GpuDealer(self._nodes[0].gpus)

    def hosts(
        self, processes: Processes, heard: Heard, ended: Ended, lost: Callable[[int, str], None]
    ) -> Sequence[Host]:
        for host in self._remote:
            processes.watch(host.listen(heard, ended, self._pulse.declare), host.receive)
        processes.watch(self._pulse.lost.fd, partial(self._bury, processes, lost))
        return self._remote

    def _bury(self, processes: Processes, lost: Callable[[int, str], None]) -> None:
        self._pulse.lost.quiet()
        while not self._pulse.dead.empty():
            site, why = self._pulse.dead.get()
            self._dead.add(site)
            self.sites = self.sites.without(site)
            processes.unwatch(self._remote[site - 1].fileno())
            lost(site, why)

    def where(self, rank: int) -> int:
        site = self._of.get(rank)
        if site is None or site in self._dead:
            site = self._of[rank] = self._another()
        return site

    def _another(self) -> int:
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

    def suspect(self, relay: Process, word: Any) -> None:
        if isinstance(word, RefusedFrames):
            self._frames[relay.number] = word.count
        elif isinstance(word, LinkLost):
            self._cut.append((time.monotonic() + MOMENT, relay, word))

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


class RayHandle(LocalHandle):
    """A run on a cluster's nodes."""

    def __init__(
        self, spec: RunSpec, machines: ClusterMachines, agents: Agents, pulse: Heartbeat, cluster: RayCluster
    ) -> None:
        self._agents, self._pulse, self._cluster, self._machines = agents, pulse, cluster, machines
        super().__init__(spec, machines=machines)

    def _closed(self) -> None:
        self._pulse.close()
        outcome = self._run.thread.outcome
        outcome.statistics = self._with_refused(outcome.statistics)
        self._agents.close()
        self._cluster.close()

    def statistics(self) -> Statistics:
        return self._with_refused(super().statistics())

    def _with_refused(self, statistics: Statistics) -> Statistics:
        return dataclasses.replace(statistics, refused=self._machines.refused)


class Ray(Engine):
    """Learners and shards on the nodes of a Ray cluster; a Ray of its own where there is no cluster.

    `address` of its head ("auto" without one); `nodes` to use (all), the caller's own included; at most `learners_per_node`;
    `server_nodes` of them, the caller's first, are for the shards alone. Without it shards are spread over the learners' nodes
    if there is a run folder, whose checkpoints make up for a lost node, else they are on the caller's. `resources` are
    reserved on each node (a core for each learner).
    """

    deals_devices = True

    def __init__(
        self,
        address: str | None = None,
        *,
        nodes: int | None = None,
        learners_per_node: int | None = None,
        server_nodes: int | None = None,
        resources: Mapping[str, float] | None = None,
    ) -> None:
        for name, value in (
            ("nodes", nodes),
            ("learners_per_node", learners_per_node),
            ("server_nodes", server_nodes),
        ):
            if value is not None:
                check_whole(name, value)
        if address is not None and not (isinstance(address, str) and address):
            raise UsageError(f'address is "auto" or "host:port" of the cluster\'s head, got {address!r}')
        self._address, self._nodes, self._most = address, nodes, learners_per_node
        self._servers, self._resources = server_nodes or 0, _checked(resources)

    def start(self, spec: RunSpec) -> RayHandle:
        check_platform("ray")
        if spec.batch is not None:
            raise NotYetError(
                "sync='sandblaster' is not built yet on a cluster; working now: engine='local', 'sim'"
            )
        if spec.plan.topology.fixed_members:
            raise UsageError(
                "topology='allreduce' on several machines is torchrun's: start the script there, or use topology='servers' here"
            )
        task = _task(spec)
        cluster = self._attach(max(spec.plan.learners, os.cpu_count() or 1))
        try:
            return self._placed(spec, task, cluster)
        except BaseException:
            cluster.close()
            raise
        finally:
            task.close()

    def measure(
        self, costs: Cluster | None = None, *, learners: int | None = None, keep: bool = False
    ) -> Cluster:
        """The cluster at hand for `sl.Sim`: links as measured now, cores from Ray, with so many learners (one for each core).

        `costs` says what computing and folding take (such as `calibrate`'s); `keep` makes it `Cluster.named("this-cluster")`.
        """
        if learners is not None:
            check_whole("learners", learners)
        cluster = self._attach(os.cpu_count() or 1)
        try:
            nodes, secret = chosen_nodes(cluster.nodes(), self._nodes), Secret.new()
            with contextlib.closing(self._echoes(nodes[1:], secret)) as echoes:
                ways = [
                    measure_way(echoes.address(node), secret, here=nodes[0], there=node) for node in nodes[1:]
                ]
        finally:
            cluster.close()
        found = measured(nodes, ways, costs, learners=learners, most=self._most, servers=self._servers)
        if keep:
            keep_cluster(found)
        return found

    def _echoes(self, nodes: list[Node], secret: Secret) -> Echoes:
        return Echoes(nodes, secret)

    def _attach(self, cores: int) -> RayCluster:
        load_ray()
        return RayCluster(self._address, cores)

    def _placed(self, spec: RunSpec, task: Parcel, cluster: RayCluster) -> RayHandle:
        nodes = chosen_nodes(cluster.nodes(), self._nodes)
        dealt = deal(spec.plan.learners, nodes, most=self._most, servers=self._servers, seats=spec.group)
        kept = spec.storage.folder is not None  # what a lost node takes along can be had again
        shards = spread(spec.plan.topology.shards, dealt if kept else (), self._servers)
        used = sorted({0, *dealt, *shards})
        nodes = [nodes[index] for index in used]
        dealt, shards = [used.index(each) for each in dealt], tuple(used.index(each) for each in shards)
        sites = Sites(shards, tuple(range(len(nodes))))
        loads = [
            spec.group * dealt.count(index) or (index and shards.count(index)) for index in range(len(nodes))
        ]
        agents = cluster.agents(
            nodes, loads, Secret.new(), gpus="cuda" in spec.devices, resources=self._resources
        )
        try:
            return self._begun(spec, task, cluster, agents, nodes, dealt, sites)
        except BaseException:
            agents.close()
            raise

    def _begun(
        self,
        spec: RunSpec,
        task: Parcel,
        cluster: RayCluster,
        agents: Agents,
        nodes: list[Node],
        dealt: list[int],
        sites: Sites,
    ) -> RayHandle:
        """All agents are told of the run."""
        for index, about in agents.about.items():
            _check_versions(str(nodes[index]), about)
        ways = {index: _way(agents, nodes, index) for index in agents.about}
        addresses = {index: way.address for index, way in ways.items()}
        pulse, folder = Heartbeat(ways), _folder(spec)
        remote: list[RemoteHost] = []
        try:
            with _token(folder) as token:
                for index, way in ways.items():
                    later = {each: where for each, where in addresses.items() if each > index}
                    begin = Begin(_stripped(spec), sites, index, later, token)
                    remote.append(RemoteHost(way, task, begin))
                for host in remote:
                    host.wait_ready(partial(pulse.alive, host.site), folder)
            machines = ClusterMachines(nodes, dealt, sites, remote, pulse, agents.secret, addresses)
            return RayHandle(dataclasses.replace(spec, card=None), machines, agents, pulse, cluster)
        except BaseException:
            for host in remote:
                host.close()
            pulse.close()
            raise


def _way(agents: Agents, nodes: list[Node], index: int) -> Way:
    node, home = nodes[index], nodes[0]
    machine = "" if node.host == home.host else str(node)
    return Way(agents.about[index].address, agents.secret, str(node), str(home), machine)


def _stripped(spec: RunSpec) -> RunSpec:
    """What other machines need of it."""
    return dataclasses.replace(
        spec,
        task=None,  # type: ignore[arg-type]
        storage=Storage(folder=spec.storage.folder),
        card=None,
        evaluate=None,
        callbacks=(),
        listeners=(),
    )


def _folder(spec: RunSpec) -> Folder | None:
    return Folder(Path(spec.storage.folder)) if spec.storage.folder else None


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


def _check_versions(node: str, about: About) -> None:
    if differs := describe(about, versions()):
        raise UsageError(f"node {node} has other versions: {differs}; install the same on all nodes")


def _checked(resources: Any) -> dict[str, float] | None:
    if resources is None:
        return None
    if not isinstance(resources, Mapping) or not all(
        isinstance(name, str) and isinstance(amount, (int, float)) and amount >= 0
        for name, amount in resources.items()
    ):
        raise UsageError(
            f'resources are what Ray reserves on each node, such as {{"CPU": 4}}, got {resources!r}'
        )
    return dict(resources)


def _task(spec: RunSpec) -> Parcel:
    """What learners on other nodes run: with all its data, since files are not there."""
    checked, evaluate = pack_task(spec)  # says what cannot travel
    for each in (checked, evaluate):
        if each is not None:
            each.close()
    return pack(spec.task)
