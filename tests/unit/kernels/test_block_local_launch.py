"""How the Triton kernels are launched: tiles by the shape, memory for the results, smaller tiles where the GPU has no room.

The kernels themselves are doubles here; `interpreted.py` and the tests on a GPU run the real ones.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.errors import RunError, UsageError
from syncline.kernels.geometry import Geometry

SMALL = Geometry(channels=3, height=9, width=7, field=5, step=2, block=(2, 3, 3))
LARGE = Geometry(channels=3, height=200, width=200, field=20, step=4, block=(4, 4, 8))
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


@pytest.fixture(scope="module")
def launcher() -> ModuleType:
    pytest.importorskip("triton")
    return importlib.import_module("syncline.kernels.block_local_launch")


class Kernel:
    """Remembers its grids and options; `room` says whether a launch fits."""

    def __init__(self, error: type[Exception], room: Callable[[dict[str, Any]], bool]) -> None:
        self.launches: list[tuple[tuple[int, ...], dict[str, Any]]] = []
        self._error, self._room = error, room

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            self.launches.append((grid, options))
            if not self._room(options):
                raise self._error(300_000, 232_448, "shared memory")  # type: ignore[call-arg]

        return launch


def kernel(
    launcher: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch, room: Callable[[dict[str, Any]], bool]
) -> Kernel:
    made = Kernel(launcher.OutOfResources, room)
    monkeypatch.setattr(launcher, name, made)
    return made


def ones(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


@settings(deadline=None)
@given(st.data())
def test_tiles_are_powers_of_two_that_cover_with_little_waste(
    launcher: ModuleType, data: st.DataObject
) -> None:
    depth, count = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 300))
    geometry = Geometry(channels=4, height=40, width=40, field=8, step=4, block=(3, 3, depth))
    tiles = launcher.forward_tiles(geometry, count, data.draw(DTYPES))
    for size, (large, small), least in ((geometry.rows, tiles.rows, 16), (count, tiles.images, 16)):
        assert all(each & (each - 1) == 0 for each in (large, small)) and large >= least
        programs = -(-size // (large + small))
        assert programs == 1 or large >= 64, "only large tiles take turns"
        assert programs > 1 or large + small < 2 * max(size, least) + 64


@pytest.mark.parametrize("field, channels", [(4, 2), (5, 2), (7, 3)])
def test_small_and_unaligned_fields_get_plain_tiles(launcher: ModuleType, field: int, channels: int) -> None:
    geometry = Geometry(channels=channels, height=20, width=20, field=field, step=3, block=(4, 4, 18))
    for dtype in (torch.float32, torch.bfloat16):
        forward, back = launcher.forward_tiles(geometry, 96, dtype), launcher.input_tiles(geometry, 96, dtype)
        update = launcher.gradient_tiles(geometry, 96, dtype, updates=True, pairs=2)
        assert forward.rows == (32, 0) and back.columns <= 32 and update.rows == (32, 0)
        assert all(tiles.images[1] == 0 and tiles.copied == 0 for tiles in (forward, back, update))


def test_stages_take_no_more_than_a_multiprocessor_has(launcher: ModuleType) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for count in (1, 96, 288):
            tiles = launcher.forward_tiles(LARGE, count, dtype)
            stage = (sum(tiles.rows) + sum(tiles.images)) * tiles.columns * dtype.itemsize
            assert 1 <= tiles.stages <= 4 and tiles.stages * stage <= launcher.SHARED_MEMORY


def test_too_many_elements_are_refused_with_a_way_out(
    launcher: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = kernel(launcher, "forward_kernel", monkeypatch, lambda options: True)
    many = Geometry(channels=3, height=200, width=200, field=20, step=4)
    images = torch.empty(many.images_shape(20_000), device="meta")
    weight = torch.empty(many.weight_shape, device="meta")
    tiles = launcher.Tiles(rows=(16, 0), images=(16, 0), columns=16)
    with pytest.raises(UsageError, match="use batches of at most 17895 images"):
        launcher.forward(images, weight, many, scale=None, dtype=torch.float32, tiles=tiles)
    assert ran.launches == []


def test_lines_are_padded_for_the_kernel_and_results_are_cut_again(
    launcher: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = kernel(launcher, "forward_kernel", monkeypatch, lambda options: True)
    images, weight = ones(SMALL.images_shape(5)), ones(SMALL.weight_shape)
    found = launcher.forward(images, weight, SMALL, scale=None, dtype=torch.bfloat16)
    assert found.shape == SMALL.maps_shape(5) and found.dtype == torch.bfloat16
    ((grid, options),) = ran.launches
    assert options["COUNT"] == 8, "lines of 16 bytes"
    rows = -(-SMALL.rows // (options["RA"] + options["RB"]))
    assert grid == (SMALL.blocks * options["SPLIT"], rows, 1) and options["SCALED"] is False
    back = kernel(launcher, "input_gradient_kernel", monkeypatch, lambda options: True)
    delta = ones(SMALL.maps_shape(5))
    assert launcher.input_gradient(delta, weight, SMALL, scale=None).shape == images.shape
    assert back.launches[0][1]["COUNT"] == 8


def test_tiles_that_do_not_fit_shrink_until_they_do_and_that_is_remembered(
    launcher: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tried() -> list[tuple[int, int]]:
        seen = [(options["STAGES"], options["BK"]) for _, options in ran.launches]
        ran.launches.clear()
        return seen

    ran = kernel(launcher, "weight_gradient_kernel", monkeypatch, lambda options: options["BK"] <= 32)
    tiles = launcher.Tiles(rows=(64, 0), images=(32, 0), columns=64, stages=3)
    odd = Geometry(channels=1, height=9, width=7, field=3, step=3, block=(1, 1, 7))  # of this test alone
    delta, images = ones(odd.maps_shape(4)), ones(odd.images_shape(4))
    for expected in ([(3, 64), (2, 64), (1, 64), (1, 32)], [(1, 32)]):
        launcher.weight_gradient(delta, images, odd, dtype=torch.float32, tiles=tiles)
        assert tried() == expected
    least = launcher.Tiles(rows=(64, 0), images=(32, 0), columns=16, stages=1)
    kernel(launcher, "weight_gradient_kernel", monkeypatch, lambda options: False)
    with pytest.raises(RunError, match="fewer neurons or smaller batches"):
        launcher.weight_gradient(delta, images, odd, dtype=torch.float32, tiles=least)


@pytest.mark.parametrize("pairs, dtype", [(1, torch.float32), (2, torch.bfloat16)])
def test_an_update_says_what_it_is_and_a_gradient_alone_says_that_it_is_none(
    launcher: ModuleType, pairs: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = kernel(launcher, "weight_gradient_kernel", monkeypatch, lambda options: True)
    delta, images = ones(SMALL.maps_shape(8), dtype), ones(SMALL.images_shape(8), dtype)
    weight, momentum = ones(SMALL.weight_shape, dtype), ones(SMALL.weight_shape, dtype)
    how = {"rate": 0.1, "decay": 0.9, "scale": None, "radial": None, "seed": 1}
    squares = launcher.update_(weight, momentum, [(delta, images)] * pairs, SMALL, **how)
    assert squares.shape == (SMALL.blocks, SMALL.rows)
    launcher.weight_gradient(delta, images, SMALL, dtype=dtype)
    (_, update), (_, gradient) = ran.launches
    assert (update["UPDATE"], update["TWO"], update["SCALED"]) == (True, pairs == 2, False)
    assert update["STOCHASTIC"] is (dtype == torch.bfloat16)
    assert (gradient["UPDATE"], gradient["STOCHASTIC"], gradient["TWO"]) == (False, False, False)
