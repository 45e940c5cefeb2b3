"""What the coordinator must know of a run. A plain record."""

from __future__ import annotations

from dataclasses import dataclass

from syncline.dial import Course


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the coordinator must know of a run."""

    course: Course
    learners: int
    seed: int = 0
    warm: int = 0  # updates that the first learner makes alone
    batch_size: int | None = None
    limit: int | None = None
    clip_norm: float | None = None
    snapshots: bool = False  # the first loader's epochs end with a snapshot
    cuts: bool = False  # checkpoints are written
    every: int | None = None  # a checkpoint every so many versions
    clocks: bool = False  # vector clocks of updates are kept
