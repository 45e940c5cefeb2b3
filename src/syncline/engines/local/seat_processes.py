"""The seats of a learner on this machine: processes that its first one forks, joined by sockets and a Gloo group.

To the supervisor they are one process: the first seat ends with any other, the others end with the first. Not
responsible for what they say to each other (learn/seats.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from syncline import messages as m
from syncline.engines.collectives import gloo_group
from syncline.engines.local.control_channel import Channel, Closed
from syncline.engines.local.forkserver import describe
from syncline.engines.local.learner import LearnerSpec, LocalLearnerPort, call, returned, say
from syncline.engines.process_titles import own_title, set_title
from syncline.engines.run import Task
from syncline.learn.seats import Line, SeatPort, SeatSession
from syncline.parallel.move import Group, Joined, join

_PDEATHSIG = 1  # of prctl
_HEAD = struct.Struct("q")  # bytes that follow; -1: on the channel, with descriptors
GONE = 5.0  # seconds in which a seat that is gone has ended this process too
GRACE = 0.5  # seconds in which a seat's end, or the first's own error, is heard of


@dataclass(slots=True)
class _Mate:
    """Another seat, as the first one has it."""

    seat: int
    pid: int
    pidfd: int
    line: socket.socket
    channel: Channel  # for what has descriptors, and for its last words


class FirstLine(Line):
    """The first seat's."""

    def __init__(self, mates: list[_Mate]) -> None:
        self.seat, self.seats, self._mates = 0, 1 + len(mates), mates

    def tell(self, answer: Any) -> None:
        try:
            data = pickle.dumps(answer, protocol=5)
        except Exception:  # memory by descriptor, or an error that does not travel so
            data = None
        with _alive():
            for mate in self._mates:
                if data is not None:
                    mate.line.sendall(_HEAD.pack(len(data)) + data)
                else:
                    mate.line.sendall(_HEAD.pack(-1))
                    mate.channel.send(answer)

    def hear(self) -> Any:
        raise AssertionError("the first seat has nobody to hear")

    def done(self, word: bytes) -> None:
        raise AssertionError("the first seat gathers")

    def gather(self) -> list[bytes]:
        found = []
        with _alive():
            for mate in self._mates:
                (size,) = _HEAD.unpack(_exactly(mate.line, _HEAD.size))
                found.append(_exactly(mate.line, size))
        return found


@contextlib.contextmanager
def _alive() -> Iterator[None]:
    """In the first seat: where another is gone this one ends too, and does nothing any more that the servers could hear."""
    try:
        yield
    except (OSError, Closed):
        time.sleep(GONE)
        raise


class _Seated(Group):
    """A group whose first process watches the others."""

    def broken(self) -> None:
        time.sleep(GONE)  # this one ends meanwhile


class OtherLine(Line):
    """Another seat's."""

    def __init__(self, seat: int, seats: int, line: socket.socket, channel: Channel) -> None:
        self.seat, self.seats = seat, seats
        self._line, self.channel = line, channel

    def tell(self, answer: Any) -> None:
        raise AssertionError("the first seat tells")

    def gather(self) -> list[bytes]:
        raise AssertionError("the first seat gathers")

    def hear(self) -> Any:
        (size,) = _HEAD.unpack(_exactly(self._line, _HEAD.size))
        return self.channel.receive() if size < 0 else pickle.loads(_exactly(self._line, size))

    def done(self, word: bytes) -> None:
        self._line.sendall(_HEAD.pack(len(word)) + word)


def _exactly(end: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        some = end.recv(size - len(found))
        if not some:
            raise Closed
        found += some
    return bytes(found)


class Seats:
    """The other seats of this process's learner: forked, watched, waited for."""

    def __init__(self, spec: LearnerSpec, channel: Channel) -> None:
        self._spec, self._channel = spec, channel
        self._mates: list[_Mate] = []
        self._finished = threading.Event()
        self._reporting = threading.Lock()  # whoever has it says how the learner ended
        self._meeting = os.memfd_create("syncline", 0)

    def fork(self, task: Task) -> None:
        """Before this process has done anything that a fork might break."""
        first, seats = os.getpid(), self._spec.seat.seats
        for seat in range(1, seats):
            mine, theirs = socket.socketpair()
            channel, other = Channel.pair()
            pid = os.fork()
            if pid == 0:
                mine.close()
                channel.close()
                line = OtherLine(seat, seats, theirs, Channel(other))
                os._exit(self._live(first, line, task))
            theirs.close()
            other.close()
            self._mates.append(_Mate(seat, pid, os.pidfd_open(pid), mine, channel))
        threading.Thread(target=self._watch, name="syncline-seats", daemon=True).start()

    def sit(self, line: Line | None = None, first: int | None = None) -> SeatSession:
        """Join the group; the session of this seat, by itself the first one's."""
        line, first = line or FirstLine(self._mates), first or os.getpid()
        set_title(f"seat {line.seat} of {own_title()}")
        config = self._spec.seat
        devices = config.devices or (config.device,)
        config = replace(config, device=devices[line.seat % len(devices)], reader=False)
        if torch.device(config.device).type == "cuda":
            torch.cuda.set_device(config.device)
        store = dist.FileStore(f"/proc/{first}/fd/{self._meeting}", config.seats)
        group = _Seated(gloo_group(store, line.seat, config.seats, "127.0.0.1"))
        join(Joined(group, config.cut, config.plan.seed + config.rank))
        port = SeatPort(LocalLearnerPort(self._channel, self._spec), line)
        return SeatSession(port, config, line.seat)

    # -- in another seat ---------------------------------------------------------------------------------

    def _live(self, first: int, line: OtherLine, task: Task) -> int:
        """A seat's whole life; it ends with the first."""
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != first:
            return 1
        self._channel.close()
        self._hang_up()
        try:
            _call(task, self.sit(line, first))
            line.channel.send(None)
        except Closed:
            return 1
        except BaseException as error:
            say(line.channel, error)
        with contextlib.suppress(Closed):
            while True:
                line.hear()  # nobody leaves before the first: others may still read
        return 0

    # -- in the first ------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Any seat's end is the group's; an error that another seat has is the learner's."""
        poll, running = select.poll(), set(range(1, len(self._mates) + 1))
        by_fd = {fd: mate for mate in self._mates for fd in (mate.pidfd, mate.channel.fileno())}
        for fd in by_fd:
            poll.register(fd, select.POLLIN)
        while running:
            for fd, _ in poll.poll():
                mate = by_fd[fd]
                if fd == mate.pidfd:
                    _, status = os.waitpid(mate.pid, 0)
                    how = describe(os.waitstatus_to_exitcode(status))
                    whose = f"learner {self._spec.seat.rank}: its seat {mate.seat} (pid {mate.pid})"
                    print(f"{whose} ended with {how}, and its group with it", file=sys.stderr, flush=True)
                    os.kill(os.getpid(), signal.SIGKILL)
                poll.unregister(fd)
                try:
                    word = mate.channel.receive()
                except Closed:  # it is gone: its process says how
                    continue
                if isinstance(word, m.Raised):
                    self._raised(mate, word)
                running.discard(mate.seat)
        self._finished.set()

    def _raised(self, mate: _Mate, raised: m.Raised) -> None:
        time.sleep(GRACE)  # the first may have the same to say
        if self._reporting.acquire(blocking=False):
            text = f"in seat {mate.seat} of learner {self._spec.seat.rank}:\n{raised.traceback}"
            self._channel.try_send(m.Raised(raised.error, text))
            os._exit(1)

    def _hang_up(self) -> None:
        for mate in self._mates:
            mate.line.close()
            mate.channel.close()

    def wait(self) -> None:
        """All have finished; they leave."""
        self._finished.wait()
        self._hang_up()
        for mate in self._mates:
            os.waitpid(mate.pid, 0)

    def blame(self) -> None:
        """Something went wrong here. A seat that is gone may be the reason, and ends this process too."""
        time.sleep(GRACE)
        self._reporting.acquire()  # for good: whoever has it ends the process


def _call(task: Task, session: SeatSession) -> Any:
    """Who raises says nothing more: the others may be elsewhere."""
    value = call(task, session)
    session.close()
    return value


def run_group(channel: Channel, spec: LearnerSpec) -> int:
    """The first seat's life: as any learner's, with the others beside it."""
    task: Task = channel.receive()
    seats = Seats(spec, channel)
    seats.fork(task)
    try:
        value = _call(task, seats.sit())
        seats.wait()
        channel.send(returned(value))
    except Closed:
        return 1
    except BaseException as error:
        seats.blame()
        say(channel, error)
        return 1
    return 0
