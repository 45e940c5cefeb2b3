"""Moves with real Gloo groups: values arrive, partial sums are added, backward is the exact mirror, bytes are counted."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from syncline.parallel.move import Group, Move
from syncline.parallel.windows import Box
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
