"""Rows as CSV, and what is left to do."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from syncline.studies.grid import Point
from syncline.studies.rows import StudyRow, asked, head, left, line_of, ordered, rows_of
from tests.unit.studies.studies import grid, row, whole

words = st.text(st.characters(blacklist_categories=("Cs", "Cc")), max_size=30).map(
    lambda text: " ".join(text.split())
)
points = st.builds(
    Point,
    sync=st.sampled_from(["hardsync", "downpour:push=2,fetch=3,local_lr=0.1", "async:rate=given"]),
    learners=st.integers(1, 1000),
    batch_size=st.integers(1, 1000),
    seed=st.integers(0, 9),
)
known: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {},
    optional={
        "seconds": st.floats(0, allow_infinity=False),
        "loss": st.floats(allow_nan=False),
        "updates": st.integers(0, 2**40),
        "test_error": st.none(),
        "error": words,
    },
)


@given(st.lists(st.builds(lambda point, more: asked(point, **more), points, known), max_size=6))
def test_what_is_written_reads_back_equal(rows: list[StudyRow]) -> None:
    text = head() + "".join(map(line_of, rows))
    assert text.count("\n") == len(rows) + 1, "one line each"
    last = {each.point: each for each in rows}
    assert {each.point: each for each in rows_of(text.splitlines())} == last


def test_numbers_that_are_not_finite_and_errors_of_many_lines() -> None:
    strange = row(Point(sync="async", learners=2, batch_size=4), loss=math.nan, error="a\n b,\t'c' \"d\"")
    (read,) = rows_of([head(), line_of(strange)])
    assert read.loss is not None and math.isnan(read.loss)
    assert read.error == "a b, 'c' \"d\"" and read.failed


def test_what_is_no_row_is_left_out() -> None:
    good = whole()[0]
    lines = [head(), "garbage\n", ",,,\n", line_of(good), "hardsync,x,1\n", '"open quote']  # fmt: skip
    assert rows_of(lines) == [good]
    assert rows_of([]) == []


def test_left_is_what_has_no_row_or_failed() -> None:
    wanted, _ = grid().points()
    rows = [row(point) for point in wanted[:5]] + [asked(wanted[5], error="no luck")]
    assert left(wanted, rows) == wanted[5:]
    assert left(wanted, whole()) == []


def test_the_order_is_the_grid_s_whoever_ended_first() -> None:
    wanted, _ = grid().points()
    other = row(Point(sync="ssp:1", learners=2, batch_size=2))
    assert ordered([other, *whole()[::-1]], wanted) == [*whole(), other]
