"""Functions and methods between layers, and rules for whatever keeps dimensions as they are: elementwise operations,
permutations, reductions, reshapes. None of them is wrong on a slice.

An operation is described by which dimension of each input a dimension of its result goes along with, place by place.
Dimensions that go along may be cut; the others are wanted whole. What is not in the lists is computed whole by every process,
from everything: right, if slow. What draws random numbers is refused by name. Not responsible for layers: `layer_slicing` is.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from syncline.parallel.rules import Call, Local, Rule, Spread, Want, along, by_examples, cut_by, whole
from syncline.parallel.trace import Array
from syncline.parallel.windows import Box, Shape, Span

Along = tuple[int | None, ...]  # for every dimension of the result, that of an input


@dataclass
class Aligned(Rule):
    """`along` says for each input which of its dimensions go along with the result's."""

    along: Callable[[Call], list[Along]]
    compute: Callable[..., Any] | None = None
    sums: bool = False  # over dimensions that are cut it can be computed in parts, which are added
    ways: tuple[str, ...] = ("data", "model", "spatial")

    def place(self, call: Call) -> list[Spread]:
        self.check_way(call)
        dims = _checked(call, self.along(call))
        leader = call.leader()
        if call.way is not None and (leader is None or call.spreads[leader].way != call.way):
            found = [cut_by(call, call.way, array) for array in call.outputs]
            if all(_computable(dims, *each) for each in zip(call.outputs, found, strict=True)):
                return found
            if call.way != "data":
                raise call.refuse(f"works along a dimension that {call.way!r} cuts: give it another way")
            leader = None
        if leader is not None:
            lead, shape = call.spreads[leader], call.inputs[leader].shape
            kept = [_kept(dims[leader], lead, array) for array in call.outputs]
            cut = {dim for box in lead.boxes for dim, span in enumerate(box.spans) if span != (0, shape[dim])}
            if cut <= set(dims[leader]):
                return [Spread(boxes, lead.way) for boxes in kept]
            overlap = any(a.meet(b).size for at, a in enumerate(lead.boxes) for b in lead.boxes[:at])
            if self.sums and not overlap:
                return [Spread(boxes, "whole", sums=True) for boxes in kept]
        if call.way not in (None, "data"):
            raise call.refuse(f"works along a dimension that {call.way!r} cuts: give it another way")
        if _per_example(call, dims):
            return [by_examples(array, call.batch, call.parts) for array in call.outputs]
        return [whole(array, call.parts) for array in call.outputs]

    def wants(self, call: Call, outs: Sequence[Spread], rank: int) -> list[Want]:
        if outs[0].sums:
            leader = call.leader()
            boxes = [Box.whole(array.shape) for array in call.inputs]
            return [Want(call.spreads[i].boxes[rank] if i == leader else box) for i, box in enumerate(boxes)]
        found = []
        for array, dims in zip(call.inputs, _checked(call, self.along(call)), strict=True):
            box = Box.whole(array.shape)
            for at, dim in enumerate(dims):
                if dim is not None:
                    box = box.replaced(dim, outs[0].boxes[rank].spans[at])
            found.append(Want(box))
        return found

    def run(self, local: Local, *args: Any, **kwargs: Any) -> Any:
        if self.compute is not None:
            return self.compute(local.module, local, *args, **kwargs)
        return local.module(*args, **kwargs)


def _checked(call: Call, along: list[Along]) -> list[Along]:
    """Without dimensions of one place that are spread over many: those are wanted whole."""
    shape = call.outputs[0].shape
    return [
        tuple(
            dim if dim is not None and array.shape[dim] == shape[at] else None for at, dim in enumerate(dims)
        )
        for array, dims in zip(call.inputs, along, strict=True)
    ]


def _computable(along: list[Along], array: Array, spread: Spread) -> bool:
    """A dimension that goes along with no input has to be whole."""
    made = [at for at in range(len(array.shape)) if all(dims[at] is None for dims in along)]
    return all(box.spans[at] == (0, array.shape[at]) for at in made for box in spread.boxes)


def _kept(dims: Along, spread: Spread, array: Array) -> tuple[Box, ...]:
    pairs = list(zip(array.shape, dims, strict=True))
    return tuple(
        Box(tuple((0, size) if dim is None else box.spans[dim] for size, dim in pairs))
        for box in spread.boxes
    )


def _per_example(call: Call, along: list[Along]) -> bool:
    """The examples of every input go along with those of the results."""
    out = call.outputs[0].batch
    if out is None:
        return all(array.batch is None for array in call.inputs)
    return all(
        array.batch is None or dims[out] == array.batch
        for array, dims in zip(call.inputs, along, strict=True)
    ) and any(dims[out] is not None for dims in along)


def broadcast(call: Call) -> list[Along]:
    """Elementwise, dimensions counted from the last."""
    rank = len(call.outputs[0].shape)
    return [
        tuple(at - rank + len(a.shape) if at >= rank - len(a.shape) else None for at in range(rank))
        for a in call.inputs
    ]


def keeping(dims: Callable[[Call], Sequence[int]]) -> Callable[[Call], list[Along]]:
    """The first input's dimensions stay where they are, but for those that are worked on, which may vanish."""

    def along(call: Call) -> list[Along]:
        rank, out = len(call.inputs[0].shape), len(call.outputs[0].shape)
        worked = {dim % rank for dim in dims(call)} if rank else set()
        kept: list[int | None] = [None if dim in worked else dim for dim in range(rank)]
        if out < rank:
            kept = [dim for dim in kept if dim is not None]
        nothing: Along = (None,) * out
        return [tuple(kept) if len(array.shape) == rank else nothing for array in call.inputs]

    return along


def share_of_mean(kind: Any, local: Local, *args: Any, **kwargs: Any) -> Tensor:
    """A mean over what is cut: this process's part of it."""
    mean: Tensor = kind(*args, **kwargs)
    here, there = math.prod(local.wanted[0].shape), math.prod(local.window.shape)
    if not local.sums or not there:
        return mean
    whole_in, whole_out = math.prod(local.call.inputs[0].shape), math.prod(local.call.outputs[0].shape)
    return mean * ((here / there) / (whole_in / whole_out)) if here else torch.zeros_like(mean)


# -- reshapes --------------------------------------------------------------------------------------------------


class Reshape(Rule):
    """Dimensions are joined or split. A window of the result is part of the smallest input window that covers it."""

    ways = ("data", "model", "spatial")

    def place(self, call: Call) -> list[Spread]:
        self.check_way(call)
        source, array, leader = call.inputs[0], call.outputs[0], call.leader()
        if call.way is not None and (leader is None or call.spreads[leader].way != call.way):
            return [cut_by(call, call.way, array)]
        if leader is not None:
            boxes = [_reshaped(source.shape, array.shape, box) for box in call.spreads[leader].boxes]
            found = tuple(box for box in boxes if box is not None)
            if len(found) == call.parts:
                return [Spread(found, call.spreads[leader].way)]
        return [by_examples(array, call.batch, call.parts)]

    def wants(self, call: Call, outs: Sequence[Spread], rank: int) -> list[Want]:
        return [Want(_covering(call.inputs[0].shape, call.outputs[0].shape, outs[0].boxes[rank])[0])]

    def run(self, local: Local, *args: Any, **kwargs: Any) -> Tensor:
        _, cover = _covering(local.call.inputs[0].shape, local.call.outputs[0].shape, local.window)
        tensor: Tensor = args[0]
        return tensor.reshape(cover.shape)[local.window.inside(cover)]


def _groups(old: Shape, new: Shape) -> list[tuple[list[int], list[int]]]:
    """Runs of dimensions of both with the same number of places, as short as can be."""
    found, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        a, b = [i] if i < len(old) else [], [j] if j < len(new) else []
        i, j = i + len(a), j + len(b)
        while _places(old, a) != _places(new, b):
            if (_places(old, a) < _places(new, b) and i < len(old)) or j >= len(new):
                a, i = [*a, i], i + 1
            else:
                b, j = [*b, j], j + 1
        found.append((a, b))
    return found


def _places(shape: Shape, dims: Sequence[int]) -> int:
    return math.prod(shape[dim] for dim in dims)


def _thick(shape: Shape, dims: Sequence[int]) -> list[int]:
    return [dim for dim in dims if shape[dim] != 1]


def _reshaped(old: Shape, new: Shape, box: Box) -> Box | None:
    """What becomes of an input window, if it is a window of the result."""
    spans: list[Span] = [(0, size) for size in new]
    for a, b in _groups(old, new):
        one, other = _thick(old, a), _thick(new, b)
        cut = [dim for dim in one if box.spans[dim] != (0, old[dim])]
        if not cut:
            continue
        low, high = box.spans[one[0]]
        rest, inner = _places(old, one[1:]), _places(new, other[1:])
        if cut != one[:1] or (low * rest) % inner or (high * rest) % inner:
            return None
        spans[other[0]] = (low * rest // inner, high * rest // inner)
    return Box(tuple(spans))


def _covering(old: Shape, new: Shape, window: Box) -> tuple[Box, Box]:
    """The input window that covers a window of the result, and all of the result that it gives."""
    read, gives = list(Box.whole(old).spans), list(Box.whole(new).spans)
    for a, b in _groups(old, new):
        one, other = _thick(old, a), _thick(new, b)
        if not other or all(window.spans[dim] == (0, new[dim]) for dim in other):
            continue
        low, high = window.spans[other[0]]
        rest, inner = _places(old, one[1:]), _places(new, other[1:])
        step = math.lcm(rest, inner)  # the smallest piece that is whole in both
        first = low * inner // step
        last = -(-high * inner // step) if high > low else first
        read[one[0]] = (first * step // rest, last * step // rest)
        gives[other[0]] = (first * step // inner, last * step // inner)
    return Box(tuple(read)), Box(tuple(gives))


# -- functions by name -----------------------------------------------------------------------------------------


def _words(text: str) -> set[str]:
    return set(text.split())


ELEMENTWISE = _words(
    "add sub rsub mul div truediv true_divide floordiv floor_divide mod remainder fmod pow neg pos abs exp expm1 log log2 log10 "
    "log1p sqrt rsqrt square reciprocal sigmoid tanh sin cos tan asin acos atan atan2 sinh cosh erf erfc erfinv relu relu6 "
    "leaky_relu elu selu celu gelu silu mish hardtanh hardswish hardsigmoid hardshrink softshrink tanhshrink softplus softsign "
    "logsigmoid threshold clamp clamp_min clamp_max clip sign floor ceil round trunc frac maximum minimum where eq ne lt le gt ge "
    "logical_and logical_or logical_not logical_xor and_ or_ xor invert isnan isinf isfinite nan_to_num lerp addcmul addcdiv "
    "masked_fill to float double half bfloat16 int long bool type type_as cpu cuda detach clone contiguous zeros_like ones_like "
    "full_like empty_like identity requires_grad_"
)
PER_EXAMPLE = _words(
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d "
    "avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_max_pool1d adaptive_max_pool2d lp_pool1d lp_pool2d interpolate pad "
    "embedding group_norm instance_norm local_response_norm unfold fold pixel_shuffle pixel_unshuffle one_hot "
    "scaled_dot_product_attention grid_sample affine_grid"
)
RANDOM = _words(
    "rand_like randn_like randint_like bernoulli multinomial normal poisson rrelu gumbel_softmax alpha_dropout "
    "feature_alpha_dropout dropout1d dropout2d dropout3d normal_ uniform_ random_ bernoulli_ exponential_"
)
RESHAPES = _words("reshape view flatten unflatten unsqueeze squeeze")
VIEWS = RESHAPES | _words("transpose permute t getitem chunk split unbind narrow select expand detach")
IN_PLACE = {"iadd", "isub", "imul", "itruediv", "ipow"}


def name_of(target: Any) -> str | None:
    """What a function is called, if it is torch's or Python's own, or a tensor's method."""
    if isinstance(target, str):
        return target
    name = getattr(target, "__name__", "")
    homes = (operator, torch, F, torch.special, torch._C._nn, torch.Tensor, torch.linalg)
    return name if any(getattr(home, name, None) is target for home in homes if name) else None


def _dims(position: int, name: str = "dim", default: Any = None) -> Callable[[Call], Sequence[int]]:
    """The dimensions a function works on; None means all of them."""

    def found(call: Call) -> Sequence[int]:
        dim = call.argument(position, name, default)
        if dim is None or isinstance(dim, bool):
            return tuple(range(len(call.inputs[0].shape)))
        return (dim,) if isinstance(dim, int) else tuple(dim)

    return found


def _several(call: Call) -> Sequence[int]:
    """Dimensions one after the other, or in a tuple."""
    dims = call.args[1:] if len(call.args) > 1 else (call.kwargs["dims"],)
    found: Sequence[int] = dims[0] if isinstance(dims[0], tuple | list) else dims
    return found


def _permuted(call: Call) -> list[Along]:
    order = _several(call)
    return [tuple(dim % len(order) for dim in order)]


def _transposed(call: Call) -> list[Along]:
    rank = len(call.inputs[0].shape)
    order = list(range(rank))
    if rank > 1:
        one, two = (call.argument(1, "dim0", 0) % rank, call.argument(2, "dim1", 1) % rank)
        order[one], order[two] = two, one
    return [tuple(order)]


def _stacked(call: Call) -> list[Along]:
    rank = len(call.outputs[0].shape)
    dim = call.argument(1, "dim", 0) % rank
    return [tuple(None if at == dim else at - (at > dim) for at in range(rank))] * len(call.inputs)


def _indexed(call: Call) -> list[Along]:
    """x[index], where no tensor is in the index."""
    index = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    used = sum(item is not None and item is not Ellipsis for item in index)
    rank, dims, at = len(call.inputs[0].shape), list[int | None](), 0
    for item in (*index, *(() if Ellipsis in index else (Ellipsis,))):
        if item is None:
            dims.append(None)
        elif item is Ellipsis:
            dims += range(at, at + rank - used)
            at += rank - used
        else:
            dims += [at if item == slice(None) else None] if isinstance(item, slice) else []
            at += 1
    return [tuple(dims)]


def _multiplied(call: Call) -> list[Along]:
    """a @ b: rows of a, columns of b, and what stands before them."""
    rank, result = len(call.outputs[0].shape), []
    ranks = [len(array.shape) for array in call.inputs]
    for number, own in enumerate(ranks[:2]):
        dims: list[int | None] = [at - rank + own if at >= rank - own else None for at in range(rank)]
        if min(ranks[:2]) > 1:
            dims[-1 - (number == 1)] = None  # the columns of a, the rows of b: summed
        else:
            dims = [at if number == 0 and own > 1 and at < own - 1 else None for at in range(rank)]
        result.append(tuple(dims))
    return result


def _linear(call: Call) -> list[Along]:
    rank = len(call.outputs[0].shape)
    own: list[Along] = [(*range(rank - 1), None)]
    return own + [(None,) * rank] * (len(call.inputs) - 1)


def _einsum(call: Call) -> list[Along]:
    text = str(call.args[0]).replace(" ", "")
    reads, arrow, writes = text.partition("->")
    if not arrow or "." in text or len(reads.split(",")) != len(call.inputs):
        return [(None,) * len(call.outputs[0].shape)] * len(call.inputs)
    return [tuple(term.index(c) if term.count(c) == 1 else None for c in writes) for term in reads.split(",")]


def _examples(call: Call) -> list[Along]:
    """Nothing but the examples is known to go along, and those only where they are expected."""
    out, rank = call.outputs[0].batch, len(call.outputs[0].shape)
    first = call.inputs[0]
    last = len(first.shape) - 2 if name_of(call.target) == "scaled_dot_product_attention" else 1
    fine = name_of(call.target) in ("embedding", "one_hot", "pad") or (first.batch or 0) < last
    return [tuple(array.batch if at == out and fine else None for at in range(rank)) for array in call.inputs]


class Cat(Aligned):
    """Where the joined dimension is cut, a window of the result is made of a window of each input."""

    def place(self, call: Call) -> list[Spread]:
        leader, dim = call.leader(), self._dim(call)
        if leader is not None and call.way in (None, call.spreads[leader].way):
            spread, size = call.spreads[leader], call.inputs[leader].shape[dim]
            if spread.way == "model" and any(box.spans[dim] != (0, size) for box in spread.boxes):
                return [along(call, call.outputs[0], dim)]
        return super().place(call)

    def wants(self, call: Call, outs: Sequence[Spread], rank: int) -> list[Want]:
        window, dim, start, found = outs[0].boxes[rank], self._dim(call), 0, []
        for array in call.inputs:
            size = array.shape[dim]
            low, high = (min(max(place - start, 0), size) for place in window.spans[dim])
            found.append(Want(window.replaced(dim, (low, high))))
            start += size
        return found

    def _dim(self, call: Call) -> int:
        dim: int = call.argument(1, "dim", 0)
        return dim % len(call.outputs[0].shape)


class Whole(Rule):
    """Not known: everybody computes all of it from everything."""

    def place(self, call: Call) -> list[Spread]:
        if call.way not in (None, "data"):
            raise call.refuse(f"cannot be cut as {call.way!r}: it is not known what it does")
        return [whole(array, call.parts) for array in call.outputs]


def dropped(
    kind: Any, local: Local, x: Tensor, p: float = 0.5, training: bool = True, *_: Any, **__: Any
) -> Tensor:
    """Dropout with random numbers of this window's own."""
    return drop(local, x, p, local.window, local.call.outputs[0].shape) if training else x


def drop(
    local: Local,
    x: Tensor,
    p: float,
    window: Box,
    shape: Sequence[int],
    *,
    kind: Callable[..., Tensor] = F.dropout,
    number: int | None = None,
) -> Tensor:
    """Drop places in the `window` of an array of this shape.

    The random numbers are the window's own or, with `as_one`, the window of what torch's `kind` draws for the whole shape.
    Dimensions of size one are dropped as a whole. `number` distinguishes several calls of one layer.
    """
    if p == 0:
        return x
    if p >= 1:
        return x * 0.0
    if local.as_one:
        noise = kind(torch.ones(tuple(shape), dtype=x.dtype, device=x.device), p, True)
        return x * noise[window.inside(Box.whole(tuple(shape)))]
    key = window if number is None else Box(((number, number + 1),))
    noise = torch.rand(window.shape, generator=local.generator(x.device, key), device=x.device)
    return x * (noise >= p).to(x.dtype).div_(1 - p)


_OTHERS: dict[str, Rule] = {
    **dict.fromkeys(
        _words(
            "softmax log_softmax softmin cumsum cumprod logsumexp amax amin prod std var any all argmax argmin max min median"
        ),
        Aligned(keeping(_dims(1))),
    ),
    **dict.fromkeys(("sort", "argsort"), Aligned(keeping(_dims(1, default=-1)))),
    **dict.fromkeys(("chunk", "split", "tensor_split"), Aligned(keeping(_dims(2, default=0)))),
    **dict.fromkeys(("unbind", "narrow", "select"), Aligned(keeping(_dims(1, default=0)))),
    **dict.fromkeys(("cat", "concat", "concatenate"), Cat(keeping(_dims(1, default=0)))),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims", "t"), Aligned(_transposed)),
    **dict.fromkeys(("matmul", "bmm", "mm", "mv"), Aligned(_multiplied)),
    "sum": Aligned(keeping(_dims(1)), sums=True),
    "mean": Aligned(keeping(_dims(1)), share_of_mean, sums=True),
    "norm": Aligned(keeping(_dims(2))),
    "topk": Aligned(keeping(_dims(2, default=-1))),
    "normalize": Aligned(keeping(_dims(2, default=1))),
    "flip": Aligned(keeping(_several)),
    "layer_norm": Aligned(
        keeping(lambda call: [-1 - at for at in range(len(call.argument(1, "normalized_shape")))])
    ),
    "permute": Aligned(_permuted),
    "stack": Aligned(_stacked),
    "linear": Aligned(_linear),
    "einsum": Aligned(_einsum),
    "dropout": Aligned(broadcast, dropped),
}


def function_rule(call: Call) -> Rule:
    """For a function or method; the first input is a tensor."""
    name = name_of(call.target)
    if name in RANDOM or call.kwargs.get("dropout_p"):
        raise call.refuse(
            f"draws random numbers ({name}), others in every process: use nn.Dropout or a layer of your own"
        )
    if name == "batch_norm":
        raise call.refuse(
            "normalises by the examples at hand, and changes buffers: use nn.BatchNorm1d, 2d or 3d"
        )
    if name == "getitem":
        index = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
        plain = all(item is None or item is Ellipsis or type(item) in (int, slice) for item in index)
        return Aligned(_indexed) if plain else Whole()
    known = {name, (name or "").removesuffix("_")} & (ELEMENTWISE | IN_PLACE)
    if known or (name in ("max", "min") and len(call.inputs) == 2):
        return Aligned(broadcast)
    if name in RESHAPES and not isinstance(call.argument(1, "dtype"), torch.dtype):
        return Reshape()
    if name in PER_EXAMPLE:
        return Aligned(_examples)
    return _OTHERS.get(name or "", Whole())
