"""Optimizers that hold others: what is found in them, and their state as tensors and JSON and back."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from syncline.errors import RunError
from syncline.table.nested_optimizers import keep, look, packed, take_up, unpacked


class Holding(Optimizer):
    """Holds an optimizer over its own parameters, and what is given."""

    def __init__(self, params: list[nn.Parameter], **held: Any) -> None:
        super().__init__(params, {"lr": 0.5})
        self.base = SGD(self.param_groups, momentum=0.9)
        self.param_groups = self.base.param_groups
        vars(self).update(held)

    def step(self, closure: Any = None) -> None:
        self.base.step()


def parameters(value: float = 1.0) -> list[nn.Parameter]:
    return [nn.Parameter(torch.full((2,), value)), nn.Parameter(torch.full((3, 1), value))]


def stepped(optimizer: Optimizer, params: list[nn.Parameter]) -> None:
    for parameter in params:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_torchs_own_hold_nothing() -> None:
    for kind in (SGD, Adam):
        optimizer = kind(parameters(), lr=0.1)
        stepped(optimizer, optimizer.param_groups[0]["params"])
        held = look(optimizer)
        assert (held.wraps, held.optimizers, held.problem) == (False, [], None)


def test_parameters_are_found_wherever_pickle_comes() -> None:
    for hide in (lambda p: {"a": [p]}, lambda p: lambda: p, lambda p: torch.optim.lr_scheduler.LambdaLR):
        params = parameters()
        optimizer = SGD(params, lr=0.1)
        optimizer.held = hide(params[0])  # type: ignore[attr-defined]
        assert look(optimizer).wraps == (hide(params[0]) is not torch.optim.lr_scheduler.LambdaLR)


def test_optimizers_inside_optimizers_are_found_once_each() -> None:
    params = parameters()
    inner = Holding(params)
    held = look(Holding(params, second=inner, again=[inner]))
    assert len(held.optimizers) == 3 and held.wraps


def test_over_other_parameters_it_steps_those() -> None:
    params, others = parameters(), parameters(2.0)
    optimizer = Holding(params)
    stepped(optimizer, params)
    twin = unpacked(packed(optimizer), dict(enumerate(others)))
    assert twin.param_groups is twin.base.param_groups  # type: ignore[attr-defined]
    stepped(twin, others)  # with the momentum of the first
    assert others[0].tolist() == pytest.approx([2.0 - 0.5 * 1.9] * 2) and params[0].tolist() == [0.5] * 2


def as_json(kept: tuple[Any, dict[str, Tensor]]) -> tuple[Any, dict[str, Tensor]]:
    return json.loads(json.dumps(kept[0])), {name: tensor.clone() for name, tensor in kept[1].items()}


def test_what_is_shared_is_shared_again() -> None:
    params, others = parameters(), parameters(2.0)
    shared = torch.zeros(2)
    optimizer = Holding(
        params, first=[shared, {"deep": (1, None, "x")}], second={"same": shared, 3: params[1]}
    )
    optimizer.fast_state = optimizer.base.state  # type: ignore[attr-defined]
    stepped(optimizer, params)
    blob = packed(optimizer)
    stepped(optimizer, params)
    shared += 7
    optimizer.first.append([True])  # type: ignore[attr-defined]
    kept = as_json(keep(optimizer, params))
    shared += 7  # what was kept is of before

    twin: Any = unpacked(blob, dict(enumerate(others)))
    take_up(twin, kept, others)
    assert twin.param_groups is twin.base.param_groups and twin.fast_state is twin.base.state
    assert twin.first[0] is twin.second["same"] and twin.first[0].tolist() == [7.0, 7.0]
    assert twin.first[1:] == [{"deep": (1, None, "x")}, [True]] and twin.second[3] is others[1]
    assert twin.base.state[others[0]]["momentum_buffer"].tolist() == pytest.approx([1.9, 1.9])
    assert twin.param_groups[0]["params"][0] is others[0]


@pytest.mark.parametrize(
    "held, problem",
    [
        ({"seen": {1}}, "Holding.seen is a set"),
        ({"by": {(1, 2): 3}}, "a key of Holding.by is a tuple"),
        (
            {"parts": [(whole := torch.zeros(4))[:2], whole]},
            r"Holding.parts\[\] shares memory with another tensor",
        ),
    ],
)
def test_what_cannot_be_kept_is_named(held: dict[str, Any], problem: str) -> None:
    params = parameters()
    with pytest.raises(RunError, match=problem):
        keep(Holding(params, **held), params)
