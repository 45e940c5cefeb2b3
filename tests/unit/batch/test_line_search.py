"""Line searches: on Moré and Thuente's functions, and with any numbers at all."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.batch.line_search import armijo, wolfe
from tests.unit.batch.tapes import SCALARS, TAPES, Tape

Along = Callable[[float], tuple[float, float]]


def follow(search: Any, along: Along) -> tuple[int, float]:
    """How many trials, and the step it chose."""
    step = next(search)
    for trials in range(1, 100):
        try:
            step = search.send(along(step))
        except StopIteration as stop:
            return trials, stop.value
    raise AssertionError("it does not end")


# -- the functions of Moré and Thuente (1994), section 5: losses and slopes along a line ------------------------


def first(a: float) -> tuple[float, float]:
    return -a / (a * a + 2), (a * a - 2) / (a * a + 2) ** 2


def second(a: float) -> tuple[float, float]:
    b = a + 0.004
    return b**5 - 2 * b**4, 5 * b**4 - 8 * b**3


def third(a: float) -> tuple[float, float]:
    b, waves = 0.01, 39 * math.pi / 2
    near = abs(a - 1) < b
    loss = (a - 1) ** 2 / (2 * b) + b / 2 if near else abs(a - 1)
    slope = (a - 1) / b if near else math.copysign(1, a - 1)
    return loss + (1 - b) / waves * math.sin(waves * a), slope + (1 - b) * math.cos(waves * a)


def convex(b1: float, b2: float) -> Along:
    g1, g2 = math.hypot(1, b1) - b1, math.hypot(1, b2) - b2

    def along(a: float) -> tuple[float, float]:
        u, v = math.hypot(1 - a, b2), math.hypot(a, b1)
        return g1 * u + g2 * v, -g1 * (1 - a) / u + g2 * a / v

    return along


@pytest.mark.parametrize(
    "along, c1, c2, published",
    [
        (first, 1e-3, 0.1, [(6, 1.4), (3, 1.4), (1, 10), (4, 37)]),
        (second, 0.1, 0.1, [(12, 1.6), (8, 1.6), (8, 1.6), (11, 1.6)]),
        (third, 0.1, 0.1, [(12, 1.0), (12, 1.0), (10, 1.0), (13, 1.0)]),
        (convex(0.001, 0.001), 1e-3, 1e-3, [(4, 0.085), (1, 0.10), (3, 0.35), (4, 0.83)]),
        (convex(0.01, 0.001), 1e-3, 1e-3, [(6, 0.075), (3, 0.078), (7, 0.073), (8, 0.076)]),
        (convex(0.001, 0.01), 1e-3, 1e-3, [(13, 0.93), (11, 0.93), (8, 0.92), (11, 0.92)]),
    ],
    ids=["first", "second", "third", "fourth", "fifth", "sixth"],
)
def test_wolfe_needs_as_many_trials_as_more_and_thuentes_search(
    along: Along, c1: float, c2: float, published: list[tuple[int, float]]
) -> None:
    loss, slope = along(0.0)
    for start, (trials, chosen) in zip((1e-3, 1e-1, 1e1, 1e3), published, strict=True):
        count, step = follow(wolfe(loss, slope, start, c1=c1, c2=c2, trials=40), along)
        assert (count, step) == (trials, pytest.approx(chosen, rel=0.03))
        assert along(step)[0] <= loss + c1 * step * slope and abs(along(step)[1]) <= c2 * abs(slope)


def test_armijo_goes_back_to_the_first_step_that_is_low_enough() -> None:
    loss, slope = first(0.0)
    tried: list[float] = []

    def along(a: float) -> tuple[float, float]:
        tried.append(a)
        return first(a)

    _, step = follow(armijo(loss, slope, 100.0, c1=0.1, c2=0.9, trials=40), along)
    low = [first(a)[0] <= loss + 0.1 * a * slope for a in tried]
    assert step == tried[-1] and low == [False] * (len(low) - 1) + [True]
    assert all(0.1 * a <= b <= 0.5 * a for a, b in pairwise(tried))


@pytest.mark.parametrize("search", [wolfe, armijo])
def test_steps_that_are_not_finite_are_gone_back_from(search: Any) -> None:
    def walled(a: float) -> tuple[float, float]:
        return (-a, -1.0) if a < 0.001 else (math.nan, math.nan)

    trials, step = follow(search(0.0, -1.0, 1.0, c1=1e-3, c2=0.1, trials=12), walled)
    assert trials <= 12 and 1e-4 < step < 1e-3


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([wolfe, armijo]), SCALARS, st.floats(-1e300, -5e-324), st.floats(1e-300, 1e300), TAPES)
def test_a_line_search_ends_after_its_trials_with_a_step_that_lowers_the_loss(
    search: Any, loss: float, slope: float, first: float, values: list[float]
) -> None:
    loss = loss if math.isfinite(loss) else 1.0
    tape, tried = Tape(values), {0.0: (loss, slope)}
    steps = search(loss, slope, first, c1=1e-3, c2=0.9, trials=15)
    step = next(steps)
    for _ in range(15):
        assert 0 < step < math.inf
        tried.setdefault(step, (tape.next(), tape.next()))
        try:
            step = steps.send(tried[step])
        except StopIteration as stop:
            chosen = stop.value
            break
    else:
        pytest.fail("more trials than allowed")
    assert chosen in tried
    assert chosen == 0.0 or -math.inf < tried[chosen][0] <= loss
