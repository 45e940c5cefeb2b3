"""When a meeting of learners is over, and who was in it (M8): pure, events in, decisions out.

A meeting is of all live learners that have read a table. It is over when all of them have come or left; and where those
that have not come wait themselves for somebody who is in it, so that nobody waits for ever. Not responsible for what
learners bring to it, nor for their rest meanwhile: who is in a meeting rests, all of it go on at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True, unsafe_hash=True)
class Met:
    """The meeting is over: these were in it, and count again from here on."""

    learners: tuple[int, ...]


@dataclass(slots=True, unsafe_hash=True)
class Unmet:
    """The same, but these waited for others which wait for them, though their loops began together: their loops differ."""

    learners: tuple[int, ...]
    others: tuple[int, ...]


Decision = Met | Unmet


class Meetings:
    """One meeting after the other.

    Learners whose loops began together are at the same places of them. Who came later, or went back to a checkpoint in
    the middle of its loop, is not: `apart`. Only then may a meeting be held by a part of them.
    """

    def __init__(self, expected: Iterable[int] = (), *, apart: bool = False) -> None:
        self.members = set(expected)
        self._here: dict[int, None] = {}  # in the order they came
        self._apart = apart

    @property
    def here(self) -> set[int]:
        """Who waits in the meeting."""
        return set(self._here)

    def join(self, learner: int) -> None:
        """It is there; who was not expected begins its loop later than the others."""
        if learner not in self.members:
            self.members.add(learner)
            self._apart = True

    def come(self, learner: int) -> list[Decision]:
        """It waits in the meeting, and does nothing else until that is over."""
        self.join(learner)
        self._here[learner] = None
        return self._try()

    def leave(self, learner: int) -> list[Decision]:
        """It left, or nobody is to wait for it before it joins (again)."""
        self.members.discard(learner)
        self._here.pop(learner, None)
        return self._try()

    def stand_still(self, elsewhere: set[int]) -> list[Decision]:
        """These wait elsewhere, for all others: if nobody else is missing, nobody will ever come."""
        others = self.members - self._here.keys()
        if not self._here or others - elsewhere:
            return []
        if self._apart:
            return self._close()
        here, self._here = tuple(self._here), {}
        return [Unmet(here, tuple(sorted(others)))]

    def _try(self) -> list[Decision]:
        return self._close() if self._here and len(self._here) == len(self.members) else []

    def _close(self) -> list[Decision]:
        here, self._here = tuple(self._here), {}
        return [Met(here)]
