"""Who may speak to rank 0: both ends prove that they know the run's secret word, each upon the other's fresh nonce.

What was heard once cannot be said again, and nothing is unpickled before the proof. Rank 0 waits for no stranger: it hears
guests as they speak, a few at a time and not for long. Not responsible for messages (`wire.py`).
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct

from syncline.errors import LostError

WORD = NONCE = MAC = 32  # bytes
SECONDS = 10.0  # that a guest gets
MOST = 64  # guests at once: the newest drives the oldest out
HELLO = 60.0  # seconds that a learner waits for rank 0's proof
_RANK = struct.Struct("!I")
_ANSWER = NONCE + _RANK.size + MAC


class TorchrunStranger(Exception):
    """Not one of the run's."""


class Greeted:
    """A connection to rank 0 that has not proved itself yet."""

    def __init__(self, end: socket.socket, word: bytes, now: float) -> None:
        self.end, self._word, self.deadline = end, word, now + SECONDS
        self._nonce, self._heard = secrets.token_bytes(NONCE), b""
        end.setblocking(False)
        self._say(self._nonce)

    def hear(self) -> int | None:
        """The rank of a learner that has proved itself; None: not yet."""
        try:
            got = self.end.recv(_ANSWER - len(self._heard))
        except BlockingIOError:
            return None
        except OSError as error:
            raise TorchrunStranger from error
        if not got:
            raise TorchrunStranger
        self._heard += got
        return self._judge() if len(self._heard) == _ANSWER else None

    def _judge(self) -> int:
        theirs, rank, proof = self._heard[:NONCE], self._heard[NONCE:-MAC], self._heard[-MAC:]
        if not hmac.compare_digest(proof, _sign(self._word, b"learner", self._nonce, theirs, rank)):
            raise TorchrunStranger
        self._say(_sign(self._word, b"rank 0", theirs, self._nonce))
        self.end.setblocking(True)
        return int(_RANK.unpack(rank)[0])

    def _say(self, words: bytes) -> None:
        """So few fit into the buffer of a new connection."""
        try:
            self.end.send(words)
        except OSError:
            return  # its end is noticed by reading


def introduce(end: socket.socket, rank: int, word: bytes) -> None:
    """A learner's part."""
    end.settimeout(HELLO)
    mine, packed = secrets.token_bytes(NONCE), _RANK.pack(rank)
    theirs = _exactly(end, NONCE)
    end.sendall(mine + packed + _sign(word, b"learner", theirs, mine, packed))
    if not hmac.compare_digest(_exactly(end, MAC), _sign(word, b"rank 0", mine, theirs)):
        raise LostError(f"what listens at {end.getpeername()} is not rank 0 of this run; start the run again")
    end.settimeout(None)


def _sign(word: bytes, side: bytes, *parts: bytes) -> bytes:
    return hmac.digest(word, side + b"".join(parts), "sha256")


def _exactly(end: socket.socket, length: int) -> bytes:
    heard = b""
    while len(heard) < length:
        try:
            got = end.recv(length - len(heard))
        except OSError as error:
            raise LostError(f"rank 0 does not answer: {error}; start the run again") from error
        if not got:
            raise LostError("rank 0 has closed the connection before it began; start the run again")
        heard += got
    return heard
