"""Which examples one iteration's batch has: all of the data set, or a sample that is drawn anew for each (D7).

Pure. Not responsible for drawing indices (`learn.evaluating`), nor for who computes them (`portions`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from syncline.errors import UsageError

Schedule = Callable[[int], int]  # iteration, from 0 -> examples


@dataclass(frozen=True, slots=True)
class Batch:
    """Of one iteration; `drawn` is None where it is the whole data set."""

    examples: int
    portions: int
    drawn: int | None  # the iteration that it was drawn for


@dataclass(frozen=True, slots=True)
class Samples:
    """`size` examples in portions of `portion`; `schedule` says how many an iteration takes."""

    size: int
    portion: int
    schedule: Schedule | int | None = None

    def at(self, iteration: int) -> Batch:
        examples = self.schedule(iteration) if callable(self.schedule) else self.schedule
        examples = self.size if examples is None else examples
        if isinstance(examples, bool) or not isinstance(examples, int) or examples < 1:
            raise UsageError(
                f"the sample of iteration {iteration} must be a whole number of examples >= 1, got {examples!r}"
            )
        examples = min(examples, self.size)
        drawn = iteration if examples < self.size else None
        return Batch(examples, -(-examples // self.portion), drawn)
