"""The built-in layer types and losses of nets that are written as data. Sizes that follow from the source are not asked for.

Legend: `shape` is what the source gives, without the batch: (C, H, W) images, (T, D) sequences, (D,) vectors, () numbers.
Not responsible for how layers are connected (net.py), nor for which layers a loss is of (layer_records.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncline.errors import UsageError
from syncline.nn.argument_checks import (
    Count,
    Counts,
    Flag,
    Kind,
    NotNegative,
    Number,
    Place,
    Positive,
    Shape,
    Share,
    Wholes,
    choice,
)
from syncline.nn.block_local import BlockLocal2d, L2Pool2d, LocalContrastNorm2d
from syncline.nn.energy import CRBM, RBM, Units
from syncline.nn.registry import built_in

Dims = tuple[int, ...]
DTYPES = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64}
Field = Annotated[
    Any, Kind("a number or key of the batch", lambda v: isinstance(v, int | str) and not isinstance(v, bool))
]


# -- inputs ----------------------------------------------------------------------------------------------------


class Input(nn.Module):
    """A part of the batch, as it is; `shape` None: as the first examples have it."""

    def __init__(self, shape: Dims | None, dtype: torch.dtype | None, field: int | str | None) -> None:
        super().__init__()
        self.shape, self.dtype, self.field = shape, dtype, field

    def forward(self, part: Tensor) -> Tensor:
        return part


@built_in("input", "input")
def input_layer(
    *,
    shape: Shape | None = None,
    dtype: Annotated[str, choice(*DTYPES)] | None = None,
    field: Field | None = None,
) -> Input:
    return Input(tuple(shape) if shape is not None else None, DTYPES[dtype] if dtype else None, field)


@built_in("label", "input")
def label(*, shape: Shape = (), field: Field | None = None) -> Input:
    """A class number for each example (or for each place in `shape`)."""
    return Input(tuple(shape), torch.int64, field)


# -- with parameters -------------------------------------------------------------------------------------------


class Dense(nn.Linear):
    """Linear; images and sequences are flattened first."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(1))


@built_in("dense")
def dense(shape: Dims, *, units: Count, bias: Flag = True, flatten: Flag = True) -> nn.Module:
    if flatten and len(shape) != 1:
        return Dense(math.prod(shape), units, bias=bias)
    _dims("dense with flatten = false", shape, 1, 2, 3)
    return nn.Linear(shape[-1], units, bias=bias)


@built_in("convolution")
def convolution(
    shape: Dims,
    *,
    channels: Count,
    kernel: Counts,
    stride: Counts = 1,
    padding: Wholes = 0,
    dilation: Counts = 1,
    groups: Count = 1,
    bias: Flag = True,
) -> nn.Module:
    _dims("convolution", shape, 2, 3, 4)
    kind: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(shape) - 2]
    sizes = {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation}
    spread = [_spread(name, value, len(shape) - 1) for name, value in sizes.items()]
    if shape[0] % groups or channels % groups:
        raise UsageError(f"groups = {groups} must divide {shape[0]} channels and channels = {channels}")
    return kind(shape[0], channels, *spread, groups, bias)


@built_in("block_local")
def block_local(
    shape: Dims, *, field: Count, step: Count = 1, block: Counts = (4, 4, 8), unit_norm: Flag = False
) -> nn.Module:
    """Filters that are not shared between places (docs/howto/block_local.md)."""
    _dims("block_local", shape, 3)
    high, wide, depth = _spread("block", block, 3)
    options = {"field": field, "step": step, "block": (high, wide, depth), "unit_norm": unit_norm}
    return BlockLocal2d(shape[0], (shape[1], shape[2]), **options)  # type: ignore[arg-type]


@built_in("batch_norm")
def batch_norm(shape: Dims, *, momentum: Share = 0.1, eps: Positive = 1e-5, affine: Flag = True) -> nn.Module:
    _dims("batch_norm", shape, 1, 2, 3, 4)
    kind = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[len(shape) - 1]
    return kind(shape[0], momentum=momentum, eps=eps, affine=affine)


@built_in("layer_norm")
def layer_norm(shape: Dims, *, eps: Positive = 1e-5) -> nn.Module:
    _dims("layer_norm", shape, 1, 2, 3, 4)
    return nn.LayerNorm(shape, eps=eps)


@built_in("embedding")
def embedding(shape: Dims, *, tokens: Count, units: Count) -> nn.Module:
    return nn.Embedding(tokens, units)


class Recurrent(nn.Module):
    """A recurrent net over (T, D): all its outputs, or that of the last step."""

    def __init__(self, cell: nn.RNNBase, *, sequences: bool) -> None:
        super().__init__()
        self.cell, self.sequences = cell, sequences

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.cell(x)
        if self.sequences:
            return outputs
        if not self.cell.bidirectional:
            return outputs[:, -1]
        half = self.cell.hidden_size
        return torch.cat([outputs[:, -1, :half], outputs[:, 0, half:]], 1)


def _recurrent(kind: Any) -> Callable[..., nn.Module]:
    def make(
        shape: Dims,
        *,
        units: Count,
        depth: Count = 1,
        bidirectional: Flag = False,
        dropout: Share = 0.0,
        sequences: Flag = False,
    ) -> nn.Module:
        _dims(kind.__name__.lower(), shape, 2)
        options = {"bidirectional": bidirectional, "dropout": dropout if depth > 1 else 0.0}
        cell = kind(shape[1], units, num_layers=depth, batch_first=True, **options)
        return Recurrent(cell, sequences=sequences)

    return make


for _kind in (nn.RNN, nn.LSTM, nn.GRU):
    built_in(_kind.__name__.lower())(_recurrent(_kind))


@built_in("rbm")
def rbm(
    shape: Dims,
    *,
    units: Count,
    visible: Annotated[str, choice("bernoulli", "gaussian", "softmax")] = "bernoulli",
    code: Annotated[str, choice("bernoulli", "gaussian")] = "bernoulli",
    classes: Count | None = None,
    decay: NotNegative = 0.0,
    sparsity: Share | None = None,
    sparsity_cost: NotNegative = 0.1,
    std: NotNegative = 0.01,
) -> nn.Module:
    """A restricted Boltzmann machine: gives its hidden units' means; `gradient = "cd:1"` trains it."""
    options = {"decay": decay, "sparsity": sparsity, "sparsity_cost": sparsity_cost, "std": std}
    return RBM(math.prod(shape), units, units=visible, code=code, classes=classes, **options)  # type: ignore[arg-type]


@built_in("crbm")
def crbm(
    shape: Dims,
    *,
    units: Count,
    visible: Annotated[str, choice("bernoulli", "gaussian")] = "gaussian",
    decay: NotNegative = 0.0,
    std: NotNegative = 0.01,
) -> nn.Module:
    """A conditional RBM of windows (T, D): the last frame given those before it."""
    _dims("crbm", shape, 2)
    if shape[0] < 2:
        raise UsageError(f"crbm takes windows of at least two frames, got {tuple(shape)}")
    return CRBM(shape[1], units, order=shape[0] - 1, units=visible, decay=decay, std=std)


class FromHidden(nn.Module):
    """The way down of an RBM: visible means of hidden units."""

    def __init__(self, hidden: int, visible: int, units: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(hidden, visible) * 0.01)
        self.visible_bias = nn.Parameter(torch.zeros(visible))
        self.units = Units(units)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.units.mean(F.linear(hidden.flatten(1), self.weight.t(), self.visible_bias))


@built_in("rbm_down")
def rbm_down(
    shape: Dims, *, units: Count, visible: Annotated[str, choice("bernoulli", "gaussian")] = "bernoulli"
) -> nn.Module:
    """With `share = {weight = "rbm1.weight", visible_bias = "rbm1.visible_bias"}` an RBM, unrolled."""
    return FromHidden(math.prod(shape), units, visible)


# -- without parameters ----------------------------------------------------------------------------------------


@built_in("pooling")
def pooling(
    shape: Dims,
    *,
    kernel: Counts,
    kind: Annotated[str, choice("max", "average")] = "max",
    stride: Counts | None = None,
    padding: Wholes = 0,
    ceil: Flag = False,
) -> nn.Module:
    _dims("pooling", shape, 2, 3, 4)
    dims = len(shape) - 1
    pool = getattr(nn, f"{'Max' if kind == 'max' else 'Avg'}Pool{dims}d")
    window = _spread("kernel", kernel, dims)
    if any(size > there for size, there in zip(window, shape[1:], strict=True)) and not padding:
        raise UsageError(f"pooling by {list(window)} does not fit into maps of {tuple(shape[1:])}")
    steps = _spread("stride", stride, dims) if stride is not None else window
    made: nn.Module = pool(window, steps, _spread("padding", padding, dims), ceil_mode=ceil)
    return made


@built_in("l2_pooling")
def l2_pooling(shape: Dims, *, window: Count = 5, stride: Count = 1) -> nn.Module:
    _dims("l2_pooling", shape, 3)
    return L2Pool2d(window, stride=stride)


@built_in("contrast_norm")
def contrast_norm(shape: Dims, *, window: Count = 5) -> nn.Module:
    """Local contrast normalisation."""
    _dims("contrast_norm", shape, 3)
    return LocalContrastNorm2d(window)


@built_in("lrn")
def lrn(
    shape: Dims, *, size: Count = 5, alpha: Positive = 1e-4, beta: Positive = 0.75, k: Positive = 1.0
) -> nn.Module:
    """Local response normalisation, over neighbouring channels."""
    _dims("lrn", shape, 2, 3)
    return nn.LocalResponseNorm(size, alpha, beta, k)


@built_in("dropout")
def dropout(*, p: Share = 0.5) -> nn.Module:
    return nn.Dropout(p)


class Noise(nn.Module):
    """Damages its input in training: a share of it is set to zero, or normal noise is added."""

    def __init__(self, kind: str, amount: float) -> None:
        super().__init__()
        self.kind, self.amount = kind, amount

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.amount:
            return x
        if self.kind == "mask":
            return x * (torch.rand_like(x) >= self.amount)
        return x + self.amount * torch.randn_like(x)


@built_in("noise")
def noise(
    *, kind: Annotated[str, choice("mask", "gaussian")] = "mask", amount: NotNegative = 0.3
) -> nn.Module:
    return Noise(kind, amount)


def _plain(kind: type[nn.Module]) -> Callable[[], nn.Module]:
    return lambda: kind()  # takes no arguments, whatever those of the kind are


for _name, _activation in (
    ("relu", nn.ReLU),
    ("sigmoid", nn.Sigmoid),
    ("tanh", nn.Tanh),
    ("gelu", nn.GELU),
    ("silu", nn.SiLU),
    ("softplus", nn.Softplus),
    ("split", nn.Identity),  # SINGA's: one source for several layers; here any layer can be that
    ("flatten", nn.Flatten),
):
    built_in(_name)(_plain(_activation))


@built_in("leaky_relu")
def leaky_relu(*, slope: Number = 0.01) -> nn.Module:
    return nn.LeakyReLU(slope)


@built_in("softmax")
def softmax(*, log: Flag = False) -> nn.Module:
    """Over the first dimension: the classes."""
    return nn.LogSoftmax(1) if log else nn.Softmax(1)


class Apply(nn.Module):
    """A function of the sources; by name and arguments, so that it travels."""

    def __init__(self, name: str, **arguments: Any) -> None:
        super().__init__()
        self.name, self.arguments = name, arguments

    def forward(self, *sources: Tensor) -> Tensor:
        return _FUNCTIONS[self.name](sources, **self.arguments)

    def extra_repr(self) -> str:
        return ", ".join([self.name, *(f"{key}={value}" for key, value in self.arguments.items())])


_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "reshape": lambda sources, to: sources[0].reshape(len(sources[0]), *to),
    "slice": lambda sources, dim, start, stop: sources[0].narrow(dim + 1, start, stop - start),
    "concat": lambda sources, dim: torch.cat(sources, dim + 1),
    "sum": lambda sources: torch.stack(sources).sum(0),
    "product": lambda sources: torch.stack(sources).prod(0),
}


@built_in("reshape")
def reshape(shape: Dims, *, to: Shape) -> nn.Module:
    if math.prod(to) != math.prod(shape):
        raise UsageError(f"to = {list(to)} holds {math.prod(to)} numbers, {tuple(shape)} {math.prod(shape)}")
    return Apply("reshape", to=tuple(to))


@built_in("slice")
def slice_layer(shape: Dims, *, stop: Count, start: Place = 0, dim: Place = 0) -> nn.Module:
    _dim(dim, shape)
    if not 0 <= start < stop <= shape[dim]:
        raise UsageError(f"start = {start}, stop = {stop} is no part of dimension {dim} of {tuple(shape)}")
    return Apply("slice", dim=dim % len(shape), start=start, stop=stop)


@built_in("concat")
def concat(shapes: Sequence[Dims], *, dim: Place = 0) -> nn.Module:
    _dim(dim, shapes[0])
    dim %= len(shapes[0])
    rest = {(*shape[:dim], 0, *shape[dim + 1 :]) for shape in shapes}
    if len(rest) > 1:
        raise UsageError(f"shapes must agree but in dimension {dim}")
    return Apply("concat", dim=dim)


def _pointwise(name: str) -> Callable[..., nn.Module]:
    def make(shapes: Sequence[Dims]) -> nn.Module:
        if len(set(shapes)) > 1:
            raise UsageError("sources must have one shape")
        return Apply(name)

    return make


for _name in ("sum", "product"):
    built_in(_name)(_pointwise(_name))


# -- losses: of an output and its target, and the sparsity of units --------------------------------------------

LOSSES: dict[str, Callable[..., Tensor]] = {
    "cross_entropy": F.cross_entropy,
    "nll": F.nll_loss,
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "bce": F.binary_cross_entropy,
    "bce_with_logits": F.binary_cross_entropy_with_logits,
}
CLASSES = ("cross_entropy", "nll")  # of scores and class numbers


class Loss(nn.Module):
    """One of LOSSES, of an output and its target, times a weight."""

    def __init__(self, name: str, weight: float) -> None:
        super().__init__()
        self.name, self.weight = name, weight

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        if self.name not in CLASSES and output.shape != target.shape:  # images against flat outputs
            target = target.reshape(output.shape)
        return self.weight * LOSSES[self.name](output, target)

    def extra_repr(self) -> str:
        return f"{self.name}, weight={self.weight}"


def _loss(name: str) -> Callable[..., nn.Module]:
    def make(shapes: Sequence[Dims], *, weight: Number = 1.0) -> nn.Module:
        if len(shapes) != 2:
            raise UsageError(f"a loss is of two sources, the output and its target, got {len(shapes)}")
        output, target = shapes
        if name in CLASSES:
            fits = len(output) == len(target) + 1 and output[1:] == target
        else:
            fits = math.prod(output) == math.prod(target)
        if not fits:
            raise UsageError(f"{name}: the output's shape {output} does not fit the target's {target}")
        return Loss(name, weight)

    return make


for _name in LOSSES:
    built_in(_name, "loss")(_loss(_name))


class Sparsity(nn.Module):
    """weight · Σ_j KL(target ‖ the batch's mean activation of unit j), for units in 0…1."""

    def __init__(self, target: float, weight: float) -> None:
        super().__init__()
        self.target, self.weight = target, weight

    def forward(self, units: Tensor) -> Tensor:
        mean = units.flatten(1).mean(0).clamp(1e-6, 1 - 1e-6)
        off = (1 - self.target) * torch.log((1 - self.target) / (1 - mean))
        return self.weight * (self.target * torch.log(self.target / mean) + off).sum()


@built_in("sparsity", "loss")
def sparsity(
    shape: Dims,
    *,
    target: Annotated[
        float, Kind("a number between 0 and 1", lambda v: isinstance(v, float) and 0 < v < 1)
    ] = 0.05,
    weight: Number = 1.0,
) -> nn.Module:
    """Penalises units that are active more or less often than the target: sparse autoencoders."""
    return Sparsity(target, weight)


# -- shapes ----------------------------------------------------------------------------------------------------

WORDS = {1: "(D,)", 2: "(C, T)", 3: "(C, H, W)", 4: "(C, D, H, W)"}


def _dims(what: str, shape: Dims, *wanted: int) -> None:
    if len(shape) not in wanted or (0 in shape):
        names = " or ".join(WORDS[each] for each in wanted)
        raise UsageError(f"{what} takes {names}, got {tuple(shape)}")


def _dim(dim: int, shape: Dims) -> None:
    if not -len(shape) <= dim < len(shape):
        raise UsageError(f"there is no dimension {dim} in {tuple(shape)}")


def _spread(name: str, value: Any, dims: int) -> tuple[int, ...]:
    """A number for all dimensions, or one for each."""
    found = (value,) * dims if isinstance(value, int) else tuple(value)
    if len(found) != dims:
        raise UsageError(f"{name} = {list(found)} has {len(found)} numbers, there are {dims} dimensions")
    return found
