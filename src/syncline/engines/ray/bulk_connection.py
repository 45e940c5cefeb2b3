"""Frames over one TCP connection, from memory into memory: both directions at once, nothing copied between.

A frame's body is sent from the views it was given with and received into the view that the receiver names, slice by slice.
Every frame says of which run, generation and incarnation it is, and which one it is; what is of another or comes again is
discarded, what is no frame ends the connection, and both are counted. Not responsible for who may connect (authentication.py), nor for what frames mean.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

MAGIC = b"SL1"
_HEAD = struct.Struct("!3sB8sIQQQQQ")
SLICE = 1 << 20  # bytes that one call of the kernel is asked to move
SMALL = 1 << 20  # bytes of a body that nobody has named a place for
VIEWS = 64  # pieces of memory that one call of the kernel is given
QUEUED = 1024  # frames that wait to be sent, at most
SILENT = 4.0  # seconds without an answer after which a node is dead
TURN = 4 << 20  # bytes that are received before whoever does not wait may do something else


class Lost(Exception):
    """The connection is no more: closed, broken, or given up because of what came."""


class Head(NamedTuple):
    """What is known of a frame before its body."""

    kind: int
    generation: int  # how often the servers were started anew
    place: int  # what the body is, or where it goes: the kind's own number
    offset: int  # and from which byte on
    length: int


class Frame(NamedTuple):
    """One that has arrived; the body lies where the receiver wanted it."""

    kind: int
    generation: int
    place: int
    body: memoryview


@dataclass(slots=True)
class _Incoming:
    """A frame that has begun to arrive."""

    head: Head
    body: memoryview
    wanted: bool  # else it is read and forgotten
    left: int  # bytes


Into = Callable[[Head], "memoryview | None"]


class Connection:
    """One end. `send` is for any thread; one thread at a time receives, another may flush."""

    def __init__(self, end: socket.socket, *, run: bytes, incarnation: int, into: Into) -> None:
        tune(end)
        end.setblocking(False)
        self._socket = end
        self._run, self._incarnation, self._into = run, incarnation, into
        self.refused = Counter[str]()  # what came and was not taken, by the reason
        self._sending = threading.Condition()
        self._queue: deque[memoryview] = deque()  # what is not sent
        self._ends: deque[int] = deque()  # of frames that are not sent, in bytes since the beginning
        self._queued = self._sent = 0  # frames, since the beginning
        self._bytes_queued = self._bytes_sent = 0
        self._head = bytearray(_HEAD.size)
        self._head_filled = 0
        self._incoming: _Incoming | None = None
        self._next = 0  # the frame that is to come
        self._turn = TURN
        self.lost = False

    def fileno(self) -> int:
        return self._socket.fileno()

    # -- sending -----------------------------------------------------------------------------------------

    def send(self, kind: int, *bodies: Any, place: int = 0, offset: int = 0, generation: int = 0) -> int:
        """Begin to send, and go on in `flush`; the frame's number, for `wait_sent`. The bodies stay as they are until then."""
        with self._sending:
            while len(self._ends) >= QUEUED and not self.lost:
                self._flush_some(wait=True)
            number = self.queue(kind, *bodies, place=place, offset=offset, generation=generation)
            self._flush_some()
            if self._queue:
                self._sending.notify_all()
        return number

    def queue(self, kind: int, *bodies: Any, place: int = 0, offset: int = 0, generation: int = 0) -> int:
        """The same, to be sent with the next `flush`, together with others."""
        views = [memoryview(body).cast("B") for body in bodies]
        length = sum(view.nbytes for view in views)
        with self._sending:
            self._check()
            which = (self._run, generation, self._incarnation, self._queued)
            self._queue.append(memoryview(_HEAD.pack(MAGIC, kind, *which, place, offset, length)))
            self._queue.extend(view for view in views if view.nbytes)
            self._bytes_queued += _HEAD.size + length
            self._ends.append(self._bytes_queued)
            self._queued += 1
            return self._queued

    def flush(self) -> bool:
        """Send what the other end takes now; True if nothing is left."""
        with self._sending:
            self._check()
            self._flush_some()
            return not self._queue

    def sent(self, number: int) -> bool:
        """The memory of that frame is not needed any more."""
        return self._sent >= number

    def wait_sent(self, number: int) -> None:
        """Until the memory of that frame may be used again."""
        with self._sending:
            while self._sent < number:
                self._check()
                self._flush_some(wait=True)

    def keep_sending(self) -> None:
        """For a thread of its own: what `send` left is sent while others go on; ends with the connection."""
        with contextlib.suppress(Lost), self._sending:
            while not self.lost:
                if self._queue:
                    self._flush_some(wait=True)
                else:
                    self._sending.wait()

    def _flush_some(self, *, wait: bool = False) -> None:
        try:
            while self._queue:
                try:
                    count = self._socket.sendmsg(_slice(self._queue))
                except BlockingIOError:
                    if not wait:
                        return
                    self._sending.release()  # others may send or close meanwhile
                    try:
                        ready(self._socket, select.POLLOUT)
                    finally:
                        self._sending.acquire()
                    self._check()
                    wait = False
                    continue
                self._advance(count)
        except OSError as error:
            self._give_up()
            raise Lost(f"the connection broke while sending: {error.strerror or error}") from error

    def _advance(self, count: int) -> None:
        self._bytes_sent += count
        while self._queue and count >= self._queue[0].nbytes:
            count -= self._queue.popleft().nbytes
        if count:
            self._queue[0] = self._queue[0][count:]
        while self._ends and self._ends[0] <= self._bytes_sent:
            self._ends.popleft()
            self._sent += 1
            self._sending.notify_all()

    # -- receiving ---------------------------------------------------------------------------------------

    def receive(self, seconds: float | None = None) -> Frame | None:
        """The next frame; waits so long for it, for ever without a number. None if there is no whole one (yet, with 0)."""
        self._turn = TURN
        while seconds != 0 or self._turn > 0:
            try:
                frame = self._receive_some()
            except BlockingIOError:
                if seconds == 0 or not ready(self._socket, select.POLLIN, seconds):
                    return None
                continue
            except OSError as error:
                self._give_up()
                raise Lost(f"the connection broke while receiving: {error.strerror or error}") from error
            if frame is not None:
                return frame
        return None

    def _receive_some(self) -> Frame | None:
        if self._incoming is None:
            self._head_filled += self._read_into(memoryview(self._head)[self._head_filled :])
            if self._head_filled < _HEAD.size:
                return None
            self._incoming = self._begin()
        incoming, head = self._incoming, self._incoming.head
        if incoming.left:
            start = head.length - incoming.left if incoming.wanted else 0
            incoming.left -= self._read_into(incoming.body[start : start + min(SLICE, incoming.left)])
        if incoming.left:
            return None
        self._incoming, self._head_filled = None, 0
        return Frame(head.kind, head.generation, head.place, incoming.body) if incoming.wanted else None

    def _read_into(self, view: memoryview) -> int:
        count = self._socket.recv_into(view)
        if count == 0:
            if self._head_filled or self._incoming is not None:
                self.refused["truncated"] += 1
            self._give_up()
            raise Lost("the other end has closed the connection")
        self._turn -= count
        return count

    def _begin(self) -> _Incoming:
        magic, kind, run, generation, incarnation, number, place, offset, length = _HEAD.unpack(self._head)
        head = Head(kind, generation, place, offset, length)
        ours = run == self._run and incarnation == self._incarnation
        if magic != MAGIC or (ours and number > self._next):
            self.refused["garbage"] += 1
            self._refuse("what came is no frame" if magic != MAGIC else "frames are missing")
        if not ours or number < self._next:
            self.refused["again" if ours else "foreign"] += 1
            return _Incoming(head, memoryview(bytearray(min(length, SLICE))), False, length)
        self._next += 1
        body = self._into(head)
        if body is None and length <= SMALL:
            body = memoryview(bytearray(length))
        if body is None or body.nbytes != length:
            self.refused["oversized"] += 1
            room = SMALL if body is None else body.nbytes
            self._refuse(f"a frame of kind {kind} brings {length:,} bytes where {room:,} belong")
        assert body is not None
        return _Incoming(head, body.cast("B"), True, length)

    def _refuse(self, why: str) -> None:
        self._give_up()
        raise Lost(f"{why}; the connection is closed")

    def notice_silence(self) -> None:
        """A machine that vanishes is noticed while something is under way to it."""
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENT * 1000))

    # -- the end -----------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self.lost:
            raise Lost("the connection is lost")

    def _give_up(self) -> None:
        self.lost = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with self._sending:
            self._queue.clear()
            self._ends.clear()
            self._sending.notify_all()

    def close(self) -> None:
        """What is not sent is lost; whoever waits hears of it."""
        self._give_up()
        self._socket.close()


def _slice(views: Iterable[memoryview]) -> list[memoryview]:
    """About `SLICE` bytes from the front."""
    room, chosen = SLICE, []
    for view in islice(views, VIEWS):
        chosen.append(view[:room])
        room -= chosen[-1].nbytes
        if room <= 0:
            break
    return chosen


def ready(end: socket.socket, what: int, seconds: float | None = None) -> bool:
    """Wait so long, for ever without a number, until it can be read or written."""
    poll = select.poll()
    with contextlib.suppress(ValueError):  # another thread has closed it: whoever reads will find it so
        poll.register(end, what)
        return bool(poll.poll(None if seconds is None else seconds * 1000))
    return True


def tune(end: socket.socket) -> None:
    """Small frames go at once. Whoever does not read is not lost for it: who is, the pulse says (heartbeat.py)."""
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3)):
        end.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
