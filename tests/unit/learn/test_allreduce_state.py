"""What a checkpoint holds of a learner's table, and which options of an optimizer are the loop's, which its own."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from syncline.learn.allreduce_state import GroupChanges, as_in, cut_table, load_table, plain_groups
from syncline.protocols.sequence import Account
from syncline.roles.checkpoint_manifest import TableState
from syncline.table.checkpoint_content import Content
from syncline.table.checkpoints import CheckpointError
from syncline.table.layout import lay_out


def model_and_adam(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    return model, torch.optim.Adam(model.parameters(), lr=0.1, **options)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for number in range(count):
        optimizer.zero_grad()
        model(torch.full((4, 3), number + 1.0)).square().sum().backward()
        optimizer.step()


class Kept(TableState):
    """With its content at hand."""

    def __init__(self, content: Content) -> None:
        vars(self).update(content=content, account=Account(version=0, gradients=0, histogram={}))


def kept(model: nn.Module, optimizer: torch.optim.Optimizer) -> Kept:
    parameters = list(model.parameters())
    values = {index: each.detach().clone() for index, each in enumerate(parameters)}
    state = {
        index: {key: v.clone() for key, v in optimizer.state[each].items()}
        for index, each in enumerate(parameters)
    }
    return Kept(Content(values, state, [], None))


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"capturable": False, "fused": True}])
def test_a_table_goes_on_with_the_bits_of_one_that_was_never_kept(options: dict[str, Any]) -> None:
    model, adam = model_and_adam(**options)
    steps(model, adam, 2)
    again, other = model_and_adam(**options)
    steps(again, other, 1)  # what it has now is not what was kept
    content = kept(model, adam)
    load_table(other, list(again.parameters()), content, lambda index, value: value)
    for each in (model, again):
        steps(each, adam if each is model else other, 2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    first = content.content.state[0]  # type: ignore[index]
    assert float(first["step"]) == 2.0, "what was loaded is a copy"


def test_each_process_takes_its_part_of_what_is_kept() -> None:
    model, adam = model_and_adam()
    steps(model, adam, 1)
    half = nn.Linear(3, 1)
    sgd = torch.optim.Adam(half.parameters(), lr=0.1)

    def first_row(index: int, value: Any) -> Any:
        return value[:1] if isinstance(value, Tensor) and value.dim() else value

    load_table(sgd, list(half.parameters()), kept(model, adam), first_row)
    whole = next(iter(model.parameters()))
    assert torch.equal(half.weight, whole[:1])
    assert torch.equal(sgd.state[half.weight]["exp_avg"], adam.state[whole]["exp_avg"][:1])


def test_a_cut_has_values_and_states_by_name_and_shares_nothing() -> None:
    model, adam = model_and_adam()
    steps(model, adam, 1)
    parameters = list(model.parameters())
    layout, _ = lay_out(model, [parameters], cuttable=False, shards=1)
    states = {0: {**adam.state[parameters[0]], "name": "first"}}
    tensors, notes = cut_table(adam, layout, [each.detach() for each in parameters], states)
    assert {name for name in tensors if name.startswith("p/")} == {f"p/{entry}/0" for entry in range(4)}
    assert {name for name in tensors if name.startswith("s/")} == {
        "s/0/0/step",
        "s/0/0/exp_avg",
        "s/0/0/exp_avg_sq",
    }
    assert notes == {"0/0": {"name": "first"}}
    before = tensors["p/0/0"].clone()
    steps(model, adam, 1)
    assert torch.equal(tensors["p/0/0"], before) and not torch.equal(parameters[0], before)


@pytest.mark.parametrize(
    ("name", "value"),
    [("slow", torch.zeros(2)), ("cache", {0: torch.zeros(2)}), ("parts", [torch.zeros(2)]), ("inner", None)],
)
def test_state_in_other_places_is_refused_by_its_name(name: str, value: Any) -> None:
    model, adam = model_and_adam()
    layout, _ = lay_out(model, [list(model.parameters())], cuttable=False, shards=1)
    setattr(adam, name, value if value is not None else model_and_adam()[1])
    with pytest.raises(CheckpointError, match=rf"Adam keeps a \w+ in \.{name}, which no checkpoint holds"):
        cut_table(adam, layout, [each.detach() for each in model.parameters()], {})


def test_options_go_through_json_and_come_back_as_the_group_has_them() -> None:
    group = {"lr": torch.tensor(0.5), "betas": (0.9, 0.99), "foreach": None, "hook": print, "each": [print]}
    (plain,) = plain_groups([group])
    assert plain == {"lr": 0.5, "betas": [0.9, 0.99], "foreach": None}
    back = as_in(group, json.loads(json.dumps({**plain, "new": [1]})))
    assert back["betas"] == (0.9, 0.99) and back["foreach"] is None and back["new"] == [1]
    assert torch.equal(back["lr"], torch.tensor(0.5)) and back["lr"] is not group["lr"]


class Counting(torch.optim.SGD):
    """Keeps a count and an estimate in its groups, as some do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            self.seen = group["lr"]


def test_a_late_step_has_the_options_that_its_gradient_had() -> None:
    optimizer = Counting([nn.Parameter(torch.zeros(1))], lr=0.4)
    changes = GroupChanges(optimizer)
    early = changes.now()
    optimizer.param_groups[0]["lr"] = 0.2  # a scheduler
    with changes.as_of(early, 0.5):
        optimizer.step()
    assert optimizer.seen == 0.2, "0.4 as it was, times the factor"
    assert optimizer.param_groups[0]["lr"] == 0.2, "what the loop has set stays"
    with changes.as_of([], 1.0):
        optimizer.step()
    assert optimizer.seen == 0.2


def test_a_late_step_has_a_rate_that_is_a_tensor_as_it_was() -> None:
    rate = torch.tensor(0.4)
    optimizer = Counting([nn.Parameter(torch.zeros(1))], lr=rate)
    changes = GroupChanges(optimizer)
    early = changes.now()
    rate.fill_(0.2)  # a scheduler
    with changes.as_of(early, 1.0):
        optimizer.step()
    assert torch.equal(optimizer.seen, torch.tensor(0.4))
    assert optimizer.param_groups[0]["lr"] is rate and rate == torch.tensor(0.2)


def test_what_the_optimizer_changes_in_its_groups_is_its_state() -> None:
    optimizer = Counting([nn.Parameter(torch.zeros(1))], lr=0.4)
    changes = GroupChanges(optimizer)
    early = changes.now()
    for number in range(3):
        with changes.as_of(early, 1.0):
            optimizer.step()
        assert optimizer.param_groups[0]["k"] == number + 1, "an early wish does not turn it back"
    assert changes.own() == [{"k": 3}]
    assert "k" not in changes.now()[0], "it is none of the loop's"
    assert GroupChanges(optimizer, made=["k"]).own() == [{"k": 3}]


def test_the_factor_is_for_the_rates_of_optimizers_inside_too_once_each() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    inner, outer = torch.optim.SGD([parameter], lr=0.4), torch.optim.SGD([parameter], lr=0.8)
    shared = torch.optim.SGD([parameter], lr=0.8)
    shared.param_groups = outer.param_groups
    changes = GroupChanges(outer, [inner, shared])
    with changes.as_of([], 0.5):
        assert (inner.param_groups[0]["lr"], outer.param_groups[0]["lr"]) == (0.2, 0.4)
    assert (inner.param_groups[0]["lr"], outer.param_groups[0]["lr"]) == (0.4, 0.8)


def test_an_option_that_the_step_itself_sets_stays_set() -> None:
    optimizer = Counting([nn.Parameter(torch.zeros(1))], lr=0.4)
    changes = GroupChanges(optimizer)
    with changes.as_of([], 0.5):
        optimizer.param_groups[0]["lr"] = 0.9  # as optimizers without a rate of their own do
    assert optimizer.param_groups[0]["lr"] == 0.9
