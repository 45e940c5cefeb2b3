"""The coordinator of a batch method: whatever the order of messages, losses and joins, the method gets the same numbers."""

import numpy as np
import pytest

from syncline import LBFGS, ConjugateGradient, GradientDescent, UsageError
from syncline.batch import commands as c
from tests.unit.batch.hands import SIZE, Hands
from tests.unit.batch.plain import drive

ROWS = np.random.RandomState(0).standard_normal((40, SIZE)) * np.logspace(0, 1, SIZE)
METHODS = [
    LBFGS(history=3, decrease=0.0),
    ConjugateGradient(decrease=0.0),
    GradientDescent(lr=1e-3, decrease=0.0),
]


def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
    error = ROWS @ x - 1
    return float(error @ error) / 2 / len(ROWS), ROWS.T @ error / len(ROWS)


def losses(hands: Hands) -> list[float]:
    return [each.iteration.record.loss for each in hands.iterations]


def check_idle(hands: Hands) -> None:
    """All slots come back when everybody has said all."""
    while hands.replies or any(hands.inboxes.values()):
        hands.step()
    assert sorted(hands.coordinator._free) == list(range(hands.coordinator._slots))


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@pytest.mark.parametrize("deterministic", [False, True])
def test_iterates_are_those_of_the_plain_executor_in_any_order_of_messages(
    method: c.BatchMethod, deterministic: bool
) -> None:
    expected = drive(method, objective, np.zeros(SIZE), most=8)
    for seed in range(6):
        hands = Hands(method, ROWS, seed=seed, deterministic=deterministic, learners=1 + seed % 4).run()
        np.testing.assert_allclose(losses(hands), [each.loss for each in expected.records], rtol=1e-8)
        np.testing.assert_allclose(hands.x, expected.x, rtol=1e-6, atol=1e-8)
        check_idle(hands)


def test_deterministic_sums_have_the_same_bits_whoever_computed_what() -> None:
    runs = [Hands(METHODS[0], ROWS, seed=s, deterministic=True, learners=1 + s % 4).run() for s in range(8)]
    assert all(np.array_equal(run.x, runs[0].x) and losses(run) == losses(runs[0]) for run in runs)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_learners_that_die_and_join_at_any_moment_change_no_iterate(seed: int, deterministic: bool) -> None:
    expected = Hands(METHODS[0], ROWS, seed=0, deterministic=deterministic, learners=1).run()
    hands = Hands(METHODS[0], ROWS, seed=seed, deterministic=deterministic)
    newest = 3
    while hands.over is None:
        hands.step()
        alive = [number for role, number in hands.inboxes if role == "learner"]
        if hands.random.random() < 0.05 and len(alive) > 1:
            hands.kill(hands.random.choice(alive))
        if hands.random.random() < 0.05 and len(alive) < 4:
            hands.coordinator.grow(2)
            hands.join(newest)
            newest += 1
    np.testing.assert_allclose(losses(hands), losses(expected), rtol=0 if deterministic else 1e-8)
    check_idle(hands)


@pytest.mark.parametrize("seed", range(6))
def test_lost_shards_go_back_to_an_iteration_and_repeat_it_to_the_bit(seed: int) -> None:
    expected = Hands(METHODS[0], ROWS, seed=0, deterministic=True).run()
    hands = Hands(METHODS[0], ROWS, seed=seed, deterministic=True)
    for moment in (40, 90, 170):
        for _ in range(moment):
            if hands.over is None:
                hands.step()
        if hands.over is not None or not hands.iterations:
            break
        last = hands.iterations[-1].iteration
        hands.restart(hands.saved[-1])
        hands.coordinator.go_back(last.state, last.record.iteration)
        hands.do(hands.coordinator.begin())
    hands.run()
    assert losses(hands) == losses(expected)
    assert np.array_equal(hands.x, expected.x)
    check_idle(hands)


def test_a_sample_that_changes_is_evaluated_anew_before_the_next_iteration() -> None:
    sizes = [20, 20, 40, 40, 40]
    hands = Hands(METHODS[0], ROWS, seed=1, sizes=lambda iteration: sizes[iteration], limit=5).run()
    assert [each.batch.examples for each in hands.iterations] == sizes
    assert [each.batch.drawn for each in hands.iterations] == [0, 1, None, None, None]
    evaluations = [each.iteration.record.evaluations for each in hands.iterations]
    assert evaluations[2] - evaluations[1] >= 2  # one more: at the same point, of other data


def test_a_stop_ends_after_the_iteration_with_x_an_iterate() -> None:
    hands = Hands(METHODS[0], ROWS, seed=2)
    while not hands.iterations:
        hands.step()
    hands.coordinator.stop()
    hands.run()
    assert hands.over is not None and hands.over.end is None
    assert len(hands.iterations) == 2 and hands.coordinator.still
    assert objective(hands.x)[0] == pytest.approx(losses(hands)[-1], rel=1e-12)


class Elsewhere:
    """Evaluates at a vector that is not x."""

    vectors = ("x", "g", "z")

    def __call__(self, state: c.State | None = None) -> c.Steps:
        got = yield (c.Fill("z", 0.1), c.Evaluate("z", "g", "there"), c.Evaluate(), c.Dot("zz", "z", "z"))
        yield c.Iteration({}, c.Record(1, got["there"], got["zz"], got["loss"], 2))
        return c.End("enough", "enough", 1, 2, got["loss"])


def test_a_point_that_is_not_x_is_evaluated_where_learners_read_and_brought_back() -> None:
    hands = Hands(Elsewhere(), ROWS, seed=3).run()
    record = hands.iterations[0].iteration.record
    assert record.loss == pytest.approx(objective(np.full(SIZE, 0.1))[0])
    assert record.gradient_norm == pytest.approx(objective(np.zeros(SIZE))[0])
    assert record.step == pytest.approx(0.01 * SIZE)


class Confused:
    vectors = ("x", "g")

    def __call__(self, state: c.State | None = None) -> c.Steps:
        yield (c.Evaluate("x", "x"),)
        raise AssertionError


def test_a_gradient_that_would_overwrite_its_point_is_refused() -> None:
    with pytest.raises(UsageError, match="needs a vector of its own"):
        Hands(Confused(), ROWS, seed=0)


@pytest.mark.parametrize("size", [0, -3, 2.5, True, "all"])
def test_a_schedule_that_gives_no_number_of_examples_is_refused(size: object) -> None:
    with pytest.raises(UsageError, match="must be a whole number of examples >= 1"):
        Hands(METHODS[0], ROWS, seed=0, sizes=lambda iteration: size)
