"""Authenticate connections: both ends prove that they know the run's secret, or that one user runs both.

Over TCP each end signs the other's fresh nonce, so that a recorded handshake cannot be replayed. Over a Unix socket the kernel
names the other end's user, and no secret is needed. A stranger cannot block others: every handshake runs on its own thread,
is limited to a few seconds, and the oldest of too many is ended. Not responsible for frames, nor for encryption: there is none.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

HELLO = b"syncline cluster 1\n"
NONCE = MAC = 32
RUN, KEY = 8, 32  # bytes of a run's name, and of its key
SECONDS = 5.0  # that a handshake may take
WAITING = 64  # connections that are being heard at once
PAUSE = 0.2  # seconds before the next try after a failed accept()

logger = logging.getLogger(__name__)


class Stranger(Exception):
    """The other end does not know the secret, or is something else altogether."""


@dataclass(frozen=True, slots=True)
class Secret:
    """Of one run: its name, and what only its own processes know. Never printed."""

    run: bytes
    key: bytes

    @classmethod
    def new(cls) -> Secret:
        return cls(os.urandom(RUN), os.urandom(KEY))

    @classmethod
    def shared(cls, run: bytes, words: str) -> Secret:
        """Make the secret of one run from words that all its hosts know."""
        return cls(run, hashlib.sha256(words.encode()).digest())

    def __repr__(self) -> str:
        return f"Secret(run={self.run.hex()})"

    def sign(self, side: bytes, theirs: bytes, mine: bytes) -> bytes:
        return hmac.digest(self.key, side + self.run + theirs + mine, "sha256")


def check_user(end: socket.socket) -> None:
    """Raise Stranger unless the process at the other end of a Unix socket belongs to this process's user."""
    _, user, _ = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if user != os.geteuid():
        raise Stranger(f"it runs as user {user}, this process as user {os.geteuid()}")


def accept(end: socket.socket, secret: Secret | None) -> None:
    """The listening side's part; raises Stranger. Without a secret `end` is a Unix socket."""
    if secret is None:
        return check_user(end)
    deadline = time.monotonic() + SECONDS
    nonce = os.urandom(NONCE)
    _say(end, HELLO + nonce, deadline)
    theirs, proof = _hear(end, NONCE, deadline), _hear(end, MAC, deadline)
    if not hmac.compare_digest(proof, secret.sign(b"caller", nonce, theirs)):
        raise Stranger("it does not know the run's secret")
    _say(end, secret.sign(b"listener", theirs, nonce), deadline)


def introduce(end: socket.socket, secret: Secret | None, seconds: float | None = None) -> None:
    """The connecting side's part; raises Stranger. Without a secret `end` is a Unix socket."""
    if secret is None:
        return check_user(end)
    deadline = time.monotonic() + (seconds or SECONDS)
    if _hear(end, len(HELLO), deadline) != HELLO:
        raise Stranger("what listens there is no agent of Syncline")
    theirs, nonce = _hear(end, NONCE, deadline), os.urandom(NONCE)
    _say(end, nonce + secret.sign(b"caller", theirs, nonce), deadline)
    if not hmac.compare_digest(_hear(end, MAC, deadline), secret.sign(b"listener", nonce, theirs)):
        raise Stranger("what listens there does not know the run's secret")


def connect(address: tuple[str, int], secret: Secret) -> socket.socket:
    """A connection to one of the run's own; raises OSError or Stranger."""
    end = socket.create_connection(address, timeout=SECONDS)
    try:
        introduce(end, secret)
    except BaseException:
        end.close()
        raise
    end.settimeout(None)
    return end


def _say(end: socket.socket, words: bytes, deadline: float) -> None:
    with _patience(end, deadline):
        end.sendall(words)


def _hear(end: socket.socket, length: int, deadline: float) -> bytes:
    heard = b""
    while len(heard) < length:
        with _patience(end, deadline):
            got = end.recv(length - len(heard))
        if not got:
            raise Stranger("it closed the connection in the middle of the handshake")
        heard += got
    return heard


@contextlib.contextmanager
def _patience(end: socket.socket, deadline: float) -> Iterator[None]:
    left = deadline - time.monotonic()
    if left <= 0:
        raise Stranger("it did not finish the handshake in time")
    end.settimeout(left)
    try:
        yield
    except TimeoutError as error:
        raise Stranger("it did not finish the handshake in time") from error
    except OSError as error:
        raise Stranger(f"the connection broke: {error.strerror or error}") from error


class Listener:
    """Accept connections of the run; `welcome` gets each authenticated one on its handshake's thread.

    `where` is a host's name or a socket that listens already; without a secret it is a Unix socket. Strangers are counted,
    and the first is logged. A failed accept() (no file descriptor left, a caller that has hung up) is logged and tried
    again: only `close` ends the listener.
    """

    def __init__(
        self, where: str | socket.socket, secret: Secret | None, welcome: Callable[[socket.socket], None]
    ) -> None:
        self._secret, self._welcome = secret, welcome
        if isinstance(where, str):
            where = socket.create_server((where, 0), backlog=128)
        self._socket = where
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self.strangers = 0
        self._lock = threading.Lock()
        self._heard: list[socket.socket] = []  # the oldest first
        self._closed = threading.Event()
        threading.Thread(target=self._accept, name="syncline-listener", daemon=True).start()

    def _accept(self) -> None:
        failed = ""  # why the last try failed: a lasting failure is logged once
        while not self._closed.is_set():
            try:
                end, _ = self._socket.accept()
                self._begin(end)
                failed = ""
            except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
                if str(error) != failed and not self._closed.is_set():
                    words = "accepting a connection at %s failed (%s); trying again every %.1f s"
                    logger.warning(words, self.address, error, PAUSE)
                failed = str(error)
                self._closed.wait(PAUSE)

    def _begin(self, end: socket.socket) -> None:
        """Start a thread for the handshake; the oldest of too many handshakes is ended."""
        with self._lock:
            self._heard.append(end)
            crowd = self._heard[:-WAITING]
        for oldest in crowd:
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)
        try:
            threading.Thread(target=self._hear, args=(end,), daemon=True).start()
        except RuntimeError:
            with self._lock:
                self._heard.remove(end)
            end.close()
            raise

    def _hear(self, end: socket.socket) -> None:
        try:
            accept(end, self._secret)
        except Stranger as error:
            end.close()
            with self._lock:
                self.strangers += 1
                self._heard.remove(end)
                first = self.strangers == 1
            if first and not self._closed.is_set():
                logger.warning(
                    "refused a connection at %s: %s; later ones are only counted", self.address, error
                )
            return
        with self._lock:
            self._heard.remove(end)
        end.settimeout(None)
        self._welcome(end)

    def close(self) -> None:
        """Accept nothing more, and end handshakes that are under way."""
        self._closed.set()
        with self._lock:
            heard = list(self._heard)
        for end in (self._socket, *heard):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._socket.close()
