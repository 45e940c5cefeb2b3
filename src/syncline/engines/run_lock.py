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

LOCK = "run.lock"


class RunLock:
    """Held from the beginning; raises where somebody else has it, or OSError where nothing can be written."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / LOCK
        while not self._take():
            continue
        self._file.truncate(0)
        self._file.write(
            json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "started": time.time()})
        )
        self._file.flush()

    def _take(self) -> bool:
        """False where the one before took its file away meanwhile."""
        self._file = self._path.open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = self._holder()
            self._file.close()
            raise UsageError(_taken(self._path.parent, holder)) from None
        except OSError:  # no locks there
            return True
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self._file.fileno()), os.stat(self._path)):
                return True
        self._file.close()
        return False

    def _holder(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            self._file.seek(0)
            found = json.loads(self._file.read())
            return found if isinstance(found, dict) else {}
        return {}

    def release(self) -> None:
        """The file goes, too; only a process that was killed leaves one."""
        if not self._file.closed:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
                fcntl.flock(self._file, fcntl.LOCK_UN)  # also for processes that were forked meanwhile
            self._file.close()


def _taken(folder: Path, holder: dict[str, Any]) -> str:
    pid, host, started = (holder.get(key) for key in ("pid", "host", "started"))
    since = f" since {time.ctime(started)}" if isinstance(started, int | float) else ""
    return (
        f"{folder} holds a run that is alive: process {pid} on {host}{since}. Wait for it, end it (kill {pid} leaves a last "
        "checkpoint), or give another run_dir"
    )
