"""Reductions of one table: what is in a buffer, when it is on its way, and what is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from syncline.errors import LayoutError, RunError, UsageError
from syncline.learn.allreduce_reducer import GRAIN, Bucket, Header
from syncline.learn.allreduce_session import AllReduceSession
from syncline.ports import Computing
from tests.unit.learn.among_equals import Crowd

SGD = partial(torch.optim.SGD, lr=1.0)
LAYERWISE = "allreduce:layerwise,bucket=1"


def bucket(*shapes: tuple[int, ...], header: bool = True) -> Bucket:
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    return Bucket(range(len(shapes)), parameters, header=header, like=torch.zeros(1))


def test_a_bucket_brings_gradients_flags_and_the_header_back() -> None:
    own = bucket((2, 3), (GRAIN + 1,), (2,))
    own.put(0, torch.full((2, 3), 6.0), 2.0)
    own.put(2, torch.tensor([1.0, 2.0]), 1.0)
    own.views[1].fill_(9.0)  # of an earlier round
    own.seal([1.0, 0.0, 1.0], Header(examples=4.0, turn_2=1.0))
    own.flat.mul_(2)  # with a learner that has the same
    own.open()
    assert own.present == [True, False, True] and own.header == Header(examples=8.0, turn_2=2.0)
    own.scale(0.5)
    assert [view.unique().tolist() for view in own.views] == [[3.0], [0.0], [1.0, 2.0]]
    assert own.header.examples == 8.0 and own.flat[own.gradients.numel()] == 2.0, "only gradients are scaled"


def test_views_begin_where_vectors_do_and_a_bucket_without_a_header_has_flags_only() -> None:
    own = bucket((3,), (GRAIN,), (1,), header=False)
    offsets = [view.storage_offset() for view in own.views]
    assert offsets == [0, GRAIN, 2 * GRAIN] and own.flat.numel() == 3 * GRAIN + 3
    own.seal([0.0, 1.0, 0.0], Header(examples=1.0))
    own.open()
    assert own.present == [False, True, False] and own.header == Header()


def test_a_gradient_that_is_the_view_itself_is_not_lost() -> None:
    own = bucket((2,))
    own.views[0].fill_(4.0)
    own.put(0, own.views[0], 2.0)
    own.put(0, own.views[0], 1.0)
    assert own.views[0].tolist() == [2.0, 2.0]


def test_sparse_gradients_are_refused() -> None:
    with pytest.raises(LayoutError, match="sparse gradient, which does not travel"):
        bucket((2,)).put(0, torch.ones(2).to_sparse(), 1.0)


# -- rounds --------------------------------------------------------------------------------------------------


def two_layers(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)).to(dtype)


def run(loop: Any, topology: str = LAYERWISE, sync: str = "hardsync", learners: int = 1) -> tuple[Crowd, Any]:
    crowd = Crowd(learners, topology, sync)

    def main(session: AllReduceSession) -> Any:
        model = two_layers()
        return loop(session, model, session.optimizer(model, SGD))

    return crowd, crowd.run(main)


def backward(model: nn.Module, x: float = 1.0) -> None:
    model(torch.full((1, 1), x)).sum().backward()


def test_layerwise_starts_each_bucket_as_backward_makes_it_and_blocking_all_in_the_step() -> None:
    def loop(session: AllReduceSession, model: nn.Module, optimizer: Any) -> list[int]:
        counts: list[int] = []
        reduced = session.port.reduced  # type: ignore[attr-defined]
        optimizer.hooks.after_gradient(lambda name, parameter: counts.append(len(reduced)))
        session.consume(0, 1, more=True)
        backward(model)
        counts.append(len(reduced))
        optimizer.step()
        return [*counts, len(reduced)]

    _, (found,) = run(loop)
    assert found == [0, 1, 2, 3, 4, 4]
    _, (found,) = run(loop, "allreduce:blocking")
    assert found == [0, 0, 0, 0, 0, 1]


def test_a_simulated_clock_hears_of_each_batch_once() -> None:
    def loop(session: AllReduceSession, model: nn.Module, optimizer: Any) -> None:
        for count in (3, 2):
            session.consume(0, count, more=True)
            backward(model)
            optimizer.step()

    crowd, _ = run(loop, "allreduce:blocking")
    assert crowd.ports[0].spent == [Computing(3), Computing(2)]
    crowd, _ = run(loop)
    shares = {
        count: sum(each.share for each in crowd.ports[0].spent if each.examples == count) for count in (3, 2)
    }
    assert shares == {3: pytest.approx(1.0), 2: pytest.approx(1.0)}


def test_accumulated_backwards_are_reduced_with_the_one_after_them() -> None:
    def loop(session: AllReduceSession, model: nn.Sequential, optimizer: Any) -> tuple[int, Tensor]:
        with session.accumulate():
            session.consume(0, 1, more=True)
            backward(model)
            quiet = len(session.port.reduced)  # type: ignore[attr-defined]
        session.consume(0, 1, more=True)
        backward(model)
        optimizer.step()
        return quiet, model[1].bias.grad  # type: ignore[return-value]

    crowd, ((quiet, gradient),) = run(loop)
    assert quiet == 0 and len(crowd.ports[0].reduced) == 4 and gradient.item() == 2.0


def test_a_second_backward_before_the_step_is_reduced_once_more_and_adds() -> None:
    def loop(session: AllReduceSession, model: nn.Sequential, optimizer: Any) -> float:
        session.consume(0, 1, more=True)
        backward(model)
        assert model[1].bias.grad.item() == 1.0  # type: ignore[union-attr]
        backward(model)
        optimizer.step()
        return model[1].bias.grad.item()  # type: ignore[union-attr]

    for order in (LAYERWISE, f"{LAYERWISE},apply=reverse"):
        crowd, (gradient, other) = run(loop, order, learners=2)
        assert gradient == other == 2.0 and len(crowd.ports[0].reduced) == 8


def test_a_repeated_batch_has_no_weight_and_a_gradient_without_batches_the_last_one() -> None:
    weights = [(1, 3), (1, 0), (None, None)]  # examples by rank; none: a backward without a batch

    def loop(session: AllReduceSession, model: nn.Sequential, optimizer: Any) -> list[float]:
        session.reference, means = 3, []
        for pair in weights:
            if (count := pair[session.rank]) is not None:
                session.consume(0, count, more=True)
            else:
                session.epoch_left()
            optimizer.zero_grad()
            (model[1](torch.ones(1, 1)) * (1.0 + session.rank)).sum().backward()
            optimizer.step()
            means.append(round(model[1].bias.grad.item(), 4))  # type: ignore[union-attr]
        return means

    _, (found, other) = run(loop, "allreduce:blocking", learners=2)
    assert found == other == [1.75, 1.0, 1.75]


@pytest.mark.parametrize("sync, order", [("delayed:1", "end"), ("hardsync", "reverse")])
def test_a_gradient_on_its_way_that_the_loop_changes_is_refused_by_its_name(sync: str, order: str) -> None:
    def loop(session: AllReduceSession, model: nn.Sequential, optimizer: Any) -> None:
        session.consume(0, 1, more=True)
        backward(model)
        model[0].weight.grad.mul_(0.5)  # type: ignore[union-attr, operator]
        optimizer.step()

    with pytest.raises(
        UsageError, match=r"the gradient of '0\.weight' was changed between backward and step"
    ):
        run(loop, f"{LAYERWISE},apply={order}", sync)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        raise ValueError("here")


@pytest.mark.parametrize("topology", [LAYERWISE, "allreduce:layerwise"])
def test_a_backward_that_failed_is_refused_where_some_of_it_is_on_its_way(topology: str) -> None:
    def loop(session: AllReduceSession, model: nn.Sequential, optimizer: Any) -> float:
        session.consume(0, 1, more=True)
        with pytest.raises(ValueError, match="here"):
            model[1](Fails.apply(model[0](torch.ones(1, 1)))).sum().backward()
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
        return model[1].bias.grad.item()  # type: ignore[union-attr]

    if topology == LAYERWISE:
        words = "failed when 2 of 4 buckets of its gradient were on their way to the others"
        with pytest.raises(UsageError, match=words):
            run(loop, topology)
    else:  # one bucket, which waits for all
        _, found = run(loop, topology)
        assert found == [1.0]


def test_who_leaves_a_step_out_is_told_so() -> None:
    def loop(session: AllReduceSession, model: nn.Sequential, optimizer: Any) -> None:
        for number in range(2):
            session.consume(0, 1, more=True)
            backward(model)
            if number or session.rank:
                optimizer.step()

    words = "learner 0 has taken 0 steps of table 0 where 1 other learners have taken 1"
    with pytest.raises(RunError, match=words):
        run(loop, learners=2)


@pytest.mark.parametrize(
    "dtypes, buckets", [(["half"], [0, 2]), (["float"], [2]), (["half", "float"], [1, 1])]
)
def test_the_header_travels_with_a_dtype_that_can_count_or_alone(
    dtypes: list[str], buckets: list[int]
) -> None:
    crowd = Crowd()

    def loop(session: AllReduceSession) -> list[Bucket]:
        model = nn.Linear(1, 1)
        for parameter, dtype in zip(model.parameters(), dtypes * 2, strict=False):
            parameter.data = getattr(parameter.data, dtype)()
        return session.optimizer(model, SGD).reducer.buckets  # type: ignore[attr-defined, no-any-return]

    (found,) = crowd.run(loop)
    assert [len(each.indices) for each in found] == buckets
    (carrier,) = [each for each in found if each.carries_header]
    assert carrier.flat.dtype == torch.float32
