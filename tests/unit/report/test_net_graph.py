"""The graph of a net: boxes below their sources, none on another, lines around what they pass."""

from __future__ import annotations

import re
from itertools import combinations
from xml.etree import ElementTree

from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.nn.net import NetRow
from syncline.report.net_graph import net_graph

SVG = "{http://www.w3.org/2000/svg}"
Box = tuple[float, float, float, float]  # left, top, right, bottom


def row(name: str, *sources: str, kind: str = "relu", parameters: int = 0) -> NetRow:
    return NetRow(name=name, type=kind, sources=sources, shape="4", parameters=parameters)


def drawn(rows: list[NetRow]) -> tuple[dict[str, Box], list[list[float]]]:
    """Boxes by name, and the numbers of every arrow's path."""
    picture = ElementTree.fromstring(net_graph(rows))
    boxes = {}
    for group in picture.iter(f"{SVG}g"):
        rect, name = group.find(f"{SVG}rect"), group.find(f"{SVG}text")
        assert rect is not None and name is not None
        x, y, wide, high = (float(rect.get(key, 0)) for key in ("x", "y", "width", "height"))
        boxes[name.text or ""] = (x, y, x + wide, y + high)
    paths = [path.get("d", "") for path in picture.iter(f"{SVG}path") if path.get("marker-end")]
    return boxes, [[float(number) for number in re.findall(r"[\d.]+", path)] for path in paths]


@st.composite
def nets(draw: st.DrawFn) -> list[NetRow]:
    """Every layer has some of the ones before it as its sources, in any order of rows."""
    rows = [row("l0", kind="input")]
    for number in range(1, draw(st.integers(1, 8))):
        before = [f"l{each}" for each in range(number)]
        sources = draw(st.lists(st.sampled_from(before), min_size=1, max_size=3, unique=True))
        rows.append(row(f"l{number}", *sources, parameters=draw(st.sampled_from([0, 1234]))))
    return draw(st.permutations(rows))


@settings(max_examples=50)
@given(nets())
def test_boxes_lie_below_their_sources_and_arrows_lead_from_one_to_the_other(rows: list[NetRow]) -> None:
    boxes, arrows = drawn(rows)
    assert set(boxes) == {each.name for each in rows}
    for one, other in combinations(boxes.values(), 2):
        assert one[2] < other[0] or other[2] < one[0] or one[3] < other[1] or other[3] < one[1]
    wanted = [(source, each.name) for each in rows for source in each.sources]
    assert len(arrows) == len(wanted)
    for source, name in wanted:
        above, below = boxes[source], boxes[name]
        assert above[3] < below[1]
        start, end = ((above[0] + above[2]) / 2, above[3]), ((below[0] + below[2]) / 2, below[1])
        assert any(
            abs(a[0] - start[0]) < 0.2
            and abs(a[1] - start[1]) < 0.2
            and abs(a[-2] - end[0]) < 0.2
            and 0 < end[1] - a[-1] < 6
            for a in arrows
        )


def test_a_line_that_passes_a_rank_goes_around_its_boxes() -> None:
    boxes, arrows = drawn([row("a", kind="input"), row("b", "a"), row("c", "b", "a")])
    (long,) = [arrow for arrow in arrows if len(arrow) > 8]
    passing = long[6]  # where it has come to the rank of b
    assert not boxes["b"][0] <= passing <= boxes["b"][2]


def test_inputs_are_right_above_what_takes_them() -> None:
    rows = [
        row("data", kind="input"),
        row("label", kind="input"),
        row("fc", "data"),
        row("loss", "fc", "label", kind="cross_entropy"),
    ]
    boxes, _ = drawn(rows)
    assert boxes["label"][1] == boxes["fc"][1] < boxes["loss"][1] and boxes["data"][1] < boxes["fc"][1]


def test_words_are_escaped_and_counts_are_there() -> None:
    picture = net_graph([row("<x>", kind="input"), row("fc", "<x>", kind="dense", parameters=12345)])
    assert "&lt;x&gt;" in picture and "dense 4, 12,345" in picture
    assert picture.count("marker-end") == 1 and "<title>2 layers</title>" in picture
