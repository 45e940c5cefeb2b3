"""A control channel: whole objects over a Unix socket, with descriptors; never the fast path."""

from __future__ import annotations

import contextlib
import pickle
import select
import socket
import struct
import threading
from typing import Any

from syncline.engines.local.cargo import Parcel, pack, unpack

_HEAD = struct.Struct("QI")  # bytes that follow, descriptors that come with them


class Closed(Exception):
    """The other end is gone."""


class Channel:
    """Sends and receives objects. `send` to a dead party never blocks: it raises or is lost."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._sending = threading.Lock()  # one message at a time, whichever thread sends it
        end.setblocking(True)

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(mine), theirs

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Any) -> None:
        if self._socket.fileno() < 0:
            raise Closed
        parcel = message if isinstance(message, Parcel) else pack(message)
        body = pickle.dumps((parcel.pickled, parcel.sizes, parcel.inline, parcel.bulk))
        try:
            with self._sending:
                self._put(body, parcel.fds)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise Closed from error
        finally:
            if not isinstance(message, Parcel):
                parcel.close()

    def _put(self, body: bytes, fds: list[int]) -> None:
        head = _HEAD.pack(len(body), len(fds))
        sent = socket.send_fds(self._socket, [head], fds) if fds else self._socket.send(head)
        self._socket.sendall(head[sent:] + body if sent < len(head) else body)

    def try_send(self, message: Any) -> None:
        """A send whose failure does not matter: the party's death is noticed elsewhere."""
        with contextlib.suppress(Closed):
            self.send(message)

    def receive(self) -> Any:
        try:
            head, fds, _, _ = socket.recv_fds(self._socket, _HEAD.size, 253)
        except ConnectionResetError as error:
            raise Closed from error
        head += self._exactly(_HEAD.size - len(head)) if head else b""
        if not head:
            raise Closed
        length, _ = _HEAD.unpack(head)
        pickled, sizes, inline, bulk = pickle.loads(self._exactly(length))
        return unpack(Parcel(pickled, sizes, inline, list(fds), bulk))

    def _exactly(self, length: int) -> bytes:
        parts = bytearray()
        while len(parts) < length:
            try:
                got = self._socket.recv(min(1 << 20, length - len(parts)))
            except ConnectionResetError as error:
                raise Closed from error
            if not got:
                raise Closed
            parts += got
        return bytes(parts)

    def ready(self) -> bool:
        """Something can be received now, be it the end; a closed channel has nothing more."""
        if self._socket.fileno() < 0:
            return False
        poll = select.poll()  # select() knows no descriptor beyond 1023
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        self._socket.close()
