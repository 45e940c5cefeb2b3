"""Timing only, over all-reduce: iteration by iteration, when learners have computed and when their rings are over.

The costs are those of the simulated collectives (`collectives`); tests compare the two. No events: an iteration of lockstep
learners follows from the one before. Not responsible for servers (`timing`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from syncline.cluster.record import Cluster
from syncline.dial import Sync
from syncline.engines.run import EpochRecord
from syncline.engines.simulated_times import LearnerTimes
from syncline.errors import UsageError
from syncline.learn.allreduce_reducer import FORWARD
from syncline.protocols.buckets import plan_buckets
from syncline.protocols.staleness import StalenessClock
from syncline.sim.clock import Clock
from syncline.sim.collectives import Rings
from syncline.topologies import AllReduce


class Buckets:
    """What is reduced together: the share of the gradient's time after which each is there, and its ring's seconds."""

    def __init__(self, cluster: Cluster, learners: int, layers: Sequence[int], topology: AllReduce) -> None:
        limit = topology.bucket if topology.layerwise else None
        plan = plan_buckets(layers, [""] * len(layers), limit)
        sizes = [sum(layers[index] for index in bucket) for bucket in plan]
        rings = Rings(Clock(), cluster, learners, lambda: None)
        self.seconds = [rings.seconds(size) for size in sizes]
        self.moved = rings.moved  # bytes of one iteration
        made = np.cumsum(sizes) / sum(sizes)
        self.shares = FORWARD + (1 - FORWARD) * made if topology.layerwise else np.ones(len(sizes))


class TimedRings:
    """Lockstep learners and their rings; `step` is one iteration of all."""

    def __init__(self, cluster: Cluster, buckets: Buckets, sync: Sync, learners: int, seed: int) -> None:
        if sync.auto or not sync.lockstep:
            raise UsageError(f"timing over all-reduce takes hardsync and delayed:k, got {sync}")
        self._cluster, self._buckets, self._delay, self._seed = cluster, buckets, sync.delay, seed
        self._pace = [cluster.pace(rank, seed=seed, learners=learners) for rank in range(learners)]
        self.learners = learners
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
        for share, seconds in zip(self._buckets.shares, self._buckets.seconds, strict=True):
            met = float((self._ready + share * spent).max())
            self._free = max(self._free, met) + seconds
            self.busy += seconds
            rings.append((met, self._free))
        self._under_way.append(rings)
        self._wait(self._ready + spent)
        self._totals[0] += float(spent.sum())
        self.clock.fold(step, [step - min(step, self._delay)] * sum(count > 0 for count in examples))
        self.iterations += 1
        self.gradients += sum(count > 0 for count in examples)
        self.examples += sum(examples)

    def _wait(self, computed: np.ndarray) -> None:
        """For the iteration that is applied now."""
        self._ready = computed
        if len(self._under_way) > self._delay:
            self._apply()

    def _apply(self) -> None:
        """Bucket by bucket: for others to come, then for the network."""
        for met, over in self._under_way.popleft():
            before, self._ready = self._ready, np.maximum(self._ready, over)
            stood = self._ready - before
            others = np.clip(met - before, 0.0, stood)
            self._totals[1] += float((stood - others).sum())
            self._totals[2] += float(others.sum())

    def flush(self) -> None:
        """The end: what is in flight is applied."""
        while self._under_way:
            self._apply()

    def times(self) -> LearnerTimes:
        compute, communication, waiting = self._totals
        return LearnerTimes(
            compute=compute, communication=communication, waiting=waiting, steps=self.gradients
        )


def run_rings(
    rings: TimedRings,
    *,
    examples: int,
    batch_size: int,
    epochs: int | None,
    steps: int | None,
    seconds: float | None,
    policy: str = "ledger",
) -> list[EpochRecord]:
    """To the given length; data in joint slices of an epoch's order, or with `partition` a part for each rank."""
    learners = rings.learners
    shares = [examples * (rank + 1) // learners - examples * rank // learners for rank in range(learners)]
    joint = learners * batch_size
    rounds = -(-max(shares) // batch_size) if policy == "partition" else -(-examples // joint)
    history: list[EpochRecord] = []
    while epochs is None or len(history) < epochs:
        for number in range(rounds):
            if (steps is not None and rings.iterations >= steps) or (
                seconds is not None and rings.seconds >= seconds
            ):
                return history
            left = (
                [share - number * batch_size for share in shares]
                if policy == "partition"
                else [examples - number * joint - rank * batch_size for rank in range(learners)]
            )
            rings.step([max(0, min(batch_size, each)) for each in left])
        history.append(
            EpochRecord(
                epoch=len(history),
                version=rings.iterations,
                seconds=rings.seconds,
                examples=rings.examples,
                loss=float("nan"),
                losses={},
            )
        )
    return history


def even_layers(parameters: int, itemsize: int, layers: Sequence[int] | None) -> list[int]:
    """Bytes of each layer, from the first to the last; one layer where nothing is known of them."""
    if layers is None:
        return [parameters * itemsize]
    if any(isinstance(each, bool) or not isinstance(each, int) or each < 1 for each in layers):
        raise UsageError(f"timing: layers are numbers of parameters, at least 1 each, got {list(layers)}")
    if sum(layers) != parameters:
        raise UsageError(
            f"timing: layers hold {sum(layers)} parameters together, parameters= says {parameters}"
        )
    return [each * itemsize for each in layers]
