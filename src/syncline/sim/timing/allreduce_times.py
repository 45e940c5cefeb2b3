"""Timing only, over all-reduce: iteration by iteration, when learners have computed and when their rings are over.

The costs are those of the simulated collectives (`sim.allreduce`); tests compare the two. No events: an iteration of lockstep
learners follows from the one before. Not responsible for servers (`run_times`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from syncline.engines.run import EpochRecord
from syncline.engines.simulated_times import LearnerTimes
from syncline.errors import UsageError
from syncline.learn.allreduce_reducer import FORWARD
from syncline.protocols.allreduce import plan_buckets
from syncline.protocols.staleness import StalenessClock
from syncline.sim.allreduce import Rings
from syncline.sim.clock import Clock
from syncline.sim.timing.run_times import TimedRun, Timing
from syncline.topologies import AllReduce


class TimedRings:
    """Lockstep learners and their rings; `step` is one iteration of all.

    What is reduced together is a bucket: the share of the gradient's time after which it is there, and its ring's seconds.
    """

    def __init__(self, run: TimedRun, layers: Sequence[int], topology: AllReduce) -> None:
        sync, learners, cluster = run.course.first, run.learners, run.cluster
        if sync.auto or not sync.lockstep:
            raise UsageError(f"timing over all-reduce takes hardsync and delayed:k, got {sync}")
        self._cluster, self._delay, self._seed = cluster, sync.delay, run.seed
        plan = plan_buckets(layers, [""] * len(layers), topology.bucket if topology.layerwise else None)
        sizes = [sum(layers[index] for index in bucket) for bucket in plan]
        rings = Rings(Clock(), cluster, learners, lambda: None)
        self.buckets = [rings.seconds(size) for size in sizes]
        self.moved = rings.moved  # bytes of one iteration
        made = np.cumsum(sizes) / sum(sizes)
        self._shares = FORWARD + (1 - FORWARD) * made if topology.layerwise else np.ones(len(sizes))
        self._pace = [cluster.pace(rank, seed=run.seed, learners=learners) for rank in range(learners)]
        self._ready = np.zeros(learners)
        self._free = 0.0  # when the network is
        # of iterations not applied, for each bucket: when all had come, and when its ring is over
        self._under_way: deque[list[tuple[float, float]]] = deque()
        self._totals = [0.0, 0.0, 0.0]  # compute, communication, waiting
        self.busy = 0.0  # seconds of the network
        self.iterations = self.gradients = self.examples = 0
        self.clock = StalenessClock()

    @property
    def seconds(self) -> float:
        return max(float(self._ready.max()), self._free)

    def step(self, examples: Sequence[int]) -> None:
        """One iteration, with so many examples for each learner."""
        step, cluster = self.iterations, self._cluster
        spent = np.array(
            [
                pace * cluster.one_step(count, rank=rank, step=step, seed=self._seed) if count else 0.0
                for rank, (pace, count) in enumerate(zip(self._pace, examples, strict=True))
            ]
        )
        rings = []
        for share, seconds in zip(self._shares, self.buckets, strict=True):
            met = float((self._ready + share * spent).max())
            self._free = max(self._free, met) + seconds
            self.busy += seconds
            rings.append((met, self._free))
        self._under_way.append(rings)
        self._ready = self._ready + spent
        if len(self._under_way) > self._delay:
            self._apply()
        self._totals[0] += float(spent.sum())
        gradients = sum(count > 0 for count in examples)
        self.clock.fold(step, [step - min(step, self._delay)] * gradients)
        self.iterations += 1
        self.gradients += gradients
        self.examples += sum(examples)

    def _apply(self) -> None:
        """The oldest iteration, bucket by bucket: learners wait for others to come, then for the network."""
        for met, over in self._under_way.popleft():
            before, self._ready = self._ready, np.maximum(self._ready, over)
            stood = self._ready - before
            others = np.clip(met - before, 0.0, stood)
            self._totals[1] += float((stood - others).sum())
            self._totals[2] += float(others.sum())

    def end(self) -> LearnerTimes:
        """What is in flight is applied; all learners' times together."""
        while self._under_way:
            self._apply()
        compute, communication, waiting = self._totals
        return LearnerTimes(
            compute=compute, communication=communication, waiting=waiting, steps=self.gradients
        )


def time_all_reduce(run: TimedRun, topology: AllReduce, layers: Sequence[int] | None) -> Timing:
    """Lockstep, without servers."""
    if len(run.course.dials) > 1:
        raise UsageError(f"timing over all-reduce takes one dial, got {run.course}")
    rings = TimedRings(run, _layer_bytes(run, layers), topology)
    run.begins(lambda: (rings.iterations, rings.seconds, rings.examples))
    history = _run_rings(rings, run)
    times = rings.end()
    share = rings.busy / rings.seconds if rings.seconds else 0.0
    machines = {run.cluster.machine_of_learner(rank) for rank in range(run.learners)}
    return Timing(
        seconds=rings.seconds,
        updates=rings.iterations,
        gradients=rings.gradients,
        dropped=0,
        examples=rings.examples,
        staleness=rings.clock.account(),
        times=times,
        cards=dict.fromkeys(sorted(machines), (share, share)) if len(machines) > 1 else {},
        moved=rings.moved * rings.iterations if len(machines) > 1 else 0,
        events=rings.iterations * (run.learners + len(rings.buckets)),
        history=history,
    )


def _run_rings(rings: TimedRings, run: TimedRun) -> list[EpochRecord]:
    """To the given length; data in joint slices of an epoch's order, or with `partition` a part for each rank."""
    learners, size, examples = run.learners, run.batch_size, run.examples
    left, stride = [examples - rank * size for rank in range(learners)], learners * size
    if run.policy == "partition":
        left = [examples * (rank + 1) // learners - examples * rank // learners for rank in range(learners)]
        stride = size
    history: list[EpochRecord] = []
    while run.epochs is None or len(history) < run.epochs:
        for number in range(-(-max(left) // stride)):
            enough = run.steps is not None and rings.iterations >= run.steps
            if enough or (run.seconds is not None and rings.seconds >= run.seconds):
                return history
            rings.step([max(0, min(size, each - number * stride)) for each in left])
        history.append(run.epoch(len(history), rings.iterations, rings.seconds, rings.examples))
    return history


def _layer_bytes(run: TimedRun, layers: Sequence[int] | None) -> list[int]:
    """Of each layer, from the first to the last; one layer where nothing is known of them."""
    parameters, itemsize = run.parameters, run.itemsize
    if layers is None:
        return [parameters * itemsize]
    if any(isinstance(each, bool) or not isinstance(each, int) or each < 1 for each in layers):
        raise UsageError(f"timing: layers are numbers of parameters, at least 1 each, got {list(layers)}")
    if sum(layers) != parameters:
        raise UsageError(
            f"timing: layers hold {sum(layers)} parameters together, parameters= says {parameters}"
        )
    return [each * itemsize for each in layers]
