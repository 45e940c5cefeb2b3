"""Ray's part: which nodes there are, room on them, one agent on each. The only module that imports Ray, and only when asked to.

Not responsible for what agents do, nor for who goes where (placement.py).
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from syncline.engines.authentication import Secret
from syncline.engines.ray.agent import About, Agent
from syncline.engines.ray.link_measurement import Address, Echo
from syncline.engines.ray.placement import Node
from syncline.errors import RunError, UsageError

READY = 60.0  # seconds that the cluster has to give what a run asks for
REACH = 5.0  # seconds to reach its head
_CLIENT = (
    "a driver outside of the cluster (ray://...) cannot reach its nodes: run it on one, with `ray job submit` or "
    'address="auto"'
)


def load_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise UsageError('engine="ray" needs Ray, which is not installed: pip install ray') from error
    return ray


def _attach(ray: Any, address: str | None, cores: int) -> bool:
    """True if it was not done before."""
    if ray.is_initialized():
        if ray.util.client.ray.is_connected():
            raise UsageError(_CLIENT)
        return False
    if address is not None and address.startswith("ray://"):
        raise UsageError(_CLIENT)
    named = address or os.environ.get("RAY_ADDRESS")
    if named is not None and named not in ("auto", "local"):
        host, _, port = named.rpartition(":")
        if not host or not port.isdigit():
            raise UsageError(f'address is "auto" or "host:port" of the cluster\'s head, got {named!r}')
        try:  # Ray itself tries for minutes
            socket.create_connection((host, int(port)), timeout=REACH).close()
        except OSError as error:
            raise UsageError(
                f"no Ray cluster at {named!r}: {error.strerror or error}; start one with `ray start --head`, or leave address= out"
            ) from error
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


class RayCluster:
    """The cluster at hand, or the one named, or without any a Ray of our own; a run has room on its nodes, and an agent on each but
    the caller's own.

    A script that has called `ray.init` itself stays connected afterwards. Once `closing` is set, nobody waits for room.
    """

    def __init__(self, address: str | None, cores: int) -> None:
        self._ray, self.closing = load_ray(), threading.Event()
        self._connected = _attach(self._ray, address, cores)
        self._nodes: dict[int, Node] = {}  # of the run
        self._groups: dict[int, Any] = {}  # by the first node that is in it
        self._actors: dict[int, Any] = {}
        self.about: dict[int, About] = {}

    def nodes(self) -> list[Node]:
        own = self._ray.get_runtime_context().get_node_id()
        return [
            Node(
                node["NodeID"],
                node["NodeManagerAddress"],
                int(node["Resources"].get("CPU", 0)),
                int(node["Resources"].get("GPU", 0)),
                home=node["NodeID"] == own,
            )
            for node in self._ray.nodes()
            if node["Alive"]
        ]

    def begin(
        self,
        nodes: Sequence[Node],
        loads: Sequence[int],
        secret: Secret,
        *,
        gpus: bool,
        resources: Mapping[str, float] | None,
    ) -> None:
        """A run: room for so many processes on each of these nodes, and the agents."""
        self._nodes, self.secret = dict(enumerate(nodes)), secret
        self._gpus, self._resources = gpus, resources
        self._open(dict(enumerate(loads)))

    def add(self, index: int, node: Node, load: int) -> None:
        """One more node; `drop` it if this fails."""
        self._nodes[index] = node
        self._open({index: load})

    def drop(self, index: int) -> None:
        """Nothing of the run stays there."""
        self._end([self._actors.pop(index)] if index in self._actors else [], [self._groups.pop(index, None)])

    def close(self) -> None:
        """Nothing of the run stays on other nodes."""
        self.closing.set()
        self._end(list(self._actors.values()), list(self._groups.values()))
        if self._connected:
            self._ray.shutdown()

    def _open(self, loads: Mapping[int, int]) -> None:
        bundles: dict[int, dict[str, float]] = {}
        for index, load in loads.items():
            bundle = dict(self._resources or {"CPU": load})
            if self._gpus:
                bundle.setdefault("GPU", min(self._nodes[index].gpus, load))
            bundles[index] = {name: amount for name, amount in bundle.items() if amount}
        group, places = self._reserve({index: bundle for index, bundle in bundles.items() if bundle})
        started = [index for index in loads if index]
        for index in started:
            self._actors[index] = self._start(index, group, places[index], bundles[index].get("GPU", 0))
        for index in started:
            self.about[index] = self._ask(index, self._actors[index].about.remote())

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

        node, secret = self._nodes[index], self.secret
        actor = self._ray.remote(Agent).options(
            name=f"syncline agent of run {secret.run.hex()} on {node.host}, node {index}",
            num_cpus=0,
            num_gpus=gpus,
            max_concurrency=4,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place),
        )
        return actor.remote(secret, node.host, gpus=math.ceil(gpus), path=list(sys.path), folder=os.getcwd())

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

    def _end(self, actors: list[Any], groups: list[Any]) -> None:
        """What is reserved is given back; the cluster itself may be gone."""
        from ray.util.placement_group import remove_placement_group

        with contextlib.suppress(Exception):
            closing = [actor.close.remote() for actor in actors]
            if closing:
                self._ray.wait(closing, num_returns=len(closing), timeout=5)
            for actor in actors:
                self._ray.kill(actor)
            for group in filter(None, groups):
                remove_placement_group(group)

    @contextlib.contextmanager
    def echoes(self, nodes: Sequence[Node], secret: Secret) -> Iterator[list[Address]]:
        """Where small actors answer on these nodes while the ways to them are measured."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        actors = [
            self._ray.remote(Echo)
            .options(
                name=f"syncline measures {node.host}, {secret.run.hex()}",
                num_cpus=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
            )
            .remote(node.host, secret)
            for node in nodes
        ]
        try:
            yield [self._address(node, actor) for node, actor in zip(nodes, actors, strict=True)]
        finally:
            for actor in actors:
                self._ray.kill(actor)

    def _address(self, node: Node, echo: Any) -> Address:
        try:
            host, port = self._ray.get(echo.address.remote(), timeout=READY)
        except self._ray.exceptions.RayError as error:
            words = " ".join(str(error).split())
            raise RunError(
                f"{node} cannot be measured: {words[:200]}; is syncline installed there?"
            ) from error
        return host, port
