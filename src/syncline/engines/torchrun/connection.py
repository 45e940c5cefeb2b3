"""Connect the ranks of a run under torchrun with rank 0, and carry plain data between them.

Ranks of one host meet at a Unix socket in a folder of mode 0700, ranks of several hosts over TCP at the master's address. torchrun's
store, which the whole network can read and write, holds where that is. The secret of several hosts is SYNCLINE_SECRET;
without it a token lies in the store, and the run is as open as torch's own object collectives.

A frame is msgpack of one dataclass of `KINDS`, checked against its annotations, and the bytes of its tensors. Decoding a frame
runs none of the sender's code; only what learners' functions return is pickled, inside `Left` and `Outcome`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import struct
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import msgspec
import numpy
import torch
from msgspec.msgpack import Ext
from torch import Tensor

from syncline import messages as m
from syncline.engines.authentication import RUN, Listener, Secret, Stranger, introduce
from syncline.engines.run import Outcome
from syncline.engines.torchrun.rank_and_store import TorchrunPlace
from syncline.errors import LearnerError, LostError, RunError, SynclineWarning, UsageError
from syncline.roles.allreduce_coordinator import Deeper, Meet, PeerClosed, PeerCut, PeerEpoch, PeerTable

HELLO = 60.0  # seconds that a rank waits for rank 0's part of the handshake
SHORTEST = 16  # characters of SYNCLINE_SECRET
SOCKET = "rank0"
_HEAD = struct.Struct("!BQ")  # index in KINDS, bytes of msgpack
_TENSOR, _DTYPE = 1, 2  # msgpack extensions

# -- messages ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of a rank."""

    rank: int


@dataclass(frozen=True, slots=True)
class RankLeft:
    """A rank's function has returned, after `calls` collectives and `steps` steps."""

    value: bytes | None  # pickled
    problem: str  # why there is no value
    calls: int
    steps: int
    signal: int = 0  # the signal that ended the run early


@dataclass(frozen=True, slots=True)
class Apart:
    """A rank takes part in no collective after its first `calls`; ranks that wait in a later one must fail."""

    rank: int
    calls: int
    steps: int = 0
    what: str = ""  # the meeting in which the rank waits; empty: its function has returned


@dataclass(frozen=True, slots=True)
class StopRun:
    """The run is to end."""


@dataclass(frozen=True, slots=True)
class MeetingValues:
    """What all ranks brought to a meeting, by rank."""

    values: list[Any]


@dataclass(frozen=True, slots=True)
class RunFailure:
    """The error that ends the run, with the last weights where they are known."""

    kind: str
    arguments: list[Any]
    outcome: Outcome | None = None

    @classmethod
    def of(cls, error: BaseException) -> RunFailure:
        if type(error).__name__ in _ERRORS:
            return cls(type(error).__name__, list(error.args), getattr(error, "outcome", None))
        return cls(RunError.__name__, [str(error)])

    def error(self) -> RunError:
        found = _ERRORS[self.kind](*self.arguments)
        found.outcome = self.outcome
        return found


_ERRORS: dict[str, type[RunError]] = {kind.__name__: kind for kind in (RunError, LearnerError, LostError)}

KINDS: tuple[type, ...] = (
    *(Hello, Meet, RankLeft, RunFailure, Apart, StopRun, MeetingValues, Outcome),
    *(m.Raised, m.Log, m.Warned, m.Saved, PeerTable, PeerEpoch, PeerCut, PeerClosed, Deeper),
)


def pickled(value: Any) -> tuple[bytes | None, str]:
    """Return the pickle of what a learner's function returned, or why there is none."""
    try:
        return cloudpickle.dumps(value), ""
    except Exception as error:
        return None, f"{type(value).__name__}: {' '.join(str(error).split())}"


def unpickled(returned: Mapping[int, bytes | None]) -> dict[int, Any]:
    """Return what the learners' functions returned, by rank; warn of a value that cannot be read here."""
    found: dict[int, Any] = {}
    for rank, value in returned.items():
        try:
            found[rank] = None if value is None else cloudpickle.loads(value)
        except Exception as error:
            found[rank] = None
            text = f"what learner {rank} returned cannot be read here, result.returned[{rank}] is None: {error!r}"
            warnings.warn(text, SynclineWarning, stacklevel=2)
    return found


# -- frames --------------------------------------------------------------------------------------------------


def encode(message: Any) -> tuple[bytes, list[Tensor]]:
    """Return the head and msgpack of a frame, and its tensors, whose bytes follow in this order."""
    tensors: list[Tensor] = []

    def extend(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value.detach().cpu().contiguous())
            return Ext(_TENSOR, msgspec.msgpack.encode((_name(value.dtype), tuple(value.shape))))
        if isinstance(value, torch.dtype):
            return Ext(_DTYPE, _name(value).encode())
        if isinstance(value, numpy.generic):
            return value.item()
        raise UsageError(
            f"{type(message).__name__} holds a value of type {type(value).__name__}, which does not travel between ranks; "
            "numbers, strings, tensors, lists and dicts of them do"
        )

    body = msgspec.msgpack.encode(message, enc_hook=extend)
    return _HEAD.pack(KINDS.index(type(message)), len(body)) + body, tensors


def decode(kind: int, body: bytes) -> tuple[Any, list[Tensor]]:
    """Return the message, and its tensors in the order in which their bytes follow; raises ValueError."""
    tensors: list[Tensor] = []

    def extended(code: int, data: memoryview) -> Any:
        if code == _TENSOR:
            name, shape = msgspec.msgpack.decode(data, type=tuple[str, tuple[int, ...]])
            tensors.append(torch.empty(shape, dtype=_dtype(name)))
            return tensors[-1]
        if code == _DTYPE:
            return _dtype(bytes(data).decode())
        raise ValueError(f"unknown extension {code}")

    message: Any = msgspec.msgpack.decode(body, type=KINDS[kind], dec_hook=_checked, ext_hook=extended)
    return message, tensors


def as_brought(value: Any, values: list[Any]) -> list[Any]:
    """Return what all ranks brought to a meeting as records of the kind that this rank brought."""
    if not is_dataclass(value):
        return values
    return [msgspec.convert(each, type(value), dec_hook=_checked) for each in values]


def _checked(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")
    return value


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"unknown dtype {name!r}")
    return found


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


class ControlConnection:
    """One end of an authenticated connection. `send` may be called from several threads, `receive` from one."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        if end.family != socket.AF_UNIX:  # a host that vanishes is noticed within four seconds
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, seconds in (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3)):
                end.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 4000)
        self._lock = threading.Lock()

    def send(self, message: Any) -> None:
        """Raise OSError when the other end is gone."""
        frame, tensors = encode(message)
        with self._lock:
            self.socket.sendall(frame)
            for tensor in tensors:
                self.socket.sendall(_bytes_of(tensor))

    def receive(self) -> Any:
        """Raise EOFError or OSError when the other end is gone or sends something else."""
        kind, length = _HEAD.unpack(self._exactly(bytearray(_HEAD.size)))
        try:
            if kind >= len(KINDS):
                raise ValueError(f"unknown kind {kind}")
            message, tensors = decode(kind, self._exactly(bytearray(length)))
        except (ValueError, RuntimeError, MemoryError, OverflowError) as error:  # torch's and msgspec's, too
            raise OSError(f"what came is no message of this version: {error}") from error
        for tensor in tensors:
            self._exactly(_bytes_of(tensor))
        return message

    def _exactly(self, into: Any) -> Any:
        left = memoryview(into)
        while left:
            got = self.socket.recv_into(left)
            if not got:
                raise EOFError
            left = left[got:]
        return into

    def close(self) -> None:
        self.socket.close()


# -- how rank 0 is found -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Address:
    """Where rank 0 listens, as the store holds it: readable and writable by the whole network."""

    folder: str = ""  # of the Unix socket, where all ranks are on one host
    port: int = 0  # elsewhere, at the master's address
    run: bytes = b""  # the run's name
    token: bytes = b""  # the run's key, where SYNCLINE_SECRET is not set

    def text(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def of(cls, text: bytes) -> Address:
        return msgspec.json.decode(text, type=cls)

    def remove(self) -> None:
        """Remove the folder with the socket."""
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)


def listen(place: TorchrunPlace, welcome: Callable[[socket.socket], None]) -> tuple[Listener, Address]:
    """Listen for the ranks of one run; rank 0 calls it, and removes the address when all have come."""
    if place.one_host:
        folder = tempfile.mkdtemp(prefix="syncline-")  # of mode 0700
        end = socket.socket(socket.AF_UNIX)
        with _short_path(folder) as path:
            end.bind(path)
        end.listen(128)
        return Listener(end, None, welcome), Address(folder)
    words = _words()
    secret = Secret.shared(os.urandom(RUN), words) if words else Secret.new()
    if not words:
        warnings.warn(
            "SYNCLINE_SECRET is not set and the ranks are on several hosts: whoever can read torchrun's store can join this run "
            "and execute code in it. Set it to the same words on all hosts, such as the output of 'openssl rand -hex 32', or "
            "run in a network that strangers cannot reach",
            SynclineWarning,
            stacklevel=2,
        )
    try:  # only where all hosts reach rank 0: at the address they all know
        listener = Listener(place.master, secret, welcome)
    except OSError:  # a name that is not this host's own, behind a translation
        listener = Listener("", secret, welcome)
    return listener, Address(port=listener.address[1], run=secret.run, token=b"" if words else secret.key)


def reach(place: TorchrunPlace, address: Address) -> ControlConnection:
    """Connect to rank 0, which must prove itself, too. Nothing in the address is trusted but where to look."""
    secret = None if place.one_host else _secret(place, address)
    where = f"the socket in {address.folder!r}" if secret is None else f"{place.master}:{address.port}"
    end = socket.socket(socket.AF_UNIX) if secret is None else None
    try:
        if end is None:
            end = socket.create_connection((place.master, address.port), timeout=None)
        else:
            with _short_path(address.folder) as path:
                end.connect(path)
        introduce(end, secret, HELLO)
    except (OSError, Stranger) as error:
        if end is not None:
            end.close()
        advice = (
            "TMPDIR must be the same on all ranks" if secret is None else "SYNCLINE_SECRET must be the same"
        )
        raise LostError(
            f"rank {place.rank} on {socket.gethostname()} cannot reach rank 0 of this run at {where}: {error}. {advice}, and "
            "all ranks must be started together"
        ) from error
    end.settimeout(None)
    return ControlConnection(end)


def _secret(place: TorchrunPlace, address: Address) -> Secret:
    words = _words()
    if bool(words) == bool(address.token):  # a forged address must not talk this rank out of its secret
        has, lacks = (place.rank, 0) if words else (0, place.rank)
        raise UsageError(
            f"rank {has} has SYNCLINE_SECRET and rank {lacks} has not (seen by rank {place.rank} on {socket.gethostname()}): "
            "set the same on all hosts"
        )
    return Secret.shared(address.run, words) if words else Secret(address.run, address.token)


def _words() -> str:
    words = os.environ.get("SYNCLINE_SECRET", "")
    if 0 < len(words) < SHORTEST:
        raise UsageError(
            f"SYNCLINE_SECRET has {len(words)} characters, which can be guessed; use {SHORTEST} or more, such as the output of "
            "'openssl rand -hex 32'"
        )
    return words


@contextlib.contextmanager
def _short_path(folder: str) -> Iterator[str]:
    """A path to the socket of less than the 108 bytes that a Unix socket's address has, however long the folder's is."""
    inside = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield str(Path(f"/proc/self/fd/{inside}", SOCKET))
    finally:
        os.close(inside)
