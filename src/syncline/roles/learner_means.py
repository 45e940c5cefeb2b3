"""The mean of what learners bring to a meeting (`session.mean`): numbers or tensors of one shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from syncline.errors import UsageError


def brought(value: Any) -> Tensor:
    """As it travels."""
    held = value.detach().cpu() if isinstance(value, Tensor) else value
    try:
        if torch.is_complex(found := torch.as_tensor(held)):
            raise TypeError("complex")
        return found.to(torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        what = f"a tensor of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
        raise UsageError(f"session.mean takes a number or a tensor of real numbers, got {what}") from error


def mean_of(values: Mapping[int, Tensor]) -> Tensor:
    """Of what each rank has brought, in their order."""
    ranks = sorted(values)
    shapes = {rank: tuple(values[rank].shape) for rank in ranks}
    if len(set(shapes.values())) > 1:
        said = ", ".join(f"learner {rank}: {shape}" for rank, shape in shapes.items())
        raise UsageError(f"session.mean: every learner must bring the same shape, got {said}")
    return torch.stack([values[rank] for rank in ranks]).mean(0)


def like(mean: Tensor, value: Any) -> Any:
    """As the learner gets it: a number, or a tensor of its own kind; the mean of whole numbers is a fraction."""
    if not isinstance(value, Tensor):
        return mean.item() if mean.dim() == 0 else mean.clone()
    dtype = value.dtype if value.is_floating_point() else torch.get_default_dtype()
    return mean.to(device=value.device, dtype=dtype, copy=True)
