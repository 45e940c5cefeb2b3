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

from syncline.engines.sim.capture import Captured, Program
from syncline.engines.sim.convolutions import Unfolded
from syncline.engines.sim.task import Task

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # numbers of batches that are captured
CONVOLUTIONS = ("unfolded", "grouped")


def padded(count: int) -> int:
    """The next number of batches that has a program."""
    return next((size for size in SIZES if size >= count), count)


class Batches:
    """What both have in common: programs for each (n, μ), and the numbers that go to the device with each call."""

    def __init__(self, task: Task, losses: Tensor, *, graphs: bool, tf32: bool) -> None:
        self._task, self._losses = task, losses  # losses: one for each place, and one that is nobody's
        self._graphs = graphs and task.device.type == "cuda"
        self._tf32 = tf32
        self._programs: dict[tuple[int, int], Program] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._graphs else None
        self.present: tuple[bool, ...] = ()  # which parameters have a gradient, once one was computed

    def _pad(self, count: int) -> int:
        """A captured program has a fixed size; others are made for any."""
        return padded(count) if self._graphs else count

    def program(self, count: int, batches: Sequence[Tensor]) -> Program:
        """For this many batches of this size, captured if it is new."""
        key = (count, len(batches[0]))
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = self._make(*key, self._task.examples.leaves([batches[0]] * count))
        return program

    def _make(self, count: int, size: int, leaves: list[Tensor]) -> Program:
        device = self._task.device
        header = torch.zeros(2 * count + count * size, dtype=torch.int64, device=device)
        header[:count] = len(self._losses) - 1
        inputs = [header, *self._weights(count), *(leaf.to(device) for leaf in leaves)]

        def function(header: Tensor, *rest: Tensor) -> None:
            segments = len(self._task.layout.parameters.lengths)
            indices = header[2 * count :].view(count, size)
            batch = self._task.examples.stack(indices, rest[segments:])
            self._compute(header[:count], header[count : 2 * count], rest[:segments], batch)

        if self._pool is None:
            return Program(function, inputs, tf32=self._tf32)
        self._harmless(header, count)
        return Captured(function, inputs, self._pool, tf32=self._tf32)

    def _run(self, program: Program, header: Tensor, batches: Sequence[Tensor]) -> None:
        """With new numbers; the weights are there already."""
        program.inputs[0].copy_(header, non_blocking=True)
        leaves = self._task.examples.leaves(batches)
        first = len(program.inputs) - len(leaves)
        for static, leaf in zip(program.inputs[first:], leaves, strict=True):
            static.copy_(leaf, non_blocking=True)
        program.run()

    def _note_present(self, gradients: Sequence[Tensor | None]) -> None:
        self.present = tuple(gradient is not None for gradient in gradients)

    @abstractmethod
    def _weights(self, count: int) -> list[Tensor]:
        """Where the weights of a program's inputs lie."""

    @abstractmethod
    def _harmless(self, header: Tensor, count: int) -> None:
        """Numbers with which a program changes nothing that matters."""

    @abstractmethod
    def _compute(self, places: Tensor, second: Tensor, weights: Sequence[Tensor], batch: Any) -> None: ...


class Joined(Batches):
    """Several batches at one version: the weighted sum of their gradients, added to `total`."""

    def __init__(self, task: Task, losses: Tensor, *, graphs: bool = True, tf32: bool = False) -> None:
        super().__init__(task, losses, graphs=graphs, tf32=tf32)
        self.total = task.segments()
        self.views = task.views(self.total)

    def zero(self) -> None:
        torch._foreach_zero_(self.total)

    def prepare(self, batches: Sequence[Tensor]) -> Program:
        """Before `zero`: a capture computes, and adds to the total."""
        return self.program(self._pad(len(batches)), batches)

    def add(
        self,
        weights: Sequence[Tensor],
        batches: Sequence[Tensor],
        shares: Sequence[float],
        places: Sequence[int],
    ) -> None:
        """Add Σ share · gradient of the batches (of equal size) at these weights; losses go to their places."""
        count = self._pad(len(batches))
        program, more = self.program(count, batches), count - len(batches)
        numbers = [*places, *[len(self._losses) - 1] * more]
        parts = torch.tensor([*shares, *[0.0] * more], dtype=torch.float64).view(torch.int64)
        batches = [*batches, *[batches[0]] * more]
        for static, segment in zip(program.inputs[1:], weights, strict=False):
            static.copy_(segment, non_blocking=True)
        self._run(program, torch.cat([torch.tensor(numbers), parts, *batches]), batches)

    def _weights(self, count: int) -> list[Tensor]:
        return self._task.segments()

    def _harmless(self, header: Tensor, count: int) -> None:
        pass  # shares of 0

    def _compute(self, places: Tensor, second: Tensor, weights: Sequence[Tensor], batch: Any) -> None:
        task, shares = self._task, second.view(torch.float64)
        leaves = task.leaves(weights)
        losses = torch.vmap(task.loss, in_dims=(None, 0), randomness="different")(leaves, batch)
        self._losses.index_copy_(0, places, losses.detach().to(self._losses.dtype))
        gradients = task.gradients((losses * shares.to(losses.dtype)).sum(), leaves)
        self._note_present(gradients)
        pairs = [(view, got) for view, got in zip(self.views, gradients, strict=True) if got is not None]
        torch._foreach_add_([view for view, _ in pairs], [got for _, got in pairs])


class Stacked(Batches):
    """Batches at different versions, each gradient in a row of its own."""

    def __init__(
        self,
        task: Task,
        losses: Tensor,
        rows: int,
        *,
        graphs: bool = True,
        tf32: bool = False,
        convolutions: str = "unfolded",
    ) -> None:
        super().__init__(task, losses, graphs=graphs, tf32=tf32)
        assert convolutions in CONVOLUTIONS
        self._unfolded = convolutions == "unfolded"
        self.rows = task.segments(rows + 1)  # the last is nobody's
        self._views: dict[int, tuple[list[Tensor], list[Tensor]]] = {}

    def row(self, row: int) -> tuple[list[Tensor], list[Tensor]]:
        """A gradient's segments, and its views for each parameter."""
        if row not in self._views:
            segments = [stack[row] for stack in self.rows]
            self._views[row] = segments, self._task.views(segments)
        return self._views[row]

    def grow(self) -> None:
        self.rows = [torch.cat([stack, torch.zeros_like(stack[1:])]) for stack in self.rows]
        self._views.clear()
        self._programs.clear()

    def fill(
        self,
        weights: Sequence[Sequence[Tensor]],
        batches: Sequence[Tensor],
        rows: Sequence[int],
        places: Sequence[int],
    ) -> None:
        """The gradients of the batches (of equal size), each at its weights, into their rows."""
        count = self._pad(len(batches))
        program, more = self.program(count, batches), count - len(batches)
        numbers = [*places, *[len(self._losses) - 1] * more, *rows, *[len(self.rows[0]) - 1] * more]
        batches = [*batches, *[batches[0]] * more]
        versions = [*weights, *[weights[0]] * more]
        for index, static in enumerate(program.inputs[1 : 1 + len(self.rows)]):
            torch.stack([segments[index] for segments in versions], out=static)
        self._run(program, torch.cat([torch.tensor(numbers), *batches]), batches)

    def _weights(self, count: int) -> list[Tensor]:
        return self._task.segments(count)

    def _harmless(self, header: Tensor, count: int) -> None:
        header[count : 2 * count] = len(self.rows[0]) - 1

    def _compute(self, places: Tensor, second: Tensor, weights: Sequence[Tensor], batch: Any) -> None:
        task = self._task
        leaves = task.leaves(weights)
        with Unfolded() if self._unfolded else nullcontext():
            losses = torch.vmap(task.loss, randomness="different")(leaves, batch)
        self._losses.index_copy_(0, places, losses.detach().to(self._losses.dtype))
        gradients = task.gradients(losses.sum(), leaves)
        self._note_present(gradients)
        made = task.segments(len(places))
        for view, gradient in zip(task.views(made), gradients, strict=True):
            if gradient is not None:
                view.copy_(gradient)
        for rows, values in zip(self.rows, made, strict=True):
            rows.index_copy_(0, second, values)
