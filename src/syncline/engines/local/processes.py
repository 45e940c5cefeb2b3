"""The processes of one run: forked, watched, heard, reaped.

Everything happens on the supervisor's thread, through one selector. Not responsible for what a process is for.
"""

from __future__ import annotations

import codecs
import contextlib
import itertools
import os
import selectors
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TextIO

from syncline.engines.local import forkserver
from syncline.engines.local.control_channel import NOTHING, Channel, Closed
from syncline.engines.local.shared_memory import WakeUp
from syncline.engines.process_titles import title_of
from syncline.errors import LostError

RETRY = 0.01  # seconds until what somebody did not take is offered again


@dataclass(slots=True, eq=False)
class Process:
    """One child."""

    role: str  # "learner", "shard", "evaluator"
    number: int  # learner id or shard
    rank: int
    pid: int
    channel: Channel
    bell: WakeUp | None = None
    state: str = "running"  # then "returned", "raised", "lost", "killed"
    reaped: bool = False
    machine: str = ""  # its name, where it is another than the caller's
    order: int = field(default_factory=itertools.count().__next__)  # of its start


class Processes:
    """All children of a run, those that ended included."""

    def __init__(
        self,
        heard: Callable[[Process, Any], None],
        ended: Callable[[Process, str], None],
        crashes: Mapping[str, int] | None = None,
        run: str = "",
    ) -> None:
        self._heard, self._ended = heard, ended
        self.run = run  # its name, in process titles
        self._crashes = dict(crashes or {})  # for tests: process name -> the operation it dies in, once
        self.by_pid: dict[int, Process] = {}
        self._open: dict[int, Process] = {}  # by pid, while its channel is open
        self._deferred: list[forkserver.Ended] = []  # that came while somebody waited for something else
        self._selector = selectors.DefaultSelector()
        self._server = forkserver.connect()
        self._out = [os.pipe(), os.pipe()]
        self._life = os.pipe()
        decoder = codecs.getincrementaldecoder("utf-8")
        self._decoders = {"stdout": decoder("replace"), "stderr": decoder("replace")}
        self.watch(self._server.fileno(), self._from_forkserver)
        for (end, _), stream in zip(self._out, ("stdout", "stderr"), strict=True):
            os.set_blocking(end, False)
            self.watch(end, partial(self._print, end, stream))

    def watch(self, fd: int, action: Callable[[], object]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, action)

    def unwatch(self, fd: int) -> None:
        self._selector.unregister(fd)

    def work(self, seconds: float) -> None:
        """Wait for something to happen, and handle all that has.

        Whatever was ready may be so no more: handling another may have read it. So nothing here waits for what it reads.
        """
        if self._deferred:
            seconds = 0.0
        elif [process for process in self._open.values() if not process.channel.flush()]:
            seconds = min(seconds, RETRY)  # somebody does not read, and gets the rest when it does
        for key, _ in self._selector.select(timeout=seconds):
            key.data()
        while self._deferred:  # handling one may reap others that lie here
            self._end_of(self._deferred.pop(0))

    # -- starting ----------------------------------------------------------------------------------------

    def fork(
        self,
        role: str,
        number: int,
        rank: int,
        run: forkserver.Run,
        bell: WakeUp | None = None,
        threads: int = 1,
        part: str | None = None,
    ) -> Process:
        """Start a process; `part` is its name in the process title, "ROLE RANK" if not given."""
        channel, theirs = Channel.pair()
        fds = [theirs.fileno(), self._out[0][1], self._out[1][1], self._life[0]]
        socket.send_fds(self._server._socket, [b"f"], fds)
        while isinstance(pid := self._from_server(), forkserver.Ended):
            self._deferred.append(pid)
        theirs.close()
        process = self.by_pid[pid] = self._open[pid] = Process(role, number, rank, pid, channel, bell)
        crash = self._crashes.pop(f"{role} {rank}", None)
        channel.post(
            forkserver.Setup(
                role,
                title_of(part or f"{role} {rank}", self.run),
                threads,
                list(sys.path),
                os.getcwd(),
                dict(os.environ),
                crash,
                run,
            )
        )
        self.watch(channel.fileno(), partial(self._hear, process))
        return process

    def _from_server(self, *, wait: bool = True) -> Any:
        try:
            return self._server.receive() if wait else self._server.take()
        except Closed as error:
            raise LostError("the fork server was lost; the run cannot go on") from error

    # -- hearing -----------------------------------------------------------------------------------------

    def _hear(self, process: Process) -> bool:
        """One message; False if there is none."""
        try:
            message = process.channel.take()
        except Closed:
            self.dismiss(process)
            return False
        if message is not NOTHING:
            self._heard(process, message)
        return message is not NOTHING

    def dismiss(self, process: Process) -> None:
        """Close its channel: what stays of a process that has ended is a line of the statistics."""
        if self._open.pop(process.pid, None) is not None:
            self._selector.unregister(process.channel.fileno())
            process.channel.close()
            process.channel = Channel.ended()

    def _print(self, end: int, stream: str) -> bool:
        """What learners print; False if there is nothing."""
        try:
            data = os.read(end, 65536)
        except BlockingIOError:
            return False
        say(getattr(sys, stream), self._decoders[stream].decode(data))
        return True

    # -- ending ------------------------------------------------------------------------------------------

    def _from_forkserver(self) -> None:
        if (answer := self._from_server(wait=False)) is not NOTHING:
            self._end_of(answer)

    def _end_of(self, ended: forkserver.Ended) -> None:
        process = self.by_pid[ended.pid]
        process.reaped = True
        while process.state == "running" and self._hear(process):
            pass  # its last words
        self.dismiss(process)
        if process.state == "running":
            self._ended(process, forkserver.describe(ended.code))

    def kill(self, process: Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            if not process.reaped:
                os.kill(process.pid, 9)

    def kill_and_reap(self, processes: list[Process]) -> None:
        """End these for good; what else ends meanwhile is handled later."""
        for process in processes:
            process.state = "killed" if process.state == "running" else process.state
            self.kill(process)
            self.dismiss(process)
        others: list[forkserver.Ended] = []
        while not all(process.reaped for process in processes):
            ended = self._deferred.pop(0) if self._deferred else self._from_server()
            if self.by_pid[ended.pid] in processes:
                self.by_pid[ended.pid].reaped = True
            else:
                others.append(ended)
        self._deferred = others + self._deferred

    def close(self, *, kill: bool) -> None:
        """Nothing stays behind."""
        self._selector.close()
        for process in self.by_pid.values():
            if kill and process.state == "running":
                self.kill(process)
            if process.channel.fileno() >= 0:
                process.channel.close()
        self._reap_all()
        for (end, _), stream in zip(self._out, ("stdout", "stderr"), strict=True):
            while self._print(end, stream):
                pass
        for pair in (*self._out, self._life):
            for end in pair:
                os.close(end)
        self._server.close()
        for process in self.by_pid.values():
            if process.bell is not None:
                process.bell.close()

    def _reap_all(self) -> None:
        deadline = time.monotonic() + 5
        reaped = {ended.pid for ended in self._deferred}
        alive = {pid for pid, process in self.by_pid.items() if not process.reaped} - reaped
        while alive and time.monotonic() < deadline:
            try:
                ended = self._server.take()
            except Closed:
                return
            if ended is NOTHING:
                time.sleep(0.002)
            else:
                alive.discard(ended.pid)


def say(target: TextIO, text: str) -> None:
    """Print what a learner printed; what this terminal cannot show is escaped, and a closed one is no reason to fail."""
    encoding = getattr(target, "encoding", None) or "utf-8"
    with contextlib.suppress(ValueError, OSError):
        target.write(text.encode(encoding, "backslashreplace").decode(encoding))
        target.flush()
