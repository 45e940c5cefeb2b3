"""The cluster engine's front door: checks, room on the nodes, what learners run to every node; then a run over their machines.

The caller's own node has the supervisor and the leading shard; the other nodes' agents do what it says.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from syncline.cluster.named import keep as keep_cluster
from syncline.cluster.record import Cluster
from syncline.engines.authentication import Secret
from syncline.engines.local.engine import LocalHandle, check_platform
from syncline.engines.local.host_interface import Sites
from syncline.engines.local.packing import Parcel, pack, pack_task
from syncline.engines.ray.agent import About, Begin, describe, versions
from syncline.engines.ray.agent_client import Way
from syncline.engines.ray.cluster import READY, Agents, RayCluster, load_ray
from syncline.engines.ray.cluster_machines import ClusterMachines
from syncline.engines.ray.growth import Growth
from syncline.engines.ray.heartbeat import Heartbeat
from syncline.engines.ray.link_measurement import Echoes, measure_way, measured
from syncline.engines.ray.placement import Node, chosen_nodes, deal, room_on, spread
from syncline.engines.ray.remote_host import RemoteHost
from syncline.engines.run import Engine, RunSpec, Storage
from syncline.errors import NotYetError, UsageError
from syncline.learn.server_session import check_whole
from syncline.messages import Statistics
from syncline.table.checkpoints import Folder
from syncline.topologies import Trees


@dataclasses.dataclass(slots=True)
class Opened:
    """What a run has of its cluster, and gives back at its end."""

    spec: RunSpec
    task: Parcel
    cluster: RayCluster
    agents: Agents
    nodes: list[Node]
    ways: dict[int, Way]
    machines: ClusterMachines
    pulse: Heartbeat
    growth: Growth | None = None

    def settle(self, node: Node, room: int) -> None:
        """A node that has joined the cluster becomes a machine of the run."""
        if room < 1:
            self.machines.gain(f"node {node} joined the cluster and is not used: it has no core")
            return
        site = 1 + len(self.machines.addresses)
        try:
            host = self._settled(site, node, room)
        except Exception as error:
            self.agents.drop(site)
            self.machines.gain(f"node {node} joined the cluster and is not used: {error}")
        else:
            self.machines.gain((node, host, room))

    def _settled(self, site: int, node: Node, room: int) -> RemoteHost:
        about = self.agents.add(site, node, room * self.spec.group)
        _check_versions(str(node), about)
        way = _way(self.agents, node, self.nodes[0], site)
        folder = _folder(self.spec)
        with _token(folder) as token:
            others, sites = dict(self.machines.addresses), self.machines.sites.joined_by(site)
            host = RemoteHost(way, self.task, Begin(_stripped(self.spec), sites, site, others, token))
            try:
                host.wait_ready(self._waits(), folder, self.ways)
                self.pulse.add(site, way)
            except BaseException:
                host.close()
                raise
        self.ways[site], self.machines.addresses[site] = way, way.address
        return host

    def _waits(self) -> Callable[[], bool]:
        """Whether it is worth waiting for a node."""
        deadline = time.monotonic() + READY
        return lambda: time.monotonic() < deadline and not self.agents.closing.is_set()

    def close(self) -> None:
        self.agents.closing.set()
        if self.growth is not None:
            self.growth.close()
        self.pulse.close()
        self.agents.close()
        self.cluster.close()
        self.task.close()


class RayHandle(LocalHandle):
    """A run on a cluster's nodes."""

    def __init__(self, opened: Opened) -> None:
        self.opened = opened
        super().__init__(dataclasses.replace(opened.spec, card=None), machines=opened.machines)

    def _closed(self) -> None:
        outcome = self._run.outcome
        outcome.statistics = self._with_refused(outcome.statistics)
        self.opened.close()

    def statistics(self) -> Statistics:
        return self._with_refused(super().statistics())

    def _with_refused(self, statistics: Statistics) -> Statistics:
        return dataclasses.replace(statistics, refused=self.opened.machines.refused)


class Ray(Engine):
    """Learners and shards on the nodes of a Ray cluster; a Ray of its own where there is no cluster.

    `address` of its head ("auto" without one); `nodes` to use (all), the caller's own included; at most `learners_per_node`;
    `server_nodes` of them, the caller's first, are for the shards alone. Without it shards are spread over the learners' nodes
    if there is a run folder, whose checkpoints make up for a lost node, else they are on the caller's. `resources` are
    reserved on each node (a core for each learner). `grow=True`: nodes that join the cluster later get learners, too.
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
        grow: bool = False,
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
        if not isinstance(grow, bool):
            raise UsageError(f"grow is True or False, got {grow!r}")
        self._grow = grow

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
        self._check_growth(spec)
        with contextlib.ExitStack() as undo:
            task = _task(spec)
            undo.callback(task.close)
            cluster = self._attach(max(spec.plan.learners, os.cpu_count() or 1))
            undo.callback(cluster.close)
            opened = self._placed(spec, task, cluster, undo)
            if self._grow:
                known = cluster.nodes()
                opened.growth = Growth(cluster.nodes, known, partial(self._settle, opened))
                undo.callback(opened.growth.close)
            handle = RayHandle(opened)
            undo.pop_all()
        return handle

    def _check_growth(self, spec: RunSpec) -> None:
        if self._grow and spec.plan.local:
            raise UsageError(
                "grow=True: nobody can join one group that updates its part of the table by itself; give local_update=False"
            )
        if self._grow and isinstance(spec.plan.topology, Trees):
            raise NotYetError(
                f"grow=True is not built yet over {spec.plan.topology}: a machine that joins would have no leaf; use topology="
                "'servers', or leave grow out"
            )

    def _settle(self, opened: Opened, node: Node) -> None:
        opened.settle(node, room_on(node, self._most, opened.spec.group))

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

    def _placed(self, spec: RunSpec, task: Parcel, cluster: RayCluster, undo: contextlib.ExitStack) -> Opened:
        nodes = chosen_nodes(cluster.nodes(), self._nodes)
        dealt = deal(spec.plan.learners, nodes, most=self._most, servers=self._servers, seats=spec.group)
        kept = spec.storage.folder is not None  # what a lost node takes along can be had again
        shards = spread(spec.plan.topology.shards, dealt if kept else (), self._servers)
        used = sorted({0, *dealt, *shards})
        nodes = [nodes[index] for index in used]
        dealt, shards = [used.index(each) for each in dealt], tuple(used.index(each) for each in shards)
        sites = Sites(shards, tuple(range(len(nodes))), self._grow)
        loads = [
            spec.group * dealt.count(index) or (index and shards.count(index)) for index in range(len(nodes))
        ]
        agents = cluster.agents(
            nodes, loads, Secret.new(), gpus="cuda" in spec.devices, resources=self._resources
        )
        undo.callback(agents.close)
        for index, about in agents.about.items():
            _check_versions(str(nodes[index]), about)
        ways = {index: _way(agents, nodes[index], nodes[0], index) for index in agents.about}
        pulse = Heartbeat(ways)
        undo.callback(pulse.close)
        remote = _begun(spec, task, ways, sites, pulse, undo)
        addresses = {index: way.address for index, way in ways.items()}
        machines = ClusterMachines(list(nodes), dealt, sites, remote, pulse, agents.secret, addresses)
        return Opened(spec, task, cluster, agents, nodes, ways, machines, pulse)


def _begun(
    spec: RunSpec,
    task: Parcel,
    ways: Mapping[int, Way],
    sites: Sites,
    pulse: Heartbeat,
    undo: contextlib.ExitStack,
) -> list[RemoteHost]:
    """All agents are told of the run."""
    remote: list[RemoteHost] = []
    folder = _folder(spec)
    with _token(folder) as token:
        for index, way in ways.items():
            later = {each: other.address for each, other in ways.items() if each > index}
            remote.append(RemoteHost(way, task, Begin(_stripped(spec), sites, index, later, token)))
            undo.callback(remote[-1].close)
        for host in remote:
            host.wait_ready(partial(pulse.alive, host.site), folder, ways)
    return remote


def _way(agents: Agents, node: Node, home: Node, index: int) -> Way:
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
