"""The simulator's front door: a run in virtual time on a given cluster, on a thread of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from syncline import messages as m
from syncline.cluster import Cluster
from syncline.dial import Course, Sync
from syncline.engines import live_runs as live
from syncline.engines.run import Engine, Handle, Outcome, RunSpec
from syncline.errors import RunError, UsageError
from syncline.learn.server_session import check_whole
from syncline.learn.train_and_evaluate import run_training
from syncline.protocols.lifecycle import Faults
from syncline.sim.allreduce import AllReduceSimulation
from syncline.sim.batch_method_run import BatchSimulation
from syncline.sim.batched.shared_model import Ways
from syncline.sim.fault_player import Script, check_script
from syncline.sim.garbage_collection import debris
from syncline.sim.random_states import Random
from syncline.sim.simulation import Simulation
from syncline.sim.timing.allreduce_times import time_all_reduce
from syncline.sim.timing.run_times import Follow, OnUpdate, TimedRun, Timing, time_servers
from syncline.sim.timing.tree_times import time_tree
from syncline.topologies import AllReduce, Servers, Trees, parse_topology

LOOK = 0.05  # seconds between looks whether a run that was asked something has ended
World = Simulation | AllReduceSimulation | BatchSimulation


class SimHandle(Handle):
    """A simulated run on a thread of its own."""

    def __init__(self, engine: Sim, spec: RunSpec) -> None:
        self._world: World | None = None
        self._engine, self._spec = engine, spec
        self._error: BaseException | None = None
        self._outcome: Outcome | None = None
        self._begun = threading.Event()
        self._interrupted = False
        self._thread = threading.Thread(target=self._main, name="syncline-sim", daemon=True)
        live.began(self)
        self._thread.start()

    def _main(self) -> None:
        debris.sweep()
        threads, outside = torch.get_num_threads(), Random()
        torch.set_num_threads(self._spec.threads or 1)
        try:
            self._outcome = self._engine.run(self._spec, self._follow)
        except BaseException as error:
            self._error = error
        finally:
            torch.set_num_threads(threads)
            outside.restore()
            self._begun.set()
            live.ended(self)

    def _follow(self, world: World) -> None:
        self._world = world
        self._begun.set()

    def wait(self, timeout: float | None = None) -> Outcome:
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the run goes on after {timeout} s")
        if self._error is not None:
            raise self._error
        assert self._outcome is not None
        self._outcome.interrupted |= self._interrupted
        return self._outcome

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def _ask(self, command: Callable[[Any], None]) -> None:
        """Between two events of the run."""
        self._begun.wait()
        if self._world is not None:
            self._world.commands.append(command)

    def stop(self) -> None:
        self._ask(lambda world: world.ask_stop())

    def interrupt(self, signal: int) -> None:
        self._interrupted = not self.done
        self.stop()

    def end(self, seconds: float) -> None:
        """Nothing ends a simulated learner's own computation in the middle."""
        self._thread.join(seconds)
        if not self.done and self._world is not None:
            self._ask(lambda world: world.fail(KeyboardInterrupt()))
            self._thread.join(10)

    def add_learners(self, count: int) -> None:
        self._ask(lambda world: world.ask_add(count))

    def change(self, sync: Sync) -> None:
        self._ask(lambda world: world.change(sync))

    def statistics(self) -> m.Statistics:
        self._begun.wait()
        if self._world is None:
            raise RunError("the simulated run did not start")
        if threading.current_thread() is self._thread:
            return self._world.statistics()
        answers: queue.SimpleQueue[m.Statistics] = queue.SimpleQueue()
        self._ask(lambda world: answers.put(world.statistics()))
        while not self.done:
            with contextlib.suppress(queue.Empty):
                return answers.get(timeout=LOOK)
        return self._world.statistics()


class Sim(Engine):
    """Virtual time in one process, the same bits every time.

    `cluster` says what the run is simulated on: a `Cluster`, or a text such as "p775:stragglers=0.1". Without one,
    learners are equal and times fixed (`compute`, `transfer`, `latency`). `script` is what happens to the run ("kill learner 3
    at 40 s; add 2 at 60 s"), `seed` that of the cluster's jitter (by default the run's).

    `check`: what always holds is checked after every event (over servers); what is broken raises an `InvariantError`.
    `train`'s own loop runs as a handler of events; `handlers=False` gives each of its learners a fiber and a copy of the
    model instead, with the same results.
    `batched`: gradients of `train`'s loop are computed many at once when the first is needed, on the run's `device`; the default on a
    GPU. Equal to the others to rounding; a `Ways` says more exactly how.
    `exact`: learners begin anew at every checkpoint, so that a resumed run is the same to the bit, under every dial. The default
    for `train`; functions of `launch` would start from their beginning at each, as they do when resumed.
    """

    virtual = True

    def __init__(
        self,
        cluster: Cluster | str | None = None,
        *,
        script: str | None = None,
        seed: int | None = None,
        check: bool = False,
        handlers: bool = True,
        batched: bool | Ways | None = None,
        exact: bool | None = None,
        compute: float | None = None,
        transfer: float | None = None,
        latency: float | None = None,
    ) -> None:
        fixed = {"compute": compute, "transfer": transfer, "latency": latency}
        given = {name: value for name, value in fixed.items() if value is not None}
        if cluster is not None and given:
            raise UsageError(f"Sim: give a cluster or fixed times, not both: {', '.join(given)}")
        if not isinstance(cluster, Cluster | str | None):
            raise UsageError(f"Sim takes a Cluster or a text such as 'p775', got {type(cluster).__name__}")
        if not isinstance(script, str | None):
            raise UsageError(f"Sim: script is one text with ; between its lines, got {type(script).__name__}")
        if isinstance(seed, bool) or not isinstance(seed, int | None):
            raise UsageError(f"Sim: seed is a whole number, got {seed!r}")
        named = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
        self.cluster = named if named is not None else Cluster.equal(**given)
        self.cluster_name = cluster if isinstance(cluster, str) else self.cluster.name
        self.script, self.seed = script, seed
        self.check, self.handlers, self.batched, self.exact = check, handlers, batched, exact
        Script.of(script)  # refused here, not when the run starts

    def run(self, spec: RunSpec, follow: Callable[[World], None] = lambda world: None) -> Outcome:
        """To its end, from checkpoint to checkpoint where these are exact; `follow` gets each world before it runs."""
        world = self.world(spec)
        while True:
            follow(world)
            outcome = world.run()
            if not isinstance(world, Simulation) or world.next is None:
                return outcome
            storage = dataclasses.replace(spec.storage, restored=world.next)
            world = self.world(dataclasses.replace(spec, storage=storage), previous=world)

    def world(self, spec: RunSpec, previous: Simulation | None = None) -> World:
        """A run that has not begun, or the part after the checkpoint of another world."""
        seed, script = spec.plan.seed if self.seed is None else self.seed, Script.of(self.script)
        if spec.batch is not None:
            return BatchSimulation(spec, self.cluster, script=script, seed=seed)
        if spec.plan.topology.fixed_members:
            return AllReduceSimulation(spec, self.cluster, script=script, seed=seed)
        ways = self.batched if isinstance(self.batched, Ways) else None
        on_gpu = any(torch.device(device).type == "cuda" for device in spec.devices)
        if ways is None and (on_gpu if self.batched is None else self.batched):
            ways = Ways()
        return Simulation(
            spec,
            self.cluster,
            script=script,
            seed=seed,
            check=self.check,
            handlers=self.handlers,
            ways=ways,
            exact=spec.task.function is run_training if self.exact is None else self.exact,
            previous=previous,
        )

    def timing(
        self,
        *,
        parameters: int,
        examples: int,
        learners: int,
        batch_size: int,
        sync: str | Sync | Mapping[int, str | Sync] | Course = "softsync:1",
        shards: int = 1,
        topology: str | None = None,
        layers: Sequence[int] | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        seconds: float | None = None,
        itemsize: int = 4,
        policy: str = "ledger",
        warmstart: int = 0,
        seed: int = 0,
        on_update: OnUpdate | None = None,
        follow: Follow | None = None,
    ) -> Timing:
        """How long a run would take: no gradients, just sizes, for any number of learners and parameters.

        `parameters` of `itemsize` bytes on so many `shards`, or over `topology="allreduce"`, there with the parameters of each of the
        `layers` for `allreduce:layerwise`; `examples` in an epoch. Ends after epochs, updates (`steps`) or
        virtual `seconds`. `on_update` gets each version, its moment and the mean staleness of its gradients;
        `follow`, before it begins, a function that says how far it is and may be called from another thread.
        """
        check_whole("shards", shards)
        run = TimedRun(
            cluster=self.cluster,
            course=Course.of(sync),
            parameters=parameters,
            examples=examples,
            itemsize=itemsize,
            epochs=epochs,
            steps=steps,
            seconds=seconds,
            learners=learners,
            batch_size=batch_size,
            policy=policy,
            warm=warmstart,
            seed=seed if self.seed is None else self.seed,
            on_update=on_update,
            follow=follow,
        )
        script = Script.of(self.script)
        place = parse_topology(topology) if topology is not None else Servers(shards, True)
        if topology is not None and shards != 1:
            raise UsageError(f"timing: give shards={shards} or topology={topology!r}, not both")
        if isinstance(place, Servers):
            if layers is not None:
                raise UsageError(
                    "timing: layers= are those of all-reduce; servers cut the whole table: leave it out"
                )
            return time_servers(run, place.shards, script)
        place.check(run.course, Faults(), clip_norm=None, warm=warmstart)
        if isinstance(place, AllReduce):
            if script.faults or on_update is not None:
                what = "a script" if script.faults else "on_update"
                raise UsageError(
                    f"timing over all-reduce has no events: leave {what} out, or run with gradients"
                )
            return time_all_reduce(run, place, layers)
        assert isinstance(place, Trees)
        if script.faults or layers is not None:
            what = "the script" if script.faults else "layers="
            raise UsageError(f"timing over a tree knows nothing of {what}: leave it out")
        return time_tree(run, place)

    def start(self, spec: RunSpec) -> SimHandle:
        if self.check and spec.batch is not None:
            raise UsageError(
                "Sim(check=True) checks the accounts of folds, sandblaster has none: leave check out"
            )
        if self.check and spec.plan.topology.fixed_members:
            raise UsageError(
                "Sim(check=True) checks the accounts of servers, over all-reduce there are none: leave check out, "
                "or use topology='servers'"
            )
        check_script(Script.of(self.script), spec, self.cluster)
        return SimHandle(self, spec)
