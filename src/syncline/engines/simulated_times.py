"""What a simulated run did with its time: seconds of each learner, bytes moved, events. Plain records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerTimes:
    """Virtual seconds of one rank.

    `communication` is what it stood still for: its gradient under way and in the shards' hands, weights on their way, both
    copied. `waiting` is for others: their gradients, data, meetings.
    """

    compute: float = 0.0
    communication: float = 0.0
    waiting: float = 0.0
    steps: int = 0

    @property
    def overlap(self) -> float:
        """Compute / (compute + visible communication): R8's measure."""
        both = self.compute + self.communication
        return self.compute / both if both else 1.0

    def __add__(self, other: LearnerTimes) -> LearnerTimes:
        return LearnerTimes(
            compute=self.compute + other.compute,
            communication=self.communication + other.communication,
            waiting=self.waiting + other.waiting,
            steps=self.steps + other.steps,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedTimes:
    """The account of a simulated run."""

    learners: Mapping[int, LearnerTimes] = field(default_factory=dict)  # by rank
    moved: int = 0  # bytes between machines
    copied: int = 0  # bytes inside machines
    events: int = 0

    @property
    def total(self) -> LearnerTimes:
        return sum(self.learners.values(), start=LearnerTimes())

    @property
    def overlap(self) -> float:
        """Over all learners."""
        return self.total.overlap
