"""What outlives its test: runs, their threads, their processes. For a fixture that fails when there is any."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from syncline.engines import live_runs as live
from syncline.engines.local import forkserver

PATIENCE = 5.0  # seconds that a thread which is on its way out gets


warm: set[int] = set()  # processes that stay from test to test; what they started may not

# Torch's and Python's own, one for each process, which ends them.
KEPT = ("torch/_inductor/compile_worker", "multiprocessing.resource_tracker")


def end_leftovers() -> list[str]:
    """In words; nothing of it is left afterwards."""
    found = [f"a run that goes on ({type(handle).__name__})" for handle in live.end_all()]
    for thread in [thread for thread in threading.enumerate() if thread.name.startswith("syncline-")]:
        thread.join(PATIENCE)
        if thread.is_alive():
            found.append(f"thread {thread.name}")
    stay = {pid for pid in (forkserver.pid(), *warm) if pid is not None}
    for pid in set().union(*map(children, (os.getpid(), *stay))) - stay:
        command = _read(pid, "cmdline").replace("\0", " ").strip()[:200] or "gone"
        if not any(each in command for each in KEPT):
            found.append(f"process {pid}: {command}")
            os.kill(pid, 9)
    return found


def children(pid: int) -> set[int]:
    """Its child processes that live."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            found.update(map(int, task.read_text().split()))
    states = {child: _read(child, "stat").rpartition(")")[2].split()[:1] for child in found}
    return {child for child, state in states.items() if state not in (["Z"], ["X"], [])}


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except OSError:
        return ""
