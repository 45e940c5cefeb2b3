"""Another machine of a run, as its supervisor has it: verbs go to the node's agent in their order, what happens there comes back.

Not responsible for what the agent does with them (agent.py), nor for whether it lives (heartbeat.py).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from syncline import messages as m
from syncline.engines.authentication import Secret, Stranger, connect
from syncline.engines.checkpoint_writer import with_content
from syncline.engines.local.host_interface import Ended as EndedOf
from syncline.engines.local.host_interface import Heard, Host, Sites, Vitals
from syncline.engines.local.processes import Process
from syncline.engines.local.shared_pickle import Parcel, unpack
from syncline.engines.ray.agent import TASK, Begin, Do, Ended, Ready, Said, Started
from syncline.engines.ray.bulk_connection import Lost
from syncline.engines.ray.frame_kinds import Kind, ObjectConnection
from syncline.errors import RunError
from syncline.table.checkpoints import Folder

NO_PID = 0
NOBODY = Vitals({}, {}, {})


@dataclass(frozen=True, slots=True)
class Way:
    """From the caller's node to an agent."""

    address: tuple[str, int]
    secret: Secret
    node: str
    home: str
    machine: str = ""  # its name, where it is another than the caller's

    def connect(self) -> ObjectConnection:
        try:
            return ObjectConnection(connect(self.address, self.secret), self.secret)
        except (OSError, Stranger) as error:
            raise self.cut(error) from error

    def cut(self, error: Exception) -> RunError:
        host, port = self.address
        return RunError(
            f"{self.home} cannot reach the agent on {self.node} at {host}:{port}: {error}; open that way between them (any port)"
        )


def _passed_on(verb: str) -> Callable[..., None]:
    """A verb that the agent carries out as it is."""

    def tell(host: RemoteHost, *given: Any) -> None:
        host._do(verb, *given)

    return tell


class RemoteHost(Host):
    """One, from the moment when its agent is told of the run."""

    def __init__(self, way: Way, task: Parcel, begin: Begin) -> None:
        self._way = way
        self.site = begin.site
        self._connection = way.connect()
        self.fd = self._connection.fileno()  # ready when something has come
        self.processes: list[Process] = []
        self._vitals = NOBODY
        self._folder: Folder | None = None  # that the machine does not see
        with contextlib.suppress(Lost):  # whoever waits for its answer hears of it
            self._connection.send(Kind.CONTROL)
        self._connection.tell(task, place=TASK)
        self._connection.tell(begin)
        keep_sending = self._connection.keep_sending
        threading.Thread(target=keep_sending, name="syncline-control", daemon=True).start()

    def wait_ready(self, alive: Callable[[], bool], folder: Folder | None, ways: Mapping[int, Way]) -> None:
        """Until it has what its learners run; `ways` are those of other machines."""
        while alive():
            try:
                frame = self._connection.receive(0.5)
            except Lost as error:
                raise self._way.cut(error) from error
            if frame is not None and (found := self._connection.gather(frame)) is not None:
                ready = unpack(found[1])
                assert isinstance(ready, Ready)
                self._folder = None if ready.sees else folder
                for site, why in ready.cut.items():
                    raise replace(ways[site], home=self._way.node).cut(Lost(why))
                return
        raise self._way.cut(Lost("it does not answer any more"))

    def listen(self, heard: Heard, ended: EndedOf, broken: Callable[[int, str], None]) -> None:
        """From now on these are told."""
        self._heard, self._ended, self._broken = heard, ended, broken

    # -- what it says ------------------------------------------------------------------------------------

    def receive(self) -> None:
        try:
            while not self._connection.lost and (frame := self._connection.receive(0)) is not None:
                if (found := self._connection.gather(frame)) is not None:
                    self._said(unpack(found[1]))
        except Lost as error:
            self._broken(self.site, f"its agent is gone: {error}")

    def _said(self, event: Any) -> None:
        if isinstance(event, Vitals):
            self._vitals = event
        elif isinstance(event, Started):
            self._started(event)
        else:  # of the last one that had this pid
            process = next(each for each in reversed(self.processes) if each.pid == event.pid)
            if isinstance(event, Said) and process.state != "killed":
                self._heard(process, event.message)
            elif isinstance(event, Ended) and process.state == "running":
                process.reaped = True
                if process.role == "relay":  # nothing of the others reaches that machine any more
                    self._broken(self.site, f"its relay (pid {process.pid}) ended with {event.how}")
                else:
                    self._ended(process, event.how)

    def _started(self, event: Started) -> None:
        for process in self.processes:
            if process.pid == NO_PID and (process.role, process.number) == (event.role, event.number):
                process.pid = event.pid
                return
        if event.role == "node":  # how many there are, its machine knows
            self._new(event.role, event.number, event.rank).pid = event.pid

    # -- verbs -------------------------------------------------------------------------------------------

    introduce = _passed_on("introduce")
    forget = _passed_on("forget")
    initialise = _passed_on("initialise")
    reply = _passed_on("reply")
    announce = _passed_on("announce")
    lose_site = _passed_on("lose_site")
    gain_site = _passed_on("gain_site")
    lose_node = _passed_on("lose_node")

    def _do(self, verb: str, *given: Any, **named: Any) -> None:
        self._connection.tell(Do(verb, given, named))

    def _new(self, role: str, number: int, rank: int) -> Process:
        process = Process(role, number, rank, NO_PID, cast(Any, None), machine=self._way.machine)
        self.processes.append(process)
        return process

    def start_servers(
        self, generation: int, sites: Sites, learners: Mapping[int, int], *, again: bool
    ) -> list[Process]:
        self._do("start_servers", generation, sites, dict(learners), again=again)
        self._new("relay", self.site, self.site)
        return [self._new("shard", shard, shard) for shard in sites.of(self.site)]

    def end_servers(self) -> None:
        self._do("end_servers")
        for process in self.processes:
            if process.role != "learner" and process.state == "running":
                process.state = "killed"

    def start_learner(self, learner: int, rank: int) -> Process:
        self._do("start_learner", learner, rank)
        return self._new("learner", learner, rank)

    def tell_shards(self, message: Any) -> None:
        if isinstance(message, m.MakeTable) and message.source is not None and self._folder is not None:
            message = replace(with_content(message, self._folder), source=None)
        self._do("tell_shards", message)

    def kill(self, process: Process) -> None:
        self._do("kill", process.role, process.number)

    def end(self, process: Process) -> None:
        process.state = "killed"
        self._do("end", process.role, process.number)

    def vitals(self) -> Vitals:
        return self._vitals

    def close(self) -> None:
        self._connection.close()
