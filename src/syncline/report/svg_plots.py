"""Plots as SVG text, without any dependency: lines over a number, and bars. They stand alone or inside a page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
INK, FAINT, RULE, FAULT = "#1f2937", "#6b7280", "#e5e7eb", "#b91c1c"
WIDTH, HEIGHT = 520, 280
LEFT, RIGHT, TOP, BOTTOM = 58, 16, 34, 46
FONT = "font-family='system-ui, sans-serif' font-size='12'"
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a plot."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line at something that happened."""

    x: float
    words: str


@dataclass(slots=True)
class Axis:
    """From values to places on the paper."""

    low: float
    high: float
    start: float
    end: float
    ticks: list[float] = field(default_factory=list)

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def lines(
    title: str,
    series: Sequence[Series],
    *,
    x: str,
    y: str,
    marks: Sequence[Mark] = (),
    zero: bool = False,
) -> str:
    """Lines over a common axis, with the zero if wanted; says so where there is nothing to draw."""
    drawn = [each for each in series if each.points]
    if not drawn:
        return _frame(title, [_text(WIDTH / 2, HEIGHT / 2, "no data yet", anchor="middle", colour=FAINT)])
    across = _axis([p[0] for s in drawn for p in s.points] + [m.x for m in marks], LEFT, WIDTH - RIGHT)
    values = [p[1] for s in drawn for p in s.points]
    up = _axis([0.0, *values] if zero else values, HEIGHT - BOTTOM, TOP)
    parts = [*_grid(across, up), *_labels(x, y), *_marks(marks, across)]
    for number, each in enumerate(drawn):
        parts += _line(each, across, up, COLOURS[number % len(COLOURS)])
    ends = [up(each.points[-1][1]) for each in drawn]
    low = sum(ends) / len(ends) < (TOP + HEIGHT - BOTTOM) / 2  # they end high: the legend goes below them
    return _frame(title, [*parts, *_legend(drawn, title, low)])


def bars(title: str, values: Sequence[tuple[str, float, str]], *, x: str, y: str) -> str:
    """Bars from (label, value, tooltip)."""
    if not any(value for _, value, _ in values):
        return _frame(title, [_text(WIDTH / 2, HEIGHT / 2, "no data yet", anchor="middle", colour=FAINT)])
    up = _axis([0.0, max(value for _, value, _ in values)], HEIGHT - BOTTOM, TOP)
    up.low, up.ticks = 0.0, [tick for tick in up.ticks if tick >= 0]
    room = (WIDTH - LEFT - RIGHT) / len(values)
    parts = [*_rules(up), *_labels(x, y)]
    every = max(1, math.ceil(len(values) * 26 / (WIDTH - LEFT - RIGHT)))
    for number, (label, value, tip) in enumerate(values):
        middle, top = LEFT + room * (number + 0.5), up(value)
        wide = min(46.0, room * 0.72)
        parts.append(
            f"<rect x='{middle - wide / 2:.1f}' y='{top:.1f}' width='{wide:.1f}' height='{up(0) - top:.1f}' "
            f"fill='{COLOURS[0]}'><title>{escape(tip)}</title></rect>"
        )
        if number % every == 0:
            parts.append(_text(middle, HEIGHT - BOTTOM + 16, label, anchor="middle"))
    return _frame(title, parts)


def stacked(plots: Sequence[str]) -> str:
    """Several plots in one picture, two in a row."""
    rows = math.ceil(len(plots) / 2)
    wide, high = WIDTH * min(2, len(plots)), HEIGHT * rows
    placed = (
        f"<g transform='translate({WIDTH * (number % 2)} {HEIGHT * (number // 2)})'>{plot}</g>"
        for number, plot in enumerate(plots)
    )
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {wide} {high}' width='{wide}' height='{high}'>"
        f"<rect width='{wide}' height='{high}' fill='white'/>{''.join(placed)}</svg>\n"
    )


# -- parts -----------------------------------------------------------------------------------------------------


def _frame(title: str, parts: Sequence[str]) -> str:
    heading = f"<text x='{LEFT}' y='18' font-weight='600' fill='{INK}'>{escape(title)}</text>"
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}' "
        f"height='{HEIGHT}' role='img' {FONT}><title>{escape(title)}</title>{heading}{''.join(parts)}</svg>"
    )


def _axis(values: Sequence[float], start: float, end: float) -> Axis:
    low, high = min(values), max(values)
    if high <= low:
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    step = _nice((high - low) / 5)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [number * step for number in range(first, last + 1)]
    return Axis(ticks[0], ticks[-1], start, end, ticks)


def _nice(step: float) -> float:
    size = 10.0 ** math.floor(math.log10(step))
    return next(factor * size for factor in (1, 2, 2.5, 5, 10) if factor * size >= step * 0.999)


def _grid(across: Axis, up: Axis) -> list[str]:
    ticks = [
        _text(across(tick), HEIGHT - BOTTOM + 16, number_text(tick), anchor="middle") for tick in across.ticks
    ]
    return [*_rules(up), *ticks]


def _rules(up: Axis) -> list[str]:
    parts = []
    for tick in up.ticks:
        place = f"{up(tick):.1f}"
        parts.append(f"<line x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{place}' y2='{place}' stroke='{RULE}'/>")
        parts.append(_text(LEFT - 6, up(tick) + 4, number_text(tick), anchor="end"))
    return parts


def _labels(x: str, y: str) -> list[str]:
    return [
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, x, anchor="middle", colour=FAINT),
        f"<text transform='translate(14 {(TOP + HEIGHT - BOTTOM) / 2:.0f}) rotate(-90)' text-anchor='middle' "
        f"fill='{FAINT}'>{escape(y)}</text>",
    ]


def _marks(marks: Sequence[Mark], across: Axis) -> list[str]:
    return [
        f"<line x1='{across(m.x):.1f}' x2='{across(m.x):.1f}' y1='{TOP}' y2='{HEIGHT - BOTTOM}' "
        f"stroke='{FAULT}' stroke-dasharray='3 3' class='fault'><title>{escape(m.words)}</title></line>"
        f"<text x='{across(m.x):.1f}' y='{TOP + 3}' fill='{FAULT}' text-anchor='middle'>×</text>"
        for m in marks
    ]


def _line(series: Series, across: Axis, up: Axis, colour: str) -> list[str]:
    path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in series.points)
    parts = [
        f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='2' stroke-linejoin='round'/>"
    ]
    if len(series.points) <= 60:
        parts += [
            f"<circle cx='{across(x):.1f}' cy='{up(y):.1f}' r='2.6' fill='{colour}'>"
            f"<title>{escape(series.name)}: {number_text(y, 4)} at {number_text(x, 4)}</title></circle>"
            for x, y in series.points
        ]
    return parts


def _legend(series: Sequence[Series], title: str, low: bool) -> list[str]:
    """Beside the title where there is room, else on the right where no line ends; a single line is named by the title."""
    if len(series) < 2:
        return []
    wide = [24 + 6.2 * len(each.name) for each in series]
    if LEFT + 7.0 * len(title) + sum(wide) <= WIDTH:
        lefts = [WIDTH - RIGHT - sum(wide[number:]) + 8 for number in range(len(series))]
        places, back = [(left, 18.0) for left in lefts], []
    else:
        left = max(LEFT + 8.0, WIDTH - RIGHT - max(wide))
        top = HEIGHT - BOTTOM - 16.0 * len(series) - 10 if low else TOP + 2.0
        places = [(left, top + 12 + 16 * number) for number in range(len(series))]
        size = f"width='{WIDTH - RIGHT - left + 6:.0f}' height='{16 * len(series) + 6}'"
        back = [f"<rect x='{left - 6:.0f}' y='{top:.0f}' {size} fill='white' fill-opacity='0.85'/>"]
    for number, (each, (left, y)) in enumerate(zip(series, places, strict=True)):
        colour = COLOURS[number % len(COLOURS)]
        back.append(f"<rect x='{left:.0f}' y='{y - 6:.0f}' width='12' height='4' fill='{colour}'/>")
        back.append(_text(left + 16, y, each.name))
    return back


def _text(x: float, y: float, words: str, *, anchor: str = "start", colour: str = INK) -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' fill='{colour}'>{escape(words)}</text>"


def number_text(value: float, digits: int = 3) -> str:
    """Short, as people write it."""
    if value == 0 or abs(value) < 1e-12:
        return "0"
    if abs(value) >= 10000:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.{digits}g}" if abs(value) < 10**digits else f"{value:.0f}"
