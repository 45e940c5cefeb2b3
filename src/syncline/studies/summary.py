"""What a study says: means over seeds, the best, and groups of equal μλ (Rudra's rule). Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from syncline.studies.grid import StudyRow

WANTED = ("test_error", "test_loss", "loss")  # what is compared, the first that there is


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedPoint:
    """The runs of one dial, λ and μ, over all seeds."""

    sync: str
    learners: int
    batch_size: int
    runs: int
    value: float | None  # mean of the wanted column; None where a run has none
    low: float | None
    high: float | None
    seconds: float
    staleness: float
    throughput: float
    updates: int

    @property
    def mu_lambda(self) -> int:
        return self.batch_size * self.learners

    @property
    def name(self) -> str:
        """(σ, μ, λ)."""
        sigma = f"{self.staleness:.1f}".removesuffix(".0")
        return f"({sigma}, {self.batch_size}, {self.learners})"


def wanted(rows: Iterable[StudyRow]) -> str | None:
    """The column to compare runs by: test error where there is one."""
    found = [row for row in rows if not row.failed]
    return next((name for name in WANTED if any(getattr(row, name) is not None for row in found)), None)


def places(rows: Iterable[StudyRow], column: str | None) -> list[RankedPoint]:
    """One for each dial, λ and μ that has a finished run, in the order of the rows."""
    groups: dict[tuple[str, int, int], list[StudyRow]] = {}
    for row in rows:
        if not row.failed and row.seconds is not None:
            groups.setdefault((row.sync, row.learners, row.batch_size), []).append(row)
    ranked = []
    for (sync, learners, batch_size), found in groups.items():
        values: list[Any] = [getattr(row, column) for row in found] if column else [None]
        known = all(value is not None and math.isfinite(value) for value in values)
        ranked.append(
            RankedPoint(
                sync=sync,
                learners=learners,
                batch_size=batch_size,
                runs=len(found),
                value=fmean(values) if known else None,
                low=min(values) if known else None,
                high=max(values) if known else None,
                seconds=fmean(row.seconds or 0.0 for row in found),
                staleness=fmean(row.mean_staleness or 0.0 for row in found),
                throughput=fmean(row.throughput or 0.0 for row in found),
                updates=round(fmean(row.updates or 0 for row in found)),
            )
        )
    return ranked


# -- the best --------------------------------------------------------------------------------------------------


def best(found: Iterable[RankedPoint], count: int) -> list[RankedPoint]:
    """Lowest first; the faster of equals."""
    known = [each for each in found if each.value is not None]
    return sorted(known, key=lambda each: (_value(each), each.seconds))[:count]


def fastest(found: Iterable[RankedPoint], count: int | None = None) -> list[RankedPoint]:
    return sorted(found, key=lambda each: (each.seconds, _value(each)))[:count]


def frontier(found: Iterable[RankedPoint]) -> list[RankedPoint]:
    """Those that no other beats in both, from the fastest on: all that is worth choosing from."""
    kept: list[RankedPoint] = []
    for each in fastest(found):
        if each.value is not None and (not kept or each.value < _value(kept[-1])):
            kept.append(each)
    return kept


def _value(place: RankedPoint) -> float:
    return math.inf if place.value is None else place.value


# -- the rule μλ = const ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualProductGroup:
    """Runs of about the same μλ, whatever the dial."""

    size: int  # the power of two that their μλ is nearest to
    places: tuple[RankedPoint, ...]

    def of(self, pick: Callable[[Sequence[float]], float]) -> float | None:
        values = [each.value for each in self.places if each.value is not None]
        return pick(values) if values else None

    @property
    def mean(self) -> float | None:
        return self.of(fmean)

    @property
    def middle(self) -> float:
        """The geometric mean of their μλ."""
        return math.exp(fmean(math.log(each.mu_lambda) for each in self.places))

    @property
    def fastest(self) -> RankedPoint:
        return fastest(self.places, 1)[0]


def groups(found: Iterable[RankedPoint]) -> list[EqualProductGroup]:
    """By the nearest power of two, as in Rudra's Table 2: 4 × 30 and 16 × 10 go with 128 × 1."""
    kept: dict[int, list[RankedPoint]] = {}
    for each in found:
        kept.setdefault(2 ** round(math.log2(each.mu_lambda)), []).append(each)
    return [EqualProductGroup(size=size, places=tuple(kept[size])) for size in sorted(kept)]


def baseline(found: Sequence[RankedPoint]) -> RankedPoint | None:
    """One learner with the largest batch, in lockstep where there is one: what the others are compared with."""
    alone = [each for each in found if each.learners == 1 and each.value is not None]
    return max(alone, key=lambda each: (each.batch_size, each.sync.startswith("hardsync")), default=None)
