"""What files call by name: layer types (built-in ones, users' own by `@syncline.layer`, those of installed packages), and
initialisers of parameters, "gaussian" or {name = "gaussian", std = 0.01}.

A type is any callable that gives an `nn.Module`. One whose first argument is called `shape` gets the shape that its source
gives, without the batch; `shapes` is a list of them, for several sources. Not responsible for what is built in (layers.py).
"""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from syncline.dial import nearest
from syncline.errors import UsageError
from syncline.nn.argument_checks import Number, Positive, wrong_arguments, wrong_values

GROUP = "syncline.layers"  # of entry points: name = "package.module:Class"
Role = Literal["layer", "input", "loss"]
Made = TypeVar("Made", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class LayerType:
    """What a layer's type stands for."""

    name: str
    make: Callable[..., Any]
    role: Role = "layer"
    built_in: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Without what makes it: a net that travels is made already."""
        return LayerType, (self.name, nn.Identity, self.role, self.built_in)

    @property
    def wants(self) -> Literal["", "shape", "shapes"]:
        """The name of its first argument, where that is what the sources give."""
        try:
            first = next(iter(inspect.signature(self.make).parameters), "")
        except (TypeError, ValueError):
            return ""
        return first if first in ("shape", "shapes") else ""  # type: ignore[return-value]


TYPES: dict[str, LayerType] = {}


def built_in(name: str, role: Role = "layer") -> Callable[[Made], Made]:
    def register(make: Made) -> Made:
        TYPES[name] = LayerType(name, make, role, built_in=True)
        return make

    return register


def layer(name: str, *, loss: bool = False) -> Callable[[Made], Made]:
    """Make an `nn.Module` class (or a function that gives one) a layer type of job files and nets.

        @sl.layer("scale")
        class Scale(nn.Module):
            def __init__(self, shape, factor=1.0): ...      # shape: what the source gives, without the batch
            def forward(self, x): ...

    The other arguments are keys of the layer. With `loss` its forward gives a scalar, which is trained.
    """
    if not isinstance(name, str) or not name.strip():
        raise UsageError(f'layer takes the name of the type, as @sl.layer("scale"), got {name!r}')
    if name in TYPES and TYPES[name].built_in:
        raise UsageError(f"{name!r} is a built-in layer type; choose another name")

    def register(make: Made) -> Made:
        if not callable(make) or isinstance(make, nn.Module):
            raise UsageError(f"layer {name!r} must be an nn.Module class or a function that gives a module")
        TYPES[name] = LayerType(name, make, "loss" if loss else "layer")
        return make

    return register


def find_type(name: Any) -> LayerType:
    """By name; raises UsageError with what there is."""
    if isinstance(name, str):
        if name in TYPES:
            return TYPES[name]
        for point in importlib.metadata.entry_points(group=GROUP, name=name):
            try:
                layer(name)(point.load())
            except Exception as error:  # the package's own code runs here
                raise UsageError(
                    f"{name!r} of {point.value} failed to load: {type(error).__name__}: {error}"
                ) from error
            return TYPES[name]
    if isinstance(name, str) and ":" in name:
        raise UsageError(f"{name!r} is not registered here; import it and give it to sl.layer({name!r})")
    instead = nearest(name, TYPES) or f"; there are: {', '.join(TYPES)}; own ones by @sl.layer"
    raise UsageError(f"no layer type is called {name!r}{instead}")


# -- initialisers ----------------------------------------------------------------------------------------------

Initialise = Callable[..., Any]


def constant(tensor: Tensor, *, value: Number) -> None:
    nn.init.constant_(tensor, value)


def uniform(tensor: Tensor, *, low: Number = -0.05, high: Number = 0.05) -> None:
    nn.init.uniform_(tensor, low, high)


def gaussian(tensor: Tensor, *, mean: Number = 0.0, std: Positive = 0.01) -> None:
    nn.init.normal_(tensor, mean, std)


def _with_gain(fill: Initialise) -> Initialise:
    def make(tensor: Tensor, *, gain: Positive = 1.0) -> None:
        fill(tensor, gain)

    return make


def _for_relu(fill: Initialise) -> Initialise:
    def make(tensor: Tensor) -> None:
        fill(tensor, nonlinearity="relu")

    return make


INITIALISERS: dict[str, Initialise] = {
    "constant": constant,
    "uniform": uniform,
    "gaussian": gaussian,
    "orthogonal": _with_gain(nn.init.orthogonal_),
    "xavier_uniform": _with_gain(nn.init.xavier_uniform_),
    "xavier_normal": _with_gain(nn.init.xavier_normal_),
    "kaiming_uniform": _for_relu(nn.init.kaiming_uniform_),
    "kaiming_normal": _for_relu(nn.init.kaiming_normal_),
}


def wrong_initialiser(given: Any) -> Iterator[str]:
    """What is wrong with one."""
    name, arguments = _parts(given)
    if not isinstance(name, str):
        yield f"expected the name of an initialiser, or a table with it, got {given!r}"
    elif name not in INITIALISERS:
        yield f"no initialiser is called {name!r}{nearest(name, INITIALISERS)}; there are: {', '.join(INITIALISERS)}"
    else:
        found = INITIALISERS[name]
        for argument, words in [*wrong_arguments(found, 1, arguments), *wrong_values(found, arguments)]:
            yield f"{name}: {argument}: {words}" if argument else f"{name}: {words}"


@torch.no_grad()
def initialise(parameter: Tensor, given: Any) -> None:
    name, arguments = _parts(given)
    INITIALISERS[name](parameter, **arguments)


def _parts(given: Any) -> tuple[Any, dict[str, Any]]:
    if isinstance(given, Mapping):
        return given.get("name"), {key: value for key, value in given.items() if key != "name"}
    return given, {}
