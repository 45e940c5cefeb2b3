"""What the cutting of a layer means: where its results lie, what windows it wants for them, what parameters it needs.

A rule answers for one type of layer or function. Ways to cut: "data" (the examples), "model" (features or channels),
"spatial" (rows and columns of images), "rows" (a dense layer's inputs); "whole" is computed by every process alike.
Not responsible for single types: `layer_slicing`, `recurrent` and `functions` are.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from syncline.errors import UsageError
from syncline.nn.registry import layer as named_layer
from syncline.parallel.move import Group
from syncline.parallel.trace import Array
from syncline.parallel.windows import Box, Shape, cut, even

WAYS = ("data", "model", "spatial", "rows")


@dataclass(frozen=True, slots=True)
class Spread:
    """How an array lies on the group: each rank's window; with `sums` they are parts to be added."""

    boxes: tuple[Box, ...]
    way: str
    sums: bool = False


@dataclass(frozen=True, slots=True)
class Want:
    """A window that a layer reads, and what stands where it reaches beyond the array."""

    box: Box
    pad: float = 0.0


@dataclass(frozen=True, slots=True)
class Ref:
    """In a call's arguments: the input of this number."""

    index: int


@dataclass(slots=True, kw_only=True)
class Call:
    """One layer or function of the graph, with what is known before anything is computed."""

    name: str
    target: Any  # the layer's type, a function, or a method's name
    module: nn.Module | None  # of the whole model, on meta
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[Array]
    spreads: list[Spread]
    outputs: list[Array]
    parts: int
    batch: int
    grid: tuple[int, int]
    way: str | None  # as the plan says

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """Of a function, the input being its first."""
        if len(self.args) > position:
            return self.args[position]
        return self.kwargs.get(name, self.kwargs.get("axis", default) if name == "dim" else default)

    def leader(self) -> int | None:
        """The largest input that is cut."""
        cuts = [i for i, spread in enumerate(self.spreads) if spread.way != "whole" and not spread.sums]
        return max(cuts, key=lambda i: math.prod(self.inputs[i].shape), default=None)

    def refuse(self, why: str) -> UsageError:
        kind = type(self.module).__name__ if self.module is not None else "function"
        return UsageError(f"{self.name!r} ({kind}) {why}")


@dataclass(slots=True, kw_only=True)
class Local:
    """What a layer knows while it computes its window."""

    module: Any  # with this process's parameters
    call: Call
    group: Group
    boxes: tuple[Box, ...]  # of the first result, by rank
    wanted: list[Box]
    way: str
    sums: bool = False
    seed: int = 0
    step: int = 0
    as_one: bool = False  # draw the random numbers that one process draws

    @property
    def window(self) -> Box:
        return self.boxes[self.group.rank]

    def generator(self, device: torch.device, window: Box) -> torch.Generator:
        """Random numbers of this layer, step and window: others elsewhere, the same where the window is the same."""
        text = f"{self.seed} {self.call.name} {self.step} {window}"
        number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())
        return torch.Generator(device).manual_seed(number)


def whole(array: Array, parts: int) -> Spread:
    return Spread((Box.whole(array.shape),) * parts, "whole")


@lru_cache(1024)
def by_examples(array: Array, batch: int, parts: int) -> Spread:
    """The same examples in every array of a rank; without a dimension of examples, all of it everywhere."""
    if array.batch is None:
        return whole(array, parts)
    spans = [(low * array.unit, high * array.unit) for low, high in even(batch, parts)]
    return Spread(cut(array.shape, array.batch, spans), "data")


def model_dim(shape: Shape) -> int:
    """Channels of images (N, C, …), features of anything else (…, F)."""
    return 1 if len(shape) != 3 else 2


def along(call: Call, array: Array, dim: int, unit: int = 1, way: str = "model") -> Spread:
    if dim >= len(array.shape):
        raise call.refuse(
            f"has results of shape {list(array.shape)}: they have no features that {way!r} could cut"
        )
    size = array.shape[dim]
    if -(-size // unit) < call.parts:
        raise call.refuse(
            f"has {-(-size // unit)} {'parts' if unit > 1 else 'places'} in dimension {dim}, fewer than the {call.parts} processes: "
            f"give it another way than {way!r}, or the group fewer seats"
        )
    return Spread(cut(array.shape, dim, even(size, call.parts, unit)), way)


def tiles(call: Call, array: Array, units: tuple[int, int] = (1, 1)) -> Spread:
    """A grid over rows and columns of images; of sequences (N, C, L) spans of the length."""
    if len(array.shape) < 3:
        raise call.refuse(f"has results of shape {list(array.shape)}: 'spatial' needs images")
    if len(array.shape) == 3:
        return along(call, array, 2, units[0], "spatial")
    sizes = [-(-size // unit) for size, unit in zip(array.shape[2:4], units, strict=True)]
    if any(size < count for size, count in zip(sizes, call.grid, strict=True)):
        raise call.refuse(
            f"has {sizes[0]} × {sizes[1]} places for a grid of {call.grid[0]} × {call.grid[1]} processes: "
            "give it another way than 'spatial', or the group fewer seats"
        )
    high, wide = (even(array.shape[2 + i], call.grid[i], units[i]) for i in (0, 1))
    bands = (Box.whole(array.shape).replaced(2, row) for row in high)
    return Spread(tuple(band.replaced(3, column) for band in bands for column in wide), "spatial")


def cut_by(call: Call, way: str, array: Array) -> Spread:
    """The usual windows of a way."""
    if way == "data":
        return by_examples(array, call.batch, call.parts)
    return tiles(call, array) if way == "spatial" else along(call, array, model_dim(array.shape), way=way)


Slices = dict[str, tuple[Box, ...]]


class Rule:
    """For whatever is not known better: examples are independent, so that it runs data-parallel."""

    ways: tuple[str, ...] = ("data",)
    last: int | None = None  # examples may be in any dimension but the last so many

    def place(self, call: Call) -> list[Spread]:
        """Where each result lies."""
        self.check_way(call)
        return self.data(call)

    def check_way(self, call: Call) -> None:
        if call.way is not None and call.way not in self.ways:
            raise call.refuse(f"cannot be cut as {call.way!r}: it can be {', '.join(map(repr, self.ways))}")

    def data(self, call: Call) -> list[Spread]:
        if self.mixes(call):
            return [whole(array, call.parts) for array in call.outputs]
        return [by_examples(array, call.batch, call.parts) for array in call.outputs]

    def mixes(self, call: Call) -> bool:
        """It makes something of all examples together: nobody can compute a part of it."""
        dims = [array.batch for array in call.inputs if array.batch is not None]
        if not dims or any(array.batch is None for array in call.outputs):
            return bool(dims)
        if self.last is not None:
            return dims[0] >= len(call.inputs[0].shape) - self.last
        parts = call.module.modules() if call.module is not None else ()
        first = [part.batch_first for part in parts if hasattr(part, "batch_first")]
        return dims[0] != (1 if first and not first[0] and len(call.inputs[0].shape) == 3 else 0)

    def wants(self, call: Call, outs: Sequence[Spread], rank: int) -> list[Want]:
        """What a rank reads of every input, for its windows of the results."""
        if outs[0].way == "whole":
            return [Want(Box.whole(array.shape)) for array in call.inputs]
        return [Want(by_examples(array, call.batch, call.parts).boxes[rank]) for array in call.inputs]

    def slices(self, call: Call, outs: Sequence[Spread], rank: int) -> Slices:
        """Boxes of those parameters and buffers that are not needed whole; of several, one after the other."""
        return {}

    def run(self, local: Local, *args: Any, **kwargs: Any) -> Any:
        return own_code(local, *args, **kwargs)


def own_code(local: Local, *args: Any, **kwargs: Any) -> Any:
    """The layer's or function's own; if it drops something, with random numbers of this window."""
    module = local.module
    parts = module.modules() if isinstance(module, nn.Module) and module.training else ()
    shares = (getattr(part, name, 0) for part in parts for name in ("p", "dropout"))
    if not any(isinstance(share, float) and share > 0 for share in shares):
        return module(*args, **kwargs)
    devices = [tensor.device for tensor in args if isinstance(tensor, torch.Tensor) and tensor.is_cuda]
    with torch.random.fork_rng(devices):
        torch.manual_seed(local.generator(torch.device("cpu"), local.window).initial_seed())
        return module(*args, **kwargs)


@dataclass
class Windowed(Rule):
    """A type with functions of its own: the windows it wants for a window of its result, and its parameters' slices."""

    want: Callable[[Any, Box, list[Shape]], Any]
    cuts: Callable[[Any, Box], Slices] | None = None
    ways: tuple[str, ...] = ("data", "model", "spatial")
    compute: Callable[..., Any] | None = None
    dim: int | None = None  # what "model" cuts
    units: Callable[[Any, str], tuple[int, int]] = field(default=lambda module, way: (1, 1))
    check: Callable[[Any, str], str | None] = field(default=lambda module, way: None)
    last: int | None = None

    def place(self, call: Call) -> list[Spread]:
        leader, way = call.leader(), call.way or "data"
        if call.way is None and leader is not None and not holds(call.module):
            # what holds nothing goes on as its input is cut, where it can
            followed = call.spreads[leader].way
            way = followed if followed in self.ways and self.check(call.module, followed) is None else way
        self.check_way(call)
        why = self.check(call.module, way)
        if why is not None:
            raise call.refuse(f"cannot be cut as {way!r}: {why}")
        if way == "data":
            return self.data(call)
        try:
            return [self._cut(call, way, array) for array in call.outputs]
        except UsageError:
            if call.way is not None:
                raise
            return self.data(call)

    def _cut(self, call: Call, way: str, array: Array) -> Spread:
        units = self.units(call.module, way)
        if way == "spatial":
            return tiles(call, array, units)
        dim = model_dim(array.shape) if self.dim is None else self.dim % len(array.shape)
        leader = call.leader()
        if call.way is not None or leader is None:
            return along(call, array, dim, units[0])
        shape, boxes = call.inputs[leader].shape, call.spreads[leader].boxes
        if boxes != cut(shape, dim, [box.spans[dim] for box in boxes]) or shape[dim] != array.shape[dim]:
            raise call.refuse("works along what is cut")
        return Spread(cut(array.shape, dim, [box.spans[dim] for box in boxes]), way)

    def wants(self, call: Call, outs: Sequence[Spread], rank: int) -> list[Want]:
        if outs[0].way in ("data", "whole"):
            return Rule.wants(self, call, outs, rank)
        found = self.want(call.module, outs[0].boxes[rank], [array.shape for array in call.inputs])
        several = [found] if isinstance(found, Box | Want) else list(found)
        return [item if isinstance(item, Want) else Want(item) for item in several]

    def slices(self, call: Call, outs: Sequence[Spread], rank: int) -> Slices:
        if outs[0].way in ("data", "whole") or self.cuts is None:
            return {}
        found = self.cuts(call.module, outs[0].boxes[rank])
        check_names(call, found)
        return found

    def run(self, local: Local, *args: Any, **kwargs: Any) -> Any:
        if self.compute is None or local.way in ("data", "whole"):
            return own_code(local, *args, **kwargs)
        return self.compute(local.module, local, *args, **kwargs)


def check_names(call: Call, slices: Slices) -> None:
    assert call.module is not None
    named = {name for name, _ in (*call.module.named_parameters(), *call.module.named_buffers())}
    if strange := sorted(slices.keys() - named):
        raise call.refuse(f"cannot be cut as {call.way!r}: {strange[0]!r} is no parameter of it")


def holds(module: nn.Module | None) -> bool:
    """Whether it has parameters."""
    return module is not None and any(True for _ in module.parameters())


RULES: dict[type[nn.Module], Rule] = {}


def register(rule: Rule, *kinds: type[nn.Module]) -> None:
    RULES.update(dict.fromkeys(kinds, rule))


def rule_of(module: nn.Module) -> Rule | None:
    """That of its type, or of the nearest it is derived from, if it has the same code."""
    own: Any = type(module)
    same = (kind for kind in own.__mro__ if kind in RULES and own.forward is kind.forward)
    return next((RULES[kind] for kind in same), None)


def layer(
    kind: type[nn.Module] | str,
    wants: Callable[[Any, Box, list[Shape]], Any] | None = None,
    slices: Callable[[Any, Box], Slices] | None = None,
    *,
    ways: tuple[str, ...] = ("data", "model", "spatial"),
    run: Callable[..., Any] | None = None,
    dim: int | None = None,
    loss: bool = False,
) -> Any:
    """Make a layer type of yours known: to plans and partitions, or, as `@layer("name")`, to job files and nets (nn/registry.py).

    `wants(layer, window, shapes)` gives, for a window (a `Box`) of the result, the boxes of the inputs of these
    shapes; they may reach beyond the array and are filled with 0 there, or with `Want(box, pad)`. `slices(layer,
    window)` gives for each parameter that is cut a tuple of boxes; the process holds them, one after the other. Then
    the layer's own code runs on its windows, or `run(layer, local, *inputs)`. "model" cuts dimension `dim` (channels
    of images, features of anything else). Without `wants` the type is one layer to the tracer, and runs data-parallel.
    """
    if isinstance(kind, str):
        return named_layer(kind, loss=loss)
    if not isinstance(kind, type) or not issubclass(kind, nn.Module):
        raise UsageError(f"layer(...) takes a type of nn.Module, or a name for one, got {kind!r}")
    if unknown := set(ways) - set(WAYS):
        raise UsageError(f"layer {kind.__name__}: no way {sorted(unknown)}; there are {', '.join(WAYS)}")
    ordered = ("data", *(way for way in ways if way != "data"))
    RULES[kind] = Rule() if wants is None else Windowed(wants, slices, ordered, run, dim)
    return kind
