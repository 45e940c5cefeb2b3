"""What is known of a finished point, as a record and as a line of CSV.

Pure. Numbers are written so that they read back equal; an empty cell is a number that is not known.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

from syncline.studies.grid import Point, splits_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRow:
    """One run of a study: what was asked, and what came of it. Seconds are virtual where the run was simulated."""

    sync: str
    n: int | None  # Rudra's n; none in lockstep
    learners: int
    batch_size: int
    mu_lambda: int
    seed: int
    epochs: float | None = None  # passes over the data
    seconds: float | None = None
    updates: int | None = None
    gradients: int | None = None
    dropped: int | None = None
    mean_staleness: float | None = None
    max_staleness: int | None = None
    test_error: float | None = None  # 1 − accuracy
    test_accuracy: float | None = None
    test_loss: float | None = None
    loss: float | None = None  # of training, over the last epoch
    throughput: float | None = None  # examples per second
    overlap: float | None = None
    wall_seconds: float | None = None
    commit: str = ""
    version: str = ""
    error: str = ""  # why there are no numbers

    @property
    def point(self) -> Point:
        return Point(sync=self.sync, learners=self.learners, batch_size=self.batch_size, seed=self.seed)

    @property
    def failed(self) -> bool:
        return bool(self.error)


def asked(point: Point, **known: Any) -> StudyRow:
    """The row of a point, with what came of it."""
    return StudyRow(
        sync=point.sync,
        n=splits_of(point),
        learners=point.learners,
        batch_size=point.batch_size,
        mu_lambda=point.batch_size * point.learners,
        seed=point.seed,
        **known,
    )


# -- CSV -------------------------------------------------------------------------------------------------------

COLUMNS: tuple[str, ...] = tuple(entry.name for entry in fields(StudyRow))
CHANGING = ("wall_seconds", "commit", "version")  # columns that may differ between equal studies
_READ: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str}
_KINDS = {entry.name: _READ[str(entry.type).removesuffix(" | None")] for entry in fields(StudyRow)}
_OPTIONAL = {entry.name for entry in fields(StudyRow) if str(entry.type).endswith("| None")}


def line_of(row: StudyRow) -> str:
    """One line with its end; texts are kept on it."""
    cells = []
    for name in COLUMNS:
        value = getattr(row, name)
        text = repr(value) if isinstance(value, float) else " ".join(str(value).split())
        cells.append("" if value is None else text)
    return _line(cells)


def head() -> str:
    return _line(COLUMNS)


def _line(cells: Iterable[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


def rows_of(lines: Iterable[str]) -> list[StudyRow]:
    """The rows of complete lines, head first; of several rows of one point the last. What is no row is left out."""
    found: dict[Point, StudyRow] = {}
    for cells in csv.DictReader(lines):
        values: dict[str, Any] = {}
        with suppress(TypeError, ValueError):
            for name, read in _KINDS.items():
                text = cells.get(name) or ""
                values[name] = None if text == "" and name in _OPTIONAL else read(text)
            row = StudyRow(**values)
            found.pop(row.point, None)
            found[row.point] = row
    return list(found.values())


def ordered(rows: Iterable[StudyRow], points: Sequence[Point]) -> list[StudyRow]:
    """In the order of a grid; rows of points outside it come after, in their own order."""
    places = {point: place for place, point in enumerate(points)}
    return sorted(rows, key=lambda row: places.get(row.point, len(places)))


def left(points: Sequence[Point], rows: Iterable[StudyRow]) -> list[Point]:
    """What is to be done: points without a row, and those that failed."""
    done = {row.point for row in rows if not row.failed}
    return [point for point in points if point not in done]
