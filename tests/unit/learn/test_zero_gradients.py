"""Gradients of repeated batches: which of them are zeros."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from syncline.learn.allreduce_feed import ZeroGradients


@pytest.mark.parametrize(
    "handed_out, silent",
    [
        ([(0, False)], False),
        ([(0, False), (0, True)], True),
        ([(0, True)], True),
        ([(0, False), (0, True), (0, False)], False),
        ([(1, False), (0, True)], False),  # zipped: beside a new one of another loader
        ([(0, True), (1, False)], False),
        ([(0, False), (1, False), (0, True)], False),
        ([(0, False), (1, False), (0, True), (1, True)], True),  # both are repeated
        ([(0, False), (1, False), (0, True), (1, True), (0, True), (1, True)], True),
    ],
)
def test_repeated_batches_are_silent(handed_out: list[tuple[int, bool]], silent: bool) -> None:
    layer, frozen = nn.Linear(3, 1), nn.Parameter(torch.zeros(2), requires_grad=False)
    silence = ZeroGradients()
    silence.add([*layer.parameters(), frozen])
    for loader, repeated in handed_out:
        silence.handed_out(loader, repeated=repeated)
    for wanted in (silent, False):
        layer.zero_grad()
        layer(torch.ones(1, 3)).sum().backward()
        assert all((value.grad == 0).all() == wanted for value in layer.parameters())
        silence.end()


def test_parameters_that_are_unfrozen_between_two_repeated_batches() -> None:
    layer, silence = nn.Linear(3, 1), ZeroGradients()
    layer.bias.requires_grad_(False)
    silence.add(layer.parameters())
    silence.handed_out(0, repeated=True)
    layer.bias.requires_grad_(True)
    silence.handed_out(0, repeated=True)
    layer(torch.ones(1, 3)).sum().backward()
    assert all((value.grad == 0).all() for value in layer.parameters())
