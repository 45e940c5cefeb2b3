"""Who is alive, who has started, who rests, and how far each has come.

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
    clock: int = 0  # steps, as slack counts them


class Members:
    """The live learners of one table, and the initial ones that have not come yet."""

    def __init__(self, initial: dict[int, int], learners: int | None = None) -> None:
        self.initial = len(initial) if learners is None else learners
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
        """A joiner's clock starts at the slowest's (M8)."""
        self._expected.discard(learner)
        member = Member(learner, rank, iteration, clock=self.slowest() or 0)
        self.live[learner] = member
        return member

    def leave(self, learner: int) -> Member | None:
        self._expected.discard(learner)
        return self.live.pop(learner, None)

    def rouse(self, member: Member) -> None:
        """It rested and has data again: nobody waits for what it missed."""
        member.resting = False
        member.clock = max(member.clock, self.slowest(but=member.learner) or 0)

    def active(self) -> list[Member]:
        """Those that others may wait for."""
        return [member for member in self.live.values() if not member.resting]

    def slowest(self, but: int | None = None) -> int | None:
        """The smallest clock of an active member; None where there is none."""
        return min((member.clock for member in self.active() if member.learner != but), default=None)
