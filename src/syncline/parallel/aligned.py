"""Rules for whatever keeps dimensions as they are: elementwise operations, permutations, reductions, reshapes.

An operation is described by which dimension of each input a dimension of its result goes along with, place by place.
Dimensions that go along may be cut; the others are wanted whole. Not responsible for which function is which.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from syncline.parallel.rules import Call, Local, Rule, Spread, Want, by_examples, cut_by, whole
from syncline.parallel.trace import Array
from syncline.parallel.windows import Box, Shape, Span

Along = tuple[int | None, ...]  # for every dimension of the result, that of an input


@dataclass
class Aligned(Rule):
    """`along` says for each input which of its dimensions go along with the result's."""

    along: Callable[[Call], list[Along]]
    compute: Callable[..., Any] | None = None
    sums: bool = False  # over dimensions that are cut it can be computed in parts, which are added
    ways: tuple[str, ...] = ("data", "model", "spatial")

    def place(self, call: Call) -> list[Spread]:
        self.check_way(call)
        along = _checked(call, self.along(call))
        leader = call.leader()
        if call.way is not None and (leader is None or call.spreads[leader].way != call.way):
            found = [cut_by(call, call.way, array) for array in call.outputs]
            if all(
                _computable(call, along, array, spread)
                for array, spread in zip(call.outputs, found, strict=True)
            ):
                return found
            raise call.refuse(f"works along a dimension that {call.way!r} cuts: give it another way")
        if leader is not None:
            followed = [_follow(call, along, leader, array) for array in call.outputs]
            if all(spread is not None for spread in followed):
                return [spread for spread in followed if spread is not None]
            if self.sums and _in_parts(call.spreads[leader].boxes):
                kept = [_kept(along[leader], call.spreads[leader], array) for array in call.outputs]
                return [Spread(boxes, "whole", sums=True) for boxes in kept]
        if call.way not in (None, "data"):
            raise call.refuse(f"works along a dimension that {call.way!r} cuts: give it another way")
        if _per_example(call, along):
            return [by_examples(array, call.batch, call.parts) for array in call.outputs]
        return [whole(array, call.parts) for array in call.outputs]

    def wants(self, call: Call, outs: Sequence[Spread], rank: int) -> list[Want]:
        if outs[0].sums:
            leader = call.leader()
            boxes = [Box.whole(array.shape) for array in call.inputs]
            return [Want(call.spreads[i].boxes[rank] if i == leader else box) for i, box in enumerate(boxes)]
        return [
            Want(_read(array, dims, outs[0].boxes[rank]))
            for array, dims in zip(call.inputs, _checked(call, self.along(call)), strict=True)
        ]

    def run(self, local: Local, *args: Any, **kwargs: Any) -> Any:
        if self.compute is not None:
            return self.compute(local.module, local, *args, **kwargs)
        return local.module(*args, **kwargs)


def _checked(call: Call, along: list[Along]) -> list[Along]:
    """Without dimensions of one place that are spread over many: those are wanted whole."""
    shape = call.outputs[0].shape
    return [
        tuple(
            dim if dim is not None and array.shape[dim] == shape[at] else None for at, dim in enumerate(dims)
        )
        for array, dims in zip(call.inputs, along, strict=True)
    ]


def _computable(call: Call, along: list[Along], array: Array, spread: Spread) -> bool:
    """A dimension that goes along with no input has to be whole."""
    made = [at for at in range(len(array.shape)) if all(dims[at] is None for dims in along)]
    return all(box.spans[at] == (0, array.shape[at]) for at in made for box in spread.boxes)


def _follow(call: Call, along: list[Along], leader: int, array: Array) -> Spread | None:
    """The leader's windows, if everything that they cut goes along."""
    spread, dims, shape = call.spreads[leader], along[leader], call.inputs[leader].shape
    cut = {dim for dim in range(len(shape)) if any(box.spans[dim] != (0, shape[dim]) for box in spread.boxes)}
    if not cut <= set(dims):
        return None
    return Spread(_kept(dims, spread, array), spread.way)


def _kept(dims: Along, spread: Spread, array: Array) -> tuple[Box, ...]:
    pairs = list(zip(array.shape, dims, strict=True))
    return tuple(
        Box(tuple((0, size) if dim is None else box.spans[dim] for size, dim in pairs))
        for box in spread.boxes
    )


def _per_example(call: Call, along: list[Along]) -> bool:
    """The examples of every input go along with those of the results."""
    out = call.outputs[0].batch
    if out is None:
        return all(array.batch is None for array in call.inputs)
    return all(
        array.batch is None or dims[out] == array.batch
        for array, dims in zip(call.inputs, along, strict=True)
    ) and any(dims[out] is not None for dims in along)


def _in_parts(boxes: Sequence[Box]) -> bool:
    return all(not a.meet(b).size for at, a in enumerate(boxes) for b in boxes[:at])


def _read(array: Array, dims: Along, window: Box) -> Box:
    box = Box.whole(array.shape)
    for at, dim in enumerate(dims):
        if dim is not None:
            box = box.replaced(dim, window.spans[at])
    return box


def broadcast(call: Call) -> list[Along]:
    """Elementwise, dimensions counted from the last."""
    rank = len(call.outputs[0].shape)
    return [
        tuple(at - rank + len(a.shape) if at >= rank - len(a.shape) else None for at in range(rank))
        for a in call.inputs
    ]


def keeping(dims: Callable[[Call], Sequence[int]]) -> Callable[[Call], list[Along]]:
    """The first input's dimensions stay where they are, but for those that are worked on, which may vanish."""

    def along(call: Call) -> list[Along]:
        rank, out = len(call.inputs[0].shape), len(call.outputs[0].shape)
        worked = {dim % rank for dim in dims(call)} if rank else set()
        kept: list[int | None] = [None if dim in worked else dim for dim in range(rank)]
        if out < rank:
            kept = [dim for dim in kept if dim is not None]
        nothing: Along = (None,) * out
        return [tuple(kept) if len(array.shape) == rank else nothing for array in call.inputs]

    return along


def share_of_mean(kind: Any, local: Local, *args: Any, **kwargs: Any) -> Tensor:
    """A mean over what is cut: this process's part of it."""
    mean: Tensor = kind(*args, **kwargs)
    here, there = math.prod(local.wanted[0].shape), math.prod(local.window.shape)
    if not local.sums or not there:
        return mean
    whole_in, whole_out = math.prod(local.call.inputs[0].shape), math.prod(local.call.outputs[0].shape)
    return mean * ((here / there) / (whole_in / whole_out)) if here else torch.zeros_like(mean)


# -- reshapes --------------------------------------------------------------------------------------------------


class Reshape(Rule):
    """Dimensions are joined or split. A window of the result is part of the smallest input window that covers it."""

    ways = ("data", "model", "spatial")

    def place(self, call: Call) -> list[Spread]:
        self.check_way(call)
        source, array, leader = call.inputs[0], call.outputs[0], call.leader()
        if call.way is not None and (leader is None or call.spreads[leader].way != call.way):
            return [cut_by(call, call.way, array)]
        if leader is not None:
            boxes = [_reshaped(source.shape, array.shape, box) for box in call.spreads[leader].boxes]
            found = tuple(box for box in boxes if box is not None)
            if len(found) == call.parts:
                return [Spread(found, call.spreads[leader].way)]
        return [by_examples(array, call.batch, call.parts)]

    def wants(self, call: Call, outs: Sequence[Spread], rank: int) -> list[Want]:
        return [Want(_covering(call.inputs[0].shape, call.outputs[0].shape, outs[0].boxes[rank])[0])]

    def run(self, local: Local, *args: Any, **kwargs: Any) -> Tensor:
        _, cover = _covering(local.call.inputs[0].shape, local.call.outputs[0].shape, local.window)
        tensor: Tensor = args[0]
        return tensor.reshape(cover.shape)[local.window.inside(cover)]


def _groups(old: Shape, new: Shape) -> list[tuple[list[int], list[int]]]:
    """Runs of dimensions of both with the same number of places, as short as can be."""
    found, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        a, b = [i] if i < len(old) else [], [j] if j < len(new) else []
        i, j = i + len(a), j + len(b)
        while _places(old, a) != _places(new, b):
            if (_places(old, a) < _places(new, b) and i < len(old)) or j >= len(new):
                a, i = [*a, i], i + 1
            else:
                b, j = [*b, j], j + 1
        found.append((a, b))
    return found


def _places(shape: Shape, dims: Sequence[int]) -> int:
    return math.prod(shape[dim] for dim in dims)


def _thick(shape: Shape, dims: Sequence[int]) -> list[int]:
    return [dim for dim in dims if shape[dim] != 1]


def _reshaped(old: Shape, new: Shape, box: Box) -> Box | None:
    """What becomes of an input window, if it is a window of the result."""
    spans: list[Span] = [(0, size) for size in new]
    for a, b in _groups(old, new):
        one, other = _thick(old, a), _thick(new, b)
        cut = [dim for dim in one if box.spans[dim] != (0, old[dim])]
        if not cut:
            continue
        low, high = box.spans[one[0]]
        rest, inner = _places(old, one[1:]), _places(new, other[1:])
        if cut != one[:1] or (low * rest) % inner or (high * rest) % inner:
            return None
        spans[other[0]] = (low * rest // inner, high * rest // inner)
    return Box(tuple(spans))


def _covering(old: Shape, new: Shape, window: Box) -> tuple[Box, Box]:
    """The input window that covers a window of the result, and all of the result that it gives."""
    read, gives = list(Box.whole(old).spans), list(Box.whole(new).spans)
    for a, b in _groups(old, new):
        one, other = _thick(old, a), _thick(new, b)
        if not other or all(window.spans[dim] == (0, new[dim]) for dim in other):
            continue
        low, high = window.spans[other[0]]
        rest, inner = _places(old, one[1:]), _places(new, other[1:])
        step = math.lcm(rest, inner)  # the smallest piece that is whole in both
        first = low * inner // step
        last = -(-high * inner // step) if high > low else first
        read[one[0]] = (first * step // rest, last * step // rest)
        gives[other[0]] = (first * step // inner, last * step // inner)
    return Box(tuple(read)), Box(tuple(gives))
