"""The exact solvers against trying everything: minimum cuts, elimination, limits on memory."""

import itertools
import math
import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.plan.solvers import cheapest, is_submodular, minimum_cut, total

Rows = list[list[float]]
Pairs = dict[tuple[int, int], Rows]


@st.composite
def graphs(draw: st.DrawFn, choices: int = 3) -> tuple[Rows, Pairs, Rows]:
    """Costs, tables of a random graph, memory; some numbers equal, so that ties come up."""
    count = draw(st.integers(1, 6))
    number = st.integers(0, 9).map(float) | st.floats(0, 9)
    widths = [draw(st.integers(1, choices)) for _ in range(count)]
    rows = [[draw(number) for _ in range(width)] for width in widths]
    sizes = [[float(draw(st.integers(0, 9))) for _ in range(width)] for width in widths]  # bytes
    edges = draw(st.sets(st.sampled_from(list(itertools.combinations(range(count), 2)) or [(0, 0)])))
    pairs = {
        (i, j): [[draw(number) for _ in range(widths[j])] for _ in range(widths[i])]
        for i, j in edges
        if i != j
    }
    return rows, pairs, sizes


def everything(rows: Rows) -> Iterator[tuple[int, ...]]:
    return itertools.product(*(range(len(row)) for row in rows))


@settings(max_examples=300, deadline=None)
@given(graphs(), st.integers(0, 40))
def test_elimination_finds_the_cheapest_that_fits_as_trying_everything_does(
    case: tuple[Rows, Pairs, Rows], limit: int
) -> None:
    rows, pairs, sizes = case
    free = cheapest(rows, pairs, sizes)
    assert free is not None
    assert total(free, rows, pairs) == pytest.approx(
        min(total(each, rows, pairs) for each in everything(rows))
    )
    fits = [each for each in everything(rows) if total(each, sizes) <= limit]
    found = cheapest(rows, pairs, sizes, limit)
    assert (found is None) == (not fits)
    if found is not None:
        assert total(found, sizes) <= limit
        assert total(found, rows, pairs) == pytest.approx(min(total(each, rows, pairs) for each in fits))


@settings(max_examples=300, deadline=None)
@given(graphs(2))
def test_one_minimum_cut_finds_the_cheapest_of_two_choices(case: tuple[Rows, Pairs, Rows]) -> None:
    rows, pairs, _ = case
    rows = [row if len(row) == 2 else [row[0], row[0] + 1] for row in rows]
    tables = {
        edge: [[0.0, table[0][0]], [table[0][0], table[0][0]]] for edge, table in pairs.items()
    }  # S4's: w unless both are 0
    assert all(is_submodular(table) for table in tables.values())
    found = minimum_cut(rows, tables)
    assert total(found, rows, tables) == pytest.approx(
        min(total(each, rows, tables) for each in everything(rows))
    )


def test_a_thousand_layers_with_skips_are_cut_as_elimination_cuts_them() -> None:
    draw = random.Random(0)
    count = 1000
    rows = [[draw.uniform(0, 9), draw.uniform(0, 9)] for _ in range(count)]
    edges = {(i, min(count - 1, i + step)) for i in range(count - 1) for step in (1, draw.choice((1, 2, 3)))}
    pairs = {(i, j): [[0.0, w], [w, w]] for i, j in sorted(edges) if i != j for w in [draw.uniform(0, 4)]}
    by_cut = minimum_cut(rows, pairs)
    wider = [[*row, math.inf] for row in rows]  # a third choice that nobody takes: elimination
    tables = {edge: [[*row, 0.0] for row in table] + [[0.0] * 3] for edge, table in pairs.items()}
    by_elimination = cheapest(wider, tables, [[0.0] * 3] * count)
    assert by_elimination is not None
    assert total(by_cut, rows, pairs) == pytest.approx(total(by_elimination, wider, tables))


def test_mixed_choices_that_cost_less_than_equal_ones_are_no_cut() -> None:
    assert not is_submodular([[1.0, 0.0], [0.0, 1.0]])
    assert cheapest([[0.0, 0.0]] * 2, {(0, 1): [[1.0, 0.0], [0.5, 1.0]]}, [[0.0, 0.0]] * 2) == [0, 1]
