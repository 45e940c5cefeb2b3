"""What a shard has taken until its fold: the weighted mean, its gaps, lockstep's order, and gradients that are only promised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from syncline.table.accumulator import Accumulator, Made, Maker, Mean, PromisedPart, Taken, add_up
from syncline.table.layout import lay_out

SHAPES = nn.ParameterList(torch.zeros(size) for size in (2, 3))
LAYOUT, _ = lay_out(SHAPES, [SHAPES.parameters()], cuttable=False, shards=1)
(PART,) = LAYOUT.parts


class Gradient:
    """A part's values; None where a piece has no gradient."""

    def __init__(self, pieces: Sequence[float | None]) -> None:
        memory = torch.zeros(LAYOUT.parameters.nbytes, dtype=torch.uint8)
        self.segments = PART.segments(LAYOUT.parameters.segments(memory))
        self.views = PART.views(self.segments, LAYOUT.parameters.entries)
        for view, value in zip(self.views, pieces, strict=True):
            view.fill_(value if value is not None else float("nan"))
        self.has = tuple(piece is not None for piece in pieces)

    def present(self) -> tuple[bool, ...]:
        return self.has


def accumulator(*, lockstep: bool) -> Accumulator:
    found = Accumulator(LAYOUT, PART, Gradient((0.0, 0.0)).segments)
    found.change(lockstep=lockstep)
    return found


def took(into: Accumulator, *pieces: float | None, **how: Any) -> bool:
    plain: dict[str, Any] = {"count": 1, "rank": 0, "iteration": 0, "alone": False}
    return into.take(Gradient(pieces), full=None not in pieces, **{**plain, **how})


def whole(made: Made) -> list[float | None]:
    return [float(view[0]) if has else None for view, has in zip(made.views, made.present, strict=True)]


PIECES = st.tuples(*(st.one_of(st.none(), st.integers(-4, 4).map(float)) for _ in SHAPES))
TAKEN = st.tuples(PIECES, st.integers(0, 5), st.sampled_from([1.0, 0.5, 0.25]))


@settings(max_examples=50)
@given(st.lists(TAKEN, min_size=1, max_size=5))
def test_a_running_mean_is_weighted_by_examples_and_missing_counts_as_zero(
    taken: list[tuple[Any, int, float]],
) -> None:
    memory = Gradient((None, None))
    mean = Mean(memory.segments, memory.views)
    for pieces, count, damping in taken:
        gradient = Gradient(pieces)
        mean.add(gradient, gradient.present(), count, damping)
    total = sum(count for _, count, _ in taken)
    counted = [each for each in taken if each[1]]
    if not counted:
        counted, total = [(taken[-1][0], 1, taken[-1][2])], 1  # nobody has examples: the last is as it is
    for piece, view in enumerate(mean.views):
        given = [(pieces[piece], count * damping) for pieces, count, damping in counted]
        assert mean.present[piece] == any(value is not None for value, _ in given)
        if mean.present[piece]:
            expected = sum((value or 0.0) * weight for value, weight in given) / total
            torch.testing.assert_close(view, torch.full_like(view, expected))


def test_who_has_no_examples_is_left_out_unless_nobody_has_any() -> None:
    mean, other = Gradient((1.0, 1.0)), Gradient((4.0, None))
    into = Mean(mean.segments, mean.views)
    add_up(into, [(mean, (True, True), 0), (other, other.has, 2)])
    assert into.present == (True, False) and float(into.views[0][0]) == 4.0
    alone = Mean(mean.segments, mean.views)
    add_up(alone, [(mean, (True, True), 0), (other, other.has, 0)])
    assert alone.total == 0 and alone.present == (True, True)


def test_a_fold_of_one_gradient_is_that_gradient_where_it_lies() -> None:
    into = accumulator(lockstep=False)
    assert not took(into, 1.0, 2.0, alone=True)
    made = into.gather(0)
    assert whole(made) == [1.0, 2.0] and made.whole is made.segments and made.added == 0
    assert took(into, 3.0, None, alone=True, damping=0.5), "a damped one is not as it lies: it is added"
    assert whole(into.gather(0)) == [1.5, None]


def test_the_next_fold_begins_anew() -> None:
    into = accumulator(lockstep=False)
    for value in (2.0, 4.0):
        assert took(into, value, value)
    assert whole(into.gather(0)) == [3.0, 3.0]
    took(into, 8.0, None)
    made = into.gather(1)
    assert whole(made) == [8.0, None] and made.whole is None


@given(st.permutations([(0, 0, 1.0), (1, 0, 3.0), (0, 1, 10.0), (1, 1, 20.0)]))
def test_in_lockstep_a_fold_takes_its_iteration_in_rank_order(order: list[tuple[int, int, float]]) -> None:
    into = accumulator(lockstep=True)
    for rank, iteration, value in order:
        assert not took(into, value, 2 * value, rank=rank, iteration=iteration, count=1 + 2 * rank)
    for iteration, mean in ((0, 2.5), (1, 17.5)):
        made = into.gather(iteration)
        assert whole(made) == [mean, 2 * mean] and made.added == 2
    into.change(lockstep=False)


def test_a_dial_may_only_change_between_two_folds() -> None:
    for lockstep in (True, False):
        into = accumulator(lockstep=lockstep)
        took(into, 1.0, 1.0)
        with pytest.raises(AssertionError):
            into.change(lockstep=False)


class Promises(Maker):
    """Makes the mean of numbers, at the last moment."""

    def __init__(self) -> None:
        self.folded: list[list[Any]] = []

    def fold(self, part: Any, taken: Sequence[Taken]) -> Made:
        self.folded.append([each.gradient for each in taken])
        return Made([torch.zeros(1)], (True,))


class Promised:
    def __init__(self, promise: str) -> None:
        self.promise: str | None = promise


def promise(into: Accumulator, maker: Maker, name: str, **how: Any) -> bool:
    plain: dict[str, Any] = {"count": 1, "rank": 0, "iteration": 0, "alone": False, "full": True}
    slot = Promised(name)
    added = into.take(PromisedPart(slot, maker), **{**plain, **how})
    slot.promise = None  # the slot is free as soon as its promise is taken
    return added


def test_promised_gradients_are_made_for_their_fold_only() -> None:
    maker, into = Promises(), accumulator(lockstep=False)
    assert promise(into, maker, "a") and promise(into, maker, "b", count=0) and maker.folded == []
    made = into.gather(0)
    assert made.flat and maker.folded == [["a"]], "without examples it is left out"
    assert not promise(into, maker, "c", alone=True)
    taken = into.alone()
    assert taken is not None and taken.gradient == "c" and into.alone() is None
    promise(into, maker, "d", damping=0.5)
    assert into.alone() is None
    promise(into, maker, "e")
    assert into.alone() is None
    into.gather(0)
    assert maker.folded[-1] == ["d", "e"]


def test_promises_of_lockstep_wait_for_their_iteration_in_rank_order() -> None:
    maker, into = Promises(), accumulator(lockstep=True)
    for name, rank, iteration in (("b", 1, 0), ("c", 0, 1), ("a", 0, 0)):
        promise(into, maker, name, rank=rank, iteration=iteration)
    assert [into.gather(iteration).added for iteration in (0, 1)] == [2, 0]
    assert maker.folded == [["a", "b"], ["c"]]


def test_steps_are_made_at_once_unless_a_maker_says_otherwise() -> None:
    maker = Promises()
    nothing: Any = None
    assert not maker.waits and maker.step_later("a", nothing, nothing, 1) is False
    maker.settle()
