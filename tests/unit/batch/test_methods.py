"""Batch methods over plain arrays: against scipy and torch, cut into shards, saved and resumed, with bad input."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from syncline.batch.commands import BatchMethod, Combine, Dot, Evaluate
from syncline.batch.descent import Descent
from syncline.batch.methods import LBFGS, ConjugateGradient, GradientDescent
from syncline.errors import UsageError
from tests.unit.batch.compare import by_torch
from tests.unit.batch.plain import drive
from tests.unit.batch.problems import DECREASE, PROBLEMS, REFERENCE, logistic, rosenbrock

per_problem = pytest.mark.parametrize("name", PROBLEMS)
METHODS: dict[str, BatchMethod] = {
    "L-BFGS": LBFGS(history=3),
    "Armijo": LBFGS(history=3, line_search="armijo"),
    "conjugate gradient": ConjugateGradient(),
    "gradient descent": GradientDescent(lr=1e-3, tolerance=1e-3),
}
per_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
START = np.array([-1.2, 1.0])


# -- minima and evaluations -----------------------------------------------------------------------------------


@per_problem
def test_the_gradients_of_the_problems_are_right(name: str) -> None:
    problem = PROBLEMS[name]
    x = problem.start + 0.1
    steps = np.eye(len(x)) * 1e-6
    slopes = [(problem.objective(x + h)[0] - problem.objective(x - h)[0]) / 2e-6 for h in steps]
    np.testing.assert_allclose(problem.objective(x)[1], slopes, rtol=1e-4, atol=1e-4)


@per_problem
def test_lbfgs_finds_the_minimum_of_scipy_and_torch_with_at_most_a_fifth_more_evaluations(name: str) -> None:
    problem, (minimum, scipy_evaluations) = PROBLEMS[name], REFERENCE[name]
    found = drive(LBFGS(decrease=DECREASE), problem.objective, problem.start)
    assert found.end is not None and found.end.why == "gradient"
    assert found.end.evaluations <= 1.2 * scipy_evaluations
    assert found.end.loss == pytest.approx(minimum, rel=1e-6, abs=2e-7)
    assert problem.objective(found.x)[0] == found.end.loss
    assert np.max(np.abs(problem.objective(found.x)[1])) <= 1e-6
    assert by_torch(problem)[0] == pytest.approx(found.end.loss, rel=1e-6, abs=2e-7)


@per_problem
@pytest.mark.parametrize("method", [LBFGS(line_search="armijo"), ConjugateGradient()], ids=["Armijo", "CG"])
def test_the_other_searches_find_the_same_minima(name: str, method: Descent) -> None:
    problem, (minimum, _) = PROBLEMS[name], REFERENCE[name]
    found = drive(replace(method, decrease=DECREASE), problem.objective, problem.start, most=5000)
    assert found.end is not None and found.end.why in ("gradient", "decrease")  # as the machine rounds
    # A gradient of 1e-6 at a condition of 1e6 is a loss of up to 1e-12 * 1e6 / 2 above the minimum, for each element.
    assert found.end.loss == pytest.approx(minimum, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(
    "name, x", [("Rosenbrock, n = 2", (1, 1)), ("Beale", (3, 0.5)), ("Himmelblau", (3, 2))]
)
def test_of_several_minima_lbfgs_finds_scipys(name: str, x: tuple[float, float]) -> None:
    problem = PROBLEMS[name]
    np.testing.assert_allclose(drive(LBFGS(), problem.objective, problem.start).x, x, atol=1e-3)


def test_gradient_descent_is_that_of_torch() -> None:
    problem = logistic()
    found = drive(GradientDescent(lr=0.01, momentum=0.9), problem.objective, problem.start, most=50)
    x = torch.zeros(20, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([x], lr=0.01, momentum=0.9)
    for _ in range(50):
        x.grad = torch.from_numpy(problem.objective(x.detach().numpy())[1])
        optimizer.step()
    np.testing.assert_allclose(found.x, x.detach().numpy(), rtol=1e-10)


# -- commands, shards, memory ---------------------------------------------------------------------------------


@pytest.mark.parametrize("history", [1, 5, 20])
def test_an_iteration_takes_one_round_trip_more_than_evaluations_whatever_the_history(history: int) -> None:
    method = LBFGS(history=history)
    found = drive(method, *_of("logistic regression, n = 20"))
    assert found.end is not None
    assert found.plain.evaluations == found.end.evaluations == found.records[-1].evaluations
    assert found.plain.trips == found.end.evaluations + found.end.iterations
    assert len(method.vectors) == len(set(method.vectors)) == 2 * history + 4


def _of(name: str) -> tuple[Any, np.ndarray]:
    return PROBLEMS[name].objective, PROBLEMS[name].start


@pytest.mark.parametrize("parts", [2, 3])
@per_method
def test_cut_into_parts_the_iterates_are_the_same_to_rounding(method: BatchMethod, parts: int) -> None:
    problem = logistic()
    runs = [drive(method, problem.objective, problem.start, parts=p, keep=True, most=25) for p in (1, parts)]
    for whole, cut in zip(runs[0].saved, runs[1].saved, strict=True):
        joined = np.concatenate([shard["x"] for shard in cut])
        np.testing.assert_allclose(joined, whole[0]["x"], rtol=1e-6, atol=1e-9)
    assert [r.evaluations for r in runs[0].records] == [r.evaluations for r in runs[1].records]


def test_the_direction_is_that_of_the_two_loops_on_whole_vectors() -> None:
    problem = logistic()
    found = drive(LBFGS(history=4), problem.objective, problem.start, keep=True, most=12)
    for state, (v,) in zip(found.states[2:-1], found.saved[2:-1], strict=True):
        pairs = [(v[f"s{i}"], v[f"y{i}"]) for i in state["history"]]
        q, alphas = v["g"].copy(), []
        for s, y in reversed(pairs):
            alphas.append(s @ q / (s @ y))
            q -= alphas[-1] * y
        q *= pairs[-1][0] @ pairs[-1][1] / (pairs[-1][1] @ pairs[-1][1])
        for (s, y), alpha in zip(pairs, reversed(alphas), strict=True):
            q += (alpha - y @ q / (s @ y)) * s
        opening = next(LBFGS(history=4)(state))
        assert isinstance(opening, tuple) and isinstance(opening[0], Combine)
        np.testing.assert_allclose(sum(by * v[of] for by, of in opening[0].terms), -q, rtol=1e-7)


# -- save and resume ------------------------------------------------------------------------------------------


@per_method
def test_from_any_iterations_state_and_vectors_it_goes_on_to_the_bit(method: BatchMethod) -> None:
    whole = drive(method, rosenbrock, START, parts=2, keep=True, most=60)
    assert len(whole.states) > 20
    for k, (state, shards) in enumerate(zip(whole.states, whole.saved, strict=True), 1):
        plain = json.loads(json.dumps(state, allow_nan=False))
        rest = drive(method, rosenbrock, START, parts=2, state=plain, shards=shards, most=60 - k)
        assert rest.records == whole.records[k:]
        assert rest.states == whole.states[k:]
        assert rest.end == whole.end
        assert rest.x.tobytes() == whole.x.tobytes()


@per_method
def test_with_other_data_it_evaluates_first_and_goes_on(method: BatchMethod) -> None:
    many, few = logistic(200), logistic(150)
    begun = drive(method, few.objective, few.start, keep=True, most=10)
    state = {**begun.states[-1], "evaluated": False}
    rest = drive(method, many.objective, many.start, state=state, shards=begun.saved[-1], most=3000)
    assert rest.plain.seen[0][1].tobytes() == begun.x.tobytes()
    assert rest.records[0].evaluations >= begun.records[-1].evaluations + 2
    assert rest.plain.evaluations == rest.records[-1].evaluations - begun.records[-1].evaluations
    assert rest.records[-1].loss == pytest.approx(REFERENCE["logistic regression, n = 20"][0], rel=0.06)


def test_a_state_of_another_method_or_of_a_longer_history_is_refused() -> None:
    states = drive(LBFGS(history=5), rosenbrock, START, most=8).states
    with pytest.raises(UsageError, match="conjugate gradient cannot go on from a state of lbfgs"):
        ConjugateGradient()(states[-1])
    with pytest.raises(UsageError, match=r"history=2.* a history of 5"):
        LBFGS(history=2)(states[-1])
    longer = drive(LBFGS(history=9), rosenbrock, START, most=8).states
    assert next(LBFGS(history=9)(longer[-1]))


# -- bad input ------------------------------------------------------------------------------------------------

DESCENTS = {name: method for name, method in METHODS.items() if isinstance(method, Descent)}
per_descent = pytest.mark.parametrize("method", DESCENTS.values(), ids=DESCENTS)


@per_descent
def test_one_example_is_enough(method: BatchMethod) -> None:
    problem = logistic(examples=1)
    found = drive(method, problem.objective, problem.start)
    assert found.end is not None and found.end.why in ("gradient", "decrease")
    assert np.max(np.abs(problem.objective(found.x)[1])) < 1e-3


@per_method
def test_a_zero_gradient_ends_it_at_once(method: BatchMethod) -> None:
    found = drive(method, rosenbrock, [1.0, 1.0])
    assert found.end is not None
    assert (found.end.why, found.end.iterations, found.end.evaluations) == ("gradient", 0, 1)
    assert "the gradient is zero" in found.end.message


@per_method
@pytest.mark.parametrize("loss, slope", [(np.nan, 1.0), (np.inf, 1.0), (1.0, np.nan), (1.0, np.inf)])
def test_a_start_that_is_not_finite_ends_it_at_once(method: BatchMethod, loss: float, slope: float) -> None:
    found = drive(method, lambda x: (loss, np.full_like(x, slope)), START)
    assert found.end is not None
    assert (found.end.why, found.plain.evaluations) == ("not finite", 1)
    assert found.x.tolist() == START.tolist()


@per_descent
def test_a_trial_that_is_not_finite_is_one_too_far(method: BatchMethod) -> None:
    def walled(x: np.ndarray) -> tuple[float, np.ndarray]:
        """z − log(1 − z²) for z = 10 x; nan outside of |z| < 1, where the first step of length 1 leads."""
        z = 10 * x
        return float(np.sum(z - np.log(1 - z * z))), 10 + 20 * z / (1 - z * z)

    found = drive(method, walled, [0.099, 0.05])
    assert found.end is not None and found.end.why in ("gradient", "decrease")
    np.testing.assert_allclose(found.x, (1 - np.sqrt(2)) / 10, atol=1e-5)
    assert any(not np.isfinite(loss) for loss, _ in found.plain.seen)


@per_descent
def test_where_no_step_lowers_the_loss_it_restarts_once_and_ends_with_x_as_it_was(
    method: BatchMethod,
) -> None:
    calls = 0

    def stubborn(x: np.ndarray) -> tuple[float, np.ndarray]:
        """Rosenbrock, then higher by 1 with every evaluation."""
        nonlocal calls
        calls += 1
        loss, g = rosenbrock(x)
        return loss + max(0, calls - 15), g

    found = drive(method, stubborn, START, keep=True)
    assert found.end is not None and found.end.why == "line search"
    assert found.end.loss == found.records[-1].loss == min(r.loss for r in found.records)
    assert found.x.tobytes() == found.saved[-1][0]["x"].tobytes()
    assert found.plain.whole("g").tobytes() == found.saved[-1][0]["g"].tobytes()


def test_directions_that_do_not_descend_are_replaced_by_steepest_descent() -> None:
    method = LBFGS(history=2)
    begun = drive(method, rosenbrock, START, keep=True, most=5)
    uphill = {
        **begun.states[-1],
        "dots": {k: -v if "g" in k else v for k, v in begun.states[-1]["dots"].items()},
    }
    rest = drive(method, rosenbrock, START, state=uphill, shards=begun.saved[-1], most=200)
    assert rest.end is not None and rest.end.loss < 1e-9
    assert rest.records[0].restarted and not rest.records[1].restarted


def test_an_earlier_trial_that_was_the_best_is_evaluated_again_and_must_still_be_lower() -> None:
    losses = [5.0, 4.0, 4.5, 4.0, 3.0, 3.5, 9.0]  # at x; two trials and the first again; the same once more

    def scripted(x: np.ndarray) -> tuple[float, np.ndarray]:
        return losses.pop(0), np.array([-2.0])

    found = drive(LBFGS(trials=2), scripted, [0.0], keep=True)
    assert [r.loss for r in found.records] == [4.0] and found.end is not None
    assert (found.end.why, found.end.loss) == ("line search", 4.0)
    assert found.x.tobytes() == found.saved[0][0]["x"].tobytes()
    assert losses == []


def test_dots_from_which_no_finite_direction_follows_lead_to_steepest_descent() -> None:
    state = drive(LBFGS(), rosenbrock, START, most=1).states[0]
    assert state["history"] == [0]
    opening = next(LBFGS()({**state, "dots": {**state["dots"], "s0.y0": 5e-324}}))
    assert isinstance(opening, tuple) and opening[0] == Combine("d", ((-1.0, "g"),))


def test_pairs_of_no_positive_curvature_are_skipped() -> None:
    def hills(x: np.ndarray) -> tuple[float, np.ndarray]:
        return float(np.sum(np.cos(x))), -np.sin(x)

    found = drive(LBFGS(line_search="armijo"), hills, [0.3, 0.5], keep=True)
    assert found.states[0]["history"] == []  # concave there
    assert found.end is not None and found.end.loss == pytest.approx(-2)
    for state, (v,) in zip(found.states, found.saved, strict=True):
        assert all(v[f"s{i}"] @ v[f"y{i}"] > 0 for i in state["history"])


def test_single_precision_ends_where_rounding_begins() -> None:
    problem = logistic()

    def single(w: np.ndarray) -> tuple[float, np.ndarray]:
        loss, g = problem.objective(w.astype(np.float64))
        return float(np.float32(loss)), g.astype(np.float32)

    for method in (LBFGS(tolerance=0, decrease=0), ConjugateGradient(tolerance=0, decrease=0)):
        found = drive(method, single, problem.start.astype(np.float32))
        assert found.x.dtype == np.float32
        assert found.end is not None and found.end.why in ("line search", "decrease")
        assert found.end.loss == pytest.approx(REFERENCE["logistic regression, n = 20"][0], rel=1e-5)


def test_gradient_descent_that_diverges_ends_with_the_best_point() -> None:
    def bowl(x: np.ndarray) -> tuple[float, np.ndarray]:
        """One step finds the bottom of x₀ and makes x₁ eleven times larger."""
        g = x * [1.0, 12.0]
        return float(0.5 * x @ g), g

    found = drive(GradientDescent(lr=1.0, momentum=0.0), bowl, [10.0, 1e-3])
    assert found.end is not None and found.end.why == "not finite" and "lr" in found.end.message
    assert found.x.tolist() == found.plain.seen[1][1].tolist()
    assert found.end.loss == min(loss for loss, _ in found.plain.seen) == bowl(found.x)[0]


def test_a_relative_decrease_within_the_given_one_ends_it() -> None:
    found = drive(LBFGS(decrease=0.5), rosenbrock, START)
    assert found.end is not None and found.end.why == "decrease"
    before, last = found.records[-2:]
    assert 0 <= before.loss - last.loss <= 0.5 * max(1, before.loss)


@pytest.mark.parametrize(
    "kind, options, message",
    [
        (LBFGS, {"history": 0}, r"LBFGS\(history=0\): history is a whole number >= 1"),
        (LBFGS, {"history": 2.5}, "history is a whole number"),
        (LBFGS, {"history": True}, "history is a whole number"),
        (LBFGS, {"tolerance": -1.0}, r"LBFGS\(tolerance=-1.0\): tolerance is a number >= 0"),
        (LBFGS, {"tolerance": "small"}, "tolerance is a number"),
        (LBFGS, {"decrease": float("nan")}, "decrease is a number"),
        (LBFGS, {"deterministic": 1}, "deterministic is True or False"),
        (LBFGS, {"line_search": "wolf"}, "line_search is 'wolfe' or 'armijo'"),
        (LBFGS, {"c1": 0.7}, "c1 is a number between 0 and 0.5"),
        (LBFGS, {"c1": 0.3, "c2": 0.2}, "c2 is a number between c1 = 0.3 and 1"),
        (ConjugateGradient, {"trials": 0}, r"ConjugateGradient\(trials=0\): trials is a whole number"),
        (GradientDescent, {"lr": 0.0}, r"GradientDescent\(lr=0.0\): lr is a number > 0"),
        (GradientDescent, {"lr": 0.1, "momentum": 1.0}, "momentum is a number from 0 to 1"),
    ],
)
def test_bad_options_are_refused_in_one_line(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        kind(**options)
    assert "\n" not in str(refused.value)


def test_dots_of_a_program_come_after_its_evaluation() -> None:
    opening = next(LBFGS()(None))
    assert isinstance(opening, tuple)
    assert isinstance(opening[0], Evaluate) and Dot("g.g", "g", "g") in opening[1:]
