"""What users of all-reduce may hang into a step (A8): functions before forward, after each parameter's gradient, after backward and
before each parameter is applied; and a queue that hands out a step's applications in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from syncline.errors import UsageError

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


class Application:
    """Some parameters whose averages come together."""

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        ready: Callable[[], bool],
        run: Callable[[], None],
    ) -> None:
        self.names, self.parameters = tuple(names), tuple(parameters)
        self._ready, self._run = ready, run
        self.applied = False

    def ready(self) -> bool:
        """Their averages are there: `apply` does not wait."""
        return self._ready()

    def apply(self) -> None:
        """Wait for the averages and run the optimizer on these parameters, once."""
        if not self.applied:
            self.applied = True
            self._run()


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
            yield self._give(next((part for part in self._left if part.ready()), self._left[0]))

    def take(self, name: str) -> Application:
        """The one that holds this parameter."""
        for part in self._left:
            if name in part.names:
                return self._give(part)
        raise UsageError(
            f"no application with '{name}' is left; there are {[part.names for part in self._left]}"
        )

    def _give(self, part: Application) -> Application:
        self._left.remove(part)
        return part
