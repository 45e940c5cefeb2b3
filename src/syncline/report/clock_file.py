"""clocks.bin: the vector clock of every update (R6), one row for each gradient; written by request.

A row is version, rank and stamp, three little-endian numbers of four bytes, by version. Readable while it grows.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from os import SEEK_END
from pathlib import Path
from typing import Any

import numpy as np

from syncline.errors import UsageError
from syncline.report.event_lines import append_whole

CLOCKS = "clocks.bin"
ROW = np.dtype([("version", "<u4"), ("rank", "<u4"), ("stamp", "<u4")])
Rows = np.ndarray[Any, np.dtype[np.void]]


def read_clocks(folder: str | Path) -> Rows:
    """Fields `version`, `rank` and `stamp`: in that version is a gradient of that rank, computed on version `stamp`."""
    path = Path(folder)
    path = path if path.name == CLOCKS else path / CLOCKS
    if not path.is_file():
        raise UsageError(
            f"{folder}: no {CLOCKS} there; a run keeps vector clocks with clocks=True (--clocks)"
        )
    return _rows(path)


def clock_lines(folder: str | Path) -> Iterator[str]:
    """`12 0:11 3:10`: version 12 is of gradients of ranks 0 and 3, computed on versions 11 and 10."""
    for version, rows in groupby(read_clocks(folder).tolist(), key=lambda row: row[0]):
        yield " ".join([str(version), *(f"{rank}:{stamp}" for _, rank, stamp in rows)])


def _rows(path: Path) -> Rows:
    """Without a last row that is not whole."""
    content = path.read_bytes()
    return np.frombuffer(content[: len(content) // ROW.itemsize * ROW.itemsize], dtype=ROW)


def append_clocks(folder: Path, rows: bytes) -> None:
    """More updates; where the run went back they take the place of what is there. Raises OSError and leaves whole rows."""
    path, last = folder / CLOCKS, 0
    if path.is_file() and path.stat().st_size >= ROW.itemsize:
        with path.open("rb") as file:
            file.seek(-ROW.itemsize, SEEK_END)
            last = int(np.frombuffer(file.read(ROW.itemsize), dtype=ROW)["version"][0])
    first = int(np.frombuffer(rows, dtype=ROW, count=1)["version"][0])
    if first <= last:
        cut_clocks(folder, first - 1)
    append_whole(path, rows)


def cut_clocks(folder: Path, version: int) -> None:
    """The run goes on from that version: what came after it is forgotten."""
    path = folder / CLOCKS
    if path.is_file():
        kept = int(np.searchsorted(_rows(path)["version"], version, side="right"))
        with path.open("r+b") as file:
            file.truncate(kept * ROW.itemsize)
