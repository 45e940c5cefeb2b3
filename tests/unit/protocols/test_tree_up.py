"""Trees of servers (R7, M14): gradients through trees of any shape, in any order of messages, with losses.

`Forest` carries messages between learners, nodes and root one at a time, in an order that a seed draws; what a sum is made of travels
beside its tickets, so that both can be compared wherever a sum arrives.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from syncline.dial import Sync
from syncline.protocols.folding import Ticket
from syncline.protocols.sequence import Change, Decision, Fold, Sequence, Take
from syncline.protocols.tree_shape import ROOT, Tree
from syncline.protocols.tree_up import Again, Count, Intake, Node, Passed, Sum, SumDone, Up, of_one
from syncline.protocols.waiting import Release

EPOCH = 3  # iterations: those that rest have data again for the next, and none begins it before
Body = Counter[tuple[int, int]]  # what a sum really holds
DIALS = ("hardsync", "delayed:1", "delayed:2", "softsync:1", "softsync:2", "async", "ssp:1")


@dataclass
class Learner:
    id: int
    rank: int
    steps: int  # left to make
    leaf: int  # as it has heard
    number: int = 0
    made: int = 0
    stamp: int = 0
    waits: bool = True  # for the release of its last ticket
    started: bool = False
    rests: bool = False
    iteration: int = 0  # of its next gradient, in lockstep
    dead: bool = False
    left: bool = False
    drafts: dict[int, Ticket] = field(default_factory=dict)  # published, not known to be taken


class Forest:
    """Everybody, and the messages between them."""

    def __init__(self, seed: int, dial: str, learners: int, fan_in: int, steps: int) -> None:
        self.random, self.sync = random.Random(seed), Sync.parse(dial)
        self.tree = Tree(range(1, learners + 1), fan_in)
        self.learners = {
            each: Learner(each, each - 1, self.random.randint(1, steps), self.tree.leaf[each])
            for each in self.tree.leaf
        }
        self.nodes = {node: Node(node, leaf=node in self.tree.leaves) for node in self.tree.nodes}
        self.sequence = Sequence(
            self.sync, initial={each.id: each.rank for each in self.learners.values()}, sums=True
        )
        self.intake = Intake(self.sequence)
        self.links: dict[tuple[Any, Any], deque[Any]] = {}
        self.bodies: dict[int, dict[tuple[int, int], Body]] = {node: {} for node in self.nodes}
        self.published: dict[tuple[int, int], Ticket] = {}
        self.taken: Body = Counter()
        self.folded: Body = Counter()
        self.sums: list[frozenset[tuple[int, int]]] = []  # taken
        self.sigmas: Counter[int] = Counter()
        self.parts: dict[tuple[int, int], tuple[tuple[int, int], ...]] = {}  # by node and number of its sum
        self.formed: Counter[tuple[int, int]] = Counter()  # iteration and node -> sums of it that count
        self.released: dict[int, Release] = {}

    # -- links: those between parent and child keep their order ---------------------------------------------

    def send(self, source: Any, target: Any, what: Any) -> None:
        self.links.setdefault((source, target), deque()).append(what)

    def up_of(self, node: int) -> int:
        return self.tree.parent[node]

    def down(self, target: tuple[str, int], what: Any) -> None:
        """Along the tree, from the root."""
        kind, which = target
        if kind == "learner" and which not in self.tree.leaf:
            return
        route = self.tree.route(which) if kind == "learner" else self.above(which)
        path: list[Any] = [("node", node) for node in reversed(route)] + [target] * (kind == "learner")
        self.send("root", path[0], ("relay", path[1:], what))

    def above(self, node: int) -> list[int]:
        nodes = [node]
        while (node := self.tree.parent[node]) != ROOT:
            nodes.append(node)
        return nodes

    def deliver(self, link: tuple[Any, Any]) -> None:
        what = self.links[link].popleft()
        target = link[1]
        if target == "root":
            self.arrive(*what)
        elif what[0] == "relay" and what[1]:
            self.send(target, what[1][0], ("relay", what[1][1:], what[2]))
        elif target[0] == "learner":
            self.tell(self.learners[target[1]], what[-1] if what[0] == "relay" else what)
        elif target[1] in self.nodes:
            self.at_node(target[1], what[-1] if what[0] == "relay" else what)

    def at_node(self, name: int, what: Any) -> None:
        node = self.nodes[name]
        if what[0] == "sum":
            _, sum_, body = what
            assert body == Counter(sum_.keys), "the sum holds what its tickets say"
            self.bodies[name][sum_.sender, sum_.number] = body
            self.pass_on(name, node.publish(sum_))
        elif what[0] == "count":
            self.pass_on(name, node.count(what[1]))
        elif what[0] == "taken":
            self.pass_on(name, node.taken(what[1]))
        elif what[0] == "again":
            self.pass_on(name, node.again(*what[1:]))
        elif what[0] == "lose":
            self.pass_on(name, node.lose(what[1]))

    def pass_on(self, name: int, passed: Iterable[Passed]) -> None:
        leaf = name in self.tree.leaves
        for each in passed:
            if isinstance(each, Up):
                body = sum((self.bodies[name][part] for part in each.sum.parts), Counter())
                self.parts[name, each.sum.number] = each.sum.parts
                above = self.up_of(name)
                self.send(
                    ("node", name),
                    "root" if above == ROOT else ("node", above),
                    (each.sum, body, name) if above == ROOT else ("sum", each.sum, body),
                )
            else:
                child = ("learner" if leaf else "node", each.child)
                if isinstance(each, SumDone):
                    what: Any = ("taken", each.number)
                else:
                    assert isinstance(each, Again)
                    what = ("again", each.number, each.without, each.counted)
                self.send(("node", name), child, what)

    # -- the root ------------------------------------------------------------------------------------------

    def arrive(self, sum_: Sum, body: Body, sender: int) -> None:
        assert body == Counter(sum_.keys)
        if sender not in self.nodes:
            return  # lost before this came: nobody hears of it
        verdict = self.intake.arrive(sum_.tickets, sum_.counted)
        decisions = self.sequence.gradient(*sum_.tickets) if verdict.taken else []
        answer = ("taken", sum_.number)
        if verdict.taken:
            self.sums.append(sum_.keys)
            self.taken += body
            self.form(sum_.iteration, sender, sum_.number)
        else:
            answer = ("again", sum_.number, verdict.without, verdict.counted)  # type: ignore[assignment]
        self.send("root", ("node", sender), answer)
        self.decide(decisions)

    def form(self, iteration: int, name: int, number: int) -> None:
        self.formed[iteration, name] += 1
        for below, of_below in self.parts[name, number] if name not in self.tree.leaves else ():
            self.form(iteration, below, of_below)

    def decide(self, decisions: list[Decision]) -> None:
        """Carry out decisions; as in processes, nodes may learn the members after learners have been released."""
        for decision in decisions:
            if isinstance(decision, Fold):
                self.fold(decision)
                if decision.version % EPOCH == 0:
                    decisions += self.resume()
            elif isinstance(decision, Release):
                self.released[decision.learner] = decision
                self.down(("learner", decision.learner), ("release", decision))
            else:
                assert isinstance(decision, Take | Change), decision
        self.recount()

    def resume(self) -> list[Decision]:
        """Give all resting learners data again at once."""
        resting = [each for each in self.learners.values() if each.rests]
        for learner in resting:
            learner.rests, learner.iteration = False, self.sequence.version
        return self.sequence.met([each.id for each in resting])

    def recount(self, *, anew: bool = False) -> None:
        if (count := self.intake.count(anew=anew)) is not None:
            for node in self.nodes:
                active = self.intake.active(self.tree.below(node)) if count.lockstep else {}
                self.down(("node", node), ("count", replace(count, active=active)))

    def fold(self, fold: Fold) -> None:
        keys = {(ticket.learner, ticket.number) for ticket in fold.tickets}
        assert len(keys) == len(fold.tickets)
        assert all(sum_ <= keys or not sum_ & keys for sum_ in self.sums), "whole sums"
        self.folded.update(keys)
        self.sigmas.update(fold.version - 1 - self.published[key].stamp for key in keys)
        if self.sync.lockstep:
            assert len({ticket.learner for ticket in fold.tickets}) == len(keys), "one of each"
        else:
            live = max(1, len(self.sequence.members.live))
            quorum = 1 if self.sync.splits is None else max(1, live // self.sync.splits)
            rate = quorum / live if self.sync.rate == "share" else 1
            assert fold.factor == pytest.approx(rate * len(keys) / quorum)

    # -- learners ------------------------------------------------------------------------------------------

    def tell(self, learner: Learner, what: Any) -> None:
        if learner.dead:
            return
        if what[0] == "taken":
            learner.drafts.pop(what[1], None)
        elif what[0] == "release" and what[1].number == learner.number:
            learner.waits, learner.stamp = False, what[1].version
        elif what[0] == "moved":
            _, taken, release, learner.leaf = what
            for number in [number for number in learner.drafts if number <= taken]:
                del learner.drafts[number]
            for ticket in learner.drafts.values():
                self.hand_in(ticket)
            if release is not None and release.number == learner.number:
                learner.waits, learner.stamp = False, release.version

    def start(self, learner: Learner) -> None:
        learner.started = True
        self.decide(self.sequence.join(learner.id, learner.rank, 0))

    def rest(self, learner: Learner) -> None:
        learner.rests = learner.waits = True
        learner.number += 1
        self.decide(self.sequence.rest(learner.id, learner.number))

    def can_step(self, learner: Learner) -> bool:
        begun = self.sequence.version // EPOCH + 1
        early = self.calm and self.sync.lockstep and learner.iteration >= EPOCH * begun
        return not (learner.dead or learner.waits or early or len(learner.drafts) > 2)

    def can_rest(self, learner: Learner) -> bool:
        return bool(self.calm and learner.steps and not learner.drafts)

    def step(self, learner: Learner) -> None:
        if not learner.steps:
            if not learner.drafts and not learner.left:
                learner.left = True
                self.decide(self.sequence.leave(learner.id))
            return
        learner.steps -= 1
        learner.iteration += 1
        learner.number += 1
        ticket = Ticket(learner.id, learner.rank, learner.number, learner.stamp, learner.made, 1)
        learner.made += 1
        learner.waits = True
        learner.drafts[learner.number] = ticket
        self.published[learner.id, learner.number] = ticket
        self.hand_in(ticket)

    def hand_in(self, ticket: Ticket) -> None:
        leaf = self.learners[ticket.learner].leaf
        body = Counter([(ticket.learner, ticket.number)])
        self.send(("learner", ticket.learner), ("node", leaf), ("sum", of_one(ticket), body))

    # -- losses ----------------------------------------------------------------------------------------------

    def kill(self, learner: Learner) -> None:
        learner.dead = True
        leaf = self.tree.leaf[learner.id]
        self.send("coordinator", ("node", leaf), ("lose", learner.id))
        self.tree.leave(learner.id)
        self.decide(self.sequence.leave(learner.id))

    def lose(self, name: int) -> None:
        """The root has heard of it; from now on it hears nothing from it."""
        above = self.up_of(name)
        moves = self.tree.lose(name)
        leaf = name not in self.tree.parent and self.nodes[name]._leaf
        del self.nodes[name]
        if above != ROOT:
            self.send("coordinator", ("node", above), ("lose", name))
        for link in [link for link in self.links if ("node", name) in link]:
            keep = self.random.randint(0, len(self.links[link])) if link[1] == ("node", above) else 0
            self.links[link] = deque(list(self.links[link])[:keep])
        for child, target in moves.items():
            if leaf:
                self.move_learner(child, target)
            else:
                self.move_node(child)
        self.recount(anew=True)

    def move_learner(self, child: int, leaf: int | None) -> None:
        learner = self.learners[child]
        if learner.dead:
            return
        if leaf is None:
            learner.dead = True
            self.decide(self.sequence.leave(child))
            return
        self.nodes[leaf].welcome(child)
        taken = self.intake.taken.get(child, -1)
        self.recount(anew=True)
        self.send("coordinator", ("learner", child), ("moved", taken, self.released.get(child), leaf))

    def move_node(self, child: int) -> None:
        self.pass_on(child, self.nodes[child].moved(self.intake.taken))
        for learner in self.tree.leaf:  # what was on its way down to them is lost
            if child in self.tree.route(learner) and learner in self.released:
                self.down(("learner", learner), ("release", self.released[learner]))

    # -- to the end ------------------------------------------------------------------------------------------

    def run(self, strikes: list[str], *, calm: bool = False) -> None:
        """`calm`: in lockstep, with learners that rest."""
        self.calm = calm
        while True:
            links = [link for link, queue in self.links.items() if queue]
            able = [each for each in self.learners.values() if self.can_step(each) and not each.left]
            late = [each for each in self.learners.values() if not (each.started or each.dead)]
            resting = [each for each in able if self.can_rest(each)]
            if late and self.random.random() < 0.1:
                self.start(self.random.choice(late))
            elif resting and self.random.random() < 0.05:
                self.rest(self.random.choice(resting))
            elif strikes and self.random.random() < 0.02:
                self.strike(strikes.pop())
            elif links and (not able or self.random.random() < 0.7):
                self.deliver(self.random.choice(sorted(links, key=repr)))
            elif [each for each in able if each.steps or not each.drafts]:
                self.step(self.random.choice([each for each in able if each.steps or not each.drafts]))
            elif late:
                self.start(late[0])
            elif not links and not any(each.rests for each in self.learners.values()):
                break
            elif not links:
                self.decide(self.resume())
        self.decide(self.sequence.finish())

    def strike(self, what: str) -> None:
        alive = [each for each in self.learners.values() if not each.dead and not each.left]
        if what == "learner" and len(alive) > 1:
            self.kill(self.random.choice(alive))
        elif what == "node" and self.nodes:
            self.lose(self.random.choice(sorted(self.nodes)))
        elif what in DIALS:
            decisions = self.sequence.change(Sync.parse(what), 1)
            self.decide(decisions[: decisions.index(Change(1))])  # what was taken is folded as before
            self.sync = Sync.parse(what)
            self.decide(decisions[decisions.index(Change(1)) :])


@settings(max_examples=120, deadline=None)
@given(
    st.integers(0, 10**9),
    st.sampled_from(DIALS),
    st.integers(1, 14),
    st.integers(2, 4),
    st.lists(st.sampled_from(["learner", "node", *DIALS]), max_size=5),
)
def test_nothing_is_lost_nothing_counts_twice_and_every_staleness_is_exact(
    seed: int, dial: str, learners: int, fan_in: int, strikes: list[str]
) -> None:
    """With losses, and while the dial turns."""
    if "softsync:2" in (dial, *strikes) and learners < 2:
        learners = 2
    forest = Forest(seed, dial, learners, fan_in, steps=6)
    forest.run(list(strikes))
    assert all(count == 1 for count in forest.folded.values()), "nothing twice"
    assert forest.folded == forest.taken, "all that was taken is folded"
    safe = {each.id for each in forest.learners.values() if not each.dead}
    missing = [key for key in forest.published if key[0] in safe and key not in forest.folded]
    assert not missing, "nothing of a learner that lives is lost"
    assert all(each.left for each in forest.learners.values() if not each.dead), "nobody waits for ever"
    assert Counter(forest.sequence.clock.histogram) == forest.sigmas, "every staleness is exact"
    event(f"levels {Tree(range(learners), fan_in).depth}")


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 10**9),
    st.sampled_from(["hardsync", "delayed:1", "delayed:2"]),
    st.integers(2, 12),
    st.integers(2, 4),
)
def test_in_lockstep_every_node_forms_one_sum_of_an_iteration(
    seed: int, dial: str, learners: int, fan_in: int
) -> None:
    """Keep the order of additions in any order of starts, rests and messages: gradients are added in one order, and bits repeat."""
    forest = Forest(seed, dial, learners, fan_in, steps=9)
    forest.run([], calm=True)
    assert set(forest.formed.values()) == {1}


def test_gradients_of_a_free_dial_do_not_count_as_iterations_once_the_dial_is_in_lockstep() -> None:
    """Learner 1 was faster: with its own count it would be two iterations ahead, and its leaf would wait for ever."""
    node = Node(0, leaf=True)
    node.count(Count(1, lockstep=False, equal=True))
    for number, learner in enumerate((1, 1, 1, 2)):
        (up,) = node.publish(of_one(Ticket(learner, learner - 1, number, 0, 0, 1)))
        assert isinstance(up, Up) and node.taken(up.sum.number) == [SumDone(learner, number)]
    assert not node.count(Count(2, True, False, {1: 2, 2: 2}))
    assert not node.publish(of_one(Ticket(1, 0, 5, 1, 3, 1)))
    (up,) = node.publish(of_one(Ticket(2, 1, 6, 2, 1, 1)))
    assert isinstance(up, Up) and [ticket.iteration for ticket in up.sum.tickets] == [2, 2]
