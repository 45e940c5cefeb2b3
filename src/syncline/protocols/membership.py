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
    """The live learners of one table, and the initial ones that have not come yet.

    Counts are kept, so that a step costs the same however many learners there are.
    """

    def __init__(self, initial: dict[int, int], learners: int | None = None) -> None:
        self.initial = len(initial) if learners is None else learners
        self.live: dict[int, Member] = {}
        self._expected = set(initial)
        self._clocks: dict[int, int] = {}  # clock -> active members that have it
        self.slowest: int | None = None  # the smallest clock of an active member
        self.present = 0  # active members
        self.started = not self._expected  # the first fold waits for all initial learners' start (M3)

    def join(self, learner: int, rank: int, iteration: int) -> Member:
        """A joiner's clock starts at the slowest's (M8)."""
        self.excuse(learner)
        member = Member(learner, rank, iteration, clock=self.slowest or 0)
        self.live[learner] = member
        self._count(member)
        return member

    def excuse(self, learner: int) -> None:
        """Nobody waits for its start any more."""
        self._expected.discard(learner)
        self.started = not self._expected

    def leave(self, learner: int) -> Member | None:
        self.excuse(learner)
        member = self.live.pop(learner, None)
        if member is not None and not member.resting:
            self._discount(member)
        return member

    def step(self, member: Member) -> None:
        """It has made one more gradient."""
        if member.resting:
            member.clock += 1
            return
        clock, clocks = member.clock, self._clocks
        member.clock = clock + 1
        clocks[clock + 1] = clocks.get(clock + 1, 0) + 1
        if clocks[clock] > 1:
            clocks[clock] -= 1
            return
        del clocks[clock]
        if clock == self.slowest:
            self.slowest = clock + 1

    def rest(self, member: Member) -> None:
        """Nobody need wait for it."""
        if not member.resting:
            self._discount(member)
            member.resting = True

    def rouse(self, member: Member) -> None:
        """It rested and has data again: nobody waits for what it missed."""
        member.clock = max(member.clock, self.slowest or 0)
        member.resting = False
        self._count(member)

    def restart(self, iteration: int) -> None:
        """Clocks and iterations begin anew for all."""
        for member in self.live.values():
            member.next_iteration, member.clock = iteration, 0
        self._clocks = {0: self.present} if self.present else {}
        self.slowest = 0 if self.present else None

    def active(self) -> list[Member]:
        """Those that others may wait for."""
        return [member for member in self.live.values() if not member.resting]

    def _count(self, member: Member) -> None:
        self.present += 1
        self._clocks[member.clock] = self._clocks.get(member.clock, 0) + 1
        if self.slowest is None or member.clock < self.slowest:
            self.slowest = member.clock

    def _discount(self, member: Member) -> None:
        self.present -= 1
        self._clocks[member.clock] -= 1
        if not self._clocks[member.clock]:
            del self._clocks[member.clock]
            if member.clock == self.slowest:
                self.slowest = min(self._clocks, default=None)
