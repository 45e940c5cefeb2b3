"""Whole objects over TCP between the learners and rank 0's clerk; never gradients.

A machine that vanishes is noticed by keep-alives.
"""

from __future__ import annotations

import io
import socket
import struct
import threading
from typing import Any

import cloudpickle

from syncline.engines.authentication import Secret, Stranger, introduce
from syncline.errors import LostError

HELLO = 60.0  # seconds that a learner waits for rank 0's proof
_HEAD = struct.Struct("!Q")


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
        (length,) = _HEAD.unpack(self.exactly(_HEAD.size))
        return cloudpickle.load(io.BytesIO(self.exactly(length)))

    def exactly(self, length: int) -> bytes:
        parts = bytearray()
        while len(parts) < length:
            got = self.socket.recv(min(1 << 20, length - len(parts)))
            if not got:
                raise EOFError
            parts += got
        return bytes(parts)

    def close(self) -> None:
        self.socket.close()
