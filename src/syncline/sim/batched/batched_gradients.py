"""Promised gradients computed together: when a fold first needs one, all that are outstanding are at hand.

Those of one version that go into one fold are joined; those of many versions are stacked, and each kept until its own fold. Results
agree with `EachAlone` to rounding. Dropout draws from one stream instead of each learner's own. `trial`
says which models it can do. Not responsible for the computation itself (`vmap_gradients`).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from syncline.sim.batched.deferred_steps import DeferredSteps
from syncline.sim.batched.lazy_gradients import Computer, Gradient, Promise, Version, Versions
from syncline.sim.batched.objective import Rows, SimTask
from syncline.sim.batched.vmap_gradients import Joined, Stacked
from syncline.sim.random_states import Random
from syncline.table.accumulator import Made, Taken
from syncline.table.flat_sgd import FlatSGD, StepPlan
from syncline.table.layout import Part

ROWS = 64  # gradients kept at first
MOST_EXAMPLES = 4096  # in one computation
GAIN = 8  # a stacked gradient costs at best this part of one alone
FULL = 64  # examples that fill a device: with larger batches stacking gains nothing
FEW = 3  # rows that are added one by one
LOSSES = 1 << 15  # that are read together: reading a number from a GPU waits for everything before it


class Loss:
    """A loss whose value comes later: `float` of it reads it, with all others that are there by then."""

    __slots__ = ("_log", "_need", "place", "promise", "value")

    def __init__(self, log: LossLog, promise: weakref.ref[Promise], need: Callable[[Promise], None]) -> None:
        self._log, self.promise, self._need = log, promise, need
        self.place = -1  # on the device, once it is computed
        self.value: float | None = None

    @property
    def computed(self) -> bool:
        return self.place >= 0

    def __float__(self) -> float:
        promise = self.promise()
        if promise is not None and not self.computed:
            self._need(promise)
        if self.value is None and self.computed:
            self._log.read()
        return float("nan") if self.value is None else self.value


class LossLog:
    """Places on the device for losses that nobody has read; the last place is nobody's."""

    def __init__(self, device: torch.device, room: int = LOSSES) -> None:
        self.values = torch.full((room + 1,), float("nan"), dtype=torch.float64, device=device)
        self._room = room
        self._written: list[Loss] = []
        self.alarm: Callable[[int | None, float], None] = lambda rank, loss: None  # of one that is not finite

    def place(self, loss: Loss) -> int:
        """Where it goes: it is being computed."""
        if len(self._written) == self._room:
            self.read()
        loss.place = len(self._written)
        self._written.append(loss)
        return loss.place

    def read(self) -> None:
        """All that were computed since the last time."""
        values = self.values[: len(self._written)].tolist()
        for loss, value in zip(self._written, values, strict=True):
            loss.value = value
        written, self._written = self._written, []
        if not all(map(math.isfinite, values)):
            bad = next(loss for loss in written if loss.value is not None and not math.isfinite(loss.value))
            promise = bad.promise()
            self.alarm(promise.own.rank if promise is not None else None, float(bad))


class BatchedGradients(Computer):
    """Computes outstanding gradients together."""

    waits = True

    def __init__(self, task: SimTask, *, learners: int, draws: bool, convolutions: str, graphs: bool) -> None:
        self.task, self._layout = task, task.layout
        self._log = LossLog(task.device)
        self._log.alarm = lambda rank, loss: self.alarm(rank, loss)
        gradients, versions = Rows(task, ROWS), Rows(task, min(ROWS, 2 * learners + 2))
        self.versions = Versions(task.layout, versions.take)

        def row_of(number: int) -> int:
            version = self.versions.wanted(number)
            return versions.nobodys if version is None else version.place.number

        captured = graphs and task.device.type == "cuda"
        self._later = DeferredSteps(gradients, versions, row_of, together=captured)
        self.joined = Joined(task, self._log.values, versions, graphs=graphs)
        self.stacked = Stacked(
            task, self._log.values, versions, gradients, graphs=graphs, convolutions=convolutions
        )
        self._waiting: list[Loss] = []  # of promises that nobody has needed
        # of folds that not all shards have made: the mean, and how many have
        self._folds: dict[tuple[int, ...], tuple[Gradient, int]] = {}
        self._drawing = Random().drawn if draws else nullcontext

    # -- the seam ----------------------------------------------------------------------------------------

    def promise(self, promise: Promise) -> None:
        loss = promise.loss = Loss(self._log, weakref.ref(promise), lambda promise: self._stack([promise]))
        promise.buffers = promise.own.buffers  # models that change theirs are not computed together
        self._waiting.append(loss)

    def buffers(self, promise: Promise) -> list[Tensor]:
        return promise.buffers

    def make(self, promise: Promise) -> Gradient:
        """A copy of its own, which its learner may add to."""
        if promise.gradient is None:
            promise.gradient = self._copy(self._mean([promise], [1.0]))
        return promise.gradient

    def fold(self, part: Part, taken: Sequence[Taken]) -> Made:
        total = sum(each.examples for each in taken)
        shares = [each.examples / total * each.damping if total else each.damping for each in taken]
        promises = [each.gradient for each in taken]
        if self._layout.shards == 1:
            return self._cut(part, self._mean(promises, shares))
        key = tuple(map(id, promises))  # the shards that have yet to fold hold them
        made = self._folds.pop(key) if key in self._folds else None
        gradient, asked = made or (self._copy(self._mean(promises, shares)), 0)
        if asked + 1 < self._layout.shards:
            self._folds[key] = gradient, asked + 1
        return self._cut(part, gradient)

    def step_later(self, promise: Promise, flat: FlatSGD, plan: StepPlan, version: int) -> bool:
        if promise.gradient is not None:
            return False
        if not promise.loss.computed:
            if self._joins([promise]):
                return False
            self._stack([promise])
        if not all(self.stacked.present):
            return False
        self._later.add(flat, plan, promise.row.number, version)
        promise.row = None
        return True

    def settle(self) -> None:
        self._later.settle()

    def fills(self, version: Version) -> bool:
        return len(self._later) > 0 and version.number == self._later.newest

    def _cut(self, part: Part, gradient: Gradient) -> Made:
        if self._layout.shards == 1:  # the same lists again for the same memory: the shard looks at that
            return Made(gradient.views, tuple(gradient.present), gradient.segments)
        segments = part.segments(gradient.segments)
        views = part.views(segments, self._layout.parameters.entries)
        return Made(views, tuple(gradient.present[piece.entry] for piece in part.pieces), segments)

    def _copy(self, gradient: Gradient) -> Gradient:
        segments = [segment.clone() for segment in gradient.segments]
        return Gradient(segments, self.task.views(segments), list(gradient.present))

    # -- computing ---------------------------------------------------------------------------------------

    def _mean(self, promises: Sequence[Promise], shares: Sequence[float]) -> Gradient:
        missing = [promise for promise in promises if not promise.loss.computed]
        alone = bool(missing) and self._joins(missing)
        if missing and not alone:
            self._stack(missing)
        if len(promises) == 1 and shares[0] == 1.0 and not alone and promises[0].gradient is None:
            segments, views = self.stacked.row(promises[0].row.number)
            promises[0].row = None
            return Gradient(segments, views, list(self.stacked.present))
        self.settle()
        self._join(missing if alone else [], promises, shares)
        return Gradient(
            self.joined.total, self.joined.views, list(self.joined.present or self.stacked.present)
        )

    def _joins(self, missing: Sequence[Promise]) -> bool:
        """Is it cheaper to join these, version by version, than to stack all that wait?"""
        self._waiting = [loss for loss in self._waiting if not loss.computed and loss.promise() is not None]
        versions = len({id(promise.version) for promise in missing})
        gain = max(1, min(GAIN, FULL // missing[0].size, len(self._waiting)))
        return versions * gain <= len(missing)

    def _join(self, missing: Sequence[Promise], promises: Sequence[Promise], shares: Sequence[float]) -> None:
        """The weighted sum of all, into `joined.total`."""
        share = dict(zip(map(id, promises), shares, strict=True))
        chosen = list(_chunks(missing, lambda promise: (id(promise.version), promise.size)))
        for chunk in chosen:
            self.joined.program([promise.indices for promise in chunk])
        self.joined.zero()
        with self._drawing():
            for chunk in chosen:
                self.joined.add(
                    chunk[0].version.place.number,
                    [promise.indices for promise in chunk],
                    [share[id(promise)] for promise in chunk],
                    [self._log.place(promise.loss) for promise in chunk],
                )
        made = [promise for promise in promises if promise.gradient is not None]
        for promise in made:
            assert promise.gradient is not None
            for total, segment in zip(self.joined.total, promise.gradient.segments, strict=True):
                total.add_(segment, alpha=share[id(promise)])
        kept = [promise for promise in promises if promise.row is not None and promise.gradient is None]
        self._add_rows([promise.row.number for promise in kept], [share[id(promise)] for promise in kept])
        for promise in kept:
            promise.row = None

    def _add_rows(self, rows: Sequence[int], shares: Sequence[float]) -> None:
        if len(rows) <= FEW:
            for row, share in zip(rows, shares, strict=True):
                for total, stack in zip(self.joined.total, self.stacked.rows.stacks, strict=True):
                    total.add_(stack[row], alpha=share)
            return
        where = torch.tensor(rows).to(self.task.device, non_blocking=True)
        factors = torch.tensor(shares, dtype=torch.float64).to(self.task.device, non_blocking=True)
        for total, stack in zip(self.joined.total, self.stacked.rows.stacks, strict=True):
            total.addmv_(stack.index_select(0, where).mT, factors.to(stack.dtype))

    def _stack(self, missing: Sequence[Promise]) -> None:
        """These, and all that wait with batches of the same sizes."""
        self.settle()
        sizes = {promise.size for promise in missing}
        found = [loss.promise() for loss in self._waiting if not loss.computed]
        wanted = dict.fromkeys(missing)
        wanted.update(dict.fromkeys(p for p in found if p is not None and p.size in sizes))
        with self._drawing():
            for chunk in _chunks(wanted, lambda promise: promise.size):
                for promise in chunk:
                    promise.row = self.stacked.rows.take()
                self.stacked.fill(
                    [promise.version.place.number for promise in chunk],
                    [promise.indices for promise in chunk],
                    [promise.row.number for promise in chunk],
                    [self._log.place(promise.loss) for promise in chunk],
                )
        self._waiting = [loss for loss in self._waiting if not loss.computed]


def _chunks(promises: Iterable[Promise], key: Callable[[Promise], object]) -> Iterable[list[Promise]]:
    """Promises of equal keys, no more at once than memory allows."""
    groups: dict[object, list[Promise]] = {}
    for promise in promises:
        groups.setdefault(key(promise), []).append(promise)
    for group in groups.values():
        most = max(1, MOST_EXAMPLES // max(1, group[0].size))
        for first in range(0, len(group), most):
            yield group[first : first + most]
