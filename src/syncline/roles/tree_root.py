"""The leading shard's side of a tree: sums come in, each with the gradients that are in it (M14).

To the shards a node is who publishes: a sum is one gradient of its. Not responsible for deciding anything: `protocols.sums` and the
sequences do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from syncline.messages import log
from syncline.messages.to_leader import Sum
from syncline.messages.to_tree_nodes import Counted, Refused, Taken
from syncline.ports import ServerPort
from syncline.protocols.folding import Ticket
from syncline.protocols.sequence import Sequence
from syncline.protocols.tree_up import Intake
from syncline.protocols.tree_up import Sum as Tickets


@dataclass(slots=True)
class Body:
    """What the shards see of a sum."""

    node: int
    number: int
    options: int
    full: bool
    examples: int
    rank: int  # the lowest in it
    told: bool = False  # the log has it


class TreeRoot:
    """Sums of all tables."""

    def __init__(
        self, port: ServerPort, ranks: Mapping[int, int], append: Callable[[log.OfTable], None]
    ) -> None:
        self._port, self._ranks, self._log = port, ranks, append
        self._intakes: dict[int, Intake] = {}
        self._sequences: dict[int, Sequence] = {}
        self._bodies: dict[tuple[int, int, int], Body] = {}  # by table, learner, number
        self._early: list[tuple[int, Sum]] = []  # before all initial learners had started
        self._counted: dict[int, tuple[bool, frozenset[int]]] = {}

    def add(self, table: int, sequence: Sequence) -> None:
        self._intakes[table], self._sequences[table] = Intake(sequence), sequence

    def arrive(self, node: int, sum_: Sum) -> list[Ticket] | None:
        """The tickets, if the sum counts; else its node hears why not."""
        if not self._sequences[sum_.table].members.started:
            self._early.append((node, sum_))
            return None
        tickets = [
            Ticket(
                learner,
                self._ranks.get(learner, -1),
                each.number,
                each.stamp,
                each.step,
                each.examples,
                sum_.iteration,
                silent=each.silent,
            )
            for learner, each in sum_.gradients
        ]
        verdict = self._intakes[sum_.table].judge(tickets)
        if not verdict.taken:
            refused = Refused(sum_.table, sum_.number, verdict.without, verdict.counted)
            self._port.tell_nodes(refused, node)
            return None
        self._intakes[sum_.table].take(Tickets(node, sum_.number, tuple(tickets)))
        self._port.tell_nodes(Taken(sum_.table, sum_.number), node)
        examples, rank = sum(t.count for t in tickets), min(t.rank for t in tickets)
        body = Body(node, sum_.number, sum_.options, sum_.full, examples, rank)
        for ticket in tickets:
            self._bodies[sum_.table, ticket.learner, ticket.number] = body
        return tickets

    def early(self) -> list[tuple[int, Sum]]:
        """What came before the start, once all have started."""
        if not self._early or not all(each.members.started for each in self._sequences.values()):
            return []
        early, self._early = self._early, []
        return early

    def lose(self, node: int | None) -> None:
        """What it sent before the start is gone with it."""
        self._early = [(each, sum_) for each, sum_ in self._early if each != node]

    def named(self, table: int, learner: int, number: int) -> tuple[int, int]:
        """The node and number of the sum that it is in."""
        body = self._bodies[table, learner, number]
        return body.node, body.number

    def take(self, table: int, ticket: Ticket) -> None:
        """The shards hear of a sum once, with the first of its tickets."""
        body = self._bodies[table, ticket.learner, ticket.number]
        if not body.told:
            body.told = True
            what = (body.node, body.number, body.options, body.full, body.examples, body.rank)
            self._log(log.Take(table, *what, ticket.iteration, False, 1.0))

    def done(self, table: int, ticket: Ticket) -> None:
        """Folded, or dropped."""
        self._bodies.pop((table, ticket.learner, ticket.number), None)

    def recount(self, *, anew: bool = False) -> None:
        """Nodes hear whom to wait for, where that has changed."""
        if anew:
            self._counted.clear()
        for table, intake in self._intakes.items():
            sequence = self._sequences[table]
            lockstep = sequence.sync.lockstep
            active = intake.active({each: (each,) for each in sequence.members.live}) if lockstep else {}
            now = (lockstep, frozenset(active))
            if self._counted.get(table) != now:
                self._counted[table] = now
                self._port.tell_nodes(Counted(table, lockstep, active))
