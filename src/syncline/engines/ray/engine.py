"""The cluster engine's front door: checks, room on the nodes, what learners run to every node; then a run over their machines.

The caller's own node has the supervisor and the leading shard; the other nodes' agents do what it says.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from syncline.cluster import Cluster
from syncline.cluster import keep as keep_cluster
from syncline.engines.authentication import Secret
from syncline.engines.local.engine import LocalHandle, check_platform
from syncline.engines.local.host_interface import Sites
from syncline.engines.local.shared_pickle import pack, pack_task
from syncline.engines.ray.cluster import RayCluster
from syncline.engines.ray.link_measurement import measure_way, measured
from syncline.engines.ray.machine_membership import ClusterMachines
from syncline.engines.ray.placement import chosen_nodes, deal, room_on, spread
from syncline.engines.run import Engine, RunSpec
from syncline.errors import NotYetError, UsageError
from syncline.learn.server_session import check_whole
from syncline.messages import Statistics
from syncline.topologies import Trees


class RayHandle(LocalHandle):
    """A run on a cluster's nodes; `given_back` at its end is what it has of them."""

    def __init__(self, spec: RunSpec, machines: ClusterMachines, given_back: contextlib.ExitStack) -> None:
        self.machines, self._given_back = machines, given_back
        super().__init__(dataclasses.replace(spec, card=None), machines=machines)

    def _closed(self) -> None:
        outcome = self._run.outcome
        outcome.statistics = self._with_refused(outcome.statistics)
        self._given_back.close()

    def statistics(self) -> Statistics:
        return self._with_refused(super().statistics())

    def _with_refused(self, statistics: Statistics) -> Statistics:
        return dataclasses.replace(statistics, refused=self.machines.refused)


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
        whole = {"nodes": nodes, "learners_per_node": learners_per_node, "server_nodes": server_nodes}
        for name, value in whole.items():
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
        self._check(spec)
        undo = contextlib.ExitStack()
        try:
            return RayHandle(spec, self._begun(spec, undo), undo)
        except BaseException:
            undo.close()
            raise

    def _check(self, spec: RunSpec) -> None:
        if spec.batch is not None:
            raise NotYetError(
                "sync='sandblaster' is not built yet on a cluster; working now: engine='local', 'sim'"
            )
        if spec.plan.topology.fixed_members:
            raise UsageError(
                "topology='allreduce' on several machines is torchrun's: start the script there, or use topology='servers' here"
            )
        if self._grow and spec.plan.local:
            raise UsageError(
                "grow=True: nobody can join one group that updates its part of the table by itself; give local_update=False"
            )
        if self._grow and isinstance(spec.plan.topology, Trees):
            raise NotYetError(
                f"grow=True is not built yet over {spec.plan.topology}: a machine that joins would have no leaf; use topology="
                "'servers', or leave grow out"
            )

    def _begun(self, spec: RunSpec, undo: contextlib.ExitStack) -> ClusterMachines:
        """Learners and shards are dealt to nodes, whose agents are ready; how all of it ends goes to `undo`."""
        for each in pack_task(spec):  # says what cannot travel
            if each is not None:
                each.close()
        task = pack(spec.task)  # with all its data, since files are not there
        undo.callback(task.close)
        cluster = self._attach(max(spec.plan.learners, os.cpu_count() or 1))
        undo.callback(cluster.close)
        nodes, seats = chosen_nodes(cluster.nodes(), self._nodes), spec.group
        dealt = deal(spec.plan.learners, nodes, most=self._most, servers=self._servers, seats=seats)
        kept = spec.storage.folder is not None  # what a lost node takes along can be had again
        shards = spread(spec.plan.topology.shards, dealt if kept else (), self._servers)
        used = sorted({0, *dealt, *shards})
        nodes = [nodes[index] for index in used]
        dealt, shards = [used.index(each) for each in dealt], tuple(used.index(each) for each in shards)
        loads = [seats * dealt.count(index) or (index and shards.count(index)) for index in range(len(nodes))]
        gpus = "cuda" in spec.devices
        cluster.begin(nodes, loads, Secret.new(), gpus=gpus, resources=self._resources)
        sites = Sites(shards, tuple(range(len(nodes))), self._grow)
        machines = ClusterMachines(spec, task, cluster, nodes, dealt, sites)
        machines.begin(undo, (lambda node: room_on(node, self._most, seats)) if self._grow else None)
        return machines

    def measure(
        self, costs: Cluster | None = None, *, learners: int | None = None, keep: bool = False
    ) -> Cluster:
        """The cluster at hand for `sl.Sim`: links as measured now, cores from Ray, with so many learners (one for each core).

        `costs` says what computing and folding take (such as `calibrate`'s); `keep` makes it `Cluster.named("this-cluster")`.
        """
        if learners is not None:
            check_whole("learners", learners)
        secret = Secret.new()
        with contextlib.closing(self._attach(os.cpu_count() or 1)) as cluster:
            home, *others = nodes = chosen_nodes(cluster.nodes(), self._nodes)
            with cluster.echoes(others, secret) as addresses:
                ways = [
                    measure_way(address, secret, here=home, there=node)
                    for address, node in zip(addresses, others, strict=True)
                ]
        found = measured(nodes, ways, costs, learners=learners, most=self._most, servers=self._servers)
        if keep:
            keep_cluster(found)
        return found

    def _attach(self, cores: int) -> RayCluster:
        return RayCluster(self._address, cores)


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
