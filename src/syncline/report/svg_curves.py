"""Curves through labelled points as SVG text, on linear or logarithmic axes, beside the simpler plots of svg.py.

Labels that would cover each other are left out; every point has its words as a tooltip. Not responsible for what is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape

from syncline.report.svg_plots import FAINT, FONT, INK, RULE, number_text

WIDTH, HEIGHT = 600, 420
LEFT, RIGHT, TOP, BOTTOM = 62, 20, 58, 50
LETTER, LINE = 5.8, 13.0  # size of a label's letters and lines
WIDE = 8.0  # largest over smallest value, from which an axis is logarithmic
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


@dataclass(frozen=True, slots=True)
class Level:
    """A horizontal line with words."""

    y: float
    words: str


@dataclass(frozen=True, slots=True)
class Scale:
    """From values to places, by the value or by its logarithm."""

    low: float
    high: float
    log: bool = False
    ticks: tuple[float, ...] = field(default=())

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


def curves(
    title: str,
    drawn: Sequence[Curve],
    *,
    x: str,
    y: str,
    across: Scale | None = None,
    up: Scale | None = None,
    level: Level | None = None,
) -> str:
    """One plot; scales are made from the points where they are not given."""
    spots = [spot for curve in drawn for spot in curve.spots]
    if not spots:
        words = _text(WIDTH / 2, HEIGHT / 2, "no data yet", anchor="middle", colour=FAINT)
        return _frame(title, [words])
    paper = _Paper(
        across or scale([spot.x for spot in spots]),
        up or scale([spot.y for spot in spots] + ([level.y] if level else [])),
    )
    parts = [*paper.grid(x, y)]
    if level is not None:
        parts += paper.level(level, spots)
    for curve in drawn:
        parts += paper.curve(curve)
    return _frame(title, [*parts, *paper.labels(spots), *_legend(drawn)])


def side_by_side(plots: Sequence[str], title: str = "") -> str:
    """Plots in one picture, two in a row, with a heading if wanted."""
    above = 34 if title else 0
    wide, high = WIDTH * min(2, len(plots)), HEIGHT * math.ceil(len(plots) / 2) + above
    placed = (
        f"<g transform='translate({WIDTH * (number % 2)} {HEIGHT * (number // 2) + above})'>{plot}</g>"
        for number, plot in enumerate(plots)
    )
    heading = f"<text x='{LEFT}' y='26' {FONT} fill='{INK}'>{escape(title)}</text>" if title else ""
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {wide} {high}' width='{wide}' height='{high}'>"
        f"<rect width='{wide}' height='{high}' fill='white'/>{heading}{''.join(placed)}</svg>\n"
    )


# -- on paper --------------------------------------------------------------------------------------------------


class _Paper:
    """The area between the axes."""

    def __init__(self, across: Scale, up: Scale) -> None:
        self._across, self._up = across, up
        self._taken: list[Box] = []  # by words

    def at(self, spot: Spot) -> tuple[float, float]:
        return self._x(spot.x), self._y(spot.y)

    def _x(self, value: float) -> float:
        return self._across.place(value, LEFT, WIDTH - RIGHT)

    def _y(self, value: float) -> float:
        return self._up.place(value, HEIGHT - BOTTOM, TOP)

    def grid(self, x: str, y: str) -> Iterator[str]:
        for tick in self._up.ticks:
            place = f"{self._y(tick):.1f}"
            yield f"<line x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{place}' y2='{place}' stroke='{RULE}'/>"
            yield _text(LEFT - 6, self._y(tick) + 4, number_text(tick), anchor="end")
        for tick in self._across.ticks:
            place = f"{self._x(tick):.1f}"
            yield f"<line x1='{place}' x2='{place}' y1='{TOP}' y2='{HEIGHT - BOTTOM}' stroke='{RULE}'/>"
            yield _text(self._x(tick), HEIGHT - BOTTOM + 16, number_text(tick), anchor="middle")
        yield _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, x, anchor="middle", colour=FAINT)
        middle = (TOP + HEIGHT - BOTTOM) / 2
        yield (
            f"<text transform='translate(15 {middle:.0f}) rotate(-90)' text-anchor='middle' "
            f"fill='{FAINT}'>{escape(y)}</text>"
        )

    def level(self, level: Level, spots: Sequence[Spot]) -> Iterator[str]:
        place = self._y(level.y)
        yield (
            f"<line x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{place:.1f}' y2='{place:.1f}' stroke='{INK}' "
            f"stroke-dasharray='6 4'><title>{escape(level.words)}</title></line>"
        )
        wide = LETTER * 1.1 * len(level.words)
        ends = (WIDTH - RIGHT - wide / 2 - 4, LEFT + wide / 2 + 4)
        boxes = [_box(x, place + y, wide, LINE) for x in ends for y in (-9, 9)]
        box = next((box for box in boxes if not _overlaps(box, self._dots(spots))), boxes[0])
        self._taken.append(box)
        yield _halo((box[0] + box[2]) / 2, box[3] - 3, level.words, anchor="middle", colour=FAINT)

    def _dots(self, spots: Sequence[Spot]) -> list[Box]:
        return [_box(x, y, 7, 7) for x, y in dict.fromkeys(map(self.at, spots))]

    def curve(self, curve: Curve) -> Iterator[str]:
        if curve.line and len(curve.spots) > 1:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(self.at, curve.spots))
            style = "stroke-width='1' stroke-dasharray='3 3'" if curve.dashed else "stroke-width='2'"
            yield f"<polyline points='{path}' fill='none' stroke='{curve.colour}' {style} stroke-linejoin='round'/>"
        for spot in curve.spots if curve.dots else ():
            x, y = self.at(spot)
            tip = f"<title>{escape(spot.tip or spot.label)}</title>"
            yield f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3.4' fill='{curve.colour}'>{tip}</circle>"

    def labels(self, spots: Sequence[Spot]) -> Iterator[str]:
        """Where there is room, the weightiest first."""
        taken = [*self._taken, *self._dots(spots)]
        said: set[tuple[float, float, str]] = set()
        for spot in sorted(spots, key=lambda spot: -spot.weight):
            if not spot.label or (*self.at(spot), spot.label) in said:
                continue
            said.add((*self.at(spot), spot.label))
            box = next((box for box in self._around(spot) if not _overlaps(box, taken)), None)
            if box is not None:
                taken.append(box)
                yield _halo((box[0] + box[2]) / 2, box[3] - 3, spot.label, anchor="middle", size=10)

    def _around(self, spot: Spot) -> Iterator[Box]:
        """Places for a label, the best first, inside the axes."""
        x, y = self.at(spot)
        wide = LETTER * len(spot.label)
        beside, above = wide / 2 + 7, LINE / 2 + 5
        steps = ((0, -1), (0, 1), (1, 0), (-1, 0), (0.7, -1), (-0.7, -1), (0.7, 1), (-0.7, 1))
        for across, up in steps:
            box = _box(x + across * beside, y + up * above, wide, LINE)
            if box[0] >= LEFT and box[2] <= WIDTH - 2 and box[1] >= TOP - 8 and box[3] <= HEIGHT - BOTTOM:
                yield box


def _box(x: float, y: float, wide: float, high: float) -> Box:
    return x - wide / 2, y - high / 2, x + wide / 2, y + high / 2


def _overlaps(box: Box, others: Sequence[Box]) -> bool:
    return any(box[0] < b[2] and b[0] < box[2] and box[1] < b[3] and b[1] < box[3] for b in others)


def _legend(drawn: Sequence[Curve]) -> Iterator[str]:
    """One line below the title."""
    left = float(LEFT)
    for curve in drawn:
        if not curve.name:
            continue
        dash = " stroke-dasharray='3 3'" if curve.dashed else ""
        yield (
            f"<line x1='{left:.0f}' x2='{left + 16:.0f}' y1='38' y2='38' stroke='{curve.colour}' "
            f"stroke-width='{1 if curve.dashed else 3}'{dash}/>"
        )
        yield _text(left + 21, 42, curve.name)
        left += 36 + 6.6 * len(curve.name)


def _frame(title: str, parts: Sequence[str]) -> str:
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}' "
        f"height='{HEIGHT}' role='img' {FONT}><title>{escape(title)}</title>"
        f"<text x='{LEFT}' y='20' font-weight='600' fill='{INK}'>{escape(title)}</text>{''.join(parts)}</svg>"
    )


def _text(x: float, y: float, words: str, *, anchor: str = "start", colour: str = INK) -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' fill='{colour}'>{escape(words)}</text>"


def _halo(x: float, y: float, words: str, *, anchor: str = "start", colour: str = INK, size: int = 11) -> str:
    """Words that stay readable on lines."""
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' fill='{colour}' font-size='{size}' "
        f"paint-order='stroke' stroke='white' stroke-width='3'>{escape(words)}</text>"
    )
