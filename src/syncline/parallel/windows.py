"""Windows: boxes of a global array, who owns which and who wants which, and what therefore moves (C4).

Pure arithmetic on whole numbers. A box may reach beyond its array: what lies outside is padding and moves nowhere.
Not responsible for tensors or processes: `move` is.

    owned     0 1 1      wanted by 0  ┌───┐      moves 1 → 0: the one column that 0 wants and does not own
              0 1 1                   │   │
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from syncline.errors import UsageError

Span = tuple[int, int]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """From the first to before the second number of every span, one for each dimension."""

    spans: tuple[Span, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls(tuple((0, size) for size in shape))

    @property
    def shape(self) -> Shape:
        return tuple(max(0, high - low) for low, high in self.spans)

    @property
    def size(self) -> int:
        count = 1
        for low, high in self.spans:
            if high <= low:
                return 0
            count *= high - low
        return count

    def replaced(self, dim: int, span: Span) -> Box:
        spans = list(self.spans)
        spans[dim] = span
        return Box(tuple(spans))

    def meet(self, other: Box) -> Box:
        """What both have; its size is 0 where they do not meet."""
        spans = []
        for (a, b), (c, d) in zip(self.spans, other.spans, strict=True):
            low, high = a if a > c else c, b if b < d else d
            spans.append((low, high if high > low else low))
        return Box(tuple(spans))

    def minus(self, other: Box) -> list[Box]:
        """This without the other, in boxes that do not overlap."""
        common = self.meet(other)
        if not common.size:
            return [self] if self.size else []
        rest, left = [], list(self.spans)
        for dim, ((low, high), (first, last)) in enumerate(zip(self.spans, common.spans, strict=True)):
            for side in ((low, first), (last, high)):
                if side[0] < side[1]:
                    left[dim] = side
                    rest.append(Box(tuple(left)))
            left[dim] = (first, last)
        return rest

    def inside(self, outer: Box) -> tuple[slice, ...]:
        """Where this lies in a buffer that holds `outer`."""
        return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(self.spans, outer.spans, strict=True))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{low}:{high}" for low, high in self.spans) + "]"


def even(size: int, parts: int, unit: int = 1) -> list[Span]:
    """Cut 0 … size into spans whose lengths differ by one unit at most; the last unit may be broken."""
    units = -(-size // unit)
    ends = [min(size, unit * (units * part // parts)) for part in range(parts + 1)]
    return list(pairwise(ends))


def cut(shape: Sequence[int], dim: int, spans: Iterable[Span]) -> tuple[Box, ...]:
    """One box for each span of one dimension, whole in the others."""
    return tuple(Box.whole(shape).replaced(dim, span) for span in spans)


def near_square(parts: int) -> tuple[int, int]:
    """Rows and columns of a grid, rows the more: 2×1, 3×1, 2×2, 3×2."""
    columns = max(c for c in range(1, math.isqrt(parts) + 1) if parts % c == 0)
    return parts // columns, columns


def disjoint(boxes: Iterable[Box]) -> list[Box]:
    """The same places, in boxes that do not overlap."""
    found: list[Box] = []
    for box in boxes:
        rest = [box] if box.size else []
        for other in found:
            rest = [piece for part in rest for piece in part.minus(other)]
        found += rest
    return found


@dataclass(frozen=True, slots=True)
class Route:
    """What every process sends to every other one: boxes of the array, for (source, destination).

    Of *values* a destination gets each place once, from itself if it owns it. Of *partial sums* it gets every owner's,
    to be added. `pieces` has what stays in a process too, under (rank, rank).
    """

    shape: Shape
    pieces: dict[tuple[int, int], tuple[Box, ...]]

    def count(self, source: int, destination: int) -> int:
        return sum(box.size for box in self.pieces.get((source, destination), ()))

    @property
    def moved(self) -> int:
        """Numbers that change the process, all together."""
        return sum(self.count(a, b) for a, b in self.pieces if a != b)


def route(
    shape: Sequence[int], owns: Sequence[Sequence[Box]], wants: Sequence[Sequence[Box]], *, sums: bool = False
) -> Route:
    """By rank: the boxes that each owns (they must not overlap in one process) and those that it wants."""
    whole, ranks = Box.whole(shape), range(len(owns))
    pieces: dict[tuple[int, int], tuple[Box, ...]] = {}
    for destination in ranks:
        needed = disjoint(box.meet(whole) for box in wants[destination])
        for step in ranks:
            if not needed:
                break
            source = (destination + step) % len(owns)
            met = (need.meet(own) for own in owns[source] for need in needed)
            if found := tuple(piece for piece in met if piece.size):
                pieces[source, destination] = found
            if not sums:
                for piece in found:
                    needed = [rest for need in needed for rest in need.minus(piece)]
        if needed and not sums:
            raise UsageError(
                f"process {destination} wants {needed[0]} of an array of {list(shape)}: nobody owns it"
            )
    return Route(tuple(shape), pieces)
