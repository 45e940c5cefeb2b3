"""The Triton kernel of `l2_pool`: window sums along lines of (W, N), which lie in one piece, with what is done to
them before and after. Importing this needs Triton; `l2_pool` decides whether to."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LINE = 1024  # places of a line that one program makes


@triton.jit
def window_kernel(
    source: tl.tensor,
    factor: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    HEIGHT: tl.constexpr,
    SOURCE_LINE: tl.constexpr,
    OUT_H: tl.constexpr,
    OUT_LINE: tl.constexpr,
    COUNT: tl.constexpr,
    WINDOW: tl.constexpr,
    PAD: tl.constexpr,
    ROOT: tl.constexpr,
    LINE: tl.constexpr,
) -> None:
    """out = √(ε + window sums of source²) with ROOT, else factor · window sums of source. Grid: (C · OUT_H, parts)."""
    row = tl.program_id(0)
    c = row // OUT_H
    i = row % OUT_H
    at = tl.program_id(1) * LINE + tl.arange(0, LINE)
    total = tl.zeros((LINE,), tl.float32)
    zeros = tl.zeros((LINE,), tl.int32)
    for u in tl.static_range(WINDOW):
        y = zeros + (i + u - PAD)
        for v in tl.static_range(WINDOW):
            place = at + (v - PAD) * COUNT
            inside = (at < OUT_LINE) & (place >= 0) & (place < SOURCE_LINE) & (y >= 0) & (y < HEIGHT)
            value = tl.load(source + (c * HEIGHT + y) * SOURCE_LINE + place, mask=inside, other=0.0)
            total += value * value if ROOT else value
    to = row * OUT_LINE + at
    if ROOT:
        total = tl.sqrt(total + eps)
    else:
        total *= tl.load(factor + to, mask=at < OUT_LINE, other=0.0)
    tl.store(out + to, total, mask=at < OUT_LINE)


def forward(maps: Tensor, window: int, *, pad: int, eps: float) -> Tensor:
    return _launch(maps.contiguous(), None, window, pad, eps)


def backward(gradient: Tensor, pooled: Tensor, maps: Tensor, window: int, *, pad: int) -> Tensor:
    return _launch((gradient / pooled).contiguous(), maps.contiguous(), window, window - 1 - pad, 0.0)


def _launch(source: Tensor, factor: Tensor | None, window: int, pad: int, eps: float) -> Tensor:
    channels, height, width, count = source.shape
    high, wide = height + 2 * pad - window + 1, width + 2 * pad - window + 1
    out = torch.empty(channels, high, wide, count, dtype=torch.float32, device=source.device)
    window_kernel[(channels * high, triton.cdiv(wide * count, LINE))](
        source,
        out if factor is None else factor,
        out,
        eps,
        HEIGHT=height,
        SOURCE_LINE=width * count,
        OUT_H=high,
        OUT_LINE=wide * count,
        COUNT=count,
        WINDOW=window,
        PAD=pad,
        ROOT=factor is None,
        LINE=LINE,
        num_warps=8,
    )
    return out
