"""When a checkpoint is cut: every n versions, every so many seconds, or when asked; one at a time.

With servers the version before asks learners for their random states, which come with their next gradients; learners among equals
all cut where their loops ask for the next batch. Not responsible for what a checkpoint holds.
"""

from __future__ import annotations


class CheckpointSchedule:
    """Events in, decisions out, for the versions of one table."""

    def __init__(self, every: int | None = None) -> None:
        self._every = every
        self._due = False
        self._busy = False  # the last one is not written yet
        self.armed = False  # the next version is cut: releases ask for random states

    def ask(self) -> None:
        """One as soon as can be."""
        self._due = True

    def folded(self, version: int) -> bool:
        """This version is there: True if it is to be cut."""
        cut, self.armed = self.armed and not self._busy, False
        self._busy |= cut
        if self._every is not None and (version + 1) % self._every == 0:
            self._due = True
        if self._due and not self._busy:
            self.armed, self._due = True, False
        return cut

    def begin(self) -> bool:
        """Cut now, whatever the version; False while the last one is being written."""
        if self._busy:
            return False
        self._busy, self.armed, self._due = True, False, False
        return True

    def written(self) -> None:
        """The last one is on the disk, or failed."""
        self._busy = False


class JointCheckpointSchedule:
    """When learners among equals cut. All hear the same with each update, so all cut after the same; the clock is the first one's."""

    def __init__(self, *, every: int | None, seconds: float | None, now: float) -> None:
        self._every, self._seconds, self._last = every, seconds, now
        self._due = False

    def wishes(self, now: float) -> bool:
        """Whether the first learner's next gradient says that it is time."""
        return self._seconds is not None and now - self._last >= self._seconds

    def applied(self, version: int, *, wished: bool) -> None:
        """An update was made, and somebody said so with its gradient."""
        self._due |= wished or (self._every is not None and version % self._every == 0)

    def take(self, now: float) -> bool:
        """A loop asks for its next batch: True if all cut here."""
        due, self._due = self._due, False
        if due:
            self._last = now
        return due
