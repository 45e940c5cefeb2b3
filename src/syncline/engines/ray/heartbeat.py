"""Whether other nodes live: a word a second to each agent, on a connection of its own, and its answer.

A node that does not answer, whose connection is gone, whose relay stands still, or that another cannot reach, is declared dead
once and for all: an agent that comes back finds its connection closed. Not responsible for what then becomes of its learners.
"""

from __future__ import annotations

import queue
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping

from syncline.engines.local.shared_memory import WakeUp
from syncline.engines.ray.agent_client import Way
from syncline.engines.ray.bulk_connection import Connection, Lost
from syncline.engines.ray.frame_kinds import AGENT, WORD, Kind
from syncline.protocols.lifecycle import Watchdog

EVERY = 1.0  # seconds between two words
SILENT = 4.0  # seconds without an answer after which a node is dead
LOOK = 250  # milliseconds


def notice_silence(end: socket.socket) -> None:
    """A machine that vanishes is noticed while something is under way to it."""
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENT * 1000))


class Heartbeat:
    """All other nodes of a run, by their number; a thread of the caller's asks them. `lost` rings for each that is declared dead."""

    def __init__(self, ways: Mapping[int, Way]) -> None:
        self._ways = dict(ways)
        self._gone: set[int] = set()
        self._joining: queue.SimpleQueue[tuple[int, Connection]] = queue.SimpleQueue()
        self.lost = WakeUp()
        self.dead: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        self._suspected: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        self._refused = dict.fromkeys(ways, 0)  # what each agent has
        self._beats = dict.fromkeys(ways, 0)  # of their relays
        self._answers = dict.fromkeys(ways, 0)
        self._asked: dict[int, float] = {}  # of those that owe an answer
        self._next = dict.fromkeys(ways, 0.0)
        self._wake = WakeUp()
        self._closing = threading.Event()
        self.look: Callable[[], None] = lambda: None  # now and then
        self._connections: dict[int, Connection] = {}
        try:
            for node, way in ways.items():
                self._connections[node] = self._connect(way)
        except BaseException:
            self._close_all()
            raise
        self._thread = threading.Thread(target=self._main, name="syncline-pulse", daemon=True)
        self._thread.start()

    def _connect(self, way: Way) -> Connection:
        end = way.connect()
        notice_silence(end)
        return Connection(end, run=way.secret.run, incarnation=AGENT, into=lambda head: None)

    @property
    def refused(self) -> int:
        """Connections and frames that agents have turned away."""
        return sum(tuple(self._refused.values()))

    def alive(self, node: int) -> bool:
        return node in self._ways and node not in self._gone

    def add(self, node: int, way: Way) -> None:
        """One more, from any thread."""
        connection = self._connect(way)
        for counted in (self._refused, self._beats, self._answers):
            counted[node] = 0
        self._ways[node], self._next[node] = way, 0.0
        self._joining.put((node, connection))
        self._wake.ring()

    def declare(self, node: int, why: str) -> None:
        """From any thread."""
        self._suspected.put((node, why))
        self._wake.ring()

    def close(self) -> None:
        """Agents that are still there end what is left of the run, and themselves."""
        self._closing.set()
        self._wake.ring()
        self._thread.join()
        self._close_all()

    def _close_all(self) -> None:
        while not self._joining.empty():
            self._joining.get()[1].close()
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    # -- on the thread -----------------------------------------------------------------------------------

    def _main(self) -> None:
        looked = 0.0
        while not self._closing.is_set():
            self._wait()
            if time.monotonic() - looked > 2 * EVERY:  # this process stood still, not the others
                agents, relays = Watchdog(SILENT), Watchdog(SILENT)
            while not self._joining.empty():
                node, connection = self._joining.get()
                self._connections[node] = connection
            for node in list(self._connections):
                self._visit(node)
            looked = time.monotonic()
            self._miss(agents, relays)
            self.look()
            while not self._suspected.empty():
                self._declare(*self._suspected.get())

    def _miss(self, agents: Watchdog, relays: Watchdog) -> None:
        """Who has been silent for too long; whoever was not asked, or has not begun, is not."""
        now, live = time.monotonic(), set(self._connections)
        answers = {node: self._answers[node] for node in live}
        for node in agents.look(now, answers, live - set(self._asked)):
            self._declare(node, f"it has not answered for {SILENT:g} s")
        beats = {node: self._beats[node] for node in live}
        for node in relays.look(now, beats, {node for node in live if not beats[node]}):
            self._declare(node, f"its relay has done nothing for {SILENT:g} s")

    def _wait(self) -> None:
        poll = select.poll()
        for connection in self._connections.values():
            poll.register(connection.fileno(), select.POLLIN)
        poll.register(self._wake.fd, select.POLLIN)
        poll.poll(LOOK)
        self._wake.quiet()

    def _visit(self, node: int) -> None:
        """Hear what it has said, then ask again."""
        connection, now = self._connections[node], time.monotonic()
        try:
            while (frame := connection.receive(0)) is not None:
                self._asked.pop(node, None)
                self._answers[node] += 1
                (self._refused[node],), (self._beats[node],) = WORD.iter_unpack(frame.body)
            if node not in self._asked and now >= self._next[node]:
                connection.send(Kind.PULSE)
                self._asked[node], self._next[node] = now, now + EVERY
        except Lost as error:
            self._declare(node, str(error))

    def _declare(self, node: int, why: str) -> None:
        """Dead; whatever it says from now on reaches nobody."""
        connection = self._connections.pop(node, None)
        if connection is None:
            return
        connection.close()
        self._gone.add(node)
        self._asked.pop(node, None)
        print(f"syncline: node {self._ways[node].node} is lost: {why}", file=sys.stderr, flush=True)
        self.dead.put((node, why))
        self.lost.ring()
