"""Whatever the objective and the shards answer, a batch method ends, or goes on with finite numbers, with the best x."""

import json
import math
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.batch import commands as c
from syncline.batch.methods import LBFGS, ConjugateGradient, GradientDescent
from tests.unit.batch.plain import Plain
from tests.unit.batch.problems import rosenbrock
from tests.unit.batch.tapes import TAPES, Tape

METHODS: list[c.BatchMethod] = [
    LBFGS(history=1, trials=4),
    LBFGS(history=3, trials=6, tolerance=0, decrease=0),
    LBFGS(history=2, line_search="armijo", trials=3),
    ConjugateGradient(trials=5, decrease=0),
    GradientDescent(lr=0.5),
]
MOST = 40  # iterations


def run(
    method: c.BatchMethod, plain: Plain, tamper: Any
) -> tuple[c.End | None, list[tuple[float, np.ndarray]]]:
    """Until it ends, or MOST iterations; with the loss and x of every iterate, the start's first."""
    steps, iterates = method(None), [(math.inf, plain.whole("x"))]
    said = next(steps)
    try:
        while len(iterates) <= MOST:
            if isinstance(said, c.Iteration):
                json.dumps(said.state, allow_nan=False)
                iterates.append((said.record.loss, plain.whole("x")))
                said = steps.send({})
                continue
            got = tamper(plain.run(said))  # `run` refuses numbers that are not finite
            if iterates[0][0] == math.inf and "loss" in got:
                iterates[0] = (got["loss"], iterates[0][1])
            said = steps.send(got)
    except StopIteration as stop:
        return stop.value, iterates
    return None, iterates


def check_best(
    method: c.BatchMethod, end: c.End | None, iterates: list[tuple[float, np.ndarray]], x: np.ndarray
) -> None:
    losses = [loss for loss, _ in iterates]
    assert all(map(math.isfinite, losses[1:]))
    if not isinstance(method, GradientDescent):
        assert losses[1:] == sorted(losses[1:], reverse=True)  # never up
    if end is None or len(iterates) == 1:
        return
    assert end.loss == min(losses)
    assert any(loss == end.loss and x.tobytes() == best.tobytes() for loss, best in iterates)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(METHODS), TAPES, TAPES)
def test_with_any_losses_and_gradients_x_is_the_best_iterate(
    method: c.BatchMethod, losses: list[float], slopes: list[float]
) -> None:
    loss, slope = Tape(losses), Tape(slopes)

    def hostile(x: np.ndarray) -> tuple[float, np.ndarray]:
        return loss.next(), np.array([slope.next() for _ in x])

    plain = Plain(hostile, method.vectors, np.array([1.0, -2.0, 3.0]), parts=2)
    end, iterates = run(method, plain, lambda got: got)
    check_best(method, end, iterates, plain.whole("x"))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(METHODS), TAPES)
def test_with_any_scalars_at_all_it_sends_only_finite_numbers(
    method: c.BatchMethod, scalars: list[float]
) -> None:
    tape = Tape(scalars)
    plain = Plain(lambda x: (0.0, x), method.vectors, np.array([1.0, -2.0, 3.0]))
    end, iterates = run(method, plain, lambda got: {name: tape.next() for name in got})
    check_best(method, end, iterates, plain.whole("x"))


def test_a_dot_that_is_not_finite_makes_it_forget_its_history() -> None:
    method = LBFGS(history=2)
    plain = Plain(rosenbrock, method.vectors, np.array([-1.2, 1.0]))
    end, iterates = run(method, plain, lambda got: got | ({"y0.y0": math.inf} if "y0.y0" in got else {}))
    check_best(method, end, iterates, plain.whole("x"))
    assert iterates[-1][0] < 1e-6 * iterates[0][0] or len(iterates) > MOST
