"""Gradients that a shard takes before they are made: it keeps them until the fold, which asks for their mean.

A `Maker` makes gradients when they are wanted (the simulator has several). Not responsible for how it does so.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from syncline.table.flat_sgd import FlatSGD, StepPlan
from syncline.table.layout import Part


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
