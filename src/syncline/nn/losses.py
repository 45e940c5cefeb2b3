"""The losses of nets that are written as data: of an output and its target, and the sparsity of units.

Not responsible for which layers they are of (layer_records.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncline.errors import UsageError
from syncline.nn.file_arguments import Kind, Number
from syncline.nn.registry import built_in

Dims = tuple[int, ...]
LOSSES: dict[str, Callable[..., Tensor]] = {
    "cross_entropy": F.cross_entropy,
    "nll": F.nll_loss,
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "bce": F.binary_cross_entropy,
    "bce_with_logits": F.binary_cross_entropy_with_logits,
}
CLASSES = ("cross_entropy", "nll")  # of scores and class numbers


class Loss(nn.Module):
    """One of LOSSES, of an output and its target, times a weight."""

    def __init__(self, name: str, weight: float) -> None:
        super().__init__()
        self.name, self.weight = name, weight

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        if self.name not in CLASSES and output.shape != target.shape:  # images against flat outputs
            target = target.reshape(output.shape)
        return self.weight * LOSSES[self.name](output, target)

    def extra_repr(self) -> str:
        return f"{self.name}, weight={self.weight}"


def _loss(name: str) -> Callable[..., nn.Module]:
    def make(shapes: Sequence[Dims], *, weight: Number = 1.0) -> nn.Module:
        if len(shapes) != 2:
            raise UsageError(f"a loss is of two sources, the output and its target, got {len(shapes)}")
        output, target = shapes
        if name in CLASSES:
            fits = len(output) == len(target) + 1 and output[1:] == target
        else:
            fits = math.prod(output) == math.prod(target)
        if not fits:
            raise UsageError(f"{name}: the output's shape {output} does not fit the target's {target}")
        return Loss(name, weight)

    return make


for _name in LOSSES:
    built_in(_name, "loss")(_loss(_name))


class Sparsity(nn.Module):
    """weight · Σ_j KL(target ‖ the batch's mean activation of unit j), for units in 0…1."""

    def __init__(self, target: float, weight: float) -> None:
        super().__init__()
        self.target, self.weight = target, weight

    def forward(self, units: Tensor) -> Tensor:
        mean = units.flatten(1).mean(0).clamp(1e-6, 1 - 1e-6)
        off = (1 - self.target) * torch.log((1 - self.target) / (1 - mean))
        return self.weight * (self.target * torch.log(self.target / mean) + off).sum()


@built_in("sparsity", "loss")
def sparsity(
    shape: Dims,
    *,
    target: Annotated[
        float, Kind("a number between 0 and 1", lambda v: isinstance(v, float) and 0 < v < 1)
    ] = 0.05,
    weight: Number = 1.0,
) -> nn.Module:
    """Penalises units that are active more or less often than the target: sparse autoencoders."""
    return Sparsity(target, weight)
