"""Examples where the gradients are computed: several batches of equal size at once, by index.

Data sets held as tensors are copied to the device once and gathered there; batches of any other are collated on the CPU
and copied. Not responsible for which examples a batch has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as tree
from torch.utils.data import Dataset, TensorDataset

from syncline.data.images import Images
from syncline.errors import UsageError
from syncline.learn.loader import reader


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


Examples = Resident | Collated


def examples_of(
    data: Dataset[Any], collate: Callable[[list[Any]], Any] | None, device: torch.device
) -> Examples:
    if isinstance(data, Images) and collate is None:
        data = data.floats()
    if type(data) is TensorDataset and collate is None:
        return Resident(data.tensors, device)
    return Collated(reader(data, collate), device)
