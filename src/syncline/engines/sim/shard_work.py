"""A microbenchmark of a shard's work on one model: folds, copies and decisions, in this process, without learners.

Not responsible for what learners and shards do to each other.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from syncline.dial import Course, Sync
from syncline.engines.run import RunSpec
from syncline.engines.sim.cluster import Cluster
from syncline.engines.sim.memory import part_bytes
from syncline.engines.sim.turns import Workload
from syncline.engines.sim.world import World
from syncline.learn.session import Session
from syncline.ports import Kind, Note
from syncline.table.layout import Layout, lay_out
from syncline.table.shard import Shard
from syncline.table.slot import private_slot
from syncline.table.template import ELEMENTWISE, OptimizerTemplate

SECONDS = 0.03  # of each measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Seconds, for the whole table on one shard."""

    copy: float  # all parameters, once
    take: float  # a gradient into a mean
    fold: float  # the optimizer's step
    serve: float  # all weights into a learner's inbox


class Folding:
    """A shard of the model, and two gradients to fold."""

    def __init__(self, work: Workload) -> None:
        model = work.model()
        inner = work.optimizer(model.parameters())
        groups = [group["params"] for group in inner.param_groups]
        layout, tensors = lay_out(model, groups, cuttable=type(inner) in ELEMENTWISE, shards=1)
        self.nbytes = sum(part_bytes(layout))
        self._parameters = [parameter.detach() for parameter in tensors.parameters]
        self._template = OptimizerTemplate.of(inner)
        self._slots = [private_slot(layout) for _ in range(2)]
        for slot in self._slots:
            torch._foreach_copy_(slot.gradients, [torch.full_like(p, 1e-6) for p in self._parameters])
        self._inbox, weights = _memory(layout), _memory(layout)
        torch._foreach_copy_(layout.parameters.views(weights), self._parameters)
        self._shard = Shard(layout, 0, self._template, weights, sync=Sync.parse("hardsync"))

    def _update(self, count: int) -> None:
        shard = self._shard
        for rank, slot in enumerate(self._slots[:count]):
            part = slot.part(shard.part)
            shard.take(part, full=True, count=1, rank=rank, iteration=0, alone=count == 1)
        shard.gather(0)
        shard.apply(self._template.options, 1.0)

    def measure(self) -> Work:
        """With one thread, as shards have."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            fold, two = timed(lambda: self._update(1)), timed(lambda: self._update(2))
            return Work(
                copy=timed(lambda: torch._foreach_copy_(self._slots[0].gradients, self._parameters)),
                take=max(0.0, two - fold) / 2,  # half of what a second gradient, and with it the mean, adds
                fold=fold,
                serve=timed(lambda: self._shard.read(0, self._inbox)),
            )
        finally:
            torch.set_num_threads(threads)


def _memory(layout: Layout) -> list[Tensor]:
    flat = layout.parameters
    return flat.segments(torch.zeros(flat.nbytes, dtype=torch.uint8))


def handling(sync: str) -> float:
    """The leading shard's seconds for a gradient's note, apart from the table: of a simulated run, by the machine's clock."""
    spec = RunSpec(
        function=_publish,
        learners=1,
        course=Course.of(sync),
        shards=1,
        fixed_shards=True,
        devices=("cpu",),
    )
    world, taken = World(spec, Cluster.equal()), []
    role = world.servers[0].role
    handle = role.note

    def note(learner: int, note: Note) -> None:
        before = time.perf_counter()
        handle(learner, note)
        if note.kind == Kind.GRADIENT:
            taken.append(time.perf_counter() - before)

    role.note = note  # type: ignore[method-assign]
    world.run()
    folding = Folding(Workload(model=_small, batch=int, objective=_no_loss, optimizer=_sgd, batch_size=1))
    return max(0.0, statistics.median(taken) - timed(lambda: folding._update(1)))


def _small() -> nn.Module:
    return nn.Linear(8, 8)


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def _no_loss(model: nn.Module, batch: Any) -> Tensor:
    return model(torch.zeros(1, 8)).sum()


def _publish(session: Session) -> None:
    """The same gradient again and again."""
    model = _small()
    optimizer = session.optimizer(model, _sgd)
    _no_loss(model, None).backward()
    for _ in range(200):
        optimizer.step()


def timed(action: Callable[[], Any]) -> float:
    """Seconds of one call, the median of as many as there is time for."""
    action()
    taken: list[float] = []
    start = time.perf_counter()
    while time.perf_counter() - start < SECONDS or len(taken) < 2:
        before = time.perf_counter()
        action()
        taken.append(time.perf_counter() - before)
    return statistics.median(taken)
