"""A node's agent: does on its machine what the run's supervisor says, with the local engine's means, and tells what happens there.

It ends, and all its processes, when the caller does not speak to it any more. Not responsible for what learners and
shards say to each other (relay.py), nor for where agents run (cluster.py).
"""

from __future__ import annotations

import os
import platform
import queue
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch

from syncline.engines.authentication import Listener, Secret, Stranger, connect
from syncline.engines.local.host_interface import Sites, Vitals
from syncline.engines.local.local_host import LocalHost
from syncline.engines.local.processes import Process, Processes
from syncline.engines.local.shared_memory import WakeUp
from syncline.engines.local.shared_pickle import Parcel, unpack
from syncline.engines.process_titles import set_title, title_of
from syncline.engines.ray.bulk_connection import Lost
from syncline.engines.ray.frame_kinds import WORD, Kind, ObjectConnection
from syncline.engines.ray.placement import GpuDealer
from syncline.engines.ray.relay import Link, Relay
from syncline.engines.run import RunSpec, Storage
from syncline.version import VERSION

LOOK = 0.25  # seconds between looks at what has ended
FIRST_WORD = 30.0  # seconds that a connection has to say what it is for
TASK = 1  # the place of an object that is kept as it is: what learners run


@dataclass(frozen=True, slots=True)
class About:
    """What an agent says of itself."""

    address: tuple[str, int]
    versions: tuple[str, str, str]
    pid: int


@dataclass(frozen=True, slots=True)
class Begin:
    """The run, and this machine's part in it."""

    spec: RunSpec
    sites: Sites
    site: int
    addresses: dict[int, tuple[str, int]]  # of the machines that this one's relay connects to
    token: str | None  # a file in the folder of checkpoints, for machines to see whether they see it


@dataclass(frozen=True, slots=True)
class Do:
    """A verb of `Host`; of a process that is told about its number and role."""

    verb: str
    given: tuple[Any, ...]
    named: dict[str, Any]


# -- to the supervisor -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ready:
    """It has all that it needs."""

    sees: bool  # the folder of checkpoints
    cut: dict[int, str]  # machines that its relay cannot reach, and why


@dataclass(frozen=True, slots=True)
class Started:
    role: str
    number: int
    rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class Said:
    pid: int
    message: Any


@dataclass(frozen=True, slots=True)
class Ended:
    pid: int
    how: str


def versions() -> tuple[str, str, str]:
    """Of Python, torch and this library."""
    return platform.python_version(), torch.__version__, VERSION


class Agent:
    """One node's part of a run; everything happens on one thread of its own, beside the listener's."""

    def __init__(
        self,
        secret: Secret,
        host: str,
        *,
        gpus: int = 0,
        path: list[str],
        folder: str,
        own_process: bool = True,
    ) -> None:
        self._secret, self._gpus, self._own_process = secret, gpus, own_process
        # modules are looked for where the caller looks for them, as far as that is here too
        sys.path += [each for each in path if each not in sys.path and os.path.isdir(each)]
        if os.path.isdir(folder):
            os.chdir(folder)
        self._todo: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._control: ObjectConnection | None = None
        self._task: Parcel | None = None
        self.host: LocalHost | None = None
        self.sees: Callable[[str], bool] = os.path.exists  # a file of the caller's
        self._links: list[tuple[int, int, socket.socket]] = []  # of waiting relays: generation, machine
        self._told: Vitals | None = None
        self._refused = self._beats = 0
        self._wake = WakeUp()
        self._closing, self._over = threading.Event(), threading.Event()
        self._listener = Listener(host, secret, self._welcome)
        self._thread = threading.Thread(target=self._main, name="syncline-agent", daemon=True)
        self._thread.start()

    def about(self) -> About:
        return About(self._listener.address, versions(), os.getpid())

    def close(self) -> None:
        self._end()
        self._thread.join(10)

    # -- connections, each on a thread of its own --------------------------------------------------------

    def _welcome(self, end: socket.socket) -> None:
        """When the caller is gone, or has declared this node dead, nothing of the run stays here."""
        connection, kept, caller = ObjectConnection(end, self._secret), False, False
        try:
            if (frame := connection.receive(FIRST_WORD)) is None:
                return
            if frame.kind == Kind.LINK:
                kept = True
                self._links.append((frame.generation, frame.place, end))
                self._later(self._link_all)
                if self._over.is_set():
                    self._close_links()
            elif frame.kind == Kind.PULSE:
                caller = True
                self._answer(connection)
            elif frame.kind == Kind.CONTROL and self._control is None:
                caller, self._control = True, connection
                threading.Thread(target=connection.keep_sending, daemon=True).start()
                self._listen(connection)
        except Lost:
            pass
        finally:
            if caller:
                self._end()
            self._refused += connection.refused.total()
            if not kept:
                connection.close()

    def _answer(self, connection: ObjectConnection) -> NoReturn:
        connection.notice_silence()
        while True:
            refused = self._listener.strangers + self._refused
            connection.send(Kind.PULSE, WORD.pack(refused), WORD.pack(self._beats))
            connection.receive()

    def _listen(self, connection: ObjectConnection) -> NoReturn:
        """To the supervisor."""
        while True:
            frame = connection.receive()
            if frame is not None and (found := connection.gather(frame)) is not None:
                self._later(partial(self._hear, *found))

    def _end(self) -> None:
        self._closing.set()
        self._wake.ring()

    def _later(self, action: Callable[[], None]) -> None:
        self._todo.put(action)
        self._wake.ring()

    def _tell(self, message: Any) -> None:
        if self._control is not None:
            self._control.tell(message)

    # -- the thread --------------------------------------------------------------------------------------

    def _main(self) -> None:
        self._processes = Processes(self._heard, self._ended)
        self._processes.watch(self._wake.fd, self._work)
        try:
            while not self._closing.is_set():
                self._processes.work(LOOK)
                self._show()
        finally:
            self._listener.close()
            self._processes.close(kill=True)
            if self.host is not None:
                self.host.close()
            self._over.set()
            self._close_links()
            if self._control is not None:
                self._control.close()

    def _work(self) -> None:
        self._wake.quiet()
        while not self._todo.empty():
            self._todo.get()()

    def _show(self) -> None:
        """What the supervisor would see by itself on its own machine."""
        if self.host is None:
            return
        self._beats = self.host.relay_beats
        if (vitals := self.host.vitals()) != self._told:
            self._told = vitals
            self._tell(vitals)

    def _hear(self, place: int, parcel: Parcel) -> None:
        if place == TASK:
            self._task = parcel
            return
        order = unpack(parcel)
        if isinstance(order, Begin):
            self._begin(order)
        else:
            self._do(order)

    def _begin(self, order: Begin) -> None:
        assert self._task is not None
        self._processes.run = order.spec.name
        if self._own_process:
            set_title(title_of("agent", order.spec.name))
        sees = order.token is None or self.sees(order.token)
        self.host = LocalHost(
            order.spec if sees else replace(order.spec, storage=Storage()),
            self._processes,
            self._task,
            lambda process, message: self._tell(Said(process.pid, message)),
            self._pass_end_on,
            sites=order.sites,
            site=order.site,
            relay=lambda parts: Relay(parts, self._secret, order.addresses),
            seat=GpuDealer(self._gpus),
        )
        cut, sites = {}, order.sites
        for site, address in order.addresses.items():
            if site in sites.live and (sites.of(site) or sites.of(order.site)):
                try:
                    connect(address, self._secret).close()
                except (OSError, Stranger) as error:
                    cut[site] = str(error)
        self._tell(Ready(sees, cut))

    def _do(self, order: Do) -> None:
        assert self.host is not None
        if order.verb in ("kill", "end"):  # the last one that was started
            processes = self._processes.by_pid.values()
            running = [each for each in processes if (each.role, each.number) == order.given]
            for process in running[-1:]:
                getattr(self.host, order.verb)(process)
            return
        before = set(self._processes.by_pid.values())
        getattr(self.host, order.verb)(*order.given, **order.named)
        for each in self._processes.by_pid.values():
            if each not in before:
                self._tell(Started(each.role, each.number, each.rank, each.pid))
        self._link_all()

    # -- relays of other machines ------------------------------------------------------------------------

    def _close_links(self) -> None:
        while self._links:
            self._links.pop()[2].close()

    def _link_all(self) -> None:
        """To this machine's relay, when it is of that generation."""
        if self.host is None or self.host.relay is None:
            return
        for link in list(self._links):
            generation, site, end = link
            if generation <= self.host.generation:
                self._links.remove(link)
                if generation == self.host.generation:
                    handed = WakeUp(os.dup(end.fileno()))
                    self.host.relay.channel.post(Link(site, handed))
                    handed.close()
                end.close()

    # -- what happens here -------------------------------------------------------------------------------

    def _heard(self, process: Process, message: Any) -> None:
        assert self.host is not None
        self.host.hear(process, message)

    def _ended(self, process: Process, how: str) -> None:
        assert self.host is not None
        self.host.lose(process, how)

    def _pass_end_on(self, process: Process, how: str) -> None:
        process.state = "lost"
        self._show()
        self._tell(Ended(process.pid, how))


def describe(theirs: tuple[str, str, str], mine: tuple[str, str, str]) -> str:
    """In what an agent's versions differ from the caller's; empty if they do not."""
    names = ("Python", "torch", "syncline")
    return ", ".join(
        f"{name} {their} (here {own})"
        for name, their, own in zip(names, theirs, mine, strict=True)
        if their != own
    )
