"""The multi-layer perceptron."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from syncline.dial import nearest
from syncline.errors import UsageError
from syncline.nn.file_arguments import FLAG, check

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
}


def mlp(sizes: Sequence[int], activation: str = "relu", *, bias: bool = True) -> nn.Sequential:
    """Linear layers of these sizes, inputs first and outputs last, with an activation between; inputs are flattened."""
    if not isinstance(sizes, list | tuple) or len(sizes) < 2:
        raise UsageError(
            f"sizes must be a list of at least two sizes, inputs and outputs, as [64, 128, 10]; got {sizes!r}"
        )
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise UsageError(f"sizes must be whole numbers of at least 1, got {size!r} in {list(sizes)!r}")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        hint = nearest(activation, ACTIVATIONS)
        raise UsageError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}{hint}")
    check(FLAG, bias=bias)
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs, bias=bias), ACTIVATIONS[activation]()]
    return nn.Sequential(*layers[:-1])
