"""Plays a script of faults (`engines.event_script`) on a run of real processes; seconds are those since the script began."""

from __future__ import annotations

import os
import signal
import threading
import time

from syncline.engines.event_script import Fault, parse_script
from syncline.errors import UsageError
from syncline.messages import ProcessStatistics, Statistics
from syncline.train import Run

POLL = 0.002  # seconds between looks


class Faults:
    """A script of faults, played on a run by a thread of its own."""

    def __init__(self, script: str) -> None:
        self.faults = parse_script(script)
        self.played: list[tuple[Fault, int]] = []  # with the version they were played at
        self.missed: list[Fault] = []  # whose process was not there, or whose moment did not come
        self._killed: set[int] = set()  # pids
        self._thread: threading.Thread | None = None

    def play(self, run: Run) -> Faults:
        """Begin; returns at once. Ends with the run."""
        if cut := [fault.text for fault in self.faults if fault.action == "cut"]:
            raise UsageError(f"'{cut[0]}': links are cut in simulated runs only; leave it out")
        if not run.statistics().processes:
            raise UsageError("faults are played on runs of real processes: use engine='local'")
        self._thread = threading.Thread(target=self._play, args=(run,), name="syncline-faults", daemon=True)
        self._thread.start()
        return self

    def join(self) -> None:
        """All faults are played, or the run is over."""
        if self._thread is not None:
            self._thread.join()

    def _play(self, run: Run) -> None:
        left, started = list(self.faults), time.monotonic()
        while left and not run.done:
            self._look(run, left, time.monotonic() - started)
            time.sleep(POLL)
        self.missed += left

    def _look(self, run: Run, left: list[Fault], now: float) -> None:
        """Carry out what is due; the rest is left."""
        statistics = run.statistics()
        table = statistics.tables.get(0)
        version = table.version if table else -1
        for fault in [fault for fault in left if fault.due(version, now)]:
            if self._carry_out(run, fault, statistics):  # else its process is being replaced, perhaps
                left.remove(fault)
                self.played.append((fault, version))
                if fault.action == "kill":
                    break  # the next one after another look: the run may have gone back

    def _carry_out(self, run: Run, fault: Fault, statistics: Statistics) -> bool:
        if fault.action == "add":
            run.add_learners(fault.count)
        elif fault.action == "change":
            try:
                run.change(fault.dial)
            except UsageError:
                return False
        elif fault.action == "stop":
            run.stop()
        else:
            return self._strike(fault, statistics)
        return True

    def _strike(self, fault: Fault, statistics: Statistics) -> bool:
        process = _find(statistics, fault)
        # a shard that was killed and the run does not know yet: another one now would be the same loss
        shards = [each for each in statistics.processes if each.role == fault.role == "shard"]
        unnoticed = any(each.pid in self._killed and each.state == "running" for each in shards)
        if process is None or process.pid in self._killed or unnoticed:
            return False
        kill = fault.action == "kill"
        if not _signal(process.pid, signal.SIGKILL if kill else signal.SIGSTOP):
            return False
        if kill:
            self._killed.add(process.pid)
        else:
            timer = threading.Timer(fault.length, _signal, args=(process.pid, signal.SIGCONT))
            timer.daemon = True
            timer.start()
        return True


def _find(statistics: Statistics, fault: Fault) -> ProcessStatistics | None:
    """The newest process of that role and rank that still runs."""
    over = ("returned", "raised", "lost", "killed")
    for process in reversed(statistics.processes):
        if (process.role, process.rank) == (fault.role, fault.rank) and process.state not in over:
            if process.machine:
                raise UsageError(f"'{fault.text}': {process.role} {process.rank} is on {process.machine}")
            return process
    return None


def _signal(pid: int, number: int) -> bool:
    """False: it is not there any more."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
