"""What one seat of a group has of a whole model's tensors: its windows of them, to read and to write.

Of tensors that every seat holds whole, each reads all and writes a part. Not responsible for when anything may be read or written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from syncline.parallel.module import Part
from syncline.parallel.windows import Box, even


class Targets:
    """Where a seat writes: tensors of its own shapes, some of them views of the whole ones. `flush` copies the others there."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._into: list[Tensor] = []
        self._sources: list[Tensor] = []

    def view(self, tensor: Tensor) -> None:
        self.tensors.append(tensor)

    def scratch(self, tensor: Tensor, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """A tensor beside, and which parts of it go where."""
        self.tensors.append(tensor)
        for into, source in pairs:
            self._into.append(into)
            self._sources.append(source)

    def flush(self) -> None:
        if self._into:
            torch._foreach_copy_(self._into, self._sources)


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

    def targets(self, wholes: Sequence[Tensor]) -> Targets:
        """Where to write this seat's parts."""
        found, base = Targets(), 0
        total = sum(whole.numel() for part, whole in zip(self._parts, wholes, strict=True) if part.replicated)
        span = even(total, self._seats)[self._rank]
        for part, whole in zip(self._parts, wholes, strict=True):
            if part.replicated:
                low, high = max(span[0], base) - base, min(span[1], base + whole.numel()) - base
                base += whole.numel()
                own = torch.zeros_like(whole)
                pairs = [(whole.view(-1)[low:high], own.view(-1)[low:high])] if low < high else []
                found.scratch(own, pairs)
            elif len(part.boxes[self._rank]) > 1:
                own = torch.zeros(part.local_shape(self._rank), dtype=whole.dtype)
                found.scratch(own, part.pairs(self._rank, whole, own))
            else:
                found.view(self._read(part, whole))
        return found
