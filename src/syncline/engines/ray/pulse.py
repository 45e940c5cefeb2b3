"""Whether other nodes live: a word a second to each agent, on a connection of its own, and its answer.

A node that does not answer, whose connection is gone, or that a learner's stand-in cannot reach, is declared dead once and for
all: its bell rings for all its stand-ins, and an agent that comes back finds its connection closed. Not responsible for what
then becomes of its learners.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping

from syncline.engines.local.shared_memory import WakeUp
from syncline.engines.ray.bulk_connection import Connection, Lost
from syncline.engines.ray.frame_kinds import AGENT, WORDS, Kind
from syncline.engines.ray.handshake import Secret
from syncline.protocols.watchdog import Watchdog

EVERY = 1.0  # seconds between two words
SILENT = 4.0  # seconds without an answer after which a node is dead
LOOK = 250  # milliseconds

Connect = Callable[[int], socket.socket]


def rings(bell: WakeUp) -> bool:
    """It has rung; it goes on doing so for all others."""
    poll = select.poll()
    poll.register(bell.fd, select.POLLIN)
    return bool(poll.poll(0))


def notice_silence(end: socket.socket) -> None:
    """A machine that vanishes is noticed while something is under way to it."""
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENT * 1000))


class Pulse:
    """All other nodes of a run, by their index; a thread of the caller's asks them."""

    def __init__(self, names: Mapping[int, str], connect: Connect, secret: Secret) -> None:
        self._names = names
        self.lost = {node: WakeUp() for node in names}
        self.refusals = WakeUp()  # rings for every frame that a stand-in has turned away
        self._refused = dict.fromkeys(names, 0)  # what each agent has
        self._frames = 0
        self._answers = dict.fromkeys(names, 0)
        self._asked: dict[int, float] = {}  # of those that owe an answer
        self._next = dict.fromkeys(names, 0.0)
        self._closing = threading.Event()
        self._connections: dict[int, Connection] = {}
        try:
            for node in names:
                end = connect(node)
                notice_silence(end)
                self._connections[node] = Connection(
                    end, run=secret.run, incarnation=AGENT, into=lambda head: None
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

    def close(self) -> None:
        """Agents that are still there end what is left of the run, and themselves."""
        self._closing.set()
        self._thread.join()
        self._count()
        self._close_all()

    def _close_all(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    # -- on the thread -----------------------------------------------------------------------------------

    def _main(self) -> None:
        patience = Watchdog(SILENT)
        while not self._closing.is_set():
            self._wait()
            self._count()
            for node in list(self._connections):
                self._visit(node)
            answers = {node: self._answers[node] for node in self._connections}
            idle = set(answers) - set(self._asked)  # whoever was not asked is not silent
            for node in patience.look(time.monotonic(), answers, idle):
                self._declare(node, f"it has not answered for {SILENT:g} s")

    def _wait(self) -> None:
        poll = select.poll()
        for node, connection in self._connections.items():
            poll.register(connection.fileno(), select.POLLIN)
            poll.register(self.lost[node].fd, select.POLLIN)
        poll.poll(LOOK)

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
        print(f"syncline: node {self._names[node]} is lost: {why}", file=sys.stderr, flush=True)
