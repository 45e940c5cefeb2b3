"""Who hangs: a learner that should compute and has not been heard of for too long (M8).

Time is passed in. Not responsible for what is done about it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping


class Watchdog:
    """Looks at everybody's progress from time to time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._seen: dict[int, tuple[int, float]] = {}  # learner -> (progress, since when)
        self._named: set[int] = set()

    def look(self, now: float, progress: Mapping[int, int], waiting: Collection[int]) -> list[int]:
        """Learners that hang and were not named before; who waits for others is not to blame."""
        self._seen = {learner: seen for learner, seen in self._seen.items() if learner in progress}
        self._named &= set(progress)
        hanging = []
        for learner, count in progress.items():
            before, since = self._seen.get(learner, (None, now))
            if count != before or learner in waiting:
                self._seen[learner] = (count, now)
                self._named.discard(learner)
            elif now - since > self.seconds and learner not in self._named:
                self._named.add(learner)
                hanging.append(learner)
        return hanging

    def silence(self, learner: int, now: float) -> float:
        """Seconds since it was last heard of."""
        return now - self._seen[learner][1] if learner in self._seen else 0.0
