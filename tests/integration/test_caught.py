"""Learners whose code catches what Syncline raises and goes on: they can, or are told why not; nobody waits for ever."""

from __future__ import annotations

import sys
from functools import partial

import cloudpickle
import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

import syncline as sl
from syncline.errors import LayoutError, LoopError, UsageError
from tests.integration.small_runs import launched, step

cloudpickle.register_pickle_by_value(sys.modules[__name__])

engines = pytest.mark.parametrize("engine", ["sim", "local"])
sgd = partial(SGD, lr=0.1)


def other_order(session: sl.Session, then: str) -> str:
    """Learners open their tables in different orders; who comes second catches that, and goes on."""
    first = nn.Linear(2, 1)
    optimizer = session.optimizer(first, sgd)
    loader = session.loader(TensorDataset(torch.ones(8, 2)), batch_size=1)
    models = [nn.Linear(2, 2), nn.Linear(3, 3)]
    order = models if session.rank == 0 else models[::-1]
    caught = "nothing"
    for model in order:
        try:
            session.optimizer(model, sgd)
        except LayoutError as error:
            caught = str(error)
            if then == "return":
                return caught
            break
    if then == "again":
        session.optimizer(order[0], sgd)
    elif then == "meet":
        session.mean(1.0)
    elif then == "load":
        session.loader(TensorDataset(torch.ones(4)), batch_size=1)
    elif then == "batches":
        for _ in loader:
            pass
    elif then == "step":
        for _ in range(3):
            step(first, optimizer, torch.ones(1, 2))
    return caught


@engines
@pytest.mark.parametrize("then", ["again", "meet", "load", "batches", "step"])
def test_who_was_refused_a_table_and_goes_on_is_told_why_it_cannot(then: str, engine: str) -> None:
    said = r"learner (\d) cannot go on after an error that its code caught.*It was: table 1: learner \1 built another"
    with pytest.raises(sl.LearnerError, match=said) as caught:
        launched(other_order, then, learners=2, sync="hardsync", engine=engine)
    assert isinstance(caught.value.__cause__, LoopError)
    assert "in two optimizers" not in str(caught.value)


@engines
def test_who_was_refused_a_table_may_return(engine: str) -> None:
    one, other = sorted(launched(other_order, "return", learners=2, sync="hardsync", engine=engine).returned)
    assert one == "nothing" and "built another layout" in other


def meets_unequally(session: sl.Session) -> None:
    """Five batches for two learners: one meets three times in an epoch; it catches that."""
    model = nn.Linear(2, 1)
    optimizer = session.optimizer(model, sgd)
    loader = session.loader(TensorDataset(torch.ones(10, 2)), batch_size=2)
    for _ in range(2):
        for (x,) in loader:
            step(model, optimizer, x)
            try:
                session.mean(1.0)
            except LoopError:
                assert session.rank == 0


@engines
def test_who_met_in_another_loop_and_goes_on_is_told(engine: str) -> None:
    with pytest.raises(
        sl.LearnerError, match=r"learner 0 cannot go on.*It was: learners' loops differ"
    ) as caught:
        launched(meets_unequally, learners=2, sync="hardsync", engine=engine)
    assert caught.value.rank == 0


# -- errors that all get alike, after which all may go on ---------------------------------------------------


def corrected(session: sl.Session) -> list[float]:
    """A table that cannot be, then the right one with the same parameters; shapes that differ, then the right ones."""
    model = nn.Linear(2, 1)
    with pytest.raises(LayoutError, match="LBFGS"):
        session.optimizer(model, partial(torch.optim.LBFGS, lr=0.1))
    mixed = nn.ModuleDict({"mine": model, "other": nn.Embedding(3, 2, sparse=True)})
    with pytest.raises(LayoutError, match="sparse"):
        session.optimizer(mixed, sgd)
    optimizer = session.optimizer(model, sgd)
    with pytest.raises(UsageError, match="same shape"):
        session.mean(torch.zeros(1 + session.rank))
    for _ in range(2):
        step(model, optimizer, torch.ones(1, 2))
    return [session.mean(float(session.rank)), float(optimizer.version)]


@engines
@pytest.mark.parametrize("topology", ["servers", "allreduce"])
def test_what_all_catch_alike_keeps_nobody_from_going_on(topology: str, engine: str) -> None:
    result = launched(corrected, learners=2, sync="hardsync", topology=topology, engine=engine)
    assert result.returned == [[0.5, 2.0]] * 2


def another_model(session: sl.Session) -> int:
    """All-reduce compares layouts at all learners: the error is everybody's, and a second attempt too."""
    model, right = nn.Linear(2 + session.rank, 1), nn.Linear(2, 1)
    with pytest.raises(LayoutError, match="different models"):
        session.optimizer(nn.ModuleDict({"body": model, "head": right}), sgd)
    optimizer = session.optimizer(right, sgd)
    step(right, optimizer, torch.ones(1, 2))
    return optimizer.version


@engines
def test_under_allreduce_a_table_opens_after_a_layout_error_that_all_caught(engine: str) -> None:
    assert launched(another_model, learners=2, topology="allreduce", engine=engine).returned == [1, 1]
