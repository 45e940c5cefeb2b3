"""Windows: what moves is exactly what is wanted and not there, and every place is accounted for."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import UsageError
from syncline.parallel.windows import Box, cut, disjoint, even, near_square, route

SHAPES = st.lists(st.integers(1, 6), min_size=0, max_size=3).map(tuple)


def places(boxes: list[Box] | tuple[Box, ...]) -> list[tuple[int, ...]]:
    """Every place of every box, as often as it is in one."""
    found: list[tuple[int, ...]] = []
    for box in boxes:
        grid: list[tuple[int, ...]] = [()]
        for low, high in box.spans:
            grid = [(*place, at) for place in grid for at in range(low, high)]
        found += grid
    return found


@st.composite
def boxes_of(draw: st.DrawFn, shape: tuple[int, ...], *, beyond: int = 0) -> Box:
    spans = []
    for size in shape:
        low = draw(st.integers(-beyond, size))
        spans.append((low, draw(st.integers(low, size + beyond))))
    return Box(tuple(spans))


@st.composite
def owned_and_wanted(draw: st.DrawFn) -> tuple[tuple[int, ...], list[list[Box]], list[list[Box]]]:
    """Owners that cover the array, unevenly and perhaps several times; wishes of several consumers, beyond its edges."""
    shape = draw(SHAPES)
    ranks = draw(st.integers(1, 4))
    owns = [disjoint(draw(st.lists(boxes_of(shape), max_size=2))) for _ in range(ranks)]
    left = [Box.whole(shape)]
    for boxes in owns:
        for box in boxes:
            left = [rest for part in left for rest in part.minus(box)]
    owns[draw(st.integers(0, ranks - 1))] += left
    wants = [draw(st.lists(boxes_of(shape, beyond=2), max_size=3)) for _ in range(ranks)]
    return shape, owns, wants


@given(st.data())
def test_a_box_minus_another_has_every_other_place_once(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    a, b = data.draw(boxes_of(shape, beyond=2)), data.draw(boxes_of(shape, beyond=2))
    assert sorted(places(a.minus(b))) == sorted(set(places([a])) - set(places([b])))
    assert set(places([a.meet(b)])) == set(places([a])) & set(places([b]))
    assert sorted(places(disjoint([a, b]))) == sorted(set(places([a])) | set(places([b])))


@given(owned_and_wanted())
def test_of_values_everybody_gets_what_it_wants_once_and_from_itself_first(
    case: tuple[tuple[int, ...], list[list[Box]], list[list[Box]]],
) -> None:
    shape, owns, wants = case
    found = route(shape, owns, wants)
    whole = set(places([Box.whole(shape)]))
    for rank, boxes in enumerate(wants):
        wanted = set(places(boxes)) & whole
        got = [place for (_, to), pieces in found.pieces.items() if to == rank for place in places(pieces)]
        assert sorted(got) == sorted(wanted)  # each once, whatever the number of consumers
        own = set(places(owns[rank]))
        assert set(places(found.pieces.get((rank, rank), ()))) == wanted & own
    for (source, _), pieces in found.pieces.items():
        assert set(places(pieces)) <= set(places(owns[source]))
    assert found.moved == sum(
        len((set(places(w)) & whole) - set(places(o))) for o, w in zip(owns, wants, strict=True)
    )


@given(owned_and_wanted())
def test_of_partial_sums_everybody_gets_every_owners_part_once(
    case: tuple[tuple[int, ...], list[list[Box]], list[list[Box]]],
) -> None:
    shape, owns, wants = case
    found = route(shape, owns, wants, sums=True)
    for source, own in enumerate(owns):
        for to, want in enumerate(wants):
            pieces = places(found.pieces.get((source, to), ()))
            assert sorted(pieces) == sorted(set(places(own)) & set(places(want)))
            assert found.count(source, to) == len(pieces)


@given(st.integers(0, 40), st.integers(1, 7), st.integers(1, 5))
def test_even_cuts_cover_everything_in_order_and_differ_by_a_unit(size: int, parts: int, unit: int) -> None:
    spans = even(size, parts, unit)
    assert [low for low, _ in spans] == [0, *(high for _, high in spans[:-1])] and spans[-1][1] == size
    assert all(low % unit == 0 for low, high in spans if high > low)
    units = [math.ceil((high - low) / unit) for low, high in spans]
    assert max(units) - min(units) <= 1


def test_what_nobody_owns_is_refused_with_the_place() -> None:
    owns, wants = [[Box(((0, 2),))], [Box(((3, 5),))]], [[], [Box(((0, 5),))]]
    with pytest.raises(UsageError, match=r"process 1 wants \[2:3\] of an array of \[5\]: nobody owns it"):
        route((5,), owns, wants)
    assert route((5,), owns, wants, sums=True).moved == 2  # a sum of nothing is 0


def test_grids_are_near_squares() -> None:
    assert [near_square(parts) for parts in (1, 2, 3, 4, 6, 7, 12)] == [
        (1, 1),
        (2, 1),
        (3, 1),
        (2, 2),
        (3, 2),
        (7, 1),
        (4, 3),
    ]


def test_data_parallel_to_model_parallel_moves_all_but_the_own_part() -> None:
    shape = (8, 6)
    by_rows, by_columns = cut(shape, 0, even(8, 4)), cut(shape, 1, even(6, 4))
    gather = route(shape, [[box] for box in by_rows], [[Box.whole(shape)]] * 4)
    assert gather.moved == 3 * 48
    across = route(shape, [[box] for box in by_rows], [[box] for box in by_columns])
    assert across.moved == 48 - sum(a.meet(b).size for a, b in zip(by_rows, by_columns, strict=True))
