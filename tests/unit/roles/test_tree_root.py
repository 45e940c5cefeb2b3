"""Sums at the root of a tree (M14): what nodes hear, and what the log has of them."""

from __future__ import annotations

from typing import Any

from syncline.dial import Sync
from syncline.messages import log
from syncline.messages.to_leader import Sum
from syncline.messages.to_tree_nodes import Counted, Refused, Taken
from syncline.protocols.sequence import Sequence
from syncline.protocols.tree_up import Count
from syncline.roles.tree_root import TreeRoot
from tests.unit.roles.doubles import gradient, server_port, told

LEAF, OTHER = 20, 21


class Root:
    def __init__(self, dial: str = "hardsync", learners: int = 3) -> None:
        ranks = {learner: 10 + learner for learner in range(learners)}
        self.port, self.log = server_port(), list[log.OfTable]()
        self.sequence = Sequence(Sync.parse(dial), initial=ranks, sums=True)
        self.ranks = ranks
        self.root = TreeRoot(self.port, ranks, self.log.append)
        self.root.add(0, self.sequence)

    def start(self, *learners: int) -> None:
        for learner in learners:
            self.sequence.join(learner, self.ranks[learner], 0)
        self.root.recount()

    def heard(self) -> list[Any]:
        return told(self.port.tell_nodes)


def sum_of(*learners: int, number: int = 1, iteration: int = 0, counted: int = 1) -> Sum:
    made = tuple((each, gradient(number, examples=4 + each)) for each in learners)
    return Sum(0, number, iteration, made, 7, False, counted)


def test_a_sum_that_counts_is_one_gradient_of_its_node_in_the_log() -> None:
    crew = Root()
    crew.start(0, 1, 2)
    tickets = crew.root.arrive(LEAF, sum_of(1, 2)) or []
    assert [(each.learner, each.rank, each.count) for each in tickets] == [(1, 11, 5), (2, 12, 6)]
    assert crew.heard()[1:] == [(Taken(0, 1), LEAF)]
    for ticket in tickets:
        crew.root.take(0, ticket)
        assert crew.root.named(0, ticket.learner, ticket.number) == (LEAF, 1)
    assert crew.log == [log.Take(0, LEAF, 1, 7, False, 11, 11, 0, alone=False, weight=1.0)]


def test_two_sums_are_two_in_the_log_though_they_are_taken_in_turn() -> None:
    crew = Root("async")
    crew.start(0, 1, 2)
    first, second = (crew.root.arrive(node, sum_of(each)) or [] for node, each in ((LEAF, 0), (OTHER, 1)))
    crew.root.take(0, first[0]), crew.root.take(0, second[0])
    assert [(take.learner, take.number) for take in crew.log] == [(LEAF, 1), (OTHER, 1)]  # type: ignore[union-attr]


def test_a_sum_that_counts_for_nothing_goes_back_with_the_reason() -> None:
    crew = Root(learners=2)
    crew.start(0, 1)
    crew.heard()
    crew.sequence.leave(1)
    assert crew.root.arrive(LEAF, sum_of(0, 1)) is None
    assert crew.heard() == [(Refused(0, 1, frozenset({(1, 1)}), {0: 0}), LEAF)]
    assert crew.root.arrive(LEAF, sum_of(0, number=2, iteration=3)) is None
    assert crew.heard() == [(Refused(0, 2, frozenset(), {0: 0}), LEAF)]
    assert crew.log == []


def test_a_sum_that_was_formed_without_a_learner_that_is_active_now_goes_back() -> None:
    crew = Root(learners=2)
    crew.start(0, 1)
    crew.sequence.rest(1, 1), crew.root.recount()
    crew.sequence.resume(1), crew.root.recount()
    assert [each.count.number for each in crew.heard()] == [1, 1, 2]
    assert crew.root.arrive(LEAF, sum_of(0, counted=1)) is None
    assert crew.heard() == [(Refused(0, 1, frozenset(), {0: 0}), LEAF)]
    assert crew.root.arrive(LEAF, sum_of(0, 1, counted=2)) is not None


def test_gradients_that_flat_servers_would_fold_one_by_one_weigh_the_same_whatever_their_examples() -> None:
    crew = Root("softsync:2", learners=4)
    crew.start(0, 1, 2, 3)
    for counted, weight in ((1, 4 + 5), (2, 2)):
        tickets = crew.root.arrive(LEAF, sum_of(0, 1, number=counted, counted=counted)) or []
        crew.root.take(0, tickets[0])
        assert crew.log.pop().examples == weight  # type: ignore[union-attr]
        crew.sequence.leave(2), crew.root.recount()  # a quorum of ⌊3/2⌋ = 1
    assert [each.count.equal for each in crew.heard() if isinstance(each, Counted)] == [False, True]


def test_nodes_hear_how_to_form_sums_when_all_have_started_and_when_that_changes() -> None:
    crew = Root()
    crew.start(0, 1)
    assert crew.heard() == []
    crew.start(2)
    crew.root.recount()
    assert crew.heard() == [Counted(0, Count(1, True, False, {0: 0, 1: 0, 2: 0}))]
    crew.sequence.leave(1)
    crew.root.recount()
    assert crew.heard() == [Counted(0, Count(1, True, False, {0: 0, 2: 0}))]
    crew.root.recount(anew=True)  # others are below them
    assert len(crew.heard()) == 1
    crew.sequence.change(Sync.parse("async"), 1)
    crew.root.recount()
    assert crew.heard() == [Counted(0, Count(2, False, True))]
