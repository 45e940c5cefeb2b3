"""A control channel: whole objects over a Unix socket, with descriptors; never the fast path.

`receive` and `send` wait. `take` and `post` never do, be the other end stopped in the middle of a message: they are for
whoever has many channels and must hear them all.
"""

from __future__ import annotations

import array
import contextlib
import os
import pickle
import socket
import struct
import threading
from collections import deque
from functools import cache
from typing import Any

from syncline.engines.local.shared_pickle import Parcel, pack, unpack

_HEAD = struct.Struct("QI")  # bytes that follow, descriptors that come with them
_ROOM = socket.CMSG_LEN(4 * 253)  # for the descriptors of one message
NOTHING = object()  # what `take` gives where no whole message is there


class Closed(Exception):
    """The other end is gone."""


class Channel:
    """Sends and receives objects. `send` to a dead party never blocks: it raises or is lost."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._sending = threading.Lock()  # one message at a time, whichever thread sends it
        end.setblocking(True)
        self._head, self._body, self._fds = bytearray(), bytearray(), []  # type: bytearray, bytearray, list[int]
        self._unsent: deque[tuple[bytes, list[int]]] = deque()

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(mine), theirs

    @classmethod
    @cache
    def ended(cls) -> Channel:
        """Return the closed channel that takes the place of those that a run needs no more."""
        channel, theirs = cls.pair()
        theirs.close()
        channel.close()
        return channel

    def fileno(self) -> int:
        return self._socket.fileno()

    # -- sending -----------------------------------------------------------------------------------------

    def send(self, message: Any) -> None:
        """Waits until the message is on its way."""
        if self._socket.fileno() < 0:
            raise Closed
        parcel = message if isinstance(message, Parcel) else pack(message)
        try:
            data, fds = _written(parcel)
            with self._sending:
                sent = socket.send_fds(self._socket, [data], fds) if fds else 0
                self._socket.sendall(data[sent:])
        except (BrokenPipeError, ConnectionResetError) as error:
            raise Closed from error
        finally:
            if not isinstance(message, Parcel):
                parcel.close()

    def try_send(self, message: Any) -> None:
        """A send whose failure does not matter: the party's death is noticed elsewhere."""
        with contextlib.suppress(Closed):
            self.send(message)

    def post(self, message: Any) -> None:
        """Without waiting: what the other end does not take now goes out with `flush`, or is lost with its death."""
        if self._socket.fileno() < 0:
            return
        parcel = message if isinstance(message, Parcel) else pack(message)
        data, fds = _written(parcel)
        self._unsent.append((data, [os.dup(fd) for fd in fds]))
        if not isinstance(message, Parcel):
            parcel.close()
        self.flush()

    def flush(self) -> bool:
        """Send what can be sent of what was posted; False if something is left."""
        try:
            while self._unsent:
                data, fds = self._unsent[0]
                control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
                sent = self._socket.sendmsg([data], control, socket.MSG_DONTWAIT)  # send_fds has no flags
                _close_all(fds)
                self._unsent.popleft()
                if sent < len(data):
                    self._unsent.appendleft((data[sent:], []))
        except BlockingIOError:
            return False
        except OSError:  # it is dead, or closed here
            self._forget()
        return True

    # -- receiving ---------------------------------------------------------------------------------------

    def receive(self) -> Any:
        """Waits for a whole message."""
        return self._read(0)

    def take(self) -> Any:
        """A message, if a whole one is there, else NOTHING; what there is of the next is kept."""
        return self._read(socket.MSG_DONTWAIT)

    def _read(self, flags: int) -> Any:
        try:
            while (missing := _HEAD.size - len(self._head)) > 0:
                got, control, _, _ = self._socket.recvmsg(missing, _ROOM, flags)  # recv_fds forgets the flags
                self._head += got
                for _, _, packed in control:
                    self._fds += array.array("i", packed[: len(packed) // 4 * 4])
                if not got:
                    raise Closed
            length = int(_HEAD.unpack(self._head)[0])
            while (missing := length - len(self._body)) > 0:
                got = self._socket.recv(min(1 << 20, missing), flags)
                self._body += got
                if not got:
                    raise Closed
        except BlockingIOError:
            return NOTHING
        except OSError as error:
            raise Closed from error
        body, fds = self._body, self._fds
        self._head, self._body, self._fds = bytearray(), bytearray(), []
        pickled, inline, bulk = pickle.loads(body)
        return unpack(Parcel(pickled, inline, fds, bulk))

    def close(self) -> None:
        self._socket.close()
        self._forget()
        _close_all(self._fds)
        self._fds = []

    def _forget(self) -> None:
        while self._unsent:
            _close_all(self._unsent.popleft()[1])


def _written(parcel: Parcel) -> tuple[bytes, list[int]]:
    body = pickle.dumps((parcel.pickled, parcel.inline, parcel.bulk))
    return _HEAD.pack(len(body), len(parcel.fds)) + body, parcel.fds


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
