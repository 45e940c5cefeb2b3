"""Convolutions whose weights differ from version to version: those of torch, one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from syncline.sim.batched import convolutions
from syncline.sim.batched.convolutions import Unfolded, convolve


@pytest.mark.parametrize(
    ("images", "size", "kernel", "stride", "padding", "dilation"),
    [
        (1, (5, 5), (3, 3), (1, 1), (0, 0), (1, 1)),
        (3, (7, 6), (5, 3), (2, 1), (2, 1), (1, 1)),
        (2, (9, 8), (3, 2), (3, 2), (1, 0), (2, 3)),
        (11, (6, 6), (5, 5), (1, 1), (2, 2), (1, 1)),  # more images than have a product of their own
        (2, (4, 4), (1, 1), (1, 1), (0, 0), (1, 1)),
    ],
)
@pytest.mark.parametrize("bias", [True, False])
def test_convolutions_of_many_versions_are_those_of_each(
    images: int, size: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, bias: bool
) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, images, 3, *size, dtype=torch.float64, requires_grad=True)
    w = torch.randn(4, 5, 3, *kernel, dtype=torch.float64, requires_grad=True)
    b = torch.randn(4, 5, dtype=torch.float64, requires_grad=True) if bias else None
    inputs = [x, w] if b is None else [x, w, b]
    mine = convolve(x, w, b, stride, padding, dilation)
    each = torch.stack(
        [F.conv2d(x[i], w[i], None if b is None else b[i], stride, padding, dilation) for i in range(4)]
    )
    torch.testing.assert_close(mine, each)
    direction = torch.randn_like(each)
    torch.testing.assert_close(
        torch.autograd.grad((mine * direction).sum(), inputs),
        torch.autograd.grad((each * direction).sum(), inputs),
    )


DRAWN = torch.Generator().manual_seed(0)
X, W, B = (torch.randn(shape, generator=DRAWN) for shape in ((4, 2, 3, 7, 7), (4, 6, 3, 3, 3), (4, 6)))
Call = Callable[[Tensor, Tensor, Tensor], Tensor]

CALLS: dict[str, tuple[Call, int]] = {  # and how many of them are taken over
    "plain": (lambda x, w, b: F.conv2d(x, w, b), 1),
    "by name": (lambda x, w, b: F.conv2d(input=x, weight=w, bias=b, stride=2, padding=(1, 0)), 1),
    "one number in a tuple": (lambda x, w, b: F.conv2d(x, w, None, (2,), (1,), (1,)), 1),
    "padding by a word": (lambda x, w, b: F.conv2d(x, w, b, padding="same"), 0),
    "groups": (lambda x, w, b: F.conv2d(x, w[:, :1], b, groups=3), 0),
    "no batch": (lambda x, w, b: F.conv2d(x[0], w, b), 0),
    "another function": (lambda x, w, b: F.linear(x, w[0, 0, :, :1].expand(3, 7)), 0),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_it_can_do_is_taken_over_and_what_it_cannot_stays_with_torch(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, expected = CALLS[name]
    taken: list[int] = []

    def counted(*given: Any) -> Tensor:
        taken.append(1)
        return convolve(*given)

    monkeypatch.setattr(convolutions, "convolve", counted)
    with Unfolded():
        mine = torch.vmap(call)(X, W, B)
    assert len(taken) == expected
    torch.testing.assert_close(
        mine, torch.stack([call(X[i], W[i], B[i]) for i in range(4)]), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("dims", [(None, 0, 0), (0, None, None), (0, 0, None), (0, None, 0), (1, 2, 1)])
def test_what_all_versions_share_is_the_same_for_each(dims: tuple[int | None, ...]) -> None:
    given = [
        each if dim == 0 else each[0] if dim is None else each.movedim(0, dim)
        for each, dim in zip((X, W, B), dims, strict=True)
    ]
    with Unfolded():
        mine = torch.vmap(F.conv2d, in_dims=dims)(*given)
    for index in range(4):
        own = [
            each if dim is None else each.select(dim, index) for each, dim in zip(given, dims, strict=True)
        ]
        torch.testing.assert_close(mine[index], F.conv2d(*own), rtol=1e-4, atol=1e-4)
