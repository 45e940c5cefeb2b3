"""Autoencoders, plain, denoising and sparse, and the objective that trains them and any other model on its own input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncline.errors import UsageError
from syncline.models.mlp import ACTIVATIONS, mlp
from syncline.nn.file_arguments import FLAG, SHARE, check
from syncline.nn.layers import Noise
from syncline.nn.losses import LOSSES, Sparsity


class Autoencoder(nn.Module):
    """Down through `sizes`, inputs first, and back up; its output is before the last activation (`bce_with_logits`, or `mse`).

    With `noise` a share of the input is set to zero in training (denoising); with a `sparsity` target, for which
    `activation` must be sigmoid, units of the code that are on more or less often cost `sparsity_weight` times a KL divergence.
    `tied` decodes with the encoder's weights.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        activation: str = "sigmoid",
        *,
        noise: float = 0.0,
        sparsity: float | None = None,
        sparsity_weight: float = 0.1,
        tied: bool = False,
    ) -> None:
        super().__init__()
        check(SHARE, noise=noise)
        check(FLAG, tied=tied)
        self.encoder = mlp(sizes, activation)
        self.encoder.append(ACTIVATIONS[activation]())
        self.decoder = mlp(list(reversed(sizes)), activation)
        self.noise = Noise("mask", noise)
        self.sparsity = None if sparsity is None else _sparsity(sparsity, sparsity_weight, activation)
        if tied:
            self._tie(len(sizes) - 1)

    def _tie(self, depth: int) -> None:
        """Every weight of the decoder is the transpose of the encoder's."""
        down = [each for each in self.encoder if isinstance(each, nn.Linear)]
        up = [each for each in self.decoder if isinstance(each, nn.Linear)]
        for number, layer in enumerate(up):
            up[number].weight = None  # type: ignore[assignment]
            self.decoder[1 + 2 * number] = _Tied(down[depth - 1 - number], layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(self.noise(x)))

    def penalty(self, x: Tensor) -> Tensor:
        """What is added to the reconstruction's loss."""
        if self.sparsity is None:
            return x.new_zeros(())
        return self.sparsity(self.encoder(self.noise(x)))


class _Tied(nn.Module):
    """A linear layer with another one's weight, transposed."""

    def __init__(self, other: nn.Linear, bias: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.bias = other.weight, bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.t(), self.bias)


def _sparsity(target: float, weight: float, activation: str) -> Sparsity:
    if not isinstance(target, float) or not 0 < target < 1 or activation != "sigmoid":
        raise UsageError(
            f"sparsity is a number between 0 and 1, of sigmoid units, got {target!r} with activation={activation!r}"
        )
    return Sparsity(target, weight)


def reconstruction(model: nn.Module, batch: Any, *, loss: str = "mse") -> Tensor:
    """An objective: the model's output against its input, which is the batch or its first part; plus its `penalty`, if it has one."""
    if loss not in LOSSES:
        raise UsageError(f"loss must be one of {', '.join(LOSSES)}, got {loss!r}")
    x = batch[0] if isinstance(batch, list | tuple) else batch
    if not isinstance(x, torch.Tensor):
        raise UsageError(
            f"reconstruction takes batches that are a tensor or begin with one, got {type(batch).__name__}"
        )
    value = LOSSES[loss](model(x), x.flatten(1))
    return value + model.penalty(x) if isinstance(model, Autoencoder) else value
