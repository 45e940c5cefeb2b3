"""Many gradients in one computation: of one version, added up; or of many versions, each kept by itself.

`Joined` computes the weighted sum of the gradients of several batches at one version in one pass; `Stacked` those of batches
at different versions, their weights stacked. Both map the objective over the batches with `torch.vmap`, so every
batch has its own loss, whatever it is a function of. Not responsible for which gradients, nor for when.
`trial` finds out before the run which models can be computed so. Legend: n batches, μ examples of each.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as tree

from syncline.sim.batched.convolutions import Unfolded
from syncline.sim.batched.cuda_graphs import Captured, RepeatedProgram, repeatable
from syncline.sim.batched.objective import Rows, SimTask, rows_of
from syncline.sim.random_states import Random

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # numbers of batches that are captured
CONVOLUTIONS = ("unfolded", "grouped")
TRIED = 3  # examples of a batch
NEAR = 0.01  # of the gradient's norm: where two values are all but equal, rounding may choose the other


def padded(count: int) -> int:
    """The next number of batches that has a program."""
    return next((size for size in SIZES if size >= count), count)


class JoinedBatches:
    """What both have in common: programs for each (n, μ), and the numbers that go to the device with each call.

    These are for each batch a place for its loss and a second number, whose kind is the program's own; the rows of the versions, one
    or one for each batch; and the examples' indices.
    """

    def __init__(
        self, task: SimTask, losses: Tensor, versions: Rows, *, graphs: bool, rows: Rows | None = None
    ) -> None:
        self._task, self._losses = task, losses  # losses: one for each place, and one that is nobody's
        self._versions = versions
        self._memory = (versions,) if rows is None else (versions, rows)
        self._graphs = graphs and task.device.type == "cuda"
        self._programs: dict[tuple[int, int], RepeatedProgram] = {}
        self._made_at = [rows.growths for rows in self._memory]
        self._pool = torch.cuda.graph_pool_handle() if self._graphs else None
        self.present: tuple[bool, ...] = ()  # which parameters have a gradient, once one was computed

    def _nobodys(self) -> int:
        """A second number with which a program changes nothing that matters."""
        return 0

    def program(self, batches: Sequence[Tensor]) -> tuple[int, RepeatedProgram]:
        """For so many batches of this size, captured if it is new: those have a fixed number of batches, others are made for any."""
        growths = [rows.growths for rows in self._memory]
        if self._made_at != growths:  # the memory is another
            self._made_at = growths
            self._programs.clear()
        count, size = padded(len(batches)) if self._graphs else len(batches), len(batches[0])
        program = self._programs.get((count, size))
        if program is None:
            leaves = self._task.examples.leaves([batches[0]] * count)
            program = self._programs[count, size] = self._make(count, size, leaves)
        return count, program

    def _make(self, count: int, size: int, leaves: list[Tensor]) -> RepeatedProgram:
        device, first = self._task.device, 2 * count + (count if len(self._memory) > 1 else 1)
        header = torch.zeros(first + count * size, dtype=torch.int64, device=device)
        header[:count], header[count : 2 * count] = len(self._losses) - 1, self._nobodys()
        inputs = [header, *(leaf.to(device) for leaf in leaves)]

        def function(header: Tensor, *leaves: Tensor) -> None:
            batch = self._task.examples.stack(header[first:].view(count, size), leaves)
            rows = header[2 * count : first]
            weights = [stack.index_select(0, rows) for stack in self._versions.stacks]
            self._compute(header[:count], header[count : 2 * count], weights, batch)

        return (
            RepeatedProgram(function, inputs)
            if self._pool is None
            else Captured(function, inputs, self._pool)
        )

    def _run(
        self, versions: Sequence[int], batches: Sequence[Tensor], second: Tensor, places: Sequence[int]
    ) -> None:
        """Of batches of equal size."""
        count, program = self.program(batches)
        more = count - len(batches)
        batches = [*batches, *[batches[0]] * more]
        columns = [
            torch.tensor([*places, *[len(self._losses) - 1] * more]),
            torch.cat([second, torch.tensor([self._nobodys()] * more, dtype=torch.int64)]),
            torch.tensor([*versions, *[versions[0]] * more] if len(self._memory) > 1 else versions),
        ]
        program.inputs[0].copy_(torch.cat([*columns, *batches]), non_blocking=True)
        for static, leaf in zip(program.inputs[1:], self._task.examples.leaves(batches), strict=True):
            static.copy_(leaf, non_blocking=True)
        program.run()

    @abstractmethod
    def _compute(self, places: Tensor, second: Tensor, weights: Sequence[Tensor], batch: Any) -> None: ...


class Joined(JoinedBatches):
    """Several batches at one version: the weighted sum of their gradients, added to `total`."""

    def __init__(self, task: SimTask, losses: Tensor, versions: Rows, *, graphs: bool = True) -> None:
        super().__init__(task, losses, versions, graphs=graphs)
        self.total = task.segments()
        self.views = task.views(self.total)

    def zero(self) -> None:
        """After the `program` of what is added: a capture computes, and adds to the total."""
        torch._foreach_zero_(self.total)

    def add(
        self, version: int, batches: Sequence[Tensor], shares: Sequence[float], places: Sequence[int]
    ) -> None:
        """Add Σ share · gradient of the batches (of equal size) at this row of the versions; losses go to their places."""
        self._run([version], batches, torch.tensor(shares, dtype=torch.float64).view(torch.int64), places)

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
        super().__init__(task, losses, versions, graphs=graphs, rows=rows)
        assert convolutions in CONVOLUTIONS
        self._unfolded = convolutions == "unfolded"
        self._views: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        self._viewed = rows.growths

    def _nobodys(self) -> int:
        return self.rows.nobodys

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
        self, versions: Sequence[int], batches: Sequence[Tensor], rows: Sequence[int], places: Sequence[int]
    ) -> None:
        """The gradients of the batches (of equal size), each at its row of the versions, into their rows."""
        self._run(versions, batches, torch.tensor(rows), places)

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


# -- can it be done? -----------------------------------------------------------------------------------------


def plain(task: SimTask, weights: Sequence[Tensor], indices: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradient (as segments) of one batch by itself: the reference for the ways to compute many."""
    leaves = task.leaves(weights)
    batches = task.examples.stack(indices[None].to(task.device), task.examples.leaves([indices]))
    loss = task.loss(leaves, tree.tree_map(lambda leaf: leaf[0], batches))
    made = task.segments()
    for view, gradient in zip(task.views(made), task.gradients(loss, leaves), strict=True):
        if gradient is not None:
            view.copy_(gradient)
    return loss.detach(), made


def trial(
    task: SimTask, parameters: Sequence[Tensor], size: int, *, convolutions: str
) -> tuple[str | None, bool]:
    """Can a model's gradients be computed together? Tried with two batches of a few examples, at two versions near these parameters.

    Why not, and whether the model draws random numbers. The plain gradient is the reference: what does not agree with it, or cannot be mapped over batches, is computed one at a time.
    """
    with Random().drawn():
        weights = [task.segments(), task.segments()]
        for segments, factor in zip(weights, (1.0, 0.99), strict=True):
            for view, parameter in zip(task.views(segments), parameters, strict=True):
                view.copy_(parameter.detach()).mul_(factor)
        batches = [torch.arange(size)[:TRIED], torch.arange(size).flip(0)[:TRIED]]
        kept = {name: buffer.clone() for name, buffer in task.model.named_buffers()}
        before = _drawn(task.device)
        with repeatable(task.device):  # without TensorFloat-32, whose rounding alone is beyond what is near
            references = [plain(task, *each)[1] for each in zip(weights, batches, strict=True)]
        draws = _drawn(task.device) != before
        for name, buffer in task.model.named_buffers():
            if not torch.equal(buffer, kept[name]):
                return f"computing a gradient changes the buffer {name}", draws
        try:
            apart = _apart(task, weights, batches, references, convolutions)
        except Exception as error:  # whatever vmap cannot do
            words = str(error).strip().splitlines() or [type(error).__name__]
            return f"the objective cannot be mapped over batches: {words[0]}", draws
        if not draws and not apart <= NEAR:
            return f"computed together, gradients differ by {apart:.1%} of their norm", draws
        return None, draws


def _apart(
    task: SimTask,
    weights: list[list[Tensor]],
    batches: list[Tensor],
    references: list[list[Tensor]],
    convolutions: str,
) -> float:
    """How far from the plain gradients, relative to their norm."""
    losses = torch.zeros(3, dtype=torch.float64, device=task.device)
    versions = rows_of(task, weights)
    joined = Joined(task, losses, versions, graphs=False)
    joined.add(0, [batches[0], batches[0]], [0.5, 0.5], [0, 1])
    stacked = Stacked(task, losses, versions, Rows(task, 2), graphs=False, convolutions=convolutions)
    stacked.fill([0, 1], batches, [0, 1], [0, 1])
    pairs = [(joined.total, references[0]), *((stacked.row(i)[0], references[i]) for i in range(2))]
    worst = 0.0
    for mine, theirs in pairs:
        apart = sum(float((a - b).double().square().sum()) for a, b in zip(mine, theirs, strict=True))
        norm = sum(float(b.double().square().sum()) for b in theirs)
        worst = max(worst, apart**0.5 / norm**0.5 if norm else float(apart > 0))
    return worst


def _drawn(device: torch.device) -> tuple[object, ...]:
    """The generators' states, to notice that somebody drew."""
    states = [torch.get_rng_state().numpy().tobytes(), random.getstate(), np.random.get_state()[1].tobytes()]  # type: ignore[union-attr,index]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device).numpy().tobytes())
    return tuple(states)
