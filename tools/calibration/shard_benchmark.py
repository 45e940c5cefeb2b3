"""A microbenchmark of a shard's work on one model: folds, copies and decisions, in this process, without other processes.

Not responsible for what learners and shards do to each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from syncline.cluster import Cluster
from syncline.dial import Course, Sync
from syncline.engines.local.record_codec import decode, encode
from syncline.engines.local.shared_memory import Region, WakeUp
from syncline.engines.local.table_memory import Mailbox
from syncline.engines.run import RunSpec, Task
from syncline.learn.server_session import shards_for
from syncline.learn.session import Session, make_optimizer
from syncline.messages.to_leader import Gradient, ToLeader
from syncline.roles.run_plan import RunPlan
from syncline.roles.server import ServerRole
from syncline.sim.simulation import Simulation
from syncline.table.gradient_slot import private_slot
from syncline.table.layout import Layout, lay_out
from syncline.table.optimizer_template import ELEMENTWISE, OptimizerTemplate
from syncline.table.shard import Shard
from syncline.table.store import OnePlace
from syncline.topologies import Servers
from tools.calibration.window_benchmark import Workload

SECONDS = 0.03  # of each measurement
LOOKS = 200  # at a note and a bell


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Seconds, for the whole table on one shard."""

    compute: float  # a computation beside the others: the unit, since the machine's speed drifts
    copy: float  # all parameters, once
    take: float  # a gradient into a mean
    fold: float  # the optimizer's step
    serve: float  # all weights into a learner's inbox
    uneven: float = 0.0  # the Gini coefficient of single computations, of all learners together


def part_bytes(layout: Layout) -> list[int]:
    """Of every shard's part of the parameters."""
    sizes = layout.parameters.item_sizes
    return [sum((high - low) * sizes[segment] for segment, low, high in part.slices) for part in layout.parts]


class Draft:
    """A model and its table, before there is memory for it."""

    def __init__(self, work: Workload, *, shards: int) -> None:
        self.model = work.model()
        inner = make_optimizer(self.model, work.optimizer)
        groups = [group["params"] for group in inner.param_groups]
        cuttable = type(inner) in ELEMENTWISE
        shards = shards_for(inner, Servers(shards, True))
        self.layout, tensors = lay_out(self.model, groups, cuttable=cuttable, shards=shards)
        self.parameters: list[Tensor] = list(tensors.parameters)
        self.template = OptimizerTemplate.of(inner)


class Folding:
    """A shard of the model, and two gradients to fold."""

    def __init__(self, work: Workload) -> None:
        self._work, self._batch = work, work.batch(work.batch_size)
        draft = Draft(work, shards=1)
        self._model, self._parameters, self._template = draft.model, draft.parameters, draft.template
        layout = draft.layout
        self.nbytes = sum(part_bytes(layout))
        self._slots = [private_slot(layout) for _ in range(2)]
        self._inbox, weights = _memory(layout), _memory(layout)
        values = [parameter.detach() for parameter in self._parameters]
        torch._foreach_copy_(layout.parameters.views(weights), values)
        self._shard = Shard(
            layout, 0, self._template, OnePlace(layout, 0, weights), sync=Sync.parse("hardsync")
        )

    def _take(self, count: int) -> None:
        shard = self._shard
        for rank, slot in enumerate(self._slots[:count]):
            part = slot.part(shard.part)
            shard.take(part, full=True, count=1, rank=rank, iteration=0, alone=count == 1)
        shard.gather(0)

    def _update(self, count: int) -> None:
        self._take(count)
        self._shard.apply(self._template.options, 1.0)

    def measure(self) -> Work:
        """With one thread, as shards have; after a computation each, as in a run, where the caches are the learners'."""
        compute, copy, fold, serve, two = (list[float]() for _ in range(5))
        with one_thread():
            start = time.perf_counter()
            while time.perf_counter() - start < SECONDS or len(two) < 2:
                compute.append(seconds_of(self._compute))
                copy.append(seconds_of(self._copy))
                fold.append(seconds_of(lambda: self._update(1)))
                serve.append(seconds_of(lambda: self._shard.read(self._shard.version, self._inbox)))
                self._compute()
                two.append(seconds_of(lambda: self._update(2)))
        return Work(
            compute=median(compute),
            copy=median(copy),
            take=max(0.0, median(two) - median(fold))
            / 2,  # half of what a second gradient, and with it the mean, adds
            fold=median(fold),
            serve=median(serve),
        )

    def _compute(self) -> None:
        self._work.compute(self._model, self._batch)

    def _copy(self) -> None:
        hand_over(self._parameters, self._slots[0].gradients)


def hand_over(parameters: Sequence[Tensor], slot: Sequence[Tensor]) -> None:
    """The gradients that there are: frozen and unused parameters have none."""
    pairs = zip(slot, parameters, strict=True)
    here = [(place, parameter.grad) for place, parameter in pairs if parameter.grad is not None]
    torch._foreach_copy_([place for place, _ in here], [gradient for _, gradient in here])


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _memory(layout: Layout) -> list[Tensor]:
    flat = layout.parameters
    return flat.segments(torch.zeros(flat.nbytes, dtype=torch.uint8))


@dataclass(frozen=True, slots=True)
class Decisions:
    """The leading shard's seconds beside the table's work."""

    compute: float  # a computation: the unit, where the machine's speed drifts
    note: float  # for a gradient's note
    reply: float  # for each learner that a fold releases, in lockstep


def decisions(work: Workload, sync: str, *, learners: int, steps: int, warm: bool) -> Decisions:
    """Of a simulated run of so many steps, by the machine's clock.

    `warm`: nobody computes on the shard's core meanwhile, and notes come together, as they do where a shard is busy.
    """
    spec = RunSpec(
        task=Task(_steps, (work, steps, warm)),
        plan=RunPlan(course=Course.of(sync), learners=learners, batch_size=work.batch_size),
    )
    with one_thread():
        world = Simulation(spec, Cluster.equal())
        watch = Watch(world.servers[0].role)
        outcome = world.run()
        read, ring = mail()
    unit = median(map(float, outcome.returned.values()))
    if not Course.of(sync).first.lockstep:
        return Decisions(unit, watch.mean(learners) + read + ring, 0.0)
    note = median(watch.others[learners:])
    return Decisions(unit, note + read, max(0.0, median(watch.folding[1:]) - note) / learners + ring)


def mail() -> tuple[float, float]:
    """Seconds in which a process reads a note, and rings somebody's bell."""
    desk, bell = Mailbox(Region(Mailbox.nbytes())), WakeUp()
    note = encode(Gradient(0, 0, 0, 0, 1, -1, 0, 0, True, False, b"", 0.0))
    reads, rings = [], []
    for _ in range(LOOKS):
        desk.notes.push(note)
        reads.append(seconds_of(lambda: decode(desk.notes.pop(), lambda table, slot: b"")))  # type: ignore[arg-type]
        rings.append(seconds_of(bell.ring))
        bell.quiet()
    bell.close()
    return median(reads), median(rings)


class Watch:
    """On a leading shard: seconds of each gradient's note without the table's work, where it led to a fold and elsewhere."""

    def __init__(self, role: ServerRole) -> None:
        self.folding: list[float] = []
        self.others: list[float] = []
        self._role, self._handle = role, role.note
        self._worked = 0.0
        self._folds = False
        self._watched = False
        role.note = self._note

    def mean(self, first: int) -> float:
        """Of all notes but for so many; the middle ones of either kind stand for all of it."""
        kinds = [seen[first:] for seen in (self.folding, self.others) if len(seen) > first]
        return sum(len(seen) * median(seen) for seen in kinds) / sum(map(len, kinds))

    def _note(self, learner: int, message: ToLeader) -> None:
        if not isinstance(message, Gradient):
            self._handle(learner, message)
            return
        if not self._watched:
            self._watched = True
            shard: Any = self._role.replay.shards[message.table]
            for name in ("take", "gather", "apply", "read"):
                setattr(shard, name, self._timed(name, getattr(shard, name)))
        self._worked, self._folds = 0.0, False
        taken = seconds_of(lambda: self._handle(learner, message)) - self._worked
        (self.folding if self._folds else self.others).append(taken)

    def _timed(self, name: str, action: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*values: Any, **named: Any) -> Any:
            self._folds |= name == "apply"
            start = time.perf_counter()
            found = action(*values, **named)
            self._worked += time.perf_counter() - start
            return found

        return timed


def _steps(session: Session, work: Workload, steps: int, warm: bool) -> float:
    """The median time of a computation; `warm`: all of them are before the steps."""
    model, batch = work.model(), work.batch(work.batch_size)
    optimizer = session.optimizer(model, work.optimizer)

    compute = partial(work.compute, model, batch)
    taken: list[float] = [seconds_of(compute) for _ in range(3 if warm else 0)]
    for _ in range(steps):
        if not warm:
            taken.append(seconds_of(compute))
        optimizer.step()
    return median(taken)


def seconds_of(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start
