"""An account of one table of its own: gradients, versions, who may go on (DESIGN's "What always holds" 1–3, M2, M3).

Follows what learners post and what the leading shard decides. Members, clocks, iterations and staleness are counted here, and
quorums, rates and waiting follow `DialRules`: of the code under test only the records are read. Knows nothing of tensors; a
decision that cannot be is a `Broken`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from syncline.dial import Sync
from syncline.messages import MakeTable
from syncline.protocols.folding import Ticket
from syncline.protocols.sequence import Drop, Fold
from syncline.protocols.waiting import Release
from syncline.sim.invariants.dial_rules import DialRules
from syncline.sim.invariants.loader_accounts import Broken, Span

Key = tuple[int, int]  # learner, number


@dataclass(slots=True)
class Gradient:
    """One published gradient."""

    stamp: int
    step: int
    usage: list[tuple[int, Span]] = field(default_factory=list)  # (loader, positions)
    options: list[dict[str, Any]] = field(default_factory=list)  # of its parameter groups
    fate: str = "published"  # then taken, folded, dropped or lost
    iteration: int = -1
    weight: int = 0  # in the mean of its update


@dataclass(slots=True)
class Member:
    """A learner that the table counts."""

    last: int  # the version it read last
    clock: int = 0
    passed_over: bool = (
        False  # since the dial began: an update did not wait for it, and its clock may be another
    )
    aware: bool = True  # it has read since then: before, it may not know
    resting: int | None = None  # with this ticket
    took: Key = (-1, -1)  # number and iteration of its last gradient that was taken
    iteration: int = 0  # in lockstep: the next gradient's, or later where versions have passed it
    blocked: Key | None = None  # it has published this ticket, and waits for this version


class TableAccount:
    """Gradients and versions of one table."""

    def __init__(self, make: MakeTable, sync: Sync) -> None:
        self.number, self.sync, self.sums = make.table, DialRules(sync), make.tree
        self.version = self.base = make.account.version
        self.learners, self.limit, self.warm = make.learners, make.limit, make.warm
        self.batch_size, self.expected = make.batch_size, set(make.initial)
        self.members: dict[int, Member] = {}
        self.gradients: dict[Key, Gradient] = {}  # not settled
        self.pending: list[Key] = []  # taken, in their order
        self.folded, self.dropped = make.account.gradients, make.account.dropped
        self.staleness = Counter(make.account.histogram or {})  # of all that was folded
        self.finishing = False
        self._uncrossed = 0  # the last version that was made without some that step another table
        self._uncrossing = False  # it is to be made
        self._short: str | None = None  # an update of too few gradients: right only before another dial

    # -- learners ----------------------------------------------------------------------------------------

    def joins(self, learner: int) -> None:
        """Who waits for the warm start's end is not waited for."""
        if self.version < self.warm and self.members:
            self.expected.discard(learner)

    def published(self, learner: int, number: int, gradient: Gradient) -> None:
        key = (learner, number)
        if key in self.gradients:
            raise Broken(f"learner {learner} publishes ticket {number} twice")
        self.gradients[key] = gradient

    def left(self, learner: int) -> list[Gradient]:
        """The gradients that are lost with it: they were not taken yet."""
        self.expected.discard(learner)
        self.members.pop(learner, None)
        lost = [key for key, g in self.gradients.items() if key[0] == learner and g.fate == "published"]
        return [self.gradients.pop(key) for key in lost]

    def rests(self, learner: int, number: int) -> None:
        if learner in self.members:
            self.members[learner].resting, self.members[learner].blocked = number, None

    def roused(self, *learners: int) -> None:
        """Count learners again, the slowest first, each from the clock of the slowest of the others (M8)."""
        resting = [
            member for member in map(self.members.get, learners) if member and member.resting is not None
        ]
        for member in sorted(resting, key=lambda member: member.clock):
            slowest = min((self.members[each].clock for each in self.active()), default=0)
            member.clock, member.resting = max(member.clock, slowest), None

    def uncross(self) -> None:
        """Who steps another table is not waited for this once, and counts from where the others are."""
        self._uncrossing = True
        for member in self.members.values():
            member.passed_over, member.blocked = True, None

    def active(self) -> set[int]:
        return {learner for learner, member in self.members.items() if member.resting is None}

    @property
    def _full(self) -> bool:
        return self.limit is not None and self.version >= self.limit

    def quorum(self) -> int:
        """Of the next update, by the dial's own words."""
        present = len(self.active()) if self.sync.waits else len(self.members)
        return max(1, self.sync.quorum(max(1, present), self.learners))

    # -- decisions ---------------------------------------------------------------------------------------

    def taken(self, ticket: Ticket) -> None:
        self._not_short()
        gradient = self._of(ticket, "published", "taken")
        gradient.fate, gradient.iteration = "taken", ticket.iteration
        alone = self.quorum() == 1 and not self.sync.lockstep  # flat servers would fold it alone (M14)
        gradient.weight = 1 if self.sums and alone else ticket.count
        if ticket.learner not in self.members:
            raise Broken(f"a gradient of learner {ticket.learner} is taken, but it has left or never joined")
        member = self.members[ticket.learner]
        if member.resting is not None and member.resting < ticket.number:
            self.roused(ticket.learner)
        member.clock += 1
        self._check_ticket(member, ticket)
        member.took = (ticket.number, ticket.iteration)
        if not ticket.silent and member.resting is None:
            needed = self.sync.needed(self.version, self.base, ticket.iteration)
            member.blocked = (ticket.number, needed)
        if self.sync.late == "drop" and ticket.stamp < self.version:
            raise Broken(
                f"a gradient of version {ticket.stamp} is taken at version {self.version}: it is late"
            )
        self.pending.append((ticket.learner, ticket.number))

    def _check_ticket(self, member: Member, ticket: Ticket) -> None:
        """Compare iteration and damping with what the dial prescribes."""
        if self.sync.lockstep:
            iteration = max(member.iteration, self.version)
            member.iteration = iteration + 1
            if ticket.iteration != iteration:
                raise Broken(
                    f"a gradient of learner {ticket.learner} counts for iteration {ticket.iteration}, it is of {iteration}"
                )
        damping = self.sync.damping(self.version - ticket.stamp)
        if abs(ticket.weight - damping) > 1e-9:
            raise Broken(
                f"a gradient of version {ticket.stamp} weighs {ticket.weight:g} at version {self.version}, "
                f"{self.sync} says {damping:g}"
            )

    def drop(self, decision: Drop) -> Gradient:
        self._not_short()
        ticket = decision.ticket
        self._of(ticket, "published", "dropped")
        if ticket.learner in self.members:
            self.members[ticket.learner].blocked = None
        late = self.sync.late == "drop" and ticket.stamp < self.version
        beyond = self.limit is not None and self.version + self.sync.delay >= self.limit
        if not late and not beyond:
            raise Broken(
                f"a gradient of version {ticket.stamp} is dropped at version {self.version}: it is not late"
            )
        self.dropped += 1
        return self.gradients.pop((ticket.learner, ticket.number))

    def fold(self, fold: Fold) -> list[Gradient]:
        """The gradients that are in an update now."""
        if fold.version != self.version + 1:
            raise Broken(f"version {fold.version} follows version {self.version}")
        if self.expected:
            raise Broken(
                f"version {fold.version} is made before learners {sorted(self.expected)} have started"
            )
        keys = [(ticket.learner, ticket.number) for ticket in fold.tickets]
        if not keys or len(set(keys)) < len(keys):
            raise Broken(f"version {fold.version} is made of tickets {keys}")
        if self.limit is not None and fold.version > self.limit:
            raise Broken(f"version {fold.version} is made, the run was to end with {self.limit}")
        found = [self._of(ticket, "taken", "folded") for ticket in fold.tickets]
        for ticket in fold.tickets:
            self._check_stamp(ticket)
        self._check_quorum(fold)
        self._check_factor(fold)
        first = min(fold.tickets, key=lambda ticket: (-ticket.step, ticket.rank))
        if (fold.leader.learner, fold.leader.number) != (first.learner, first.number):
            raise Broken(
                f"version {fold.version} goes by the options of learner {fold.leader.learner}, "
                f"learner {first.learner} is furthest along"
            )
        self.staleness.update(self.version - ticket.stamp for ticket in fold.tickets)
        for key in keys:
            self.pending.remove(key)
            del self.gradients[key]
        if self._uncrossing:
            self._uncrossed = fold.version
        self.version += 1
        self.folded += len(keys)
        return found

    def _of(self, ticket: Ticket, before: str, after: str) -> Gradient:
        gradient = self.gradients.get((ticket.learner, ticket.number))
        if gradient is None:
            raise Broken(
                f"ticket {ticket.number} of learner {ticket.learner} is {after}, but it was folded, dropped or lost before, "
                "or never published"
            )
        if gradient.fate != before or (gradient.stamp, gradient.step) != (ticket.stamp, ticket.step):
            raise Broken(f"{gradient} of learner {ticket.learner} is {after} as {ticket}")
        return gradient

    def _check_stamp(self, ticket: Ticket) -> None:
        sync, sigma = self.sync, self.version - ticket.stamp
        if sigma < 0:
            raise Broken(f"a gradient of version {ticket.stamp} is folded into version {self.version + 1}")
        member = self.members.get(ticket.learner)
        unaware = (ticket.silent and not sync.local) or (member is not None and not member.aware)
        if unaware or ticket.stamp < max(self.base, self._uncrossed):  # computed under the dial before
            return
        if sync.lockstep and sigma != min(self.version - self.base, sync.delay):
            raise Broken(
                f"σ = {sigma} in version {self.version + 1} under {sync}: "
                f"it is min({self.version - self.base}, {sync.delay}) there"
            )
        if sync.late == "drop" and sigma:
            raise Broken(
                f"σ = {sigma} in version {self.version + 1} under {sync}, which folds fresh gradients only"
            )

    def _check_quorum(self, fold: Fold) -> None:
        """Too few are right at the end of the run, and where the dial changes next."""
        if self.finishing or self._uncrossing:
            return
        if self.sync.lockstep:
            missing = self.active() - {ticket.learner for ticket in fold.tickets}
            if missing:
                self._short = (
                    f"version {fold.version} is made without learners {sorted(missing)}, which compute"
                )
            if len({ticket.iteration for ticket in fold.tickets}) > 1:
                raise Broken(f"version {fold.version} is made of several iterations: {fold.tickets}")
        elif len(fold.tickets) < self.quorum():
            self._short = f"version {fold.version} is made of {len(fold.tickets)} gradients, the quorum is {self.quorum()}"

    def _check_factor(self, fold: Fold) -> None:
        """M4, by the learners that live."""
        factor = self.sync.factor(max(1, len(self.members)), self.batch_size)
        if self.sums and not self.sync.lockstep:  # M14: an update of a sum of k gradients is k/c updates
            factor *= len(fold.tickets) / self.quorum()
        if self.sync.rate == "staleness" and not self.sync.weighs:
            sigmas = [self.version - ticket.stamp for ticket in fold.tickets]
            factor /= max(1.0, sum(sigmas) / len(sigmas))
        if abs(fold.factor - factor) > 1e-9:
            raise Broken(
                f"version {fold.version} is made at {fold.factor:g} of the rate, {self.sync} says {factor:g}"
            )

    def _not_short(self) -> None:
        if self._short is not None:
            raise Broken(self._short)

    def change(self, sync: Sync) -> None:
        """Nothing that was taken is left."""
        self._short = None
        if self.pending:
            raise Broken(
                f"the dial changes to {sync} while {len(self.pending)} gradients wait for their fold"
            )
        self.sync, self.base = DialRules(sync), self.version
        for member in self.members.values():
            member.clock, member.passed_over, member.aware = 0, False, False
            member.iteration = self.version
            if member.blocked is not None:
                member.blocked = (member.blocked[0], self.version)

    def release(self, release: Release) -> None:
        """It goes on."""
        self._not_short()
        if release.version > self.version:
            raise Broken(f"learner {release.learner} may read version {release.version} of {self.version}")
        member = self.members.get(release.learner)
        if member is None:
            self._enters(release)
            return
        gradient = self.gradients.get((release.learner, release.number))
        if gradient is not None and gradient.fate == "published":
            raise Broken(f"learner {release.learner} goes on before its ticket {release.number} is taken")
        if member.blocked is not None and member.blocked[0] <= release.number:
            member.blocked = None
        if not release.read:
            return
        if release.same and self.sums and release.version <= member.last:
            return  # a word; versions may have come unasked meanwhile
        if release.version < member.last:
            raise Broken(f"learner {release.learner} reads version {release.version} after {member.last}")
        if release.same and release.version != member.last:
            raise Broken(
                f"learner {release.learner} is said to have version {release.version}, it has {member.last}"
            )
        if self.sync.lockstep:
            self._check_delay(release, member)
        elif gradient is not None:  # it is taken and not folded
            if self.sync.lead == 0:
                raise Broken(
                    f"learner {release.learner} goes on at version {release.version} before the fold of its gradient"
                )
            if self.quorum() <= len(self.pending) and not self._full:
                raise Broken(
                    f"learner {release.learner} goes on before its gradient is folded, which completed a quorum"
                )
        self._check_slack(release, member)
        member.last, member.aware = release.version, True

    def read(self, learner: int, version: int) -> None:
        """It takes a version over, be it unasked."""
        member = self.members.get(learner)
        if member is not None:
            member.last = max(member.last, version)

    def _enters(self, release: Release) -> None:
        clocks = [self.members[learner].clock for learner in self.active()]
        if self.version < self.warm and self.members:
            raise Broken(
                f"learner {release.learner} begins at version {self.version}, the warm start goes to {self.warm}"
            )
        self.expected.discard(release.learner)
        self.members[release.learner] = Member(release.version, min(clocks, default=0))

    def _check_delay(self, release: Release, member: Member) -> None:
        number, iteration = member.took
        needed = max(self.base, iteration + 1 - self.sync.delay)
        if number == release.number and release.version != needed:
            raise Broken(
                f"learner {release.learner} reads version {release.version} after its iteration {iteration}, "
                f"{self.sync} says {needed}"
            )

    def _check_slack(self, release: Release, member: Member) -> None:
        """Compare the clocks that were counted here, where they are certain."""
        if self.sync.slack is None or member.passed_over or release.same:
            return
        others = [self.members[each].clock for each in self.active() if not self.members[each].passed_over]
        if others and member.clock > min(others) + self.sync.slack:
            raise Broken(
                f"learner {release.learner} starts step {member.clock} under {self.sync}, the slowest has made {min(others)}"
            )

    # -- after every event -------------------------------------------------------------------------------

    def due(self) -> None:
        """No update that could be made is missing."""
        self._not_short()
        self._uncrossing = False
        if self.expected or self._full:
            return
        if self.sync.lockstep:
            ready = {key[0] for key in self.pending if self.gradients[key].iteration == self.version}
            if ready and not self.active() - ready:
                raise Broken(f"all have published for version {self.version + 1}, and it is not made")
        elif self.pending and len(self.pending) >= self.quorum():
            raise Broken(
                f"{len(self.pending)} gradients wait, the quorum of version {self.version + 1} is {self.quorum()}"
            )
        self._check_blocked()

    def _check_blocked(self) -> None:
        """Refuse a learner that waits although its version exists and it is not too far ahead."""
        if self.finishing:
            return
        clocks = [self.members[learner].clock for learner in self.active()]
        for learner, member in self.members.items():
            if member.blocked is None or member.blocked[1] > self.version:
                continue
            if self.sync.slack is not None:
                if any(each.passed_over for each in self.members.values()):
                    continue
                if member.clock > min(clocks, default=0) + self.sync.slack:
                    continue
            raise Broken(
                f"learner {learner} waits with ticket {member.blocked[0]} at version {self.version}, "
                f"{self.sync} lets it go on"
            )

    def bounded(self, slots: int, *, promised: bool) -> None:
        """Nobody has more gradients under way than slots; a promise leaves its slot when it is taken."""
        held: dict[int, int] = {}
        lie = self.sync.lockstep and not promised  # until their fold; else they are added to a mean
        for (learner, _), gradient in self.gradients.items():
            if gradient.fate == "published" or lie:
                held[learner] = held.get(learner, 0) + 1
        for learner, count in held.items():
            if count > slots:
                raise Broken(f"learner {learner} has {count} gradients under way, and {slots} slots")

    def over(self) -> None:
        """The end of the run: nothing that was taken is left."""
        if self.pending:
            raise Broken(f"the run is over, and {len(self.pending)} gradients were taken and never folded")
        published = [key for key, gradient in self.gradients.items() if gradient.fate == "published"]
        if waiting := [key for key in published if key[0] in self.members]:
            raise Broken(f"the run is over, and tickets {waiting} were neither taken nor dropped")

    def words(self) -> str:
        """The state of the parties."""
        members = ", ".join(
            f"{learner}: version {m.last}, clock {m.clock}" + (" (rests)" if m.resting is not None else "")
            for learner, m in sorted(self.members.items())
        )
        return f"table {self.number} at version {self.version} under {self.sync}; taken {self.pending}; members {members}"
