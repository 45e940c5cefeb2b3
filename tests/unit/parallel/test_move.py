"""Moves with real Gloo groups: values arrive, partial sums are added, backward is the exact mirror, bytes are counted."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from syncline.errors import UsageError
from syncline.parallel.move import Group, Move
from syncline.parallel.windows import Box, cut, even
from tests.unit.parallel.seats import Seats
from tests.unit.parallel.test_windows import owned_and_wanted

seats = Seats()


@pytest.fixture(autouse=True, scope="module")
def _groups_end() -> Iterator[None]:
    yield
    seats.close()


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def matrix(boxes: list[list[Box]], shape: tuple[int, ...]) -> Tensor:
    """(numbers in all boxes, numbers of the array): which place each number is."""
    index = torch.arange(torch.Size(shape).numel()).reshape(shape)
    rows = []
    for box in [box for rank in boxes for box in rank]:
        padded = torch.full(box.shape, -1)
        inner = box.meet(Box.whole(shape))
        padded[inner.inside(box)] = index[inner.inside(Box.whole(shape))]
        rows.append(padded.reshape(-1))
    flat = torch.cat(rows)
    one_hot = torch.zeros(len(flat), index.numel(), dtype=torch.float64)
    inside = flat >= 0
    one_hot[inside, flat[inside]] = 1.0
    return one_hot


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(owned_and_wanted(), st.booleans())
def test_a_move_is_a_linear_map_and_backward_its_transpose(case: Any, sums: bool) -> None:
    shape, owns, wants = case
    owns = [[*boxes, Box(((0, 0),) * len(shape))] if shape and not boxes else boxes for boxes in owns]
    if not all(owns):
        return
    array = random(*shape)
    pads = (7.0, 7.0, 7.0)

    def work(group: Group) -> Any:
        whole = Box.whole(shape)
        mine = [
            (array + (group.rank if sums else 0))[box.inside(whole)].clone().requires_grad_()
            for box in owns[group.rank]
        ]
        move = Move(group, shape, owns, wants, pads=pads[: len(wants[group.rank])], sums=sums)
        got = move(*mine)
        upstream = [random(*box.shape, seed=group.rank * 10 + i) for i, box in enumerate(wants[group.rank])]
        if got:
            torch.autograd.backward(got, upstream)
        return got, [t.grad for t in mine], upstream

    if any(not boxes for boxes in wants):
        wants = [boxes or [Box(((0, 0),) * len(shape))] for boxes in wants]
    results = seats.run(len(owns), work)
    A, B = matrix(owns, shape), matrix(wants, shape)
    values = torch.cat(
        [
            (array + (rank if sums else 0))[box.inside(Box.whole(shape))].reshape(-1)
            for rank, boxes in enumerate(owns)
            for box in boxes
        ]
    )
    got = torch.cat([t.detach().reshape(-1) for r in results for t in r[0]])
    inside = B.sum(1) > 0
    assert (got[~inside] == 7.0).all()
    upstream = torch.cat([t.reshape(-1) for r in results for t in r[2]])
    gradient = torch.cat([t.reshape(-1) for r in results for t in r[1]])
    if sums:
        linear = B @ A.T
        torch.testing.assert_close(got[inside], (linear @ values)[inside])
        torch.testing.assert_close(gradient, linear.T @ upstream)
    else:
        torch.testing.assert_close(got[inside], (B @ array.reshape(-1))[inside], rtol=0, atol=0)
        # of copies one was read: the gradients of all copies of a place add up to what came for it
        torch.testing.assert_close(A.T @ gradient, B.T @ upstream)


def test_exactly_the_intersections_leave_a_process() -> None:
    shape, sent = (7, 5), []
    rows, columns = ([[box] for box in cut(shape, dim, even(shape[dim], 3))] for dim in (0, 1))
    whole = random(*shape)

    class Counting:
        """A process group that keeps what leaves this process."""

        def __init__(self, group: Any) -> None:
            self._group = group

        def __getattr__(self, name: str) -> Any:
            return getattr(self._group, name)

        def alltoall_base(self, out: Tensor, send: Tensor, received: list[int], parts: list[int]) -> Any:
            sent.append((self._group.rank(), tuple(parts)))
            return self._group.alltoall_base(out, send, received, parts)

    def work(group: Group) -> None:
        counting = Group(Counting(group._group))
        own = whole[rows[group.rank][0].inside(Box.whole(shape))].clone().requires_grad_()
        (got,) = Move(counting, shape, rows, columns)(own)
        assert torch.equal(got, whole[columns[group.rank][0].inside(Box.whole(shape))])
        got.sum().backward()
        assert torch.equal(own.grad, torch.ones_like(own))

    seats.run(3, work)
    sizes = [[0 if a == b else rows[a][0].meet(columns[b][0]).size for b in range(3)] for a in range(3)]
    back = [list(column) for column in zip(*sizes, strict=True)]
    assert sorted(sent) == sorted((rank, tuple(each[rank])) for each in (sizes, back) for rank in range(3))


def test_between_start_and_finish_others_can_be_computed_and_moves_can_overtake() -> None:
    shape = (4,)
    owns = [[Box(((0, 2),))], [Box(((2, 4),))]]
    everything = [[Box(((0, 4),))]] * 2

    def work(group: Group) -> tuple[list[float], list[float]]:
        own = torch.full((2,), 1.0 + group.rank, requires_grad=True)
        move = Move(group, shape, owns, everything)
        one, two = move.start(own), move.start(own * 10)
        product = own * 3
        (late,), (early,) = two.finish(), one.finish()
        (late.sum() + early.sum() + product.sum()).backward()
        return (early + late).tolist(), own.grad.tolist()

    for values, gradient in seats.run(2, work):
        assert values == [11.0, 11.0, 22.0, 22.0] and gradient == [25.0, 25.0]


@pytest.mark.parametrize("sums", [False, True])
def test_a_shared_gradient_counts_once(sums: bool) -> None:
    """Everybody computes the same loss from everything: as if one had."""
    whole = Box(((0, 3),))

    def work(group: Group) -> list[float]:
        own = torch.arange(3.0, requires_grad=True)
        (got,) = Move(group, (3,), [[whole]] * 2, [[whole]] * 2, sums=sums, shared=True)(own)
        (got * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
        assert got.tolist() == [0.0, 2.0, 4.0] if sums else [0.0, 1.0, 2.0]
        return own.grad.tolist()

    # of copies the first is used; every part of a sum is
    assert seats.run(2, work) == [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0] if sums else [0.0, 0.0, 0.0]]


def test_whole_numbers_and_single_values_move_too() -> None:
    def work(group: Group) -> Any:
        box = Box(((group.rank, group.rank + 1),))
        (tokens,) = Move(group, (2,), [[Box(((0, 1),))], [Box(((1, 2),))]], [[Box(((0, 2),))]] * 2)(
            torch.tensor([5 + group.rank])
        )
        (total,) = Move(group, (), [[Box(())]] * 2, [[Box(())]] * 2, sums=True)(torch.tensor(2.5))
        return tokens.tolist(), total.item(), box.size

    assert seats.run(2, work) == [([5, 6], 5.0, 1)] * 2


def test_bad_use_is_refused() -> None:
    whole = [[Box(((0, 3),))]]
    with pytest.raises(UsageError, match=r"the owned window \[0:3\] has shape \[3\], got \[2\]"):
        Move(Group(), (3,), whole, whole)(torch.zeros(2))
    with pytest.raises(UsageError, match=r"a shared gradient of \[0:3\] has to be wanted where it is owned"):
        Move(Group(), (3,), whole, [[Box(((0, 2),))]], shared=True)
    own = torch.ones(3, requires_grad=True)
    (got,) = Move(Group(), (3,), whole, [[Box(((-1, 3),))]])(own)
    (first,) = torch.autograd.grad(got.square().sum(), own, create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable"):
        first.sum().backward()
