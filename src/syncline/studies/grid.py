"""The points of a study, every dial with every number of learners, batch size and seed; and the record of a finished one.

Pure. Says which combinations cannot be and why; not responsible for running any.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from syncline.dial import Course, Sync
from syncline.errors import DialError, UsageError

MOST_POINTS = 100_000
Skipped = tuple[str, int, str]  # a dial, a number of learners that it cannot have, and why


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One run of a study."""

    sync: str
    learners: int
    batch_size: int
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.sync} λ {self.learners} μ {self.batch_size} seed {self.seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What is combined with what; each list without repetitions, in the order given."""

    syncs: tuple[str, ...]
    learners: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    seeds: tuple[int, ...] = (0,)

    def points(self) -> tuple[list[Point], list[Skipped]]:
        """All that can be, in order, and what is left out; a dial that can be with none of the λ is refused."""
        points: list[Point] = []
        skipped: list[Skipped] = []
        for sync in self.syncs:
            reasons: dict[int, str] = {}
            for learners in self.learners:
                try:
                    for _, dial in Course.of(sync).dials:
                        dial.check(learners, self.batch_sizes[0])
                except DialError as error:
                    reasons[learners] = str(error)
            if len(reasons) == len(self.learners):
                raise DialError(reasons[self.learners[0]])
            skipped += [(sync, learners, reason) for learners, reason in reasons.items()]
            points += [
                Point(sync=sync, learners=learners, batch_size=size, seed=seed)
                for learners, size, seed in product(self.learners, self.batch_sizes, self.seeds)
                if learners not in reasons
            ]
        if len(points) > MOST_POINTS:
            raise UsageError(f"{len(points):,} runs are too many for one study, at most {MOST_POINTS:,}")
        return points, skipped


# -- what came of one -----------------------------------------------------------------------------------------


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


def splits_of(point: Point) -> int | None:
    """Rudra's n: the parts that λ gradients are folded in; none in lockstep."""
    dial = Course.of(point.sync).first
    if dial.lockstep or dial.backup:
        return None
    return dial.splits or point.learners


# -- reading ---------------------------------------------------------------------------------------------------


def parse_dials(text: str, reference_batch: int | None = None) -> tuple[str, ...]:
    """`hardsync,softsync:2,async`; what looks like `key=value` belongs to the dial before it.

    With a reference batch B the dials in lockstep that have none get it: their rate is multiplied by √(λμ/B).
    """
    pieces: list[str] = []
    for piece in text.split(","):
        if re.match(r"\s*\w+\s*=", piece) and pieces:
            pieces[-1] += f",{piece.strip()}"
        else:
            pieces.append(piece.strip())
    if not all(pieces):
        raise UsageError(f"--sync {text}: an empty name between commas; write hardsync,softsync:1,async")

    def referred(dial: Sync) -> Sync:
        wants = reference_batch is not None and dial.lockstep and dial.reference_batch is None
        return replace(dial, reference_batch=reference_batch) if wants else dial

    courses = []
    for piece in pieces:
        dials = Course.of(piece).dials
        courses.append(str(Course(tuple((epoch, referred(dial)) for epoch, dial in dials))))
    return tuple(dict.fromkeys(courses))


def parse_numbers(option: str, text: str, *, least: int = 1) -> tuple[int, ...]:
    """`1,2,4`."""
    try:
        numbers = [int(piece) for piece in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < least:
        raise UsageError(
            f"{option} {text}: expected whole numbers of at least {least} with commas between, such as 1,2,4"
        )
    return tuple(dict.fromkeys(numbers))
