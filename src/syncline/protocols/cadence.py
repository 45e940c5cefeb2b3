"""When a checkpoint is cut: every n versions, or when asked; one at a time.

The version before, learners are asked for their random states, which come with their next gradients. Not
responsible for what a checkpoint holds.
"""

from __future__ import annotations


class Cadence:
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
