"""Pooling with the batch last, against the layer and its autograd."""

import pytest
import torch

from syncline.kernels import l2_pool
from syncline.nn import L2Pool2d


@pytest.mark.parametrize("window", [1, 3, 5])
@pytest.mark.parametrize("padding", ["same", "valid"])
def test_values_and_gradients_are_the_layers(window: int, padding: str) -> None:
    torch.manual_seed(0)
    maps = torch.randn(2, 7, 6, 3, dtype=torch.float64, requires_grad=True)
    pad = window // 2 if padding == "same" else 0
    layer = L2Pool2d(window, padding=padding, eps=0.01)
    expected = layer(maps.permute(3, 0, 1, 2)).permute(1, 2, 3, 0)
    pooled = l2_pool.forward(maps.detach(), window, pad=pad, eps=0.01)
    torch.testing.assert_close(pooled, expected.detach())
    gradient = torch.randn_like(expected)
    (by_maps,) = torch.autograd.grad(expected, [maps], gradient)
    found = l2_pool.backward(gradient, pooled, maps.detach(), window, pad=pad)
    torch.testing.assert_close(found, by_maps)
