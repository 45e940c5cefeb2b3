"""What all batch methods share: where one stands, when it ends, and a line search with its way back (M18)."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict
from typing import Any

import pytest

from syncline.batch import commands as c
from syncline.batch.descent import Options, Standing, first_step
from syncline.batch.methods import ConjugateGradient
from syncline.errors import UsageError


def got(squared: float = 4.0, largest: float = 2.0, **more: float) -> dict[str, float]:
    return {"g.g": squared, "largest": largest, **more}


def test_a_method_stands_where_its_last_finite_point_was() -> None:
    at = Standing("a method")
    assert at.begin(got(loss=8.0)) and at.evaluated and at.decrease is None
    assert at.advance(6.0, got(1.0, 1.0))
    assert (at.iteration, at.loss, at.squared, at.largest, at.decrease) == (1, 6.0, 1.0, 1.0, 0.25)
    before = asdict(at)
    for loss, measured in ((math.nan, got()), (1.0, got(math.inf)), (1.0, got(1.0, math.nan))):
        assert not at.advance(loss, measured) and asdict(at) == before
    assert at.record(0.5, restarted=True) == c.Record(1, 6.0, 0.5, 1.0, 1, True)


def test_a_decrease_is_relative_and_does_not_overflow() -> None:
    at = Standing("a method", loss=1e308)
    assert at.advance(-1e308, got()) and at.decrease == 2.0
    at = Standing("a method", loss=0.5)
    assert at.advance(0.25, got()) and at.decrease == 0.25  # small losses count as they are


def test_a_state_goes_through_json_and_to_its_own_method_only() -> None:
    at = Standing("a method")
    at.begin(got(loss=8.0)), at.advance(6.0, got())
    state = json.loads(json.dumps({**asdict(at), "of the direction": 1}))
    assert Standing.of("a method", state) == at and Standing.of("a method", None) == Standing("a method")
    with pytest.raises(UsageError, match="another cannot go on from a state of a method"):
        Standing.of("another", state)
    with pytest.raises(UsageError, match="a method cannot go on from a state of no method"):
        Standing.of("a method", {})


@pytest.mark.parametrize(
    ("largest", "decrease", "why"),
    [
        (0.0, None, "gradient"),
        (0.1, None, "gradient"),  # the tolerance itself is within it
        (0.11, None, None),
        (1.0, 0.01, "decrease"),
        (1.0, 0.0, "decrease"),
        (1.0, 0.011, None),
        (1.0, -0.001, None),  # it rose
    ],
)
def test_a_method_ends_within_its_tolerances(largest: float, decrease: float | None, why: str | None) -> None:
    reached = Options(tolerance=0.1, decrease=0.01).reached(Standing("a", largest=largest, decrease=decrease))
    assert (reached and reached[0]) == why


def test_an_end_says_what_it_took() -> None:
    end = Standing("a method", iteration=3, evaluations=7, loss=0.25).end("gradient", "the gradient is zero")
    assert end == c.End(
        "gradient", "the gradient is zero; loss 0.25 after 3 iterations, 7 evaluations", 3, 7, 0.25
    )


def test_the_first_step_moves_by_one_whatever_the_gradient() -> None:
    assert first_step(16.0) == 0.25 and first_step(0.0) == 1.0 and first_step(1e-301) == 1.0


# -- one line search, answered by hand -------------------------------------------------------------------------


def answer(program: Any, **scalars: float) -> dict[str, float]:
    """What it measures: these, by names with underscores, and ones."""
    return {name: scalars.get(re.sub(r"\W", "_", name), 1.0) for name in c.results(program)}


def begun() -> tuple[Any, Any]:
    """A method at a point of loss 8, and its first line search."""
    steps = ConjugateGradient(line_search="armijo", trials=1)(None)
    opening = next(steps)
    return steps, steps.send(answer(opening, loss=8.0, g_g=4.0, largest=2.0))


def test_a_move_that_lowers_the_loss_is_an_iteration() -> None:
    steps, search = begun()
    after = steps.send(answer(search, slope_before=-4.0, loss=7.0, slope=-3.0))
    done = steps.send(answer(after))
    assert isinstance(done, c.Iteration) and (done.record.loss, done.record.evaluations) == (7.0, 2)


def test_where_no_step_lowers_the_loss_all_is_put_back_as_it_was() -> None:
    steps, search = begun()
    swap = next(each for each in search if isinstance(each, c.Swap) and each.b == "g")
    back = steps.send(answer(search, slope_before=-4.0, loss=9.0, slope=1.0))
    assert back == (c.Copy("x", "old x"), swap)
    with pytest.raises(StopIteration) as stop:
        steps.send({})
    assert stop.value.value.why == "line search" and stop.value.value.loss == 8.0


def test_a_gradient_that_is_not_finite_where_the_loss_is_lower_ends_at_the_point_before() -> None:
    steps, search = begun()
    after = steps.send(answer(search, slope_before=-4.0, loss=7.0, slope=-3.0))
    nan = dict.fromkeys(c.results(after), math.nan)
    assert steps.send(nan) == (c.Copy("x", "old x"),)
    with pytest.raises(StopIteration) as stop:
        steps.send({})
    assert stop.value.value.why == "not finite" and stop.value.value.loss == 8.0
