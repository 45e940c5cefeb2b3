"""What `train` runs in a learner, how it evaluates (every example counts once, the model runs once for each batch), when it stops."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from syncline.errors import UsageError
from syncline.learn.gradient_ways import Backprop, Supervised
from syncline.learn.loader import epoch_order
from syncline.learn.model_factories import ModelFactory
from syncline.learn.train_and_evaluate import (
    EXAMPLES,
    NORM,
    Evaluation,
    GradientNorm,
    Schedule,
    Training,
    check_metrics,
    evaluation_of,
    read_stop,
    run_training,
    with_norm,
)
from tests.unit.learn.servers_of_one import session_of_one

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


# -- the loop ------------------------------------------------------------------------------------------------


def squares(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).square().sum()


def training(model: Any, data: Any, **options: Any) -> Training:
    given = {"objective": squares, "schedule": None, "batch_size": 3, "epochs": 2, **options}
    rate = partial(SGD, lr=0.5)
    return Training(model=model, data=data, optimizer=rate, policy="ledger", collate=None, **given)


def test_the_loop_is_a_plain_one_with_the_rate_of_its_epoch() -> None:
    data, decay = TensorDataset(torch.randn(7, 3)), partial(ExponentialLR, gamma=0.5)
    model = nn.Linear(3, 1)
    plain = copy.deepcopy(model)
    session, _ = session_of_one(epochs=2)
    run_training(session, training(model, data, schedule=decay))
    optimizer = SGD(plain.parameters(), lr=0.5)
    scheduler = decay(optimizer)
    for epoch in range(2):
        for indices in epoch_order(7, seed=0, epoch=epoch).split(3):
            optimizer.zero_grad()
            squares(plain, [data.tensors[0][indices]]).backward()
            optimizer.step()
        scheduler.step()
    assert torch.equal(model.weight, plain.weight) and torch.equal(model.bias, plain.bias)


def test_new_servers_take_the_rate_back_to_their_epoch() -> None:
    session, servers = session_of_one(epochs=2)
    held: list[Any] = []
    rates: list[float] = []

    def schedule(optimizer: Any) -> ExponentialLR:
        held.append(optimizer)
        return ExponentialLR(optimizer, gamma=0.5)

    def objective(model: nn.Module, batch: Any) -> Tensor:
        rates.append(held[0].param_groups[0]["lr"])
        servers.renewed = len(rates) == 4
        return squares(model, batch)

    data = TensorDataset(torch.randn(7, 3))
    run_training(session, training(nn.Linear(3, 1), data, objective=objective, schedule=schedule))
    assert rates == [0.5] * 3 + [0.25] + [0.5] * 3 + [0.25] * 3


def test_the_loop_ends_with_the_run() -> None:
    session, servers = session_of_one(limit=4)
    run_training(session, training(nn.Linear(3, 1), TensorDataset(torch.randn(7, 3)), epochs=None))
    assert servers.tables[0].version == 4


@pytest.mark.parametrize("tensor_rate", [False, True])
def test_a_schedule_goes_forth_and_back_to_any_epoch(tensor_rate: bool) -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = SGD([parameter], lr=torch.tensor(1.0) if tensor_rate else 1.0)
    schedule = Schedule(ExponentialLR(optimizer, gamma=0.5), optimizer)
    for epoch in (0, 3, 1, 4, 0, 2, 2, 5):
        schedule.go_to(epoch)
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.5**epoch)
    Schedule(None, optimizer).go_to(3)
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.5**5)


# -- when it is good enough ----------------------------------------------------------------------------------


def record(loss: float, /, **metrics: float) -> Any:
    return SimpleNamespace(loss=loss, metrics=metrics, skipped=False)


SKIPPED = SimpleNamespace(loss=9.0, metrics={}, skipped=True)


def epochs_of(rules: dict[str, Any], *records: Any) -> int:
    """How many there are before it stops; one more than all where it does not."""
    stop = read_stop(rules)
    assert stop is not None
    return next((number for number, each in enumerate(records, 1) if stop(each)), len(records) + 1)


@pytest.mark.parametrize(
    "rules, records, epochs",
    [
        ({"loss": 0.5}, [record(0.6), record(0.5), record(0.1)], 2),
        ({"loss": 0}, [record(0.6, loss=0.0)], 2),  # that of the training
        ({"plateau": 2}, [record(each) for each in (3, 2, 2, 1.9, 2, 1.9, 0)], 6),
        ({"plateau": 1}, [record(3, loss=1.0), record(2, loss=1.0)], 2),  # the test's where there is one
        ({"plateau": 1}, [record(3), record(math.nan)], 2),
        ({"plateau": 1, "metric": "accuracy"}, [record(1, accuracy=each) for each in (0.1, 0.3, 0.2)], 3),
        ({"plateau": 1, "metric": "error"}, [record(1, error=0.3), SKIPPED, record(1, error=0.4)], 3),
        ({"plateau": 1, "metric": "error"}, [record(1, error=each) for each in (0.3, 0.1, 0.2)], 3),
        ({"plateau": 3, "loss": 1.0}, [record(2), record(0.9)], 2),
        ({NORM: 0.5}, [record(1), record(1, gradient_norm=0.6), record(1, gradient_norm=0.5)], 3),
    ],
)
def test_a_run_stops_when_its_rules_say_so(rules: Any, records: Any, epochs: int) -> None:
    assert epochs_of(rules, *records) == epochs


def test_a_run_stops_at_what_it_was_given_whatever_becomes_of_the_table() -> None:
    rules = {"loss": 0.5}
    stop = read_stop(rules)
    assert stop is not None
    rules.clear()
    assert stop(record(0.4))


@pytest.mark.parametrize(
    "rules, words",
    [
        (5, "stop takes a table with loss, plateau or gradient_norm.*got 5"),
        ({}, "stop takes a table"),
        ({"metric": "accuracy"}, "stop takes a table"),
        ({"plateu": 3}, "unknown rule 'plateu'.*did you mean.*plateau"),
        ({"loss": math.inf}, "loss must be a finite number, got inf"),
        ({"loss": True}, "loss must be a finite number, got True"),
        ({"plateau": 0}, "plateau must be a whole number of epochs, at least 1, got 0"),
        ({"plateau": 1.5}, "plateau must be"),
        ({NORM: 0}, "gradient_norm must be a finite number above 0, got 0"),
        ({"loss": 1, "metric": ""}, "metric must be the name of a metric, got ''"),
    ],
)
def test_rules_that_make_no_sense_are_refused(rules: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read_stop(rules)
    assert read_stop(None) is None


def test_a_metric_that_nobody_measures_is_told_of_with_those_that_there_are() -> None:
    stop = read_stop({"plateau": 1, "metric": "top5"})
    assert stop is not None
    with pytest.raises(UsageError, match="no metric is called 'top5'; there are: loss, accuracy"):
        stop(record(1.0, loss=1.0, accuracy=0.5))


@pytest.mark.parametrize("size, every", [(8, 1), (EXAMPLES + 1, 2)])
def test_the_gradients_norm_is_that_of_the_mean_over_examples_evenly_spread(size: int, every: int) -> None:
    data = TensorDataset(torch.randn(size, 3, generator=torch.Generator().manual_seed(0)))
    model = nn.Linear(3, 1)
    plan = training(model, data, batch_size=5000 if every > 1 else 3)
    stop = read_stop({NORM: 1.0}, data)
    inner = evaluation_of(model, lambda net: {"seen": 1}, Backprop(squares), 3, None)
    tested = with_norm(inner, stop, plan)
    assert isinstance(tested, GradientNorm) and with_norm(inner, read_stop({"loss": 1}), plan) is inner
    before = torch.get_rng_state()
    found = tested(model.state_dict())
    chosen, plain = data.tensors[0][::every], copy.deepcopy(model)
    wanted = []
    for rows in chosen.split(plan.batch_size):  # an objective that is a sum counts by its batch's examples
        plain.zero_grad()
        squares(plain, [rows]).backward()
        wanted.append(torch.cat([p.grad.flatten() for p in plain.parameters()]) * len(rows) / len(chosen))
    assert found["seen"] == 1.0 and found[NORM] == pytest.approx(float(sum(wanted).norm()), rel=1e-4)  # type: ignore[union-attr]
    assert torch.equal(torch.get_rng_state(), before) and model.weight.grad is None
    with pytest.raises(UsageError, match="needs data with a length"):
        read_stop({NORM: 1.0}, Streamed())
