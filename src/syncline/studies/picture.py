"""The curves of a study, as in Rudra's Figs. 6 to 8: error against time for each dial, error over μλ, staleness and speed-up over λ.

Rows in, SVG and HTML text out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape

from syncline.report.html_page import document, measure, table
from syncline.report.svg_plots import COLOURS, FAINT, Curve, Scale, Spot, curves, scale, side_by_side
from syncline.studies.grid import StudyRow
from syncline.studies.summary import RankedPoint, baseline, groups, places, wanted

WIDE = 64  # largest over smallest number of learners, from which its axis is logarithmic
RAMP = ("#440154", "#414487", "#2a788e", "#22a884", "#7ad151", "#dcbd2c")  # for ordered values
NAMES = {"test_error": "test error, %", "test_loss": "test loss", "loss": "training loss"}


def picture(rows: Sequence[StudyRow], *, title: str = "", unit: str = "virtual seconds") -> str:
    """All panels as one SVG."""
    return side_by_side(panels(rows, unit=unit), title)


def panels(rows: Sequence[StudyRow], *, unit: str = "virtual seconds") -> list[str]:
    """One for each dial where there is an error or loss to show, and those that compare the dials."""
    column = wanted(rows)
    found = places(rows, column)
    syncs = list(dict.fromkeys(each.sync for each in found))
    colours = {sync: COLOURS[number % len(COLOURS)] for number, sync in enumerate(syncs)}
    drawn = []
    known = [each for each in found if each.value is not None]
    if known and column is not None:
        errors = _Errors(known, column, unit)
        drawn = [*(errors.against_time(sync) for sync in syncs), errors.over_product(colours)]
    return [*drawn, _staleness(found, colours), *_speed_up(found, colours)]


def ramp(count: int) -> list[str]:
    """So many colours in order, from dark to light."""
    if count > len(RAMP):
        return [RAMP[number * len(RAMP) // count] for number in range(count)]
    return [RAMP[round(number * (len(RAMP) - 1) / max(1, count - 1))] for number in range(count)]


class _Errors:
    """What the panels of errors or losses share: limits, colours, the baseline."""

    def __init__(self, found: Sequence[RankedPoint], column: str, unit: str) -> None:
        self._found, self._unit, self._name = found, unit, NAMES[column]
        self._error = column == "test_error"
        self._factor = 100 if self._error else 1
        self._times = scale([each.seconds for each in found])
        self._values = scale([self._y(each.value) for each in found])

    def _y(self, value: float | None) -> float:
        assert value is not None
        return self._factor * value

    def _spot(self, place: RankedPoint, x: float, label: str = "", weight: float = 0.0) -> Spot:
        y = self._y(place.value)
        seeds = f", mean of {place.runs} seeds" if place.runs > 1 else ""
        after = f"after {place.seconds:.4g} s, {place.updates} updates{seeds}"
        tip = f"{place.sync} {place.name}: {y:.3g}{' %' if self._error else ''} {after}"
        return Spot(x, y, label, tip, weight)

    def against_time(self, sync: str) -> str:
        """Lines of equal μ, and of equal λ across them."""
        found = [each for each in self._found if each.sync == sync]
        spots = {each: self._spot(each, each.seconds, each.name, _weight(each, found)) for each in found}

        def along(key: str, other: str, value: int) -> list[Spot]:
            line = [each for each in found if getattr(each, key) == value]
            return [spots[each] for each in sorted(line, key=lambda each: getattr(each, other))]

        drawn: list[Curve] = []
        for number, learners in enumerate(sorted({each.learners for each in found})):
            line = along("learners", "batch_size", learners)
            name = "equal λ" if number == 0 else ""
            drawn.insert(0, Curve(spots=line, colour=FAINT, name=name, dashed=True, dots=False))
        sizes = sorted({each.batch_size for each in self._found})
        for size, colour in zip(sizes, ramp(len(sizes)), strict=True):
            line = along("batch_size", "learners", size)
            drawn.append(Curve(spots=line, colour=colour, name=f"μ = {size}"))
        base = baseline(self._found)
        return curves(
            f"{sync}: error and time, points are (σ, μ, λ)" if self._error else f"{sync}: (σ, μ, λ)",
            drawn,
            x=self._unit,
            y=self._name,
            across=self._times,
            up=self._values,
            level=(self._y(base.value), f"baseline {base.name}") if base is not None else None,
        )

    def over_product(self, colours: Mapping[str, str]) -> str:
        """Rudra's rule: what counts is μλ. A dot for each, a line through the means of groups."""
        drawn = []
        for sync, colour in colours.items():
            found = [each for each in self._found if each.sync == sync]
            dots = [self._spot(each, each.mu_lambda) for each in found]
            means = [Spot(group.middle, self._y(group.mean)) for group in groups(found)]
            drawn.append(Curve(spots=means, colour=colour, name=sync, dots=False))
            drawn.append(Curve(spots=dots, colour=colour, line=False))
        across = scale([each.mu_lambda for each in self._found], powers=True)
        title = "The rule: error follows μλ (lines: means of about equal μλ)"
        return curves(title, drawn, x="μλ", y=self._name, across=across, up=self._values)


def _weight(place: RankedPoint, among: Sequence[RankedPoint]) -> float:
    """Corners of the grid are named first, then the best and the rest by λ."""
    sizes, counts = {e.batch_size for e in among}, {e.learners for e in among}
    corner = place.batch_size in (min(sizes), max(sizes)) and place.learners in (min(counts), max(counts))
    lowest = place.value == min(e.value for e in among if e.value is not None)
    return 2.0 * corner + 1.0 * lowest + place.learners / (1 + max(counts))


# -- the dials side by side ------------------------------------------------------------------------------------


def _staleness(found: Sequence[RankedPoint], colours: Mapping[str, str]) -> str:
    """Mean over all μ."""
    drawn = []
    for sync, colour in colours.items():
        counts = sorted({each.learners for each in found if each.sync == sync})
        spots = []
        for learners in counts:
            values = [e.staleness for e in found if e.sync == sync and e.learners == learners]
            mean = sum(values) / len(values)
            spots.append(Spot(learners, mean, "", f"{sync}, λ = {learners}: mean σ {mean:.2f}"))
        drawn.append(Curve(spots=spots, colour=colour, name=sync))
    up = scale([0.0, *(spot.y for curve in drawn for spot in curve.spots)], log=False) if found else None
    across = _learners([each.learners for each in found]) if found else None
    return curves("Mean staleness", drawn, x="λ, learners", y="σ", across=across, up=up)


def _speed_up(found: Sequence[RankedPoint], colours: Mapping[str, str]) -> list[str]:
    """Against one learner of the same μ, for the largest and the smallest μ that have one."""
    alone = {each.batch_size: each for each in reversed(found) if each.learners == 1}
    drawn: dict[int, list[Curve]] = {}
    for size in (max(alone), min(alone)) if alone else ():
        drawn[size] = []
        for sync, colour in colours.items():
            line = [e for e in found if e.sync == sync and e.batch_size == size and e.throughput > 0]
            line.sort(key=lambda e: e.learners)
            once = alone[size].throughput
            spots = [Spot(e.learners, e.throughput / once, "", f"{sync} {e.name}") for e in line]
            drawn[size].append(Curve(spots=spots, colour=colour, name=sync))
    spots = [spot for each in drawn.values() for curve in each for spot in curve.spots]
    if len({spot.x for spot in spots}) < 2:
        return []
    across = _learners([spot.x for spot in spots])
    up = scale([s.y for s in spots] if across.log else [0.0, *(s.y for s in spots)], log=across.log)
    end = min(across.high, up.high)
    ideal = Curve(spots=[Spot(1, 1), Spot(end, end)], colour=FAINT, dashed=True, dots=False)
    return [
        curves(
            f"Speed-up at μ = {size} (dashed: as many times as learners)",
            [*each, ideal],
            x="λ, learners",
            y=f"times as fast as {alone[size].name}",
            across=across,
            up=up,
        )
        for size, each in drawn.items()
    ]


def _learners(counts: Sequence[float]) -> Scale:
    """Logarithmic where otherwise all but the largest would be in one place."""
    return scale(counts, log=max(counts) > WIDE * min(counts))


# -- a page ----------------------------------------------------------------------------------------------------

COLUMNS: tuple[tuple[str, Callable[[StudyRow], str]], ...] = (
    ("dial", lambda row: row.sync),
    ("σ", lambda row: _number(row.mean_staleness, 2)),
    ("μ", lambda row: str(row.batch_size)),
    ("λ", lambda row: str(row.learners)),
    ("μλ", lambda row: str(row.mu_lambda)),
    ("seed", lambda row: str(row.seed)),
    ("test error", lambda row: _per_cent(row.test_error)),
    ("test loss", lambda row: _measured(row.test_loss)),
    ("training loss", lambda row: _measured(row.loss)),
    ("seconds", lambda row: _number(row.seconds, 1)),
    ("updates", lambda row: _number(row.updates, 0)),
    ("largest σ", lambda row: _number(row.max_staleness, 0)),
    ("examples/s", lambda row: _number(row.throughput, 0)),
    ("overlap", lambda row: _per_cent(row.overlap)),
    ("error", lambda row: row.error),
)


def page(rows: Sequence[StudyRow], *, title: str, unit: str) -> str:
    """The picture and all rows, on one page that needs nothing else."""
    shown = COLUMNS if any(row.error for row in rows) else COLUMNS[:-1]  # the last is the error
    body = table([name for name, _ in shown], [[value(row) for _, value in shown] for row in rows])
    plots = "".join(panels(rows, unit=unit))
    inner = (
        f"<h1>{escape(title)}</h1><p class='faint'>{len(rows)} runs; time in {escape(unit)}</p>"
        f"<div class='plots'>{plots}</div><h2>Runs</h2>{body}"
    )
    return document(title, inner, "body{max-width:1240px}")


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _per_cent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f} %"


def _measured(value: float | None) -> str:
    return "–" if value is None else measure("loss", value)
