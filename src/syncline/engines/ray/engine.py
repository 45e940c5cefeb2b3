"""The cluster engine's front door: checks, room on the nodes, what learners run to every node; then a local run with learners elsewhere.

The caller's own node has the shards and the supervisor, as under `local`; learners on other nodes have stand-ins here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from syncline.cluster.calibration_file import keep as keep_cluster
from syncline.cluster.record import Cluster
from syncline.engines.local.engine import LocalHandle, check_platform
from syncline.engines.local.packing import Parcel, pack
from syncline.engines.local.task_packing import pack_task
from syncline.engines.ray.agent import About, describe, versions
from syncline.engines.ray.agent_client import Way
from syncline.engines.ray.authentication import Secret
from syncline.engines.ray.cluster import Agents, RayCluster, load_ray
from syncline.engines.ray.heartbeat import Heartbeat
from syncline.engines.ray.link_measurement import Echoes, measure_way, measured
from syncline.engines.ray.placement import Node, chosen_nodes, deal, gpu_of, next_node
from syncline.engines.ray.stand_in import StandIn
from syncline.engines.run import Engine, RunSpec
from syncline.errors import NotYetError, UsageError
from syncline.learn.server_session import check_whole
from syncline.messages import Statistics


class Places:
    """Which rank is where; stand-ins for those elsewhere."""

    def __init__(
        self,
        nodes: list[Node],
        dealt: list[int],
        agents: Agents,
        pulse: Heartbeat,
        secret: Secret,
        spec: RunSpec,
    ) -> None:
        self._nodes, self._agents, self._pulse, self._secret, self._spec = nodes, agents, pulse, secret, spec
        self._of = dict(enumerate(dealt))
        self._home = dealt.count(0) > 0

    def __call__(self, learner: int, rank: int) -> StandIn | None:
        """What stands in for this learner on the caller's node; None: it is there itself."""
        node = self._of.get(rank)
        if node is None or not self._usable(node):
            node = self._of[rank] = self._another()
        if node == 0:
            return None
        about = self._agents.about[node]
        name, lost = str(self._nodes[node]), self._pulse.lost[node]
        refusals, courier = self._pulse.refusals, self._pulse.courier(node)
        return StandIn(about.address, name, self._secret, self._spec.threads, lost, refusals, courier)

    def _usable(self, node: int) -> bool:
        return node == 0 or self._pulse.alive(node)

    def _another(self) -> int:
        usable = [node for node in self._agents.about if self._pulse.alive(node)]
        usable += [0] if self._home or not usable else []
        counts = [list(self._of.values()).count(node) for node in range(len(self._nodes))]
        found = next_node(counts, usable)
        return found if found is not None else 0


class RayHandle(LocalHandle):
    """A run on a cluster's nodes."""

    def __init__(
        self, spec: RunSpec, places: Places, agents: Agents, pulse: Heartbeat, cluster: RayCluster
    ) -> None:
        self._agents, self._pulse, self._cluster = agents, pulse, cluster
        super().__init__(spec, away=places)

    def _closed(self) -> None:
        self._pulse.close()
        outcome = self._run.thread.outcome
        outcome.statistics = self._with_refused(outcome.statistics)
        self._agents.close()
        self._cluster.close()

    def statistics(self) -> Statistics:
        return self._with_refused(super().statistics())

    def _with_refused(self, statistics: Statistics) -> Statistics:
        return dataclasses.replace(statistics, refused=self._pulse.refused)


class Ray(Engine):
    """Learners on the nodes of a Ray cluster, shards on the caller's own; a Ray of its own where there is no cluster.

    `address` of its head ("auto" without one); `nodes` to use (all), the caller's own included; at most `learners_per_node`;
    `server_nodes=1` keeps the caller's node for the shards alone; `resources` are reserved on each node (a core for each
    learner).
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
        for name, value in (("nodes", nodes), ("learners_per_node", learners_per_node)):
            if value is not None:
                check_whole(name, value)
        if address is not None and not (isinstance(address, str) and address):
            raise UsageError(f'address is "auto" or "host:port" of the cluster\'s head, got {address!r}')
        if server_nodes not in (None, 1):
            raise UsageError(
                f"server_nodes={server_nodes!r}: all shards are on the caller's node so far; give 1 to keep that node for them alone"
            )
        self._address, self._nodes, self._most = address, nodes, learners_per_node
        self._alone, self._resources = server_nodes == 1, _checked(resources)

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
        found = measured(nodes, ways, costs, learners=learners, most=self._most, servers_alone=self._alone)
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
        dealt = deal(spec.plan.learners, nodes, most=self._most, servers_alone=self._alone)
        counts = [dealt.count(index) for index in range(len(nodes))]
        gpus, secret = "cuda" in spec.devices, Secret.new()
        spec = _with_devices(spec, nodes[0], dealt)
        agents = cluster.agents(nodes, counts, secret, gpus=gpus, resources=self._resources)
        pulse = None
        try:
            for index, about in agents.about.items():
                _check_versions(str(nodes[index]), about)
            ways = {
                index: Way(about.address, secret, str(nodes[index]), str(nodes[0]))
                for index, about in agents.about.items()
            }
            pulse = Heartbeat(ways)
            for index, way in ways.items():
                way.send_task(task, partial(pulse.alive, index))
            places = Places(nodes, dealt, agents, pulse, secret, spec)
            return RayHandle(spec, places, agents, pulse, cluster)
        except BaseException:
            if pulse is not None:
                pulse.close()
            agents.close()
            raise


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


def _with_devices(spec: RunSpec, home: Node, dealt: list[int]) -> RunSpec:
    """GPUs of the caller's node are dealt here, those of others there."""
    devices = [spec.devices[rank % len(spec.devices)] for rank in range(spec.plan.learners)]
    here = [rank for rank, node in enumerate(dealt) if node == 0 and devices[rank] == "cuda"]
    for index, rank in enumerate(here):
        devices[rank] = gpu_of(index, home.gpus)
    return dataclasses.replace(spec, devices=tuple(devices), card=None)
