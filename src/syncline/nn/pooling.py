"""L2Pool2d: square-root pooling with fixed, equal weights (C2)."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from syncline.errors import UsageError

Padding = Literal["same", "valid"]


def check_window(window: int, padding: str) -> None:
    if window < 1 or window % 2 == 0:
        raise UsageError(f"window must be odd and at least 1, got {window}")
    if padding not in ("same", "valid"):
        raise UsageError(f"padding is 'same' or 'valid', got {padding!r}")


def pooled_size(size: int, window: int, stride: int, padding: Padding) -> int:
    """What is left of a height or width of `size`."""
    if padding == "same":
        size += window - 1
    if size < window:
        raise UsageError(f"a window of {window} does not fit into maps of {size}: use padding='same'")
    return (size - window) // stride + 1


class L2Pool2d(nn.Module):
    """√(ε + Σ x²) over window × window neighbours of one map.

        out[n, c, i, j] = √(ε + Σ_{u, v < window} x[n, c, i·stride + u − o, j·stride + v − o]²)

    with o = ⌊window/2⌋ for 'same' (nothing outside the map) and o = 0 for 'valid' (whole windows alone).
    """

    def __init__(
        self, window: int = 5, *, stride: int = 1, padding: Padding = "same", eps: float = 1e-4
    ) -> None:
        super().__init__()
        check_window(window, padding)
        if stride < 1 or eps <= 0:
            raise UsageError(f"stride must be at least 1 and eps above 0, got {stride} and {eps}")
        self.window, self.stride, self.eps = window, stride, eps
        self.padding: Padding = padding

    def forward(self, maps: Tensor) -> Tensor:
        pad = self.window // 2 if self.padding == "same" else 0
        means = F.avg_pool2d((maps * maps).contiguous(), self.window, self.stride, pad)
        return (means * self.window**2 + self.eps).sqrt()

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        high, wide = (pooled_size(size, self.window, self.stride, self.padding) for size in (height, width))
        return high, wide

    def extra_repr(self) -> str:
        return f"window={self.window}, stride={self.stride}, padding={self.padding!r}, eps={self.eps}"
