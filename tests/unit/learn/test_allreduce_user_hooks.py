"""Functions that users hang into a step, and a step's applications in any order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from syncline.errors import UsageError
from syncline.learn.allreduce_user_hooks import Application, Applications, Callbacks


def callbacks(*, hooked: bool = False) -> tuple[nn.Linear, Callbacks]:
    model = nn.Linear(2, 1)
    return model, Callbacks(model, list(model.named_parameters()), hooked=hooked)


def backward(model: nn.Module) -> None:
    model(torch.ones(3, 2)).sum().backward()


def test_functions_hear_of_each_forward_and_of_each_gradient_that_is_made() -> None:
    model, hooks = callbacks()
    heard: list[Any] = []
    hooks.before_forward(heard.append)
    hooks.after_gradient(lambda name, parameter: heard.append((name, parameter.grad.clone())))
    backward(model)
    assert heard[0] is model
    assert {name: grad.tolist() for name, grad in heard[1:]} == {"weight": [[3.0, 3.0]], "bias": [3.0]}


def test_two_functions_hear_of_a_gradient_once_each_and_a_frozen_parameter_has_none() -> None:
    model, hooks = callbacks()
    model.bias.requires_grad_(False)
    first: list[str] = []
    second: list[str] = []
    hooks.after_gradient(lambda name, parameter: first.append(name))
    hooks.after_gradient(lambda name, parameter: second.append(name))
    backward(model)
    assert first == second == ["weight"]


def test_where_the_optimizer_says_it_backward_is_not_listened_to_twice() -> None:
    model, hooks = callbacks(hooked=True)
    heard: list[str] = []
    hooks.after_gradient(lambda name, parameter: heard.append(name))
    backward(model)
    assert heard == []
    hooks.made(model.weight)
    assert heard == ["weight"]


def test_functions_before_an_application_hear_of_parameters_with_a_gradient() -> None:
    model, hooks = callbacks()
    heard: list[Any] = []
    hooks.before_applying(heard.append)
    hooks.before_parameter(lambda name, parameter: heard.append(name))
    model.weight.grad = torch.zeros(1, 2)
    hooks.averaged("the optimizer")
    hooks.applying(list(model.parameters()))
    assert heard == ["the optimizer", "weight"]


def test_a_handle_takes_its_own_function_out_also_while_functions_run() -> None:
    _, hooks = callbacks()
    heard: list[str] = []
    handles: list[Any] = []

    def once(_: Any) -> None:
        heard.append("once")
        handles[0].remove()

    handles.append(hooks.before_applying(once))
    hooks.before_applying(lambda _: heard.append("always"))
    for _ in range(2):
        hooks.averaged(None)
    assert heard == ["once", "always", "always"]


def test_nothing_is_heard_after_the_run() -> None:
    model, hooks = callbacks()
    heard: list[Any] = []
    for register in (hooks.before_forward, hooks.before_applying):
        register(heard.append)
    for register in (hooks.after_gradient, hooks.before_parameter):
        register(lambda *said: heard.append(said))
    hooks.remove()
    backward(model)
    hooks.averaged(None)
    hooks.applying(list(model.parameters()))
    assert heard == []


# -- applications --------------------------------------------------------------------------------------------


class Step:
    """Parts a (last layer), b, c; which of them have arrived, and which were run."""

    def __init__(self) -> None:
        self.arrived: set[str] = set()
        self.run: list[str] = []
        self.parts = [self._part(name) for name in "abc"]
        self.queue = Applications(self.parts)

    def _part(self, name: str) -> Application:
        return Application([name, name * 2], [], lambda: name in self.arrived, lambda: self.run.append(name))


def test_parts_come_as_they_arrive_and_else_from_the_last_layer_on() -> None:
    step, order = Step(), []
    step.arrived.add("c")
    for part in step.queue:
        order.append((part.names[0], len(step.queue)))
        part.apply()
        if part.names[0] == "c":
            step.arrived.add("b")
    assert order == [("c", 2), ("b", 1), ("a", 0)] and step.run == ["c", "b", "a"]


def test_a_part_is_taken_by_any_of_its_names_and_applied_once() -> None:
    step = Step()
    part = step.queue.take("bb")
    part.apply()
    part.apply()
    assert step.run == ["b"] and [each.names[0] for each in step.queue] == ["a", "c"]


def test_what_is_taken_already_is_refused_with_what_is_left() -> None:
    step = Step()
    step.queue.take("a")
    with pytest.raises(
        UsageError, match=r"no application with 'aa' is left; there are \[\['b', 'bb'\], \['c'"
    ):
        step.queue.take("aa")
