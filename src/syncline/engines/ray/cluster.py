"""Ray's part: which nodes there are, room on them, one agent on each. The only module that imports Ray, and only when asked to.

Not responsible for what agents do, nor for who goes where (placing.py).
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from syncline.engines.ray.agent import About, Agent
from syncline.engines.ray.authentication import Secret
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
    """Room on the nodes of a run, and an agent on each but the caller's own."""

    def __init__(
        self,
        nodes: Sequence[Node],
        loads: Sequence[int],
        secret: Secret,
        *,
        gpus: bool,
        resources: Mapping[str, float] | None,
    ) -> None:
        self._ray = load_ray()
        self._nodes, self.secret = nodes, secret
        bundles = [dict(resources or {"CPU": load}) for load in loads]
        if gpus:
            for bundle, node, load in zip(bundles, nodes, loads, strict=True):
                bundle.setdefault("GPU", min(node.gpus, load))
        bundles = [{name: amount for name, amount in bundle.items() if amount} for bundle in bundles]
        self._group: Any = None
        self._actors: dict[int, Any] = {}
        try:
            self._reserve(bundles)
            self._start(bundles, secret)
            self.about: dict[int, About] = self._introduced()
        except BaseException:
            self.close()
            raise

    def _reserve(self, bundles: list[dict[str, float]]) -> None:
        from ray.util.placement_group import placement_group

        used = [index for index, bundle in enumerate(bundles) if bundle]
        self._bundle = {index: place for place, index in enumerate(used)}
        if not used:
            return
        self._group = placement_group(
            [bundles[index] for index in used],
            strategy="STRICT_SPREAD",
            bundle_label_selector=[{"ray.io/node-id": self._nodes[index].id} for index in used],
        )
        if not self._group.wait(READY):
            wanted = "; ".join(f"{bundles[index]} on {self._nodes[index]}" for index in used)
            raise UsageError(
                f"the Ray cluster did not give within {READY:.0f} s what the run asks for: {wanted}; "
                "`ray status` shows what others hold"
            )

    def _start(self, bundles: list[dict[str, float]], secret: Secret) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        actor = self._ray.remote(AgentActor)
        for index, node in enumerate(self._nodes):
            if index == 0:
                continue
            self._actors[index] = actor.options(
                name=f"syncline agent of run {secret.run.hex()} on {node.host}, node {index}",
                num_cpus=0,
                num_gpus=bundles[index].get("GPU", 0),
                max_concurrency=4,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=self._bundle[index]
                ),
            ).remote(secret.run, secret.key, list(sys.path), os.getcwd())

    def _introduced(self) -> dict[int, About]:
        return {index: self._ask(index, actor.about.remote()) for index, actor in self._actors.items()}

    def _ask(self, index: int, reference: Any) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference, timeout=READY)
        except errors.GetTimeoutError as error:
            raise RunError(f"the agent on {self._nodes[index]} did not start within {READY:.0f} s") from error
        except errors.RayError as error:
            words = next((line for line in reversed(str(error).splitlines()) if line.strip()), "").strip()
            raise RunError(
                f"the agent on {self._nodes[index]} failed: {words}; is syncline installed there?"
            ) from error

    def close(self) -> None:
        """Nothing of the run stays on other nodes."""
        with contextlib.suppress(Exception):  # the cluster itself may be gone
            closing = [actor.close.remote() for actor in self._actors.values()]
            self._ray.wait(closing, num_returns=len(closing), timeout=5) if closing else None
            for actor in self._actors.values():
                self._ray.kill(actor)
            if self._group is not None:
                from ray.util.placement_group import remove_placement_group

                remove_placement_group(self._group)


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
