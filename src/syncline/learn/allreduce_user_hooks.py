"""What users of all-reduce may hang into a step (A8): functions before forward, after each parameter's gradient, after backward and
before each parameter is applied; and a queue that hands out a step's applications in any order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from syncline.errors import UsageError

Functions = OrderedDict[int, Callable[..., None]]


class Callbacks:
    """One optimizer's hooks, as `optimizer.hooks`; each method takes a function and returns a handle with `remove()`."""

    def __init__(self, model: nn.Module, named: Sequence[tuple[str, nn.Parameter]], *, hooked: bool) -> None:
        self._model, self._named = model, list(named)
        self._hooked = hooked  # the optimizer itself says when a gradient is made
        self._made: Functions = OrderedDict()  # of (name, parameter)
        self._names = {id(parameter): name for name, parameter in named}
        self._handles: list[RemovableHandle] = []
        self._averaged: Functions = OrderedDict()  # of the optimizer
        self._applying: Functions = OrderedDict()  # of (name, parameter)

    def before_forward(self, function: Callable[[nn.Module], None]) -> RemovableHandle:
        """`function(model)` before each forward pass."""
        handle = self._model.register_forward_pre_hook(lambda model, _: function(model))
        self._handles.append(handle)
        return handle

    def after_gradient(self, function: Callable[[str, Tensor], None]) -> RemovableHandle:
        """`function(name, parameter)` when backward has made this learner's gradient of a parameter."""
        if not self._hooked:
            self._hooked = True
            for _, parameter in self._named:
                if parameter.requires_grad:
                    self._handles.append(parameter.register_post_accumulate_grad_hook(self.made))
        return _added(self._made, function)

    def before_applying(self, function: Callable[[Any], None]) -> RemovableHandle:
        """`function(optimizer)` in each step, after backward and before anything is applied.

        `p.grad` is the mean by then, except where buckets are applied one by one.
        """
        return _added(self._averaged, function)

    def before_parameter(self, function: Callable[[str, nn.Parameter], None]) -> RemovableHandle:
        """`function(name, parameter)` before each parameter is applied; its `grad` is the mean."""
        return _added(self._applying, function)

    # -- the optimizer's side ----------------------------------------------------------------------------

    def made(self, parameter: Tensor) -> None:
        for function in list(self._made.values()):
            function(self._names[id(parameter)], parameter)

    def averaged(self, optimizer: Any) -> None:
        for function in list(self._averaged.values()):
            function(optimizer)

    def applying(self, parameters: Sequence[nn.Parameter]) -> None:
        for function in list(self._applying.values()):
            for parameter in parameters:
                if parameter.grad is not None:
                    function(self._names[id(parameter)], parameter)

    def remove(self) -> None:
        """The run is over."""
        for handle in self._handles:
            handle.remove()
        for functions in (self._made, self._averaged, self._applying):
            functions.clear()


def _added(functions: Functions, function: Callable[..., None]) -> RemovableHandle:
    handle = RemovableHandle(functions)
    functions[handle.id] = function
    return handle


@dataclass(slots=True, eq=False)
class Application:
    """Some parameters whose averages come together."""

    names: Sequence[str]
    parameters: Sequence[nn.Parameter]
    ready: Callable[[], bool]  # their averages are there: `apply` does not wait
    run: Callable[[], None]
    applied: bool = False

    def apply(self) -> None:
        """Wait for the averages and run the optimizer on these parameters, once."""
        if not self.applied:
            self.applied = True
            self.run()


class Applications:
    """One step's applications; those that nobody asked for are applied when the block ends."""

    def __init__(self, parts: Sequence[Application]) -> None:
        self._left = list(parts)

    def __len__(self) -> int:
        """How many nobody has been given yet."""
        return len(self._left)

    def __iter__(self) -> Iterator[Application]:
        """As their averages arrive; where none has, from the last layer on."""
        while self._left:
            part = next((part for part in self._left if part.ready()), self._left[0])
            self._left.remove(part)
            yield part

    def take(self, name: str) -> Application:
        """The one that holds this parameter."""
        for part in self._left:
            if name in part.names:
                self._left.remove(part)
                return part
        raise UsageError(
            f"no application with '{name}' is left; there are {[part.names for part in self._left]}"
        )
