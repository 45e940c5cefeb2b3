"""The layers of torch and of this project: windows they want, slices of their parameters, and what is special on a slice.

Everything is for arrays (N, C, …) or (…, F) as the layers have them. Not responsible for recurrent layers, nor for
functions. Legend: a window is a Box of the result, in the whole model's numbers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncline.nn.block_local import BlockLocal2d, BlockLocalDecoder2d, L2Pool2d, LocalContrastNorm2d
from syncline.nn.layers import Dense, Noise
from syncline.parallel.functions import Aligned, Reshape, broadcast, drop, dropped, keeping
from syncline.parallel.rules import (
    Call,
    Local,
    Rule,
    Slices,
    Spread,
    Want,
    Windowed,
    along,
    check_names,
    holds,
    own_code,
    register,
    tiles,
    whole,
)
from syncline.parallel.windows import Box, Shape, Span

# -- elementwise -----------------------------------------------------------------------------------------------

_ELEMENTWISE = (
    "Identity ReLU ReLU6 LeakyReLU ELU SELU CELU GELU SiLU Mish Sigmoid Tanh Hardtanh Hardswish Hardsigmoid Hardshrink Softshrink "
    "Tanhshrink Softplus Softsign LogSigmoid Threshold"
)
register(Aligned(broadcast), *(getattr(nn, name) for name in _ELEMENTWISE.split()))
register(Reshape(), nn.Flatten, nn.Unflatten)


def _sizes(name: str) -> list[type[nn.Module]]:
    """The types of this name for sequences, images and volumes."""
    return [getattr(nn, f"{name}{dims}d") for dims in (1, 2, 3)]


def _softmax_dims(call: Call) -> list[int]:
    module: Any = call.module
    return list(range(len(call.inputs[0].shape))) if module.dim is None else [module.dim]


register(Aligned(keeping(_softmax_dims)), nn.Softmax, nn.LogSoftmax, nn.Softmin)


def _dropped(module: Any, local: Local, x: Tensor) -> Tensor:
    return dropped(module, local, x, module.p, module.training)


def _maps_dropped(module: Any, local: Local, x: Tensor) -> Tensor:
    """Whole maps are dropped: those who hold parts of one draw the same."""
    if not type(module).__name__.endswith(f"{x.dim() - 2}d"):
        raise local.call.refuse(
            f"reads {x.dim()} dimensions: give it examples, channels, and what it is named after"
        )
    ones = ((0, 1),) * (x.dim() - 2)
    maps = Box((*local.window.spans[:2], *ones))
    shape = (*local.call.outputs[0].shape[:2], *(1 for _ in ones))
    return drop(local, x, module.p, maps, shape, kind=torch.feature_dropout) if module.training else x


def _damaged(module: Any, local: Local, x: Tensor) -> Tensor:
    """Compute a window of a net's `noise` layer."""
    if not module.training or not module.amount:
        return x
    draw = torch.rand if module.kind == "mask" else torch.randn
    if local.as_one:
        shape = local.call.outputs[0].shape
        noise = draw(shape, dtype=x.dtype, device=x.device)[local.window.inside(Box.whole(shape))]
    else:
        generator = local.generator(x.device, local.window)
        noise = draw(x.shape, generator=generator, dtype=x.dtype, device=x.device)
    return x * (noise >= module.amount) if module.kind == "mask" else x + module.amount * noise


register(Aligned(broadcast, _damaged), Noise)
register(Aligned(broadcast, _dropped), nn.Dropout)
register(Aligned(broadcast, _maps_dropped), *_sizes("Dropout"))

# -- dense layers and embeddings -------------------------------------------------------------------------------


@dataclass
class _Dense(Windowed):
    """Dense layer: "model" cuts the outputs, "rows" the inputs along dimension `first`, giving parts of sums."""

    first: Callable[[Call], int] = field(default=lambda call: len(call.inputs[0].shape) - 1)

    def place(self, call: Call) -> list[Spread]:
        if call.way != "rows":
            return super().place(call)
        self._cut_inputs(call)
        return [Spread(whole(call.outputs[0], call.parts).boxes, "rows", sums=True)]

    def wants(self, call: Call, outs: Sequence[Spread], rank: int) -> list[Want]:
        return [Want(self._rows(call, rank))] if outs[0].way == "rows" else super().wants(call, outs, rank)

    def _cut_inputs(self, call: Call) -> Spread:
        return along(call, call.inputs[0], self.first(call), way="rows")

    def _rows(self, call: Call, rank: int) -> Box:
        return self._cut_inputs(call).boxes[rank]

    def slices(self, call: Call, outs: Sequence[Spread], rank: int) -> Slices:
        if outs[0].way != "rows":
            return super().slices(call, outs, rank)
        module: Any = call.module
        dim, shape = self.first(call), call.inputs[0].shape
        low, high = self._rows(call, rank).spans[dim]
        each = math.prod(shape[dim + 1 :])
        span = (low * each, high * each)
        bias = (0, module.out_features if rank == 0 else 0)  # it is added once
        found: Slices = {"weight": (Box(((0, module.out_features), span)),)}
        found |= {"bias": (Box((bias,)),)} if module.bias is not None else {}
        check_names(call, found)
        return found

    def run(self, local: Local, *args: Any, **kwargs: Any) -> Any:
        if local.way != "rows":
            return own_code(local, *args)
        x = args[0].flatten(self.first(local.call))
        return F.linear(x, local.module.weight, local.module.bias if local.group.rank == 0 else None)


def _sliced(*names: str, at: int, dim: int = 0) -> Callable[[Any, Box], Slices]:
    """The window's dimension `at` is dimension `dim` of these parameters."""

    def slices(module: Any, window: Box) -> Slices:
        there = [name for name in names if getattr(module, name) is not None]
        span = window.spans[at]
        return {name: (Box.whole(getattr(module, name).shape).replaced(dim, span),) for name in there}

    return slices


register(
    _Dense(
        lambda module, window, shapes: window.replaced(-1, (0, module.in_features)),
        _sliced("weight", "bias", at=-1),
        ("data", "model", "rows"),
        dim=-1,
        last=1,
    ),
    nn.Linear,
)


class _Flattening(_Dense):
    """Dense layer that flattens each example first: "rows" cuts channels of images and steps of sequences."""

    def mixes(self, call: Call) -> bool:
        return call.inputs[0].batch != 0


register(
    _Flattening(
        lambda module, window, shapes: Box((window.spans[0], *((0, size) for size in shapes[0][1:]))),
        _sliced("weight", "bias", at=-1),
        ("data", "model", "rows"),
        dim=-1,
        first=lambda call: 1,
    ),
    Dense,
)


def _embedding_check(module: Any, way: str) -> str | None:
    if module.max_norm is not None and way == "model":
        return "max_norm needs whole rows"
    return "scale_grad_by_freq counts all examples" if module.scale_grad_by_freq and way == "data" else None


register(
    Windowed(
        lambda module, window, shapes: Box(window.spans[:-1]),
        _sliced("weight", at=-1, dim=1),
        ("data", "model"),
        dim=-1,
        check=_embedding_check,
        last=0,
    ),
    nn.Embedding,
)

# -- convolutions and pooling ----------------------------------------------------------------------------------


def _field(span: Span, kernel: int, stride: int, padding: int, dilation: int = 1) -> Span:
    """What the results of a span see."""
    low, high = span
    first = low * stride - padding
    return (first, (high - 1) * stride - padding + dilation * (kernel - 1) + 1 if high > low else first)


def _paddings(module: Any, count: int) -> tuple[int, ...]:
    """On the left, of a convolution."""
    if module.padding == "valid":
        return (0,) * count
    if module.padding == "same":
        return tuple(d * (k - 1) // 2 for d, k in zip(module.dilation, module.kernel_size, strict=True))
    return tuple(module.padding)


def _conv_wants(module: Any, window: Box, shapes: list[Shape]) -> Box:
    low, high = window.spans[1]
    per_group, inputs = module.out_channels // module.groups, module.in_channels // module.groups
    pads = _paddings(module, len(shapes[0]) - 2)
    numbers = zip(window.spans[2:], module.kernel_size, module.stride, pads, module.dilation, strict=True)
    channels = (low // per_group * inputs, -(-high // per_group) * inputs)
    return Box((window.spans[0], channels, *(_field(*each) for each in numbers)))


def _convolve(module: Any, local: Local, x: Tensor) -> Tensor:
    """What was read has the padding; group by group where a group is cut."""
    layer = _altered(module, padding=(0,) * len(module.kernel_size))
    per_group, inputs = module.out_channels // module.groups, module.in_channels // module.groups
    low, high = local.window.spans[1]
    ends = {low, -(-low // per_group) * per_group, high // per_group * per_group, high}
    cuts = sorted(end for end in ends if low <= end <= high)
    if len(cuts) == 1:
        cuts *= 2
    parts, start = [], low // per_group * per_group
    for first, last in pairwise(cuts):
        layer.groups = max(1, (last - first) // per_group)
        at = (first - start) // per_group * inputs
        seen = x[:, at : at + layer.groups * inputs]
        rows = slice(first - low, last - low)
        bias = None if module.bias is None else module.bias[rows]
        parts.append(layer._conv_forward(seen, module.weight[rows], bias))
    return torch.cat(parts, 1) if len(parts) > 1 else parts[0]


def _conv_check(module: Any, way: str) -> str | None:
    return None if module.padding_mode == "zeros" or way == "data" else f"it pads by {module.padding_mode!r}"


register(
    Windowed(_conv_wants, _sliced("weight", "bias", at=1), compute=_convolve, dim=1, check=_conv_check),
    *_sizes("Conv"),
)


def _pool_numbers(module: Any, count: int) -> list[tuple[int, int, int, int]]:
    """Kernel, stride, padding and dilation of each dimension."""
    kernel, dilation = module.kernel_size, getattr(module, "dilation", 1)
    given = (kernel, module.stride or kernel, module.padding, dilation)
    each = ((value,) * count if isinstance(value, int) else value for value in given)
    return list(zip(*each, strict=True))


def _pool_wants(module: Any, window: Box, shapes: list[Shape]) -> Want:
    numbers = _pool_numbers(module, len(shapes[0]) - 2)
    spans = tuple(_field(span, *each) for span, each in zip(window.spans[2:], numbers, strict=True))
    return Want(Box((*window.spans[:2], *spans)), -math.inf if "Max" in type(module).__name__ else 0.0)


def _altered(module: Any, **changes: Any) -> Any:
    """The layer with the same parameters and other options."""
    layer = copy.copy(module)
    vars(layer).update(changes)
    return layer


def _max_pooled(module: Any, local: Local, x: Tensor) -> Tensor:
    found: Tensor = _altered(module, padding=0, ceil_mode=False)(x) if x.numel() else _nothing(local, x)
    return found


def _nothing(local: Local, x: Tensor) -> Tensor:
    return x.new_zeros(local.window.shape) + 0 * x.sum()


def _mean_pooled(module: Any, local: Local, x: Tensor) -> Tensor:
    """The sum, divided by the number of places that count: that depends on where in the image the window is."""
    if not x.numel():
        return _nothing(local, x)
    shape = local.call.inputs[0].shape[2:]
    numbers = _pool_numbers(module, len(shape))
    means: Tensor = _altered(module, padding=0, ceil_mode=False)(x)
    if getattr(module, "divisor_override", None):
        return means
    sums = means * math.prod(number[0] for number in numbers)
    for dim, (size, span, each) in enumerate(zip(shape, local.window.spans[2:], numbers, strict=True)):
        margin = each[2] if module.count_include_pad else 0
        lows = [place * each[1] - each[2] for place in range(*span)]
        counts = [min(low + each[0], size + margin) - max(low, -margin) for low in lows]
        view = [-1 if at == dim + 2 else 1 for at in range(x.dim())]
        sums = sums / torch.tensor(counts, dtype=x.dtype, device=x.device).view(view)
    return sums


def _pool_check(module: Any, way: str) -> str | None:
    return "return_indices counts in the whole image" if way != "data" and module.return_indices else None


register(Windowed(_pool_wants, compute=_max_pooled, dim=1, check=_pool_check), *_sizes("MaxPool"))
register(Windowed(_pool_wants, compute=_mean_pooled, dim=1), *_sizes("AvgPool"))


def _whole_maps(module: Any, window: Box, shapes: list[Shape]) -> Box:
    return Box((*window.spans[:2], *((0, size) for size in shapes[0][2:])))


_each_map = Windowed(_whole_maps, ways=("data", "model"), dim=1)
register(_each_map, *_sizes("AdaptiveAvgPool"), *_sizes("AdaptiveMaxPool"))

# -- normalisation ---------------------------------------------------------------------------------------------


def _cropped(module: Any, local: Local, x: Tensor) -> Tensor:
    """Computed for all that was read, of which the window is the inner part."""
    found: Tensor = module(x)
    return found[local.window.inside(local.wanted[0])]


def _grown(window: Box, dim: int, before: int, after: int, size: int) -> Box:
    low, high = window.spans[dim]
    return window.replaced(dim, (max(0, low - before), min(size, high + after)))


def _lrn_wants(module: Any, window: Box, shapes: list[Shape]) -> Box:
    return _grown(window, 1, module.size // 2, (module.size - 1) // 2, shapes[0][1])


register(Windowed(_lrn_wants, compute=_cropped, dim=1), nn.LocalResponseNorm)


class _BatchNorm(Aligned):
    """Statistics are those of the whole group's batch, wherever it is cut; "model" has each channel in one process."""

    def place(self, call: Call) -> list[Spread]:
        if call.way == "model":
            return [along(call, call.outputs[0], 1)]
        if call.way == "spatial":
            return [tiles(call, call.outputs[0])]
        return super().place(call) if call.way or not holds(call.module) else self.data(call)

    def slices(self, call: Call, outs: Sequence[Spread], rank: int) -> Slices:
        sliced = _sliced("weight", "bias", "running_mean", "running_var", at=1)
        return sliced(call.module, outs[0].boxes[rank])

    def run(self, local: Local, *args: Any, **kwargs: Any) -> Any:
        module, x = local.module, args[0]
        if not module.training and module.running_mean is not None:
            return module(x)
        dims, channels = [dim for dim in range(x.dim()) if dim != 1], local.call.inputs[0].shape[1]
        alone = local.window.spans[1] != (0, channels)  # with all that there is of its channels
        count = math.prod(local.call.inputs[0].shape) // channels
        copies = 1 if alone else sum(box.size for box in local.boxes) / (count * channels)
        total = (lambda tensor: tensor) if alone else (lambda tensor: local.group.total(tensor) / copies)
        view = [-1 if dim == 1 else 1 for dim in range(x.dim())]
        mean = total(x.sum(dims)) / count
        centred = x - mean.view(view)
        var = total(centred.square().sum(dims)) / count
        if module.training and module.track_running_stats:
            with torch.no_grad():
                module.num_batches_tracked += 1
                share = module.momentum
                share = 1.0 / float(module.num_batches_tracked) if share is None else share
                module.running_mean.lerp_(mean.detach(), share)
                module.running_var.lerp_(var.detach() * (count / max(1, count - 1)), share)
        out = centred * (var + module.eps).rsqrt().view(view)
        return out if module.weight is None else out * module.weight.view(view) + module.bias.view(view)


register(_BatchNorm(broadcast), *_sizes("BatchNorm"))


class _LayerNorm(Windowed):
    """Over features that are cut, mean and variance are those of all of them."""

    def run(self, local: Local, *args: Any, **kwargs: Any) -> Any:
        module, x = local.module, args[0]
        if local.way != "model":
            return own_code(local, x)
        dims = [-1 - at for at in range(len(module.normalized_shape))]
        count = math.prod(module.normalized_shape)
        mean = local.group.total(x.sum(dims, keepdim=True)) / count
        centred = x - mean
        var = local.group.total(centred.square().sum(dims, keepdim=True)) / count
        out = centred * (var + module.eps).rsqrt()
        out = out if module.weight is None else out * module.weight
        return out if module.bias is None else out + module.bias


register(
    _LayerNorm(
        lambda module, window, shapes: window,
        _sliced("weight", "bias", at=-1, dim=-1),
        ("data", "model"),
        dim=-1,
        last=1,
    ),
    nn.LayerNorm,
)

# -- this project's --------------------------------------------------------------------------------------------


def _local_blocks(module: Any, window: Box) -> tuple[Span, Span]:
    """Rows and columns of blocks that make a window of the maps."""
    bh, bw, _ = module.geometry.block
    (top, bottom), (left, right) = window.spans[2:]
    return (top // bh, bottom // bh), (left // bw, right // bw)


def _seen_by(module: Any, window: Box) -> Box:
    """The pixels that a window of the maps sees."""
    geometry = module.geometry
    spans = [_field(span, geometry.field, geometry.step, 0) for span in _local_blocks(module, window)]
    return Box((window.spans[0], (0, geometry.channels), *spans))


def _block_slices(module: Any, window: Box) -> Slices:
    """Blocks lie row by row; in each, neurons of one depth are `depth` rows apart."""
    (top, bottom), (left, right) = _local_blocks(module, window)
    (_, wide), (bh, bw, depth), fan = module.geometry.grid, module.geometry.block, module.geometry.fan_in
    low, high = window.spans[1]
    if (high - low) == depth:
        rows = [(row * wide + left, row * wide + right) for row in range(top, bottom)]
        return {"weight": tuple(Box((span, (0, module.geometry.rows), (0, fan))) for span in rows)}
    neurons = [(at * depth + low, at * depth + high) for at in range(bh * bw)]
    return {"weight": tuple(Box(((0, module.geometry.blocks), span, (0, fan))) for span in neurons)}


def _local_filters(module: Any, window: Box) -> Any:
    """The layer with the geometry of its window."""
    _, _, height, width = _seen_by(module, window).shape
    geometry = copy.copy(module.geometry)  # unchecked: a window may be empty
    sizes = {"height": height, "width": width, "block": (*geometry.block[:2], window.shape[1])}
    for name, value in sizes.items():
        object.__setattr__(geometry, name, value)
    return _altered(module, geometry=geometry)


register(
    Windowed(
        lambda module, window, shapes: _seen_by(module, window),
        _block_slices,
        compute=lambda module, local, x: _local_filters(module, local.window)(x),
        dim=1,
        units=lambda module, way: module.geometry.block[:2] if way == "spatial" else (1, 1),
    ),
    BlockLocal2d,
)


class _Decoder(Rule):
    """Wᵀ y: each process adds what its blocks say about the pixels they see; where fields overlap that is a sum."""

    ways = ("data", "spatial")

    def place(self, call: Call) -> list[Spread]:
        leader = call.leader()
        way = call.way or (call.spreads[leader].way if leader is not None else "data")
        self.check_way(call)
        if way != "spatial":
            return self.data(call)
        module: Any = call.module
        return [Spread(tuple(_seen_by(module.filter, box) for box in self._maps(call)), "spatial", sums=True)]

    def _maps(self, call: Call) -> tuple[Box, ...]:
        module: Any = call.module
        return tiles(call, call.inputs[0], module.filter.geometry.block[:2]).boxes

    def wants(self, call: Call, outs: Sequence[Spread], rank: int) -> list[Want]:
        return [Want(self._maps(call)[rank])] if outs[0].sums else super().wants(call, outs, rank)

    def slices(self, call: Call, outs: Sequence[Spread], rank: int) -> Slices:
        module: Any = call.module
        found = _block_slices(module.filter, self._maps(call)[rank]) if outs[0].sums else {}
        return {f"filter.{name}": boxes for name, boxes in found.items()}

    def run(self, local: Local, *args: Any, **kwargs: Any) -> Any:
        if not local.sums:
            return local.module(*args)
        return _local_filters(local.module.filter, local.wanted[0]).decode(args[0])


register(_Decoder(), BlockLocalDecoder2d)


def _l2_wants(module: Any, window: Box, shapes: list[Shape]) -> Box:
    edge = module.window // 2 if module.padding == "same" else 0
    spans = (_field(span, module.window, module.stride, edge) for span in window.spans[2:])
    return Box((*window.spans[:2], *spans))


register(
    Windowed(_l2_wants, compute=lambda module, local, x: _altered(module, padding="valid")(x), dim=1),
    L2Pool2d,
)


def _contrast_places(module: Any, window: Box) -> Box:
    """Where in its input a window of the result lies."""
    shift = module.window // 2 if module.padding == "valid" else 0
    return Box((*window.spans[:2], *((low + shift, high + shift) for low, high in window.spans[2:])))


def _contrast_wants(module: Any, window: Box, shapes: list[Shape]) -> Box:
    """All maps, twice half a window further: the mean is taken of means."""
    reach = 2 * (module.window // 2)
    box = _contrast_places(module, window).replaced(1, (0, shapes[0][1]))
    for dim in (2, 3):
        box = _grown(box, dim, reach, reach, shapes[0][dim])
    return box


def _contrast(module: Any, local: Local, x: Tensor) -> Tensor:
    found: Tensor = _altered(module, padding="same")(x)
    return found[_contrast_places(module, local.window).inside(local.wanted[0])]


register(Windowed(_contrast_wants, compute=_contrast, dim=1), LocalContrastNorm2d)
