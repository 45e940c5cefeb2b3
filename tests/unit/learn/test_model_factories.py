"""Models on their way, and the states of random generators: nothing is drawn that a plain script would not draw."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from syncline.errors import LayoutError, UsageError
from syncline.learn.model_factories import (
    CPU,
    ModelFactory,
    copied,
    made,
    pack_random,
    refuse_unready,
    seed_random,
    unpack_random,
)


def draws() -> list[float]:
    """Something of all generators, normal numbers too: these come in pairs, of which the other is kept."""
    return [
        *torch.randn(3).tolist(),
        float(np.random.rand()),
        float(np.random.randn()),
        random.random(),
        random.gauss(0, 1),
    ]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**63 - 1), before=st.integers(0, 3))
def test_generators_go_on_where_they_were_packed(seed: int, before: int) -> None:
    seed_random(seed)
    for _ in range(before):
        draws()
    packed = pack_random(CPU)
    wanted = draws()
    seed_random(1)
    unpack_random(packed, CPU)
    assert draws() == wanted


def test_torchs_own_state_may_be_another_than_the_present_one() -> None:
    seed_random(3)
    marked = torch.get_rng_state()
    wanted = torch.rand(2)
    packed = pack_random(CPU, marked)
    after = random.random()
    unpack_random(packed, CPU)
    assert torch.equal(torch.rand(2), wanted) and random.random() == after


def test_a_factory_makes_what_a_plain_script_makes_and_draws_nothing() -> None:
    factory = ModelFactory(lambda: nn.Linear(3, 2), 11)
    seed_random(5)
    wanted = draws()
    seed_random(5)
    one, other = made(factory), made(factory)
    assert draws() == wanted
    seed_random(11)
    plain = nn.Linear(3, 2)
    assert torch.equal(one.weight, plain.weight) and torch.equal(other.weight, plain.weight)
    assert made(plain) is plain


def test_generators_are_put_back_where_a_factory_fails() -> None:
    def fails() -> nn.Module:
        torch.randn(4)
        raise KeyError("no such layer")

    before = torch.get_rng_state()
    with pytest.raises(KeyError):
        ModelFactory(fails, 0)()
    with pytest.raises(UsageError, match="a callable that makes one, got list"):
        ModelFactory(lambda: [nn.Linear(1, 1)], 0)()
    assert torch.equal(torch.get_rng_state(), before)


class Remembers(nn.Module):
    """Keeps a tensor that it computed, which `copy.deepcopy` refuses, and something that cannot be copied at all."""

    def __init__(self, held: object = None) -> None:
        super().__init__()
        self.layer, self.held = nn.Linear(2, 2), held
        self.seen: Tensor = self.layer(torch.ones(2))


class Uncopied:
    def __deepcopy__(self, memo: object) -> object:
        raise RuntimeError("there is one of me")


@pytest.mark.parametrize("held", [None, Uncopied()])
def test_a_model_with_computed_tensors_is_copied(held: object) -> None:
    model = Remembers(held)
    if held is None:
        with pytest.raises(RuntimeError):
            copy.deepcopy(model)
        twin = copied(model)
        assert twin.seen.is_leaf and torch.equal(twin.seen, model.seen)
    else:
        model.seen = model.seen.detach()
        twin = copied(model)
    assert twin.layer is not model.layer
    twin.layer.weight.data.zero_()
    assert model.layer.weight.abs().sum() > 0 and twin.state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: nn.Sequential(nn.LazyLinear(2)), "'0.weight' of Sequential is lazy and has no shape yet"),
        (
            lambda: nn.Linear(2, 2, device="meta"),
            "'weight' of Linear is on the meta device and has no values",
        ),
        (
            lambda: nn.BatchNorm1d(2, affine=False, device="meta"),
            "'running_mean' of BatchNorm1d is on the meta",
        ),
    ],
)
def test_models_without_values_are_refused_by_name(make: object, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        refuse_unready(make())  # type: ignore[operator]
    refuse_unready(nn.BatchNorm1d(2))
