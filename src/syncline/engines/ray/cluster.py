"""Ray's part: which nodes there are, room on them, one agent on each. The only module that imports Ray, and only when asked to.

Not responsible for what agents do, nor for who goes where (placing.py).
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from syncline.engines.authentication import Secret
from syncline.engines.ray.agent import About, Agent
from syncline.engines.ray.placement import Node
from syncline.errors import RunError, UsageError

READY = 60.0  # seconds that the cluster has to give what a run asks for
REACH = 5.0  # seconds to reach its head


def load_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise UsageError('engine="ray" needs Ray: pip install syncline[cluster]') from error
    return ray


class RayCluster:
    """The cluster at hand, or the one named; without any a Ray of our own, which ends with the run.

    A script that has called `ray.init` itself stays connected afterwards.
    """

    def __init__(self, address: str | None, cores: int) -> None:
        self._connected = _attach(address, cores)

    def nodes(self) -> list[Node]:
        return _nodes_at_hand()

    def agents(
        self,
        nodes: Sequence[Node],
        loads: Sequence[int],
        secret: Secret,
        *,
        gpus: bool,
        resources: Mapping[str, float] | None,
    ) -> Agents:
        """For so many processes on each node."""
        return Agents(nodes, loads, secret, gpus=gpus, resources=resources)

    def close(self) -> None:
        if self._connected:
            load_ray().shutdown()


def _attach(address: str | None, cores: int) -> bool:
    """True if it was not done before."""
    ray = load_ray()
    if ray.is_initialized():
        _refuse_client(ray)
        return False
    if address is not None and address.startswith("ray://"):
        raise UsageError(_CLIENT)
    named = address or os.environ.get("RAY_ADDRESS")
    if named is not None and named not in ("auto", "local"):
        _check_reachable(named)
    try:
        if named != "local":
            ray.init(address=named or "auto", logging_level="ERROR")
            return True
    except (ConnectionError, RuntimeError, ValueError) as error:
        if named is not None:
            words = " ".join(str(error).split())
            raise UsageError(f"no Ray cluster at {named!r}: {words}") from error
    ray.init(address="local", num_cpus=cores, include_dashboard=False, logging_level="ERROR")
    return True


_CLIENT = (
    "a driver outside of the cluster (ray://...) cannot reach its nodes: run it on one, with `ray job submit` or "
    'address="auto"'
)


def _refuse_client(ray: Any) -> None:
    if ray.util.client.ray.is_connected():
        raise UsageError(_CLIENT)


def _check_reachable(address: str) -> None:
    """Ray itself tries for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(f'address is "auto" or "host:port" of the cluster\'s head, got {address!r}')
    try:
        socket.create_connection((host, int(port)), timeout=REACH).close()
    except OSError as error:
        raise UsageError(
            f"no Ray cluster at {address!r}: {error.strerror or error}; start one with `ray start --head`, or leave address= out"
        ) from error


def _nodes_at_hand() -> list[Node]:
    ray = load_ray()
    own = ray.get_runtime_context().get_node_id()
    return [
        Node(
            node["NodeID"],
            node["NodeManagerAddress"],
            int(node["Resources"].get("CPU", 0)),
            int(node["Resources"].get("GPU", 0)),
            home=node["NodeID"] == own,
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


class Agents:
    """Room on the nodes of a run, and an agent on each but the caller's own. Once `closing` is set, nobody waits for room."""

    def __init__(
        self,
        nodes: Sequence[Node],
        loads: Sequence[int],
        secret: Secret,
        *,
        gpus: bool,
        resources: Mapping[str, float] | None,
    ) -> None:
        self._ray, self.closing = load_ray(), threading.Event()
        self._nodes, self.secret = dict(enumerate(nodes)), secret
        self._gpus, self._resources = gpus, resources
        self._groups: dict[int, Any] = {}  # by the first node that is in it
        self._actors: dict[int, Any] = {}
        self.about: dict[int, About] = {}
        try:
            self._open(dict(enumerate(loads)))
        except BaseException:
            self.close()
            raise

    def add(self, index: int, node: Node, load: int) -> About:
        """One more node; `drop` it if this fails."""
        self._nodes[index] = node
        self._open({index: load})
        return self.about[index]

    def drop(self, index: int) -> None:
        """Nothing of the run stays there."""
        with contextlib.suppress(Exception):
            self._end([self._actors.pop(index)] if index in self._actors else [])
            self._give_back(self._groups.pop(index, None))

    def _open(self, loads: Mapping[int, int]) -> None:
        bundles = {index: self._bundle(self._nodes[index], load) for index, load in loads.items()}
        group, places = self._reserve({index: bundle for index, bundle in bundles.items() if bundle})
        for index in loads:
            if index:
                self._actors[index] = self._start(index, group, places[index], bundles[index].get("GPU", 0))
        for index in loads:
            if index:
                self.about[index] = self._ask(index, self._actors[index].about.remote())

    def _bundle(self, node: Node, load: int) -> dict[str, float]:
        bundle = dict(self._resources or {"CPU": load})
        if self._gpus:
            bundle.setdefault("GPU", min(node.gpus, load))
        return {name: amount for name, amount in bundle.items() if amount}

    def _reserve(self, bundles: Mapping[int, dict[str, float]]) -> tuple[Any, dict[int, int]]:
        """Room for these; and which of its bundles is which node's."""
        from ray.util.placement_group import placement_group

        if not bundles:
            return None, {}
        group = self._groups[min(bundles)] = placement_group(
            list(bundles.values()),
            strategy="STRICT_SPREAD",
            bundle_label_selector=[{"ray.io/node-id": self._nodes[index].id} for index in bundles],
        )
        if not self._wait(lambda seconds: bool(group.wait(seconds))):
            wanted = "; ".join(f"{bundle} on {self._nodes[index]}" for index, bundle in bundles.items())
            raise UsageError(
                f"the Ray cluster did not give within {READY:.0f} s what the run asks for: {wanted}; "
                "`ray status` shows what others hold"
            )
        return group, {index: place for place, index in enumerate(bundles)}

    def _wait(self, ready: Callable[[float], bool]) -> bool:
        deadline = time.monotonic() + READY
        while not ready(1.0):
            if self.closing.is_set() or time.monotonic() > deadline:
                return False
        return True

    def _start(self, index: int, group: Any, place: int, gpus: float) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        node, run = self._nodes[index], self.secret.run
        actor = self._ray.remote(AgentActor).options(
            name=f"syncline agent of run {run.hex()} on {node.host}, node {index}",
            num_cpus=0,
            num_gpus=gpus,
            max_concurrency=4,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place),
        )
        return actor.remote(run, self.secret.key, list(sys.path), os.getcwd())

    def _ask(self, index: int, reference: Any) -> Any:
        if not self._wait(lambda seconds: bool(self._ray.wait([reference], timeout=seconds)[0])):
            raise RunError(f"the agent on {self._nodes[index]} did not start within {READY:.0f} s")
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            words = next((line for line in reversed(str(error).splitlines()) if line.strip()), "").strip()
            raise RunError(
                f"the agent on {self._nodes[index]} failed: {words}; is syncline installed there?"
            ) from error

    def close(self) -> None:
        """Nothing of the run stays on other nodes."""
        self.closing.set()
        with contextlib.suppress(Exception):  # the cluster itself may be gone
            self._end(list(self._actors.values()))
            for group in self._groups.values():
                self._give_back(group)

    def _end(self, actors: list[Any]) -> None:
        closing = [actor.close.remote() for actor in actors]
        self._ray.wait(closing, num_returns=len(closing), timeout=5) if closing else None
        for actor in actors:
            self._ray.kill(actor)

    def _give_back(self, group: Any) -> None:
        from ray.util.placement_group import remove_placement_group

        if group is not None:
            remove_placement_group(group)


class AgentActor:
    """The actor: an agent at its node's address."""

    def __init__(self, run: bytes, key: bytes, path: list[str], folder: str) -> None:
        import ray

        host = ray.util.get_node_ip_address()
        gpus = len(ray.get_gpu_ids())
        self._agent = Agent(Secret(run, key), host, gpus=gpus, path=path, folder=folder)

    def about(self) -> About:
        return self._agent.about()

    def close(self) -> None:
        self._agent.close()
