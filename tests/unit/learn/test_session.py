"""What sessions of all topologies refuse, whose parameters are whose, and what optimizers of tables have alike."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Optimizer
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from syncline import messages as m
from syncline.errors import LayoutError, UsageError
from syncline.learn.session import (
    as_data,
    check_data,
    check_function,
    check_policy,
    make_optimizer,
    refuse_sparse,
)
from tests.unit.learn.servers_of_one import session_of_one

RATE = partial(SGD, lr=0.1)


class Endless(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


# -- optimizers ----------------------------------------------------------------------------------------------


def test_a_factory_gets_the_parameters_or_the_model_where_it_asks_for_it() -> None:
    net = nn.Linear(2, 1)
    inner = make_optimizer(net, RATE)
    assert inner.param_groups[0]["params"] == list(net.parameters())
    asked = make_optimizer(net, lambda model: SGD([model.bias], lr=0.5))
    assert asked.param_groups[0]["params"] == [net.bias]


@pytest.mark.parametrize(
    "net, factory, error, words",
    [
        (nn.ReLU(), RATE, LayoutError, "ReLU has no parameters: there is nothing to train"),
        (nn.LazyLinear(2), RATE, LayoutError, "is lazy and has no shape yet"),
        (nn.Linear(2, 1), 0.1, UsageError, "must be a callable that makes one, got float"),
        (nn.Linear(2, 1), lambda model: None, UsageError, "the optimizer factory returned NoneType"),
        (nn.Linear(2, 1), LBFGS, LayoutError, "LBFGS calls its closure several times"),
    ],
)
def test_what_makes_no_optimizer_is_refused(net: Any, factory: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        make_optimizer(net, factory)


def test_a_wrapper_without_defaults_gets_some() -> None:
    class Bare(Optimizer):
        def __init__(self, params: Any) -> None:
            self.param_groups, self.state = [{"params": list(params)}], {}

    assert make_optimizer(nn.Linear(2, 1), Bare).defaults == {}


def test_embeddings_with_sparse_gradients_are_refused_by_name() -> None:
    with pytest.raises(LayoutError, match="'1' is an embedding with sparse=True"):
        refuse_sparse(nn.Sequential(nn.Embedding(2, 2), nn.EmbeddingBag(2, 2, sparse=True)))
    refuse_sparse(nn.Sequential(nn.Embedding(2, 2)))


def test_a_parameter_belongs_to_one_table() -> None:
    session, _ = session_of_one()
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    with pytest.raises(UsageError, match=r"takes an nn\.Module first, got generator"):
        session.optimizer(net.parameters(), RATE)  # type: ignore[arg-type]
    session.optimizer(net[0], RATE)
    session.optimizer(net[1], RATE)
    with pytest.raises(LayoutError, match=r"'1\.bias' is in two optimizers \(the first calls it 'bias'\)"):
        session.optimizer(net, lambda model: SGD([model[1].bias], lr=0.1))


def test_an_optimizer_of_a_table_has_the_groups_of_the_users_own() -> None:
    session, _ = session_of_one()
    net = nn.Linear(2, 1)
    optimizer = session.optimizer(net, lambda model: SGD([{"params": model.bias, "lr": 0.5}], lr=0.1))
    assert optimizer.param_groups[0]["lr"] == 0.5 and optimizer.defaults["lr"] == 0.1
    with pytest.raises(UsageError, match="groups cannot be added to a table that is open"):
        optimizer.add_param_group({"params": [net.weight]})
    for set_to_none, left in ((False, True), (True, False)):
        net.bias.grad = torch.ones(1)
        optimizer.zero_grad(set_to_none)
        assert (net.bias.grad is not None) == left and (not left or net.bias.grad.item() == 0)


def test_put_is_for_all_tables_that_hold_a_parameter_of_the_model() -> None:
    session, servers = session_of_one()
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1), nn.ReLU())
    for layer in net[:2]:
        session.optimizer(layer, RATE)
    for given, words in ((RATE, "takes an nn.Module, got partial"), (net[2], "no optimizer of this session")):
        with pytest.raises(UsageError, match=words):
            session.put(given)
    session.put(nn.ParameterList([net[1].bias]))
    assert [table.version for table in servers.tables] == [0, 1]
    session.put(net)
    assert [table.version for table in servers.tables] == [1, 2]


# -- loaders, metrics, seeds ---------------------------------------------------------------------------------


def test_the_same_call_gives_the_same_loader() -> None:
    session, servers = session_of_one()
    data = TensorDataset(torch.arange(8.0))
    loader = session.loader(data, batch_size=2)
    assert (
        session.loader(data, batch_size=2) is loader and session.loader(data, batch_size=2, ahead=3) is loader
    )
    assert loader.ahead == 3 and session.loader(data, batch_size=2).ahead == 3
    others = [{"batch_size": 4}, {"batch_size": 2, "policy": "sample"}, {"batch_size": 2, "collate": list}]
    made = [session.loader(data, **options) for options in others]
    assert len({id(each) for each in (loader, *made)}) == 4 == len(servers.of(m.OpenLoader))
    assert session.epoch == 0


def test_metrics_of_one_number_are_logged_as_numbers() -> None:
    session, servers = session_of_one()
    session.log(loss=torch.tensor([2.5]), steps=3)
    assert servers.of(m.Log) == [m.Log({"loss": 2.5, "steps": 3})]


def test_the_first_learner_draws_what_a_plain_script_draws() -> None:
    session, _ = session_of_one(seed=12)
    for rank in (0, 2):
        session.rank = rank
        session.seed()
        found = torch.rand(2).tolist(), np.random.rand(), random.random()
        torch.manual_seed(12 + rank), np.random.seed(12 + rank), random.seed(12 + rank)
        assert found == (torch.rand(2).tolist(), np.random.rand(), random.random())


# -- what is given -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data, words",
    [
        (DataLoader([1, 2]), "got DataLoader; give its .dataset"),
        (TensorDataset, "got the class TensorDataset; give an instance of it"),
        ((torch.ones(2), [1]), r"got a tuple of \(Tensor, list\); give tensors"),
        ({"x": 1}, "got dict; wrap tensors in TensorDataset"),
        ("abc", "got str"),
        (7, "got int"),
        (Endless(), "Endless has no length; give it a __len__, or make it an IterableDataset"),
    ],
)
def test_what_is_no_data_set_is_refused(data: Any, words: str) -> None:
    for check in (check_data, as_data):
        with pytest.raises(UsageError, match=words):
            check("train's data", data)


def test_data_sets_are_taken_as_they_are_and_tensors_become_one() -> None:
    for data in ([1, 2], Stream(), TensorDataset(torch.ones(2)), torch.ones(2)):
        assert as_data("data", data) is data
    pair = torch.arange(3.0), torch.eye(3)
    assert as_data("data", pair)[1][0] == 1.0 and len(as_data("data", pair)) == 3
    with pytest.raises(UsageError, match="data: the tensors have 3, 2, 0 examples; they must be the same"):
        as_data("data", (torch.ones(3), torch.ones(2), torch.ones(())))


def test_policies_and_functions_are_checked_by_name() -> None:
    check_policy("partition")
    with pytest.raises(UsageError, match="policy 'random' is none of ledger, partition, sample"):
        check_policy("random")
    for fine in (None, len, nn.MSELoss()):
        check_function("loss", fine)
    with pytest.raises(UsageError, match=r"loss is the class MSELoss: give an instance, MSELoss\(\)"):
        check_function("loss", nn.MSELoss)
    with pytest.raises(UsageError, match="collate must be a function, got 'stack'"):
        check_function("collate", "stack")
