"""What earlier simulated runs left: worlds are full of cycles, few objects with large tensors, which Python's collector
does not hurry to look for. Swept when the process has grown by much, before the next run.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

MUCH = 128 << 20  # bytes
STATM = Path("/proc/self/statm")


class Garbage:
    """Of one process."""

    def __init__(self) -> None:
        self._least: int | None = None  # bytes that the process had after the last sweep, or at first

    def sweep(self) -> bool:
        """True if the collector was called."""
        size = _resident()
        if self._least is None or size < self._least:
            self._least = size
        if size - self._least <= MUCH:
            return False
        gc.collect()
        self._least = _resident()
        return True


def _resident() -> int:
    """Bytes of memory in use; 0 where the system does not say."""
    try:
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


debris = Garbage()
