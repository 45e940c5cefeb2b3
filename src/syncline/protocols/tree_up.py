"""Gradients on their way up a tree (M14): a node adds what its children published and passes one sum on, with its tickets.

Events in, decisions out, the same for leaves and the nodes above them; `Intake` is the root's side. Nothing is taken from a child
for good before the root has taken it, so whatever is lost or refused on the way is sent again by who made it. Not responsible
for the numbers that are added, nor for when gradients become an update (`sequence`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from syncline.protocols.folding import Ticket
from syncline.protocols.sequence import Sequence

Key = tuple[int, int]  # learner, number of its ticket
NO_ITERATION = -1  # under a free dial: in lockstep the root refuses it, and says what it is


@dataclass(frozen=True, slots=True)
class Count:
    """Rule by which nodes form sums, as the leader decides.

    `number` rises when sums that were formed before are refused: because a learner is active that was not, or because sums are formed
    in another way. `lockstep`: a sum holds one iteration of all `active` learners (for a node: children), by the iteration each is at.
    `equal`: the dial folds gradients one by one, so each has the same weight in a sum and its number of examples plays no part.
    """

    number: int
    lockstep: bool
    equal: bool
    active: Mapping[int, int] = field(default_factory=dict)


def weight(tickets: Collection[Ticket], *, equal: bool) -> int:
    """Return what these gradients weigh together in a mean: their number, or their examples."""
    return len(tickets) if equal else sum(ticket.count for ticket in tickets)


@dataclass(frozen=True, slots=True)
class Sum:
    """What one sender has under way: the tickets of all that is in it, and which of its children's sums that were."""

    sender: int  # a node, or a learner at its leaf
    number: int  # counts what the sender sent
    tickets: tuple[Ticket, ...]
    parts: tuple[tuple[int, int], ...] = ()  # (child, number of its sum), in the order they are added
    counted: int = 0  # number of the `Count` it was formed under, or of an earlier one that a part was
    equal: bool = False  # as in that `Count`

    @property
    def iteration(self) -> int:
        """Of a sum in lockstep."""
        return self.tickets[0].iteration

    @property
    def keys(self) -> frozenset[Key]:
        return frozenset((ticket.learner, ticket.number) for ticket in self.tickets)


def of_one(ticket: Ticket) -> Sum:
    """A learner's gradient."""
    return Sum(ticket.learner, ticket.number, (ticket,))


@dataclass(frozen=True, slots=True)
class Up:
    """To the node above: add these parts, in this order."""

    sum: Sum


@dataclass(frozen=True, slots=True)
class SumDone:
    """To a child: its sum is taken by the root, or never will be; what it lies in is free."""

    child: int
    number: int


@dataclass(frozen=True, slots=True)
class Again:
    """To a child: its sum was refused; make it anew without these, and with iterations counted so."""

    child: int
    number: int
    without: frozenset[Key] = frozenset()
    counted: Mapping[int, int] = field(default_factory=dict)


Passed = Up | SumDone | Again


class Node:
    """One node's way up: at most one sum is under way until the root has taken or refused it.

    It sends nothing before the leader's first `Count`, which comes when all initial learners have started. In lockstep a sum holds
    one iteration of all children that the leader last counted as active (of a node: that anybody below it is); otherwise what has
    come when the way is free. `leaf`: children are learners.
    """

    def __init__(self, node: int, *, leaf: bool) -> None:
        self.node, self._leaf, self._lockstep = node, leaf, False
        self._held: dict[int, deque[Sum]] = {}  # child -> what came and is not under way
        self._gone: set[int] = set()  # children that are lost
        self._number = 0
        self._under_way: tuple[Sum, list[Sum]] | None = None  # and the parts it was made of
        self._next: dict[int, int] = {}  # learner -> iteration of what it publishes next
        self._count: Count | None = None  # the leader's last
        self._active: set[int] = set()  # of its children; those that were lost since are not among them
        self._sent: dict[int, int] = {}  # child -> the iteration after the last that is on its way

    @property
    def free(self) -> bool:
        return self._under_way is None

    @property
    def held(self) -> list[Sum]:
        """What is not under way."""
        return [each for queue in self._held.values() for each in queue]

    # -- what the leader says --------------------------------------------------------------------------------

    def count(self, count: Count) -> list[Passed]:
        """Form sums by this count from now on; active are its children, each with the iteration it is at."""
        active = count.active
        self._count, self._active = count, set(active)
        self._lockstep, begins = count.lockstep, count.lockstep and not self._lockstep
        if begins:
            under_way = self._under_way[1] if self._under_way is not None else []
            self._next, self._sent = {}, {part.sender: part.iteration + 1 for part in under_way}
        for child, iteration in active.items():
            self._next[child] = max(self._next.get(child, 0), iteration)
            self._sent[child] = max(self._sent.get(child, 0), iteration)
        if begins and self._leaf:
            self._renumber({child: self._next.get(child, 0) for child, queue in self._held.items() if queue})
        return self._send()

    # -- what children send ----------------------------------------------------------------------------------

    def publish(self, sum_: Sum) -> list[Passed]:
        """A child has something for the root."""
        if sum_.sender in self._gone:
            return []
        if self._leaf:
            (ticket,) = sum_.tickets
            iteration = NO_ITERATION
            if self._lockstep:
                iteration = self._next.get(ticket.learner, ticket.stamp)
                self._next[ticket.learner] = iteration + 1
            sum_ = replace(sum_, tickets=(replace(ticket, iteration=iteration),))
        self._held.setdefault(sum_.sender, deque()).append(sum_)
        return self._send()

    def lose(self, child: int) -> list[Passed]:
        """A child is gone: what is not under way goes with it; of the rest the root decides."""
        self._gone.add(child)
        self._held.pop(child, None)
        self._active.discard(child)
        return self._send()

    def welcome(self, child: int) -> None:
        """It came from another node, or is new."""
        self._gone.discard(child)

    # -- what the root answers -------------------------------------------------------------------------------

    def taken(self, number: int) -> list[Passed]:
        """The root has taken the sum that was under way."""
        if self._under_way is None or self._under_way[0].number != number:
            return []
        _, parts = self._under_way
        self._under_way = None
        return [*(SumDone(part.sender, part.number) for part in parts), *self._send()]

    def again(
        self, number: int, without: frozenset[Key] = frozenset(), counted: Mapping[int, int] | None = None
    ) -> list[Passed]:
        """The root refuses the sum: some of it counts already, is of nobody any more, or is of other iterations.

        Its parts wait again, are no more, or are made anew by the child.
        """
        if self._under_way is None or self._under_way[0].number != number:
            return []
        _, parts = self._under_way
        self._under_way = None
        out: list[Passed] = []
        for part in reversed(parts):
            if part.keys - without:  # else it has nothing more of that iteration
                self._sent[part.sender] = min(self._sent.get(part.sender, 0), max(0, part.iteration))
            if part.sender in self._gone:
                continue
            if self._leaf and part.keys & without:
                out.append(SumDone(part.sender, part.number))
            elif not self._leaf and (part.keys & without or counted):
                out.append(Again(part.sender, part.number, without, counted or {}))
            else:
                self._held.setdefault(part.sender, deque()).appendleft(part)
        if self._leaf and counted:
            self._renumber(counted)
        return [*out, *self._send()]

    def moved(self, taken: Mapping[int, int]) -> list[Passed]:
        """The node above is another: what was under way counts where the root says so, else it goes again."""
        if self._under_way is None:
            return []
        sum_ = self._under_way[0]
        if all(ticket.number <= taken.get(ticket.learner, -1) for ticket in sum_.tickets):
            return self.taken(sum_.number)
        return self.again(sum_.number)

    def _renumber(self, counted: Mapping[int, int]) -> None:
        for learner, iteration in counted.items():
            queue = self._held.get(learner, deque())
            for index, sum_ in enumerate(queue):
                queue[index] = replace(
                    sum_, tickets=tuple(replace(ticket, iteration=iteration) for ticket in sum_.tickets)
                )
                iteration += 1
            self._next[learner] = iteration
            self._sent[learner] = min(self._sent.get(learner, iteration), counted[learner])

    # -- the way up ------------------------------------------------------------------------------------------

    def _send(self) -> list[Passed]:
        count = self._count
        if count is None or self._under_way is not None or not any(self._held.values()):
            return []
        parts: list[Sum] = []
        seen: set[Key] = set()
        for part in self._round() if self._lockstep else self.held:
            if not seen & part.keys:  # who lost its leaf may have come a second time, by another
                parts.append(part)
                seen |= part.keys
        if not parts:
            return []
        for part in parts:
            self._held[part.sender].remove(part)
            self._sent[part.sender] = max(self._sent.get(part.sender, 0), part.iteration + 1)
        parts.sort(key=lambda part: (min(ticket.rank for ticket in part.tickets), part.number))
        tickets = tuple(ticket for part in parts for ticket in part.tickets)
        self._number += 1
        keys = tuple((part.sender, part.number) for part in parts)
        counted = min(count.number, *(count.number if self._leaf else part.counted for part in parts))
        sum_ = Sum(self.node, self._number, tickets, keys, counted, count.equal)
        self._under_way = (sum_, parts)
        return [Up(sum_)]

    def _round(self) -> list[Sum]:
        """The oldest iteration, if all that are waited for are there."""
        heads = [queue[0] for queue in self._held.values() if queue]
        iteration = min(part.iteration for part in heads)
        for each in self._active:
            if not self._held.get(each) and self._sent.get(each, 0) <= iteration:
                return []  # whoever has a later one here has none of this iteration
        return [part for part in heads if part.iteration == iteration]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The root's answer to a sum; it took it where nothing is wrong with it."""

    without: frozenset[Key] = frozenset()
    counted: Mapping[int, int] = field(default_factory=dict)

    @property
    def taken(self) -> bool:
        return not self.without and not self.counted


class Intake:
    """The root's side: a sum goes into the sequence whole, once, only if all of it counts and it was formed by the last `Count`.

    So in lockstep there is one sum of each node in an update, however late a node hears that another learner is active: bits repeat.
    """

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.taken: dict[int, int] = {}  # learner -> its last ticket that was taken
        self._count: Count | None = None  # that nodes were last told

    def weight(self, tickets: Collection[Ticket]) -> int:
        """Return what a sum of these, taken now, weighs in the mean of its update."""
        return weight(tickets, equal=self._count is not None and self._count.equal)

    def count(self, *, anew: bool = False) -> Count | None:
        """Return the rule for nodes if it has changed or is requested: None before all initial learners have started."""
        sequence, last = self.sequence, self._count
        if not sequence.members.started:
            return None
        lockstep = sequence.sync.lockstep
        equal = not lockstep and sequence.quorum == 1
        active = self.active({each: (each,) for each in sequence.members.live}) if lockstep else {}
        number = 1
        if last is not None:
            same = (last.lockstep, last.equal) == (lockstep, equal)
            if same and active.keys() == last.active.keys() and not anew:
                return None
            number = last.number + (not same or not active.keys() <= last.active.keys())
        self._count = Count(number, lockstep, equal, active)
        return self._count

    def arrive(self, tickets: Collection[Ticket], counted: int) -> Verdict:
        """Judge a sum that was formed under the count of this number; what is taken goes into the sequence next."""
        live = self.sequence.members.live
        stale = self._count is None or counted != self._count.number
        bad = frozenset(
            (ticket.learner, ticket.number)
            for ticket in tickets
            if ticket.learner not in live or ticket.number <= self.taken.get(ticket.learner, -1)
        )
        iterations: dict[int, int] = {}
        if stale or self.sequence.sync.lockstep:
            iterations = self.sequence.iterations(each.learner for each in tickets if each.learner in live)
            twice = len(iterations) < len(tickets)
            wrong = any(ticket.iteration != iterations.get(ticket.learner) for ticket in tickets)
            if not (bad or stale or twice or wrong or len(set(iterations.values())) > 1):
                iterations = {}
        verdict = Verdict(bad, iterations)
        if verdict.taken:
            self.taken |= {ticket.learner: ticket.number for ticket in tickets}
        return verdict

    def active(self, below: Mapping[int, Iterable[int]]) -> dict[int, int]:
        """Children of a node (with the learners below each) that it waits for in lockstep, and the iteration each is at."""
        live = self.sequence.members.live
        counted = {
            child: self.sequence.iterations(
                each for each in learners if each in live and not live[each].resting
            ).values()
            for child, learners in below.items()
        }
        return {child: min(iterations) for child, iterations in counted.items() if iterations}
