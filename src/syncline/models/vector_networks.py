"""Networks of vectors and of sequences: perceptrons, autoencoders and recurrent networks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncline.dial import nearest
from syncline.errors import UsageError
from syncline.nn.argument_checks import COUNT, FLAG, SHARE, check
from syncline.nn.layers import LOSSES, Noise, Sparsity

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


def speech(
    *, frames: int = 11, features: int = 40, hidden: int = 2560, depth: int = 4, states: int = 8192
) -> nn.Sequential:
    """DistBelief's network of speech (D8): states of the middle one of some frames, (N, frames, features) → (N, states)."""
    check(COUNT, frames=frames, features=features, depth=depth)
    return mlp([frames * features, *[hidden] * depth, states], "sigmoid")


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
        self.sparsity = None
        if sparsity is not None:
            if not isinstance(sparsity, float) or not 0 < sparsity < 1 or activation != "sigmoid":
                raise UsageError(
                    f"sparsity is a number between 0 and 1, of sigmoid units, got {sparsity!r} with activation={activation!r}"
                )
            self.sparsity = Sparsity(sparsity, sparsity_weight)
        for number in range(len(sizes) - 1) if tied else ():
            mirrored: Any = self.encoder[1 + 2 * (len(sizes) - 2 - number)]
            own: Any = self.decoder[1 + 2 * number]
            self.decoder[1 + 2 * number] = _Tied(mirrored, own.bias)

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


CELLS = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}


class Recurrent(nn.Module):
    """(N, T, inputs) → (N, outputs), after the last step; with `sequences` → (N, outputs, T), as `cross_entropy` takes it.

    With `tokens` it takes (N, T) word numbers below that, and `inputs` is the size of their vectors.
    """

    def __init__(
        self,
        inputs: int,
        units: int,
        outputs: int,
        *,
        cell: str = "lstm",
        depth: int = 1,
        tokens: int | None = None,
        dropout: float = 0.0,
        sequences: bool = False,
    ) -> None:
        super().__init__()
        check(COUNT, inputs=inputs, units=units, outputs=outputs, depth=depth)
        check(SHARE, dropout=dropout)
        check(FLAG, sequences=sequences)
        if cell not in CELLS:
            raise UsageError(f"cell must be one of {', '.join(CELLS)}, got {cell!r}")
        if tokens is not None:
            check(COUNT, tokens=tokens)
        self.words = nn.Embedding(tokens, inputs) if tokens is not None else nn.Identity()
        between = dropout if depth > 1 else 0.0
        self.cell = CELLS[cell](inputs, units, num_layers=depth, dropout=between, batch_first=True)
        self.output = nn.Linear(units, outputs)
        self.sequences = sequences

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.cell(self.words(x))
        return self.output(states).transpose(1, 2) if self.sequences else self.output(states[:, -1])
