"""The graph of a net as SVG text: layers as boxes from top to bottom, with their shapes; arrows from their sources."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import pairwise

from syncline.nn.net import NetRow
from syncline.nn.registry import find_type
from syncline.report.svg_plots import COLOURS, FAINT, FONT, INK, RULE
from syncline.terminal import visible

HIGH, GAP, APART, MARGIN = 46, 34, 24, 20  # of boxes, between ranks, between boxes of a rank, around
LETTER = 6.8  # the width of one
THROUGH = 14  # room that a line takes which passes a rank
FILLS = {"input": "#eff6ff", "loss": "#fef2f2", "layer": "white"}
EDGES = {"input": COLOURS[0], "loss": COLOURS[1], "layer": FAINT}

Node = str | tuple[str, str, int]  # a layer, or a line on its way through a rank
Places = dict[Node, tuple[float, float]]  # the middle of each


def net_graph(rows: Sequence[NetRow]) -> str:
    """Of a net's table."""
    ranks = _ranks(rows)
    levels, lines = _levels(rows, ranks)
    _untangle(levels, lines)
    wide = {row.name: LETTER * max(map(len, _words(row))) + 20 for row in rows}
    places, width = _places(levels, wide)
    height = len(levels) * (HIGH + GAP) - GAP + 2 * MARGIN
    drawn = [*(_arrow(line, places) for line in lines), *(_box(row, places, wide) for row in rows)]
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width:.0f} {height}' width='{width:.0f}' height='{height}' "
        f"role='img' {FONT}><title>{len(rows)} layers</title>{_HEAD}<rect width='100%' height='100%' fill='white'/>"
        f"{''.join(drawn)}</svg>\n"
    )


def _ranks(rows: Sequence[NetRow]) -> dict[str, int]:
    """Below all sources; inputs right above what takes them."""
    ranks: dict[str, int] = {}
    by_name = {row.name: row for row in rows}
    waiting = [row.name for row in rows]
    while waiting:
        name = waiting.pop()
        open_ = [source for source in by_name[name].sources if source not in ranks]
        if open_:
            waiting += [name, *open_]
        else:
            ranks[name] = max((ranks[source] + 1 for source in by_name[name].sources), default=0)
    for row in rows:
        takers = [ranks[other.name] for other in rows if row.name in other.sources]
        if not row.sources and takers:
            ranks[row.name] = min(takers) - 1
    return ranks


def _levels(rows: Sequence[NetRow], ranks: dict[str, int]) -> tuple[list[list[Node]], list[list[Node]]]:
    """Nodes by rank, and the lines between them, with a node in every rank that they pass."""
    levels: list[list[Node]] = [[] for _ in range(max(ranks.values()) + 1)]
    lines: list[list[Node]] = []
    for row in rows:
        levels[ranks[row.name]].append(row.name)
        for source in row.sources:
            between = range(ranks[source] + 1, ranks[row.name])
            passed: list[Node] = [(source, row.name, rank) for rank in between]
            for rank, node in zip(between, passed, strict=True):
                levels[rank].append(node)
            lines.append([source, *passed, row.name])
    return levels, lines


def _untangle(levels: list[list[Node]], lines: Sequence[Sequence[Node]]) -> None:
    """Every rank in the order of its neighbours' places, down and up a few times."""
    above: dict[Node, list[Node]] = {}
    below: dict[Node, list[Node]] = {}
    for line in lines:
        for upper, lower in pairwise(line):
            above.setdefault(lower, []).append(upper)
            below.setdefault(upper, []).append(lower)
    for _ in range(4):
        for beside, order in ((above, levels), (below, levels[::-1])):
            at: dict[Node, float] = {}
            for level in order:
                own = {node: (number + 0.5) / len(level) for number, node in enumerate(level)}
                means = {}
                for node in level:
                    near = [at[each] for each in beside.get(node, []) if each in at]
                    means[node] = sum(near) / len(near) if near else own[node]
                level.sort(key=means.__getitem__)
                at.update({node: (number + 0.5) / len(level) for number, node in enumerate(level)})


def _places(levels: Sequence[Sequence[Node]], wide: dict[str, float]) -> tuple[Places, float]:
    def room(node: Node) -> float:
        return wide[node] if isinstance(node, str) else THROUGH

    lengths = [sum(map(room, level)) + APART * (len(level) - 1) for level in levels]
    width = max(lengths) + 2 * MARGIN
    places: Places = {}
    for rank, (level, length) in enumerate(zip(levels, lengths, strict=True)):
        left = (width - length) / 2
        for node in level:
            places[node] = left + room(node) / 2, MARGIN + rank * (HIGH + GAP) + HIGH / 2
            left += room(node) + APART
    return places, width


def _words(row: NetRow) -> tuple[str, str]:
    count = f", {row.parameters:,}" if row.parameters else ""
    return row.name, f"{row.type} {row.shape}{count}"


def _box(row: NetRow, places: Places, wide: dict[str, float]) -> str:
    (x, y), size = places[row.name], wide[row.name]
    role = find_type(row.type).role
    name, words = _words(row)
    return (
        f"<g><rect x='{x - size / 2:.1f}' y='{y - HIGH / 2:.1f}' width='{size:.1f}' height='{HIGH}' rx='6' "
        f"fill='{FILLS[role]}' stroke='{EDGES[role]}'/>"
        f"<text x='{x:.1f}' y='{y - 4:.1f}' text-anchor='middle' font-weight='600' fill='{INK}'>{escape(visible(name))}</text>"
        f"<text x='{x:.1f}' y='{y + 13:.1f}' text-anchor='middle' fill='{FAINT}'>{escape(visible(words))}</text></g>"
    )


def _arrow(line: Sequence[Node], places: Places) -> str:
    x, y = places[line[0]]
    path = f"M{x:.1f} {y + HIGH / 2:.1f}"
    for number, node in enumerate(line[1:], 2):
        x_before, y_before = x, y + HIGH / 2
        x, y = places[node]
        top = y - HIGH / 2 - (5 if number == len(line) else 0)
        middle = (y_before + top) / 2
        path += f" C{x_before:.1f} {middle:.1f} {x:.1f} {middle:.1f} {x:.1f} {top:.1f}"
        if number < len(line):
            path += f" L{x:.1f} {y + HIGH / 2:.1f}"
    return f"<path d='{path}' fill='none' stroke='{FAINT}' marker-end='url(#head)'/>"


_HEAD = (
    "<defs><marker id='head' viewBox='0 0 8 8' refX='3' refY='4' markerWidth='8' markerHeight='8' orient='auto'>"
    f"<path d='M0 0 L8 4 L0 8 z' fill='{FAINT}' stroke='{RULE}' stroke-width='0'/></marker></defs>"
)
