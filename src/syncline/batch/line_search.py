"""How far to go along a direction: generators that yield step lengths and receive (loss, slope) there.

They return the step to take, or 0.0 where none of the trials lowered the loss; a trial that is not finite counts as
one too far. `wolfe` brackets and interpolates as Moré and Thuente (1994) do; `armijo` goes back until the loss is low
enough. Not responsible for vectors, nor for what happens when a search fails.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import NamedTuple

Search = Generator[float, tuple[float, float], float]
SHRINK = 0.2  # of the way back after a trial that is not finite
NARROW = 1e-9  # of its upper end: an interval in which losses differ by rounding only


class Point(NamedTuple):
    step: float
    loss: float
    slope: float

    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.slope)

    def tilted(self, by: float) -> Point:
        return Point(self.step, self.loss - by * self.step, self.slope - by)


def armijo(loss: float, slope: float, first: float, *, c1: float, c2: float, trials: int) -> Search:
    """Back from the first step until loss(step) ≤ loss + c1·step·slope; `c2` is not used."""
    step, best = first, Point(0.0, loss, slope)
    for _ in range(trials):
        new = Point(step, *(yield step))
        if not new.finite():
            step *= SHRINK
            continue
        if new.loss <= loss + c1 * step * slope:
            return step
        best = min(best, new, key=lambda point: point.loss)
        guess = _ratio(-slope * step * step, 2 * (new.loss - loss - slope * step))
        step = min(max(guess, 0.1 * step), 0.5 * step) if math.isfinite(guess) else 0.5 * step
    return best.step


def wolfe(loss: float, slope: float, first: float, *, c1: float, c2: float, trials: int) -> Search:
    """Strong Wolfe: loss(step) ≤ loss + c1·step·slope, and |slope(step)| ≤ c2·|slope|."""
    bracket = _Bracket(Point(0.0, loss, slope), first)
    step, best, early = first, bracket.low, True
    for _ in range(trials):
        new = Point(step, *(yield step))
        if not new.finite():
            step = bracket.retreat(step)
            continue
        best = min(best, new, key=lambda point: point.loss)
        enough = loss + c1 * step * slope
        if new.loss <= enough and abs(new.slope) <= -c2 * slope:
            return step
        # until a point is low and rises, the search is for a minimum of the loss above the line c1·slope
        early = early and not (new.loss <= enough and new.slope >= 0)
        tilt = c1 * slope if early and enough < new.loss <= bracket.low.loss else 0.0
        step = bracket.narrow(new, tilt)
        if bracket.closed or not 0 < step < math.inf:
            break
    return best.step


class _Bracket:
    """Two ends, the lower of them first, between which (once bracketed) a good step lies."""

    def __init__(self, start: Point, first: float) -> None:
        self.low = self.high = start
        self.bracketed = False
        self._floor, self._roof = 0.0, 5 * first  # bounds of the next step
        self._ceiling = math.inf  # from here on the loss is not finite
        self._width = self._width_before = math.inf

    @property
    def closed(self) -> bool:
        return self.bracketed and self._roof - self._floor <= NARROW * self._roof

    def retreat(self, step: float) -> float:
        if step > self.low.step:
            self._ceiling = min(self._ceiling, step)
        return self.low.step + SHRINK * (step - self.low.step)

    def narrow(self, new: Point, tilt: float) -> float:
        """Take the point in and say where to look next."""
        low, high, tilted = self.low.tilted(tilt), self.high.tilted(tilt), new.tilted(tilt)
        step = self._propose(low, high, tilted)
        if tilted.loss > low.loss:
            self.high, self.bracketed = new, True
        else:
            if tilted.slope * low.slope < 0:
                self.high, self.bracketed = self.low, True
            self.low = new
        return self._bounded(step)

    def _bounded(self, step: float) -> float:
        low, high = self.low.step, self.high.step
        if self.bracketed:
            self._floor, self._roof = min(low, high), max(low, high)
            if self._roof - self._floor >= 0.66 * self._width_before:  # interpolation is too slow
                step = low + 0.5 * (high - low)
            self._width_before, self._width = self._width, self._roof - self._floor
        elif math.isfinite(step):
            self._floor, self._roof = step + 1.1 * (step - low), step + 4 * (step - low)
        if self.bracketed:
            return step if self._floor <= step <= self._roof else 0.5 * (low + high)
        return step if low < step < self._ceiling else 0.5 * (low + min(self._ceiling, self._roof))

    def _propose(self, low: Point, high: Point, new: Point) -> float:
        cubic = _cubic(low, new)
        if new.loss > low.loss:
            drop = _ratio(low.loss - new.loss, new.step - low.step) + low.slope
            quadratic = low.step + 0.5 * _ratio(low.slope, drop) * (new.step - low.step)
            closer = abs(cubic - low.step) < abs(quadratic - low.step)
            return cubic if closer else 0.5 * (cubic + quadratic)
        secant = new.step + _ratio(new.slope, new.slope - low.slope) * (low.step - new.step)
        if new.slope * low.slope < 0:
            return cubic if abs(cubic - new.step) > abs(secant - new.step) else secant
        onward = self._roof if new.step > low.step else self._floor
        if abs(new.slope) < abs(low.slope):
            return self._extrapolate(low, high, new, cubic, secant, onward)
        return _cubic(high, new) if self.bracketed else onward

    def _extrapolate(
        self, low: Point, high: Point, new: Point, cubic: float, secant: float, onward: float
    ) -> float:
        """The slope flattens: the minimum is beyond the point, perhaps far."""
        if not (cubic - new.step) * (new.step - low.step) > 0:
            cubic = onward
        cubic_is_closer = abs(cubic - new.step) < abs(secant - new.step)
        if not self.bracketed:
            return min(max(secant if cubic_is_closer else cubic, self._floor), self._roof)
        step = cubic if cubic_is_closer else secant
        edge = new.step + 0.66 * (high.step - new.step)
        return min(step, edge) if new.step > low.step else max(step, edge)


def _cubic(a: Point, b: Point) -> float:
    """The minimiser of the cubic through two points with their slopes; nan where there is none."""
    theta = 3 * _ratio(a.loss - b.loss, b.step - a.step) + a.slope + b.slope
    square = theta * theta - a.slope * b.slope
    if not square > 0:
        return math.nan
    gamma = math.copysign(math.sqrt(square), b.step - a.step)
    return b.step - (b.step - a.step) * _ratio(b.slope + gamma - theta, b.slope - a.slope + 2 * gamma)


def _ratio(a: float, b: float) -> float:
    return a / b if b else math.nan
