"""Vector-clock staleness (R2): exact, per gradient and per update, in constant memory.

The update that makes version i from gradients stamped i1..ic has the staleness (i - 1) - mean(i1..ic); one
gradient's is (i - 1) - il. Not responsible for deciding when an update happens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    """The exact account of a run: over all folded gradients."""

    gradients: int
    mean: float
    max: int
    histogram: dict[int, int]

    def __str__(self) -> str:
        return f"mean {self.mean:.2f}, max {self.max}, over {self.gradients} gradients"


@dataclass(slots=True)
class StalenessClock:
    """Counts the staleness of every folded gradient."""

    histogram: Counter[int] = field(default_factory=Counter)
    last_update: float = 0.0

    def fold(self, version_before: int, stamps: Iterable[int]) -> float:
        """Account for one update; its mean staleness comes back."""
        sigmas = [version_before - stamp for stamp in stamps]
        if len(sigmas) == 1 and sigmas[0] >= 0:
            self.histogram[sigmas[0]] += 1
            self.last_update = float(sigmas[0])
            return self.last_update
        if min(sigmas, default=0) < 0:
            raise AssertionError(
                f"a gradient from the future: version {version_before}, staleness {min(sigmas)}"
            )
        self.histogram.update(sigmas)
        self.last_update = sum(sigmas) / len(sigmas) if sigmas else 0.0
        return self.last_update

    def account(self) -> Staleness:
        count = self.histogram.total()
        total = sum(sigma * times for sigma, times in self.histogram.items())
        return Staleness(
            gradients=count,
            mean=total / count if count else 0.0,
            max=max(self.histogram, default=0),
            histogram=dict(sorted(self.histogram.items())),
        )
