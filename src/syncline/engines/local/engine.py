"""The local engine's front door: checks that this machine can run it, then starts a supervisor."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping

from syncline.dial import Sync
from syncline.engines import live_runs as live
from syncline.engines.local.allreduce_supervisor import AllReduceSupervisor
from syncline.engines.local.batch_supervisor import BatchSupervisor
from syncline.engines.local.host_interface import Machines
from syncline.engines.local.supervisor import Supervisor
from syncline.engines.local.supervisor_base import RunSupervisor
from syncline.engines.run import Engine, Handle, Outcome, RunSpec
from syncline.errors import UsageError
from syncline.messages import Statistics


class LocalHandle(Handle):
    """A run on this machine's processes."""

    def __init__(
        self, spec: RunSpec, crashes: Mapping[str, int] | None = None, machines: Machines | None = None
    ) -> None:
        self._run: RunSupervisor
        if spec.batch is not None:
            self._run = BatchSupervisor(spec, crashes)
        elif spec.plan.topology.fixed_members:
            self._run = AllReduceSupervisor(spec)
        else:
            self._run = Supervisor(spec, crashes, machines)
        self._run.prepare()
        self._thread = threading.Thread(target=self._main, name="syncline-supervisor", daemon=True)
        live.began(self)
        self._thread.start()

    def _main(self) -> None:
        try:
            self._run.main()
        finally:
            live.ended(self)
            self._closed()

    def _closed(self) -> None:
        """Nothing of the run is left here; what else belongs to it may go."""

    def wait(self, timeout: float | None = None) -> Outcome:
        if not self._run.done.wait(timeout):
            raise TimeoutError(f"the run goes on after {timeout} s")
        self._thread.join()
        if self._run.error is not None:
            raise self._run.error
        return self._run.outcome

    @property
    def done(self) -> bool:
        return self._run.done.is_set()

    def stop(self) -> None:
        self._run.stop()

    def interrupt(self, signal: int) -> None:
        self._run.stop(interrupted=True)

    def end(self, seconds: float) -> None:
        if not self._run.done.wait(seconds):
            self._run.command(lambda: self._run.fail(KeyboardInterrupt()))
            self._run.done.wait(10)
        self._thread.join(1)

    def add_learners(self, count: int) -> None:
        self._run.add_learners(count)

    def change(self, sync: Sync) -> None:
        self._run.change(sync)

    def statistics(self) -> Statistics:
        return self._run.ask_statistics()

    def pids(self) -> dict[str, int]:
        """Process ids by "learner r", "shard s" and so on."""
        return {
            f"{process.role} {process.rank}": process.pid
            for process in self._run.processes
            if process.state == "running"
        }


class Local(Engine):
    """Processes and shared memory on this machine; needs no daemon.

    `crashes` is for tests: {"learner 1": n} makes that process die in its n-th write to the exchange.
    """

    def __init__(self, *, crashes: Mapping[str, int] | None = None) -> None:
        self._crashes = crashes

    def start(self, spec: RunSpec) -> LocalHandle:
        check_platform("local")
        return LocalHandle(spec, self._crashes)


def check_platform(engine: str) -> None:
    if not sys.platform.startswith("linux"):
        raise UsageError(
            f'engine="{engine}" needs Linux (memfd, pidfd), this is {sys.platform}; use engine="sim"'
        )
