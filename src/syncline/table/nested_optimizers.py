"""Optimizers that hold parameters or other optimizers in their attributes: Lookahead and its like (M5).

Such a one goes to one shard as it is, with all that it holds; where it holds a parameter, it holds the shard's there. `look`
finds that out by pickling, which passes through containers, objects and closures alike. `keep` and `take_up` turn its state into
tensors and JSON for a checkpoint and back, without pickle. What a module holds globally is not seen.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.errors import LayoutError, RunError

Node = Any  # of JSON: see `_Keeping`
Kept = tuple[Node, dict[str, Tensor]]
PREFIX = "w/"  # of the tensors' names
_UNCHANGED = (FunctionType, BuiltinFunctionType, MethodType, partial, type, torch.dtype, torch.device)


@dataclass(slots=True)
class Held:
    """What an optimizer holds beside its groups and state."""

    wraps: bool = False  # parameters, or other optimizers
    optimizers: list[Optimizer] = field(default_factory=list)  # others
    problem: str | None = None  # why it cannot go to a shard

    def refuse(self, optimizer: Optimizer) -> None:
        if self.problem:
            raise LayoutError(
                f"{type(optimizer).__name__} {self.problem}, which a server's shard does not have; keep only parameters of "
                "its own groups and optimizers over them, or use topology='allreduce', where every learner runs it whole"
            )


def look(optimizer: Optimizer) -> Held:
    """At everything that can be reached from it."""
    found = Held()
    inside = {
        **attributes(optimizer),
        "state": list(optimizer.state.values()),
        "param_groups": [{**group, "params": ()} for group in optimizer.param_groups],
    }
    for name, value in inside.items():
        try:
            _Looking(optimizer, found, name).dump(value)
        except _Stop:
            break
        except Exception as error:
            found.problem = f"holds in '{name}' something that cannot be sent ({error})"
    if any(vars(optimizer).get(f"_optimizer_step_{when}_hooks") for when in ("pre", "post")):
        found.problem = found.problem or "has step hooks"
    return found


def parameters_of(optimizer: Optimizer) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Its own, without hooks, groups and state."""
    return {
        key: value
        for key, value in vars(optimizer).items()
        if key not in ("state", "param_groups") and not key.endswith("_hooks")
    }


class _Stop(Exception):
    pass


class _Pickling(cloudpickle.Pickler):
    """Parameters by their number; optimizers with all that they have, of which torch's own pickling drops a part."""

    def __init__(self, optimizer: Optimizer, into: io.BytesIO) -> None:
        super().__init__(into)
        self._numbers = {id(p): number for number, p in enumerate(parameters_of(optimizer))}

    def persistent_id(self, value: Any) -> Any:
        return self._numbers.get(id(value)) if isinstance(value, Tensor) else None

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Optimizer):
            hooks = {key: OrderedDict() for key in vars(value) if key.endswith("_hooks")}  # type: ignore[var-annotated]
            return _bare, (type(value),), {**vars(value), **hooks}, None, None, _fill
        return super().reducer_override(value)


class _Looking(_Pickling):
    """Notes what it passes, and keeps nothing."""

    def __init__(self, optimizer: Optimizer, found: Held, name: str) -> None:
        super().__init__(optimizer, io.BytesIO())
        self._optimizer, self._found, self._name = optimizer, found, name
        self._memory = {_memory(parameter) for parameter in parameters_of(optimizer)} - {0}

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, nn.Module):
            self._stop(f"holds a module in '{self._name}' ({type(value).__name__})")
        if not isinstance(value, Tensor):
            return None
        if (number := super().persistent_id(value)) is not None:
            self._found.wraps = True
        elif isinstance(value, nn.Parameter):
            self._stop(f"holds a parameter in '{self._name}' that is in none of its groups")
        elif _memory(value) in self._memory:
            self._stop(f"holds a view of a parameter's memory in '{self._name}'")
        return number or -1

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Optimizer):
            self._found.wraps = True
            if value is not self._optimizer and all(value is not each for each in self._found.optimizers):
                self._found.optimizers.append(value)
        return super().reducer_override(value)

    def _stop(self, problem: str) -> None:
        self._found.problem = problem
        raise _Stop


def _memory(tensor: Tensor) -> int:
    """Where it lies; 0 where it has no memory of its own."""
    dense = tensor.layout == torch.strided and not tensor.is_meta
    return tensor.untyped_storage().data_ptr() if dense else 0


def _bare(kind: type[Optimizer]) -> Optimizer:
    return kind.__new__(kind)


def _fill(optimizer: Optimizer, values: dict[str, Any]) -> None:
    vars(optimizer).update(values)


# -- to a shard ----------------------------------------------------------------------------------------------


def packed(optimizer: Optimizer) -> bytes:
    """The optimizer with all that it holds."""
    into = io.BytesIO()
    _Pickling(optimizer, into).dump(optimizer)
    return into.getvalue()


def unpacked(blob: bytes, parameters: Mapping[int, nn.Parameter]) -> Optimizer:
    """The same over other parameters, by their numbers."""
    unpickler = pickle.Unpickler(io.BytesIO(blob))
    unpickler.persistent_load = parameters.__getitem__  # type: ignore[method-assign, assignment]
    return unpickler.load()  # type: ignore[no-any-return]


# -- to a checkpoint -----------------------------------------------------------------------------------------


class _Keeping:
    """An optimizer as JSON and tensors.

    A node is [kind, content]: "value" a plain one, "tensor" its name and whether it is on a GPU, "parameter" its number, "dict" pairs of key and node, "list"
    and "tuple" nodes, "optimizer" pairs of attribute and node, "again" the number of a container that came before, "same" what a
    new one has there.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._seen: dict[int, int] = {}
        self._memory = {_memory(parameter): "" for parameter in parameters}
        self.tensors: dict[str, Tensor] = {}

    def node(self, value: Any, where: str) -> Node:
        if value is None or isinstance(value, bool | int | float | str):
            return ["value", value]
        if isinstance(value, Tensor):
            return self._tensor(value, where)
        if id(value) in self._seen:
            return ["again", self._seen[id(value)]]
        if isinstance(value, Optimizer | dict | list | tuple):
            self._seen[id(value)] = len(self._seen)
        if isinstance(value, Optimizer):
            own = [(key, each) for key, each in vars(value).items() if not key.endswith("_hooks")]
            return ["optimizer", [[key, self.node(each, f"{where}.{key}")] for key, each in own]]
        if isinstance(value, dict):
            return [
                "dict",
                [[self._key(k, where), self.node(v, f"{where}[{k!r:.20}]")] for k, v in value.items()],
            ]
        if isinstance(value, list | tuple):
            kind = "list" if isinstance(value, list) else "tuple"
            return [kind, [self.node(each, f"{where}[]") for each in value]]
        if isinstance(value, _UNCHANGED):
            return ["same", None]
        raise RunError(f"{where} is a {type(value).__name__}")

    def _tensor(self, value: Tensor, where: str) -> Node:
        if (number := self._numbers.get(id(value))) is not None:
            return ["parameter", number]
        name = self._memory.setdefault(_memory(value) or id(value), f"{PREFIX}{len(self.tensors)}")
        if self.tensors.setdefault(name, value) is not value:
            raise RunError(f"{where} shares memory with another tensor")
        return ["tensor", [name, value.is_cuda]]

    def _key(self, key: Any, where: str) -> Node:
        if isinstance(key, Tensor) and id(key) in self._numbers:
            return ["parameter", self._numbers[id(key)]]
        if isinstance(key, str | int):
            return ["value", key]
        raise RunError(f"a key of {where} is a {type(key).__name__}")


def keep(optimizer: Optimizer, parameters: Sequence[Tensor]) -> Kept:
    """All of its state; nothing is copied. RunError where something is neither a tensor nor plain, nor a container."""
    keeping = _Keeping(parameters)
    return keeping.node(optimizer, type(optimizer).__name__), keeping.tensors


def take_up(optimizer: Optimizer, kept: Kept, parameters: Sequence[Tensor]) -> None:
    """Give a new optimizer of the same kind that state, in place: who shares a container still does."""
    node, tensors = kept
    _Taking({name: tensor.clone() for name, tensor in tensors.items()}, parameters).made(node, optimizer)


class _Taking:
    """The inverse of `_Keeping`, in what a new optimizer has there."""

    def __init__(self, tensors: dict[str, Tensor], parameters: Sequence[Tensor]) -> None:
        self._tensors, self._parameters = tensors, parameters
        self._containers: list[Any] = []

    def made(self, node: Node, new: Any) -> Any:
        kind, content = node
        if kind == "value":
            return content
        if kind == "tensor":
            name, on_device = content
            if on_device:
                self._tensors[name] = self._tensors[name].to(self._parameters[0].device)
            return self._tensors[name]
        if kind in ("parameter", "again"):
            return (self._parameters if kind == "parameter" else self._containers)[content]
        return new if kind == "same" else self._filled(kind, content, new)

    def _filled(self, kind: str, content: Node, new: Any) -> Any:
        """A container, known by its number before it is filled: it may be in itself."""
        types = {"optimizer": Optimizer, "dict": dict, "list": list, "tuple": tuple}
        into: Any = new if isinstance(new, types[kind]) else types[kind]()
        place = len(self._containers)
        self._containers.append(into)
        if kind == "optimizer":
            vars(into).update((key, self.made(each, vars(into).get(key))) for key, each in content)
        elif kind == "dict":
            nodes = {self.made(key, None): each for key, each in content}
            values = {key: self.made(each, into.get(key)) for key, each in nodes.items()}
            into.clear()
            into.update(values)
        else:
            found = [self.made(each, old) for each, old in zip_longest(content, into[: len(content)])]
            if kind == "list":
                into[:] = found
            else:
                self._containers[place] = tuple(found)
        return self._containers[place]
