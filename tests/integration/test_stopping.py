"""Runs that stop when they are good enough, and penalties of weights, in `train` and in job files."""

from __future__ import annotations

import math
import sys
from functools import partial
from typing import Any

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

import syncline as sl
from syncline.jobs import Job
from syncline.learn.gradient_ways import elastic, group_lasso, l1, l2
from syncline.nn import RBM

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def line() -> TensorDataset:
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x @ torch.tensor([[1.0], [-2.0], [0.0]]))


def train(model: nn.Module | None = None, **options: Any) -> sl.Result:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "loss": F.mse_loss,
        "optimizer": partial(SGD, lr=0.1),
        "sync": "hardsync",
        "batch_size": 8,
        "epochs": 60,
        "engine": "sim",
    }
    return sl.train(model or nn.Linear(3, 1), line(), **{**settings, **options})


def test_at_a_loss() -> None:
    result = train(stop={"loss": 0.05})
    losses = [record.loss for record in result.history]
    assert losses[-1] <= 0.05 and all(loss > 0.05 for loss in losses[:-1]) and 1 < len(losses) < 60


def test_at_a_plateau_of_the_test_loss() -> None:
    result = train(stop={"plateau": 2}, optimizer=partial(SGD, lr=0.0), evaluate=line())
    assert len(result.history) == 3  # the first is the best, two more are no better


def test_a_plateau_of_accuracy_is_one_of_no_higher_one() -> None:
    x, y = line().tensors
    model = nn.Linear(3, 2)
    labels = TensorDataset(x, (y[:, 0] > 0).long())
    result = sl.train(
        model,
        labels,
        loss=F.cross_entropy,
        optimizer=partial(SGD, lr=0.5),
        engine="sim",
        sync="hardsync",
        epochs=40,
        evaluate=labels,
        stop={"plateau": 3, "metric": "accuracy"},
    )
    found = [record.metrics["accuracy"] for record in result.history]
    assert len(found) < 40 and max(found) == found[-4] and found[-4] >= max(found[-3:])


def test_at_a_norm_of_the_gradient() -> None:
    result = train(stop={"gradient_norm": 0.01})
    norms = [record.metrics["gradient_norm"] for record in result.history]
    assert norms[-1] <= 0.01 < min(norms[:-1]) and len(norms) < 60
    model = result.model
    assert model is not None
    x, y = line().tensors
    model.zero_grad()
    F.mse_loss(model(x), y).backward()
    wanted = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))  # type: ignore[union-attr]
    assert norms[-1] == pytest.approx(wanted, rel=1e-3)


def test_contrastive_divergence_stops_too() -> None:
    data = TensorDataset((line().tensors[0] > 0).float())
    result = sl.train(
        RBM(3, 2),
        data,
        gradient="pcd:1",
        optimizer=partial(SGD, lr=0.1),
        engine="sim",
        sync="hardsync",
        epochs=5,
        stop={"gradient_norm": 100.0},
    )
    assert len(result.history) == 1 and result.history[0].metrics["gradient_norm"] > 0


@pytest.mark.parametrize(
    "stop, words",
    [
        ({"los": 0.1}, "stop: unknown rule 'los', did you mean 'loss'"),
        ({"loss": "low"}, "stop: loss must be a finite number, got 'low'"),
        ({"plateau": 0}, "stop: plateau must be a whole number of epochs, at least 1, got 0"),
        ({"gradient_norm": -1}, "stop: gradient_norm must be a finite number above 0, got -1"),
        ({"metric": "accuracy"}, "stop takes a table with loss, plateau or gradient_norm"),
        (3, "stop takes a table"),
    ],
)
def test_rules_that_are_none(stop: Any, words: str) -> None:
    with pytest.raises(sl.UsageError, match=words):
        train(stop=stop)


def test_a_metric_that_is_not_there_is_named() -> None:
    with pytest.raises(sl.RunError, match="stop: no metric is called 'acuracy'; there are: loss"):
        train(stop={"plateau": 2, "metric": "acuracy"}, evaluate=line())


# -- regularisers --------------------------------------------------------------------------------------------


def own(model: nn.Module) -> Tensor:
    return 0.5 * model.bias.square().sum()  # type: ignore[operator,union-attr]


@pytest.mark.parametrize(
    "penalty, wanted",
    [
        (partial(l1, weight=0.5), lambda w: 0.5 * w.sign()),
        (partial(l2, weight=0.5), lambda w: 0.5 * w),
        (partial(elastic, l1=0.5, l2=0.25), lambda w: 0.5 * w.sign() + 0.25 * w),
        (partial(group_lasso, weight=0.5), lambda w: 0.5 * w / w.norm(dim=1, keepdim=True)),
    ],
)
def test_penalties_have_the_gradients_of_the_books(penalty: Any, wanted: Any) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    penalty(model).backward()
    assert torch.allclose(model.weight.grad, wanted(model.weight.detach()), atol=1e-5)  # type: ignore[arg-type]
    assert model.bias.grad is None


@pytest.mark.parametrize("topology", ["servers:2", "allreduce"])
def test_l2_is_weight_decay(topology: str) -> None:
    def decay(model: nn.Linear) -> Any:
        return SGD([{"params": [model.weight], "weight_decay": 0.1}, {"params": [model.bias]}], lr=0.1)

    options: dict[str, Any] = {"epochs": 2, "engine": "local", "threads": 1, "topology": topology}
    plain = train(optimizer=lambda model: decay(model), **options).state_dict()
    found = train(regulariser=partial(l2, weight=0.1), **options).state_dict()
    for name, value in plain.items():
        assert torch.allclose(found[name], value, atol=1e-6), name


def test_l1_makes_small_weights_smaller() -> None:
    plain = train(epochs=20).state_dict()["weight"].abs()
    found = train(epochs=20, regulariser=partial(l1, weight=0.3)).state_dict()["weight"].abs()
    assert found.sum() < plain.sum() - 0.2


def test_the_loss_of_an_evaluation_is_without_the_penalty() -> None:
    result = train(
        epochs=1, evaluate=line(), regulariser=partial(l2, weight=100.0), optimizer=partial(SGD, lr=0.0)
    )
    assert result.history[-1].metrics["loss"] < 20 < result.history[-1].loss


def test_contrastive_divergence_has_penalties_too() -> None:
    data = TensorDataset((line().tensors[0] > 0).float())
    options: dict[str, Any] = {
        "gradient": "cd:1",
        "optimizer": partial(SGD, lr=0.1),
        "engine": "sim",
        "sync": "hardsync",
    }
    torch.manual_seed(0)
    decayed = RBM(3, 2, decay=0.2, std=0.5)
    torch.manual_seed(0)
    plain = RBM(3, 2, std=0.5)
    one = sl.train(decayed, data, **options).state_dict()
    other = sl.train(plain, data, regulariser=partial(l2, weight=0.2), **options).state_dict()
    assert all(torch.allclose(one[name], other[name], atol=1e-6) for name in one)


def test_what_is_no_regulariser_is_refused() -> None:
    with pytest.raises(
        sl.UsageError, match="regulariser must be a function of the model that gives a scalar"
    ):
        train(regulariser=0.1)


JOB = """\
epochs = 4
engine = "sim"
sync = "hardsync"
model = {name = "mlp", sizes = [64, 10]}
data = "digits"
loss = "cross_entropy"
optimizer = {name = "sgd", lr = 0.1}
regulariser = {name = "l1", weight = 1e-4}
stop = {loss = 2.0, plateau = 2}
"""


def test_a_job_stops_and_has_a_regulariser() -> None:
    job = Job.parse(JOB)
    assert Job.parse(job.dumps()) == job
    assert len(sl.train(**job.build()).history) < 4
    with pytest.raises(
        sl.UsageError, match=r"job:9: stop: expected a table .* \(unknown rule 'los', did you mean"
    ):
        Job.parse(JOB.replace("loss = 2.0", "los = 2.0"))
    with pytest.raises(sl.UsageError, match=r"job:8: regulariser: no regulariser is called 'l3'"):
        Job.parse(JOB.replace('"l1"', '"l3"'))
