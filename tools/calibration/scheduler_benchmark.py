"""Microbenchmarks of this machine's scheduler: the slice that a core is given for, and how long a waiting learner keeps it.

No learners: two loops that want the same core, and one that yields.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time

from syncline.engines.local.shared_memory import YIELDS, Waiter, WakeUp

GAP = 0.0003  # seconds: whoever misses so many had lost the core
LOOP = "while True: pass"
USUAL = 0.003  # where no slice's end was seen
LOOKS = 500


def time_slice(seconds: float = 0.3) -> float:
    """How long a process runs while another one wants its core: the median of what is seen."""
    allowed = os.sched_getaffinity(0)
    core = {min(allowed)}
    os.sched_setaffinity(0, core)
    try:
        other = subprocess.Popen([sys.executable, "-S", "-c", LOOP])
        try:
            return statistics.median(_runs(seconds) or [USUAL])
        finally:
            other.kill()
            other.wait()
    finally:
        os.sched_setaffinity(0, allowed)


def _runs(seconds: float) -> list[float]:
    """Lengths of the stretches between two gaps."""
    found: list[float] = []
    start = began = last = time.perf_counter()
    while last < start + seconds:
        now = time.perf_counter()
        if now - last > GAP:
            found.append(last - began)
            began = now
        last = now
    return found[1:]


def spin_seconds() -> float:
    """Of a learner that waits: it yields so many times before it sleeps."""
    bell = WakeUp()
    sleeper, taken = Waiter(bell, yields=1), []
    for _ in range(LOOKS):
        start = time.perf_counter()
        sleeper.wait()
        taken.append(time.perf_counter() - start)
        sleeper.busy()  # the next one yields too
    bell.close()
    return YIELDS["learner"] * statistics.median(taken)
