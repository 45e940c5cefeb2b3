"""Rank 0's clerk: a thread that hears all learners, keeps the run's record and tells everybody when one is gone.

One connection for each learner, rank 0's own included; its end is the learner's end. Evaluation runs on another thread, beside
the learner.
"""

from __future__ import annotations

import contextlib
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from syncline import messages as m
from syncline.engines.authentication import Listener, Secret
from syncline.engines.recorder import learner_error, peer_record, said
from syncline.engines.run import Outcome, RunSpec
from syncline.engines.torchrun.control_connection import ControlConnection
from syncline.errors import RunError
from syncline.protocols.lifecycle import alone
from syncline.roles.allreduce_coordinator import Meet

LINGER = 2.0  # seconds that the last words get


@dataclass(frozen=True, slots=True)
class Left:
    """A learner's function is over, after so many collectives and steps."""

    value: Any
    calls: int
    steps: int
    signal: int = 0  # that it got, where the run has ended before its time


@dataclass(frozen=True, slots=True)
class Gone:
    """A learner has left: whoever needs it for a further collective must know."""

    rank: int
    calls: int
    steps: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """A learner waits in a meeting: whoever is beyond it must know."""

    rank: int
    what: str
    calls: int


@dataclass(frozen=True, slots=True)
class Answer:
    """To a meeting."""

    values: list[Any]


@dataclass(frozen=True, slots=True)
class Failed:
    """The run has failed for all."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class Stop:
    """The run is to end."""


@dataclass(frozen=True, slots=True)
class RunDone:
    """All is recorded; of the tables only the buffers, the parameters everybody has."""

    outcome: Outcome


class RunServer:
    """The record of one run, on rank 0."""

    def __init__(self, spec: RunSpec, host: str) -> None:
        self.spec = spec
        self._began = time.monotonic()
        self.secret = Secret.new()
        self.recorder, self.keeper = peer_record(
            spec,
            now=lambda: time.monotonic() - self._began,
            evaluate=lambda epoch, state: self._waiting.put((epoch, state)),
            stop=lambda: self._tell(Stop()),
            reply=lambda rank, values: self._send(rank, Answer(values)),
            fail=self._fail,
        )
        self._wires: dict[int, ControlConnection] = {}
        self._left: dict[int, Left] = {}
        self._waiting: queue.SimpleQueue[tuple[int, dict[str, Tensor]] | None] = queue.SimpleQueue()
        self._todo: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # of other threads
        self._bell, self._ring = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._door = threading.Lock()
        self._over = False
        self._listener = self._listen(host)
        self._threads = [threading.Thread(target=self._main, name="syncline-clerk", daemon=True)]
        if spec.evaluate is not None:
            self._threads.append(threading.Thread(target=self._test, name="syncline-test", daemon=True))

    @property
    def port(self) -> int:
        return self._listener.address[1]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Nothing stays behind."""
        self._waiting.put(None)
        for thread in self._threads:
            thread.join(10)
        if not any(thread.is_alive() for thread in self._threads):
            self._ring.close()

    # -- the thread --------------------------------------------------------------------------------------

    def _main(self) -> None:
        self._selector.register(self._bell, selectors.EVENT_READ, self._work)
        while not self._over:
            for key, _ in self._selector.select(timeout=1.0):
                key.data()
            if self._finished():
                self._end()
        self._listener.close()
        while not self._todo.empty():  # whoever came last hears it, too
            self._todo.get()()
        self._selector.close()
        self._linger()
        for end in (self._bell, *(wire.socket for wire in self._wires.values())):
            end.close()

    def _later(self, action: Callable[[], None]) -> None:
        """On the clerk's thread."""
        self._todo.put(action)
        self._ring.send(b"t")

    def _work(self) -> None:
        self._bell.recv(1)
        self._todo.get()()

    def _linger(self) -> None:
        """A connection that is closed while something lies unread may lose its last words: hear to the end."""
        deadline = time.monotonic() + LINGER
        for wire in self._wires.values():
            try:
                wire.socket.shutdown(socket.SHUT_WR)
                while time.monotonic() < deadline:
                    wire.socket.settimeout(max(0.01, deadline - time.monotonic()))
                    if not wire.socket.recv(1 << 16):
                        break
            except OSError:
                continue

    def _listen(self, host: str) -> Listener:
        """Where all machines can reach rank 0: the address they all know."""
        try:
            return Listener(host, self.secret, self._admit)
        except OSError:  # a name that is not this machine's own, behind a translation
            return Listener("", self.secret, self._admit)

    def _admit(self, end: socket.socket) -> None:
        """One of the run's own says which, on a thread of its own."""
        wire = ControlConnection(end)
        with contextlib.suppress(OSError, EOFError):
            rank = wire.receive()
            with self._door:
                if not self._over:
                    self._later(partial(self._welcome, rank, wire))
                    return
        wire.close()

    def _welcome(self, rank: int, wire: ControlConnection) -> None:
        self._wires[rank] = wire
        self._selector.register(wire.socket, selectors.EVENT_READ, lambda: self._hear(rank, wire))
        if self.recorder.error is not None:
            self._send(rank, Failed(self.recorder.error))

    def _hear(self, rank: int, wire: ControlConnection) -> None:
        try:
            message = wire.receive()
        except (OSError, EOFError):
            self._selector.unregister(wire.socket)
            if rank not in self._left:
                self._lost(rank)
            return
        if isinstance(message, Left):
            self._left[rank] = message
            outcome = self.recorder.outcome
            if rank < self.spec.plan.learners:  # of other seats nobody asks
                outcome.returned[rank] = message.value
            outcome.signal = outcome.signal or message.signal
            outcome.interrupted |= message.signal != 0
            self._tell(Gone(rank, message.calls, message.steps))
        elif isinstance(message, m.Raised):
            self._fail(learner_error(self._learner(rank), message.error, message.traceback))
        elif isinstance(message, Failed):
            self._fail(message.error)
        else:
            if isinstance(message, Meet):
                self._tell(Waiting(rank, message.what, message.calls))
            self.keeper.hear(rank, message)

    def _lost(self, rank: int) -> None:
        self.recorder.event("lost: its connection ended", self._learner(rank), kind="lost")
        who = f"seat {rank} of learner 0" if self.spec.group > 1 else f"learner {rank}"
        self._fail(alone(f"{who} is lost: its process ended without a word"))

    def _learner(self, rank: int) -> int:
        return rank // self.spec.group

    def _send(self, rank: int, message: Any) -> None:
        try:
            self._wires[rank].send(message)
        except OSError:
            return  # its end is noticed by reading

    def _tell(self, message: Any) -> None:
        for rank in list(self._wires):
            self._send(rank, message)

    def _fail(self, error: BaseException) -> None:
        """The first failure is told to all."""
        if self.recorder.error is None:
            self.recorder.error = error
            self._tell(Failed(error))

    # -- evaluation --------------------------------------------------------------------------------------

    def _test(self) -> None:
        assert self.spec.evaluate is not None
        while (item := self._waiting.get()) is not None:
            epoch, state = item
            try:
                metrics = self.spec.evaluate(state)
                tested = partial(self.recorder.evaluated, epoch, metrics)
            except Exception as error:
                tested = partial(self._fail, RunError(f"evaluation failed: {said(error)}"))
            self._later(tested)

    # -- the end -----------------------------------------------------------------------------------------

    def _finished(self) -> bool:
        if self.recorder.error is not None:
            return True
        complete = self.recorder.complete() and not self.keeper.cutting
        return len(self._left) == self.spec.processes and complete

    def _end(self) -> None:
        """Tell everybody."""
        outcome = self.recorder.outcome
        outcome.seconds = time.monotonic() - self._began
        if self.recorder.error is None:
            light = {
                number: (version, {name: state[name] for name in _buffers(self.keeper.layouts[number])})
                for number, (version, state) in outcome.tables.items()
            }
            self._tell(RunDone(replace(outcome, tables=light)))
        with self._door:
            self._over = True


def _buffers(layout: Any) -> list[str]:
    return [entry.name for entry in layout.buffers.entries]
