"""Simulated collectives: all learners' buffers are summed in rank order, after the time of a ring over the slowest link.

One ring at a time: reductions that start while another is under way wait for the network. Not responsible for who waits (`allreduce`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from syncline.cluster.record import Cluster
from syncline.sim.clock import Clock

BROADCAST, SUM = "broadcast", "sum"


@dataclass(slots=True)
class Ring:
    """One collective: who has come, when all had, whether it is over."""

    kind: str
    buffers: dict[int, Tensor] = field(default_factory=dict)  # by rank
    met: float = 0.0
    done: bool = False


class Rings:
    """The collectives of one run, in the order in which all learners start them."""

    def __init__(self, clock: Clock, cluster: Cluster, learners: int, wake: Callable[[], None]) -> None:
        self._clock, self._cluster, self._learners, self._wake = clock, cluster, learners, wake
        self._rings: list[Ring] = []
        self.started = [0] * learners  # by rank
        self._free = 0.0  # when the network is
        self.moved = 0  # bytes

    def start(self, rank: int, buffer: Tensor, kind: str = SUM) -> Ring:
        """This learner comes to its next collective."""
        number = self.started[rank]
        self.started[rank] += 1
        if number == len(self._rings):
            self._rings.append(Ring(kind))
        ring = self._rings[number]
        if ring.kind != kind or any(each.shape != buffer.shape for each in ring.buffers.values()):
            raise AssertionError(
                f"learner {rank} comes to collective {number} with something else than the others"
            )
        ring.buffers[rank] = buffer
        if len(ring.buffers) == self._learners:
            self._begin(ring)
        return ring

    def _begin(self, ring: Ring) -> None:
        ring.met = self._clock.now
        size = ring.buffers[0]
        self._free = max(self._free, ring.met) + self.seconds(size.numel() * size.element_size())
        self._clock.at(self._free, lambda: self._end(ring))

    def seconds(self, nbytes: int) -> float:
        """Of a ring: each learner passes 2(λ−1) parts of 1/λ on."""
        hops = 2 * (self._learners - 1)
        if not hops:
            return 0.0
        part = -(-nbytes // self._learners)
        self.moved += hops * part * self._learners
        machines = {self._cluster.machine_of_learner(rank) for rank in range(self._learners)}
        link = self._cluster.card if len(machines) > 1 else self._cluster.memory
        return link.setup + hops * (link.latency + link.seconds(part))

    @torch.no_grad()
    def _end(self, ring: Ring) -> None:
        first = ring.buffers[0]
        result = first.clone()
        if ring.kind == SUM:
            for rank in range(1, self._learners):
                result += ring.buffers[rank]
        for buffer in ring.buffers.values():
            buffer.copy_(result)
        ring.buffers.clear()
        ring.done = True
        self._wake()
