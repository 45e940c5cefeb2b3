"""The leading shard's meetings: who comes and goes is told to the protocol, and how a meeting ended to the coordinator.

Nothing is decided here; that who meets rests, and goes on with the others, is the sequences' part. Who opens a table or
loader, the coordinator knows: it is asked again before anything is decided upon that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from syncline import messages as m
from syncline.ports import OUTSIDE, ServerPort
from syncline.protocols.meetings import STEP, Decision, MeetingPlace, Meetings, Met
from syncline.protocols.sequence import Sequence
from syncline.roles.data_dispatcher import DataDispatcher

PATIENCE = 10  # steps; equal loops of unequally many batches make one


class Barrier:
    """All meetings of a run; `decided` has a meeting's end carried out."""

    def __init__(
        self,
        port: ServerPort,
        ranks: Mapping[int, int],
        dispatcher: DataDispatcher,
        sequences: Mapping[int, Sequence],
        decided: Callable[[int, list[Decision]], None],
    ) -> None:
        self._port, self._ranks, self._dispatcher = port, ranks, dispatcher
        self._sequences, self._decided = sequences, decided
        self.meetings = Meetings()
        # who waits for others to open something too, as last heard, and how often that was
        self.openings: dict[int, MeetingPlace] = {}
        self._heard = 0
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
        self.untangle()

    def stepped(self, learner: int, *, lockstep: bool) -> None:
        """While others wait in the meeting: in lockstep it is soon there, or its loop is another."""
        self._apart[learner] += 1
        if lockstep and self._apart[learner] == PATIENCE:
            self._warn(learner, "has made")

    def leave(self, learner: int, *, closed: bool) -> None:
        """If it has returned by itself, it will never be there."""
        if closed and self._apart[learner]:
            self._warn(learner, "has returned after")
        self.cold.discard(learner)
        self._decided(OUTSIDE, self.meetings.leave(learner))
        self.untangle()

    def _warn(self, learner: int, what: str) -> None:
        waiting = sorted(self._ranks[each] for each in self.meetings.here & self._together)
        if waiting and learner in self._together:
            text = (
                f"session.mean: learner {self._ranks[learner]} {what} {self._apart[learner]} steps while learners {waiting} wait "
                "in it, without a part in those updates. Every learner must call it equally often, at the same places"
            )
            self._port.tell(m.Warned(text, "mean"))

    @property
    def tangled(self) -> bool:
        """Steps may wait for somebody that opens something, or for each other."""
        return bool(self.openings) or self._crossing()

    def _crossing(self) -> bool:
        """All may stand still, some of them in steps of different tables: quick to see, and seldom so."""
        meetings = self.meetings
        waiting = [sequence.at_gate for sequence in self._sequences.values()]
        others = len(meetings.members) - len(meetings.here) - len(self.openings)
        return sum(waiting) >= others and sum(map(bool, waiting)) > 1

    def opening(self, event: m.Opening) -> None:
        self._heard = event.number
        for learner, place in event.learners.items():
            self.openings.pop(learner, None)
            if place is not None:
                self.openings[learner] = place
        self.untangle()

    def untangle(self, *, sure: bool = False) -> None:
        """Nobody waits for ever: where all wait, a meeting is held by those who are in it, or an epoch begins without some.

        Learners get out of step when one joins, or goes back to a checkpoint, in the middle of a loop. What was heard of
        openings may be old, unless it is `sure`: the coordinator was asked while all stood still.
        """
        meetings, opening = self.meetings, self.openings
        crossing = self._crossing()
        if not meetings.here and not opening and not crossing:
            self._dispatcher.untangle()
            return
        elsewhere = self._dispatcher.waiting()
        if opening or crossing:
            stepping = {
                learner: MeetingPlace(STEP, table)
                for table, sequence in self._sequences.items()
                for learner in sequence.stepping()
            }
            if meetings.still(stepping, elsewhere, opening):
                waiting = {**stepping, **elsewhere, **opening}
                if opening and not sure:
                    self._port.tell(m.Standstill(self._heard, {*meetings.here, *waiting}))
                    return
                elsewhere = waiting
        # backup drops the gradients of slow learners: they stay behind
        drifting = any(sequence.sync.late == "drop" for sequence in self._sequences.values())
        decisions = meetings.stand_still(elsewhere, drifting=drifting)
        self._decided(OUTSIDE, decisions)
        if not decisions and (sure or not (meetings.here or opening)):
            self._dispatcher.untangle(elsewhere if sure else ())

    def standstill(self, event: m.Standstill) -> None:
        """The coordinator says the same; unless somebody has gone on meanwhile, it is so."""
        if event.number == self._heard:
            self.untangle(sure=True)

    def over(self, decision: Met) -> None:
        """Those who met hear of it."""
        self._apart.clear()
        self._port.tell(m.Met(decision.learners, dict(decision.others)))
