"""What gradients are computed of: objective, model and data on one device, as functions of flat weights; and rows of these.

Data sets held as tensors are copied to the device once and gathered there, several batches of equal size at once; batches of any other
are collated on the CPU and copied. Not responsible for which gradients, nor for when.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as tree
from torch.utils.data import Dataset, TensorDataset

from syncline.data.images import Images
from syncline.errors import UsageError
from syncline.learn.gradient_ways import Objective, check_scalar
from syncline.learn.loader import reader
from syncline.learn.model_factories import copied
from syncline.table.layout import DTYPES, Layout


class Resident:
    """A data set whose tensors lie on the device: batches are known by their indices alone."""

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        self._tensors = [tensor.to(device) for tensor in tensors]

    def leaves(self, batches: Sequence[Tensor]) -> list[Tensor]:
        return []

    def stack(self, indices: Tensor, leaves: Sequence[Tensor]) -> Any:
        """Batches (n, μ, …) of indices (n, μ), which lie on the device."""
        flat = indices.flatten()
        return [
            tensor.index_select(0, flat).view(*indices.shape, *tensor.shape[1:]) for tensor in self._tensors
        ]


class Collated:
    """Any other data set: read on the CPU, then copied."""

    def __init__(self, read: Callable[[Tensor], Any], device: torch.device) -> None:
        self._read, self._device = read, device
        self._spec: Any = None

    def leaves(self, batches: Sequence[Tensor]) -> list[Tensor]:
        """The batches' tensors, stacked: (n, μ, …) each."""
        flat = [tree.tree_flatten(self._read(indices)) for indices in batches]
        self._spec = flat[0][1]
        columns = list(zip(*(values for values, _ in flat), strict=True))
        if not all(isinstance(value, Tensor) for column in columns for value in column):
            raise UsageError("a batch holds something that is no tensor, and cannot be stacked with others")
        return [torch.stack(column) for column in columns]

    def stack(self, indices: Tensor, leaves: Sequence[Tensor]) -> Any:
        return tree.tree_unflatten([leaf.to(self._device) for leaf in leaves], self._spec)


class _Asked(nn.Module):
    """The objective as a module, so that `functional_call` reaches the model's parameters."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model, self._objective = model, objective

    def forward(self, batch: Any) -> Tensor:
        value = self._objective(self.model, batch)
        check_scalar(value)
        return value.reshape(())


class SimTask:
    """Losses and gradients of one model."""

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        layout: Layout,
        data: Dataset[Any],
        *,
        collate: Callable[[list[Any]], Any] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.device, self.layout = torch.device(device), layout
        self.model = copied(model).to(self.device).train()
        self._asked = _Asked(self.model, objective)
        self._names = [f"model.{entry.name}" for entry in layout.parameters.entries]
        named = dict(self._asked.named_parameters())
        missing = [name.removeprefix("model.") for name in self._names if name not in named]
        if missing:
            raise UsageError(f"the optimizer holds {missing[0]}, which is no parameter of the model")
        self.wanted = [named[name].requires_grad for name in self._names]
        if isinstance(data, Images) and collate is None:
            data = data.floats()
        self.examples: Resident | Collated = Collated(reader(data, collate), self.device)
        if type(data) is TensorDataset and collate is None:
            self.examples = Resident(data.tensors, self.device)

    def segments(self, *shape: int) -> list[Tensor]:
        """Zeros: the table's segments with leading dimensions."""
        flat = self.layout.parameters
        return [
            torch.zeros(*shape, length, dtype=DTYPES[dtype], device=self.device)
            for length, dtype in zip(flat.lengths, flat.dtypes, strict=True)
        ]

    def views(self, segments: Sequence[Tensor]) -> list[Tensor]:
        """One tensor for each parameter; leading dimensions of the segments stay."""
        flat = self.layout.parameters
        return [
            segments[segment][..., start : start + entry.numel].unflatten(-1, entry.shape)
            if entry.shape
            else segments[segment][..., start]
            for entry, (segment, start) in zip(flat.entries, flat.places, strict=True)
        ]

    def leaves(self, segments: Sequence[Tensor]) -> list[Tensor]:
        """The parameters, as the leaves of a gradient."""
        views = self.views(segments)
        return [view.detach().requires_grad_(wanted) for view, wanted in zip(views, self.wanted, strict=True)]

    def loss(self, parameters: Sequence[Tensor], batch: Any) -> Tensor:
        return functional_call(self._asked, dict(zip(self._names, parameters, strict=True)), (batch,))

    def gradients(self, loss: Tensor, leaves: Sequence[Tensor]) -> list[Tensor | None]:
        """One for each parameter, None where the loss does not depend on it."""
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        found = iter(torch.autograd.grad(loss, wanted, allow_unused=True))
        return [next(found) if leaf.requires_grad else None for leaf in leaves]


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
    """Flat tensors of one table's shape in one block of memory, a row for each: gradients that are kept, versions in use.

    A computation over many of them is told their rows, and nothing is copied together first. There are rows for so many, and
    one that is nobody's; twice as many where that is not enough. A row is free again when nobody holds it.
    """

    def __init__(self, task: SimTask, count: int) -> None:
        self.stacks = task.segments(count + 1)
        self.nobodys = count
        self.free = list(range(count))[::-1]
        self.growths = 0  # who holds on to `stacks` looks at this

    def take(self) -> TensorRow:
        if not self.free:
            count = self.nobodys
            self.stacks = [torch.cat([stack, torch.zeros_like(stack[1:])]) for stack in self.stacks]
            self.nobodys, self.growths = 2 * count, self.growths + 1
            self.free.extend(range(2 * count - 1, count - 1, -1))
        return TensorRow(self.free.pop(), self)

    def segments(self, number: int) -> list[Tensor]:
        return [stack[number] for stack in self.stacks]


def rows_of(task: SimTask, values: Sequence[Sequence[Tensor]]) -> Rows:
    """These, in the first rows."""
    rows = Rows(task, len(values))
    for index, stack in enumerate(rows.stacks):
        for number, segments in enumerate(values):
            stack[number].copy_(segments[index])
    return rows
