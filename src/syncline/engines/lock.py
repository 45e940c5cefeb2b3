"""Who is writing to a run folder: a lock that a process holds while its run is alive, and that goes with it.

The system lets go of it also after kill -9. Where a file system has no locks, nobody is kept out.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from syncline.errors import UsageError

LOCK = ".lock"


class RunLock:
    """Held from the beginning; raises where somebody else has it, or OSError where nothing can be written."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / LOCK
        self._made = not self._path.exists()
        self._file = self._path.open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = self._holder()
            self._file.close()
            raise UsageError(_taken(folder, holder)) from None
        except OSError:  # no locks there
            return
        self._sign()

    def _holder(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            self._file.seek(0)
            found = json.loads(self._file.read())
            return found if isinstance(found, dict) else {}
        return {}

    def _sign(self) -> None:
        self._file.truncate(0)
        self._file.write(
            json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "started": time.time()})
        )
        self._file.flush()

    def withdraw(self) -> None:
        """There was no run, after all."""
        if self._made:
            self._path.unlink(missing_ok=True)
        self.release()

    def release(self) -> None:
        if not self._file.closed:
            with contextlib.suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_UN)  # also for processes that were forked meanwhile
            self._file.close()


def _taken(folder: Path, holder: dict[str, Any]) -> str:
    pid, host, started = (holder.get(key) for key in ("pid", "host", "started"))
    since = f" since {time.ctime(started)}" if isinstance(started, int | float) else ""
    return (
        f"{folder} holds a run that is alive: process {pid} on {host}{since}. Wait for it, end it (kill {pid} leaves a last "
        "checkpoint), or give another run_dir"
    )
