"""The one sequence of a table: events in, decisions out.

Composes membership, folding, the gate and the staleness clock. The shard that leads runs it and writes its
decisions into the log; the other shards replay them, so all shards fold the same gradients in the same order
(M3). Not responsible for weights, memory or processes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from syncline.dial import Sync
from syncline.protocols.folding import Folding, Ticket, leader
from syncline.protocols.membership import Member, Members
from syncline.protocols.staleness import StalenessClock
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
    leader: Ticket  # whose group options hold
    factor: float  # multiplies the rate (M4)


@dataclass(slots=True, unsafe_hash=True)
class Full:
    """The set number of updates is reached: the run ends."""

    version: int


@dataclass(slots=True, unsafe_hash=True)
class Change:
    """From here on the table follows another dial; nothing is taken and not folded."""

    dial: int


Decision = Take | Drop | Fold | Release | Full | Change


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What a sequence has counted: enough to go on with it later."""

    version: int = 0
    gradients: int = 0
    dropped: int = 0
    histogram: dict[int, int] | None = None


class Sequence:
    """Decides for one table. Every method takes an event and returns decisions in their order.

    `learners` is λ₀, where `initial` is not all of them. `warm`: until that version the first learner works alone,
    the others wait for their first read (D4). `sums`: gradients come in sums, so that an update under a free dial may have another
    number of them than its quorum, and its rate is multiplied by the quotient (M14).
    """

    def __init__(
        self,
        sync: Sync,
        *,
        initial: dict[int, int],
        batch_size: int | None = None,
        limit: int | None = None,
        learners: int | None = None,
        warm: int = 0,
        sums: bool = False,
        account: Account | None = None,
    ) -> None:
        account = account or Account()
        self._sums = sums
        self._turn(sync)
        self.version = account.version
        self.gradients = account.gradients
        self.dropped = account.dropped
        self.clock = StalenessClock()
        self.clock.histogram.update(account.histogram or {})
        self.members = Members(initial, learners)
        self._folding = Folding(sync)
        self._gate = Gate(sync, self.members)
        self._gate.change(sync, self.version)
        self._batch_size = batch_size
        self._limit = limit
        self._warm = warm
        # learner -> (rank, ticket): waits for the warm start's end
        self._cold: dict[int, tuple[int, int]] = {}
        self._fetching: set[int] = set()  # learners that compute while they wait for what they fetch
        self._awaited: dict[int, int] = {}  # learner -> the ticket without which it does nothing more
        self._early: list[Ticket] = []  # published before all initial learners had started

    def _turn(self, sync: Sync) -> None:
        self.sync, self._lockstep = sync, sync.lockstep
        self._weighs, self._damps = sync.weighs, sync.rate == "staleness" and not sync.weighs
        self._factors: dict[int, float] = {}  # of the rate, by the number of learners

    @property
    def quorum(self) -> int:
        """Number of gradients that the next update needs."""
        return self._folding.quorum(self.members)

    @property
    def full(self) -> bool:
        return self._limit is not None and self.version >= self._limit

    def join(self, learner: int, rank: int, number: int) -> list[Decision]:
        """It counts from the version it now reads."""
        if self.version < self._warm and self.members.live:
            self._cold[learner] = (rank, number)
            return self.excuse(learner)  # it was to work alone, and another does
        self.members.join(learner, rank, self.version)
        self._gate.hold(learner, number)
        self._gate.resume(learner, self.version)
        return [*self._gate.open(self.version), *self._begin()]

    def excuse(self, learner: int) -> list[Decision]:
        """Nobody waits for its start: it comes later."""
        self.members.excuse(learner)
        return self._begin()

    def gradient(self, *tickets: Ticket) -> list[Decision]:
        """A learner published a gradient; or several came as one sum (M14), of which no update takes a part."""
        for ticket in tickets:
            if ticket.learner not in self.members.live:
                return []
        if not self.members.started:
            self._early += tickets
            return []
        return [*map(self._enter, tickets), *self._advance()]

    def _begin(self) -> list[Decision]:
        """What came early counts as soon as all have started."""
        if not self.members.started or not self._early:
            return []
        early, self._early = self._early, []
        return [decision for ticket in early for decision in self.gradient(ticket)]

    def iterations(self, learners: Iterable[int]) -> dict[int, int]:
        """Learner to the iteration that its next gradient is of, in lockstep."""
        live = self.members.live
        return {each: max(live[each].next_iteration, self.version) for each in learners}

    def fetch(self, learner: int, number: int, has: int | None = None) -> list[Decision]:
        """It wants the newest weights, whatever it has published (M9); where it `has` them already only a word (R8)."""
        member = self.members.live.get(learner)
        if member is None:
            return []
        if not self._lockstep and self.sync.slack is None:
            read = self.version if has is None else has
            self._gate.fetched(learner, read)
            return [Release(learner, number, read, same=has is not None)]
        # the dial has changed meanwhile: it reads with the fold of what it published, or when it is not too far ahead
        self._fetching.add(learner)
        self._gate.arrive(learner, number, member.next_iteration - 1, self.version)
        return list(self._gate.open(self.version))

    def awaits(self, learner: int, number: int) -> None:
        """It computes no more until what it fetched is there, or this gradient is folded."""
        self._fetching.discard(learner)
        self._awaited[learner] = number

    def rest(self, learner: int, number: int) -> list[Decision]:
        """It waits for data: quorums go on without it until `resume`."""
        member = self.members.live.get(learner)
        if member is None:
            return []
        self._fetching.discard(learner)
        self._gate.hold(learner, number)
        self.members.rest(member)
        return self._advance()

    def reread(self, learner: int, number: int) -> list[Decision]:
        """It wanted to rest, but its data is there already: it reads what it would read after a step."""
        member = self.members.live.get(learner)
        if member is None:
            return []
        self._fetching.discard(learner)
        if member.resting:  # since the end of other data
            self._rouse(member)
        self._gate.hold(learner, number)
        self._gate.resume(learner, member.next_iteration)
        return list(self._gate.open(self.version))

    def resume(self, learner: int) -> list[Decision]:
        """It has data again and reads what the others have."""
        return self.met([learner])

    def met(self, learners: Iterable[int]) -> list[Decision]:
        """These met and go on together: all count again before one of them can publish.

        The slowest first, so that a meeting of all leaves the clocks of slack as they were.
        """
        live = self.members.live
        back = [live[learner] for learner in learners if learner in live and live[learner].resting]
        for member in sorted(back, key=lambda member: (member.clock, member.rank)):
            self._rouse(member)
            self._gate.resume(member.learner, member.next_iteration)
        return list(self._gate.open(self.version)) if back else []

    def _rouse(self, member: Member) -> None:
        self.members.rouse(member)
        member.next_iteration = max(member.next_iteration, self.version)

    def leave(self, learner: int) -> list[Decision]:
        """It returned, raised or died; quorums follow."""
        self._cold.pop(learner, None)
        self._fetching.discard(learner)
        self._awaited.pop(learner, None)
        self.members.leave(learner)
        self._gate.leave(learner)
        self._early = [ticket for ticket in self._early if ticket.learner != learner]
        decisions = [*self._begin(), *self._advance()]
        if not self.members.live and self._cold:  # the one that worked alone is gone: the next does
            first = min(self._cold, key=lambda cold: self._cold[cold])
            decisions += self.join(first, *self._cold.pop(first))
        return decisions

    def go_on_without(self) -> list[Decision]:
        """All wait, but those that are not at the gate for something else than this table: this once nobody waits for them."""
        absent = [member for member in self.members.active() if member.learner not in self._gate.waiting]
        for member in absent:
            self.members.rest(member)
        decisions = self._advance()
        for member in absent:
            self._rouse(member)
        return decisions

    def change(self, sync: Sync, dial: int) -> list[Decision]:
        """Another dial from the next version on; what was taken is folded first, an incomplete quorum too."""
        decisions = self.finish()
        self._turn(sync)
        self._folding = Folding(sync)
        self._gate.change(sync, self.version)
        self.members.restart(self.version)
        return [*decisions, Change(dial), *self._gate.open(self.version)]

    def finish(self) -> list[Decision]:
        """The end of the run: what was taken is folded, an incomplete quorum as one last smaller update."""
        decisions: list[Decision] = []
        while tickets := self._folding.rest(self.version):
            decisions += self._fold(tickets)
        return decisions

    def unfolded(self, learner: int) -> list[int]:
        """Numbers of its gradients that were taken and are in no update yet."""
        return self._folding.unfolded(learner)

    def cold(self, learner: int) -> bool:
        """It waits for the end of the warm start."""
        return learner in self._cold

    def missing(self) -> list[int]:
        """Ranks that the next update, or somebody too far ahead, waits for."""
        if self.sync.slack is not None:
            waits = any(version >= 0 for version in self.waiting().values())
            slowest = self.members.slowest if waits else None
            return sorted(m.rank for m in self.members.active() if m.clock == slowest)
        return self._folding.missing(self.version, self.members) if self.sync.lockstep else []

    def waiting(self) -> dict[int, int]:
        """Learner to the version it waits for (-1: it rests)."""
        at_gate = {learner: needed for learner, (_, needed, _) in self._gate.waiting.items()}
        return {**at_gate, **dict.fromkeys(self._cold, self._warm)}

    def stepping(self) -> set[int]:
        """Learners that do nothing until others publish, or start."""
        awaited = self._awaited
        early = {t.learner for t in self._early if not t.silent or awaited.get(t.learner) == t.number}
        stuck = {each for each, number in awaited.items() if self._gate.holds(each, number)}
        return (early | self._gate.blocked()) - self._fetching | stuck

    @property
    def at_gate(self) -> int:
        """How many wait, or rest."""
        return len(self._gate.waiting) + len(self._early)

    def account(self) -> Account:
        return Account(
            version=self.version,
            gradients=self.gradients,
            dropped=self.dropped,
            histogram=dict(self.clock.histogram),
        )

    @property
    def pending(self) -> int:
        """Taken, not yet folded."""
        return self._folding.pending + len(self._early)

    def _enter(self, ticket: Ticket) -> Take | Drop:
        member = self.members.live[ticket.learner]
        if not ticket.silent and self._fetching:
            self._fetching.discard(ticket.learner)
        iteration = max(member.next_iteration, self.version)
        beyond = self._limit is not None and iteration >= self._limit  # its update would be after the last
        if beyond or (self.sync.late == "drop" and ticket.stamp < self.version):
            self.dropped += 1
            if not self._gate.rests_since(ticket.learner, ticket.number):
                self._gate.let_go(ticket.learner, ticket.number, iteration, ticket.silent)
            return Drop(ticket)
        if member.resting and not self._gate.rests_since(ticket.learner, ticket.number):
            self.members.rouse(member)
        self.members.step(member)
        if self._lockstep:
            ticket.iteration = iteration
            member.next_iteration = iteration + 1
        elif self._weighs:
            ticket.weight = 1 / max(1, self.version - ticket.stamp)
        self._folding.add(ticket)
        self._gate.arrive(ticket.learner, ticket.number, ticket.iteration, self.version, ticket.silent)
        return Take(ticket)

    def _advance(self) -> list[Decision]:
        decisions: list[Decision] = []
        limit, folding, members = self._limit, self._folding, self.members
        while (limit is None or self.version < limit) and (tickets := folding.ready(self.version, members)):
            decisions += self._fold(tickets)
        decisions += self._gate.open(self.version)
        return decisions

    def _fold(self, tickets: list[Ticket]) -> list[Decision]:
        sigma = self.clock.fold(self.version, [ticket.stamp for ticket in tickets])
        self.version += 1
        self.gradients += len(tickets)
        live = len(self.members.live)
        factor = self._factors.get(live)
        if factor is None:
            factor = self._factors[live] = self.sync.factor(max(1, live), self._batch_size)
        if self._sums and not self._lockstep:
            factor *= len(tickets) / self.quorum
        if self._damps:
            factor /= max(1.0, sigma)
        first = leader(tickets) if len(tickets) > 1 else tickets[0]
        decisions: list[Decision] = [Fold(self.version, tuple(tickets), first, factor)]
        if self.version == self._warm:
            cold, self._cold = self._cold, {}
            for learner, (rank, number) in sorted(cold.items(), key=lambda item: item[1]):
                decisions += self.join(learner, rank, number)
        return [*decisions, Full(self.version)] if self.full else decisions
