"""Rank 0's clerk: a thread that hears all learners, keeps the run's record and tells everybody when one is gone.

One connection for each learner, rank 0's own included; its end is the learner's end, and a machine that vanishes is noticed by
keep-alives. Whole objects go over it, never gradients. Evaluation runs on another thread, beside the learner.
"""

from __future__ import annotations

import contextlib
import io
import queue
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import cloudpickle
from torch import Tensor

from syncline import messages as m
from syncline.engines.authentication import Listener, Secret, Stranger, introduce
from syncline.engines.recorder import learner_error, peer_record, said
from syncline.engines.run import RunSpec
from syncline.errors import LostError, RunError
from syncline.protocols.lifecycle import alone
from syncline.roles.allreduce_coordinator import Meet

LINGER = 2.0  # seconds that the last words get
HELLO = 60.0  # seconds that a learner waits for rank 0's proof
_HEAD = struct.Struct("!Q")


@dataclass(frozen=True, slots=True)
class Left:
    """A learner's function is over, after so many collectives and steps."""

    value: Any
    calls: int
    steps: int
    signal: int = 0  # that it got, where the run has ended before its time


@dataclass(frozen=True, slots=True)
class Apart:
    """A learner takes part in no collective beyond so many: whoever does must know."""

    rank: int
    calls: int
    steps: int = 0
    what: str = ""  # the meeting that it waits in; none: it has left


@dataclass(frozen=True, slots=True)
class Stop:
    """The run is to end."""


class ControlConnection:
    """One end of a connection. `send` may be called from several threads."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, seconds in (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3)):
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 4000)
        self._lock = threading.Lock()

    def introduce(self, rank: int, secret: Secret) -> None:
        """A learner's first words."""
        there = self.socket.getpeername()
        try:
            introduce(self.socket, secret, HELLO)
        except Stranger as error:
            raise LostError(
                f"what listens at {there} is not rank 0 of this run: {error}; start the run again"
            ) from error
        self.socket.settimeout(None)
        self.send(rank)

    def send(self, message: Any) -> None:
        """Raises OSError when the other end is gone."""
        body = cloudpickle.dumps(message)
        with self._lock:
            self.socket.sendall(_HEAD.pack(len(body)) + body)

    def receive(self) -> Any:
        """Raises EOFError or OSError when the other end is gone."""
        (length,) = _HEAD.unpack(self._exactly(_HEAD.size))
        return cloudpickle.load(io.BytesIO(self._exactly(length)))

    def _exactly(self, length: int) -> bytes:
        parts = bytearray()
        while len(parts) < length:
            got = self.socket.recv(min(1 << 20, length - len(parts)))
            if not got:
                raise EOFError
            parts += got
        return bytes(parts)

    def close(self) -> None:
        self.socket.close()


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
            reply=self._send,
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
        try:  # where all machines can reach rank 0: the address they all know
            self._listener = Listener(host, self.secret, self._admit)
        except OSError:  # a name that is not this machine's own, behind a translation
            self._listener = Listener("", self.secret, self._admit)
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
            self._send(rank, self.recorder.error)

    def _hear(self, rank: int, wire: ControlConnection) -> None:
        try:
            message = wire.receive()
        except (OSError, EOFError):
            self._selector.unregister(wire.socket)
            if rank not in self._left:
                self.recorder.event("lost: its connection ended", self._learner(rank), kind="lost")
                who = f"seat {rank} of learner 0" if self.spec.group > 1 else f"learner {rank}"
                self._fail(alone(f"{who} is lost: its process ended without a word"))
            return
        if isinstance(message, Left):
            self._left[rank] = message
            outcome = self.recorder.outcome
            if rank < self.spec.plan.learners:  # of other seats nobody asks
                outcome.returned[rank] = message.value
            outcome.signal = outcome.signal or message.signal
            outcome.interrupted |= message.signal != 0
            self._tell(Apart(rank, message.calls, message.steps))
        elif isinstance(message, m.Raised):
            self._fail(learner_error(self._learner(rank), message.error, message.traceback))
        elif isinstance(message, BaseException):
            self._fail(message)
        else:
            if isinstance(message, Meet):
                self._tell(Apart(rank, message.calls, what=message.what))
            self.keeper.hear(rank, message)

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
            self._tell(error)

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
        """Tell everybody; of the tables only the buffers, the parameters everybody has."""
        outcome = self.recorder.outcome
        outcome.seconds = time.monotonic() - self._began
        if self.recorder.error is None:
            light = {}
            for number, (version, state) in outcome.tables.items():
                layout = self.keeper.layouts[number]
                buffers = {entry.name for entry in layout.buffers.entries}
                light[number] = version, {key: state[key] for key, name in layout.keys if name in buffers}
            self._tell(replace(outcome, tables=light))
        with self._door:
            self._over = True
