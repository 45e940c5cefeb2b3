"""The leading shard's meetings: who comes and goes is told to the protocol, and how a meeting ended to the coordinator.

Nothing is decided here; that who meets rests, and goes on with the others, is the sequences' part. Who opens a table or
loader, the coordinator knows: it is asked again before anything is decided upon that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from syncline.ports import OUTSIDE, ServerPort
from syncline.protocols.meetings import Decision, Meetings, Met, Place, Unmet
from syncline.topology import messages as m
from syncline.topology.feeding import Feeding


class Steps(Protocol):
    """What the gathering asks of the tables."""

    def stepping(self) -> dict[int, Place]:
        """Who waits for others' gradients, and of which table."""

    def crossing(self, members: int) -> bool:
        """So many may stand still, some of them in steps of different tables: quick to see, and seldom so."""


class Gathering:
    """All meetings of a run; `decided` has a meeting's end carried out."""

    def __init__(
        self,
        port: ServerPort,
        feeding: Feeding,
        steps: Steps,
        decided: Callable[[int, list[Decision]], None],
    ) -> None:
        self._port, self._feeding, self._steps, self._decided = port, feeding, steps, decided
        self._meetings = Meetings()
        self._opening: dict[int, Place] = {}  # who waits for others to open something too, as last heard
        self._heard = 0  # of that, how often
        self.cold: set[int] = set()  # learners that wait for the warm start's end

    def resume(self, event: m.Resume) -> None:
        self._meetings = Meetings(event.initial, apart=event.back)

    def join(self, learner: int, *, cold: bool) -> None:
        """Who waits for the warm start's end is not waited for."""
        if cold:
            self.cold.add(learner)
            self._decided(OUTSIDE, self._meetings.leave(learner))
        else:
            self._meetings.join(learner)

    def warmed(self, learner: int) -> bool:
        """It reads; True if it has waited for the end of the warm start."""
        if learner not in self.cold:
            return False
        self.cold.discard(learner)
        self._meetings.join(learner)
        return True

    def come(self, learner: int) -> None:
        self._decided(OUTSIDE, self._meetings.come(learner))

    def leave(self, learner: int) -> None:
        self.cold.discard(learner)
        self._decided(OUTSIDE, self._meetings.leave(learner))

    @property
    def tangled(self) -> bool:
        """Steps may wait for somebody that opens something, or for each other."""
        return bool(self._opening) or self._crossing()

    def _crossing(self) -> bool:
        meetings = self._meetings
        return self._steps.crossing(len(meetings.members) - len(meetings.here) - len(self._opening))

    def opening(self, event: m.Opening) -> None:
        self._heard = event.number
        for learner, place in event.learners.items():
            self._opening.pop(learner, None)
            if place is not None:
                self._opening[learner] = place

    def untangle(self, *, sure: bool = False) -> None:
        """Nobody waits for ever: where all wait, a meeting is held by those who are in it, or an epoch begins without some.

        Learners get out of step when one joins, or goes back to a checkpoint, in the middle of a loop. What was heard of
        openings may be old, unless it is `sure`: the coordinator was asked while all stood still.
        """
        meetings, opening = self._meetings, self._opening
        crossing = self._crossing()
        if not meetings.here and not opening and not crossing:
            self._feeding.untangle()
            return
        elsewhere = self._feeding.waiting()
        if opening or crossing:
            stepping = self._steps.stepping()
            if meetings.still(stepping, elsewhere, opening):
                waiting = {**stepping, **elsewhere, **opening}
                if opening and not sure:
                    self._port.report(m.Standstill(self._heard, {*meetings.here, *waiting}))
                    return
                elsewhere = waiting
        decisions = meetings.stand_still(elsewhere)
        self._decided(OUTSIDE, decisions)
        if not decisions and (sure or not (meetings.here or opening)):
            self._feeding.untangle(elsewhere if sure else ())

    def standstill(self, event: m.Standstill) -> None:
        """The coordinator says the same; unless somebody has gone on meanwhile, it is so."""
        if event.number == self._heard:
            self.untangle(sure=True)

    def over(self, decision: Met | Unmet) -> None:
        """Those who met hear of it."""
        others = dict(decision.others) if isinstance(decision, Unmet) else {}
        self._port.report(m.Met(decision.learners, others))
