"""The Triton kernels in Triton's interpreter, held against the reference on small and odd shapes; no GPU is needed.

Not collected by itself: Triton decides at its first import whether it interprets, so `test_block_local_triton` runs
this file in a process of its own, with TRITON_INTERPRET=1.
"""

import importlib
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from syncline.kernels import block_local as reference
from syncline.kernels import l2_pool
from syncline.kernels.geometry import Geometry


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    return importlib.import_module("syncline.kernels.block_local_launch")


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-6) -> None:
    assert found.shape == expected.shape and found.dtype == expected.dtype
    assert (found - expected).float().norm() <= tolerance * expected.float().norm()


def inputs(
    geometry: Geometry, count: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    torch.manual_seed(count)
    images = torch.randn(geometry.images_shape(count)).to(dtype)
    maps = torch.randn(geometry.maps_shape(count)).to(dtype)
    weight = torch.randn(geometry.weight_shape).to(dtype)
    norms = {"scale": torch.rand(geometry.blocks, geometry.rows) + 0.5}
    return images, maps, weight, norms | {"radial": torch.randn(geometry.blocks, geometry.rows)}


def compare(kernels: ModuleType, geometry: Geometry, count: int, dtype: torch.dtype, **cut: Any) -> None:
    """All four operations, with and without scales, one pair and two, on tiles of `cut`."""
    images, maps, weight, norms = inputs(geometry, count, dtype)
    tiles = kernels.Tiles(**cut)
    how = {"tiles": tiles, "precision": "widen"}
    for scale in (None, norms["scale"]):
        wanted = {"scale": scale, "dtype": torch.float32}
        close(
            kernels.forward(images, weight, geometry, **wanted, **how),
            reference.reference_forward(images, weight, geometry, **wanted),
        )
    one = kernels.Tiles(rows=(16, 0), images=cut["images"], columns=cut["columns"])
    close(
        kernels.input_gradient(maps, weight, geometry, scale=None, tiles=one, precision="widen"),
        reference.reference_input_gradient(maps, weight, geometry, scale=None),
    )
    close(
        kernels.weight_gradient(maps, images, geometry, dtype=torch.float32, **how),
        reference.reference_weight_gradient(maps, images, geometry, dtype=torch.float32),
    )
    for pairs in ([(maps, images)], [(maps, images), (-maps, images * 2)]):
        step = {"rate": 0.1, "decay": 0.9, "seed": 11, **norms}
        mine = [weight.clone(), torch.ones_like(weight)]
        theirs = [weight.clone(), torch.ones_like(weight)]
        squares = kernels.update_(*mine, pairs, geometry, **step, **how)
        close(squares, reference.reference_update_(*theirs, pairs, geometry, **step), 1e-5)
        for found, expected in zip(mine, theirs, strict=True):
            close(found, expected, 1e-5 if dtype == torch.float32 else 1e-3)
            assert dtype != torch.bfloat16 or (found != expected).float().mean() < 0.01  # the same bits round


@settings(deadline=None, max_examples=4, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_random_shapes_and_tiles(kernels: ModuleType, data: st.DataObject) -> None:
    whole = st.integers
    field = data.draw(whole(1, 5), "field")
    geometry = Geometry(
        channels=data.draw(whole(1, 3), "channels"),
        height=field + data.draw(whole(0, 5), "more height"),
        width=field + data.draw(whole(0, 5), "more width"),
        field=field,
        step=data.draw(whole(2, 6), "step"),
        block=(data.draw(whole(1, 3)), data.draw(whole(1, 3)), data.draw(whole(1, 5))),
    )
    rows = (16, data.draw(st.sampled_from([0, 16])))
    images = (16, data.draw(st.sampled_from([0, 16])))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    cut = {"rows": rows, "images": images, "columns": 16, "split": data.draw(whole(1, 3), "split")}
    compare(kernels, geometry, data.draw(whole(1, 20), "images"), dtype, **cut)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("copied", [0, 1, 2])
def test_full_tiles_without_masks_and_by_the_copy_engine(
    kernels: ModuleType, copied: int, dtype: torch.dtype
) -> None:
    geometry = Geometry(channels=2, height=8, width=6, field=4, step=2, block=(2, 2, 12))
    compare(kernels, geometry, 32, dtype, rows=(32, 16), images=(16, 16), columns=32, copied=copied)


def test_the_chosen_tiles_serve(kernels: ModuleType) -> None:
    geometry = Geometry(channels=3, height=9, width=7, field=5, step=2, block=(2, 3, 3))
    images, maps, weight, _ = inputs(geometry, 5, torch.float32)
    found = kernels.forward(images, weight, geometry, scale=None, dtype=torch.float32, precision="widen")
    close(found, reference.forward(images, weight, geometry))
    found = kernels.input_gradient(maps, weight, geometry, scale=None, precision="widen")
    close(found, reference.input_gradient(maps, weight, geometry))
    found = kernels.weight_gradient(maps, images, geometry, dtype=torch.float32, precision="widen")
    close(found, reference.weight_gradient(maps, images, geometry))


@pytest.mark.parametrize(
    "size, most, tiles", [(288, 256, (256, 32)), (96, 128, (64, 32)), (128, 256, (128, 0)), (5, 128, (16, 0))]
)
def test_two_tiles_cover_with_little_waste(
    kernels: ModuleType, size: int, most: int, tiles: tuple[int, int]
) -> None:
    assert kernels._two_tiles(size, most, 16) == tiles


@pytest.mark.parametrize("window, pad", [(5, 2), (5, 0), (3, 1)])
def test_pooling_and_its_gradient(window: int, pad: int) -> None:
    pooling = importlib.import_module("syncline.kernels.l2_pool_triton")
    torch.manual_seed(0)
    maps = torch.randn(2, 7, 6, 3)
    pooled = l2_pool.forward(maps, window, pad=pad, eps=0.01)
    close(pooling.forward(maps, window, pad=pad, eps=0.01), pooled)
    gradient = torch.randn_like(pooled)
    expected = l2_pool.backward(gradient, pooled, maps, window, pad=pad)
    close(pooling.backward(gradient, pooled, maps, window, pad=pad), expected)
