"""Plots as SVG: well-formed, values within their axes, labels that do not cover each other, words that say the numbers."""

from __future__ import annotations

import math
import re
from itertools import combinations
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.report import svg_plots as svg
from syncline.report.svg_plots import Curve, Spot, curves, scale

SVG = "{http://www.w3.org/2000/svg}"


def texts(plot: str) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(plot).iter(f"{SVG}text")]


@pytest.mark.parametrize(
    "values", [[0.0], [5.0, 5.0], [-1e-9, 1e-9], [1e12, 3e12], [-3.0, 4.0], [0.1, 0.1000001]]
)
def test_axes_hold_all_values(values: list[float]) -> None:
    points = list(enumerate(values))
    plot = ElementTree.fromstring(svg.lines("t", [("s", points)], x="x", y="y"))
    (line,) = plot.iter(f"{SVG}polyline")
    for place in line.get("points", "").split():
        x, y = map(float, place.split(","))
        assert svg.LEFT - 0.1 <= x <= svg.SMALL[0] - svg.RIGHT + 0.1
        assert svg.TOP - 0.1 <= y <= svg.SMALL[1] - svg.BOTTOM + 0.1


def test_several_plots_in_one_picture() -> None:
    one = svg.bars("b", [("0", 1.0, "one")], x="x", y="y")
    picture = ElementTree.fromstring(svg.side_by_side([one, one, one]))
    assert len(picture.findall(f"{SVG}g")) == 3
    assert picture.get("height") == str(2 * svg.SMALL[1])


values = st.lists(st.floats(1e-6, 1e9), min_size=1, max_size=6)


@given(values, st.sampled_from([None, True, False]), st.booleans())
def test_scales_hold_their_values(found: list[float], log: bool | None, powers: bool) -> None:
    made = scale(found, log=log, powers=powers)
    assert made.low <= min(found) * 1.0001 and max(found) * 0.9999 <= made.high
    assert made.low < made.high and 1 < len(made.ticks) < 40
    assert all(-0.001 <= made.place(value, 0.0, 1.0) <= 1.001 for value in found)


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(-1e3, 1e3)), min_size=1, max_size=5))
def test_any_points_can_be_drawn(found: list[tuple[float, float]]) -> None:
    spots = [Spot(x, y, "label") for x, y in found]
    level = (found[0][1], "level")
    ElementTree.fromstring(curves("a & b", [Curve(spots=spots, name="<c>")], x="x", y="y", level=level))


@pytest.mark.parametrize("values, log, powers, ticks", [
    ([0.0, 1.0], None, False, (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)),
    ([0.0, 12.0], None, False, (0.0, 2.5, 5.0, 7.5, 10.0, 12.5)),
    ([1.0, 7.0], None, False, (0.0, 2.0, 4.0, 6.0, 8.0)),
    ([1.0, 9.0], None, False, (1.0, 2.0, 5.0, 10.0)),
    ([1.0, 9.0], False, False, (0.0, 2.0, 4.0, 6.0, 8.0, 10.0)),
    ([0.0, 900.0], True, False, (0.0, 200.0, 400.0, 600.0, 800.0, 1000.0)),
    ([1.0, 30.0], None, True, (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)),
    ([4.0], None, True, (4.0, 8.0)),
    ([1.0, 1e5], None, False, (1.0, 10.0, 100.0, 1e3, 1e4, 1e5)),
])  # fmt: skip
def test_ticks_are_round_and_logarithmic_where_values_are_wide_apart(
    values: list[float], log: bool | None, powers: bool, ticks: tuple[float, ...]
) -> None:
    made = scale(values, log=log, powers=powers)
    assert made.ticks == pytest.approx(ticks) and (made.low, made.high) == pytest.approx(
        (ticks[0], ticks[-1])
    )


def test_a_logarithmic_axis_has_equal_factors_at_equal_distances() -> None:
    made = scale([1.0, 100.0], log=True)
    assert made.place(10.0, 0.0, 200.0) == pytest.approx(100.0) and made.place(1.0, 5.0, 6.0) == 5.0


@pytest.mark.parametrize("value, digits, words", [
    (0.0, 3, "0"), (1e-13, 3, "0"), (0.12345, 3, "0.123"), (0.12345, 4, "0.1235"), (12.0, 3, "12"),
    (1234.5, 3, "1234"), (12345.6, 3, "12 346"), (-1234567.0, 3, "-1 234 567"),
])  # fmt: skip
def test_numbers_are_short(value: float, digits: int, words: str) -> None:
    assert svg.number_text(value, digits) == words


def test_nothing_to_draw_is_said() -> None:
    for empty in (
        svg.lines("t", [("s", [])], x="x", y="y"),
        svg.bars("t", [("0", 0.0, "none")], x="x", y="y"),
        curves("t", [Curve(spots=[])], x="x", y="y"),
    ):
        assert "no data yet" in texts(empty)


def test_several_lines_are_named_and_many_points_have_no_dots() -> None:
    few, many = [(0.0, 1.0), (1.0, 2.0)], [(float(n), 1.0) for n in range(svg.MANY + 1)]
    one = svg.lines("t", [("only", few)], x="x", y="y", marks=[(0.5, "<lost>")])
    assert "only" not in texts(one) and one.count("<circle") == 2 and "only: 2 at 1" in one
    assert one.count("class='fault'") == 1 and "&lt;lost&gt;" in one
    two = svg.lines("t", [("few", few), ("many", many)], x="x", y="y")
    assert {"few", "many"} <= set(texts(two)) and two.count("<circle") == 2


def test_bars_rise_from_zero_in_proportion_and_crowded_ones_have_fewer_labels() -> None:
    plot = svg.bars("t", [("a", 10.0, "ten"), ("b", 5.0, "five")], x="x", y="y")
    high = [float(found) for found in re.findall(r"height='([\d.]+)' fill='#2563eb'", plot)]
    assert high[0] == pytest.approx(2 * high[1], abs=0.2) and "<title>five</title>" in plot
    crowded = texts(svg.bars("t", [(f"bar {n}", 1.0, "") for n in range(80)], x="x", y="y"))
    assert 5 < sum(text.startswith("bar") for text in crowded) < 40


PLACES = st.tuples(st.floats(1.0, 10.0), st.floats(1.0, 10.0), st.floats(0.0, 5.0))


@given(st.lists(PLACES, min_size=1, max_size=8))
def test_labels_do_not_cover_each_other_and_the_weightiest_come_first(
    places: list[tuple[float, float, float]],
) -> None:
    spots = [Spot(x, y, f"label {number}", weight=weight) for number, (x, y, weight) in enumerate(places)]
    plot = ElementTree.fromstring(curves("t", [Curve(spots=spots)], x="x", y="y", level=(5.0, "level")))
    boxes = {}
    for text in plot.iter(f"{SVG}text"):
        if (text.text or "").startswith("label"):
            x, low = float(text.get("x", 0)), float(text.get("y", 0)) + 3
            wide = svg.LETTER * len(text.text or "")
            boxes[text.text] = (x - wide / 2, low - svg.LINE, x + wide / 2, low)
    for one, other in combinations(boxes.values(), 2):
        apart = one[2] <= other[0] + 0.2 or other[2] <= one[0] + 0.2
        assert apart or one[3] <= other[1] + 0.2 or other[3] <= one[1] + 0.2
    if len(spots) == 1:
        assert boxes, "there is room for one"
    assert all(math.isfinite(place) for box in boxes.values() for place in box)
