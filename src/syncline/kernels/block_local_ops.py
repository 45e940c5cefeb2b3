"""Block-local products as differentiable operations with the batch first, for autograd and torch.compile.

`block_local` is W x, (N, C, H, W) → (N, depth, nH·bh, nW·bw); `block_local_transposed` is Wᵀ y, the way back. To
torch.compile they are opaque. Both leave the batch last in memory, so that layers on layers copy nothing.
Not responsible for the products themselves: `block_local` is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from syncline.kernels.block_local import forward, input_gradient, weight_gradient
from syncline.kernels.geometry import Geometry

Shape = Sequence[int]  # of a geometry: channels, height, width, field, step, block height, width and depth


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


def _geometry(shape: Shape) -> Geometry:
    channels, height, width, field, step, *block = shape
    bh, bw, depth = block
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
    return weight_gradient(
        batch_last(maps), batch_last(images).to(weight.dtype), _geometry(shape), dtype=weight.dtype
    )


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
