"""Untied, locally connected filters whose neurons share fields in blocks (C1); stacks of these filters, square-root pooling
with fixed weights and local contrast normalisation; and several of them (C2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncline.errors import UsageError
from syncline.kernels.block_local import batch_first, block_local, block_local_transposed, wide
from syncline.kernels.geometry import Geometry


class BlockLocal2d(nn.Module):
    """Every neuron has weights of its own over its field; the neurons of a block share one field.

    Input (N, in_channels, H, W); output (N, depth, nH·bh, nW·bw) with nH = ⌊(H − field)/step⌋ + 1 blocks. `weight` is
    (nH·nW, bh·bw·depth, in_channels·field·field): neuron (i, j, k) of a block at row (i·bw + j)·depth + k, the field
    flattened as (channel, y, x). Where the step does not divide H − field, the last rows of pixels are seen by nobody.

    With `unit_norm` the response is that of W = W̃/‖W̃‖ for each filter, `weight` being W̃ (C3). Images are brought to
    the weight's dtype for the product and responses come back in the images'. No bias.
    """

    def __init__(
        self,
        in_channels: int,
        image_size: int | tuple[int, int],
        *,
        field: int,
        step: int,
        block: tuple[int, int, int] = (4, 4, 8),
        unit_norm: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
        self.geometry = Geometry(
            channels=in_channels, height=height, width=width, field=field, step=step, block=block
        )
        self.unit_norm = unit_norm
        self.weight = nn.Parameter(torch.empty(self.geometry.weight_shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights with filters of norm 1 in the mean."""
        nn.init.normal_(self.weight, std=self.geometry.fan_in**-0.5)

    def scale(self) -> Tensor:
        """(B, R), 1/‖W̃‖ of every filter; differentiable."""
        norms = torch.linalg.vector_norm(self.weight, dim=2, dtype=wide(self.weight.dtype))
        return norms.reciprocal()

    def forward(self, images: Tensor) -> Tensor:
        responses = block_local(images, self.weight, self.geometry)
        return responses * self._scale_maps(responses) if self.unit_norm else responses

    def decode(self, responses: Tensor) -> Tensor:
        """Wᵀ y: (N, depth, nH·bh, nW·bw) → (N, in_channels, H, W)."""
        if self.unit_norm:
            responses = responses * self._scale_maps(responses)
        return block_local_transposed(responses, self.weight, self.geometry)

    def _scale_maps(self, like: Tensor) -> Tensor:
        return batch_first(self.geometry.to_maps(self.scale()).unsqueeze(3)).to(like.dtype)

    def extra_repr(self) -> str:
        return f"{self.geometry}, {self.geometry.parameters:,} weights, unit_norm={self.unit_norm}"


class BlockLocalDecoder2d(nn.Module):
    """Wᵀ y of a filter, as a layer of its own that shares the filter's weights."""

    def __init__(self, filter: BlockLocal2d) -> None:
        super().__init__()
        self.filter = filter

    def forward(self, responses: Tensor) -> Tensor:
        return self.filter.decode(responses)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StackShape:
    """What a stack is made of; sizes of images come from the stack below."""

    field: int
    step: int
    block: tuple[int, int, int] = (4, 4, 8)
    window: int = 5
    padding: Padding = "same"


class Stack(nn.Module):
    """Filters of unit norm, then `L2Pool2d`, then `LocalContrastNorm2d`; only the filters are learned."""

    def __init__(
        self,
        in_channels: int,
        image_size: int | tuple[int, int],
        shape: StackShape,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.filter = BlockLocal2d(
            in_channels,
            image_size,
            field=shape.field,
            step=shape.step,
            block=shape.block,
            unit_norm=True,
            device=device,
            dtype=dtype,
        )
        self.pool = L2Pool2d(shape.window, padding=shape.padding)
        self.norm = LocalContrastNorm2d(shape.window, padding=shape.padding)

    def forward(self, images: Tensor) -> Tensor:
        result: Tensor = self.norm(self.pool(self.filter(images)))
        return result

    @property
    def out_channels(self) -> int:
        return self.filter.geometry.depth

    @property
    def output_size(self) -> tuple[int, int]:
        return self.norm.output_size(*self.pool.output_size(*self.filter.geometry.output_size))


def build_stacks(
    in_channels: int,
    image_size: int | tuple[int, int],
    shapes: Sequence[StackShape],
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Sequential:
    """Stacks on top of each other, each made for the maps of the one below."""
    stacks: list[Stack] = []
    for shape in shapes:
        stacks.append(Stack(in_channels, image_size, shape, device=device, dtype=dtype))
        in_channels, image_size = stacks[-1].out_channels, stacks[-1].output_size
    return nn.Sequential(*stacks)
