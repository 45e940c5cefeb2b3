"""When workers took their steps, in files that outlive a kill -9; the same for Syncline and its peers."""

import os
import statistics
import struct
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path


class Ticker:
    """A worker's own file of times; called once after each step."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = os.open(_file(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __call__(self) -> None:
        os.write(self._file, struct.pack("d", time.monotonic()))


def times(folder: Path, rank: int) -> list[float]:
    """Of all steps so far."""
    try:
        content = _file(folder, rank).read_bytes()
    except FileNotFoundError:
        return []
    return [value for (value,) in struct.iter_unpack("d", content[: len(content) // 8 * 8])]


def count(folder: Path, rank: int, since: float = 0.0) -> int:
    return sum(time > since for time in times(folder, rank))


def usual_gap(ticks: Iterable[float], end: float) -> float:
    """Median time between the steps that were taken before `end`."""
    return statistics.median(later - earlier for earlier, later in pairwise(ticks) if later <= end)


def largest_gap(ticks: list[float], start: float, end: float) -> tuple[float, float]:
    """The longest time without a step that touches start…end, and when it was over; the last gap ends at `end`."""
    known = [*ticks, max(end, ticks[-1])]
    return max(
        (later - earlier, later) for earlier, later in pairwise(known) if later > start and earlier < end
    )


def wait_until(happened: Callable[[], bool], limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while not happened():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _file(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.times"
