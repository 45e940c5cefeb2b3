"""LocalContrastNorm2d: subtractive and divisive normalisation over a window of all maps (C2)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncline.errors import UsageError
from syncline.nn.pooling import Padding, check_window, pooled_size


class LocalContrastNorm2d(nn.Module):
    """Take away the local mean over all maps, then divide by the local deviation where it exceeds a floor.

        m[n, i, j] = Σ_{u, v} w[i, j, u, v] · mean_c x[n, c, i + u, j + v]
        g = x − m
        d[n, i, j] = √(Σ_{u, v} w[i, j, u, v] · mean_c g[n, c, i + u, j + v]²)
        out = g / max(floor, d)

    w are Gaussian weights exp(−(u² + v²)/2σ²), |u|, |v| ≤ ⌊window/2⌋, σ = window/4, of the places inside the map,
    with sum 1 at every (i, j). 'valid' computes the same and leaves out the places whose window is not whole.
    """

    def __init__(self, window: int = 5, *, padding: Padding = "same", floor: float = 0.01) -> None:
        super().__init__()
        check_window(window, padding)
        if floor <= 0:
            raise UsageError(f"floor must be above 0, got {floor}: it keeps the division finite")
        self.window, self.floor = window, floor
        self.padding: Padding = padding
        offsets = torch.arange(window, device="cpu") - window // 2
        self.taps: list[float] = torch.exp(-offsets.square() / (2 * (window / 4) ** 2)).tolist()

    def forward(self, maps: Tensor) -> Tensor:
        whole = self._smooth(torch.ones_like(maps[:1, :1]))
        centred = maps - self._smooth(maps.mean(1, keepdim=True)) / whole
        power = self._smooth(centred.square().mean(1, keepdim=True)) / whole
        least = torch.full_like(power, self.floor**2)
        out = centred * torch.maximum(power, least).rsqrt()
        edge = self.window // 2
        if self.padding == "same" or edge == 0:
            return out
        self.output_size(maps.shape[2], maps.shape[3])
        return out[:, :, edge:-edge, edge:-edge]

    def _smooth(self, maps: Tensor) -> Tensor:
        """The weights' sum over rows, then over columns, with nothing outside."""
        edge = self.window // 2
        for dim, pad in ((2, (0, 0, edge, edge)), (3, (edge, edge, 0, 0))):
            padded, size = F.pad(maps, pad), maps.shape[dim]
            parts = (padded.narrow(dim, at, size) * tap for at, tap in enumerate(self.taps))
            maps = sum(parts, start=torch.zeros_like(maps))
        return maps

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        high, wide = (pooled_size(size, self.window, 1, self.padding) for size in (height, width))
        return high, wide

    def extra_repr(self) -> str:
        return f"window={self.window}, padding={self.padding!r}, floor={self.floor}"
