"""The cluster at hand as a record for the simulator: what links between its nodes carry, measured over the run's own transport.

Each other node gets a small process that answers; the caller's node, where the shards are, asks one after the other. Not
responsible for what computing and folding cost (tools/calibration/calibrate.py), nor for who goes where (placement.py).
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

from syncline.cluster import Cluster, Link
from syncline.engines.authentication import Listener, Secret, Stranger, connect
from syncline.engines.ray.bulk_connection import Connection, Head, Lost
from syncline.engines.ray.placement import Node, deal
from syncline.errors import RunError

ASK, ANSWER, BULK = 60, 61, 62  # kinds of frames: to be answered, after so many blocks; the answer; a block
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


class BlockConnection(Connection):
    """All blocks are sent from the same memory, and received into it."""

    def __init__(self, end: socket.socket, secret: Secret) -> None:
        self._block = memoryview(bytearray(BLOCK))
        super().__init__(end, run=secret.run, incarnation=0, into=self._place)

    def _place(self, head: Head) -> memoryview | None:
        return self._block if head.kind == BULK else None

    def send_blocks(self, count: int) -> None:
        for _ in range(count):
            self.wait_sent(self.send(BULK, self._block))


class Echo:
    """The other node's part: takes blocks, and answers with as many as it is asked for."""

    def __init__(self, host: str, secret: Secret) -> None:
        self._secret, self._lock = secret, threading.Lock()
        self._open: list[Connection] = []
        self._listener = Listener(host, secret, self._answer)

    def address(self) -> Address:
        return self._listener.address

    def _answer(self, end: socket.socket) -> None:
        connection = BlockConnection(end, self._secret)
        with self._lock:
            self._open.append(connection)
        with contextlib.suppress(Lost):
            while (frame := connection.receive(SILENT)) is not None:
                if frame.kind == ASK:
                    connection.send_blocks(frame.place)
                    connection.wait_sent(connection.send(ANSWER))
        connection.close()

    def close(self) -> None:
        self._listener.close()
        with self._lock:
            for connection in self._open:
                connection.close()


# -- the caller's part ---------------------------------------------------------------------------------------


def measure_way(address: Address, secret: Secret, *, here: Node, there: Node) -> Way:
    """Between two nodes, while nothing else is on that way."""
    try:
        with contextlib.closing(BlockConnection(connect(address, secret), secret)) as connection:
            trips = [_trip(connection) for _ in range(PINGS)]
            push = _rate(lambda count: _trip(connection, push=count))
            pull = _rate(lambda count: _trip(connection, pull=count))
    except (OSError, Stranger, Lost) as error:
        raise RunError(
            f"{here} cannot reach {there} at {address[0]}:{address[1]}: {error}; open that way between them (any port)"
        ) from error
    return Way(median(trips) / 2, push, pull)


def _trip(connection: BlockConnection, *, push: int = 0, pull: int = 0) -> float:
    """Seconds for so many blocks there, then a small message there and back, with so many blocks before its answer."""
    began = time.perf_counter()
    connection.send_blocks(push)
    connection.send(ASK, place=pull)
    for _ in range(pull + 1):
        if connection.receive(SILENT) is None:
            raise Lost(f"no answer within {SILENT:.0f} s")
    return time.perf_counter() - began


def _rate(seconds_of: Callable[[int], float]) -> float:
    """Bytes per second: of so many blocks that the first of them do not matter."""
    count = 4
    while (seconds := seconds_of(count)) < LONG and count < MOST:
        count *= 2
    return count * BLOCK / seconds


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
