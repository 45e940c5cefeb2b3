"""The input of unit norm that drives a neuron most (C5, Fig. 7)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from syncline.errors import UsageError


class Stimulus(NamedTuple):
    image: Tensor  # (C, H, W), of norm 1
    response: float


def best_stimulus(
    neuron: Callable[[Tensor], Tensor],
    shape: Sequence[int],
    *,
    starts: int = 8,
    steps: int = 200,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Stimulus:
    """Maximise `neuron`, images (N, C, H, W) → responses (N,), over images of norm 1.

    Gradient ascent on the sphere from `starts` random images at once: each goes along its gradient's tangent part, with
    a step that doubles after a gain and halves otherwise, so a response never falls. The best of them is returned.
    """
    if starts < 1 or steps < 1:
        raise UsageError(f"starts and steps must be at least 1, got {starts} and {steps}")
    generator = torch.Generator().manual_seed(seed)
    images = _unit(torch.randn((starts, *shape), generator=generator).to(device))
    sizes = torch.full((starts,), 0.5, device=images.device)
    values, slopes = _climb(neuron, images)
    for _ in range(steps):
        tried = _unit(images + sizes.view(-1, 1, 1, 1) * _unit(slopes))
        found, new_slopes = _climb(neuron, tried)
        better = found > values
        chosen = better.view(-1, 1, 1, 1)
        images, slopes = torch.where(chosen, tried, images), torch.where(chosen, new_slopes, slopes)
        values, sizes = (
            torch.where(better, found, values),
            torch.where(better, sizes * 2, sizes / 2).clamp_max(4.0),
        )
    best = int(values.argmax())
    return Stimulus(images[best], float(values[best]))


def _climb(neuron: Callable[[Tensor], Tensor], images: Tensor) -> tuple[Tensor, Tensor]:
    """Responses, and the parts of their gradients that are tangent to the sphere."""
    images = images.detach().requires_grad_()
    with torch.enable_grad():
        values = neuron(images)
        if values.shape != images.shape[:1]:
            raise UsageError(
                f"a neuron gives one response per image, {list(images.shape[:1])}, got {list(values.shape)}"
            )
        (slopes,) = torch.autograd.grad(values.sum(), images)
    images = images.detach()
    along = (slopes * images).sum((1, 2, 3), keepdim=True)
    return values.detach(), slopes - along * images


def _unit(images: Tensor) -> Tensor:
    return images / images.flatten(1).norm(dim=1).clamp_min(1e-12).view(-1, 1, 1, 1)
