"""A model as a graph of layers and functions with all shapes, traced on meta tensors without being changed.

Shapes are known while tracing, so that code may ask for them; values are not. Every graph is traced for two batch
sizes: the dimension that grows is that of the examples, and nothing about it has to be guessed. Not responsible for
what layers mean: `rules` are.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import operator
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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


# -- arguments and results as trees of tensors -----------------------------------------------------------------


class _Fields:
    """Dataclass instance that `pytree` flattens; unflattening makes an instance with new field values."""

    def __init__(self, record: Any) -> None:
        self.record = record


def _flatten_fields(opened: _Fields) -> tuple[list[Any], type]:
    names = (field.name for field in dataclasses.fields(opened.record))
    return [_open(getattr(opened.record, name, None)) for name in names], type(opened.record)


def _unflatten_fields(values: Iterable[Any], kind: Any) -> Any:
    record = kind.__new__(kind)
    for field, value in zip(dataclasses.fields(kind), values, strict=True):
        object.__setattr__(record, field.name, value)
    return record


pytree.register_pytree_node(_Fields, _flatten_fields, _unflatten_fields)


def _open(value: Any) -> Any:
    def opened(leaf: Any) -> Any:
        if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
            return leaf
        fields = _Fields(leaf)
        return fields if any(map(is_array, pytree.tree_leaves(fields))) else leaf

    return pytree.tree_map(opened, value)


def is_array(value: Any) -> bool:
    """Tell tensors, and the proxies that stand for them in a trace, from other values."""
    return isinstance(value, Tensor | fx.Proxy)


def flattened(what: str, value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Flatten tuples, lists, mappings and dataclasses. Refuse objects that hide tensors from `pytree`."""
    leaves, spec = pytree.tree_flatten(_open(value))
    for leaf in leaves:
        held = {} if is_array(leaf) or isinstance(leaf, nn.Module | type) else getattr(leaf, "__dict__", {})
        if any(map(is_array, pytree.tree_leaves(list(held.values())))):
            raise UsageError(
                f"{what} has a {type(leaf).__name__}, whose tensors cannot be seen: use tensors, tuples, lists, dictionaries or "
                "dataclasses, or make the type known with torch.utils._pytree.register_pytree_node"
            )
    return leaves, spec


class Inputs:
    """Arguments of one call of `forward`, including defaults: the tensors by name, and all other values."""

    def __init__(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        name = type(model).__name__
        try:
            self._bound = inspect.signature(model.forward).bind(*args, **kwargs)
        except TypeError as error:
            raise UsageError(f"the input does not fit {name}.forward: {error}") from error
        self._bound.apply_defaults()
        self.tensors: dict[str, Tensor] = {}
        self._arguments: dict[str, tuple[list[Any], pytree.TreeSpec]] = {}
        for argument, value in self._bound.arguments.items():
            leaves, spec = flattened(f"{name}.forward: {argument!r}", value)
            self._arguments[argument] = leaves, spec
            found = [leaf for leaf in leaves if is_array(leaf)]
            names = [argument] if len(found) == 1 else [f"{argument}.{at}" for at in range(len(found))]
            self.tensors |= zip(names, found, strict=True)

    @property
    def key(self) -> str:
        """Text that is equal for calls that differ only in the values of their tensors."""

        def shown(leaf: Any) -> Any:
            return (tuple(leaf.shape), leaf.dtype, leaf.device) if is_array(leaf) else leaf

        return str([(spec, [*map(shown, leaves)]) for leaves, spec in self._arguments.values()])

    def filled(self, values: Iterable[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments with these values in place of the tensors."""
        left = iter(values)
        arguments = OrderedDict(
            (name, pytree.tree_unflatten([next(left) if is_array(leaf) else leaf for leaf in leaves], spec))
            for name, (leaves, spec) in self._arguments.items()
        )
        bound = inspect.BoundArguments(self._bound.signature, arguments)
        return bound.args, bound.kwargs


# -- tracing ---------------------------------------------------------------------------------------------------


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


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


class _Tracer(fx.Tracer):
    """Computes every node on meta tensors when it is made."""

    def __init__(
        self, leaf: Callable[[nn.Module], bool], inputs: Inputs, values: Mapping[str, Tensor]
    ) -> None:
        super().__init__()
        self._leaf, self._inputs, self._given = leaf, inputs, values
        self.device = next(iter(inputs.tensors.values())).device
        self._inside, self._thread = False, threading.get_ident()
        self.result: tuple[list[Any], pytree.TreeSpec] | None = None

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        """Make one placeholder for each tensor of the arguments. Keep the structure of the result beside the graph."""
        args, kwargs = self._inputs.filled(
            [self.create_proxy("placeholder", name, (), {}) for name in self._given]
        )

        def forward(root: nn.Module) -> tuple[Any, ...]:
            self.result = flattened(
                f"what {type(root).__name__}.forward returns", root_fn(root, *args, **kwargs)
            )
            return tuple(filter(is_array, self.result[0]))

        return forward, [self.root]

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

    def create_node(self, kind: str, target: Any, *rest: Any, **more: Any) -> fx.Node:
        node = super().create_node(kind, target, *rest, **more)
        if kind != "output":
            self._inside = True
            try:
                node.meta["value"] = self._value(node)
            finally:
                self._inside = False
            if len(_tensors(node.meta["value"])) < len(_tensors(_open(node.meta["value"]))):
                raise UsageError(
                    f"{node.op} {node.target} gives a dataclass: between layers use tensors, tuples, lists or dictionaries"
                )
        return node

    def _value(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return self._given[str(node.target)]
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
    """Graph with tensors on meta in `meta["value"]` of its nodes, and an Array for each of them in `meta["array"]`.

    `leaves` and `spec` are the flattened result of `forward`; the graph's output holds those leaves that are arrays.
    """

    graph: fx.Graph
    batch: int
    leaves: list[Any]
    spec: pytree.TreeSpec


def trace(
    model: nn.Module, inputs: Inputs, *, leaf: Callable[[nn.Module], bool], batch_dim: int = 0
) -> Traced:
    """The graph of a `skeleton` for inputs like these."""
    tensors = inputs.tensors.values()
    batch = next((tensor.shape[batch_dim] for tensor in tensors if tensor.dim() > batch_dim), None)
    if batch is None:
        raise UsageError(
            f"an example input needs a tensor with a dimension {batch_dim}, that of the examples"
        )

    def one_more(tensor: Tensor) -> Tensor:
        sizes = list(tensor.shape)
        if len(sizes) > batch_dim and sizes[batch_dim] == batch:
            sizes[batch_dim] += 1
        return torch.empty(sizes, dtype=tensor.dtype, device="meta")

    with _one_at_a_time:
        graph, (leaves, spec) = _traced(model, inputs, leaf, _on_meta)
        other, _ = _traced(model, inputs, leaf, one_more)
    _find_batches(type(model).__name__, graph, other, batch)
    return Traced(graph, batch, leaves, spec)


def _traced(
    model: nn.Module,
    inputs: Inputs,
    leaf: Callable[[nn.Module], bool],
    like: Callable[[Tensor], Tensor],
) -> tuple[fx.Graph, tuple[list[Any], pytree.TreeSpec]]:
    name = type(model).__name__
    tracer = _Tracer(leaf, inputs, {key: like(tensor) for key, tensor in inputs.tensors.items()})
    try:
        with torch.no_grad(), _NoDraws(name):
            graph = tracer.trace(model)
    except UsageError:
        raise
    except Exception as error:
        line = (str(error).strip().splitlines() or ["no message"])[0]
        raise UsageError(
            f"{name} cannot be traced ({type(error).__name__}: {line}): what depends on values, or is no plain tensor code, "
            "has to be a module of its own, made known with layer(...)"
        ) from error
    assert tracer.result is not None
    return graph, tracer.result


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
