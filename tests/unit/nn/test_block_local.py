"""The three layers of a stack, against direct formulas written as loops."""

import math

import pytest
import torch
from torch import Tensor

from syncline.errors import UsageError
from syncline.nn import BlockLocal2d, L2Pool2d, LocalContrastNorm2d, StackShape, build_stacks


def responses(layer: BlockLocal2d, images: Tensor, weight: Tensor) -> Tensor:
    """W x, one neuron at a time."""
    geometry = layer.geometry
    (high, wide), (bh, bw, depth) = geometry.grid, geometry.block
    out = torch.empty(len(images), depth, high * bh, wide * bw, dtype=images.dtype)
    for p in range(high):
        for q in range(wide):
            top, left = p * geometry.step, q * geometry.step
            field = images[:, :, top : top + geometry.field, left : left + geometry.field].flatten(1)
            for i in range(bh):
                for j in range(bw):
                    for k in range(depth):
                        row = weight[p * wide + q, (i * bw + j) * depth + k]
                        out[:, k, p * bh + i, q * bw + j] = field @ row
    return out


@pytest.mark.parametrize("unit_norm", [False, True])
def test_block_local_is_one_dot_product_per_neuron(unit_norm: bool) -> None:
    torch.manual_seed(0)
    layer = BlockLocal2d(
        2, (9, 8), field=3, step=2, block=(2, 1, 3), unit_norm=unit_norm, dtype=torch.float64
    )
    images = torch.randn(3, 2, 9, 8, dtype=torch.float64)
    weight = layer.weight.detach()
    filters = weight / weight.norm(dim=2, keepdim=True) if unit_norm else weight
    found = layer(images)
    assert found.shape == (3, 3, 4 * 2, 3 * 1)
    torch.testing.assert_close(found, responses(layer, images, filters))


def test_decode_is_the_transpose() -> None:
    torch.manual_seed(0)
    layer = BlockLocal2d(2, 9, field=4, step=3, block=(2, 2, 2), unit_norm=True, dtype=torch.float64)
    images = torch.randn(2, 2, 9, 9, dtype=torch.float64)
    maps = torch.randn_like(layer(images))
    torch.testing.assert_close((layer(images) * maps).sum(), (images * layer.decode(maps)).sum())


def test_block_local_under_compile_gives_the_same_values_and_gradients() -> None:
    torch.manual_seed(0)
    layer = BlockLocal2d(1, 8, field=4, step=2, block=(2, 2, 2), unit_norm=True)
    images = torch.randn(4, 1, 8, 8)
    compiled = torch.compile(lambda x: layer(x).square().sum(), backend="aot_eager", fullgraph=True)
    (expected,) = torch.autograd.grad(layer(images).square().sum(), [layer.weight])
    value = compiled(images)
    (found,) = torch.autograd.grad(value, [layer.weight])
    torch.testing.assert_close(value, layer(images).square().sum())
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("last", [False, True])
def test_pooling_is_its_formula(padding: str, stride: int, last: bool) -> None:
    torch.manual_seed(0)
    maps = torch.randn(3, 2, 7, 9, dtype=torch.float64)
    pool = L2Pool2d(3, stride=stride, padding=padding, eps=0.01)
    shown = maps.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2) if last else maps
    found = pool(shown)
    offset = 1 if padding == "same" else 0
    high, wide = pool.output_size(7, 9)
    assert found.shape == (3, 2, high, wide)
    for i in range(high):
        for j in range(wide):
            rows = range(max(0, i * stride - offset), min(7, i * stride - offset + 3))
            columns = range(max(0, j * stride - offset), min(9, j * stride - offset + 3))
            squares = sum(maps[:, :, u, v].square() for u in rows for v in columns)
            torch.testing.assert_close(found[:, :, i, j], (0.01 + squares).sqrt())


def local_mean(values: Tensor, i: int, j: int, window: int) -> Tensor:
    """Gaussian mean of (N, H, W) around (i, j), of the places inside."""
    reach, sigma, total, weights = window // 2, window / 4, torch.zeros(len(values), dtype=values.dtype), 0.0
    for u in range(-reach, reach + 1):
        for v in range(-reach, reach + 1):
            if 0 <= i + u < values.shape[1] and 0 <= j + v < values.shape[2]:
                weight = math.exp(-(u * u + v * v) / (2 * sigma**2))
                total, weights = total + weight * values[:, i + u, j + v], weights + weight
    return total / weights


@pytest.mark.parametrize("padding", ["same", "valid"])
def test_contrast_normalisation_is_its_formula(padding: str) -> None:
    torch.manual_seed(0)
    maps = torch.randn(2, 3, 6, 7, dtype=torch.float64)
    maps[:, :, 4:, 5:] = 1.0  # a flat corner, where the floor divides
    norm = LocalContrastNorm2d(3, padding=padding, floor=0.3)
    mean = maps.mean(1)
    means = torch.stack([local_mean(mean, i, j, 3) for i in range(6) for j in range(7)], 1).view(2, 1, 6, 7)
    centred = maps - means
    power = centred.square().mean(1)
    powers = torch.stack([local_mean(power, i, j, 3) for i in range(6) for j in range(7)], 1).view(2, 1, 6, 7)
    expected = centred / powers.sqrt().clamp_min(0.3)
    assert (powers.sqrt() < 0.3).any() and (powers.sqrt() > 0.3).any()
    if padding == "valid":
        expected = expected[:, :, 1:-1, 1:-1]
    torch.testing.assert_close(norm(maps), expected)
    assert norm.output_size(6, 7) == expected.shape[2:]


def test_gradients_of_the_fixed_layers() -> None:
    torch.manual_seed(0)
    maps = torch.randn(2, 2, 5, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(L2Pool2d(3, padding="valid"), maps)
    assert torch.autograd.gradcheck(LocalContrastNorm2d(3), maps)


def test_stacks_fit_on_top_of_each_other() -> None:
    shape = StackShape(field=4, step=2, block=(2, 2, 3), window=3, padding="valid")
    network = build_stacks(1, (20, 18), [shape, shape])
    images = torch.randn(2, 1, 20, 18)
    assert network(images).shape[1:] == (network[1].out_channels, *network[1].output_size)
    assert network[1].filter.geometry.channels == 3
    assert network(images).square().sum().isfinite()


def test_wrong_layers_are_refused() -> None:
    with pytest.raises(UsageError, match="window must be odd"):
        L2Pool2d(4)
    with pytest.raises(UsageError, match="padding is 'same' or 'valid'"):
        LocalContrastNorm2d(5, padding="full")
    with pytest.raises(UsageError, match="does not fit into maps of 4"):
        L2Pool2d(5, padding="valid").output_size(4, 9)
    with pytest.raises(UsageError, match="floor must be above 0"):
        LocalContrastNorm2d(5, floor=0.0)
    with pytest.raises(UsageError, match=r"input must have shape \[2, 1, 8, 8\]"):
        BlockLocal2d(1, 8, field=4, step=2)(torch.randn(2, 1, 9, 8))
