"""The tied sparse autoencoder that trains a stack (C3), by autograd: for small nets, other optimizers, and as the truth
that the fused version in `fused` is tested against."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from syncline.nn.block_local import BlockLocalDecoder2d
from syncline.nn.stack import Stack


class Objective(NamedTuple):
    """Scalars, per image: loss = reconstruction + sparsity · penalty."""

    loss: Tensor
    reconstruction: Tensor
    penalty: Tensor


class TiedAutoencoder(nn.Module):
    """‖a Wᵀ W x − x‖² + sparsity · Σ_j √(V_jᵀ (W x)² + ε), summed over pixels and pooling units, mean over images.

    W are the stack's filters of unit norm, V_j its pooling windows, `gain` is the scalar a. Pixels that no field sees
    are reconstructed as 0 and add a constant.
    """

    def __init__(self, stack: Stack, *, sparsity: float = 0.1) -> None:
        super().__init__()
        self.stack, self.sparsity = stack, sparsity
        self.decoder = BlockLocalDecoder2d(stack.filter)
        weight = stack.filter.weight
        self.gain = nn.Parameter(torch.ones((), device=weight.device, dtype=_wide(weight.dtype)))

    def forward(self, images: Tensor) -> Objective:
        responses = self.stack.filter(images)
        rest = self.gain * self.decoder(responses) - images
        reconstruction = rest.square().sum() / images.shape[0]
        penalty = self.stack.pool(responses).sum() / images.shape[0]
        return Objective(reconstruction + self.sparsity * penalty, reconstruction, penalty)

    @torch.no_grad()
    def fit_gain(self, images: Tensor) -> None:
        """Set the gain to the best one for these images: a = ⟨z, x⟩/⟨z, z⟩ with z = Wᵀ W x."""
        decoded = self.stack.filter.decode(self.stack.filter(images))
        self.gain.copy_((decoded * images).sum() / decoded.square().sum())


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
