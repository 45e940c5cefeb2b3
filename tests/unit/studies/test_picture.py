"""The curves: well-formed, every point with its words, labels that do not cover each other."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from xml.etree import ElementTree

from syncline.report.svg_plots import Curve, Spot, curves
from syncline.studies.grid import asked
from syncline.studies.picture import page, panels, picture, ramp
from tests.unit.studies.studies import grid, row, whole

SVG = "{http://www.w3.org/2000/svg}"


def titles(panel: str) -> str:
    return ElementTree.fromstring(panel).findtext(f"{SVG}title") or ""


def labels(panel: str) -> Iterator[ElementTree.Element]:
    return (
        each for each in ElementTree.fromstring(panel).iter(f"{SVG}text") if each.get("font-size") == "10"
    )


def test_a_panel_for_each_dial_and_those_that_compare() -> None:
    drawn = panels(whole())
    assert [titles(each).split(":")[0].split(" at ")[0] for each in drawn] == [
        "hardsync",
        "softsync",
        "async",
        "The rule",
        "Mean staleness",
        "Speed-up",
        "Speed-up",
    ]
    tips = [each.text for each in ElementTree.fromstring(drawn[0]).iter(f"{SVG}title")]
    assert "hardsync (0, 4, 30): 11.2 % after 66.67 s, 100 updates" in tips
    assert "baseline (0, 128, 1)" in tips
    named = [each.text for each in labels(drawn[2])]
    assert {"(29, 4, 30)", "(29, 128, 30)", "(0, 4, 1)", "(0, 128, 1)"} <= set(named), "the corners"
    assert len(named) == len(set(named))


def test_labels_do_not_cover_each_other() -> None:
    spots = [Spot(x / 10, y / 10, f"({x}, {y}, 0)", weight=x) for x in range(8) for y in range(8)]
    panel = curves("many", [Curve(spots=spots)], x="x", y="y")
    boxes = []
    for each in labels(panel):
        x, y, wide = float(each.get("x", 0)), float(each.get("y", 0)), 5.8 * len(each.text or "")
        boxes.append((x - wide / 2, y - 10, x + wide / 2, y + 3))
    assert 8 < len(boxes) <= 64
    for number, a in enumerate(boxes):
        for b in boxes[number + 1 :]:
            assert a[0] >= b[2] - 0.2 or b[0] >= a[2] - 0.2 or a[1] >= b[3] - 0.2 or b[1] >= a[3] - 0.2


def test_without_errors_there_are_times_only() -> None:
    timed = [row(each.point, test_error=None, test_loss=None, loss=None) for each in whole()]
    assert [titles(each).split(" at ")[0] for each in panels(timed)] == ["Mean staleness", "Speed-up", "Speed-up"]  # fmt: skip
    failed = [asked(point, error="no luck") for point in grid().points()[0]]
    assert [titles(each) for each in panels(failed)] == ["Mean staleness"]
    assert "no data yet" in picture(failed)
    ElementTree.fromstring(picture(failed))


def ticks(panel: str) -> list[str]:
    """Below the axis across."""
    found = ElementTree.fromstring(panel).iter(f"{SVG}text")
    return [each.text or "" for each in found if each.get("y") == "388.0"]


def test_thousands_of_learners_are_on_logarithmic_axes() -> None:
    few, many = panels(whole(learners=(1, 10, 64))), panels(whole(learners=(1, 10, 100, 10_000)))
    for panel in few[-3:]:
        assert ticks(panel)[0] == "0"
    for panel in many[-3:]:
        assert ticks(panel) == ["1", "10", "100", "1000", "10 000"]
        dots = sorted(
            {float(each.get("cx", 0)) for each in ElementTree.fromstring(panel).iter(f"{SVG}circle")}
        )
        assert len(dots) == 4 and min(b - a for a, b in pairwise(dots)) > 100, "told apart"
    ideal = [e.get("points", "") for e in ElementTree.fromstring(many[-1]).iter(f"{SVG}polyline")][-1]
    assert ideal.count(" ") == 1, "still a straight line"


def test_the_page_holds_picture_and_rows() -> None:
    rows = [*whole(), asked(grid().points()[0][0], error="a < b & 'c'")]
    text = page(rows, title="a <job>", unit="seconds")
    root = ElementTree.fromstring(text.partition("\n")[2])
    assert len(root.findall(".//tbody/tr")) == 28
    assert "a &lt; b &amp;" in text and "time in seconds" in text
    assert ElementTree.fromstring(picture(rows, title="a <job>")).tag == f"{SVG}svg"


def test_colours_are_in_order_and_enough() -> None:
    assert len(set(ramp(6))) == 6 and len(set(ramp(2))) == 2 and len(ramp(11)) == 11
