"""The products of block-local layers: W x, Wᵀ δ, δ xᵀ, and δ xᵀ fused with the momentum update (C1); and, with the batch
first, as differentiable operations for autograd and torch.compile, to which they are opaque.

Every operation stands here as plain PyTorch, one row of blocks at a time, so that no unfolded copy of the batch ever
exists; CPUs use it, and tests hold the Triton kernels of `block_local_triton` against it. Tensors on a GPU go to
those kernels. Legend and numbering are in `geometry`; images and maps have the batch last, (C, H, W, N) and
(depth, nH·bh, nW·bw, N), so that every pixel of a field is a contiguous line of N numbers.

Products of float32 on a GPU use tf32 (ten bits of mantissa, float32 sums); of bfloat16, float32 sums.
Not responsible for modules, objectives or what the rates should be.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Sequence
from functools import cache
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from syncline.errors import UsageError
from syncline.kernels.geometry import Geometry

FAST_DTYPES = (torch.float32, torch.bfloat16)
MASK = 0xFFFFFFFF
Bits = TypeVar("Bits", int, Tensor)
Pair = tuple[Tensor, Tensor]  # (delta maps, images)


@cache
def triton_kernels() -> ModuleType | None:
    """The kernels, or None without Triton. The only place that asks whether it is installed."""
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("syncline.kernels.block_local_launch")


def fast(weight: Tensor) -> ModuleType | None:
    """The kernels, where they serve this weight's device and dtype."""
    serves = weight.device.type == "cuda" and weight.dtype in FAST_DTYPES
    return triton_kernels() if serves else None


def forward(
    images: Tensor,
    weight: Tensor,
    geometry: Geometry,
    *,
    scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Maps of responses scale · W x, in `dtype` (the images' if not given). `scale` is (B, R), float32."""
    _check_weight(weight, geometry)
    geometry.check("images", images, geometry.images_shape(images.shape[-1]))
    out = dtype or images.dtype
    kernels = fast(weight)
    run = reference_forward if kernels is None else kernels.forward
    return run(images.to(weight.dtype), weight, geometry, scale=scale, dtype=out)


def input_gradient(
    delta: Tensor, weight: Tensor, geometry: Geometry, *, scale: Tensor | None = None
) -> Tensor:
    """Images of (scale · W)ᵀ δ, summed where fields overlap, in float32 (float64 for float64 weights).

    On a GPU the overlapping sums use atomic additions: their order, so the last bits, changes between runs.
    """
    _check_weight(weight, geometry)
    geometry.check("delta", delta, geometry.maps_shape(delta.shape[-1]))
    kernels = fast(weight)
    run = reference_input_gradient if kernels is None else kernels.input_gradient
    return run(delta, weight, geometry, scale=scale)


def weight_gradient(
    delta: Tensor, images: Tensor, geometry: Geometry, *, dtype: torch.dtype | None = None
) -> Tensor:
    """(B, R, K), δ xᵀ of every block, in `dtype` (the images' if not given)."""
    _check_pair(delta, images, geometry)
    kernels = fast(images)
    run = reference_weight_gradient if kernels is None else kernels.weight_gradient
    return run(delta.to(images.dtype), images, geometry, dtype=dtype or images.dtype)


def update_(
    weight: Tensor,
    momentum: Tensor,
    pairs: Sequence[Pair],
    geometry: Geometry,
    *,
    rate: float,
    decay: float,
    scale: Tensor | None = None,
    radial: Tensor | None = None,
    seed: int = 0,
) -> Tensor:
    """One step of SGD with momentum, in place, with the gradient made tile by tile and never stored.

        g = scale · Σ δ xᵀ − scale² · radial · W̃       over the pairs (δ, x), one or two of them
        momentum ← decay · momentum + g;   W̃ ← W̃ − rate · momentum

    With scale = 1/‖W̃‖ and radial = Σ δ·(scale W̃ x), both (B, R), this is the gradient by W̃ of a loss of W̃/‖W̃‖.
    Without `scale` it is plain momentum. bfloat16 weights and momentum are rounded stochastically, from `seed`: give
    another one at every step. Returns the new ‖W̃‖² of every row, (B, R) in float32, of the weights as rounded.
    """
    _check_weight(weight, geometry)
    geometry.check("momentum", momentum, geometry.weight_shape)
    if not 1 <= len(pairs) <= 2:
        raise UsageError(f"update_ takes one or two pairs (delta, images), got {len(pairs)}")
    if momentum.dtype != weight.dtype:
        raise UsageError(f"weight and momentum must have one dtype, got {weight.dtype} and {momentum.dtype}")
    if (scale is None) != (radial is None):
        raise UsageError("scale and radial go together: give both, or neither for plain momentum")
    for delta, images in pairs:
        _check_pair(delta, images, geometry)
    kernels = fast(weight)
    run = reference_update_ if kernels is None else kernels.update_
    typed = [(delta.to(weight.dtype), images.to(weight.dtype)) for delta, images in pairs]
    return run(
        weight, momentum, typed, geometry, rate=rate, decay=decay, scale=scale, radial=radial, seed=seed
    )


def _check_weight(weight: Tensor, geometry: Geometry) -> None:
    geometry.check("weight", weight, geometry.weight_shape)
    if not weight.is_contiguous():
        raise UsageError(
            f"weight must be contiguous, its strides are {list(weight.stride())}: call .contiguous()"
        )


def _check_pair(delta: Tensor, images: Tensor, geometry: Geometry) -> None:
    geometry.check("delta", delta, geometry.maps_shape(delta.shape[-1]))
    geometry.check("images", images, geometry.images_shape(delta.shape[-1]))


# The plain reference. `wide` is the dtype of sums.


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _rows_of_blocks(geometry: Geometry) -> Iterator[tuple[int, slice]]:
    """(p, the blocks of row p) from top to bottom."""
    high, across = geometry.grid
    for p in range(high):
        yield p, slice(p * across, (p + 1) * across)


def _fields(images: Tensor, geometry: Geometry, p: int) -> Tensor:
    """(nW, K, N): what the blocks of row p see. The one copy of pixels that the reference makes."""
    top, field = p * geometry.step, geometry.field
    windows = images[:, top : top + field].unfold(2, field, geometry.step)  # (C, field, nW, N, field)
    return windows.permute(2, 0, 1, 4, 3).reshape(geometry.grid[1], geometry.fan_in, -1)


def reference_forward(
    images: Tensor, weight: Tensor, geometry: Geometry, *, scale: Tensor | None, dtype: torch.dtype
) -> Tensor:
    sums = wide(weight.dtype)
    shape = (geometry.blocks, geometry.rows, images.shape[-1])  # (B, R, N)
    rows = torch.empty(shape, dtype=sums, device=images.device)
    for p, here in _rows_of_blocks(geometry):
        torch.bmm(weight[here].to(sums), _fields(images, geometry, p).to(sums), out=rows[here])
    if scale is not None:
        rows *= scale.unsqueeze(2)
    return geometry.to_maps(rows).to(dtype)


def reference_input_gradient(
    delta: Tensor, weight: Tensor, geometry: Geometry, *, scale: Tensor | None
) -> Tensor:
    sums, count, field, step = wide(weight.dtype), delta.shape[-1], geometry.field, geometry.step
    rows = geometry.to_rows(delta).to(sums)  # (B, R, N)
    if scale is not None:
        rows = (rows * scale.unsqueeze(2)).to(weight.dtype).to(sums)
    images = torch.zeros(geometry.images_shape(count), dtype=sums, device=delta.device)
    for p, here in _rows_of_blocks(geometry):
        fields = torch.bmm(weight[here].to(sums).transpose(1, 2), rows[here])  # (nW, K, N)
        for q, patch in enumerate(fields.view(-1, geometry.channels, field, field, count)):
            images[:, p * step : p * step + field, q * step : q * step + field] += patch
    return images


def _gradient_of_row(
    pairs: Sequence[Pair], geometry: Geometry, p: int, here: slice, sums: torch.dtype
) -> Tensor:
    """(nW, R, K): Σ δ xᵀ for the blocks of row p. The deltas are (B, R, N) here."""
    products = (
        torch.bmm(rows[here].to(sums), _fields(images, geometry, p).to(sums).transpose(1, 2))
        for rows, images in pairs
    )
    return sum(products, start=torch.zeros((), dtype=sums, device=pairs[0][0].device))


def reference_weight_gradient(
    delta: Tensor, images: Tensor, geometry: Geometry, *, dtype: torch.dtype
) -> Tensor:
    pairs = [(geometry.to_rows(delta), images)]
    gradient = torch.empty(geometry.weight_shape, dtype=dtype, device=delta.device)
    for p, here in _rows_of_blocks(geometry):
        gradient[here] = _gradient_of_row(pairs, geometry, p, here, wide(images.dtype)).to(dtype)
    return gradient


def reference_update_(
    weight: Tensor,
    momentum: Tensor,
    pairs: Sequence[Pair],
    geometry: Geometry,
    *,
    rate: float,
    decay: float,
    scale: Tensor | None,
    radial: Tensor | None,
    seed: int,
) -> Tensor:
    sums = wide(weight.dtype)
    typed = [(geometry.to_rows(delta), images) for delta, images in pairs]
    squares = torch.empty(geometry.blocks, geometry.rows, dtype=torch.float32, device=weight.device)
    for p, here in _rows_of_blocks(geometry):
        gradient = _gradient_of_row(typed, geometry, p, here, sums)
        old = weight[here].to(sums)
        if scale is not None and radial is not None:
            pull = scale[here].square() * radial[here]
            gradient = gradient * scale[here].unsqueeze(2) - pull.unsqueeze(2) * old
        speed = decay * momentum[here].to(sums) + gradient
        new = old - rate * speed
        if weight.dtype == torch.bfloat16:
            bits = rounding_bits(seed, here.start, old.shape, weight.device)
            new, speed = round_stochastically(new, bits >> 16), round_stochastically(speed, bits & 0xFFFF)
        weight[here], momentum[here] = new.to(weight.dtype), speed.to(weight.dtype)
        squares[here] = weight[here].to(sums).square().sum(2).float()
    return squares


# Stochastic rounding of float32 to bfloat16, from bits that depend on seed, row and column alone. The Triton kernels
# compute the same bits, so that they and the reference round alike.


def round_stochastically(values: Tensor, bits: Tensor) -> Tensor:
    """float32 to bfloat16: up with the probability of the part that is cut off. `bits` are uniform in 0…65535.

    The expectation is the value itself, so that steps far below bfloat16's resolution still move the weights.
    """
    cut = (values.view(torch.int32) + bits.to(torch.int32)) & -65536
    return cut.view(torch.float32).to(torch.bfloat16)


def rounding_bits(seed: int, first_block: int, shape: Sequence[int], device: torch.device) -> Tensor:
    """32 random bits, as int64, for each weight of `shape` (blocks, R, K) from block `first_block` on."""
    blocks, rows, columns = shape
    row_seed, column_seed = seeds(seed)
    first = first_block * rows
    by_row = _hash(torch.arange(first, first + blocks * rows, device=device) ^ row_seed)
    by_column = _hash(torch.arange(columns, device=device) ^ column_seed)
    mixed = ((by_row.unsqueeze(1) ^ by_column) * 0x9E3779B1) & MASK
    return mixed.view(blocks, rows, columns)


def seeds(seed: int) -> tuple[int, int]:
    """One seed for rows and one for columns, 31 bits each."""
    return _hash(seed & MASK) >> 1, _hash((seed + 0x9E3779B9) & MASK) >> 1


def _hash(value: Bits) -> Bits:
    """A mixing function of 32 bits, of an int or of a tensor of int64."""
    value = ((value ^ (value >> 16)) * 0x7FEB352D) & MASK
    value = ((value ^ (value >> 15)) * 0x846CA68B) & MASK
    return value ^ (value >> 16)


# With the batch first, for autograd: W x is (N, C, H, W) → (N, depth, nH·bh, nW·bw), Wᵀ y the way back. Both leave the
# batch last in memory, so that layers on layers copy nothing. A shape is a geometry's channels, height, width, field, step,
# block height, width and depth.


def block_local(images: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """W x for every block, differentiable by both; in the images' dtype."""
    count = images.shape[0] if images.dim() == 4 else -1
    geometry.check("input", images, (count, geometry.channels, geometry.height, geometry.width))
    result: Tensor = _forward(images, weight, _shape(geometry))
    return result


def block_local_transposed(maps: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """Wᵀ y, summed where fields overlap, differentiable by both; in the maps' dtype."""
    count = maps.shape[0] if maps.dim() == 4 else -1
    geometry.check("maps", maps, (count, geometry.depth, *geometry.output_size))
    result: Tensor = _transposed(maps, weight, _shape(geometry))
    return result


def batch_last(maps: Tensor) -> Tensor:
    """(N, C, H, W) → (C, H, W, N) in one piece; no copy where the layer below left it so."""
    return maps.permute(1, 2, 3, 0).contiguous()


def batch_first(maps: Tensor) -> Tensor:
    """(C, H, W, N) → (N, C, H, W), a view."""
    return maps.permute(3, 0, 1, 2)


def _shape(geometry: Geometry) -> list[int]:
    sizes = (geometry.channels, geometry.height, geometry.width, geometry.field, geometry.step)
    return [*sizes, *geometry.block]


def _geometry(shape: Sequence[int]) -> Geometry:
    channels, height, width, field, step, bh, bw, depth = shape
    return Geometry(
        channels=channels, height=height, width=width, field=field, step=step, block=(bh, bw, depth)
    )


@torch.library.custom_op("syncline::block_local", mutates_args=())
def _forward(images: Tensor, weight: Tensor, shape: Sequence[int]) -> Tensor:
    return batch_first(forward(batch_last(images), weight, _geometry(shape)))


@_forward.register_fake
def _(images: Tensor, weight: Tensor, shape: Sequence[int]) -> Tensor:
    return batch_first(images.new_empty(_geometry(shape).maps_shape(images.shape[0])))


@torch.library.custom_op("syncline::block_local_transposed", mutates_args=())
def _transposed(maps: Tensor, weight: Tensor, shape: Sequence[int]) -> Tensor:
    return batch_first(input_gradient(batch_last(maps), weight, _geometry(shape)).to(maps.dtype))


@_transposed.register_fake
def _(maps: Tensor, weight: Tensor, shape: Sequence[int]) -> Tensor:
    return batch_first(maps.new_empty(_geometry(shape).images_shape(maps.shape[0])))


@torch.library.custom_op("syncline::block_local_outer", mutates_args=())
def _outer(maps: Tensor, images: Tensor, weight: Tensor, shape: Sequence[int]) -> Tensor:
    """maps imagesᵀ, as the gradient of `weight`."""
    images = batch_last(images).to(weight.dtype)
    return weight_gradient(batch_last(maps), images, _geometry(shape), dtype=weight.dtype)


@_outer.register_fake
def _(maps: Tensor, images: Tensor, weight: Tensor, shape: Sequence[int]) -> Tensor:
    return torch.empty_like(weight)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    source, weight, ctx.shape = inputs
    ctx.save_for_backward(source, weight)


def _forward_backward(ctx: Any, delta: Tensor) -> tuple[Tensor | None, ...]:
    images, weight = ctx.saved_tensors
    by_images = _transposed(delta, weight, ctx.shape) if ctx.needs_input_grad[0] else None
    by_weight = _outer(delta, images, weight, ctx.shape) if ctx.needs_input_grad[1] else None
    return by_images, by_weight, None


def _transposed_backward(ctx: Any, delta: Tensor) -> tuple[Tensor | None, ...]:
    maps, weight = ctx.saved_tensors
    by_maps = _forward(delta, weight, ctx.shape) if ctx.needs_input_grad[0] else None
    by_weight = _outer(maps, delta, weight, ctx.shape) if ctx.needs_input_grad[1] else None
    return by_maps, by_weight, None


_forward.register_autograd(_forward_backward, setup_context=_remember)
_transposed.register_autograd(_transposed_backward, setup_context=_remember)
