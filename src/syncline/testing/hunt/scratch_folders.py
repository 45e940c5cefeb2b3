"""Folders for the checkpoints of the hunt's cases: in memory where there is such a place, and none stays behind.

A folder is locked while its process lives. A process that was killed leaves one; the next that makes one removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

SHARED = "/dev/shm"  # checkpoints need not survive the machine here
PREFIX = "syncline-hunt-"

_swept: set[str] = set()  # places that this process has looked at


def scratch_place() -> str:
    return SHARED if os.path.isdir(SHARED) else tempfile.gettempdir()


@contextlib.contextmanager
def scratch(place: str | None = None) -> Iterator[str]:
    """A folder of this process's own, gone afterwards."""
    place = place or scratch_place()
    if place not in _swept:
        _swept.add(place)
        sweep(place)
    folder, lock = _locked(place)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _locked(place: str) -> tuple[str, int]:
    """A new one; another process may take it for one that was left, between its making and its lock."""
    while True:
        folder = tempfile.mkdtemp(prefix=PREFIX, dir=place)
        if (lock := _lock(folder)) is not None:
            return folder, lock


def _lock(folder: str) -> int | None:
    """An open descriptor that holds it; None if another process does, or it is gone."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.isdir(folder):
            return lock
    except BlockingIOError:
        pass
    os.close(lock)
    return None


def sweep(place: str) -> list[str]:
    """Remove the folders whose processes are gone; their names."""
    removed = []
    for folder in sorted(Path(place).glob(f"{PREFIX}*")):
        with contextlib.suppress(PermissionError):  # another user's
            if (lock := _lock(str(folder))) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)
                removed.append(folder.name)
    return removed
