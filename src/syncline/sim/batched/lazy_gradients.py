"""Gradients that are promised when a learner reads, and made when they are wanted.

At its read a built-in learner knows the weights (a version) and the examples: that is a `Promise`. A `Computer` makes
the gradient, at the latest in `fold`. `EachAlone` is the plain one: each by itself, at once, on the module, with
the bits that a learner's own process would give. Not responsible for when learners read or shards fold.
"""

from __future__ import annotations

import math
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from syncline.learn.session import sparse_gradient
from syncline.sim.clock import Clock
from syncline.sim.owned_memory import Traffic
from syncline.sim.random_states import Random
from syncline.table.accumulator import Made, Maker, Mean, PromisedPart, Taken
from syncline.table.gradient_slot import Slot, options_of
from syncline.table.layout import Layout, Part

if TYPE_CHECKING:
    from syncline.sim.batched.shared_model import SharedModel


@dataclass(slots=True, eq=False, weakref_slot=True)
class Version:
    """Weights that somebody computes on: shared by all of them, never changed once every shard has filled it."""

    layout: Layout
    number: int
    place: Any  # where its `segments` are; free again when nobody holds it
    filled: set[int] = field(default_factory=set)  # by which shards

    @property
    def segments(self) -> list[Tensor]:
        return self.place.segments

    @property
    def views(self) -> list[Tensor]:
        """One per parameter."""
        return self.layout.parameters.views(self.segments)


class Versions:
    """The versions of one table that somebody still needs: one copy of each."""

    def __init__(self, layout: Layout, place: Callable[[], Any]) -> None:
        self._layout, self._place = layout, place
        self._kept: weakref.WeakValueDictionary[int, Version] = weakref.WeakValueDictionary()

    def get(self, number: int) -> Version:
        """Empty where it is new; whoever wants it must hold it."""
        version = self._kept.get(number)
        if version is None:
            version = self._kept[number] = Version(self._layout, number, self._place())
        return version

    def wanted(self, number: int) -> Version | None:
        """Only if somebody holds it."""
        return self._kept.get(number)

    def own(self, source: Sequence[Tensor]) -> Version:
        """A copy that is nobody else's."""
        version = Version(self._layout, -1, self._place())
        for mine, theirs in zip(version.segments, source, strict=True):
            mine.copy_(theirs)
        return version


@dataclass(slots=True, eq=False)
class Own:
    """What a learner does not share: the states of its random generators, and its model's buffers."""

    rank: int
    random: Random
    buffers: list[Tensor]


@dataclass(slots=True, eq=False)
class Gradient:
    """One gradient, flat; `present` says which parameters have one."""

    segments: list[Tensor]
    views: list[Tensor]  # one per parameter
    present: list[bool]


@dataclass(slots=True, eq=False, weakref_slot=True)
class Promise:
    """A gradient that may be wanted: all that it depends on. Whoever wants it holds it; else it is never made."""

    version: Version
    indices: Tensor  # of its examples, in the data set
    size: int  # how many there are
    own: Own
    gradient: Gradient | None = None
    loss: Any = float("nan")  # or something that gives it as a float, later
    buffers: list[Tensor] = field(default_factory=list)  # as they are after it
    row: Any = None  # where the computer keeps the gradient until its fold


class Computer(Maker):
    """Makes promised gradients; one for all learners of a run."""

    # of losses that are not finite
    alarm: Callable[[int | None, float], None] = staticmethod(lambda rank, loss: None)

    versions: Versions  # that its gradients are computed at

    @abstractmethod
    def promise(self, promise: Promise) -> None:
        """A learner has read: it begins this gradient now. A learner's gradients are promised in their order.

        From here on `promise.loss` can be read as a number, at the latest after the fold.
        """

    @abstractmethod
    def make(self, promise: Promise) -> Gradient:
        """This one, now: for learners that step by themselves, and for their buffers."""

    def fills(self, version: Version) -> bool:
        """A step that waits makes this version, and fills it."""
        return False

    def buffers(self, promise: Promise) -> list[Tensor]:
        """Of its learner's model, as they are after this gradient."""
        self.make(promise)
        return promise.buffers


class PromisedSlot:
    """Stands where a slot's memory would: a promise, and what travels with a gradient."""

    def __init__(self, computer: Computer) -> None:
        self._computer = computer
        self.promise: Promise | None = None
        self._options = b"[]"

    @property
    def buffers(self) -> list[Tensor]:
        assert self.promise is not None
        return self._computer.buffers(self.promise)

    @property
    def gradients(self) -> list[Tensor]:
        """One view per parameter, for whoever looks on."""
        assert self.promise is not None
        return self._computer.make(self.promise).views

    @property
    def mask(self) -> Tensor:
        assert self.promise is not None
        return torch.tensor(self._computer.make(self.promise).present, dtype=torch.uint8)

    def part(self, part: Part) -> PromisedPart:
        return PromisedPart(self, self._computer)

    def write_options(self, text: bytes) -> None:
        self._options = text

    def read_options(self) -> list[dict[str, Any]]:
        return _parsed(self._options)


@lru_cache(maxsize=64)
def _parsed(options: bytes) -> list[dict[str, Any]]:
    """The same list for the same text: shards notice a change by that."""
    return options_of(options)


class PromisedLane(Traffic):
    """Between one built-in learner and the shards of one table: promises there, shared versions back."""

    def __init__(self, computer: Computer, slots: int, shards: int, clock: Clock) -> None:
        super().__init__(slots, shards, clock)
        self._computer = computer
        self.slots = [PromisedSlot(computer) for _ in range(slots)]
        self.arriving: dict[int, Version] = {}  # by number
        self.first: Slot | None = None  # a table's first values, which are no promise

    def inbox(self, version: Version, shard: int) -> list[Tensor] | None:
        """Where the shard's part of this version goes; None where it is there already, or will be."""
        self.arriving[version.number] = version
        if shard in version.filled:
            return None
        version.filled.add(shard)
        if self._computer.fills(version):
            return None
        return version.segments


class EachAlone(Computer):
    """The plain way: each gradient by itself, when it is promised, by `backward` on the module."""

    def __init__(self, workshop: SharedModel) -> None:
        self._shop = workshop
        self._loaded: Version | None = None  # what the module's parameters hold

    @cached_property
    def versions(self) -> Versions:  # type: ignore[override]  # the model is made when it is needed
        layout = self._shop.layout
        return Versions(layout, lambda: SimpleNamespace(segments=layout.parameters.new(self._shop.device)))

    def promise(self, promise: Promise) -> None:
        shop, own, tensors = self._shop, promise.own, self._shop.tensors
        with own.random.drawn():
            batch = shop.read(promise.indices)
            if self._loaded is not promise.version:
                torch._foreach_copy_([p.data for p in tensors.parameters], promise.version.views)
                self._loaded = promise.version
            if own.buffers:
                torch._foreach_copy_(tensors.buffers, own.buffers)
            for parameter in tensors.parameters:
                parameter.grad = None
            loss = promise.loss = shop.plan.way(shop.model, batch).item()
        if not math.isfinite(loss):
            self.alarm(own.rank, loss)
        promise.gradient = self._gradient()
        if own.buffers:
            torch._foreach_copy_(own.buffers, tensors.buffers)
            promise.buffers = [buffer.clone() for buffer in tensors.buffers]

    def _gradient(self) -> Gradient:
        flat = self._shop.layout.parameters
        grads = [parameter.grad for parameter in self._shop.tensors.parameters]
        segments = flat.segments(torch.zeros(flat.nbytes, dtype=torch.uint8))
        made = Gradient(segments, flat.views(segments), [grad is not None for grad in grads])
        if any(grad is not None and grad.is_sparse for grad in grads):
            raise sparse_gradient()
        pairs = [(view, grad) for view, grad in zip(made.views, grads, strict=True) if grad is not None]
        if pairs:
            torch._foreach_copy_([view for view, _ in pairs], [grad.detach() for _, grad in pairs])
        return made

    def make(self, promise: Promise) -> Gradient:
        assert promise.gradient is not None
        return promise.gradient

    def fold(self, part: Part, taken: Sequence[Taken]) -> Made:
        """In place of the first: its memory is nobody's else by now, and shards' parts do not overlap."""
        cuts = [_Cut(self.make(each.gradient), part, self._shop.layout) for each in taken]
        mean = Mean(cuts[0].segments, cuts[0].views)
        for gradient, each in zip(cuts, taken, strict=True):
            mean.add(gradient, gradient.present(), each.examples, each.damping)
        return Made(mean.views, mean.present)


class _Cut:
    """A shard's part of a gradient, as `Mean` takes it."""

    def __init__(self, gradient: Gradient, part: Part, layout: Layout) -> None:
        self.segments = part.segments(gradient.segments)
        self.views = part.views(self.segments, layout.parameters.entries)
        self._present = tuple(gradient.present[piece.entry] for piece in part.pieces)

    def present(self) -> tuple[bool, ...]:
        return self._present
