"""This machine as a cluster: the costs of one model's training, measured.

Only one learner is looked at (a plain loop, with the other cores idle and with plain loops on them, and the local engine with one
learner), and a microbenchmark of the shard's work. What learners of one run do to each other is left to the simulator's
model. Not responsible for keeping the result (`kept`).
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncline.dial import Course, Sync
from syncline.engines.local.engine import Local
from syncline.engines.run import RunSpec
from syncline.engines.sim.cluster import Cluster, Compute, Cost, Jitter, Link
from syncline.engines.sim.kept import keep
from syncline.engines.sim.memory import part_bytes
from syncline.engines.sim.world import World
from syncline.learn.session import Session
from syncline.ports import Kind, Note
from syncline.table.layout import Layout, lay_out
from syncline.table.shard import Shard
from syncline.table.slot import private_slot
from syncline.table.template import ELEMENTWISE, OptimizerTemplate

ROUNDS = 12  # of every measurement; the best counts
SECONDS = 0.08  # of each round


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a learner does again and again: a model, a batch of a given size, a loss."""

    model: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    objective: Callable[[nn.Module, Any], Tensor]
    optimizer: Callable[..., torch.optim.Optimizer]
    batch_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Seconds on this machine, of one model at one batch size."""

    compute: Compute
    nbytes: int
    copy: float  # all parameters, once
    take: float  # a gradient into a mean
    fold: float  # the optimizer's step
    serve: float  # all weights into a learner's inbox
    handle: float  # the leading shard's handling of a gradient's note, without the three
    step: float  # of one learner in lockstep, with its server
    full_compute: float  # of one mini-batch while plain loops have the other cores
    jitter: float  # of computations then: half the width of the middle two thirds, over the median

    @property
    def latency(self) -> float:
        """What is left of a step: there and back, each way; waking a process is most of it."""
        known = self.compute.base + 2 * self.copy + self.handle + self.fold
        return max(1e-6, (self.step - known) / 2)

    @property
    def crowding(self) -> float:
        """By how much each computation beside it slows one down."""
        others = max(1, cores() - 1)
        return max(0.0, self.full_compute / self.compute.base - 1) / others

    def cluster(self) -> Cluster:
        """All on one machine, whose cores learners and shards share."""
        return Cluster(
            name="this-machine",
            compute=self.compute,
            learners_per_machine=None,
            shards_per_machine=None,
            beside=True,
            cores=cores(),
            crowding=self.crowding,
            jitter=Jitter(kind="lognormal", spread=self.jitter),
            card=Link(latency=self.latency),
            memory=Link(latency=self.latency),
            copy=Cost(per_byte=self.copy / self.nbytes),
            take=Cost(per_byte=self.take / self.nbytes),
            fold=Cost(per_byte=self.fold / self.nbytes),
            serve=Cost(per_byte=self.serve / self.nbytes),
            message=self.handle,
        )


def measure(work: Workload) -> Measured:
    """All of it, with one thread, as learners have on a full machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        folding = _Folding(work)
        shard = {
            "copy": folding.copy(),
            "take": folding.take(),
            "fold": folding.fold(),
            "serve": folding.serve(),
        }
        handle = max(0.0, _handling(work) - shard["fold"])
        compute, step = timed(_plain_step(work)), _one_learner(work)
        with _others(work):
            full_compute, singles = timed(_plain_step(work)), _each(_plain_step(work))
    finally:
        torch.set_num_threads(threads)
    return Measured(
        compute=Compute(base=compute),
        nbytes=folding.nbytes,
        handle=handle,
        step=step,
        full_compute=full_compute,
        jitter=_spread(singles),
        **shard,
    )


def cores() -> int:
    return len(os.sched_getaffinity(0))


def calibrate(work: Workload) -> Cluster:
    """This machine for this model at this batch size; `compute` is of that size alone."""
    return measure(work).cluster()


# -- one learner alone -----------------------------------------------------------------------------------------


def _plain_step(work: Workload) -> Callable[[], None]:
    """Forward and backward, without an optimizer."""
    model, batch = work.model(), work.batch(work.batch_size)

    def step() -> None:
        model.zero_grad()
        work.objective(model, batch).backward()

    return step


def _burn(session: Session, work: Workload) -> None:
    step = _plain_step(work)
    while not session.ending:
        step()


@contextmanager
def _others(work: Workload) -> Iterator[None]:
    """Plain loops on all cores but one, which say nothing to anybody."""
    if cores() == 1:
        yield
        return
    run = Local().start(replace(_spec(_burn, work), learners=cores() - 1))
    time.sleep(1.5)  # until they are at it
    try:
        yield
    finally:
        run.stop()
        run.wait()


def _loop(session: Session, work: Workload) -> float:
    model, batch = work.model(), work.batch(work.batch_size)
    optimizer = session.optimizer(model, work.optimizer)

    def step() -> None:
        optimizer.zero_grad()
        work.objective(model, batch).backward()
        optimizer.step()

    return timed(step)


def _one_learner(work: Workload) -> float:
    outcome = Local().start(_spec(_loop, work)).wait()
    return float(outcome.returned[0])


def _spec(function: Callable[..., Any], work: Workload) -> RunSpec:
    return RunSpec(
        function=function,
        arguments=(work,),
        learners=1,
        course=Course.of("hardsync"),
        shards=1,
        fixed_shards=True,
        devices=("cpu",),
        threads=1,
    )


# -- the shard's work ------------------------------------------------------------------------------------------


class _Folding:
    """A shard of the model, and two gradients to fold."""

    def __init__(self, work: Workload) -> None:
        model = work.model()
        inner = work.optimizer(model.parameters())
        groups = [group["params"] for group in inner.param_groups]
        layout, tensors = lay_out(model, groups, cuttable=type(inner) in ELEMENTWISE, shards=1)
        self.nbytes = sum(part_bytes(layout))
        self._parameters = [parameter.detach() for parameter in tensors.parameters]
        self._template = OptimizerTemplate.of(inner)
        self._layout = layout
        self._slots = [private_slot(layout) for _ in range(2)]
        for slot in self._slots:
            torch._foreach_copy_(slot.gradients, [torch.full_like(p, 1e-6) for p in self._parameters])
        self._weights = _memory(layout)
        self._inbox = _memory(layout)
        self._shard = self._make()

    def _make(self) -> Shard:
        flat = self._layout.parameters
        torch._foreach_copy_(flat.views(self._weights), self._parameters)
        return Shard(self._layout, 0, self._template, self._weights, sync=Sync.parse("hardsync"))

    def _update(self, count: int) -> None:
        shard = self._shard
        for rank, slot in enumerate(self._slots[:count]):
            part = slot.part(shard.part)
            shard.take(part, full=True, count=1, rank=rank, iteration=0, alone=count == 1)
        shard.gather(0)
        shard.apply(self._template.options, 1.0)

    def fold(self) -> float:
        return timed(lambda: self._update(1))

    def take(self) -> float:
        """Half of what a second gradient, and with it the mean, adds."""
        return max(0.0, (timed(lambda: self._update(2)) - timed(lambda: self._update(1))) / 2)

    def serve(self) -> float:
        return timed(lambda: self._shard.read(0, self._inbox))

    def copy(self) -> float:
        return timed(lambda: torch._foreach_copy_(self._slots[0].gradients, self._parameters))


def _memory(layout: Layout) -> list[Tensor]:
    flat = layout.parameters
    return flat.segments(torch.zeros(flat.nbytes, dtype=torch.uint8))


def _handling(work: Workload) -> float:
    """Of a gradient's note by the leading shard, fold and all: a simulated run of one learner, by the machine's clock."""
    world = World(_spec(_publish, work), Cluster.equal())
    role, taken = world.servers[0].role, []
    handle = role.note

    def note(learner: int, note: Note) -> None:
        before = time.perf_counter()
        handle(learner, note)
        if note.kind == Kind.GRADIENT:
            taken.append(time.perf_counter() - before)

    role.note = note  # type: ignore[method-assign]
    world.run()
    return statistics.median(taken)


def _publish(session: Session, work: Workload) -> None:
    """The same gradient again and again."""
    model, batch = work.model(), work.batch(work.batch_size)
    optimizer = session.optimizer(model, work.optimizer)
    work.objective(model, batch).backward()
    for _ in range(60):
        optimizer.step()


# -- measuring -------------------------------------------------------------------------------------------------


def timed(action: Callable[[], Any]) -> float:
    """Seconds of one call: the best of several rounds, since whatever disturbs makes it longer."""
    for _ in range(3):
        action()
    start = time.perf_counter()
    action()
    count = max(3, int(SECONDS / max(1e-7, time.perf_counter() - start)))
    rounds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(count):
            action()
        rounds.append((time.perf_counter() - start) / count)
    return min(rounds)


def _each(action: Callable[[], Any]) -> list[float]:
    """Seconds of single calls."""
    action()
    taken: list[float] = []
    start = time.perf_counter()
    while time.perf_counter() - start < ROUNDS * SECONDS or len(taken) < 10:
        before = time.perf_counter()
        action()
        taken.append(time.perf_counter() - before)
    return taken


def _spread(taken: list[float]) -> float:
    ordered = sorted(taken)
    low, high = (ordered[int(share * (len(ordered) - 1))] for share in (1 / 6, 5 / 6))
    return (high - low) / 2 / statistics.median(ordered)


# -- the command -----------------------------------------------------------------------------------------------


def perceptron(widths: tuple[int, ...], batch_size: int) -> Workload:
    """Of these widths, on random examples."""
    from syncline.models.mlp import mlp

    def batch(size: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(size, widths[0], generator=generator)
        return inputs, torch.randint(widths[-1], (size,), generator=generator)

    return Workload(
        model=lambda: mlp(widths),
        batch=batch,
        objective=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        batch_size=batch_size,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure this machine, for Cluster.named('this-machine').")
    parser.add_argument("--widths", default="784,512,10", help="of the perceptron that is measured")
    parser.add_argument("--batch-size", type=int, default=64)
    given = parser.parse_args()
    widths = tuple(int(width) for width in given.widths.split(","))
    half = measure(perceptron(widths, max(1, given.batch_size // 2)))
    whole = measure(perceptron(widths, given.batch_size))
    slope = max(0.0, (whole.compute.base - half.compute.base) / (given.batch_size - given.batch_size // 2))
    compute = Compute(base=max(0.0, whole.compute.base - slope * given.batch_size), per_example=slope)
    cluster = replace(whole.cluster(), compute=compute)
    print(f"{cluster}\nkept in {keep(cluster)}")


if __name__ == "__main__":
    main()
