"""What adds up: the gradients that a shard has taken, until the fold that they belong to (M3).

In lockstep they are kept where they lie and added in rank order; otherwise each is added to a running mean when it is taken. A
fold of one gradient is that gradient as it lies. Promised gradients are kept as promises: a `Maker` makes them when the fold
wants their mean (the simulator has several). Not responsible for deciding when to fold, nor for what becomes of the mean.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from syncline.table.flat_sgd import FlatSGD, StepPlan
from syncline.table.layout import Layout, Part

Present = tuple[bool, ...]


class Values(Protocol):
    """A shard's part of a gradient."""

    segments: list[Tensor]
    views: list[Tensor]  # one per piece

    def present(self) -> Present:
        """For each piece: is there a gradient?"""


class Mean:
    """A running mean of gradients, weighted by example count, over flat segments and single pieces.

    A parameter missing in some gradients counts as zero there; missing in all, it has none.
    """

    def __init__(self, segments: list[Tensor], views: list[Tensor]) -> None:
        self.segments, self.views = segments, views
        self.present: Present = (False,) * len(views)
        self.total = 0

    def add(self, gradient: Values, present: Present, count: int, damping: float = 1.0) -> None:
        """`damping` multiplies this gradient; the mean is still by the count of examples."""
        if self.total == 0:
            self._start(gradient, present, count, damping)
            return
        if count == 0:
            return
        self.total += count
        weight = count / self.total
        if damping == 1.0 and all(present) and all(self.present):
            for mean, value in zip(self.segments, gradient.segments, strict=True):
                mean.lerp_(value, weight)
            return
        for mean, value, had, has in zip(self.views, gradient.views, self.present, present, strict=True):
            if had and has and damping == 1.0:
                mean.lerp_(value, weight)
            elif had and has:
                mean.mul_(1.0 - weight).add_(value, alpha=weight * damping)
            elif had:
                mean.mul_(1.0 - weight)
            elif has:
                torch.mul(value, weight * damping, out=mean)
        self.present = tuple(a or b for a, b in zip(self.present, present, strict=True))

    def _start(self, gradient: Values, present: Present, count: int, damping: float) -> None:
        if self.segments is not gradient.segments:
            for mean, value in zip(self.segments, gradient.segments, strict=True):
                mean.copy_(value)
        if damping != 1.0:
            torch._foreach_mul_(self.segments, damping)
        self.present, self.total = present, count


def add_up(mean: Mean, parts: Sequence[tuple[Values, Present, int]]) -> None:
    """The mean of these, by their examples, in this order."""
    for part in [part for part in parts if part[2]] or parts[:1]:
        mean.add(*part)


# -- gradients that are taken before they are made ----------------------------------------------------------


class Made(NamedTuple):
    """A fold's mean."""

    views: list[Tensor]  # one per piece of the part
    present: tuple[bool, ...]  # which of them have a gradient
    segments: list[Tensor] | None = None  # the same as the part's segments, for a step over all at once


class Taken(NamedTuple):
    """One promised gradient of the sequence, and how it counts in the mean of its fold."""

    promise: Any
    examples: int  # the mean is weighted by them
    damping: float  # multiplies the gradient, not its weight
    rank: int
    iteration: int


class Maker(ABC):
    """Makes promised gradients."""

    waits = False  # it can make the optimizer's steps later

    @abstractmethod
    def fold(self, part: Part, taken: Sequence[Taken]) -> Made:
        """The mean of these, cut to a shard's part; every shard of the table asks once, in its own time.

        The tensors are the shard's until it asks again.
        """

    def step_later(self, promise: Any, flat: FlatSGD, plan: StepPlan, version: int) -> bool:
        """Make the optimizer's step to this version with one promise, at the latest in `settle`; False: do it now."""
        return False

    def settle(self) -> None:
        """Steps that wait are made: somebody looks at the weights, or at the optimizer's state."""
        return None


class PromisedPart:
    """What one shard sees of a slot with a promise in it; stands where a `SlotPart` would."""

    def __init__(self, slot: Any, part: Part, maker: Maker) -> None:
        self.slot, self.part, self.maker = slot, part, maker

    def take(self, examples: int, damping: float, rank: int, iteration: int) -> Taken:
        """The promise as it lies in the slot now: after this the slot is free."""
        return Taken(self.slot.promise, examples, damping, rank, iteration)


# -- until the fold -----------------------------------------------------------------------------------------


class Gathered(NamedTuple):
    """The gradient of a fold; its memory is the shard's until the step is made."""

    views: list[Tensor]  # one per piece
    present: Present
    segments: list[Tensor] | None  # where nothing is missing, and they are at hand
    flat: bool = False  # a step over segments need equal the plain one only to rounding
    added: int = 0  # gradients that were added up only now

    @property
    def whole(self) -> list[Tensor] | None:
        return self.segments if all(self.present) else None


class _Kept(NamedTuple):
    """A gradient that waits for its fold where it lies."""

    gradient: Values
    present: Present
    examples: int
    rank: int
    iteration: int


_Waits = TypeVar("_Waits", _Kept, Taken)


class Accumulator:
    """Of one shard; `like` are segments of the shape that a mean needs."""

    def __init__(self, layout: Layout, part: Part, like: Sequence[Tensor]) -> None:
        self._layout, self._part, self._like = layout, part, like
        self._lockstep = False
        self._all = (True,) * len(part.pieces)
        self._kept: list[_Kept] = []
        self._promised: list[Taken] = []
        self._mean: Mean | None = None
        self.maker: Maker | None = None

    def change(self, *, lockstep: bool) -> None:
        """Another dial; nothing that was taken waits for its fold."""
        assert not self._kept and not self._promised and (self._mean is None or self._mean.total == 0)
        self._lockstep = lockstep

    def take(
        self,
        gradient: Values | PromisedPart,
        *,
        full: bool,
        count: int,
        rank: int,
        iteration: int,
        alone: bool,
        damping: float = 1.0,
    ) -> bool:
        """Into the sequence. `alone`: the next fold is of this gradient only. True if it is added to a mean."""
        kept = self._lockstep or (alone and damping == 1.0)
        if isinstance(gradient, PromisedPart):
            self.maker = gradient.maker
            self._promised.append(gradient.take(count, damping, rank, iteration))
            return not kept
        present = self._all if full else gradient.present()
        if kept:
            self._kept.append(_Kept(gradient, present, count, rank, iteration))
            return False
        self._running_mean().add(gradient, present, count, damping)
        return True

    def _running_mean(self) -> Mean:
        if self._mean is None:
            segments = [torch.zeros_like(segment) for segment in self._like]
            self._mean = Mean(segments, self._part.views(segments, self._layout.parameters.entries))
        return self._mean

    def gather(self, iteration: int) -> Gathered:
        """The mean of what the fold takes: in lockstep of this iteration, else of all."""
        if self._promised:
            taken, self._promised, added = self._choose(self._promised, iteration)
            return self.made(taken, added)
        if self._kept:
            kept, self._kept, added = self._choose(self._kept, iteration)
            first = kept[0].gradient
            mean = Mean(first.segments, first.views)  # in place: it is the shard's until it is free
            add_up(mean, [each[:3] for each in kept])
            return Gathered(mean.views, mean.present, mean.segments, added=added)
        mean = self._running_mean()
        mean.total = 0
        return Gathered(mean.views, mean.present, mean.segments)

    def alone(self) -> Taken | None:
        """The only gradient, where it is promised and counts as it is; taken out."""
        if len(self._promised) != 1 or self._promised[0].damping != 1.0:
            return None
        return self._promised.pop()

    def made(self, taken: Sequence[Taken], added: int = 0) -> Gathered:
        """Promised gradients, made now."""
        assert self.maker is not None
        found: Made = self.maker.fold(self._part, taken)
        return Gathered(found.views, found.present, found.segments, True, added)

    def _choose(self, waiting: list[_Waits], iteration: int) -> tuple[list[_Waits], list[_Waits], int]:
        """What the fold takes and what stays; how many are added up only now."""
        chosen, rest = waiting, []
        if self._lockstep:
            chosen = sorted(
                (each for each in waiting if each.iteration == iteration), key=lambda each: each.rank
            )
            rest = [each for each in waiting if each.iteration != iteration]
        added = len(chosen) if self._lockstep and len(chosen) > 1 else 0
        return [each for each in chosen if each.examples > 0] or chosen[:1], rest, added
