"""When gradients become an update (M3): quorums in lockstep, or first come.

`Folding` collects the gradients that were taken into the sequence and says which of them make the next
update. It knows nothing of tensors: a gradient is a `Ticket` with its stamp and its count of examples.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from syncline.dial import Sync
from syncline.protocols.membership import Members


@dataclass(slots=True, unsafe_hash=True)
class Ticket:
    """One published gradient, as the sequence sees it."""

    learner: int
    rank: int
    number: int  # counts what this learner sent to this table
    stamp: int  # version of the weights it was computed on
    step: int  # the learner's own step
    count: int  # examples in it
    iteration: int = 0  # lockstep: which fold it belongs to; as the weight, set when it is taken
    weight: float = 1.0  # what it is damped by in the mean of its fold
    silent: bool = False  # its learner went on and reads when it wants to


class Folding:
    """Collects tickets until a quorum is there."""

    def __init__(self, sync: Sync) -> None:
        self._sync = sync
        self._lockstep, self._waits = sync.lockstep, sync.waits
        self._quorums: dict[int, int] = {}  # by the learners that count
        self._rounds: dict[int, dict[int, Ticket]] = defaultdict(dict)
        self._queue: list[Ticket] = []

    def add(self, ticket: Ticket) -> None:
        if self._lockstep:
            self._rounds[ticket.iteration][ticket.learner] = ticket
        else:
            self._queue.append(ticket)

    def ready(self, version: int, members: Members) -> list[Ticket]:
        """The tickets of the next update, in the order of the fold; empty if the quorum is not there.

        Who rests is not counted where others would wait for it.
        """
        if not members.started:
            return []
        if self._lockstep:
            tickets = self._rounds.get(version)
            if not tickets or len(tickets) < members.present:
                return []
            for member in members.live.values():
                if member.learner not in tickets and not member.resting:
                    return []
            return self.rest(version)
        if not self._queue:
            return []
        return self.rest(version) if len(self._queue) >= self.quorum(members) else []

    def quorum(self, members: Members) -> int:
        """Return the number of gradients that the next update needs."""
        present = members.present if self._waits else len(members.live)
        quorum = self._quorums.get(present)
        if quorum is None:
            quorum = self._quorums[present] = max(1, self._sync.quorum(max(1, present), members.initial))
        return quorum

    def rest(self, version: int) -> list[Ticket]:
        """Everything that could go into the next update, complete or not."""
        if self._lockstep:
            return sorted(self._rounds.pop(version, {}).values(), key=lambda ticket: ticket.rank)
        tickets, self._queue = self._queue, []
        return tickets

    def unfolded(self, learner: int) -> list[int]:
        """Numbers of its tickets that wait for their update."""
        rounds = [tickets[learner] for tickets in self._rounds.values() if learner in tickets]
        return [ticket.number for ticket in (*rounds, *self._queue) if ticket.learner == learner]

    def missing(self, version: int, members: Members) -> list[int]:
        """Ranks whose gradient the next lockstep update still waits for."""
        tickets = self._rounds.get(version, {})
        return sorted(member.rank for member in members.active() if member.learner not in tickets)

    @property
    def pending(self) -> int:
        return len(self._queue) + sum(len(tickets) for tickets in self._rounds.values())


def leader(tickets: list[Ticket]) -> Ticket:
    """Whose group options the fold uses: the learner furthest along, then the lowest rank (M4)."""
    return min(tickets, key=lambda ticket: (-ticket.step, ticket.rank))
