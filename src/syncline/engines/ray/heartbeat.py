"""Whether other nodes live: a word a second to each agent, on a connection of its own, and its answer.

A node that does not answer, whose connection is gone, or that a learner's stand-in cannot reach, is declared dead once and for
all: its bell rings for all its stand-ins, and an agent that comes back finds its connection closed. The nodes' couriers are
started here, and a node that loses its own is lost. Not responsible for what then becomes of its learners.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import socket
import sys
import threading
import time
from collections.abc import Mapping

from syncline.engines.local.processes import Process, Processes
from syncline.engines.local.shared_memory import Region, WakeUp
from syncline.engines.ray.agent_client import Way
from syncline.engines.ray.bulk_connection import Connection, Lost
from syncline.engines.ray.frame_kinds import AGENT, WORDS, Kind
from syncline.engines.ray.version_courier import Courier
from syncline.protocols.watchdog import Watchdog

EVERY = 1.0  # seconds between two words
SILENT = 4.0  # seconds without an answer after which a node is dead
LOOK = 250  # milliseconds


def rings(bell: WakeUp) -> bool:
    """It has rung; it goes on doing so for all others."""
    poll = select.poll()
    poll.register(bell.fd, select.POLLIN)
    return bool(poll.poll(0))


def notice_silence(end: socket.socket) -> None:
    """A machine that vanishes is noticed while something is under way to it."""
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENT * 1000))


class Heartbeat:
    """All other nodes of a run, by their index; a thread of the caller's asks them."""

    def __init__(self, ways: Mapping[int, Way]) -> None:
        self._ways = ways
        self.lost = {node: WakeUp() for node in ways}
        self.refusals = WakeUp()  # rings for every frame that a stand-in has turned away
        self._refused = dict.fromkeys(ways, 0)  # what each agent has
        self._frames = 0
        self._answers = dict.fromkeys(ways, 0)
        self._asked: dict[int, float] = {}  # of those that owe an answer
        self._next = dict.fromkeys(ways, 0.0)
        self._wake = WakeUp()
        self._asking: queue.SimpleQueue[tuple[int, WakeUp]] = queue.SimpleQueue()  # for a courier
        self.couriers: dict[int, Process] = {}
        self._beats = {node: Region(8) for node in ways}  # of couriers
        self._closing = threading.Event()
        self._connections: dict[int, Connection] = {}
        try:
            for node, way in ways.items():
                end = way.connect()
                notice_silence(end)
                self._connections[node] = Connection(
                    end, run=way.secret.run, incarnation=AGENT, into=lambda head: None
                )
        except BaseException:
            self._close_all()
            raise
        self._thread = threading.Thread(target=self._main, name="syncline-pulse", daemon=True)
        self._thread.start()

    @property
    def refused(self) -> int:
        """Connections and frames that were turned away, on all nodes."""
        return self._frames + sum(self._refused.values())

    def alive(self, node: int) -> bool:
        return not rings(self.lost[node])

    def courier(self, node: int) -> WakeUp:
        """A stand-in's end of a channel to its node's courier, as a descriptor."""
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._asking.put((node, WakeUp(theirs.detach())))
        self._wake.ring()
        return WakeUp(mine.detach())

    def close(self) -> None:
        """Agents that are still there end what is left of the run, and themselves."""
        self._closing.set()
        self._wake.ring()
        self._thread.join()
        self._count()
        self._close_all()

    def _close_all(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    # -- on the thread -----------------------------------------------------------------------------------

    def _main(self) -> None:
        agents, couriers = Watchdog(SILENT), Watchdog(SILENT)
        self._processes = Processes(lambda process, message: None, self._courier_ended)
        try:
            self._start_couriers()
            while not self._closing.is_set():
                self._wait()
                self._look()
                self._miss(agents, couriers)
        finally:
            self._processes.close(kill=True)

    def _start_couriers(self) -> None:
        for node, way in self._ways.items():
            spec = Courier(way.address, way.node, way.secret, self.lost[node], self._beats[node])
            self.couriers[node] = self._processes.fork("courier", node, node, spec, None, 1)

    def _courier_ended(self, process: Process, how: str) -> None:
        if process.number in self._connections:
            self._declare(process.number, f"its courier here ended with {how}")

    def _look(self) -> None:
        self._processes.work(0)
        while not self._asking.empty():
            node, end = self._asking.get()
            self.couriers[node].channel.post(end)
            end.close()
        self._count()
        for node in list(self._connections):
            self._visit(node)

    def _miss(self, agents: Watchdog, couriers: Watchdog) -> None:
        """Who has been silent for too long; whoever was not asked, or has not begun, is not."""
        now = time.monotonic()
        answers = {node: self._answers[node] for node in self._connections}
        for node in agents.look(now, answers, set(answers) - set(self._asked)):
            self._declare(node, f"it has not answered for {SILENT:g} s")
        beats = {node: self._beats[node].words[0] for node in self._connections}
        for node in couriers.look(now, beats, {node for node, count in beats.items() if not count}):
            self._declare(node, f"its courier here has done nothing for {SILENT:g} s")

    def _wait(self) -> None:
        poll = select.poll()
        for node, connection in self._connections.items():
            poll.register(connection.fileno(), select.POLLIN)
            poll.register(self.lost[node].fd, select.POLLIN)
        poll.register(self._wake.fd, select.POLLIN)
        poll.poll(LOOK)
        self._wake.quiet()

    def _count(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._frames += os.eventfd_read(self.refusals.fd)

    def _visit(self, node: int) -> None:
        """Hear what it has said, then ask again."""
        connection, now = self._connections[node], time.monotonic()
        if rings(self.lost[node]):
            self._declare(node, "it cannot be reached")
            return
        try:
            while (frame := connection.receive(0)) is not None:
                self._asked.pop(node, None)
                self._answers[node] += 1
                self._refused[node] = WORDS.unpack(frame.body)[0]
            if node not in self._asked and now >= self._next[node]:
                connection.send(Kind.PULSE)
                self._asked[node], self._next[node] = now, now + EVERY
        except Lost as error:
            self._declare(node, str(error))

    def _declare(self, node: int, why: str) -> None:
        """Dead; whatever it says from now on reaches nobody."""
        self._connections.pop(node).close()
        self._asked.pop(node, None)
        self.lost[node].ring()
        self._processes.kill(self.couriers[node])
        print(f"syncline: node {self._ways[node].node} is lost: {why}", file=sys.stderr, flush=True)
