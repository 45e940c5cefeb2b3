"""Random states that change hands: everybody draws what it would have drawn alone."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from syncline.sim.random_states import OUTSIDE, Random, RandomStreams

KINDS = ("uniform", "normal", "python", "gauss", "torch", "integers", "many")


def draw(kind: str) -> float:
    if kind == "uniform":
        return float(np.random.rand())
    if kind == "normal":  # keeps a second one back
        return float(np.random.randn())
    if kind == "python":
        return random.random()
    if kind == "gauss":
        return random.gauss(0, 1)
    if kind == "torch":
        return torch.randn(1).item()
    if kind == "integers":
        return float(np.random.randint(10))
    return float(np.random.rand(700).sum())  # more than a Mersenne Twister's words


def seed(owner: int) -> None:
    torch.manual_seed(owner)
    np.random.seed(owner)
    random.seed(owner)


@pytest.fixture(autouse=True)
def outside() -> Iterator[None]:
    before = Random()
    yield
    before.restore()


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(KINDS)), max_size=40))
def test_everybody_draws_as_if_alone(turns: list[tuple[int, str]]) -> None:
    streams, drawn = RandomStreams(), {owner: [] for owner in range(4)}  # type: Streams, dict[int, list[float]]
    for owner in range(4):
        streams.enter(owner)
        seed(owner)
    for owner, kind in turns:
        streams.enter(owner)
        drawn[owner].append(draw(kind))
    streams.enter(OUTSIDE)
    for owner in range(4):
        seed(owner)
        assert drawn[owner] == [draw(kind) for who, kind in turns if who == owner]


def test_the_outside_is_an_owner_too() -> None:
    seed(5)
    expected = [draw(kind) for kind in KINDS]
    seed(5)
    streams = RandomStreams()
    streams.enter(1)
    seed(6)
    [draw(kind) for kind in KINDS]
    streams.enter(OUTSIDE)
    assert [draw(kind) for kind in KINDS] == expected


def test_a_saved_state_is_of_its_moment() -> None:
    seed(1)
    kept = Random()
    first = [draw(kind) for kind in KINDS]
    kept.restore()
    assert [draw(kind) for kind in KINDS] == first
    kept.restore()
    draw("normal")
    kept.save()  # with a normal number kept back
    after = [draw("normal"), draw("uniform")]
    seed(2)
    kept.restore()
    assert [draw("normal"), draw("uniform")] == after


def test_another_bit_generator_of_numpys() -> None:
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(3))
        kept = Random()
        drawn = draw("uniform")
        kept.restore()
        assert draw("uniform") == drawn
    finally:
        np.random.set_bit_generator(before)
