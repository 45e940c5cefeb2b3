"""A model as a graph of layers and functions with all shapes, traced on meta tensors without being changed.

Shapes are known while tracing, so that code may ask for them; values are not. Every graph is traced for two batch
sizes: the dimension that grows is that of the examples, and nothing about it has to be guessed. Not responsible for
what layers mean: `rules` are.
"""

from __future__ import annotations

import copy
import inspect
import operator
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from syncline.errors import UsageError

_one_at_a_time = threading.RLock()  # torch.fx patches nn.Module while it traces


@dataclass(frozen=True, slots=True)
class Array:
    """A tensor of the whole model: its shape, the dimension of the examples, and how many places each has there."""

    shape: tuple[int, ...]
    batch: int | None = None
    unit: int = 1
    dtype: torch.dtype = torch.float32


class _Known(fx.Proxy):
    """A proxy whose shape, dtype and length are plain values."""

    def __getattr__(self, name: str) -> Any:
        value = self.node.meta["value"]
        if name == "device" and isinstance(value, Tensor):
            return self.tracer.device  # type: ignore[attr-defined]
        if isinstance(value, Tensor) and hasattr(value, name):
            known = getattr(value, name)
            if name in _PLAIN_METHODS or not (callable(known) or isinstance(known, Tensor)):
                return known
        return super().__getattr__(name)

    def __len__(self) -> int:
        return len(self.node.meta["value"])

    def __iter__(self) -> Iterator[Any]:
        return (operator.getitem(self, at) for at in range(len(self)))  # type: ignore[call-overload]

    def __bool__(self) -> bool:
        value = self.node.meta["value"]
        return super().__bool__() if isinstance(value, Tensor) else bool(value)


_PLAIN_METHODS = (
    "size",
    "dim",
    "numel",
    "nelement",
    "ndimension",
    "is_floating_point",
    "is_complex",
    "stride",
)


class _Tracer(fx.Tracer):
    """Computes every node on meta tensors when it is made."""

    def __init__(
        self, leaf: Callable[[nn.Module], bool], inputs: Sequence[Any], device: torch.device
    ) -> None:
        super().__init__()
        self._leaf, self._inputs, self.device = leaf, list(inputs), device
        self._inside, self._thread = False, threading.get_ident()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return self._leaf(m)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Known(node, self)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return forward(*args, **kwargs) if self._elsewhere else super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        return attr_val if self._elsewhere else super().getattr(attr, attr_val, parameter_proxy_cache)

    @property
    def _elsewhere(self) -> bool:
        """Inside a node that is computed, or in another thread: nothing of that is traced."""
        return self._inside or threading.get_ident() != self._thread

    def create_proxy(self, kind: str, *rest: Any, **more: Any) -> Any:
        made = super().create_proxy(kind, *rest, **more)
        if kind == "placeholder":
            value = made.node.meta["value"]
            if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value)):
                return value  # an option of forward, whatever depends on it
        return made

    def create_node(self, kind: str, target: Any, *rest: Any, **more: Any) -> fx.Node:
        node = super().create_node(kind, target, *rest, **more)
        if kind != "output":
            self._inside = True
            try:
                node.meta["value"] = self._value(node)
            finally:
                self._inside = False
        return node

    def _value(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return self._inputs.pop(0)
        if node.op == "get_attr":
            return _on_meta(operator.attrgetter(str(node.target))(self.root))
        args: Any
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda used: used.meta["value"])
        if node.op == "call_module":
            module = self.root.get_submodule(str(node.target))
            if isinstance(module, nn.modules.batchnorm._BatchNorm):  # it may read the number of its batches
                return torch.empty_like(args[0])
            return _quickly(module, args) if not kwargs else module(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        assert callable(node.target)
        if node.target in _LIKE_INPUT:
            return torch.empty_like(args[0])
        return node.target(*args, **kwargs)


_LIKE_INPUT = {F.relu, torch.relu, nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU}


def _quickly(module: nn.Module, args: tuple[Any, ...]) -> Any:
    """A layer's result. On meta tensors torch takes a quarter of a millisecond and more to compute these."""
    x = args[0]
    if type(module) is nn.Linear and x.shape[-1:] == (module.in_features,) and x.dtype == module.weight.dtype:
        return x.new_empty((*x.shape[:-1], module.out_features))
    return torch.empty_like(x) if type(module) in _LIKE_INPUT else module(*args)


def _on_meta(value: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().to("meta"), value)


def skeleton(model: nn.Module) -> nn.Module:
    """The model with its parameters and buffers on meta: shapes alone, nothing shared with the original."""
    memo: dict[int, Any] = {}
    for module in model.modules():  # empty ones, of hooks, take most of the time
        held = (value for value in vars(module).values() if type(value) is OrderedDict and not value)
        memo |= {id(value): OrderedDict() for value in held}
    for tensor in (*model.parameters(), *model.buffers()):
        shape = tensor.detach().to("meta")
        memo[id(tensor)] = (
            nn.Parameter(shape, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else shape
        )
    try:
        return copy.deepcopy(model, memo)
    except (TypeError, RuntimeError) as error:
        raise UsageError(f"{type(model).__name__} cannot be copied to be traced: {error}") from error


@dataclass(frozen=True, slots=True)
class Traced:
    """A graph whose nodes have `meta["value"]`, tensors on meta, and `meta["array"]`, an Array for each of them."""

    graph: fx.Graph
    batch: int


def trace(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    leaf: Callable[[nn.Module], bool],
    batch_dim: int = 0,
) -> Traced:
    """The graph of a `skeleton` for inputs like these."""
    given = (tuple(args), dict(kwargs))
    tensors = [each for each in pytree.tree_leaves(given) if isinstance(each, Tensor)]
    batch = next((tensor.shape[batch_dim] for tensor in tensors if tensor.dim() > batch_dim), None)
    if batch is None:
        raise UsageError(
            f"an example input needs a tensor with a dimension {batch_dim}, that of the examples"
        )

    def one_more(tensor: Tensor) -> Tensor:
        if tensor.dim() <= batch_dim or tensor.shape[batch_dim] != batch:
            return tensor
        shape = list(tensor.shape)
        shape[batch_dim] += 1
        return torch.empty(shape, dtype=tensor.dtype, device="meta")

    with _one_at_a_time:
        graph = _traced(model, args, kwargs, leaf)
        more, named = pytree.tree_map_only(Tensor, one_more, given)
        other = _traced(model, more, named, leaf)
    _find_batches(type(model).__name__, graph, other, batch)
    return Traced(graph, batch)


def _traced(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], leaf: Callable[[nn.Module], bool]
) -> fx.Graph:
    name = type(model).__name__
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise UsageError(f"the example input does not fit {name}.forward: {error}") from error
    bound.apply_defaults()
    tensors = [leaf for leaf in pytree.tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor)]
    tracer = _Tracer(leaf, [_on_meta(value) for value in bound.arguments.values()], tensors[0].device)
    try:
        with torch.no_grad(), _NoDraws(name):
            return tracer.trace(model)
    except UsageError:
        raise
    except Exception as error:
        line = (str(error).strip().splitlines() or ["no message"])[0]
        raise UsageError(
            f"{name} cannot be traced ({type(error).__name__}: {line}): what depends on values, or is no plain tensor code, "
            "has to be a module of its own, made known with layer(...)"
        ) from error


class _NoDraws(TorchDispatchMode):
    """Random numbers drawn while tracing would be the same in every step ever after."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        real = any(isinstance(leaf, Tensor) and not leaf.is_meta for leaf in pytree.tree_leaves(found))
        if real and torch.Tag.nondeterministic_seeded in func.tags:
            raise UsageError(
                f"{self._name}.forward draws random numbers ({func}): use nn.Dropout, or a module of its own"
            )
        return found


def _find_batches(name: str, graph: fx.Graph, other: fx.Graph, batch: int) -> None:
    one, two = list(graph.nodes), list(other.nodes)
    if [_kind(node) for node in one] != [_kind(node) for node in two]:
        raise UsageError(
            f"{name} computes otherwise for {batch + 1} examples than for {batch}: its graph depends on the batch"
        )
    for node, bigger in zip(one, two, strict=True):
        if node.op == "output":
            continue
        where = f"{node.op} {node.target}"
        node.meta["array"] = pytree.tree_map(
            lambda a, b, where=where: _array(where, a, b, batch) if isinstance(a, Tensor) else None,
            node.meta["value"],
            bigger.meta["value"],
        )


def _kind(node: fx.Node) -> tuple[str, str]:
    target = str(node.target)
    return node.op, target.rstrip("0123456789") if "_tensor_constant" in target else target


def _array(where: str, a: Tensor, b: Tensor, batch: int) -> Array:
    if a.shape == b.shape:
        return Array(tuple(a.shape), dtype=a.dtype)
    grown = [dim for dim in range(min(a.dim(), b.dim())) if a.shape[dim] != b.shape[dim]]
    dim, unit = grown[0], b.shape[grown[0]] - a.shape[grown[0]]
    if len(grown) > 1 or a.dim() != b.dim() or a.shape[dim] != unit * batch:
        raise UsageError(
            f"{where} mixes examples: its result has shape {list(a.shape)} for {batch} of them and {list(b.shape)} for {batch + 1}"
        )
    return Array(tuple(a.shape), dim, unit, a.dtype)
