"""This machine as a cluster: the costs of one model's training, measured.

Only one learner of the engine is looked at, on a machine that plain loops keep as busy as the other learners would, and microbenchmarks of the
shards' work (`shard_work`, `crowd`). What a run of several comes to is left to the simulator (`fitting`). Not responsible for keeping the
result (`kept`).
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from statistics import NormalDist, median
from types import TracebackType
from typing import NoReturn, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from syncline.cluster import Cluster, Compute, keep
from syncline.dial import Course
from syncline.errors import UsageError
from syncline.learn.server_session import check_whole, shards_for
from syncline.learn.session import make_optimizer
from syncline.topologies import Servers
from tools.calibration.contention_benchmark import Contention
from tools.calibration.fitting import Measured
from tools.calibration.scheduler_benchmark import spin_seconds, time_slice
from tools.calibration.shard_benchmark import Decisions, Folding, Work, decisions
from tools.calibration.window_benchmark import Turns, Window, Workload, deal, move_to

__all__ = [
    "Calibration",
    "Measured",
    "Sample",
    "Workload",
    "calibrate",
    "cores",
    "perceptron",
    "table_shards",
]

T = TypeVar("T")
ROUNDS = 10
SECONDS = 0.2  # of each window
CROWDED = 0.06  # of each window of a crowd
MANY, FEW = 40, 4  # steps in which decisions are looked at; few of large models, whose steps take long
LARGE = 8_000_000  # bytes of a model: of larger ones few fit into one process, and decisions matter little


def cores() -> int:
    return len(os.sched_getaffinity(0))


def table_shards(work: Workload, learners: int, sync: str) -> int:
    """Shards of this model's table where nobody names their number."""
    servers = Servers(1, False).sized(learners, cores(), lockstep=Course.of(sync).first.lockstep)
    return shards_for(make_optimizer(work.model(), work.optimizer), servers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Windows that followed each other: one learner, and the plain loops beside it and without it."""

    plain: Window  # a loop in the learner's place
    one: Window
    beside: tuple[Window, ...]  # plain loops beside the learner
    before: tuple[Window, ...]  # the same beside another plain loop

    @property
    def lost(self) -> float:
        """Steps' shares that the plain loops lost to the learner's shards, all together."""
        pairs = zip(self.before, self.beside, strict=True)
        return sum(1 - before.step / beside.step for before, beside in pairs)


@dataclass(frozen=True, slots=True)
class Works:
    """The parts of a step, seen at one time."""

    one: Work  # of one learner, while the others compute
    all: Work | None  # of each, where all do the same; None where they share cores

    def single(self) -> Work:
        return self.one

    def everybody(self) -> Work:
        assert self.all is not None
        return self.all


class Calibration:
    """One learner under each of some dials, and what it takes; plain loops have the other learners' places."""

    def __init__(self, work: Workload, syncs: Sequence[str], *, learners: int) -> None:
        check_whole("learners", learners)
        check_whole("batch_size", work.batch_size)
        self._work = work
        self._beside = min(learners, cores()) - 1  # more would take time from the one that is measured
        self._shards = {sync: table_shards(work, learners, sync) for sync in syncs}
        self._learners = learners
        self._folding = Folding(work)
        self._slice, self._spin = time_slice(), spin_seconds()
        self.samples: dict[str, list[Sample]] = {sync: [] for sync in syncs}
        self.works: dict[str, list[Works]] = {sync: [] for sync in syncs}
        self.decisions: dict[str, list[Decisions]] = {sync: [] for sync in syncs}
        with ExitStack() as stack:  # where one of them fails, those before it end
            self._start(stack)
            self._stack = stack.pop_all()

    def _start(self, stack: ExitStack) -> None:
        """All processes; each does once what it will be told to."""
        work, learners, enter = self._work, self._learners, stack.enter_context
        self._crowds = {
            sync: enter(Contention(work, learners=learners, shards=shards, sync=sync))
            for sync, shards in self._shards.items()
            if learners > 1 and learners + shards <= cores()
        }
        self._plain = enter(Turns(work))
        self._loops = enter(Turns(work, learners=self._beside)) if self._beside else None
        self._one = {
            sync: enter(Turns(work, sync=sync, shards=shards, fixed_shards=True))
            for sync, shards in self._shards.items()
        }
        for turns in (self._plain, *self._one.values()):
            turns.window(0.0)
        for crowd in self._crowds.values():
            crowd.window(learners, 0.0)
        if self._shared:
            self._folding.measure()  # memory is touched for the first time

    def __enter__(self) -> Calibration:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def sample(self, sync: str, seconds: float) -> Sample:
        """One more look at one learner under this dial."""
        (plain,), before = self._crowded(lambda: self._plain.window(seconds / 2))
        (one,), beside = self._crowded(lambda: self._one[sync].window(seconds))
        found = Sample(plain=plain, one=one, beside=tuple(beside), before=tuple(before))
        self.samples[sync].append(found)
        return found

    @property
    def _shared(self) -> list[str]:
        """Dials under which processes share cores."""
        return [sync for sync in self.works if sync not in self._crowds]

    @property
    def _small(self) -> bool:
        return self._folding.nbytes < LARGE

    def fold(self) -> None:
        """One more look at the shards' work, and at their decisions."""
        if self._shared:
            alone = self._alone()
            for sync in self._shared:
                self.works[sync].append(alone)
        for sync, seen in self.decisions.items():
            if not seen or self._small:
                seen.append(self._crowded(partial(self._decisions, sync))[0])

    def _decisions(self, sync: str) -> Decisions:
        move_to(*deal(1))
        crowded = sync in self._crowds
        learners = self._learners if crowded and self._small else 2
        steps = MANY if self._small else FEW
        return decisions(self._work, sync, learners=learners, steps=steps, warm=crowded)

    def _alone(self) -> Works:
        return Works(self._crowded(self._folding.measure)[0], None)

    def look_at_crowd(self, sync: str) -> None:
        """One more look at what processes do to each other, where each has a core."""
        crowd = self._crowds.get(sync)
        if crowd is not None:
            one, everybody = (crowd.window(active, CROWDED) for active in (1, self._learners))
            self.works[sync].append(Works(one, everybody))

    def _crowded(self, action: Callable[[], T]) -> tuple[T, list[Window]]:
        """While the plain loops have the other cores; and what they did."""
        if self._loops is None:
            return action(), []
        self._loops.burn()
        found = action()
        return found, self._loops.rest()

    def measured(self, sync: str) -> Measured:
        """The medians of all samples, in shares of their own steps: the machine's speed drifts."""
        samples = self.samples[sync]
        step = median(sample.one.step for sample in samples)

        def share(part: Callable[[Sample], float]) -> float:
            return step * median(part(sample) for sample in samples)

        unit = share(lambda sample: sample.plain.step / sample.one.step)
        compute = share(lambda sample: sample.one.compute / sample.one.step)
        works, seen = self.works[sync], self.decisions[sync]
        if sync in self._crowds:
            one, everybody = (_middle(works, part) for part in (Works.single, Works.everybody))
            note, reply = median(each.note for each in seen), median(each.reply for each in seen)
            spread = spread_of(looked.everybody().uneven for looked in works)
        else:
            one, everybody = _middle(works, Works.single, unit), None
            note, reply = (
                unit * median(getattr(each, name) / each.compute for each in seen)
                for name in ("note", "reply")
            )
            spread = spread_of(sample.one.inequality for sample in samples)
        return Measured(
            sync=sync,
            shards=self._shards[sync],
            beside=self._beside,
            cores=cores(),
            slice=self._slice,
            spin=self._spin,
            nbytes=self._folding.nbytes,
            step=step,
            spread=spread,
            lost=share(lambda sample: sample.lost),
            one=replace(one, compute=compute),
            all=everybody,
            note=note,
            reply=reply,
        )


def _middle(works: Sequence[Works], part: Callable[[Works], Work], unit: float | None = None) -> Work:
    """Medians; in units of the computations beside them where a unit is given."""
    names = ("compute", "copy", "take", "fold", "serve")
    scales = [unit / looked.one.compute if unit else 1.0 for looked in works]
    found = {
        name: median(scale * getattr(part(looked), name) for scale, looked in zip(scales, works, strict=True))
        for name in names
    }
    return Work(**found)


def spread_of(inequalities: Iterable[float]) -> float:
    """The spread of a lognormal jitter whose Gini coefficient is the middle one of these."""
    gini = min(0.9, max(0.0, statistics.median(inequalities)))
    return math.sqrt(2) * NormalDist().inv_cdf((1 + gini) / 2)


def calibrate(work: Workload, *, learners: int | None = None, sync: str = "softsync:1") -> Cluster:
    """This machine with so many learners (one on each core) of this model at this batch size, under this dial."""
    return _measure(work, learners or cores(), sync).cluster()


def _measure(work: Workload, learners: int, sync: str) -> Measured:
    with Calibration(work, [sync], learners=learners) as calibration:
        for _ in range(ROUNDS):
            calibration.fold()
            calibration.look_at_crowd(sync)
            calibration.sample(sync, SECONDS)
        return calibration.measured(sync)


# -- the command -----------------------------------------------------------------------------------------------


def perceptron(widths: tuple[int, ...], batch_size: int) -> Workload:
    """Of these widths, on random examples."""
    from syncline.models import mlp

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


class _Parser(argparse.ArgumentParser):
    """Bad input is one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def _whole(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def _widths(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if len(parts) < 2 or not all(part.strip().isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(
            f"expected at least two whole numbers, inputs and outputs, as 784,512,10, got {text!r}"
        )
    return tuple(map(int, parts))


def _check_dial(sync: str, learners: int, batch_size: int) -> None:
    course = Course.of(sync)
    if len(course.dials) > 1 or course.first.auto:
        raise UsageError(f"{sync!r} cannot be measured: give one dial that servers have, as softsync:1")
    course.first.check(learners, batch_size)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _Parser(description="Measure this machine, for Cluster.named('this-machine').")
    parser.add_argument(
        "--widths", type=_widths, default="784,512,10", help="of the perceptron that is measured"
    )
    parser.add_argument("--batch-size", type=_whole, default=64)
    parser.add_argument("--learners", type=_whole, default=cores())
    parser.add_argument("--sync", default="softsync:1")
    given = parser.parse_args(arguments)
    try:
        _check_dial(given.sync, given.learners, given.batch_size)
    except UsageError as error:
        parser.error(f"argument --sync: {error}")
    whole = _measure(perceptron(given.widths, given.batch_size), given.learners, given.sync)
    half = _measure(perceptron(given.widths, max(1, given.batch_size // 2)), given.learners, given.sync)
    cluster = whole.cluster()
    slope = max(0.0, (whole.one.compute - half.one.compute) / (given.batch_size - given.batch_size // 2))
    base = max(0.0, cluster.compute.base - slope * given.batch_size)
    cluster = replace(cluster, compute=Compute(base=base, per_example=slope))
    print(f"{cluster}\nkept in {keep(cluster)}")


if __name__ == "__main__":
    main()
