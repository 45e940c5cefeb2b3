"""Steps of the optimizer that wait until somebody needs a version that they make, and are then made in one go.

Where every gradient is an update of its own, its step is a few small operations, and telling a GPU of them takes longer than they do;
as a CUDA graph many steps are one call. Each step is `FlatSGD`'s, with its bits, however many are made at once. Not
responsible for when: whoever looks at weights, momentum or versions settles first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from syncline.sim.batched.cuda_graphs import Captured, RepeatedProgram
from syncline.sim.batched.objective import Rows
from syncline.table.flat_sgd import FlatSGD, StepPlan

SIZES = (64, 32, 16, 8, 4, 2, 1)  # numbers of steps that are captured
OFTEN = 64  # steps with the same options after which they are
MOST_BYTES = 1 << 28  # of the versions that one computation makes


class _Known:
    """What is kept for one plan."""

    def __init__(self) -> None:
        self.steps = 0
        self.programs: dict[int, RepeatedProgram] = {}
        self.growths = (0, 0)


class DeferredSteps:
    """Steps of one table, in their order."""

    def __init__(
        self, gradients: Rows, versions: Rows, row_of: Callable[[int], int], *, together: bool
    ) -> None:
        """`row_of` a version's number is where it goes: `versions.nobodys` if nobody wants it.

        `together`: many in one computation, which a GPU captures; else one after another.
        """
        self._gradients, self._versions, self._row_of, self._together = gradients, versions, row_of, together
        self._pool: Any = None
        self._waiting: list[tuple[FlatSGD, StepPlan, int, int]] = []  # (…, row of the gradient, version)
        self._known: weakref.WeakKeyDictionary[StepPlan, _Known] = weakref.WeakKeyDictionary()
        self.newest = -1  # version that the last step makes

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, flat: FlatSGD, plan: StepPlan, row: int, version: int) -> None:
        """A step with the gradient in this row, which may be used for another after `settle`."""
        self._waiting.append((flat, plan, row, version))
        self.newest = version

    def settle(self) -> None:
        """All that wait."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        with torch.no_grad():
            for (flat, plan), group in groupby(waiting, key=lambda step: step[:2]):
                steps = [(row, self._row_of(version)) for _, _, row, version in group]
                known = self._known.setdefault(plan, _Known())
                known.steps += len(steps)
                if self._together and known.steps > OFTEN:
                    self._many(flat, plan, steps, known)
                    continue
                for row, target in steps:
                    for index, weights in enumerate(flat.weights):
                        flat.move(plan, index, weights, self._gradients.stacks[index][row], weights)
                        if target != self._versions.nobodys:
                            self._versions.stacks[index][target].copy_(weights)

    def _many(self, flat: FlatSGD, plan: StepPlan, steps: list[tuple[int, int]], known: _Known) -> None:
        growths = self._gradients.growths, self._versions.growths
        if known.growths != growths:  # the memory is another
            known.programs.clear()
            known.growths = growths
        most = MOST_BYTES // max(1, sum(weights.nbytes for weights in flat.weights))
        for size in [size for size in SIZES if size <= max(1, most)]:
            while len(steps) >= size:
                program = known.programs.get(size)
                if program is None:
                    program = known.programs[size] = self._program(flat, plan, size)
                rows, targets = zip(*steps[:size], strict=True)
                program.inputs[0].copy_(torch.tensor((rows, targets)), non_blocking=True)
                program.run()
                del steps[:size]

    def _program(self, flat: FlatSGD, plan: StepPlan, count: int) -> RepeatedProgram:
        device = flat.weights[0].device
        header = torch.empty(2, count, dtype=torch.int64, device=device)
        header[0], header[1] = self._gradients.nobodys, self._versions.nobodys
        same = replace(plan)  # what is kept for a plan must not keep it

        @torch.no_grad()
        def function(header: Tensor) -> None:
            for index, weights in enumerate(flat.weights):
                gradients = self._gradients.stacks[index].index_select(0, header[0])
                made = torch.empty_like(gradients)
                before = weights
                for gradient, after in zip(gradients.unbind(0), made.unbind(0), strict=True):
                    flat.move(same, index, before, gradient, after)
                    before = after
                weights.copy_(before)
                self._versions.stacks[index].index_copy_(0, header[1], made)

        if device.type != "cuda":
            return RepeatedProgram(function, [header])
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        state = [*flat.weights, *flat.momentum]
        kept = [tensor.clone() for tensor in state]
        program = Captured(function, [header], self._pool)  # which makes a few steps
        for tensor, value in zip(state, kept, strict=True):
            tensor.copy_(value)
        return program
