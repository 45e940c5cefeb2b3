"""All-reduce under loops that are not `train`'s: adversarial pairs, several loaders, streams that are only read (A1–A3)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import IterableDataset, TensorDataset

import syncline as sl
from syncline.errors import LearnerError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

PLAIN = partial(SGD, lr=0.1)
SMALL = "allreduce:layerwise,bucket=1"


def points(count: int) -> TensorDataset:
    x = torch.randn(count, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(x, (x[:, 0] > 0).long())


class Stream(IterableDataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        yield from zip(*points(self.count).tensors, strict=True)


def adversaries(session: sl.Session) -> list[Tensor]:
    """Each one's backward passes through the other."""
    torch.manual_seed(0)
    maker, judge = nn.Linear(5, 5).double(), nn.Linear(5, 1).double()
    judging, making = session.optimizer(judge, PLAIN), session.optimizer(maker, PLAIN)
    loader = session.loader(points(21), batch_size=8)
    for _ in range(2):
        for x, _ in loader:
            judge.zero_grad()
            (F.softplus(-judge(x)).mean() + F.softplus(judge(maker(x))).mean()).backward()
            judging.step()
            maker.zero_grad()
            F.softplus(-judge(maker(x))).mean().backward()
            making.step()
    return [value.detach() for module in (judge, maker) for value in module.parameters()]


@pytest.mark.parametrize("apply", ["end", "reverse", "arrival"])
def test_a_backward_through_another_table_does_not_count_there(apply: str) -> None:
    """21 examples for two learners with batches of eight: the last round is five and none."""
    wanted = sl.launch(adversaries, learners=2, sync="hardsync", topology="servers")
    got = sl.launch(adversaries, learners=2, sync="hardsync", topology=f"{SMALL},apply={apply}")
    for one, other in zip(got.returned[0], wanted.returned[0], strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)
    assert got.statistics.tables[0].examples == wanted.statistics.tables[0].examples == 42


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(5, 2).double()


def map_then_stream(session: sl.Session) -> None:
    model = net()
    opt = session.optimizer(model, PLAIN)
    loaders = session.loader(points(21), batch_size=4), session.loader(Stream(9), batch_size=4)
    for loader in loaders * 2:
        for x, y in loader:
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            session.loss = loss.item()
            opt.step()


def test_epochs_are_those_of_the_first_loader() -> None:
    got = sl.launch(map_then_stream, learners=2, sync="hardsync", topology="allreduce")
    assert [(epoch.epoch, epoch.version, epoch.examples) for epoch in got.history] == [(0, 3, 21), (1, 8, 51)]
    assert all(epoch.loss == epoch.loss for epoch in got.history)


def only_reads(session: sl.Session, gradients: bool) -> int:
    session.optimizer(net(), PLAIN)
    with torch.set_grad_enabled(gradients):
        return sum(len(x) for x, _ in session.loader(Stream(21), batch_size=4))


def test_a_stream_that_is_only_read_ends() -> None:
    assert sl.launch(only_reads, False, learners=2, topology="allreduce").returned == [11, 10]
    with pytest.raises(LearnerError, match=r"has repeated its last batch 1000 times without a step"):
        sl.launch(only_reads, True, learners=2, topology="allreduce")


@pytest.mark.parametrize("delay", [1, 2])
def test_steps_of_a_stream_end_exactly(delay: int) -> None:
    """Gradients without examples, at the ends of the stream, are no steps; also while they are in flight."""
    got = sl.train(
        net(),
        Stream(21),
        loss=F.cross_entropy,
        optimizer=PLAIN,
        sync=f"delayed:{delay}",
        topology="allreduce",
        learners=2,
        batch_size=8,
        steps=7,
    )
    assert got.version == 7


def keeps_gradients(session: sl.Session, none: bool) -> list[Tensor]:
    model = net()
    opt, loader = session.optimizer(model, PLAIN), session.loader(points(50), batch_size=4)
    for _ in range(3):
        for x, y in loader:
            opt.zero_grad(set_to_none=none)
            F.cross_entropy(model(x), y).backward()
            opt.step()
    return [value.detach() for value in model.parameters()]


def test_gradients_that_are_set_to_zero_while_the_dial_turns() -> None:
    """They are never those that are on their way."""
    got = [
        sl.launch(
            keeps_gradients, none, learners=2, topology=SMALL, sync="hardsync until 1 then delayed:1"
        ).returned[0]
        for none in (True, False)
    ]
    assert all(torch.equal(one, other) for one, other in zip(*got, strict=True))
