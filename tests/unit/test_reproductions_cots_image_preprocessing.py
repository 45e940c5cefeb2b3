"""Contrast normalisation and whitening of images."""

import pytest
import torch
from torch import Tensor

from reproductions.cots.image_preprocessing import Whitening, contrast_normalise
from syncline.errors import UsageError


def natural(count: int, channels: int, height: int, width: int) -> Tensor:
    """Noise whose power falls with the frequency and whose channels go together."""
    generator = torch.Generator().manual_seed(0)
    waves = torch.fft.rfft2(torch.randn(count, channels, height, width, generator=generator))
    across = torch.fft.fftfreq(height).view(-1, 1).square() + torch.fft.rfftfreq(width).square()
    images = torch.fft.irfft2(waves / (across + 0.01), s=(height, width))
    return images + 0.7 * images.roll(1, dims=1) + 3.0


def test_contrast_is_normalised_per_image() -> None:
    images = natural(5, 3, 8, 9) * torch.tensor([1.0, 10, 100, 0.1, 5]).view(5, 1, 1, 1)
    found = contrast_normalise(images)
    torch.testing.assert_close(found.mean((1, 2, 3)), torch.zeros(5), atol=1e-5, rtol=0)
    torch.testing.assert_close(found.square().mean((1, 2, 3)), torch.ones(5), atol=1e-4, rtol=0)
    assert contrast_normalise(torch.ones(1, 1, 4, 4, dtype=torch.uint8)).eq(0).all()


@pytest.mark.parametrize("size", [(8, 8), (7, 9)])
def test_whitened_images_have_a_flat_spectrum_and_uncorrelated_channels(size: tuple[int, int]) -> None:
    images = natural(4000, 2, *size)
    white = Whitening.fit(images, epsilon=1e-6)(images)
    assert white.shape == images.shape
    waves = torch.fft.rfft2(white, norm="ortho")
    power = waves.abs().square().mean(0)
    torch.testing.assert_close(power, torch.ones_like(power), atol=0.02, rtol=0)
    cross = (waves[:, 0] * waves[:, 1].conj()).mean(0).abs()
    assert cross.max() < 0.02
    before = torch.fft.rfft2(images - images.mean(), norm="ortho").abs().square().mean(0)
    assert before.max() > 20 * before.min()


def test_the_filter_carries_over_to_other_images() -> None:
    images = natural(4000, 1, 8, 8)
    whiten = Whitening.fit(images[:2000])
    assert whiten(images[2000:]).std().item() == pytest.approx(whiten(images[:2000]).std().item(), rel=0.05)


def test_undo_gives_the_pixels_back() -> None:
    images = natural(50, 2, 8, 9)
    whiten = Whitening.fit(images)
    torch.testing.assert_close(whiten.undo(whiten(images)), images, atol=1e-3, rtol=1e-3)


def test_wrong_images_are_refused() -> None:
    whiten = Whitening.fit(natural(10, 1, 8, 8))
    with pytest.raises(UsageError, match="fitted on images of 1 x 8 x 8 or 9, got 2 x 8 x 8"):
        whiten(natural(2, 2, 8, 8))
    with pytest.raises(UsageError, match="at least 2 images"):
        Whitening.fit(natural(1, 1, 8, 8))
    with pytest.raises(UsageError, match=r"\(N, C, H, W\)"):
        contrast_normalise(torch.zeros(3, 4))
