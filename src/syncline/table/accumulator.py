"""What adds up: the gradients that a shard has taken, until the fold that they belong to (M3).

In lockstep they are kept where they lie and added in rank order; otherwise each is added to a running mean when it is taken. A
fold of one gradient is that gradient as it lies. Promised gradients are kept as promises: a `Maker` makes them when the fold
wants their mean (the simulator has several). Not responsible for deciding when to fold, nor for what becomes of the mean.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

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
            if self.segments is not gradient.segments:
                for mean, value in zip(self.segments, gradient.segments, strict=True):
                    mean.copy_(value)
            if damping != 1.0:
                torch._foreach_mul_(self.segments, damping)
            self.present, self.total = present, count
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


def add_up(mean: Mean, parts: Sequence[tuple[Values, Present, int]]) -> None:
    """The mean of these, by their examples, in this order."""
    for part in [part for part in parts if part[2]] or parts[:1]:
        mean.add(*part)


# -- gradients that are taken before they are made ----------------------------------------------------------


class Made(NamedTuple):
    """A fold's mean, the gradient of a step; its memory is the shard's until the step is made."""

    views: list[Tensor]  # one per piece of the part
    present: Present  # which of them have a gradient
    segments: list[Tensor] | None = None  # the same as the part's segments, for a step over all at once
    flat: bool = False  # a step over segments need equal the plain one only to rounding
    added: int = 0  # gradients that were added up only now

    @property
    def whole(self) -> list[Tensor] | None:
        """The segments, where nothing is missing and they are at hand."""
        return self.segments if all(self.present) else None


class Taken(NamedTuple):
    """One gradient of the sequence that waits for its fold, and how it counts in the mean."""

    gradient: Any  # `Values`, where they lie; or the promise of some
    examples: int  # the mean is weighted by them
    damping: float  # multiplies the gradient, not its weight
    rank: int
    iteration: int
    present: Present = ()  # of one that is promised only its maker knows


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


class PromisedPart(NamedTuple):
    """What a shard sees of a slot with a promise in it; stands where a `SlotPart` would."""

    slot: Any  # free as soon as its promise is taken
    maker: Maker


# -- until the fold -----------------------------------------------------------------------------------------


class Accumulator:
    """Of one shard; `like` are segments of the shape that a mean needs. A table's gradients are all promised, or none is."""

    def __init__(self, layout: Layout, part: Part, like: Sequence[Tensor]) -> None:
        self._layout, self._part, self._like = layout, part, like
        self._lockstep = False
        self._all = (True,) * len(part.pieces)
        self._taken: list[Taken] = []
        self._mean: Mean | None = None
        self.maker: Maker | None = None

    def change(self, *, lockstep: bool) -> None:
        """Another dial; nothing that was taken waits for its fold."""
        assert not self._taken and (self._mean is None or self._mean.total == 0)
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
            self._taken.append(Taken(gradient.slot.promise, count, damping, rank, iteration))
            return not kept
        present = self._all if full else gradient.present()
        if kept:
            self._taken.append(Taken(gradient, count, damping, rank, iteration, present))
            return False
        self._running_mean().add(gradient, present, count, damping)
        return True

    def _running_mean(self) -> Mean:
        if self._mean is None:
            segments = [torch.zeros_like(segment) for segment in self._like]
            self._mean = Mean(segments, self._part.views(segments, self._layout.parameters.entries))
        return self._mean

    def gather(self, iteration: int) -> Made:
        """The mean of what the fold takes: in lockstep of this iteration, else of all."""
        if not self._taken:
            mean = self._running_mean()
            mean.total = 0
            return Made(mean.views, mean.present, mean.segments)
        chosen, self._taken = self._taken, []
        if self._lockstep:
            self._taken = [each for each in chosen if each.iteration != iteration]
            now = [each for each in chosen if each.iteration == iteration]
            chosen = sorted(now, key=lambda each: each.rank)
        added = len(chosen) if self._lockstep and len(chosen) > 1 else 0
        chosen = [each for each in chosen if each.examples > 0] or chosen[:1]
        if self.maker is not None:
            return self.made(chosen, added)
        first = chosen[0].gradient
        mean = Mean(first.segments, first.views)  # in place: it is the shard's until it is free
        for each in chosen:
            mean.add(each.gradient, each.present, each.examples)
        return Made(mean.views, mean.present, mean.segments, added=added)

    def alone(self) -> Taken | None:
        """The only gradient, where it is promised and counts as it is; taken out."""
        if len(self._taken) != 1 or self._taken[0].damping != 1.0:
            return None
        return self._taken.pop()

    def made(self, taken: Sequence[Taken], added: int = 0) -> Made:
        """Promised gradients, made now."""
        assert self.maker is not None
        return self.maker.fold(self._part, taken)._replace(flat=True, added=added)
