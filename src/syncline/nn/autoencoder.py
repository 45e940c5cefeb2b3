"""The tied sparse autoencoder that trains a stack (C3): by autograd, and fused, for nets of billions of weights (C5).

By autograd it is for small nets, other optimizers, and the truth that the fused version is tested against.

Fused, an update uses no autograd and never stores a gradient. Per stack the weights are read by W x, Wᵀ y, W r (r the
rest of the reconstruction) and, in a joint update, Wᵀ δ; the update then reads and writes weights and momentum once.
Norms cost nothing: W̃ and 1/‖W̃‖ are kept, the part of the gradient along a filter comes from activations, and the new
norms from the update's own pass. There everything has the batch last, (C, H, W, N).
Not responsible for data or for when to stop: `greedy` is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from syncline.errors import UsageError
from syncline.kernels import l2_pool
from syncline.kernels.block_local import (
    FAST_DTYPES,
    batch_first,
    batch_last,
    forward,
    input_gradient,
    update_,
    wide,
)
from syncline.nn.block_local import BlockLocalDecoder2d, Stack


class Objective(NamedTuple):
    """Scalars, per image: loss = reconstruction + sparsity · penalty; of an update, before it was made."""

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
        self.gain = nn.Parameter(torch.ones((), device=weight.device, dtype=wide(weight.dtype)))

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


@dataclass(slots=True, kw_only=True)
class _Pass:
    """What the way up leaves for the way down."""

    images: Tensor  # (C, H, W, N), in the weights' dtype
    responses: Tensor  # (depth, nH·bh, nW·bw, N), float32, as all that follows
    pooled: Tensor  # (depth, H', W', N), a leaf of autograd's graph of the norm where there is an output
    output: Tensor | None = None  # (N, depth, H'', W'')


class FusedStack:
    """A stack, its momentum and its norms, updated in place.

    `gain_rate` moves the gain a towards the best one of each batch: a ← a − gain_rate · ⟨r, z⟩/⟨z, z⟩, a step of
    Newton, since the curvature ⟨z, z⟩ is at hand.
    """

    def __init__(self, stack: Stack, *, sparsity: float = 0.1, gain_rate: float = 0.1, seed: int = 0) -> None:
        if stack.pool.stride != 1:
            raise UsageError(
                f"a fused stack pools with stride 1, this one with {stack.pool.stride}: use TiedAutoencoder"
            )
        dtype = stack.filter.weight.dtype
        if dtype not in FAST_DTYPES:
            raise UsageError(
                f"a fused stack has float32 or bfloat16 weights, these are {dtype}: use TiedAutoencoder"
            )
        self.stack, self.sparsity, self.gain_rate, self.seed = stack, sparsity, gain_rate, seed
        self.geometry = stack.filter.geometry
        self._pad = stack.pool.window // 2 if stack.pool.padding == "same" else 0
        self.weight = stack.filter.weight.data
        self.momentum = torch.zeros_like(self.weight)
        self.gain = torch.ones((), device=self.weight.device)
        self.steps = 0
        self.scale = torch.empty(0)
        self.refresh()

    def refresh(self) -> None:
        """Take the norms anew from the weights, after somebody else changed them."""
        with torch.no_grad():
            self.scale = self.stack.filter.scale().float()

    def up(self, images: Tensor, *, normalised: bool = True) -> _Pass:
        """W x, pooled; `normalised` too for a stack above, with autograd's graph from the pooled maps on."""
        images = images.to(self.weight.dtype).contiguous()
        responses = self._see(images)
        made = _Pass(images=images, responses=responses, pooled=self._pool(responses))
        if normalised:
            with torch.enable_grad():
                made.output = self.stack.norm(batch_first(made.pooled.requires_grad_()))
        return made

    def _see(self, images: Tensor) -> Tensor:
        """W x."""
        return forward(images, self.weight, self.geometry, scale=self.scale, dtype=torch.float32)

    def _pool(self, responses: Tensor) -> Tensor:
        pool = self.stack.pool
        return l2_pool.forward(responses, pool.window, pad=self._pad, eps=pool.eps)

    @torch.no_grad()
    def output(self, images: Tensor) -> Tensor:
        """What the stack above sees, with the norms at hand; (C, H, W, N) in and out."""
        return batch_last(self.stack.norm(batch_first(self._pool(self._see(images)))))

    @torch.no_grad()
    def fit_gain(self, images: Tensor) -> None:
        """Set the gain to the best one for these images."""
        decoded = input_gradient(self._see(images), self.weight, self.geometry, scale=self.scale)
        self.gain = (decoded * images).sum() / decoded.square().sum()

    def update(self, images: Tensor, *, rate: float, decay: float) -> Objective:
        """One step of this stack alone, on images (C, H, W, N)."""
        step, _ = self.down(self.up(images, normalised=False), rate=rate, decay=decay)
        return step

    @torch.no_grad()
    def down(
        self,
        made: _Pass,
        *,
        rate: float,
        decay: float,
        upstream: Tensor | None = None,
        by_images: bool = False,
    ) -> tuple[Objective, Tensor | None]:
        """Finish a pass: the stack's own objective, plus `upstream`, the gradient by its output (N, ...), if any.

        Returns the objective's values and, `by_images`, the gradient by the images, float32 (C, H, W, N).
        """
        count = made.images.shape[-1]
        y, x = made.responses, made.images
        penalty, by_responses = self._above(made, upstream)
        scale = self.geometry.to_maps(self.scale).unsqueeze(3)  # (depth, nH·bh, nW·bw, 1)
        decoded = input_gradient(self._narrow(y, scale), self.weight, self.geometry)
        rest = self.gain * decoded - x
        reconstruction = _dot(rest, rest) / count
        loss = reconstruction + self.sparsity * penalty
        new_gain = self.gain - self.gain_rate * _dot(rest, decoded) / _dot(decoded, decoded)
        del decoded
        narrow_rest = rest.to(self.weight.dtype)
        seen = self._see(narrow_rest)  # W r
        factor = 2 * self.gain / count
        delta = by_responses.addcmul_(seen, factor)
        # Σ (δ·y + 2a/N y·(W r)), the two pairs' parts along the filters
        radial = self.geometry.to_rows((seen.mul_(factor).add_(delta)).mul_(y).sum(3))
        gradient = None
        if by_images:
            gradient = input_gradient(self._narrow(delta, scale), self.weight, self.geometry)
            gradient.sub_(rest, alpha=2 / count)
        squares = update_(
            self.weight,
            self.momentum,
            [(delta.to(self.weight.dtype), x), (self._narrow(y, factor), narrow_rest)],
            self.geometry,
            rate=rate,
            decay=decay,
            scale=self.scale,
            radial=radial,
            seed=self.seed + self.steps,
        )
        self.scale, self.gain = squares.rsqrt_(), new_gain
        self.steps += 1
        return Objective(loss, reconstruction, penalty), gradient

    def _narrow(self, maps: Tensor, factor: Tensor) -> Tensor:
        """maps · factor in the weights' dtype, in one pass."""
        return torch.mul(maps, factor, out=torch.empty_like(maps, dtype=self.weight.dtype))

    def _above(self, made: _Pass, upstream: Tensor | None) -> tuple[Tensor, Tensor]:
        """The penalty, and the gradient by the responses of sparsity · penalty and of what lies above."""
        count, pooled = made.images.shape[-1], made.pooled.detach()
        if upstream is None or made.output is None:
            by_pooled = torch.full((), self.sparsity / count, device=pooled.device)
        else:
            (by_pooled,) = torch.autograd.grad([made.output], [made.pooled], [upstream])
            by_pooled += self.sparsity / count
        window = self.stack.pool.window
        by_responses = l2_pool.backward(by_pooled, pooled, made.responses, window, pad=self._pad)
        return pooled.sum() / count, by_responses


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return torch.dot(a.view(-1), b.view(-1))


def joint_update(
    stacks: Sequence[FusedStack], images: Tensor, *, rate: float, decay: float
) -> tuple[Objective, ...]:
    """One update of all stacks at once, as the paper times it (Fig. 5): up through all of them with the objective of
    each, then down from the top, the gradients of upper objectives passing through the lower stacks."""
    passes: list[_Pass] = []
    for index, stack in enumerate(stacks):
        made = stack.up(images, normalised=index + 1 < len(stacks))
        if made.output is not None:
            images = batch_last(made.output.detach())
        passes.append(made)
    upstream: Tensor | None = None
    steps: list[Objective] = []
    for index in reversed(range(len(stacks))):
        step, gradient = stacks[index].down(
            passes.pop(), rate=rate, decay=decay, upstream=upstream, by_images=index > 0
        )
        upstream = None if gradient is None else batch_first(gradient)
        steps.append(step)
    return tuple(reversed(steps))
