"""When a meeting of learners is over, and who was in it (M8); that learners' loops differ. Pure, events in, decisions out.

A meeting is of all live learners that have read a table. It is over when all of them have come or left; and where those
that have not come wait themselves for somebody who is in it, so that nobody waits for ever: by those who are there, or,
where learners whose loops began together would be parted, not at all, since their loops differ. Not responsible for what learners
bring to it, nor for their rest meanwhile: who is in a meeting rests, all of it go on at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import NamedTuple

EPOCH, STEP, TABLE, LOADER = "epoch", "step", "table", "loader"


class MeetingPlace(NamedTuple):
    """Where a learner does nothing until others come too, other than a meeting."""

    what: str  # EPOCH: at a loader, for others to go on; STEP: of a table; TABLE, LOADER: opens one
    number: int


@dataclass(slots=True, unsafe_hash=True)
class Met:
    """The meeting is over: these were in it, and count again from here on.

    With others, which wait elsewhere, each for others that wait too, it was none: their loops differ.
    """

    learners: tuple[int, ...]
    others: tuple[tuple[int, MeetingPlace], ...] = ()


@dataclass(slots=True, unsafe_hash=True)
class Uncross:
    """Learners wait in steps of several tables, for some that came later: those that step this table go on without the
    others, which count again at once."""

    table: int


Decision = Met | Uncross


class Meetings:
    """One meeting after the other.

    Learners whose loops began together come to the same places in the same order, whoever else comes and goes. Who came
    later, or went back to a checkpoint in the middle of its loop (`apart`), is not where they are: only without such, or
    by such alone, may a meeting be held.
    """

    def __init__(self, expected: Iterable[int] = (), *, apart: bool = False) -> None:
        self.members = set(expected)
        self._here: dict[int, None] = {}  # in the order they came
        self._together = set[int]() if apart else set(self.members)

    @property
    def here(self) -> Set[int]:
        """Who waits in the meeting."""
        return self._here.keys()

    def join(self, learner: int) -> None:
        """It is there; who was not expected begins its loop later than the others."""
        self.members.add(learner)

    def come(self, learner: int) -> list[Decision]:
        """It waits in the meeting, and does nothing else until that is over."""
        self.join(learner)
        self._here[learner] = None
        return self._try()

    def leave(self, learner: int) -> list[Decision]:
        """It left, or nobody is to wait for it before it joins (again)."""
        self.members.discard(learner)
        self._together.discard(learner)
        self._here.pop(learner, None)
        return self._try()

    def still(self, *elsewhere: Collection[int]) -> bool:
        """These wait elsewhere, for others: nobody is left who could go on."""
        waiting = len(self._here) + sum(map(len, elsewhere))  # quick to see, and seldom enough
        return waiting >= len(self.members) and not self.members.difference(self._here, *elsewhere)

    def stand_still(self, elsewhere: Mapping[int, MeetingPlace], *, drifting: bool = False) -> list[Decision]:
        """The same: if nobody else is missing, nobody will ever come.

        Who is in a meeting holds it; where nobody is, one table's steps go on first, or an epoch begins for those that wait for one,
        which is not decided here. But where that would leave out some whose loops began together with theirs, the loops differ;
        unless they may be steps apart, since the dial leaves slow ones behind (`drifting`).
        """
        others = self.members - self._here.keys()
        if not others or not self.still(elsewhere):
            return []
        steps = {each: elsewhere[each].number for each in others if elsewhere[each].what == STEP}
        if len(set(steps.values())) > 1:
            together = {steps[each] for each in steps.keys() & self._together}
            if len(together) > 1 and not drifting:
                return self._unmet(elsewhere)
            return [Uncross(min(together or steps.values()))]
        going = set(self._here) or {each for each in others if elsewhere[each].what == EPOCH}
        left = self.members - going
        if going and not (going & self._together and left & self._together):
            return self._close() if self._here else []
        return self._unmet(elsewhere)

    def _unmet(self, elsewhere: Mapping[int, MeetingPlace]) -> list[Decision]:
        others = sorted(self.members - self._here.keys())
        return self._close(tuple((learner, elsewhere[learner]) for learner in others))

    def _try(self) -> list[Decision]:
        return self._close() if self._here and len(self._here) == len(self.members) else []

    def _close(self, others: tuple[tuple[int, MeetingPlace], ...] = ()) -> list[Decision]:
        here, self._here = tuple(self._here), {}
        return [Met(here, others)]
