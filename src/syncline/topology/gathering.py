"""The leading shard's meetings: who comes and goes is told to the protocol, and how a meeting ended to the coordinator.

Nothing is decided here; that who meets rests, and goes on with the others, is the sequences' part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from syncline.ports import OUTSIDE, ServerPort
from syncline.protocols.meetings import Decision, Meetings, Unmet
from syncline.topology import messages as m
from syncline.topology.feeding import Feeding


class Gathering:
    """All meetings of a run; `decided` has a meeting's end carried out."""

    def __init__(
        self,
        port: ServerPort,
        ranks: Mapping[int, int],
        feeding: Feeding,
        decided: Callable[[int, list[Decision]], None],
    ) -> None:
        self._port, self._ranks, self._feeding, self._decided = port, ranks, feeding, decided
        self._meetings = Meetings()
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

    def stand_still(self) -> bool:
        """Somebody meets; whom it waits for may wait for its data, or for an epoch to begin."""
        if not self._meetings.here:
            return False
        self._decided(OUTSIDE, self._meetings.stand_still(self._feeding.waiting()))
        return True

    def over(self, decision: Decision) -> None:
        """Those who met hear of it."""
        problem = self._problem(decision) if isinstance(decision, Unmet) else ""
        self._port.report(m.Met(decision.learners, problem))

    def _problem(self, unmet: Unmet) -> str:
        here, others = (
            sorted(self._ranks.get(learner, -1) for learner in each)
            for each in (unmet.learners, unmet.others)
        )
        return (
            f"session.mean: learners {here} wait in it for learners {others}, which wait at loaders "
            f"{self._feeding.loaders_of(unmet.others)} for them. Every learner must call session.mean equally often; "
            "learners have unequal numbers of batches: call it after the loop over a loader, not inside."
        )
