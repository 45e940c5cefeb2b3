"""How the pooling kernel is launched, forward and backward: its double does in plain PyTorch what the kernel says of itself.

`interpreted.py` and the tests on a GPU run the real one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from syncline.kernels import l2_pool


class WindowKernel:
    """Fills what its grid covers: lines of `LINE` places, each of a channel and a height."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, int]] = []

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
        self.grids.append(grid)

        def launch(source: Tensor, factor: Tensor, out: Tensor, eps: float, **sizes: Any) -> None:
            assert source.is_contiguous() and factor.is_contiguous() and out.is_contiguous()
            lines, count = grid[0], sizes["COUNT"]
            assert (
                lines % sizes["OUT_H"] == 0
                and (grid[1] - 1) * sizes["LINE"] < sizes["OUT_LINE"] <= grid[1] * sizes["LINE"]
            )
            maps = source.reshape(-1, sizes["HEIGHT"], sizes["SOURCE_LINE"] // count, count)
            maps = F.pad((maps.square() if sizes["ROOT"] else maps).permute(0, 3, 1, 2), (sizes["PAD"],) * 4)
            found = sum(
                maps[:, :, u : u + sizes["OUT_H"], v : v + sizes["OUT_LINE"] // count]
                for u in range(sizes["WINDOW"])
                for v in range(sizes["WINDOW"])
            )
            made = found.permute(0, 2, 3, 1)  # type: ignore[union-attr]
            out.copy_((made + eps).sqrt() if sizes["ROOT"] else made * factor.view_as(made))

        return launch


@pytest.fixture
def pooling(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("triton")
    module = importlib.import_module("syncline.kernels.l2_pool_triton")
    monkeypatch.setattr(module, "window_kernel", WindowKernel())
    return module


@pytest.mark.parametrize("window, pad", [(5, 2), (5, 0), (3, 1), (1, 0)])
def test_values_and_gradients_are_those_of_the_reference(pooling: ModuleType, window: int, pad: int) -> None:
    generator = torch.Generator().manual_seed(window + pad)
    maps = torch.randn(2, 7, 6, 3, generator=generator)
    pooled = l2_pool.forward(maps, window, pad=pad, eps=0.01)
    torch.testing.assert_close(pooling.forward(maps, window, pad=pad, eps=0.01), pooled)
    gradient = torch.randn(pooled.shape, generator=generator)
    expected = l2_pool.backward(gradient, pooled, maps, window, pad=pad)
    torch.testing.assert_close(pooling.backward(gradient, pooled, maps, window, pad=pad), expected)


def test_maps_that_do_not_lie_in_one_piece_are_copied_and_long_lines_are_cut(pooling: ModuleType) -> None:
    maps = torch.rand(300, 4, 5, 2).permute(3, 2, 1, 0)  # (C, H, W, N)
    found = pooling.forward(maps, 3, pad=1, eps=0.1)
    torch.testing.assert_close(found, l2_pool.forward(maps, 3, pad=1, eps=0.1))
    assert pooling.window_kernel.grids == [(2 * 5, -(-4 * 300 // pooling.LINE))]
