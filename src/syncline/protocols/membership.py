"""Who is alive, who has started, who rests.

A member is a learner process (or a simulated one), known by an id that is never used twice, and by its
rank. Not responsible for noticing deaths: the engine does that and reports them as `leave`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Member:
    """What the sequence knows of one learner."""

    learner: int
    rank: int
    next_iteration: int = 0
    resting: bool = False


class Members:
    """The live learners of one table, and the initial ones that have not come yet."""

    def __init__(self, initial: dict[int, int]) -> None:
        self.initial = len(initial)
        self.live: dict[int, Member] = {}
        self._expected = set(initial)

    def __len__(self) -> int:
        return len(self.live)

    def __contains__(self, learner: int) -> bool:
        return learner in self.live

    @property
    def started(self) -> bool:
        """The first fold waits for all initial learners' start (M3)."""
        return not self._expected

    def join(self, learner: int, rank: int, iteration: int) -> Member:
        self._expected.discard(learner)
        member = self.live[learner] = Member(learner, rank, iteration)
        return member

    def leave(self, learner: int) -> Member | None:
        self._expected.discard(learner)
        return self.live.pop(learner, None)

    def active(self) -> list[Member]:
        """Those a lockstep quorum waits for."""
        return [member for member in self.live.values() if not member.resting]
