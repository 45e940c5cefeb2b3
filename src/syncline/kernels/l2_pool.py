"""√(ε + Σ x²) over windows, and its gradient, with the batch last (C2).

The plain reference, for CPUs and as the truth of the kernels in `l2_pool_triton`; stride 1. Pooling is the adjoint
of itself but for the padding: the gradient by x is x times the window sums of gradient / pooled.
Not responsible for strides or modules: `nn.L2Pool2d` is the layer.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from syncline.kernels.block_local import triton_kernels


def _kernels(maps: Tensor) -> ModuleType | None:
    if maps.device.type != "cuda" or maps.dtype != torch.float32 or triton_kernels() is None:
        return None
    return importlib.import_module("syncline.kernels.l2_pool_triton")


def forward(maps: Tensor, window: int, *, pad: int, eps: float) -> Tensor:
    """(C, H, W, N) → (C, H + 2·pad − window + 1, W + …, N)."""
    kernels = _kernels(maps)
    if kernels is not None:
        pooled: Tensor = kernels.forward(maps, window, pad=pad, eps=eps)
        return pooled
    return (_sums(maps.square(), window, pad) + eps).sqrt()


def backward(gradient: Tensor, pooled: Tensor, maps: Tensor, window: int, *, pad: int) -> Tensor:
    """The gradient by the maps, given the one by what `forward` made of them."""
    kernels = _kernels(maps)
    if kernels is not None:
        found: Tensor = kernels.backward(gradient, pooled, maps, window, pad=pad)
        return found
    return maps * _sums(gradient / pooled, window, window - 1 - pad)


def _sums(maps: Tensor, window: int, pad: int) -> Tensor:
    """Sums over window × window places, zeros outside."""
    padded = F.pad(maps.permute(0, 3, 1, 2), (pad,) * 4)
    return F.avg_pool2d(padded, window, 1).permute(0, 2, 3, 1) * window**2
