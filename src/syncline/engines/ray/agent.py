"""A node's agent: keeps what learners run once for its node, starts learners on request, and ends them with their connections.

A learner's stand-in connects and orders it; the very connection goes to the learner's process. Not responsible for what
they say to each other, nor for where agents run (cluster.py).
"""

from __future__ import annotations

import contextlib
import os
import platform
import queue
import select
import socket
import sys
import threading
import time
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn

import torch

from syncline.engines.local.packing import Parcel, unpack
from syncline.engines.local.processes import Process, Processes
from syncline.engines.local.shared_memory import WakeUp
from syncline.engines.ray.authentication import Listener, Secret
from syncline.engines.ray.bulk_connection import Connection, Head, Lost, bytes_of
from syncline.engines.ray.frame_kinds import AGENT, WORDS, Kind, Objects
from syncline.engines.ray.heartbeat import notice_silence
from syncline.engines.ray.node_versions import Mirror, MirrorOf
from syncline.engines.ray.placement import gpu_of
from syncline.engines.ray.remote_learner import RemoteLearner
from syncline.roles.run_plan import Seat

LOOK = 0.25  # seconds between looks at what has ended
FIRST_WORD = 30.0  # seconds that a connection has to say what it is for
GRACE = 2.0  # seconds that a learner outlives its connection


@dataclass(frozen=True, slots=True)
class About:
    """What an agent says of itself."""

    address: tuple[str, int]
    python: str
    torch: str
    syncline: str
    pid: int


@dataclass(frozen=True, slots=True)
class Order:
    """Start this learner."""

    learner: int
    seat: Seat
    slots: int
    threads: int | None  # None: as many as the node has for each
    places: int  # for versions


@dataclass(slots=True)
class _Running:
    """A learner of this node, and the connection that it lives by."""

    process: Process
    end: socket.socket
    ends: float | None = None  # when it is killed


def versions() -> tuple[str, str, str]:
    """Of Python, torch and this library."""
    try:
        own = version("syncline")
    except PackageNotFoundError:  # run from its sources
        own = "of the source tree"
    return platform.python_version(), torch.__version__, own


class Agent:
    """One node's part of a run; everything happens on one thread of its own, beside the listener's."""

    def __init__(
        self, secret: Secret, host: str, *, learners: int, gpus: int = 0, path: list[str], folder: str
    ) -> None:
        self._secret, self._learners, self._gpus = secret, max(1, learners), gpus
        _settle(path, folder)
        self._task: Parcel | None = None
        self._refused = 0  # frames
        self._mirrors: dict[int, Mirror] = {}  # by table
        self._orders: queue.Queue[tuple[Order, socket.socket]] = queue.Queue()
        self._running: dict[int, _Running] = {}  # by pid
        self._places: dict[int, int] = {}  # GPU place -> pid
        self._wake = WakeUp()
        self._closing = threading.Event()
        self._poll = select.poll()
        self._listener = Listener(host, secret, self._welcome)
        self._thread = threading.Thread(target=self._main, name="syncline-agent", daemon=True)
        self._thread.start()

    def about(self) -> About:
        return About(self._listener.address, *versions(), os.getpid())

    def close(self) -> None:
        self._closing.set()
        self._wake.ring()
        self._thread.join(10)

    # -- connections -------------------------------------------------------------------------------------

    def _welcome(self, end: socket.socket) -> None:
        objects = Objects()
        into = partial(self._into, objects)
        connection = Connection(end, run=self._secret.run, incarnation=AGENT, into=into)
        handed = False
        try:
            while not handed and (frame := connection.receive(FIRST_WORD)) is not None:
                if frame.kind == Kind.PULSE:
                    self._answer(connection, end)
                elif frame.kind == Kind.MIRROR:
                    self._mirror(connection)
                elif frame.kind not in (Kind.TASK, Kind.ORDER, Kind.CARGO):
                    break
                elif (found := objects.gather(frame)) is not None:
                    handed = self._said(*found, connection, end)
        except Lost:
            pass
        finally:
            self._refused += connection.refused.total()
            if not handed:
                connection.close()

    def _said(self, kind: int, parcel: Parcel, connection: Connection, end: socket.socket) -> bool:
        """True if the connection is a learner's from now on."""
        if kind == Kind.TASK:
            self._task = parcel
            connection.wait_sent(Objects().send(connection, Kind.DONE, None))
        else:
            self._orders.put((unpack(parcel), end))
            self._wake.ring()
        return kind == Kind.ORDER

    def _answer(self, connection: Connection, end: socket.socket) -> NoReturn:
        """Until the caller is gone, or has declared this node dead: then nothing of the run stays here."""
        notice_silence(end)
        try:
            while True:
                refused = self._listener.strangers + self._refused
                connection.send(Kind.PULSE, WORDS.pack(refused, *[0] * 7))
                connection.receive()
        finally:
            self._closing.set()
            self._wake.ring()

    def _into(self, objects: Objects, head: Head) -> memoryview | None:
        if head.kind != Kind.VERSION:
            return objects.into(head)
        mirror, index = self._mirrors.get(head.place >> 16), head.place & 0xFFFF
        return None if mirror is None or index >= len(mirror.places) else bytes_of([mirror.begin(index)])[0]

    def _mirror(self, connection: Connection) -> NoReturn:
        """Versions, for all learners of this node."""
        while True:
            frame = connection.receive()
            if frame is not None and frame.kind == Kind.HELD:
                table, place, version, generation, *_ = WORDS.unpack(frame.body)
                self._mirrors[table].offer(place, generation, version)
                connection.send(Kind.HELD, frame.body)

    # -- learners ----------------------------------------------------------------------------------------

    def _main(self) -> None:
        processes = Processes(self._asked, lambda process, how: None)
        processes.watch(self._wake.fd, lambda: self._start_ordered(processes))
        try:
            while not self._closing.is_set():
                processes.work(LOOK)
                self._look(processes)
        finally:
            self._listener.close()
            processes.close(kill=True)
            for pid, running in list(self._running.items()):
                self._forget(pid, running)

    def _asked(self, process: Process, message: Any) -> None:
        if isinstance(message, MirrorOf):
            if message.table not in self._mirrors:
                self._mirrors[message.table] = Mirror(message.nbytes, message.places)
            process.channel.post(self._mirrors[message.table].region)

    def _start_ordered(self, processes: Processes) -> None:
        self._wake.quiet()
        with contextlib.suppress(queue.Empty):
            while True:
                self._start(processes, *self._orders.get_nowait())

    def _start(self, processes: Processes, order: Order, end: socket.socket) -> None:
        assert self._task is not None
        place = next(place for place in range(len(self._places) + 1) if place not in self._places)
        seat = order.seat
        if seat.device == "cuda":
            seat = replace(seat, device=gpu_of(place, self._gpus))
        handed = WakeUp(os.dup(end.fileno()))
        spec = RemoteLearner(order.learner, seat, order.slots, self._secret.run, handed, order.places)
        process = processes.fork("learner", order.learner, seat.rank, spec, None, self._threads(order))
        process.channel.post(self._task)
        handed.close()
        self._running[process.pid] = _Running(process, end)
        self._places[place] = process.pid
        self._poll.register(end, select.POLLRDHUP)

    def _threads(self, order: Order) -> int:
        if order.threads is not None:
            return order.threads
        return max(1, len(os.sched_getaffinity(0)) // self._learners)

    def _look(self, processes: Processes) -> None:
        """A learner's end is its connection's, and the other way round."""
        now = time.monotonic()
        gone = {fd for fd, _ in self._poll.poll(0)}
        for pid, running in list(self._running.items()):
            if running.process.reaped:
                self._forget(pid, running)
            elif running.end.fileno() in gone and running.ends is None:
                running.ends = now + GRACE
            elif running.ends is not None and now > running.ends:
                processes.kill(running.process)

    def _forget(self, pid: int, running: _Running) -> None:
        del self._running[pid]
        self._places = {place: owner for place, owner in self._places.items() if owner != pid}
        self._poll.unregister(running.end)
        with contextlib.suppress(OSError):  # what it forked may hold it too
            running.end.shutdown(socket.SHUT_RDWR)
        running.end.close()


def _settle(path: list[str], folder: str) -> None:
    """Modules are looked for where the caller looks for them, as far as that is here too."""
    sys.path += [each for each in path if each not in sys.path and os.path.isdir(each)]
    if os.path.isdir(folder):
        os.chdir(folder)


def describe(about: About, mine: tuple[str, str, str]) -> str:
    """In what an agent's versions differ from the caller's; empty if they do not."""
    theirs: Any = (about.python, about.torch, about.syncline)
    names = ("Python", "torch", "syncline")
    return ", ".join(
        f"{name} {their} (here {own})"
        for name, their, own in zip(names, theirs, mine, strict=True)
        if their != own
    )
