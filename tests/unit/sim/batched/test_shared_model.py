"""What built-in learners share: the data's order, options by epoch, and whether their gradients can be computed together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from syncline.dial import Course
from syncline.engines.run import RunSpec, Task
from syncline.learn.loader import epoch_order
from syncline.learn.train_and_evaluate import Training, run_training
from syncline.roles.run_plan import RunPlan
from syncline.sim.batched.batched_gradients import BatchedGradients
from syncline.sim.batched.lazy_gradients import EachAlone
from syncline.sim.batched.shared_model import ORDERS_KEPT, SharedModel, Ways, make_workshop
from syncline.topologies import Servers

DATA = TensorDataset(torch.arange(40.0).view(20, 2), torch.arange(20))


def squares(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch[0]).square().mean()


def spec(function: Any = run_training, devices: tuple[str, ...] = ("cpu",), **changes: Any) -> RunSpec:
    given: dict[str, Any] = {
        "model": nn.Linear(2, 2), "data": DATA, "objective": squares, "batch_size": 4, "epochs": 1,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.8), "schedule": None,
        "policy": "ledger", "collate": None,
    }  # fmt: skip
    plan = RunPlan(course=Course.of("async"), learners=2, topology=Servers(1, True), seed=5)
    return RunSpec(task=Task(function, (Training(**(given | changes)),)), plan=plan, devices=devices)


def test_positions_are_those_of_the_epochs_order_whoever_asks_first() -> None:
    shop = SharedModel(spec())
    wanted = {epoch: epoch_order(20, seed=5, epoch=epoch, policy="ledger", parts=1) for epoch in range(7)}
    for epoch in (6, 0, 1, 2, 3, 4, 5, 0, 6):
        assert torch.equal(shop.indices(epoch, 4, 8, 1), wanted[epoch][4:8])
    assert len(shop._orders) == ORDERS_KEPT
    assert torch.equal(shop.read(torch.tensor([3, 1]))[1], torch.tensor([3, 1])) and shop.size == 20


def test_options_are_those_of_the_schedule_in_that_epoch() -> None:
    halves = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)  # noqa: E731
    shop = SharedModel(spec(schedule=halves))
    assert [b'"lr": 0.8' in shop.options(0), b'"lr": 0.2' in shop.options(2)] == [True, True]
    assert shop.options(0) is shop.options(0)


def test_the_users_model_is_not_the_runs() -> None:
    model = nn.Linear(2, 2)
    shop = SharedModel(spec(model=model))
    assert shop.model is not model and torch.equal(shop.model.weight, model.weight)
    assert [each.shape for each in shop.tensors.parameters] == [(2, 2), (2,)] and shop.layout.shards == 1


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(DataLoader(DATA))


@pytest.mark.parametrize("given", [
    spec(print), spec(devices=("cpu", "cuda:0")), spec(data=Stream())
])  # fmt: skip
def test_there_are_none_but_of_trains_own_loop_on_one_device(given: RunSpec) -> None:
    assert make_workshop(given, None) == (None, None)
    assert make_workshop(given, Ways()) == (None, "only train's own loop, on one device, can do otherwise")


@pytest.mark.parametrize(("changes", "reason"), [
    ({}, None),
    ({"objective": None, "gradient": object()}, "only gradients of back-propagation"),
    ({"model": nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))}, "changes the buffer"),
])  # fmt: skip
def test_what_cannot_be_computed_together_is_computed_one_at_a_time(
    changes: dict[str, Any], reason: str | None
) -> None:
    shop = SharedModel(spec(**changes))
    said = shop.compute_together(Ways())
    if reason is None:
        assert said is None and isinstance(shop.computer, BatchedGradients)
    else:
        assert said is not None and reason in said and isinstance(shop.computer, EachAlone)
