"""The cluster at hand as a record for the simulator: what links between its nodes carry, measured over the run's own transport.

Each other node gets a small process that answers; the caller's node, where the shards are, asks one after the other. Not
responsible for what computing and folding cost (tools/calibration/calibrate.py), nor for who goes where (placing.py).
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from syncline.cluster.record import Cluster, Link
from syncline.engines.authentication import Listener, Secret, Stranger, connect
from syncline.engines.ray.bulk_connection import Connection, Head, Lost
from syncline.engines.ray.cluster import READY, load_ray
from syncline.engines.ray.placement import Node, deal
from syncline.errors import RunError

PING, WANT, BULK = 60, 61, 62  # kinds of frames: answer; send so many blocks; a block
BLOCK = 1 << 20  # bytes
PINGS = 50
LONG = 0.25  # seconds that blocks must take to tell a rate
MOST = 4096  # blocks
SILENT = 30.0  # seconds without an answer
NAME = "this-cluster"

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Way:
    """Between the caller's node and another: seconds of a small message, bytes per second there and back."""

    latency: float
    push: float
    pull: float


class Echo:
    """The other node's part: answers pings, takes blocks and sends them."""

    def __init__(self, host: str, secret: Secret) -> None:
        self._secret, self._lock = secret, threading.Lock()
        self._open: list[Connection] = []
        self._listener = Listener(host, secret, self._answer)
        self.address = self._listener.address

    def _answer(self, end: socket.socket) -> None:
        connection, block = _opened(end, self._secret)
        with self._lock:
            self._open.append(connection)
        with contextlib.suppress(Lost):
            while (frame := connection.receive(SILENT)) is not None:
                if frame.kind == PING:
                    connection.wait_sent(connection.send(PING))
                elif frame.kind == WANT:
                    _send_blocks(connection, block, frame.place)
        connection.close()

    def close(self) -> None:
        self._listener.close()
        with self._lock:
            for connection in self._open:
                connection.close()


class Echoes:
    """One of each other node, as Ray's actors."""

    def __init__(self, nodes: Sequence[Node], secret: Secret) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._ray = load_ray()
        actor = self._ray.remote(EchoActor)
        self._actors = {
            node: actor.options(
                name=f"syncline measures {node.host}, {secret.run.hex()}",
                num_cpus=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
            ).remote(secret.run, secret.key)
            for node in nodes
        }

    def address(self, node: Node) -> Address:
        try:
            host, port = self._ray.get(self._actors[node].address.remote(), timeout=READY)
        except self._ray.exceptions.RayError as error:
            words = " ".join(str(error).split())
            raise RunError(
                f"{node} cannot be measured: {words[:200]}; is syncline installed there?"
            ) from error
        return host, port

    def close(self) -> None:
        for actor in self._actors.values():
            self._ray.kill(actor)


class EchoActor:
    """At its node's address."""

    def __init__(self, run: bytes, key: bytes) -> None:
        import ray

        self._echo = Echo(ray.util.get_node_ip_address(), Secret(run, key))

    def address(self) -> Address:
        return self._echo.address


# -- the caller's part ---------------------------------------------------------------------------------------


def measure_way(address: Address, secret: Secret, *, here: Node, there: Node) -> Way:
    """Between two nodes, while nothing else is on that way."""
    try:
        connection, block = _opened(connect(address, secret), secret)
        with contextlib.closing(connection):
            trips = [_trip(connection) for _ in range(PINGS)]
            push = _rate(lambda count: _push(connection, block, count))
            pull = _rate(lambda count: _pull(connection, count))
    except (OSError, Stranger, Lost) as error:
        raise RunError(
            f"{here} cannot reach {there} at {address[0]}:{address[1]}: {error}; open that way between them (any port)"
        ) from error
    return Way(median(trips) / 2, push, pull)


def measured(
    nodes: Sequence[Node],
    ways: Sequence[Way],
    costs: Cluster | None,
    *,
    learners: int | None,
    most: int | None,
    servers: int,
) -> Cluster:
    """As the simulator knows a cluster: equal machines, the shards on the caller's, with the learners or without."""
    base = costs or Cluster(memory=Link(bandwidth=_copy_rate()))
    card = Link()
    if ways:
        latency = base.memory.latency + median(way.latency for way in ways)
        card = Link(latency=latency, bandwidth=median(rate for way in ways for rate in (way.push, way.pull)))
    room = sum(min(node.cores, most or node.cores) for node in nodes[servers:])
    dealt = deal(learners or max(1, room), nodes, most=most, servers=servers)
    return replace(
        base,
        name=NAME,
        card=card,
        cores=min(node.cores for node in nodes) or None,
        learners_per_machine=max(map(dealt.count, dealt)) if len(nodes) > 1 else None,
        shards_per_machine=None,
        beside=not servers,
    )


def _opened(end: socket.socket, secret: Secret) -> tuple[Connection, memoryview]:
    """A connection, and the memory that its blocks are sent from and received into."""
    block = memoryview(bytearray(BLOCK))

    def into(head: Head) -> memoryview | None:
        return block if head.kind == BULK else None

    return Connection(end, run=secret.run, incarnation=0, into=into), block


def _trip(connection: Connection) -> float:
    """A small message there and back."""
    began = time.perf_counter()
    connection.send(PING)
    _heard(connection)
    return time.perf_counter() - began


def _push(connection: Connection, block: memoryview, count: int) -> float:
    """Until the other end has all of them."""
    began = time.perf_counter()
    _send_blocks(connection, block, count)
    _trip(connection)
    return time.perf_counter() - began


def _pull(connection: Connection, count: int) -> float:
    began = time.perf_counter()
    connection.send(WANT, place=count)
    for _ in range(count):
        _heard(connection)
    return time.perf_counter() - began


def _send_blocks(connection: Connection, block: memoryview, count: int) -> None:
    for _ in range(count):
        connection.wait_sent(connection.send(BULK, block))


def _heard(connection: Connection) -> None:
    if connection.receive(SILENT) is None:
        raise Lost(f"no answer within {SILENT:.0f} s")


def _rate(blocks: Callable[[int], float]) -> float:
    """Bytes per second: of so many blocks that the first of them do not matter."""
    count = 4
    while (seconds := blocks(count)) < LONG and count < MOST:
        count *= 2
    return count * BLOCK / seconds


def _copy_rate() -> float:
    """Bytes per second from memory to memory on this node."""
    source: Any = bytearray(64 * BLOCK)
    target = memoryview(bytearray(len(source)))
    seconds = []
    for _ in range(4):
        began = time.perf_counter()
        target[:] = source
        seconds.append(time.perf_counter() - began)
    return len(source) / min(seconds)
