"""The leading shard's meetings: who comes and goes is told to the protocol, and how a meeting ended to the coordinator.

Nothing is decided here; that who meets rests, and goes on with the others, is the sequences' part. Who opens a table or
loader, the coordinator knows: it is asked again before anything is decided upon that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol

from syncline import messages as m
from syncline.ports import OUTSIDE, ServerPort
from syncline.protocols.meetings import Decision, MeetingPlace, Meetings, Met, Unmet
from syncline.roles.data_dispatcher import DataDispatcher

PATIENCE = 10  # steps; equal loops of unequally many batches make one


class Steps(Protocol):
    """What the gathering asks of the tables."""

    def stepping(self) -> dict[int, MeetingPlace]:
        """Who waits for others' gradients, and of which table."""

    def crossing(self, members: int) -> bool:
        """So many may stand still, some of them in steps of different tables: quick to see, and seldom so."""

    def drifting(self) -> bool:
        """Learners whose loops began together may be steps apart."""


class Barrier:
    """All meetings of a run; `decided` has a meeting's end carried out."""

    def __init__(
        self,
        port: ServerPort,
        feeding: DataDispatcher,
        steps: Steps,
        decided: Callable[[int, list[Decision]], None],
    ) -> None:
        self._port, self._feeding, self._steps, self._decided = port, feeding, steps, decided
        self.meetings = Meetings()
        self.openings: dict[
            int, MeetingPlace
        ] = {}  # who waits for others to open something too, as last heard
        self._heard = 0  # of that, how often
        self._together: set[int] = set()  # learners whose loops began together
        self._apart: Counter[int] = Counter()  # of learners, while others of them wait in the meeting
        self.cold: set[int] = set()  # learners that wait for the warm start's end

    def resume(self, event: m.Resume) -> None:
        self.meetings = Meetings(event.initial, apart=event.back)
        self._together = set() if event.back else set(event.initial)

    def join(self, learner: int, *, cold: bool) -> None:
        """Who waits for the warm start's end is not waited for."""
        if cold:
            self.cold.add(learner)
            self._decided(OUTSIDE, self.meetings.leave(learner))
        else:
            self.meetings.join(learner)

    def warmed(self, learner: int) -> bool:
        """It reads; True if it has waited for the end of the warm start."""
        if learner not in self.cold:
            return False
        self.cold.discard(learner)
        self.meetings.join(learner)
        return True

    def come(self, learner: int) -> None:
        self._decided(OUTSIDE, self.meetings.come(learner))

    def stepped(self, learner: int, ranks: Mapping[int, int], *, lockstep: bool) -> None:
        """While others wait in the meeting: in lockstep it is soon there, or its loop is another."""
        self._apart[learner] += 1
        if lockstep and self._apart[learner] == PATIENCE:
            self._warn(learner, ranks, "has made")

    def closed(self, learner: int, ranks: Mapping[int, int]) -> None:
        """It returns, and will never be there."""
        if self._apart[learner]:
            self._warn(learner, ranks, "has returned after")

    def _warn(self, learner: int, ranks: Mapping[int, int], what: str) -> None:
        waiting = sorted(ranks[each] for each in self.meetings.here & self._together)
        if waiting and learner in self._together:
            text = (
                f"session.mean: learner {ranks[learner]} {what} {self._apart[learner]} steps while learners {waiting} wait "
                "in it, without a part in those updates. Every learner must call it equally often, at the same places"
            )
            self._port.tell(m.Warned(text, "mean"))

    def leave(self, learner: int) -> None:
        self.cold.discard(learner)
        self._decided(OUTSIDE, self.meetings.leave(learner))

    @property
    def tangled(self) -> bool:
        """Steps may wait for somebody that opens something, or for each other."""
        return bool(self.openings) or self._crossing()

    def _crossing(self) -> bool:
        meetings = self.meetings
        return self._steps.crossing(len(meetings.members) - len(meetings.here) - len(self.openings))

    def opening(self, event: m.Opening) -> None:
        self._heard = event.number
        for learner, place in event.learners.items():
            self.openings.pop(learner, None)
            if place is not None:
                self.openings[learner] = place

    def untangle(self, *, sure: bool = False) -> None:
        """Nobody waits for ever: where all wait, a meeting is held by those who are in it, or an epoch begins without some.

        Learners get out of step when one joins, or goes back to a checkpoint, in the middle of a loop. What was heard of
        openings may be old, unless it is `sure`: the coordinator was asked while all stood still.
        """
        meetings, opening = self.meetings, self.openings
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
                    self._port.tell(m.Standstill(self._heard, {*meetings.here, *waiting}))
                    return
                elsewhere = waiting
        decisions = meetings.stand_still(elsewhere, drifting=self._steps.drifting())
        self._decided(OUTSIDE, decisions)
        if not decisions and (sure or not (meetings.here or opening)):
            self._feeding.untangle(elsewhere if sure else ())

    def standstill(self, event: m.Standstill) -> None:
        """The coordinator says the same; unless somebody has gone on meanwhile, it is so."""
        if event.number == self._heard:
            self.untangle(sure=True)

    def over(self, decision: Met | Unmet) -> None:
        """Those who met hear of it."""
        self._apart.clear()
        others = dict(decision.others) if isinstance(decision, Unmet) else {}
        self._port.tell(m.Met(decision.learners, others))
