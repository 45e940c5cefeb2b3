"""What is done to images before training: contrast normalisation and whitening (C6)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from syncline.errors import UsageError


def contrast_normalise(images: Tensor, *, floor: float = 1e-2) -> Tensor:
    """(N, C, H, W) → float32: each image less its mean, over max(floor, its deviation)."""
    _check(images)
    images = images.float()
    centred = images - images.mean((1, 2, 3), keepdim=True)
    return centred / centred.square().mean((1, 2, 3), keepdim=True).sqrt().clamp_min(floor)


@dataclass(frozen=True, slots=True)
class Whitening:
    """A linear filter after which every frequency and channel has the same power and channels are uncorrelated.

    Images are taken as samples of a field whose statistics do not depend on the place: their covariance is then a
    (C, C) matrix per frequency, so images of any size are whitened, where a full covariance of 200 x 200 x 3 pixels
    would have 14 billion entries. Frequencies with less than `epsilon` of the mean power are damped, not blown up.
    Images wrap around at their edges.
    """

    mean: Tensor  # (C, 1, 1)
    filters: Tensor  # (H, W//2 + 1, C, C), complex

    @classmethod
    def fit(cls, images: Tensor, *, epsilon: float = 0.01) -> Whitening:
        _check(images)
        if len(images) < 2:
            raise UsageError(f"whitening is fitted on at least 2 images, got {len(images)}")
        images = images.float()
        mean = images.mean((0, 2, 3)).view(-1, 1, 1)
        waves = torch.fft.rfft2(images - mean, norm="ortho").permute(2, 3, 1, 0)  # (H, W//2 + 1, C, N)
        covariance = waves @ waves.mH / len(images)
        powers, vectors = torch.linalg.eigh(covariance)
        damped = (powers.clamp_min(0) + epsilon * powers.mean()).rsqrt()
        return cls(mean, (vectors * damped.unsqueeze(-2)) @ vectors.mH)

    def __call__(self, images: Tensor) -> Tensor:
        self._check_size(images)
        return self._filtered(images.float() - self.mean, self.filters)

    def undo(self, images: Tensor) -> Tensor:
        """Whitened images as pixels again, to look at them."""
        self._check_size(images)
        return self._filtered(images.float(), torch.linalg.inv(self.filters)) + self.mean

    @staticmethod
    def _filtered(images: Tensor, filters: Tensor) -> Tensor:
        waves = torch.einsum("hwcd,ndhw->nchw", filters, torch.fft.rfft2(images, norm="ortho"))
        return torch.fft.irfft2(waves, s=images.shape[2:], norm="ortho")

    def _check_size(self, images: Tensor) -> None:
        _check(images)
        channels, (high, half) = self.mean.shape[0], self.filters.shape[:2]
        if images.shape[1] != channels or images.shape[2] != high or images.shape[3] // 2 + 1 != half:
            raise UsageError(
                f"fitted on images of {channels} x {high} x {2 * half - 2} or {2 * half - 1}, "
                f"got {' x '.join(map(str, images.shape[1:]))}"
            )


def _check(images: Tensor) -> None:
    if images.dim() != 4:
        raise UsageError(f"images are (N, C, H, W), got shape {list(images.shape)}")
