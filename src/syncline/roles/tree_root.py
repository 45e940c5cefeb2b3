"""The leading shard's side of a tree: sums come in, each with the gradients that are in it (M14).

To the shards a node is who publishes: a sum is one gradient of its. Not responsible for deciding anything: `protocols.tree_up` and
the sequences do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from syncline.messages import log
from syncline.messages.to_leader import Sum
from syncline.messages.to_tree_nodes import Counted, Refused, Taken
from syncline.ports import ServerPort
from syncline.protocols.folding import Ticket
from syncline.protocols.sequence import Sequence
from syncline.protocols.tree_up import Intake


class TreeRoot:
    """Sums of all tables."""

    def __init__(
        self, port: ServerPort, ranks: Mapping[int, int], append: Callable[[log.OfTable], None]
    ) -> None:
        self._port, self._ranks, self._log = port, ranks, append
        self._intakes: dict[int, Intake] = {}
        # what the shards see of the sum that a gradient is in, by table, learner, number
        self._takes: dict[tuple[int, int, int], log.Take] = {}
        self._told: log.Take | None = None  # the last that the log has

    def add(self, table: int, sequence: Sequence) -> None:
        self._intakes[table] = Intake(sequence)

    def arrive(self, node: int, sum_: Sum) -> list[Ticket] | None:
        """The tickets, if the sum counts; else its node hears why not."""
        table, intake = sum_.table, self._intakes[sum_.table]
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
        verdict = intake.arrive(tickets, sum_.counted)
        if not verdict.taken:
            self._port.tell_nodes(Refused(table, sum_.number, verdict.without, verdict.counted), node)
            return None
        self._port.tell_nodes(Taken(table, sum_.number), node)
        take = log.Take(
            table,
            node,
            sum_.number,
            sum_.options,
            sum_.full,
            intake.weight(tickets),
            min(ticket.rank for ticket in tickets),
            sum_.iteration,
            alone=False,
            weight=1.0,
        )
        self._takes |= {(table, ticket.learner, ticket.number): take for ticket in tickets}
        return tickets

    def named(self, table: int, learner: int, number: int) -> tuple[int, int]:
        """The node and number of the sum that it is in."""
        take = self._takes[table, learner, number]
        return take.learner, take.number

    def take(self, table: int, ticket: Ticket) -> None:
        """The shards hear of a sum once, with the first of its tickets."""
        take = self._takes[table, ticket.learner, ticket.number]
        if take is not self._told:
            self._told = take
            self._log(take)

    def done(self, table: int, ticket: Ticket) -> None:
        """Folded, or dropped."""
        self._takes.pop((table, ticket.learner, ticket.number), None)

    def recount(self, *, anew: bool = False) -> None:
        """Tell nodes how to form sums, where that has changed."""
        for table, intake in self._intakes.items():
            if (count := intake.count(anew=anew)) is not None:
                self._port.tell_nodes(Counted(table, count))
