"""Runs with a known final weight: learners that record their gradients, and a sequential reference that steps by the same ones."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from operator import itemgetter
from typing import Any

import cloudpickle
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

import syncline as sl
from syncline.dial import Course, Sync
from syncline.report import read_clocks

cloudpickle.register_pickle_by_value(sys.modules[__name__])

TOLERANCE = 1e-5  # relative
PLAIN = partial(SGD, lr=1.0)

LOCKSTEP = ["hardsync", "delayed:1", "delayed:2", "hardsync until 1 then delayed:1"]
WHOLE = [
    "async:rate=given",
    "ssp:2",
    "downpour:push=1,fetch=2,local_lr=0.1",
    "downpour:push=2,fetch=2,local_lr=0.1",
]  # at the full rate
FREE = [
    *WHOLE,
    "softsync:1",
    "softsync:2",
    "softsync:2,rate=given",
    "async",
    "ssp:1,rate=share",
    "hardsync until 1 then softsync:2",
]
DIALS = [*LOCKSTEP, *FREE]

Clocks = list[tuple[int, int, int]]  # version, rank, stamp of every gradient, in the order of the folds
Factory = Callable[..., torch.optim.Optimizer]


@dataclass(frozen=True)
class Made:
    """One step of a learner: its gradient, and the weight that it was computed at."""

    gradient: float
    examples: int
    weight: float


class Weight(nn.Module):
    """Model of one weight; its gradient is minus the mean of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -(self.weight * x).mean()


@dataclass(frozen=True)
class Loop:
    """Step through some epochs of batches of four, as every learner.

    `uneven`: odd ranks step once for two batches, and for an unpaired batch after the loop. `leaves`: the last rank returns after so many steps.
    """

    size: int = 30
    epochs: int = 2
    uneven: bool = False
    leaves: int | None = None
    factory: Factory = PLAIN

    def __call__(self, session: sl.Session, learners: int) -> list[Made]:
        last = session.rank == learners - 1
        data, model = TensorDataset((torch.arange(self.size) % 7 + 1.0) / 8), Weight()
        optimizer, made = session.optimizer(model, self.factory), list[Made]()
        for _ in range(self.epochs):
            for x, weight in self._batches(session, data, model):
                made.append(Made(-x.mean().item(), len(x), weight))
                optimizer.zero_grad()
                model(x).backward()
                optimizer.step()
                if last and len(made) == self.leaves:
                    return made
        if self.leaves is None:
            session.mean(0.0)  # the number of learners is known until all gradients are published
        return made

    def _batches(
        self, session: sl.Session, data: TensorDataset, model: Weight
    ) -> Iterator[tuple[torch.Tensor, float]]:
        """Yield what belongs to one step, and the weight when its first batch came: under ssp another may be read before the second."""
        gathered, weight = list[torch.Tensor](), 0.0
        for (x,) in session.loader(data, batch_size=4):
            weight = weight if gathered else model.weight.item()
            gathered.append(x)
            if len(gathered) > (self.uneven and session.rank % 2):
                yield torch.cat(gathered), weight
                gathered = []
        if gathered:
            yield torch.cat(gathered), weight


def loop(dial: str, **given: Any) -> Loop:
    """Gradients of unequal numbers of examples; pushes are so already, and what is stepped after a loop is not pushed in time."""
    return Loop(size=62, uneven="push" not in dial, **given)


def run(
    dial: str, topology: str, engine: Any, loop: Loop, *, learners: int, **options: Any
) -> tuple[sl.Result, Clocks]:
    settings = {
        "learners": learners,
        "threads": 1,
        "sync": dial,
        "topology": topology,
        "engine": engine,
    } | options
    if topology.startswith("allreduce"):
        return sl.launch(loop, learners, **settings), []
    with tempfile.TemporaryDirectory() as folder:
        result = sl.launch(loop, learners, **settings, run_dir=folder, clocks=True)
        return result, [tuple(map(int, row)) for row in read_clocks(folder)]  # type: ignore[misc]


def check(
    dial: str, topology: str, engine: Any, loop: Loop | None = None, *, learners: int = 2, **options: Any
) -> sl.Result:
    """Run, and compare the final weight with that of a sequential reference which steps by the same gradients."""
    loop = loop or Loop()
    result, clocks = run(dial, topology, engine, loop, learners=learners, **options)
    made, course = [list(each) for each in result.returned], Course.of(dial)
    steps = list(chain(*made))
    assert result.updates == result.version <= result.gradients
    if course.first.late != "drop":
        assert result.statistics.tables[0].examples == sum(each.examples for each in steps)
    if loop.leaves is not None or course.first.local:
        # Pushes are sums of steps, and nobody knows when a learner has left: but all gradients add up, each at the full rate.
        expected = -sum(each.gradient for each in steps)
    elif clocks:
        epochs = [each.version for each in result.history]
        expected = reference(made, clocks, epochs, course, loop, tree="tree" in topology)
    else:
        rounds = [[each[step] for each in made if step < len(each)] for step in range(max(map(len, made)))]
        sequential = Sequential(loop.factory)
        expected = [sequential.step(by_examples(each), 1.0) for each in rounds][-1]
    found = result.state_dict()["weight"].item()
    assert abs(found - expected) <= TOLERANCE * expected, f"the weight is {found}, expected is {expected}"
    return result


class Sequential:
    """One process with a plain optimizer."""

    def __init__(self, factory: Factory) -> None:
        self._model = Weight()
        self._optimizer = factory(self._model.parameters())
        self._rate = self._optimizer.param_groups[0]["lr"]

    def step(self, gradient: float, factor: float) -> float:
        self._optimizer.param_groups[0]["lr"] = self._rate * factor
        self._model.weight.grad = torch.tensor(gradient)
        self._optimizer.step()
        return self._model.weight.item()


def reference(
    made: list[list[Made]], clocks: Clocks, epochs: list[int], course: Course, loop: Loop, *, tree: bool
) -> float:
    """Return the last weight. `made`: by rank; `epochs`: the versions at which they were done."""
    sequential, weights, learners = Sequential(loop.factory), [0.0], len(made)
    for version, rows in groupby(clocks, itemgetter(0)):
        done = sum(each < version for each in epochs)
        dial = [sync for epoch, sync in course.dials if epoch <= done][-1]
        parts = [taken(made[rank], weights[stamp], dial) for _, rank, stamp in rows]
        while len(parts) < quorum(dial, learners):
            learners -= 1  # the incomplete last update is made when so many have left that it is complete
        weights.append(sequential.step(*update(dial, parts, learners, tree=tree)))
    assert course.first.late == "drop" or not any(made), "every gradient is in an update"
    return weights[-1]


def taken(made: list[Made], weight: float, dial: Sync) -> Made:
    """Remove a learner's next gradient, which was computed at this weight; those before it were dropped, where the dial drops any."""
    while dial.late == "drop" and abs(made[0].weight - weight) > TOLERANCE * weight:
        del made[0]
    assert abs(made[0].weight - weight) <= TOLERANCE * weight, (
        "a gradient has the stamp of the version it was computed on"
    )
    return made.pop(0)


def by_examples(parts: list[Made]) -> float:
    return sum(each.gradient * each.examples for each in parts) / sum(each.examples for each in parts)


def quorum(dial: Sync, learners: int) -> int:
    """Return the gradients of one complete update."""
    return max(1, learners // dial.splits) if dial.splits is not None else 1


def update(dial: Sync, parts: list[Made], learners: int, *, tree: bool) -> tuple[float, float]:
    """Return gradient and rate factor of one update: over a tree k gradients count as k/c updates of flat servers."""
    needed = quorum(dial, learners)
    rate = needed / learners if dial.rate == "share" else 1.0
    if dial.lockstep or not tree:
        return by_examples(parts), rate
    mean = by_examples(parts) if needed > 1 else sum(each.gradient for each in parts) / len(parts)
    return mean, rate * len(parts) / needed
