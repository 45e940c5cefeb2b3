"""Anonymous shared memory: regions that travel by descriptor and vanish with their last process.

Not responsible for what lies in them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from syncline.errors import RunError

PAGE = 4096
LONG_YIELD = 0.0002  # seconds
LOOK_EVERY = 0.002  # seconds of work between looks at watched descriptors
YIELDS = {"learner": 1000, "shard": 200}
"""A learner yields for the length of a small fold, a shard for the time between two learners' gradients: waking a sleeping
core costs more than either."""


def whole_pages(nbytes: int) -> int:
    """At least one; a region of so many bytes holds just that."""
    return max(PAGE, -(-nbytes // PAGE) * PAGE)


class _Descriptor:
    """What other processes get by its descriptor, which goes with it."""

    fd = -1

    def close(self) -> None:
        """Give the descriptor back; a mapping goes with its last user."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self.close()


class Region(_Descriptor):
    """A block of shared memory (`memfd_create`): as bytes, as words, as a uint8 tensor."""

    def __init__(self, nbytes: int, fd: int | None = None) -> None:
        self.nbytes = whole_pages(nbytes)
        if fd is None:
            fd = os.memfd_create("syncline", os.MFD_CLOEXEC)
            try:
                os.ftruncate(fd, self.nbytes)
            except OSError as error:
                os.close(fd)
                raise RunError(f"no shared memory for {self.nbytes:,} bytes: {error.strerror}") from error
        self.fd = fd
        self._map = mmap.mmap(fd, self.nbytes)
        self.bytes = memoryview(self._map)
        self.words = self.bytes.cast("q")

    def tensor(self) -> Tensor:
        return torch.frombuffer(self._map, dtype=torch.uint8)

    def release(self) -> None:
        """Unmap now (a mapping holds a descriptor of its own); legal where no tensor looks at it."""
        self.close()
        self.words.release()
        self.bytes.release()
        self._map.close()


class WakeUp(_Descriptor):
    """Wakes one sleeping process; ringing never blocks and is never lost."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) if fd is None else fd

    def ring(self) -> None:
        with suppress(BlockingIOError):  # the counter is full: it is ringing already
            os.eventfd_write(self.fd, 1)

    def quiet(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self.fd)


class Waiter:
    """How a process waits: it yields a few times, then sleeps until a bell rings or a descriptor is ready."""

    def __init__(self, bell: WakeUp, *, yields: int) -> None:
        self._bell = bell
        self._yields = yields
        self._poll = select.poll()
        self._poll.register(bell.fd, select.POLLIN)
        self._others: set[int] = set()
        self._tries = 0
        self._looked = 0.0

    def watch(self, fd: int) -> None:
        self._poll.register(fd, select.POLLIN)
        self._others.add(fd)

    def busy(self) -> None:
        """Something happened: the next wait yields first again."""
        self._tries = 0

    def turn(self, *, worked: bool, seconds: float = 1.0) -> set[int]:
        """After a round of a loop: go on after work, else wait; the watched descriptors that are ready come back.

        They are looked at every few milliseconds, whatever happens: waits that end while they yield do not look.
        """
        if not worked:
            return self.wait(seconds)
        self._tries = 0
        now = time.monotonic()
        if now - self._looked < LOOK_EVERY:
            return set()
        self._looked = now
        return {fd for fd, _ in self._poll.poll(0)} & self._others

    def wait(self, seconds: float = 1.0) -> set[int]:
        """Yield or sleep once; the watched descriptors that are ready come back."""
        if self._tries < self._yields:
            self._tries += 1
            before = time.monotonic()
            os.sched_yield()
            if time.monotonic() - before > LONG_YIELD:  # others need the core: a sleeper gets it back sooner
                self._tries = self._yields
            return set()
        ready = self._poll.poll(seconds * 1000)
        self._bell.quiet()
        return {fd for fd, _ in ready} & self._others


def _find_fence() -> Callable[[int], None] | None:
    """x86 keeps the order of plain stores; elsewhere a real fence is needed."""
    if platform.machine() in ("x86_64", "AMD64"):
        return None
    try:
        fence = ctypes.CDLL("libatomic.so.1").atomic_thread_fence
    except (OSError, AttributeError) as error:
        raise RunError(
            f"the local engine on {platform.machine()} needs libatomic for memory fences: install libatomic1"
        ) from error
    fence.argtypes, fence.restype = [ctypes.c_int], None
    return fence


class SharedWords:
    """Shared words with one writer each, and records of them; the exchange is built on these five operations."""

    def __init__(self, region: Region, offset: int = 0) -> None:
        self._words = region.words
        self._bytes = region.bytes
        self._offset = offset
        self._fence = _find_fence()

    def load(self, cell: int) -> int:
        value = self._words[self._offset + cell]
        if self._fence:
            self._fence(5)
        return value

    def store(self, cell: int, value: int) -> None:
        """Everything written before is seen before it."""
        if self._fence:
            self._fence(5)
        self._words[self._offset + cell] = value

    def write(self, cell: int, packed: bytes) -> None:
        start = (self._offset + cell) * 8
        self._bytes[start : start + len(packed)] = packed

    def read(self, cell: int, nbytes: int) -> bytes:
        start = (self._offset + cell) * 8
        return bytes(self._bytes[start : start + nbytes])


_left = 0  # operations before this process dies


def crash_at(operation: int) -> None:
    """For tests: this process dies in its n-th write to shared words or records, a record half written."""
    global _left
    _left = operation
    store, write = SharedWords.store, SharedWords.write

    def crashing_store(cells: SharedWords, cell: int, value: int) -> None:
        crash_point()
        store(cells, cell, value)

    def crashing_write(cells: SharedWords, cell: int, packed: bytes) -> None:
        if _left == 1:
            write(cells, cell, packed[: len(packed) // 2])
        crash_point()
        write(cells, cell, packed)

    SharedWords.store = crashing_store  # type: ignore[method-assign,assignment]
    SharedWords.write = crashing_write  # type: ignore[method-assign,assignment]


def crash_point() -> None:
    """For tests: where the process may die."""
    global _left
    _left -= 1
    if _left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
