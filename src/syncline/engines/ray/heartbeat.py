"""Whether other nodes live: a word a second to each agent, on a connection of its own, and its answer.

A node that does not answer, whose connection is gone, whose relay stands still, or that another cannot reach, is declared dead
once and for all: an agent that comes back finds its connection closed. Not responsible for what then becomes of its learners.
"""

from __future__ import annotations

import queue
import select
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from syncline.engines.local.shared_memory import WakeUp
from syncline.engines.ray.bulk_connection import SILENT, Lost
from syncline.engines.ray.frame_kinds import WORD, Kind, ObjectConnection
from syncline.engines.ray.remote_host import Way
from syncline.protocols.lifecycle import Watchdog

EVERY = 1.0  # seconds between two words
LOOK = 250  # milliseconds


@dataclass(slots=True)
class _Agent:
    """One, as far as it was heard."""

    way: Way
    connection: ObjectConnection
    dead: bool = False
    asked: bool = False  # it owes an answer
    next: float = 0.0  # when it is asked again
    answers: int = 0
    refused: int = 0  # connections and frames that it has turned away
    beats: int = 0  # of its relay


class Heartbeat:
    """All other nodes of a run, by their number; a thread of the caller's asks them. `lost` rings for each that is declared dead."""

    def __init__(self, ways: Mapping[int, Way]) -> None:
        self._agents: dict[int, _Agent] = {}
        self.lost = WakeUp()
        self.dead: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        self._suspected: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        self._wake = WakeUp()
        self._closing = threading.Event()
        self.look: Callable[[], None] = lambda: None  # now and then
        try:
            for node, way in ways.items():
                self.add(node, way)
        except BaseException:
            self._close_all()
            raise
        self._thread = threading.Thread(target=self._main, name="syncline-pulse", daemon=True)
        self._thread.start()

    @property
    def refused(self) -> int:
        """Connections and frames that agents have turned away."""
        return sum(agent.refused for agent in tuple(self._agents.values()))

    def alive(self, node: int) -> bool:
        return node in self._agents and not self._agents[node].dead

    def add(self, node: int, way: Way) -> None:
        """One more, from any thread."""
        connection = way.connect()
        connection.notice_silence()
        self._agents[node] = _Agent(way, connection)
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
        for agent in self._agents.values():
            agent.connection.close()

    # -- on the thread -----------------------------------------------------------------------------------

    def _live(self) -> dict[int, _Agent]:
        return {node: agent for node, agent in tuple(self._agents.items()) if not agent.dead}

    def _main(self) -> None:
        looked = 0.0
        while not self._closing.is_set():
            poll = select.poll()
            for fd in (self._wake.fd, *(agent.connection.fileno() for agent in self._live().values())):
                poll.register(fd, select.POLLIN)
            poll.poll(LOOK)
            self._wake.quiet()
            now = time.monotonic()
            if now - looked > 2 * EVERY:  # this process stood still, not the others
                agents, relays = Watchdog(SILENT), Watchdog(SILENT)
            looked = now
            for node, agent in self._live().items():
                self._visit(node, agent)
            live = self._live()
            # who has been silent for too long; whoever was not asked, or has not begun, is not
            answers = {node: agent.answers for node, agent in live.items()}
            for node in agents.look(looked, answers, {node for node in live if not live[node].asked}):
                self._declare(node, f"it has not answered for {SILENT:g} s")
            beats = {node: agent.beats for node, agent in live.items()}
            for node in relays.look(looked, beats, {node for node in live if not beats[node]}):
                self._declare(node, f"its relay has done nothing for {SILENT:g} s")
            self.look()
            while not self._suspected.empty():
                self._declare(*self._suspected.get())

    def _visit(self, node: int, agent: _Agent) -> None:
        """Hear what it has said, then ask again."""
        now = time.monotonic()
        try:
            while (frame := agent.connection.receive(0)) is not None:
                agent.asked, agent.answers = False, agent.answers + 1
                (agent.refused,), (agent.beats,) = WORD.iter_unpack(frame.body)
            if not agent.asked and now >= agent.next:
                agent.connection.send(Kind.PULSE)
                agent.asked, agent.next = True, now + EVERY
        except Lost as error:
            self._declare(node, str(error))

    def _declare(self, node: int, why: str) -> None:
        """Dead; whatever it says from now on reaches nobody."""
        if not self.alive(node):
            return
        agent = self._agents[node]
        agent.dead = True
        agent.connection.close()
        print(f"syncline: node {agent.way.node} is lost: {why}", file=sys.stderr, flush=True)
        self.dead.put((node, why))
        self.lost.ring()
