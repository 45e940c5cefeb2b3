"""The curves of a study, as in Rudra's Figs. 6 to 8: error against time for each dial, error over μλ, staleness and speed-up over λ.

Rows in, SVG and HTML text out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from syncline.report.html_page import document, measure, table
from syncline.report.svg_plots import COLOURS, FAINT, Curve, Mark, Scale, Spot, curves, scale, side_by_side
from syncline.studies.rows import StudyRow
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
    drawn = []
    known = [each for each in found if each.value is not None]
    if known and column is not None:
        look = _Look(known, column, unit)
        drawn += [look.against_time(sync) for sync in syncs]
        drawn.append(look.over_product(syncs))
    return [*drawn, _staleness(found, syncs), *_speed_up(found, syncs)]


def ramp(count: int) -> list[str]:
    """So many colours in order, from dark to light."""
    if count > len(RAMP):
        return [RAMP[number * len(RAMP) // count] for number in range(count)]
    return [RAMP[round(number * (len(RAMP) - 1) / max(1, count - 1))] for number in range(count)]


class _Look:
    """What the panels of a study share: limits, colours, the baseline."""

    def __init__(self, found: Sequence[RankedPoint], column: str, unit: str) -> None:
        self._found, self._column, self._unit = found, column, unit
        self._times = scale([each.seconds for each in found])
        self._values = scale([self._y(each) for each in found])
        sizes = sorted({each.batch_size for each in found})
        self._colours = dict(zip(sizes, ramp(len(sizes)), strict=True))
        self._baseline = baseline(found)

    def _y(self, place: RankedPoint) -> float:
        assert place.value is not None
        return 100 * place.value if self._column == "test_error" else place.value

    def against_time(self, sync: str) -> str:
        """Lines of equal μ, and of equal λ across them."""
        found = [each for each in self._found if each.sync == sync]
        drawn = [
            Curve(spots=self._along(found, "batch_size", size), colour=colour, name=f"μ = {size}")
            for size, colour in self._colours.items()
        ]
        for number, learners in enumerate(sorted({each.learners for each in found})):
            spots = self._along(found, "learners", learners)
            name = "equal λ" if number == 0 else ""
            drawn.insert(0, Curve(spots=spots, colour=FAINT, name=name, dashed=True, dots=False))
        return curves(
            f"{sync}: error and time, points are (σ, μ, λ)" if self._error else f"{sync}: (σ, μ, λ)",
            drawn,
            x=self._unit,
            y=NAMES[self._column],
            across=self._times,
            up=self._values,
            level=self._level(),
        )

    @property
    def _error(self) -> bool:
        return self._column == "test_error"

    def _along(self, found: Sequence[RankedPoint], key: str, value: int) -> list[Spot]:
        other = "learners" if key == "batch_size" else "batch_size"
        line = sorted((e for e in found if getattr(e, key) == value), key=lambda e: getattr(e, other))
        return [self._spot(each, found) for each in line]

    def _spot(self, place: RankedPoint, among: Sequence[RankedPoint]) -> Spot:
        return Spot(place.seconds, self._y(place), place.name, self._tip(place), _weight(place, among))

    def _tip(self, place: RankedPoint) -> str:
        value = f"{self._y(place):.3g}" + (" %" if self._error else "")
        seeds = f", mean of {place.runs} seeds" if place.runs > 1 else ""
        return (
            f"{place.sync} {place.name}: {value} after {place.seconds:.4g} s, {place.updates} updates{seeds}"
        )

    def _level(self) -> Mark | None:
        found = self._baseline
        return (self._y(found), f"baseline {found.name}") if found is not None else None

    def over_product(self, syncs: Sequence[str]) -> str:
        """Rudra's rule: what counts is μλ. A dot for each, a line through the means of groups."""
        drawn = []
        for sync, colour in zip(syncs, _cycle(len(syncs)), strict=True):
            found = [each for each in self._found if each.sync == sync]
            dots = [Spot(e.mu_lambda, self._y(e), "", self._tip(e)) for e in found]
            means = [
                Spot(group.middle, 100 * group.mean if self._error else group.mean)
                for group in groups(found)
                if group.mean is not None
            ]
            drawn.append(Curve(spots=means, colour=colour, name=sync, dots=False))
            drawn.append(Curve(spots=dots, colour=colour, line=False))
        across = scale([each.mu_lambda for each in self._found], powers=True)
        title = "The rule: error follows μλ (lines: means of about equal μλ)"
        return curves(title, drawn, x="μλ", y=NAMES[self._column], across=across, up=self._values)


def _weight(place: RankedPoint, among: Sequence[RankedPoint]) -> float:
    """Corners of the grid are named first, then the best and the rest by λ."""
    sizes, counts = {e.batch_size for e in among}, {e.learners for e in among}
    corner = place.batch_size in (min(sizes), max(sizes)) and place.learners in (min(counts), max(counts))
    lowest = place.value == min(e.value for e in among if e.value is not None)
    return 2.0 * corner + 1.0 * lowest + place.learners / (1 + max(counts))


def _cycle(count: int) -> list[str]:
    return [COLOURS[number % len(COLOURS)] for number in range(count)]


# -- the dials side by side ------------------------------------------------------------------------------------


def _staleness(found: Sequence[RankedPoint], syncs: Sequence[str]) -> str:
    """Mean over all μ."""
    drawn = []
    for sync, colour in zip(syncs, _cycle(len(syncs)), strict=True):
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


def _speed_up(found: Sequence[RankedPoint], syncs: Sequence[str]) -> list[str]:
    """Against one learner of the same μ, for the largest and the smallest μ that have one."""
    alone = {each.batch_size: each for each in reversed(found) if each.learners == 1}
    sizes = sorted(alone, reverse=True)
    picked = dict.fromkeys([sizes[0], sizes[-1]]) if sizes else {}
    drawn = {size: _speed_curves(found, syncs, size, alone[size]) for size in picked}
    spots = [spot for each in drawn.values() for curve in each for spot in curve.spots]
    if len({spot.x for spot in spots}) < 2:
        return []
    across = _learners([spot.x for spot in spots])
    up = scale([s.y for s in spots] if across.log else [0.0, *(s.y for s in spots)], log=across.log)
    return [
        curves(
            f"Speed-up at μ = {size} (dashed: as many times as learners)",
            [*each, _ideal(across, up)],
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


def _speed_curves(
    found: Sequence[RankedPoint], syncs: Sequence[str], size: int, alone: RankedPoint
) -> list[Curve]:
    drawn = []
    for sync, colour in zip(syncs, _cycle(len(syncs)), strict=True):
        line = sorted(
            (e for e in found if e.sync == sync and e.batch_size == size and e.throughput > 0),
            key=lambda e: e.learners,
        )
        spots = [Spot(e.learners, e.throughput / alone.throughput, "", f"{sync} {e.name}") for e in line]
        drawn.append(Curve(spots=spots, colour=colour, name=sync))
    return drawn


def _ideal(across: Scale, up: Scale) -> Curve:
    end = min(across.high, up.high)
    return Curve(spots=[Spot(1, 1), Spot(end, end)], colour=FAINT, dashed=True, dots=False)


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
    cells = [[value(row) for _, value in COLUMNS] for row in rows]
    head = [name for name, _ in COLUMNS]
    shown = [number for number, name in enumerate(head) if name != "error" or any(row.error for row in rows)]
    body = table([head[n] for n in shown], [[line[n] for n in shown] for line in cells])
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
