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


@pytest.mark.parametrize(
    "topology, sync",
    [
        (SMALL, "hardsync until 1 then delayed:1"),
        (SMALL, "delayed:2"),
        (f"{SMALL},apply=reverse", "hardsync"),
        (f"{SMALL},apply=arrival", "hardsync"),
    ],
)
def test_gradients_that_are_set_to_zero(topology: str, sync: str) -> None:
    """They are never those that are on their way, also where the dial turns."""
    got = [
        sl.launch(keeps_gradients, none, learners=2, topology=topology, sync=sync).returned[0]
        for none in (True, False)
    ]
    assert all(torch.equal(one, other) for one, other in zip(*got, strict=True))


def accumulates(session: sl.Session) -> list[Tensor]:
    model = net()
    opt = session.optimizer(model, PLAIN)
    for number, (x, y) in enumerate(session.loader(points(21), batch_size=8)):
        loss = F.cross_entropy(model(x), y) / 2
        if number % 2 == 0:
            with session.accumulate():
                loss.backward()
        else:
            loss.backward()
            opt.step()
            opt.zero_grad()
    return [value.detach() for value in model.parameters()]


def gradient(model: nn.Module, part: Tensor) -> list[Tensor]:
    x, y = points(21)[part]
    return list(torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters())))


@pytest.mark.parametrize("topology", ["allreduce", SMALL, f"{SMALL},apply=reverse"])
def test_a_repeated_batch_adds_nothing_to_an_accumulated_gradient(topology: str) -> None:
    """Two batches a step, the second of them five and none: 13 examples beside 8, which are the half of a gradient."""
    got = sl.launch(accumulates, learners=2, sync="hardsync", topology=topology)
    model, order = net(), sl.epoch_order(21, seed=0, epoch=0)
    first, second, last = (gradient(model, order[a:b]) for a, b in ((0, 8), (8, 16), (16, 21)))
    with torch.no_grad():
        for parameter, one, two, three in zip(model.parameters(), first, second, last, strict=True):
            parameter -= 0.1 * (13 * (one + three) / 2 + 8 * two / 2) / 21
    for one, other in zip(got.returned[1], model.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)
    table = got.statistics.tables[0]
    assert (table.version, table.gradients, table.examples) == (1, 2, 21)


def zipped(session: sl.Session, swap: bool) -> list[Tensor]:
    model = net()
    opt = session.optimizer(model, PLAIN)
    loaders = [session.loader(points(21), batch_size=8), session.loader(points(32), batch_size=8)]
    for one, other in zip(*(loaders[::-1] if swap else loaders), strict=True):
        opt.zero_grad()
        sum(F.cross_entropy(model(x), y) for x, y in (one, other)).backward()
        opt.step()
    return [value.detach() for value in model.parameters()]


@pytest.mark.parametrize("topology", ["allreduce", SMALL])
def test_a_repeated_batch_beside_another_loaders(topology: str) -> None:
    """A gradient over both counts, whichever was handed out last."""
    got = [sl.launch(zipped, swap, learners=2, topology=topology) for swap in (False, True)]
    assert all(torch.equal(*pair) for pair in zip(*(each.returned[1] for each in got), strict=True))
    assert [each.statistics.tables[0].gradients for each in got] == [4, 4]


def own_step_at_the_end(session: sl.Session) -> int:
    model = net()
    opt = session.optimizer(model, PLAIN)
    for x, y in session.loader(points(21), batch_size=8):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    opt.zero_grad()
    x, y = points(4).tensors
    F.cross_entropy(model(x), y).backward()
    own = [value.grad.abs().sum().item() for value in model.parameters()]  # type: ignore[union-attr]
    opt.step()
    return sum(value > 0 for value in own)


@pytest.mark.parametrize("topology", ["allreduce", SMALL])
def test_a_step_on_own_data_after_a_repeated_batch_counts(topology: str) -> None:
    got = sl.launch(own_step_at_the_end, learners=2, topology=topology)
    assert got.returned == [2, 2] and got.statistics.tables[0].gradients == 5


class FailsOnce(torch.autograd.Function):
    """The identity; backward raises where it is told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fails: bool) -> Tensor:
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        if ctx.fails:
            raise MemoryError("for once")
        return gradient, None


def deep() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def tries_again(session: sl.Session) -> list[Tensor]:
    model = deep()
    opt = session.optimizer(model, PLAIN)
    for number, (x, y) in enumerate(session.loader(points(32), batch_size=4)):
        for attempt in range(3):
            opt.zero_grad()
            hidden = FailsOnce.apply(model[0](x), number == 1 and session.rank == 1 and attempt == 0)
            try:
                F.cross_entropy(model[2](model[1](hidden)), y).backward()
                break
            except MemoryError:
                pass
        opt.step()
    return [value.detach() for value in model.parameters()]


@pytest.mark.parametrize(
    "topology", ["allreduce", "allreduce:layerwise", "allreduce:layerwise,apply=reverse"]
)
def test_a_backward_that_failed_is_tried_again(topology: str) -> None:
    """Nothing of it was on its way: there is one bucket, and it was not full."""
    got = sl.launch(tries_again, learners=2, topology=topology)
    wanted = sl.launch(tries_again, learners=2, topology="servers", sync="hardsync")
    for one, other in zip(got.returned[1], wanted.returned[0], strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)
    assert got.statistics.tables[0].examples == 32


def goes_on(session: sl.Session, steps: bool) -> None:
    """Neither tries again nor gives up."""
    model = deep()
    opt = session.optimizer(model, PLAIN)
    for number, (x, y) in enumerate(session.loader(points(32), batch_size=4)):
        hidden = FailsOnce.apply(model[0](x), number == 1 and session.rank == 1)
        try:
            F.cross_entropy(model[2](model[1](hidden)), y).backward()
        except MemoryError:
            if not steps:
                continue
        opt.step()


@pytest.mark.parametrize("apply", ["end", "reverse"])
@pytest.mark.parametrize("loop", [tries_again, partial(goes_on, steps=False), partial(goes_on, steps=True)])
def test_a_failed_backward_of_which_others_have_a_part_is_refused(loop: Any, apply: str) -> None:
    with pytest.raises(LearnerError, match=r"learner 1 .*failed when 2 of 4 buckets .* allreduce:blocking"):
        sl.launch(loop, learners=2, topology=f"{SMALL},apply={apply}")


def leaves_out(session: sl.Session, when: int, who: tuple[int, ...]) -> None:
    model = deep()
    opt = session.optimizer(model, PLAIN)
    for number, (x, y) in enumerate(session.loader(points(60), batch_size=2)):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if number < when or session.rank not in who:
            opt.step()


@pytest.mark.parametrize("who", [(1,), (0, 2)])
@pytest.mark.parametrize(
    "topology, sync", [(SMALL, "hardsync"), (f"{SMALL},apply=arrival", "hardsync"), (SMALL, "delayed:2")]
)
@pytest.mark.parametrize("engine", ["local", "sim"])
def test_a_step_that_some_leave_out_is_named(
    topology: str, sync: str, who: tuple[int, ...], engine: str
) -> None:
    words = rf"learner [{who}] has taken 4 steps of table 0 where {3 - len(who)} .* after backward 5"
    with pytest.raises(LearnerError, match=words):
        sl.launch(leaves_out, 4, who, learners=3, topology=topology, sync=sync, engine=engine)
