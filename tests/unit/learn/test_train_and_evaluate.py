"""How `train` evaluates: every example counts once, the model runs once for each batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from syncline.errors import UsageError
from syncline.learn.gradient_ways import Backprop, Supervised
from syncline.learn.model_factories import ModelFactory
from syncline.learn.train_and_evaluate import Evaluation, check_metrics, evaluation_of

SIZE, BATCH = 300, 256  # evaluation takes batches of 256: one of 256, one of 44


class Named(Dataset[dict[str, Any]]):
    """What is read from files often has a name first."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"name": f"file {index:04}.jpg", "x": torch.tensor(float(index))}


class Streamed(IterableDataset[dict[str, Any]]):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (Named()[index] for index in range(SIZE))


class Ragged(Dataset[Tensor]):
    """Tensors of different lengths, which nobody can stack."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((1 + index % 5,), float(index))


def evaluation(data: Any, **options: Any) -> Evaluation:
    given = {"loss": None, "objective": None, "batch_size": BATCH, "collate": None, **options}
    loss, objective = given.pop("loss"), given.pop("objective")
    way = Backprop(objective or Supervised(loss))
    found = evaluation_of(given.pop("model", nn.Linear(3, 2)), data, way, **given)
    assert found is not None
    return found


@pytest.mark.parametrize("data", [Named(), Streamed()], ids=["map", "stream"])
def test_the_loss_is_the_mean_over_examples_whatever_a_batch_begins_with(data: Any) -> None:
    test = evaluation(data, objective=lambda model, batch: batch["x"].mean())
    assert test({})["loss"] == pytest.approx(torch.arange(float(SIZE)).mean().item())


def test_batches_without_a_tensor_of_all_examples_count_them_too() -> None:
    test = evaluation(
        Ragged(), objective=lambda model, batch: torch.stack([x[0] for x in batch]).mean(), collate=list
    )
    assert test({})["loss"] == pytest.approx(torch.arange(float(SIZE)).mean().item())


class Counts(nn.Module):
    passes = 0

    def forward(self, x: Tensor) -> Tensor:
        Counts.passes += 1
        return F.one_hot(x, 3).float()


def test_the_model_runs_once_for_each_batch() -> None:
    Counts.passes = 0
    targets = torch.arange(SIZE) % 3
    guesses = torch.where(torch.arange(SIZE) < 30, (targets + 1) % 3, targets)
    test = evaluation(TensorDataset(guesses, targets), model=Counts(), loss=F.cross_entropy)
    assert test({})["accuracy"] == pytest.approx(0.9) and Counts.passes == 2


def test_accuracy_is_of_scores_of_classes_only() -> None:
    x, model = torch.randn(8, 3), nn.Linear(3, 2)
    assert "accuracy" in evaluation(TensorDataset(x, torch.ones(8).long()), loss=F.cross_entropy)({})
    pairs = TensorDataset(x, torch.randn(8, 2))
    assert evaluation(pairs, model=model, loss=F.mse_loss)({}).keys() == {"loss"}
    halves = evaluation(pairs, model=lambda_model(), loss=lambda output, target: output[0].mean())
    assert halves({}).keys() == {"loss"}


def lambda_model() -> nn.Module:
    """Its output is no tensor."""

    class Two(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x

    return Two()


def test_a_function_makes_the_model_where_it_is_evaluated() -> None:
    made: list[nn.Module] = []

    def make() -> nn.Module:
        made.append(nn.Linear(3, 2))
        return made[-1]

    test = evaluation(lambda model: {"same": model is made[-1]}, model=ModelFactory(make, 7))
    assert not made
    before = torch.get_rng_state()
    assert test({}) == {"same": 1.0} == test({}) and len(made) == 1
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(7)
    assert isinstance(made[0], nn.Linear) and torch.equal(made[0].weight, nn.Linear(3, 2).weight)


@pytest.mark.parametrize(
    "found, words",
    [
        (None, r'as a dictionary, such as \{"accuracy": 0.9\}, got None'),
        (0.5, "as a dictionary.*got float"),
        ({"a": "x"}, "must return numbers, got 'x' for 'a'"),
        ({"a": [1, 2]}, r"must return numbers, got \[1, 2\] for 'a'"),
        ({"a": torch.zeros(2)}, r"got a tensor of shape \(2,\) for 'a'"),
    ],
)
def test_metrics_are_numbers_by_name(found: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_metrics(found)
    assert check_metrics({"a": torch.tensor(2), "b": 1}) == {"a": 2.0, "b": 1.0}


def test_an_evaluation_of_nothing_says_so() -> None:
    class Nothing(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            return iter(())

    with pytest.raises(UsageError, match="the data set gave no example"):
        evaluation(Nothing(), loss=F.mse_loss)({})
