"""Initialisers of parameters by name, as job files give them: "gaussian", or {name = "gaussian", std = 0.01}."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from syncline.dial import nearest
from syncline.nn.file_arguments import Number, Positive, wrong_arguments, wrong_values

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
