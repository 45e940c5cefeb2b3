"""Which file holds a piece of this process's memory, and mapping it again, in the same way, in another.

A piece is found by its address in /proc/self/maps. It may travel as its place in the file if one mapping covers it,
the file could be opened again and is the mapped one, and, where the mapping is private, none of the piece's pages
was written to (/proc/self/pagemap): then the file holds these bytes. Whatever cannot be known means no, and the piece
is copied. Not responsible for what a piece is part of.
"""

from __future__ import annotations

import mmap
import os
import stat
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from syncline.errors import RunError, UsageError

PAGE = mmap.PAGESIZE
MOST_DESCRIPTORS = 128  # of files without a name: a message takes 253 descriptors in all
REMEDY = "keep the file until the run ends, or give the learners a copy (np.array(…), tensor.clone())"


class Piece(NamedTuple):
    """Memory of this process."""

    address: int
    nbytes: int
    trained: bool  # every learner writes into its own


class FilePlace(NamedTuple):
    """A piece in a file: which of the mappings, and where in it."""

    mapping: int
    position: int


@dataclass(frozen=True, slots=True)
class FileMapping:
    """A mapping as another process makes it again."""

    path: str | None  # None: the file has no name, its descriptor travels
    file: tuple[int, int]  # device and inode
    changed: int | None  # when; None: it is written to meanwhile
    offset: int
    length: int
    shared: bool
    writable: bool

    def map(self, descriptor: int | None) -> mmap.mmap:
        """As it was mapped, or a clear error; the descriptor is closed."""
        fd = self._reopened() if descriptor is None else descriptor
        try:
            flags = mmap.MAP_SHARED if self.shared else mmap.MAP_PRIVATE
            prot = mmap.PROT_READ | (mmap.PROT_WRITE if self.writable else 0)
            return mmap.mmap(fd, self.length, flags=flags, prot=prot, offset=self.offset)
        finally:
            os.close(fd)

    def _reopened(self) -> int:
        assert self.path is not None
        try:
            fd = _open(self.path, write=self.shared and self.writable)
        except OSError as error:
            raise RunError(f"{self.path}, mapped by the caller: {error.strerror}; {REMEDY}") from error
        state = os.fstat(fd)
        if (state.st_dev, state.st_ino) != self.file:
            wrong = "is another file by now"
        elif state.st_size < self.offset + self.length:
            wrong = f"has {state.st_size:,} bytes of {self.offset + self.length:,}"
        elif self.changed not in (None, state.st_mtime_ns):
            wrong = "has changed since the run began"
        else:
            return fd
        os.close(fd)
        raise RunError(f"{self.path}, mapped by the caller, {wrong}; {REMEDY}")


@dataclass(frozen=True, slots=True)
class _Range:
    """Neighbouring lines of /proc/self/maps that continue each other."""

    low: int
    high: int
    mode: str  # rw-s: shared, r--p: private
    offset: int
    file: tuple[bytes, bytes]  # device and inode, which on some file systems are not those of stat
    path: str

    @property
    def shared(self) -> bool:
        return self.mode[3] == "s"

    @property
    def writable(self) -> bool:
        return self.mode[1] == "w"

    def continued(self, other: _Range) -> bool:
        same = (self.file, self.mode, self.high) == (other.file, other.mode, other.low)
        return same and self.offset + self.high - self.low == other.offset


class Files(NamedTuple):
    """The files that hold pieces of memory. `mappings` and `descriptors` have to travel."""

    places: list[FilePlace | None]
    mappings: list[FileMapping]
    descriptors: list[int]  # of the mappings without a path, in their order


def find_files(pieces: Sequence[Piece]) -> Files:
    now = _ranges() if pieces else []
    ranges = [_range_of(piece, now) for piece in pieces]
    opened = _confirmed(_opened(found for found in ranges if found is not None))
    written = {found.file for found in opened if found.shared and found.writable}
    files = Files([], [], [])
    for found, (fd, path) in opened.items():
        state = os.fstat(fd)
        mapping = FileMapping(
            path=path,
            file=(state.st_dev, state.st_ino),
            changed=None if found.file in written else state.st_mtime_ns,
            offset=found.offset,
            length=max(0, min(found.high - found.low, state.st_size - found.offset)),
            shared=found.shared,
            writable=found.writable,
        )
        files.mappings.append(mapping)
        if path is None:
            files.descriptors.append(fd)
        else:
            os.close(fd)
    numbers = {found: number for number, found in enumerate(opened)}
    try:
        for piece, lies in zip(pieces, ranges, strict=True):
            if lies is not None and lies in numbers:
                files.places.append(_place(piece, lies, numbers[lies], files.mappings))
            else:
                files.places.append(None)
    except UsageError:
        for fd in files.descriptors:
            os.close(fd)
        raise
    return files


def _place(piece: Piece, found: _Range, number: int, mappings: list[FileMapping]) -> FilePlace | None:
    position, length = piece.address - found.low, mappings[number].length
    beyond = position + piece.nbytes - length
    if beyond > -length % PAGE:  # reading there kills the process
        raise UsageError(
            f"{found.path}, given to the learners, was cut after it was mapped: {beyond:,} bytes are missing"
        )
    return FilePlace(number, position) if beyond <= 0 else None


def _ranges() -> list[_Range]:
    """The file-backed memory of this process, by address."""
    found: list[_Range] = []
    with suppress(OSError), open("/proc/self/maps", "rb") as file:
        for line in file.read().split(b"\n")[:-1]:  # no other character ends a line: names may hold them
            span, mode, offset, device, inode, *path = line.split(None, 5)
            if inode == b"0" or not path:
                continue
            low, high = (int(bound, 16) for bound in span.split(b"-"))
            name = os.fsdecode(path[0])
            new = _Range(low, high, mode.decode(), int(offset, 16), (device, inode), name)
            if found and found[-1].continued(new):
                found[-1] = replace(found[-1], high=high)
            else:
                found.append(new)
    return found


def _range_of(piece: Piece, ranges: list[_Range]) -> _Range | None:
    """The mapping whose file holds this piece's bytes."""
    index = bisect_right(ranges, piece.address, key=lambda found: found.low) - 1
    if piece.nbytes == 0 or index < 0 or piece.address + piece.nbytes > ranges[index].high:
        return None
    found = ranges[index]
    if piece.trained and (found.shared or not found.writable):
        return None
    if not found.shared and _written(piece):
        return None
    return found


def _written(piece: Piece) -> bool:
    """A page of a private mapping is no longer the file's: it is in memory or swapped out, and its own."""
    first, last = piece.address // PAGE, -(-(piece.address + piece.nbytes) // PAGE)
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as file:
            file.seek(first * 8)
            for start in range(first, last, 1 << 16):
                wanted = min(1 << 16, last - start)
                pages = np.frombuffer(file.read(wanted * 8), np.uint64)
                there, of_file = pages >> np.uint64(62) != 0, pages >> np.uint64(61) & np.uint64(1) != 0
                if len(pages) != wanted or bool((there & ~of_file).any()):
                    return True
    except OSError:
        return True
    return False


def _opened(ranges: Iterable[_Range]) -> dict[_Range, tuple[int, str | None]]:
    """A descriptor of each range's file, by its path or through one that is open; None in place of that path."""
    found: dict[_Range, tuple[int, str | None]] = {}
    unnamed = []
    for each in dict.fromkeys(ranges):
        with suppress(OSError):
            if stat.S_ISREG(os.stat(each.path).st_mode):  # opening a device could do anything
                found[each] = _open(each.path, write=each.shared and each.writable), each.path
        if each not in found:
            unnamed.append(each)
    by_inode = _open_inodes() if unnamed else {}
    for each in unnamed[:MOST_DESCRIPTORS]:
        with suppress(OSError, KeyError):
            name = by_inode[each.file[1]]
            found[each] = _open(name, write=each.shared and each.writable), None
    return found


def _open_inodes() -> dict[bytes, str]:
    """Files that this process has open, by inode; a mapping made in Python or by torch keeps its file open."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        name = f"/proc/self/fd/{number}"
        with suppress(OSError):
            state = os.stat(name)
            if stat.S_ISREG(state.st_mode):
                found[b"%d" % state.st_ino] = name
    return found


def _confirmed(opened: dict[_Range, tuple[int, str | None]]) -> dict[_Range, tuple[int, str | None]]:
    """Those whose file is the mapped one: mapped again, both look alike; the others are closed."""
    probes: dict[_Range, np.ndarray] = {}
    for wanted, (fd, _) in opened.items():
        with suppress(OSError, ValueError):  # it is empty by now
            area = mmap.mmap(fd, 1, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
            probes[wanted] = np.frombuffer(area, np.uint8)
    now = _ranges() if opened else []  # reading it takes milliseconds, and most messages map nothing
    kept = {}
    for wanted, (fd, path) in opened.items():
        if wanted in probes:
            found = _range_of(Piece(probes[wanted].ctypes.data, 1, False), now)
            same = found is not None and found.file == wanted.file
        else:
            state = os.fstat(fd)
            device = b"%02x:%02x" % (os.major(state.st_dev), os.minor(state.st_dev))
            same = wanted.file == (device, b"%d" % state.st_ino)
        if same:
            kept[wanted] = fd, path
        else:
            os.close(fd)
    return kept


def _open(path: str, *, write: bool) -> int:
    return os.open(path, (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC)
