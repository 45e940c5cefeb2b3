"""Convolutions whose weights differ from example group to example group, as products of matrices.

`torch.vmap` turns them into grouped convolutions, whose weight gradients are slow on GPUs. Inside `Unfolded` every
plain `conv2d` with batched weights becomes a copy of its windows and a batched product instead.
Legend: B versions, N images of each, C channels in, O out, K a window's size, L windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

Pair = tuple[int, int]
ALONE = 8  # images of a version up to which each has a product of its own


class ConvolutionShape:
    """Sizes of one convolution."""

    def __init__(self, x: Tensor, w: Tensor, stride: Pair, padding: Pair, dilation: Pair) -> None:
        self.stride, self.padding, self.dilation = stride, padding, dilation
        self.size: Pair = (x.shape[-2], x.shape[-1])
        self.kernel: Pair = (w.shape[-2], w.shape[-1])
        self.out: Pair = self._length(0), self._length(1)
        self.windows = self.out[0] * self.out[1]

    def _length(self, axis: int) -> int:
        reach = self.dilation[axis] * (self.kernel[axis] - 1) + 1
        return (self.size[axis] + 2 * self.padding[axis] - reach) // self.stride[axis] + 1

    def unfold(self, x: Tensor) -> Tensor:
        """(M, C, H, W) to its windows (M, C·K, L), in one copy."""
        (up, left), (down, right) = self.padding, self.dilation
        padded = F.pad(x, (left, left, up, up)) if up or left else x.contiguous()
        images, channels = padded.shape[:2]
        image, channel, row, column = padded.stride()
        view = padded.as_strided(
            (images, channels, *self.kernel, *self.out),
            (image, channel, row * down, column * right, row * self.stride[0], column * self.stride[1]),
        )
        return view.reshape(images, channels * self.kernel[0] * self.kernel[1], self.windows)

    def fold(self, windows: Tensor) -> Tensor:
        """Windows (M, C·K, L) added up where they overlap: (M, C, H, W)."""
        return F.fold(windows, self.size, self.kernel, self.dilation, self.padding, self.stride)


class _Product(torch.autograd.Function):
    """(B, N, C, H, W) with (B, O, C, k, k): one product for each image, or for each version with many images."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, geometry: ConvolutionShape) -> Tensor:
        versions, images = x.shape[:2]
        windows = geometry.unfold(x.flatten(0, 1)).unflatten(0, (versions, images))  # (B, N, C·K, L)
        ctx.save_for_backward(windows, w)
        ctx.geometry = geometry
        flat = w.reshape(versions, 1, len(w[0]), -1)  # (B, 1, O, C·K)
        return torch.matmul(flat, windows).unflatten(-1, geometry.out)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        windows, w = ctx.saved_tensors
        flat = w.reshape(len(w), len(w[0]), -1)
        gradient = gradient.flatten(-2)  # (B, N, O, L)
        to_w = to_x = None
        if ctx.needs_input_grad[1]:
            if gradient.shape[1] <= ALONE:
                to_w = torch.matmul(gradient, windows.mT).sum(1).view_as(w)
            else:
                outer, inner = gradient.transpose(1, 2).flatten(2), windows.transpose(1, 2).flatten(2)
                to_w = torch.bmm(outer, inner.mT).view_as(w)
        if ctx.needs_input_grad[0]:
            spread = torch.matmul(flat.mT.unsqueeze(1), gradient)  # (B, N, C·K, L)
            to_x = ctx.geometry.fold(spread.flatten(0, 1)).unflatten(0, gradient.shape[:2])
        return to_x, to_w, None


def convolve(x: Tensor, w: Tensor, b: Tensor | None, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    """`conv2d` of x (B, N, C, H, W) with w (B, O, C, k, k) and b (B, O), version by version."""
    y: Tensor = _Product.apply(x, w, ConvolutionShape(x, w, stride, padding, dilation))  # type: ignore[no-untyped-call]
    return y if b is None else y + b[:, None, :, None, None]


class _Convolve(torch.autograd.Function):
    """`conv2d` that says itself what it is under `vmap`."""

    @staticmethod
    def forward(
        x: Tensor, w: Tensor, b: Tensor | None, stride: Pair, padding: Pair, dilation: Pair
    ) -> Tensor:
        return F.conv2d(x, w, b, stride, padding, dilation)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        raise AssertionError("only called under vmap, where `vmap` below takes its place")

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        x: Tensor,
        w: Tensor,
        b: Tensor | None,
        *rest: Any,
    ) -> tuple[Tensor, int]:
        x = x.expand(info.batch_size, *x.shape) if in_dims[0] is None else x.movedim(in_dims[0], 0)
        if in_dims[1] is None and in_dims[2] is None:
            return F.conv2d(x.flatten(0, 1), w, b, *rest).unflatten(0, x.shape[:2]), 0
        w = w.expand(info.batch_size, *w.shape) if in_dims[1] is None else w.movedim(in_dims[1], 0)
        if b is not None:
            b = b.expand(info.batch_size, *b.shape) if in_dims[2] is None else b.movedim(in_dims[2], 0)
        return convolve(x, w, b, *rest), 0


class Unfolded(TorchFunctionMode):
    """Takes over every call of `conv2d` it can do, for functions under one `vmap`."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.conv2d:
            return func(*args, **kwargs)
        plain = _arguments(*args, **kwargs)
        return func(*args, **kwargs) if plain is None else _Convolve.apply(*plain)  # type: ignore[no-untyped-call]


def _arguments(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> tuple[Any, ...] | None:
    """The arguments in one form; None for what stays with torch."""
    if groups != 1 or isinstance(padding, str) or input.dim() != 4:
        return None
    return input, weight, bias, _pair(stride), _pair(padding), _pair(dilation)


def _pair(value: Any) -> Pair:
    if isinstance(value, int):
        return value, value
    values = tuple(value)
    return (values[0], values[0]) if len(values) == 1 else (values[0], values[1])
