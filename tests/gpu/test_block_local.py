"""The block-local kernels and layers on a GPU, against the reference in double precision; skipped without one."""

import copy

import pytest
import torch
from torch import Tensor, nn

from syncline.kernels import block_local as products
from syncline.kernels import l2_pool
from syncline.kernels.block_local import batch_first, batch_last, block_local
from syncline.kernels.geometry import Geometry
from syncline.nn import (
    FusedStack,
    L2Pool2d,
    LocalContrastNorm2d,
    StackShape,
    TiedAutoencoder,
    build_stacks,
    joint_update,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a GPU"),
]
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-3}  # tf32 products; bfloat16 roundings of δ · scale
GEOMETRIES = [
    (Geometry(channels=3, height=40, width=44, field=20, step=4, block=(4, 4, 8)), 96),
    (Geometry(channels=18, height=40, width=36, field=32, step=4, block=(4, 4, 18)), 96),
    (Geometry(channels=5, height=23, width=19, field=7, step=3, block=(3, 1, 5)), 33),
    (Geometry(channels=1, height=9, width=11, field=4, step=5, block=(1, 1, 1)), 1),
    (Geometry(channels=2, height=12, width=12, field=5, step=2, block=(5, 5, 20)), 130),
    (Geometry(channels=2, height=12, width=12, field=4, step=2, block=(4, 4, 8)), 130),
    (Geometry(channels=3, height=19, width=19, field=7, step=6, block=(4, 4, 18)), 96),
    (Geometry(channels=4, height=16, width=16, field=16, step=1, block=(2, 2, 16)), 300),
]
shapes = pytest.mark.parametrize("geometry, count", GEOMETRIES, ids=lambda value: str(value).replace(" ", ""))
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def inputs(geometry: Geometry, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(count)
    weight = torch.randn(geometry.weight_shape, device="cuda").to(dtype)
    images = torch.randn(geometry.images_shape(count), device="cuda").to(dtype)
    maps = torch.randn(geometry.maps_shape(count), device="cuda").to(dtype)
    return images, maps, weight, torch.rand(geometry.blocks, geometry.rows, device="cuda") + 0.5


def error(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape and found.isfinite().all()
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@dtypes
@shapes
def test_products_agree_with_double(geometry: Geometry, count: int, dtype: torch.dtype) -> None:
    images, maps, weight, scale = inputs(geometry, count, dtype)
    assert products.fast(weight) is not None
    wide_images, wide_maps, wide_weight = images.double(), maps.double(), weight.double()
    found = products.forward(images, weight, geometry, scale=scale, dtype=torch.float32)
    expected = products.forward(wide_images, wide_weight, geometry, scale=scale.double())
    assert error(found, expected) < TOLERANCE[dtype]
    found = products.input_gradient(maps, weight, geometry, scale=scale)
    expected = products.input_gradient(wide_maps, wide_weight, geometry, scale=scale.double())
    assert error(found, expected) < TOLERANCE[dtype]
    found = products.weight_gradient(maps, images, geometry, dtype=torch.float32)
    assert error(found, products.weight_gradient(wide_maps, wide_images, geometry)) < TOLERANCE[dtype]


@pytest.mark.parametrize("pairs", [1, 2])
@dtypes
@shapes
def test_updates_agree_with_the_reference(
    geometry: Geometry, count: int, dtype: torch.dtype, pairs: int
) -> None:
    images, maps, weight, scale = inputs(geometry, count, dtype)
    radial = torch.randn_like(scale)
    given = [(maps, images), (maps * 0.5, images * 0.25)][:pairs]
    step = {"rate": 0.01, "decay": 0.9, "scale": scale, "radial": radial, "seed": 5}
    mine, theirs = [weight.clone(), torch.ones_like(weight)], [weight.clone(), torch.ones_like(weight)]
    squares = products.update_(*mine, given, geometry, **step)
    expected = products.reference_update_(*theirs, given, geometry, **step)
    assert error(squares, expected) < 3e-3
    for found, wanted in zip(mine, theirs, strict=True):
        assert error(found, wanted) < TOLERANCE[dtype]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own imports
def test_autograd_and_compile() -> None:
    geometry = GEOMETRIES[0][0]
    images, maps, weight, _ = inputs(geometry, 8, torch.float32)
    images, maps = images.permute(3, 0, 1, 2), maps.permute(3, 0, 1, 2)
    weight.requires_grad_()

    def value(x: Tensor) -> Tensor:
        return (block_local(x, weight, geometry) * maps).sum()

    (plain,) = torch.autograd.grad(value(images), [weight])
    (compiled,) = torch.autograd.grad(torch.compile(value, fullgraph=True)(images), [weight])
    double = products.weight_gradient(batch_last(maps).double(), batch_last(images).double(), geometry)
    assert error(plain, double) < 1e-3 and error(compiled, double) < 1e-3


@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize("last", [False, True])
def test_gradients_of_pooling_and_contrast(padding: str, last: bool) -> None:
    layer = nn.Sequential(L2Pool2d(5, padding=padding), LocalContrastNorm2d(5, padding=padding))
    torch.manual_seed(0)
    maps = torch.randn(24, 4, 28, 26, device="cuda")
    shown = batch_first(batch_last(maps)) if last else maps
    shown.requires_grad_()
    wide = maps.cpu().double().requires_grad_()
    weights = torch.randn_like(layer(maps))
    (found,) = torch.autograd.grad((layer(shown) * weights).sum(), [shown])
    (expected,) = torch.autograd.grad((layer(wide) * weights.cpu().double()).sum(), [wide])
    assert error(found.cpu(), expected) < 1e-4


@pytest.mark.parametrize("pad", [0, 2])
def test_pooling_kernels_agree_with_double(pad: int) -> None:
    torch.manual_seed(0)
    maps = torch.randn(3, 12, 40, 96, device="cuda")
    pooled = l2_pool.forward(maps, 5, pad=pad, eps=1e-4)
    expected = l2_pool.forward(maps.double(), 5, pad=pad, eps=1e-4)
    assert error(pooled, expected) < 1e-5
    gradient = torch.randn_like(pooled)
    found = l2_pool.backward(gradient, pooled, maps, 5, pad=pad)
    assert error(found, l2_pool.backward(gradient.double(), expected, maps.double(), 5, pad=pad)) < 1e-5


def test_fused_and_joint_updates_agree_with_autograd() -> None:
    torch.manual_seed(0)
    stacks = [StackShape(field=8, step=4, block=(4, 4, 4)), StackShape(field=6, step=2, block=(2, 2, 8))]
    network = build_stacks(3, 32, stacks, device="cuda")
    images = torch.randn(24, 3, 32, 32, device="cuda")
    fused = [FusedStack(stack, gain_rate=0.0) for stack in copy.deepcopy(network)]
    objectives = [TiedAutoencoder(stack) for stack in network]
    optimizer = torch.optim.SGD([stack.filter.weight for stack in network], lr=1e-4, momentum=0.9)
    for _ in range(4):
        below, above = objectives[0](images), objectives[1](network[0](images))
        optimizer.zero_grad()
        (below.loss + above.loss).backward()
        optimizer.step()
        steps = joint_update(fused, batch_last(images), rate=1e-4, decay=0.9)
        assert float(steps[0].loss) == pytest.approx(below.loss.item(), rel=2e-3)
        assert float(steps[1].loss) == pytest.approx(above.loss.item(), rel=2e-3)
    for mine, stack in zip(fused, network, strict=True):
        assert error(mine.weight, stack.filter.weight.detach()) < 2e-3


def losses(dtype: torch.dtype) -> list[float]:
    torch.manual_seed(0)
    stack = build_stacks(1, 32, [StackShape(field=12, step=4, block=(4, 4, 8))], device="cuda", dtype=dtype)[
        0
    ]
    fused = FusedStack(stack)
    generator = torch.Generator("cuda").manual_seed(2)
    basis = torch.randn(20, 1024, device="cuda", generator=generator)
    found = []
    for _ in range(200):
        codes = torch.randn(96, 20, device="cuda", generator=generator)
        images = (codes @ basis).view(96, 1, 32, 32) / 5
        found.append(float(fused.update(batch_last(images), rate=1e-4, decay=0.9).loss))
    return found


def test_bfloat16_learns_as_float32_does() -> None:
    wide, narrow = losses(torch.float32), losses(torch.bfloat16)
    last = [sum(values[-20:]) / 20 for values in (wide, narrow)]
    assert last[0] < 0.8 * wide[0]
    assert last[1] == pytest.approx(last[0], rel=0.03)
