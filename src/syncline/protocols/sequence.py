"""The one sequence of a table: events in, decisions out.

Composes membership, folding, the gate and the staleness clock. The shard that leads runs it and writes its
decisions into the log; the other shards replay them, so all shards fold the same gradients in the same order
(M3). Not responsible for weights, memory or processes.
"""

from __future__ import annotations

from dataclasses import dataclass

from syncline.dial import Sync
from syncline.protocols.clocks import StalenessClock
from syncline.protocols.folding import Folding, Ticket, leader
from syncline.protocols.membership import Members
from syncline.protocols.waiting import Gate, Release


@dataclass(slots=True, unsafe_hash=True)
class Take:
    """The gradient is in the sequence: it will be part of a fold."""

    ticket: Ticket


@dataclass(slots=True, unsafe_hash=True)
class Drop:
    """The gradient came too late: it is counted and forgotten."""

    ticket: Ticket


@dataclass(slots=True, unsafe_hash=True)
class Fold:
    """Everything taken (in lockstep: of this iteration) becomes version `version`."""

    version: int
    tickets: tuple[Ticket, ...]
    leader: int  # the learner whose group options hold
    factor: float  # multiplies the rate (M4)


@dataclass(slots=True, unsafe_hash=True)
class Full:
    """The set number of updates is reached: the run ends."""

    version: int


Decision = Take | Drop | Fold | Release | Full


class Sequence:
    """Decides for one table. Every method takes an event and returns decisions in their order."""

    def __init__(
        self, sync: Sync, *, initial: dict[int, int], batch_size: int | None = None, limit: int | None = None
    ) -> None:
        self.sync = sync
        self._lockstep = sync.lockstep
        self.version = 0
        self.gradients = 0
        self.dropped = 0
        self.clock = StalenessClock()
        self.members = Members(initial)
        self._folding = Folding(sync)
        self._gate = Gate(sync)
        self._batch_size = batch_size
        self._limit = limit
        self._early: list[Ticket] = []  # published before all initial learners had started

    @property
    def full(self) -> bool:
        return self._limit is not None and self.version >= self._limit

    def join(self, learner: int, rank: int, number: int) -> list[Decision]:
        """It counts from the version it now reads."""
        self.members.join(learner, rank, self.version)
        self._gate.hold(learner, number)
        self._gate.resume(learner, self.version)
        return [*self._gate.open(self.version), *self._begin()]

    def gradient(self, ticket: Ticket) -> list[Decision]:
        """A learner published a gradient."""
        if ticket.learner not in self.members:
            return []
        if not self.members.started:
            self._early.append(ticket)
            return []
        return self._accept(ticket)

    def rest(self, learner: int, number: int) -> list[Decision]:
        """It waits for data: lockstep quorums go on without it until `resume`."""
        if learner not in self.members:
            return []
        self._gate.hold(learner, number)
        self.members.live[learner].resting = True
        return self._advance()

    def reread(self, learner: int, number: int) -> list[Decision]:
        """It wanted to rest, but its data is there already: it reads what it would read after a step."""
        if learner not in self.members:
            return []
        self._gate.hold(learner, number)
        self._gate.resume(learner, self.members.live[learner].next_iteration)
        return list(self._gate.open(self.version))

    def resume(self, learner: int) -> list[Decision]:
        """It has data again and reads what the others have."""
        if learner not in self.members or not self.members.live[learner].resting:
            return []
        member = self.members.live[learner]
        member.resting = False
        member.next_iteration = max(member.next_iteration, self.version)
        self._gate.resume(learner, member.next_iteration)
        return list(self._gate.open(self.version))

    def leave(self, learner: int) -> list[Decision]:
        """It returned, raised or died; quorums follow."""
        self.members.leave(learner)
        self._gate.leave(learner)
        self._early = [ticket for ticket in self._early if ticket.learner != learner]
        return [*self._begin(), *self._advance()]

    def finish(self) -> list[Decision]:
        """The end of the run: what was taken is folded, an incomplete quorum as one last smaller update."""
        decisions: list[Decision] = []
        while tickets := self._folding.rest(self.version):
            decisions += self._fold(tickets)
        return decisions

    def missing(self) -> list[int]:
        """Ranks that the next update waits for."""
        return self._folding.missing(self.version, self.members) if self.sync.lockstep else []

    def waiting(self) -> dict[int, int]:
        return self._gate.waiting()

    @property
    def pending(self) -> int:
        """Taken, not yet folded."""
        return self._folding.pending + len(self._early)

    def _begin(self) -> list[Decision]:
        if not self.members.started or not self._early:
            return []
        early, self._early = self._early, []
        return [decision for ticket in early for decision in self._accept(ticket)]

    def _accept(self, ticket: Ticket) -> list[Decision]:
        member = self.members.live[ticket.learner]
        iteration = max(member.next_iteration, self.version)
        if self._limit is not None and iteration >= self._limit:  # its update would be beyond the last
            self.dropped += 1
            self._gate.hold(ticket.learner, ticket.number)
            self._gate.resume(ticket.learner, iteration)
            return [Drop(ticket), *self._gate.open(self.version)]
        member.resting = False
        if self._lockstep:
            ticket = _at(ticket, iteration)
            member.next_iteration = iteration + 1
        self._folding.add(ticket)
        self._gate.arrive(ticket.learner, ticket.number, ticket.iteration)
        return [Take(ticket), *self._advance()]

    def _advance(self) -> list[Decision]:
        decisions: list[Decision] = []
        while not self.full and (tickets := self._folding.ready(self.version, self.members)):
            decisions += self._fold(tickets)
        return decisions + list(self._gate.open(self.version))

    def _fold(self, tickets: list[Ticket]) -> list[Decision]:
        self.clock.fold(self.version, [ticket.stamp for ticket in tickets])
        self.version += 1
        self.gradients += len(tickets)
        factor = self.sync.factor(max(1, len(self.members)), self._batch_size)
        fold = Fold(self.version, tuple(tickets), leader(tickets).learner, factor)
        return [fold, Full(self.version)] if self.full else [fold]


def _at(ticket: Ticket, iteration: int) -> Ticket:
    return Ticket(
        ticket.learner, ticket.rank, ticket.number, ticket.stamp, ticket.step, ticket.count, iteration
    )
