"""Flat tensors of one table's shape in one block of memory, a row for each: gradients that are kept, versions in use.

A computation over many of them is told their rows, and nothing is copied together first. A row is free again when
nobody holds its `Row`. Not responsible for what is in them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from syncline.sim.batched.objective import SimTask


class TensorRow:
    """A place; whoever wants what is in it holds it."""

    __slots__ = ("_rows", "number")

    def __init__(self, number: int, rows: Rows) -> None:
        self.number, self._rows = number, rows

    def __del__(self) -> None:
        self._rows.free.append(self.number)

    @property
    def segments(self) -> list[Tensor]:
        return self._rows.segments(self.number)


class Rows:
    """Rows for so many, and one that is nobody's; twice as many where that is not enough."""

    def __init__(self, task: SimTask, count: int) -> None:
        self.stacks = task.segments(count + 1)
        self.nobodys = count
        self.free = list(range(count))[::-1]
        self.growths = 0  # who holds on to `stacks` looks at this

    def take(self) -> TensorRow:
        if not self.free:
            self._grow()
        return TensorRow(self.free.pop(), self)

    def segments(self, number: int) -> list[Tensor]:
        return [stack[number] for stack in self.stacks]

    def _grow(self) -> None:
        count = self.nobodys
        self.stacks = [torch.cat([stack, torch.zeros_like(stack[1:])]) for stack in self.stacks]
        self.nobodys, self.growths = 2 * count, self.growths + 1
        self.free.extend(range(2 * count - 1, count - 1, -1))


def rows_of(task: SimTask, values: Sequence[Sequence[Tensor]]) -> Rows:
    """These, in the first rows."""
    rows = Rows(task, len(values))
    for index, stack in enumerate(rows.stacks):
        for number, segments in enumerate(values):
            stack[number].copy_(segments[index])
    return rows
