"""What one seat of a group has of a whole model's tensors: its windows of them, to read and to write; and where a table is cut so
that they lie in few shards.

Of tensors that every seat holds whole, each reads all and writes a part. Not responsible for when anything may be read or written.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from syncline.parallel.module import Part
from syncline.parallel.windows import Box, Shape, Span, even
from syncline.table.layout import LINE, Layout, Spans

MOST_SPANS = 64  # of one tensor in one seat, that shards are cut along


class Targets(NamedTuple):
    """Where a seat writes: tensors of its own shapes, some of them views of the whole ones. `flush` copies the others there."""

    tensors: list[Tensor]
    pairs: list[tuple[Tensor, Tensor]]  # into the whole ones, from these

    def flush(self) -> None:
        if self.pairs:
            into, sources = zip(*self.pairs, strict=True)
            torch._foreach_copy_(list(into), list(sources))


class Windows:
    """A seat's windows of a list of tensors, by name."""

    def __init__(self, parts: Mapping[str, Part], names: Sequence[str], rank: int, seats: int) -> None:
        self._rank, self._seats = rank, seats
        self._parts = [parts[name] for name in names]

    def read(self, wholes: Sequence[Tensor]) -> list[Tensor]:
        """This seat's parts; views where that is possible."""
        return [self._read(part, whole) for part, whole in zip(self._parts, wholes, strict=True)]

    def _read(self, part: Part, whole: Tensor) -> Tensor:
        boxes = part.boxes[self._rank]
        if len(boxes) > 1:
            return part.take(self._rank, whole)
        return whole[boxes[0].inside(Box.whole(part.shape))]

    @property
    def reads(self) -> list[list[Span]]:
        """Elements of every tensor."""
        return [spans_of(part, self._rank) for part in self._parts]

    def targets(self, wholes: Sequence[Tensor]) -> Targets:
        """Where to write this seat's parts."""
        found = Targets([], [])
        shares = shares_of(self._parts, self._seats)
        for part, whole, spans in zip(self._parts, wholes, shares, strict=True):
            if part.replicated:
                low, high = spans[self._rank]
                found.tensors.append(own := torch.zeros_like(whole))
                if low < high:
                    found.pairs.append((whole.view(-1)[low:high], own.view(-1)[low:high]))
            elif len(part.boxes[self._rank]) > 1:
                own = torch.zeros(part.local_shape(self._rank), dtype=whole.dtype)
                found.tensors.append(own)
                found.pairs.extend(part.pairs(self._rank, whole, own))
            else:
                found.tensors.append(self._read(part, whole))
        return found


def shares_of(parts: Sequence[Part], seats: int) -> list[list[Span]]:
    """Elements of every tensor that each seat writes where all hold them: together an equal part of all such tensors."""
    sizes = [math.prod(part.shape) if part.replicated else 0 for part in parts]
    shares, base, found = even(sum(sizes), seats), 0, []
    for size in sizes:
        found.append([tuple(min(max(at - base, 0), size) for at in share) for share in shares])
        base += size
    return found  # type: ignore[return-value]


def spans_of(part: Part, rank: int) -> list[Span]:
    """Elements of the flat tensor that lie in a rank's boxes; where those of a box are very many spans, one around them."""
    return sorted(span for box in part.boxes[rank] if box.size for span in _spans(part.shape, box))


def _spans(shape: Shape, box: Box) -> list[Span]:
    cut = max((dim for dim, span in enumerate(box.spans) if span != (0, shape[dim])), default=0)
    inner, outer = math.prod(shape[cut + 1 :]), [range(*span) for span in box.spans[:cut]]
    low, high = box.spans[cut] if box.spans else (0, 1)
    many = math.prod(map(len, outer)) > MOST_SPANS
    found = []
    for place in [tuple(span[at] for span in outer) for at in (0, -1)] if many else itertools.product(*outer):
        at = 0
        for number, size in zip(place, shape[1 : cut + 1], strict=True):
            at = (at + number) * size
        found.append(((at + low) * inner, (at + high) * inner))
    return [(found[0][0], found[-1][1])] if many else found


def shard_cuts(layout: Layout, parts: Mapping[str, Part], seats: int) -> tuple[Spans, ...]:
    """Spans of the table's bytes for each shard, so that a seat writes to as few of them as can be, and reads from no others what is
    its own alone. None where that cannot be: an optimizer wants whole tensors, or a tensor is empty."""
    flat, shards = layout.parameters, layout.shards
    if shards == 1 or not layout.cuttable or not all(entry.numel for entry in flat.entries):
        return ()
    held = [parts[entry.name] for entry in flat.entries]
    lines: list[list[Span]] = [[] for _ in range(seats)]
    for index, (part, shares) in enumerate(zip(held, shares_of(held, seats), strict=True)):
        segment, start = flat.places[index]
        size, numel = flat.item_sizes[segment], flat.entries[index].numel
        base = flat.offsets[segment] + start * size
        for line, spans in zip(lines, _owned(part, shares, numel), strict=True):
            line += [(base + low * size, base + high * size) for low, high in spans if low < high]
    found: list[list[Span]] = [[] for _ in range(shards)]
    for seat, line in enumerate(lines):
        first, last = seat * shards // seats, (seat + 1) * shards // seats
        for shard, spans in enumerate(_dealt(line, max(1, last - first)), first):
            found[shard] += spans
    joined: list[list[Span]] = [[] for _ in range(shards)]  # in order, those that adjoin as one
    for spans, ends in zip(found, joined, strict=True):
        for low, high in sorted(spans):
            low = ends.pop()[0] if ends and ends[-1][1] == low else low
            ends.append((low, high))
    return tuple(map(tuple, joined))


def _owned(part: Part, shares: list[Span], numel: int) -> list[list[Span]]:
    """By seat, elements that no other has; where windows overlap or are scattered, an equal part."""
    if part.replicated:
        return [[share] for share in shares]
    found = [spans_of(part, rank) for rank in range(len(shares))]
    ends = sorted(span for spans in found for span in spans)
    if [low for low, _ in ends] + [numel] != [0] + [high for _, high in ends]:
        return [[span] for span in even(numel, len(shares))]
    return found


def _dealt(line: list[Span], parts: int) -> list[list[Span]]:
    """Cut into equal parts."""
    found: list[list[Span]] = []
    for first, last in even(sum(high - low for low, high in line), parts, LINE):
        at, own = 0, []
        for low, high in line:
            begin, end = max(first - at, 0), min(last - at, high - low)
            own += [(low + begin, low + end)] if begin < end else []
            at += high - low
        found.append(own)
    return found
