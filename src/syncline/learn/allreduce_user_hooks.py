"""The hooks of all-reduce for users (A8): before forward; after each parameter's gradient; after backward, before applying;
before each parameter is applied. Not responsible for the order of applications: see `Applications` (learn/allreduce_applications.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

Removable = Any  # torch's handles


class Callbacks:
    """One optimizer's hooks, as `optimizer.hooks`; each method takes a function and returns a handle with `remove()`."""

    def __init__(self, model: nn.Module, named: Sequence[tuple[str, nn.Parameter]], *, hooked: bool) -> None:
        self._model, self._named = model, list(named)
        self._hooked = hooked  # the optimizer itself says when a gradient is made
        self._made: list[Callable[[str, Tensor], None]] = []
        self._names = {id(parameter): name for name, parameter in named}
        self._handles: list[Removable] = []
        self._averaged: list[Callable[[Any], None]] = []
        self._applying: list[Callable[[str, nn.Parameter], None]] = []

    def before_forward(self, function: Callable[[nn.Module], None]) -> Handle:
        """`function(model)` before each forward pass."""
        handle = self._model.register_forward_pre_hook(lambda model, _: function(model))
        self._handles.append(handle)
        return Handle(handle.remove)

    def after_gradient(self, function: Callable[[str, Tensor], None]) -> Handle:
        """`function(name, parameter)` when backward has made this learner's gradient of a parameter."""
        if not self._hooked:
            self._hooked = True
            for _, parameter in self._named:
                if parameter.requires_grad:
                    self._handles.append(parameter.register_post_accumulate_grad_hook(self.made))
        self._made.append(function)
        return Handle(lambda: self._made.remove(function))

    def before_applying(self, function: Callable[[Any], None]) -> Handle:
        """`function(optimizer)` in each step, after backward and before anything is applied.

        `p.grad` is the mean by then, except where buckets are applied one by one.
        """
        self._averaged.append(function)
        return Handle(lambda: self._averaged.remove(function))

    def before_parameter(self, function: Callable[[str, nn.Parameter], None]) -> Handle:
        """`function(name, parameter)` before each parameter is applied; its `grad` is the mean."""
        self._applying.append(function)
        return Handle(lambda: self._applying.remove(function))

    # -- the optimizer's side ----------------------------------------------------------------------------

    def made(self, parameter: Tensor) -> None:
        for function in list(self._made):
            function(self._names[id(parameter)], parameter)

    def averaged(self, optimizer: Any) -> None:
        for function in list(self._averaged):
            function(optimizer)

    def applying(self, parameters: Sequence[nn.Parameter]) -> None:
        for function in list(self._applying):
            for parameter in parameters:
                if parameter.grad is not None:
                    function(self._names[id(parameter)], parameter)

    def remove(self) -> None:
        """The run is over."""
        for handle in self._handles:
            handle.remove()
        for functions in (self._made, self._averaged, self._applying):
            functions.clear()  # type: ignore[attr-defined]


class Handle:
    """Takes a hook away again."""

    def __init__(self, remove: Callable[[], Any]) -> None:
        self._remove = remove

    def remove(self) -> None:
        self._remove()
