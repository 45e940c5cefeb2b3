"""The simulated twin's front door: a run in virtual time, on a thread of its own.

Equal learners, fixed times; the same bits every time.
"""

from __future__ import annotations

import threading

import torch

from syncline.dial import Sync
from syncline.engines.run import Engine, Handle, Outcome, RunSpec
from syncline.engines.sim.clock import Random, Times
from syncline.engines.sim.world import World
from syncline.errors import RunError, UsageError
from syncline.topology import messages as m


class SimHandle(Handle):
    """A simulated run on a thread of its own."""

    def __init__(self, spec: RunSpec, times: Times, *, check: bool, handlers: bool) -> None:
        self._world: World | None = None
        self._spec, self._times, self._check, self._handlers = spec, times, check, handlers
        self._error: BaseException | None = None
        self._outcome: Outcome | None = None
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run, name="syncline-sim", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        threads, outside = torch.get_num_threads(), Random()
        torch.set_num_threads(self._spec.threads or 1)
        try:
            self._world = World(self._spec, self._times, check=self._check, handlers=self._handlers)
            self._begun.set()
            self._outcome = self._world.run()
        except BaseException as error:
            self._error = error
        finally:
            torch.set_num_threads(threads)
            outside.restore()
            self._begun.set()

    def wait(self, timeout: float | None = None) -> Outcome:
        try:
            self._thread.join(timeout)
        except KeyboardInterrupt:
            self.stop()
            self._thread.join()
            if self._outcome is not None:
                self._outcome.interrupted = True
        if self._thread.is_alive():
            raise TimeoutError(f"the run goes on after {timeout} s")
        if self._error is not None:
            raise self._error
        assert self._outcome is not None
        return self._outcome

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def stop(self) -> None:
        self._begun.wait()
        if self._world is not None:
            self._world.commands.append(lambda world: world.coordinator.stop())

    def add_learners(self, count: int) -> None:
        self._begun.wait()
        if self._world is not None:
            self._world.commands.extend([lambda world: world.add_learner()] * count)

    def change(self, sync: Sync) -> None:
        self._begun.wait()
        if self._world is not None:
            self._world.commands.append(lambda world: world.coordinator.change(sync))

    def statistics(self) -> m.Statistics:
        self._begun.wait()
        if self._world is None:
            raise RunError("the simulated run did not start")
        return self._world.roles[0].statistics()


class Sim(Engine):
    """Virtual time in one process: equal learners, fixed times, the same bits every time.

    `check`: what always holds is checked after every event; what is broken raises an `InvariantError`.
    `train`'s own loop runs as a handler of events; `handlers=False` gives each of its learners a thread and a copy of the
    model instead, with the same results.
    """

    def __init__(
        self,
        *,
        compute: float = 1.0,
        transfer: float = 0.01,
        latency: float = 0.001,
        check: bool = False,
        handlers: bool = True,
    ) -> None:
        for name, value in (("compute", compute), ("transfer", transfer), ("latency", latency)):
            if value < 0:
                raise UsageError(f"Sim: {name} must not be negative, got {value}")
        self._times = Times(compute=compute, transfer=transfer, latency=latency)
        self._check, self._handlers = check, handlers

    def start(self, spec: RunSpec) -> SimHandle:
        return SimHandle(spec, self._times, check=self._check, handlers=self._handlers)
