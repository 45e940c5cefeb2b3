"""Plots as SVG text, without any dependency: curves through points, on linear or logarithmic axes, and bars.

They stand alone, side by side, or inside a page. Every point has its words as a tooltip; labels that would cover each other are
left out. Not responsible for what is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from xml.etree import ElementTree

from syncline.terminal import visible

COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
INK, FAINT, RULE, FAULT = "#1f2937", "#6b7280", "#e5e7eb", "#b91c1c"
FONT = "font-family='system-ui, sans-serif' font-size='12'"
SMALL, LARGE = (520, 280), (600, 420)  # widths and heights
LEFT, RIGHT, TOP, BOTTOM = 60, 18, 34, 48
LETTER, LINE = 5.8, 13.0  # size of a label's letters and lines
ROW = 16  # height of the legend's rows
WIDE = 8.0  # largest over smallest value, from which an axis is logarithmic
LARGEST = 1e300  # number on an axis
MANY = 60  # points of a line that has no dots
Size = tuple[int, int]
Point = tuple[float, float]
Series = tuple[str, Sequence[Point]]  # a line, with its name
Mark = tuple[float, str]  # a place on an axis, with words
Box = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass(frozen=True, slots=True)
class Spot:
    """A point with its label and tooltip."""

    x: float
    y: float
    label: str = ""
    tip: str = ""
    weight: float = 0.0  # labels of larger weight are placed first


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Spots in order; joined by a line, marked by dots, or both."""

    spots: Sequence[Spot]
    colour: str = INK
    name: str = ""  # for the legend
    line: bool = True
    dots: bool = True
    dashed: bool = False


# -- axes ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scale:
    """From values to places, by the value or by its logarithm."""

    low: float
    high: float
    log: bool = False
    ticks: tuple[float, ...] = ()

    def place(self, value: float, start: float, end: float) -> float:
        low, high, at = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return start + (at - low) / (high - low) * (end - start)


def scale(values: Sequence[float], *, log: bool | None = None, powers: bool = False) -> Scale:
    """Round limits around some values; logarithmic where they are wide apart, with `powers` in powers of two."""
    low, high = min(values), max(values)
    possible = low > max(1e-12 * high, 1e-100)
    if powers and possible:
        return _powers(low, high)
    wide = possible and high / low > WIDE if log is None else log
    return _logarithmic(low, high) if wide and possible else _linear(low, high)


def _powers(low: float, high: float) -> Scale:
    first, last = math.floor(math.log2(low)), math.ceil(math.log2(high))
    last = max(last, first + 1)
    every = max(1, math.ceil((last - first) / 10))
    return Scale(2.0**first, 2.0**last, True, tuple(2.0**k for k in range(first, last + 1, every)))


def _linear(low: float, high: float) -> Scale:
    size = max(abs(low), abs(high))
    if high - low <= max(1e-9 * size, 1e-100):  # nothing to tell apart
        half = size / 2 if size > 1e-90 else 0.5
        low, high = low - half, high + half
    size = 10.0 ** math.floor(math.log10((high - low) / 5))
    step = next(factor * size for factor in (1, 2, 2.5, 5, 10) if factor * size >= (high - low) / 5 * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(number * step for number in range(first, last + 1))
    return Scale(ticks[0], ticks[-1], False, ticks)


def _logarithmic(low: float, high: float) -> Scale:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if last - first <= 3 else (1,)
    every = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
    below = max((tick for tick in every if tick <= low * 1.0001), default=every[0])
    above = min((tick for tick in every if tick >= high * 0.9999), default=every[-1])
    above = above if above > below else below * 10
    return Scale(below, above, True, tuple(tick for tick in every if below <= tick <= above))


# -- plots -----------------------------------------------------------------------------------------------------


def curves(
    title: str,
    drawn: Sequence[Curve],
    *,
    x: str,
    y: str,
    across: Scale | None = None,
    up: Scale | None = None,
    level: Mark | None = None,
    marks: Sequence[Mark] = (),
    size: Size = LARGE,
) -> str:
    """One plot; scales are made from the points where they are not given. `level` is across it, `marks` are things that happened."""
    drawn = [replace(curve, spots=[*filter(_drawable, curve.spots)]) for curve in drawn]
    spots = [spot for curve in drawn for spot in curve.spots]
    if not spots:
        return _empty(title, size)
    legend, rows = _legend(drawn, size[0])
    across = across or scale([spot.x for spot in spots])
    up = up or scale([spot.y for spot in spots] + ([level[0]] if level else []))
    area = _Area(size, across, up, rows)
    parts = [*area.axes(x, y), *area.marks(marks)]
    if level is not None:
        parts += area.level(*level, spots)
    for curve in drawn:
        parts += area.curve(curve)
    return _frame(title, area.size, [*parts, *area.labels(spots), *legend])


def lines(
    title: str, series: Sequence[Series], *, x: str, y: str, marks: Sequence[Mark] = (), zero: bool = False
) -> str:
    """Lines over a common axis, with the zero if wanted; a single line is named by the title."""
    finite = [(name, [*filter(_drawable, points)]) for name, points in series]
    found = [(name, points) for name, points in finite if points]
    if not found:
        return _empty(title, SMALL)
    drawn = []
    for number, (name, points) in enumerate(found):
        tips = (f"{name}: {number_text(at[1], 4)} at {number_text(at[0], 4)}" for at in points)
        spots = [Spot(*at, tip=tip) for at, tip in zip(points, tips, strict=True)]
        colour, named = COLOURS[number % len(COLOURS)], name if len(found) > 1 else ""
        drawn.append(Curve(spots=spots, colour=colour, name=named, dots=len(points) <= MANY))
    spots = [spot for curve in drawn for spot in curve.spots]
    across = scale([spot.x for spot in spots] + [place for place, _ in marks], log=False)
    up = scale([0.0] * zero + [spot.y for spot in spots], log=False)
    return curves(title, drawn, x=x, y=y, across=across, up=up, marks=marks, size=SMALL)


def _drawable(point: Spot | Point) -> bool:
    """Leave out nan, infinite numbers, and numbers so large that distances overflow."""
    x, y = (point.x, point.y) if isinstance(point, Spot) else point
    return abs(x) <= LARGEST and abs(y) <= LARGEST


def bars(title: str, values: Sequence[tuple[str, float, str]], *, x: str, y: str) -> str:
    """Bars from (label, value, tooltip)."""
    if not any(value for _, value, _ in values):
        return _empty(title, SMALL)
    up = scale([0.0, max(value for _, value, _ in values)], log=False)
    area = _Area(SMALL, Scale(0, len(values)), up)
    parts = [*area.axes(x, y)]
    room = area.x(1) - area.x(0)
    wide, every = min(46.0, room * 0.72), max(1, math.ceil(26 / room))
    for number, (label, value, tip) in enumerate(values):
        middle, top = area.x(number + 0.5), area.y(value)
        parts.append(
            f"<rect x='{middle - wide / 2:.1f}' y='{top:.1f}' width='{wide:.1f}' height='{area.y(0) - top:.1f}' "
            f"fill='{COLOURS[0]}'><title>{escape(tip)}</title></rect>"
        )
        if number % every == 0:
            parts.append(_text(middle, area.low + 16, label, anchor="middle"))
    return _frame(title, area.size, parts)


def side_by_side(plots: Sequence[str], title: str = "") -> str:
    """Plots in one picture, two in a row, with a heading if wanted."""
    sizes = [[int(ElementTree.fromstring(plot).get(key, 0)) for plot in plots] for key in ("width", "height")]
    step, high = max(sizes[0]), 34 if title else 0
    placed = []
    for first in range(0, len(plots), 2):
        row = enumerate(plots[first : first + 2])
        placed += [f"<g transform='translate({step * column} {high})'>{plot}</g>" for column, plot in row]
        high += max(sizes[1][first : first + 2])
    heading = f"<text x='{LEFT}' y='26' {FONT} fill='{INK}'>{escape(title)}</text>" if title else ""
    paper = "<rect width='100%' height='100%' fill='white'/>"
    return _svg((step * min(2, len(plots)), high), f"{paper}{heading}{''.join(placed)}") + "\n"


# -- on paper --------------------------------------------------------------------------------------------------


class _Area:
    """What is between the axes, below so many rows of a legend: the first of them takes room from it."""

    def __init__(self, size: Size, across: Scale, up: Scale, rows: int = 0) -> None:
        self.size = size[0], size[1] + ROW * max(0, rows - 1)
        self._across, self._up = across, up
        self.right, self.low = size[0] - RIGHT, self.size[1] - BOTTOM
        self.high = TOP + (ROW * rows + 8) * (rows > 0)
        self._taken: list[Box] = []  # by words

    def at(self, spot: Spot) -> Point:
        return self.x(spot.x), self.y(spot.y)

    def x(self, value: float) -> float:
        return self._across.place(value, LEFT, self.right)

    def y(self, value: float) -> float:
        return self._up.place(value, self.low, self.high)

    def axes(self, x: str, y: str) -> Iterator[str]:
        """With a line at every tick, and their names."""
        for tick in self._up.ticks:
            yield self._across_all(self.y(tick), f"stroke='{RULE}'")
            yield _text(LEFT - 6, self.y(tick) + 4, number_text(tick), anchor="end")
        for tick in self._across.ticks:
            yield self._upright(self.x(tick), f"stroke='{RULE}'")
            yield _text(self.x(tick), self.low + 16, number_text(tick), anchor="middle")
        yield _text((LEFT + self.right) / 2, self.size[1] - 11, x, anchor="middle", colour=FAINT)
        turned = f"translate(14 {(self.high + self.low) / 2:.0f}) rotate(-90)"
        yield f"<text transform='{turned}' text-anchor='middle' fill='{FAINT}'>{escape(y)}</text>"

    def _across_all(self, y: float, style: str, tip: str = "") -> str:
        return f"<line x1='{LEFT}' x2='{self.right}' y1='{y:.1f}' y2='{y:.1f}' {style}>{_title(tip)}</line>"

    def _upright(self, x: float, style: str, tip: str = "") -> str:
        return (
            f"<line x1='{x:.1f}' x2='{x:.1f}' y1='{self.high}' y2='{self.low}' {style}>{_title(tip)}</line>"
        )

    def marks(self, marks: Sequence[Mark]) -> Iterator[str]:
        style = f"stroke='{FAULT}' stroke-dasharray='3 3' class='fault'"
        for place, words in marks:
            yield self._upright(self.x(place), style, words)
            yield _text(self.x(place), self.high + 3, "×", anchor="middle", colour=FAULT)

    def level(self, value: float, words: str, spots: Sequence[Spot]) -> Iterator[str]:
        place, wide = self.y(value), LETTER * 1.1 * len(words)
        yield self._across_all(place, f"stroke='{INK}' stroke-dasharray='6 4'", words)
        ends = (self.right - wide / 2 - 4, LEFT + wide / 2 + 4)
        boxes = [_box(x, place + y, wide, LINE) for x in ends for y in (-9, 9)]
        box = next((box for box in boxes if not _overlaps(box, self._dots(spots))), boxes[0])
        self._taken.append(box)
        yield _label(box, words, colour=FAINT, size=11)

    def _dots(self, spots: Sequence[Spot]) -> list[Box]:
        return [_box(x, y, 7, 7) for x, y in dict.fromkeys(map(self.at, spots))]

    def curve(self, curve: Curve) -> Iterator[str]:
        if curve.line and curve.spots:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(self.at, curve.spots))
            style = "stroke-width='1' stroke-dasharray='3 3'" if curve.dashed else "stroke-width='2'"
            yield f"<polyline points='{path}' fill='none' stroke='{curve.colour}' {style} stroke-linejoin='round'/>"
        for spot in curve.spots if curve.dots else ():
            x, y = self.at(spot)
            tip = _title(spot.tip or spot.label)
            yield f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3' fill='{curve.colour}'>{tip}</circle>"

    def labels(self, spots: Sequence[Spot]) -> Iterator[str]:
        """Where there is room, the weightiest first."""
        taken = [*self._taken, *self._dots(spots)]
        ordered = sorted(spots, key=lambda spot: -spot.weight)
        for spot in {(*self.at(spot), spot.label): spot for spot in ordered}.values():
            free = (box for box in self._around(spot) if spot.label and not _overlaps(box, taken))
            if (box := next(free, None)) is not None:
                taken.append(box)
                yield _label(box, spot.label, colour=INK, size=10)

    def _around(self, spot: Spot) -> Iterator[Box]:
        """Places for a label, the best first, inside the axes."""
        x, y = self.at(spot)
        wide = LETTER * len(spot.label)
        beside, above = wide / 2 + 7, LINE / 2 + 5
        steps = ((0, -1), (0, 1), (1, 0), (-1, 0), (0.7, -1), (-0.7, -1), (0.7, 1), (-0.7, 1))
        for across, up in steps:
            box = _box(x + across * beside, y + up * above, wide, LINE)
            inside = box[0] >= LEFT and box[2] <= self.size[0] - 2
            if inside and box[1] >= self.high - 8 and box[3] <= self.low:
                yield box


def _box(x: float, y: float, wide: float, high: float) -> Box:
    return x - wide / 2, y - high / 2, x + wide / 2, y + high / 2


def _overlaps(box: Box, others: Sequence[Box]) -> bool:
    return any(box[0] < b[2] and b[0] < box[2] and box[1] < b[3] and b[1] < box[3] for b in others)


def _legend(drawn: Sequence[Curve], width: int) -> tuple[list[str], int]:
    """Below the title; and in how many rows."""
    parts, left, rows = [], float(width), 0
    for curve in drawn:
        wide = 36 + 6.6 * len(curve.name)
        if curve.name and left + wide - 15 > width:
            left, rows = float(LEFT), rows + 1
        if curve.name:
            y, dash = 22 + ROW * rows, " stroke-dasharray='3 3'" if curve.dashed else ""
            parts.append(
                f"<line x1='{left:.0f}' x2='{left + 16:.0f}' y1='{y}' y2='{y}' stroke='{curve.colour}' "
                f"stroke-width='{1 if curve.dashed else 3}'{dash}/>"
            )
            parts.append(_text(left + 21, y + 4, curve.name))
            left += wide
    return parts, rows


def _empty(title: str, size: Size) -> str:
    words = _text(size[0] / 2, size[1] / 2, "no data yet", anchor="middle", colour=FAINT)
    return _frame(title, size, [words])


def _frame(title: str, size: Size, parts: Sequence[str]) -> str:
    heading = f"<text x='{LEFT}' y='20' font-weight='600' fill='{INK}'>{escape(title)}</text>"
    return _svg(size, f"{_title(title)}{heading}{''.join(parts)}", f" role='img' {FONT}")


def _svg(size: Size, content: str, more: str = "") -> str:
    box = f"viewBox='0 0 {size[0]} {size[1]}' width='{size[0]}' height='{size[1]}'"
    return visible(f"<svg xmlns='http://www.w3.org/2000/svg' {box}{more}>{content}</svg>", lines=True)


def _title(words: str) -> str:
    """A tooltip."""
    return f"<title>{escape(words)}</title>" if words else ""


def _text(x: float, y: float, words: str, *, anchor: str = "start", colour: str = INK) -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' fill='{colour}'>{escape(words)}</text>"


def _label(box: Box, words: str, *, colour: str, size: int) -> str:
    """Words that stay readable on lines."""
    return (
        f"<text x='{(box[0] + box[2]) / 2:.1f}' y='{box[3] - 3:.1f}' text-anchor='middle' fill='{colour}' "
        f"font-size='{size}' paint-order='stroke' stroke='white' stroke-width='3'>{escape(words)}</text>"
    )


def number_text(value: float, digits: int = 3) -> str:
    """Short, as people write it."""
    if value == 0 or abs(value) < 1e-12:
        return "0"
    if abs(value) >= 10000:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.{digits}g}" if abs(value) < 10**digits else f"{value:.0f}"
