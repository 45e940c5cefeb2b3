"""The plain reference of block-local products, held against F.unfold, autograd and finite differences."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from syncline.errors import UsageError
from syncline.kernels import block_local as products
from syncline.kernels.block_local import (
    batch_first,
    batch_last,
    block_local,
    block_local_transposed,
    round_stochastically,
    rounding_bits,
)
from syncline.kernels.geometry import Geometry


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    field = draw(st.integers(1, 5))
    return Geometry(
        channels=draw(st.integers(1, 3)),
        height=field + draw(st.integers(0, 7)),
        width=field + draw(st.integers(0, 7)),
        field=field,
        step=draw(st.integers(1, 6)),
        block=(draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 4))),
    )


def unfolded(images: Tensor, geometry: Geometry) -> Tensor:
    """(N, C, H, W) → (B, K, N), by F.unfold."""
    return F.unfold(images, geometry.field, stride=geometry.step).permute(2, 1, 0)


def direct(images: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    return batch_first(geometry.to_maps(weight @ unfolded(images, geometry)))


def random(geometry: Geometry, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Images and maps with the batch first, and a weight."""
    torch.manual_seed(count)
    images = torch.randn(count, geometry.channels, geometry.height, geometry.width, dtype=dtype)
    maps = torch.randn(count, geometry.depth, *geometry.output_size, dtype=dtype)
    return images, maps, torch.randn(geometry.weight_shape, dtype=dtype)


@settings(deadline=None, max_examples=40)
@given(geometries(), st.integers(1, 5))
def test_all_products_are_those_of_unfold_and_autograd(geometry: Geometry, count: int) -> None:
    images, maps, weight = random(geometry, count, torch.float64)
    images.requires_grad_(), weight.requires_grad_()
    expected = direct(images, weight, geometry)
    by_images, by_weight = torch.autograd.grad(expected, [images, weight], maps)
    pixels, deltas = batch_last(images.detach()), batch_last(maps)
    torch.testing.assert_close(batch_first(products.forward(pixels, weight.detach(), geometry)), expected)
    found = products.input_gradient(deltas, weight.detach(), geometry)
    torch.testing.assert_close(batch_first(found), by_images)
    torch.testing.assert_close(products.weight_gradient(deltas, pixels, geometry), by_weight)


@settings(deadline=None, max_examples=20)
@given(geometries(), st.integers(1, 4), st.booleans())
def test_the_fused_update_is_momentum_on_the_gradient(
    geometry: Geometry, count: int, unit_norm: bool
) -> None:
    images, maps, weight = random(geometry, count, torch.float64)
    velocity = torch.randn_like(weight)
    raw = weight.clone().requires_grad_()
    filters = raw / raw.norm(dim=2, keepdim=True) if unit_norm else raw
    responses = direct(images, filters, geometry)
    (gradient,) = torch.autograd.grad(responses, raw, maps)
    scale = radial = None
    if unit_norm:
        scale = weight.norm(dim=2).reciprocal()
        radial = geometry.to_rows(batch_last(maps * responses.detach()).sum(3))
    expected_velocity = 0.9 * velocity + gradient
    expected = weight - 0.1 * expected_velocity
    squares = products.update_(
        *(weight, velocity, [(batch_last(maps), batch_last(images))], geometry),
        **{"rate": 0.1, "decay": 0.9, "scale": scale, "radial": radial},
    )
    torch.testing.assert_close(velocity, expected_velocity)
    torch.testing.assert_close(weight, expected)
    torch.testing.assert_close(squares, expected.square().sum(2).float())


def test_two_pairs_add_up() -> None:
    geometry = Geometry(channels=2, height=7, width=6, field=3, step=2, block=(1, 2, 3))
    images, maps, weight = random(geometry, 4, torch.float64)
    pixels, deltas = batch_last(images), batch_last(maps)
    velocity = torch.zeros_like(weight)
    pairs = [(deltas, pixels), (deltas * 2, pixels + 1)]
    products.update_(weight, velocity, pairs, geometry, rate=0.0, decay=0.0)
    expected = sum(products.weight_gradient(*pair, geometry) for pair in pairs)
    torch.testing.assert_close(velocity, expected)


def test_gradcheck_of_both_operations() -> None:
    geometry = Geometry(channels=2, height=6, width=7, field=3, step=2, block=(1, 2, 2))
    images, maps, weight = random(geometry, 2, torch.float64)
    images.requires_grad_(), maps.requires_grad_(), weight.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: block_local(x, w, geometry), (images, weight))
    assert torch.autograd.gradcheck(lambda y, w: block_local_transposed(y, w, geometry), (maps, weight))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_narrow_dtypes_agree_with_double(dtype: torch.dtype, tolerance: float) -> None:
    geometry = Geometry(channels=3, height=12, width=12, field=5, step=3, block=(2, 2, 4))
    images, _, weight = random(geometry, 6, torch.float64)
    found = block_local(images.to(dtype), weight.to(dtype), geometry)
    expected = direct(images, weight, geometry)
    assert found.dtype == dtype
    assert (found.double() - expected).norm() / expected.norm() < tolerance


def test_no_unfolded_copy_of_the_batch_is_made() -> None:
    geometry = Geometry(channels=4, height=68, width=68, field=20, step=4, block=(1, 1, 1))
    count = 8
    images = torch.randn(geometry.images_shape(count))
    weight = torch.randn(geometry.weight_shape)
    unfolded_bytes = geometry.blocks * geometry.fan_in * count * 4
    with torch.profiler.profile(profile_memory=True) as profile:
        products.forward(images, weight, geometry)
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert largest < unfolded_bytes / 4


def test_stochastic_rounding_keeps_the_mean_and_the_grid() -> None:
    values = torch.tensor([1.0 + 2**-9, -3.1415, 1e-3, 0.0]).repeat(20_000, 1)
    bits = rounding_bits(7, 0, (1, 20_000, 4), torch.device("cpu"))[0]
    rounded = round_stochastically(values, bits >> 16).float()
    assert rounded.unique(dim=0).shape[0] > 1
    torch.testing.assert_close(rounded.mean(0), values[0], rtol=2e-4, atol=0)
    neighbours = (rounded - values).abs() <= values.abs() * 2**-7
    assert neighbours.all() and (rounded[:, 3] == 0).all()


def test_rounding_bits_do_not_depend_on_where_one_starts() -> None:
    whole = rounding_bits(3, 0, (4, 5, 6), torch.device("cpu"))
    part = rounding_bits(3, 2, (2, 5, 6), torch.device("cpu"))
    assert torch.equal(whole[2:], part)
    assert not torch.equal(whole, rounding_bits(4, 0, (4, 5, 6), torch.device("cpu")))
    halves = torch.stack([whole >> 16, whole & 0xFFFF]).double()
    assert halves.min() >= 0 and halves.max() < 65536


def test_bfloat16_steps_below_its_resolution_still_add_up() -> None:
    geometry = Geometry(channels=1, height=16, width=16, field=16, step=1, block=(1, 1, 64))
    weight = torch.ones(geometry.weight_shape, dtype=torch.bfloat16)
    velocity = torch.zeros_like(weight)
    images = torch.ones(geometry.images_shape(1), dtype=torch.bfloat16)
    maps = torch.ones(geometry.maps_shape(1), dtype=torch.bfloat16)
    for step in range(50):  # each step is 2⁻¹², half a unit of the last place is 2⁻⁹
        products.update_(weight, velocity, [(maps, images)], geometry, rate=2**-12, decay=0.0, seed=step)
    assert weight.float().mean().item() == pytest.approx(1 - 50 * 2**-12, abs=5e-4)


def test_mistakes_are_refused_with_numbers() -> None:
    geometry = Geometry(channels=1, height=6, width=6, field=3, step=3, block=(1, 1, 2))
    images, maps, weight = random(geometry, 2, torch.float32)
    pixels, deltas = batch_last(images), batch_last(maps)
    update = {"rate": 0.1, "decay": 0.9}
    with pytest.raises(UsageError, match=r"images must have shape \[1, 6, 6, 2\]"):
        products.forward(pixels[:, 1:], weight, geometry)
    with pytest.raises(UsageError, match="weight must be contiguous"):
        products.forward(pixels, weight.transpose(1, 2).contiguous().transpose(1, 2), geometry)
    with pytest.raises(UsageError, match=r"input must have shape \[2, 1, 6, 6\]"):
        block_local(images[:, :, 1:], weight, geometry)
    with pytest.raises(UsageError, match="one or two pairs"):
        products.update_(weight, weight.clone(), [], geometry, **update)
    with pytest.raises(UsageError, match="one dtype"):
        products.update_(weight, weight.double(), [(deltas, pixels)], geometry, **update)
    with pytest.raises(UsageError, match="scale and radial go together"):
        products.update_(
            weight, weight.clone(), [(deltas, pixels)], geometry, **update, scale=weight.norm(dim=2)
        )
