"""Ways to a gradient: which arguments name which, what each leaves in `.grad`, and what it refuses."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncline.errors import UsageError
from syncline.learn.gradient_ways import (
    REGULARISERS,
    Backprop,
    Divergence,
    Supervised,
    Way,
    check_scalar,
    l1,
    parse_way,
    regularised,
    way_of,
)
from syncline.nn import RBM

X = torch.tensor([[1.0, -2.0], [3.0, 0.5]])


def squares(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()


def gradient_of(model: nn.Module, way: Way, batch: Any = X) -> list[Tensor]:
    model.zero_grad()
    way(model, batch)
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def scalar_times_weight(model: Any, batch: Any) -> Tensor:
    """A way of the user's own: a gradient of ones."""
    model.weight.grad = torch.ones_like(model.weight)
    return torch.tensor(7.0)


def test_a_loss_is_of_output_and_target_an_objective_of_model_and_batch() -> None:
    model = nn.Linear(2, 1)
    target = torch.zeros(2, 1)
    one = gradient_of(model, way_of("backprop", model, F.mse_loss, None), (X, target))
    other = gradient_of(model, way_of("backprop", model, None, squares))
    assert len(one) == 2 and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    again = way_of("backprop", model, None, squares)
    again(model, X)  # adds to what is there
    assert torch.equal(model.weight.grad, 2 * one[0])


@pytest.mark.parametrize(
    "gradient, loss, objective, words",
    [
        ("backprop", None, None, "give either loss="),
        ("backprop", F.mse_loss, squares, "give either loss="),
        ("cd:1", F.mse_loss, None, "gradient='cd:1' needs no loss="),
        ("pcd", None, squares, "gradient='pcd' needs no objective="),
        ("cd:0", None, None, "k is a number of Gibbs steps, at least 1"),
        ("pcd:-1", None, None, "k is a number of Gibbs steps"),
        ("backpropagation", None, None, "must be 'backprop', 'cd:k'.*did you mean"),
        (3, None, None, "must be 'backprop', 'cd:k', 'pcd:k' or a function.*got 3"),
        ("cd", None, None, "trains energy models.*got Linear"),
    ],
)
def test_arguments_that_name_no_way_are_refused(gradient: Any, loss: Any, objective: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        way_of(gradient, nn.Linear(2, 1), loss, objective)


@pytest.mark.parametrize(
    "text, steps, persistent",
    [("cd", 1, False), ("cd:3", 3, False), ("pcd", 1, True), ("pcd:12", 12, True)],
)
def test_contrastive_divergence_is_named_with_its_steps(text: str, steps: int, persistent: bool) -> None:
    way = parse_way(text)
    assert isinstance(way, Divergence) and (way.steps, way.persistent) == (steps, persistent)
    assert repr(way) == f"{text.partition(':')[0]}:{steps}"


def test_chains_are_begun_for_persistent_divergence_and_belong_to_no_result() -> None:
    for text, chains in (("cd:1", False), ("pcd:1", True)):
        model, way = RBM(2, 3), parse_way(text)
        way.prepare(model, 5)
        named = dict([*model.named_parameters(), *model.named_buffers()])
        assert ("chains" in named) == chains
        model.zero_grad()
        loss = way(model, [X.sigmoid(), "a label"])  # the first part is what it sees
        assert loss.numel() == 1 and model.weight.grad is not None
        assert way.kept({f"top.{name}": value for name, value in named.items()}).keys() == {
            "top.weight",
            "top.hidden_bias",
            "top.visible_bias",
        }
    with pytest.raises(UsageError, match="a tensor or begin with one, got dict"):
        parse_way("cd")(model, {"x": X})


@pytest.mark.parametrize(
    "value, words",
    [
        (None, "got None; the function has to return it"),
        (torch.zeros(2, 1), r"got a tensor of shape \(2, 1\); reduce it"),
        (nn.MSELoss(), r"got the module MSELoss; call one: MSELoss\(\)\(output, target\)"),
        (0.5, r"got float; return the tensor itself, not .item\(\)"),
        ((torch.zeros(()),), "got tuple; return the tensor itself"),
    ],
)
def test_a_loss_is_one_number_in_a_tensor(value: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_scalar(value)
    check_scalar(torch.zeros(1, 1))


def test_a_loss_that_depends_on_nothing_trained_is_refused() -> None:
    with pytest.raises(UsageError, match="does not depend on a parameter that is trained"):
        Backprop(lambda model, batch: model(batch).sum().detach())(nn.Linear(2, 1), X)


@pytest.mark.parametrize(
    "batch, got", [(X, "Tensor;"), ({"x": X}, "dict of 1;"), ((X, X, X), "tuple of 3;"), ([X], "list of 1;")]
)
def test_a_supervised_batch_is_a_pair(batch: Any, got: str) -> None:
    with pytest.raises(UsageError, match=f"the data gives a {got}"):
        Supervised(F.mse_loss)(nn.Linear(2, 1), batch)


def test_a_way_of_ones_own_fills_gradients_and_has_no_loss_of_a_data_set() -> None:
    model = nn.Linear(2, 1)
    way = parse_way(scalar_times_weight)
    assert way(model, X) == 7.0
    with pytest.raises(UsageError, match="must be a function of the model"):
        way.check_evaluation()
    with pytest.raises(UsageError, match=r"has filled no parameter's \.grad"):
        parse_way(lambda model, batch: torch.tensor(1.0))(nn.Linear(2, 1), X)


WEIGHT = torch.tensor([[3.0, -4.0], [0.0, 2.0]])


@pytest.mark.parametrize(
    "name, options, value",
    [
        ("l1", {"weight": 0.5}, 0.5 * 9),
        ("l2", {"weight": 0.5}, 0.25 * 29),
        ("elastic", {"l1": 2.0, "l2": 4.0}, 2 * 9 + 2 * 29),
        ("group_lasso", {"weight": 0.5}, 0.5 * (5 + 2)),
    ],
)
def test_penalties_are_of_weights_alone(name: str, options: dict[str, float], value: float) -> None:
    model = nn.Linear(2, 2)
    model.load_state_dict({"weight": WEIGHT, "bias": torch.full((2,), 100.0)})
    penalty = partial(REGULARISERS[name], **options)
    assert penalty(model).item() == pytest.approx(value)
    with pytest.raises(UsageError, match="finds no weights"):
        penalty(nn.BatchNorm1d(3))


@pytest.mark.parametrize("way", [Backprop(squares), parse_way(scalar_times_weight)], ids=["backprop", "own"])
def test_a_penalty_is_added_to_the_gradient_whatever_the_way(way: Way) -> None:
    model = nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    (plain,), value = gradient_of(model, way), way(model, X)
    penalised = regularised(way, partial(l1, weight=0.25))
    (gradient,) = gradient_of(model, penalised)
    assert torch.allclose(gradient, plain + 0.25 * model.weight.sign())
    assert penalised(model, X).item() == pytest.approx(value.item() + 0.25 * model.weight.abs().sum().item())
    assert regularised(way, None) is way
    with pytest.raises(UsageError, match="regulariser must be a function"):
        regularised(way, 0.1)  # type: ignore[arg-type]
