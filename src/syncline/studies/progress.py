"""What of a study is done, running and left, and when it will end. Pure: time is passed in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from syncline.dial import Course
from syncline.studies.grid import Point
from syncline.studies.rows import StudyRow

OVERHEAD = 32  # examples' worth of work in a gradient beside its examples: small batches cost more


def cost(point: Point, *, steps: bool = False) -> float:
    """Work of a run against that of others: an epoch, or an update, of this dial."""
    per_gradient = point.batch_size + OVERHEAD
    if steps:
        return Course.of(point.sync).first.quorum(point.learners) * per_gradient
    return per_gradient / point.batch_size


@dataclass(slots=True)
class Running:
    """A run under way."""

    point: Point
    since: float
    part: float = 0.0  # done, of 1
    words: str = "starting"


@dataclass(slots=True)
class Progress:
    """Fed by whoever conducts; displays render it."""

    points: Sequence[Point]  # to be done now
    before: int = 0  # done by an earlier call
    steps: bool = False
    began: float = 0.0
    running: dict[Point, Running] = field(default_factory=dict)
    rows: list[StudyRow] = field(default_factory=list)

    def started(self, point: Point, now: float) -> None:
        self.running[point] = Running(point, now)

    def moved(self, point: Point, part: float, words: str) -> None:
        if (found := self.running.get(point)) is not None:
            found.part, found.words = part, words

    def ended(self, row: StudyRow) -> None:
        self.running.pop(row.point, None)
        self.rows.append(row)

    @property
    def done(self) -> int:
        return self.before + len(self.rows)

    @property
    def total(self) -> int:
        return self.before + len(self.points)

    @property
    def failed(self) -> int:
        return sum(row.failed for row in self.rows)

    def part(self) -> float:
        """Of the work of this call."""
        whole = self._whole()
        return self._worked() / whole if whole else 1.0

    def remaining(self, now: float) -> float | None:
        """Seconds to the end at the pace so far; None while there is none."""
        worked, spent = self._worked(), now - self.began
        if worked <= 0 or spent <= 0:
            return None
        return max(0.0, self._whole() - worked) * spent / worked

    def _whole(self) -> float:
        return sum(cost(point, steps=self.steps) for point in self.points)

    def _worked(self) -> float:
        parts = [(row.point, 1.0) for row in self.rows]
        parts += [(each.point, each.part) for each in self.running.values()]
        return sum(part * cost(point, steps=self.steps) for point, part in parts)
