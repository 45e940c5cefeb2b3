"""Many gradients in one computation: of one version, added up; or of many versions, each kept by itself.

`Joined` computes the weighted sum of the gradients of several batches at one version in one pass; `Stacked` those of batches
at different versions, their weights stacked. Both map the objective over the batches with `torch.vmap`, so every
batch has its own loss, whatever it is a function of. Not responsible for which gradients, nor for when.
Legend: n batches, μ examples of each.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from syncline.sim.batched.convolutions import Unfolded
from syncline.sim.batched.cuda_graphs import Captured, RepeatedProgram
from syncline.sim.batched.objective import SimTask
from syncline.sim.batched.tensor_rows import Rows

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # numbers of batches that are captured
CONVOLUTIONS = ("unfolded", "grouped")


def padded(count: int) -> int:
    """The next number of batches that has a program."""
    return next((size for size in SIZES if size >= count), count)


class JoinedBatches:
    """What both have in common: programs for each (n, μ), and the numbers that go to the device with each call."""

    def __init__(self, task: SimTask, losses: Tensor, versions: Rows, *, graphs: bool) -> None:
        self._task, self._losses = task, losses  # losses: one for each place, and one that is nobody's
        self._versions = versions
        self._graphs = graphs and task.device.type == "cuda"
        self._programs: dict[tuple[int, int], RepeatedProgram] = {}
        self._made_at = self._growths()
        self._pool = torch.cuda.graph_pool_handle() if self._graphs else None
        self.present: tuple[bool, ...] = ()  # which parameters have a gradient, once one was computed

    def _pad(self, count: int) -> int:
        """A captured program has a fixed size; others are made for any."""
        return padded(count) if self._graphs else count

    def program(self, count: int, batches: Sequence[Tensor]) -> RepeatedProgram:
        """For this many batches of this size, captured if it is new."""
        if self._made_at != self._growths():  # the memory is another
            self._made_at = self._growths()
            self._programs.clear()
        key = (count, len(batches[0]))
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = self._make(*key, self._task.examples.leaves([batches[0]] * count))
        return program

    def _growths(self) -> tuple[int, ...]:
        return (self._versions.growths,)

    def _make(self, count: int, size: int, leaves: list[Tensor]) -> RepeatedProgram:
        device, first = self._task.device, 2 * count + self._weighted(count)
        header = torch.zeros(first + count * size, dtype=torch.int64, device=device)
        header[:count] = len(self._losses) - 1
        inputs = [header, *(leaf.to(device) for leaf in leaves)]

        def function(header: Tensor, *leaves: Tensor) -> None:
            batch = self._task.examples.stack(header[first:].view(count, size), leaves)
            rows = header[2 * count : first]
            weights = [stack.index_select(0, rows) for stack in self._versions.stacks]
            self._compute(header[:count], header[count : 2 * count], weights, batch)

        if self._pool is None:
            return RepeatedProgram(function, inputs)
        self._harmless(header, count)
        return Captured(function, inputs, self._pool)

    def _run(self, program: RepeatedProgram, header: Tensor, batches: Sequence[Tensor]) -> None:
        """With new numbers."""
        program.inputs[0].copy_(header, non_blocking=True)
        leaves = self._task.examples.leaves(batches)
        for static, leaf in zip(program.inputs[1:], leaves, strict=True):
            static.copy_(leaf, non_blocking=True)
        program.run()

    @abstractmethod
    def _weighted(self, count: int) -> int:
        """How many versions this many batches are computed at."""

    @abstractmethod
    def _harmless(self, header: Tensor, count: int) -> None:
        """Numbers with which a program changes nothing that matters."""

    @abstractmethod
    def _compute(self, places: Tensor, second: Tensor, weights: Sequence[Tensor], batch: Any) -> None: ...


class Joined(JoinedBatches):
    """Several batches at one version: the weighted sum of their gradients, added to `total`."""

    def __init__(self, task: SimTask, losses: Tensor, versions: Rows, *, graphs: bool = True) -> None:
        super().__init__(task, losses, versions, graphs=graphs)
        self.total = task.segments()
        self.views = task.views(self.total)

    def zero(self) -> None:
        torch._foreach_zero_(self.total)

    def prepare(self, batches: Sequence[Tensor]) -> RepeatedProgram:
        """Before `zero`: a capture computes, and adds to the total."""
        return self.program(self._pad(len(batches)), batches)

    def add(
        self,
        version: int,
        batches: Sequence[Tensor],
        shares: Sequence[float],
        places: Sequence[int],
    ) -> None:
        """Add Σ share · gradient of the batches (of equal size) at this row of the versions; losses go to their places."""
        count = self._pad(len(batches))
        program, more = self.program(count, batches), count - len(batches)
        numbers = [*places, *[len(self._losses) - 1] * more]
        parts = torch.tensor([*shares, *[0.0] * more], dtype=torch.float64).view(torch.int64)
        batches = [*batches, *[batches[0]] * more]
        self._run(
            program, torch.cat([torch.tensor(numbers), parts, torch.tensor([version]), *batches]), batches
        )

    def _weighted(self, count: int) -> int:
        return 1

    def _harmless(self, header: Tensor, count: int) -> None:
        pass  # shares of 0

    def _compute(self, places: Tensor, second: Tensor, weights: Sequence[Tensor], batch: Any) -> None:
        task, shares = self._task, second.view(torch.float64)
        leaves = task.leaves([segment[0] for segment in weights])
        losses = torch.vmap(task.loss, in_dims=(None, 0), randomness="different")(leaves, batch)
        self._losses.index_copy_(0, places, losses.detach().to(self._losses.dtype))
        gradients = task.gradients((losses * shares.to(losses.dtype)).sum(), leaves)
        self.present = tuple(gradient is not None for gradient in gradients)
        pairs = [(view, got) for view, got in zip(self.views, gradients, strict=True) if got is not None]
        torch._foreach_add_([view for view, _ in pairs], [got for _, got in pairs])


class Stacked(JoinedBatches):
    """Batches at different versions, each gradient in a row of its own."""

    def __init__(
        self,
        task: SimTask,
        losses: Tensor,
        versions: Rows,
        rows: Rows,
        *,
        graphs: bool = True,
        convolutions: str = "unfolded",
    ) -> None:
        self.rows = rows
        super().__init__(task, losses, versions, graphs=graphs)
        assert convolutions in CONVOLUTIONS
        self._unfolded = convolutions == "unfolded"
        self._views: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        self._viewed = rows.growths

    def _growths(self) -> tuple[int, ...]:
        return self._versions.growths, self.rows.growths

    def row(self, row: int) -> tuple[list[Tensor], list[Tensor]]:
        """A gradient's segments, and its views for each parameter."""
        if self._viewed != self.rows.growths:
            self._viewed = self.rows.growths
            self._views.clear()
        if row not in self._views:
            segments = self.rows.segments(row)
            self._views[row] = segments, self._task.views(segments)
        return self._views[row]

    def fill(
        self,
        versions: Sequence[int],
        batches: Sequence[Tensor],
        rows: Sequence[int],
        places: Sequence[int],
    ) -> None:
        """The gradients of the batches (of equal size), each at its row of the versions, into their rows."""
        count = self._pad(len(batches))
        program, more = self.program(count, batches), count - len(batches)
        numbers = [*places, *[len(self._losses) - 1] * more, *rows, *[self.rows.nobodys] * more]
        numbers += [*versions, *[versions[0]] * more]
        batches = [*batches, *[batches[0]] * more]
        self._run(program, torch.cat([torch.tensor(numbers), *batches]), batches)

    def _weighted(self, count: int) -> int:
        return count

    def _harmless(self, header: Tensor, count: int) -> None:
        header[count : 2 * count] = self.rows.nobodys

    def _compute(self, places: Tensor, second: Tensor, weights: Sequence[Tensor], batch: Any) -> None:
        task = self._task
        leaves = task.leaves(weights)
        with Unfolded() if self._unfolded else nullcontext():
            losses = torch.vmap(task.loss, randomness="different")(leaves, batch)
        self._losses.index_copy_(0, places, losses.detach().to(self._losses.dtype))
        gradients = task.gradients(losses.sum(), leaves)
        self.present = tuple(gradient is not None for gradient in gradients)
        made = task.segments(len(places))
        for view, gradient in zip(task.views(made), gradients, strict=True):
            if gradient is not None:
                view.copy_(gradient)
        for rows, values in zip(self.rows.stacks, made, strict=True):
            rows.index_copy_(0, second, values)
