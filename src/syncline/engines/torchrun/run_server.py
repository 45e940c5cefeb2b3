"""Keep the record of a run under torchrun: a thread of rank 0 that hears all ranks and tells them when one is gone.

Every rank, rank 0 included, holds one connection, whose end is the rank's end: neither torchrun's store nor a collective notices
a dead process at once, or reports which one it was. Reports, meetings and failures pass here, never gradients.
Messages are read on one thread per connection and handled on the server's thread; evaluation runs on a third.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from syncline import messages as m
from syncline.engines.recorder import learner_error, peer_record, said
from syncline.engines.run import RunSpec
from syncline.engines.torchrun.connection import (
    Apart,
    ControlConnection,
    Hello,
    MeetingValues,
    RankLeft,
    RunFailure,
    StopRun,
    listen,
)
from syncline.engines.torchrun.rank_and_store import TorchrunPlace
from syncline.errors import RunError
from syncline.protocols.lifecycle import alone
from syncline.roles.allreduce_coordinator import Meet

LINGER = 2.0  # seconds until the last messages must have been read


class RunServer:
    """The record of one run, and the connections of its ranks."""

    def __init__(self, spec: RunSpec, place: TorchrunPlace) -> None:
        self.spec = spec
        self._began = time.monotonic()
        self.recorder, self.coordinator = peer_record(
            spec,
            now=lambda: time.monotonic() - self._began,
            evaluate=lambda epoch, state: self._snapshots.put((epoch, state)),
            stop=lambda: self._broadcast(StopRun()),
            reply=lambda rank, values: self._send(rank, MeetingValues(values)),
            fail=self._fail,
        )
        self._connections: dict[int, ControlConnection] = {}  # by rank
        self._readers: list[tuple[ControlConnection, threading.Thread]] = []
        self._left: dict[int, RankLeft] = {}
        self._snapshots: queue.SimpleQueue[tuple[int, dict[str, Tensor]] | None] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._door = threading.Lock()
        self._over = False
        self._listener, self.address = listen(place, self._read)
        self._threads = [threading.Thread(target=self._main, name="syncline-run-server", daemon=True)]
        if spec.evaluate is not None:
            self._threads.append(threading.Thread(target=self._test, name="syncline-test", daemon=True))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Wait until the record is complete and all threads have ended."""
        self._snapshots.put(None)
        for thread in self._threads:
            thread.join(10)
        self._close_door()

    # -- connections -------------------------------------------------------------------------------------

    def _read(self, end: socket.socket) -> None:
        """Read one rank's messages until its connection ends, on a thread of the listener."""
        connection = ControlConnection(end)
        try:
            hello = connection.receive()
            with self._door:
                if self._over or not isinstance(hello, Hello):
                    raise EOFError
                reader = threading.current_thread()
                self._events.put(partial(self._welcome, hello.rank, connection, reader))
        except (OSError, EOFError):
            connection.close()
            return
        try:
            while True:
                self._events.put(partial(self._heard, hello.rank, connection, connection.receive()))
        except (OSError, EOFError) as error:
            self._events.put(partial(self._ended, hello.rank, connection, error))
        with contextlib.suppress(OSError):
            while end.recv(1 << 16):  # closing with unread bytes would lose the failure that is sent
                pass

    def _welcome(self, rank: int, connection: ControlConnection, reader: threading.Thread) -> None:
        self._readers.append((connection, reader))
        if rank in self._connections or rank not in range(self.spec.processes):
            with contextlib.suppress(OSError):
                connection.socket.shutdown(socket.SHUT_RDWR)
            return
        self._connections[rank] = connection
        if len(self._connections) == self.spec.processes:
            self._close_door()
        if self.recorder.error is not None:
            self._send(rank, RunFailure.of(self.recorder.error))

    def _close_door(self) -> None:
        """Listen no more, and leave no socket behind."""
        self._listener.close()
        self.address.remove()

    def _heard(self, rank: int, connection: ControlConnection, message: Any) -> None:
        if self._over or self._connections.get(rank) is not connection:
            return
        match message:
            case RankLeft():
                self._left[rank] = message
                outcome = self.recorder.outcome
                if rank < self.spec.plan.learners:  # only a learner's first seat returns a value
                    self.recorder.returned(rank, m.Returned(message.value, message.problem))
                outcome.signal = outcome.signal or message.signal
                outcome.interrupted |= message.signal != 0
                self._broadcast(Apart(rank, message.calls, message.steps))
            case m.Raised():
                self._fail(learner_error(self._learner(rank), None, message.traceback))
            case RunFailure():
                self._fail(message.error())
            case _:
                if isinstance(message, Meet):
                    self._broadcast(Apart(rank, message.calls, what=message.what))
                self.coordinator.hear(rank, message)

    def _ended(self, rank: int, connection: ControlConnection, error: Exception) -> None:
        if self._over or self._connections.get(rank) is not connection or rank in self._left:
            return
        self.recorder.event("lost: its connection ended", self._learner(rank), kind="lost")
        who = f"seat {rank} of learner 0" if self.spec.group > 1 else f"learner {rank}"
        how = f" ({error})" if str(error) else ""
        self._fail(alone(f"{who} is lost: its process ended without a word{how}"))

    def _learner(self, rank: int) -> int:
        return rank // self.spec.group

    def _send(self, rank: int, message: Any) -> None:
        with contextlib.suppress(OSError):  # reading notices the connection's end
            self._connections[rank].send(message)

    def _broadcast(self, message: Any) -> None:
        for rank in list(self._connections):
            self._send(rank, message)

    def _fail(self, error: BaseException) -> None:
        """Let the first failure end the run."""
        self.recorder.error = self.recorder.error or error

    # -- the server's thread -----------------------------------------------------------------------------

    def _main(self) -> None:
        while not self._finished():
            try:
                self._events.get()()
            except Exception:
                self._fail(RunError(f"the record of the run failed on rank 0:\n\n{traceback.format_exc()}"))
        self._end()
        self._close_door()
        while not self._events.empty():  # a rank that has come late is told of the failure
            self._events.get()()
        self._linger()

    def _finished(self) -> bool:
        if self.recorder.error is not None:
            return True
        complete = self.recorder.complete() and not self.coordinator.cutting
        return len(self._left) == self.spec.processes and complete

    def _end(self) -> None:
        """Broadcast the failure, or the outcome: of the tables only the buffers, since every rank has the parameters."""
        outcome = self.recorder.outcome
        outcome.seconds = time.monotonic() - self._began
        if self.recorder.error is not None:
            self._broadcast(RunFailure.of(self.recorder.error))
        else:
            light = {}
            for number, (version, state) in outcome.tables.items():
                layout = self.coordinator.layouts[number]
                buffers = {entry.name for entry in layout.buffers.entries}
                light[number] = version, {key: state[key] for key, name in layout.keys if name in buffers}
            self._broadcast(replace(outcome, tables=light))
        with self._door:
            self._over = True

    def _linger(self) -> None:
        """Let every rank read the last messages and hang up."""
        deadline = time.monotonic() + LINGER
        for how in (socket.SHUT_WR, socket.SHUT_RDWR):
            for connection, _ in self._readers:
                with contextlib.suppress(OSError):
                    connection.socket.shutdown(how)
            for _, reader in self._readers:
                reader.join(max(0.0, deadline - time.monotonic()) if how == socket.SHUT_WR else None)
        for connection, _ in self._readers:
            connection.close()

    # -- evaluation --------------------------------------------------------------------------------------

    def _test(self) -> None:
        assert self.spec.evaluate is not None
        while (item := self._snapshots.get()) is not None:
            epoch, state = item
            try:
                metrics = self.spec.evaluate(state)
                self._events.put(partial(self.recorder.evaluated, epoch, metrics))
            except Exception as error:
                self._events.put(partial(self._fail, RunError(f"evaluation failed: {said(error)}")))
