"""Timing only, over trees of servers (R7, R8): gradients up in sums, versions down, as flows of a cluster.

Who sends when is decided by the pure nodes (`protocols.tree_up`, `protocols.tree_down`) and the sequence of any table; here are their
messages, their work and what the links carry. A node works on one thing at a time; with `broadcast` copies go down beside it. Data goes
to whoever asks. Not responsible for flat servers (`run_times`), nor for losses.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial

from syncline.dial import Sync
from syncline.engines.run import EpochRecord
from syncline.engines.simulated_times import LearnerTimes
from syncline.errors import UsageError
from syncline.protocols.folding import Ticket
from syncline.protocols.sequence import Decision, Fold, Sequence
from syncline.protocols.tree_down import Buffers, Downcast, Fetch, Give, Relay, Send
from syncline.protocols.tree_shape import ROOT, Tree
from syncline.protocols.tree_up import Again, Count, Intake, Node, Passed, Sum, SumDone, Up, of_one
from syncline.protocols.waiting import Release
from syncline.sim.clock import Action, Clock, Worker, last_of
from syncline.sim.garbage_collection import YOUNG, calm_collector
from syncline.sim.network import SimNetwork
from syncline.sim.timing.run_times import OBJECTS, TimedRun, Timing, shares
from syncline.topologies import Servers, Trees

DRAFTS = 2  # of a learner with broadcast: published and not taken by the root


@dataclass
class TimedLearner:
    """One learner: what it has, what it waits for, where its time went."""

    rank: int
    machine: int
    number: int = 0
    steps: int = 0
    version: int = 0  # that it computes on
    examples: int = 0  # of the gradient in hand
    computed: float = 0.0  # when that was there
    sending: bool = False  # its leaf does not have its last gradient yet
    under_way: set[int] = field(default_factory=set)  # published, not taken by the root
    buffers: Buffers = field(default_factory=lambda: Buffers(0))
    waits: bool = False  # its gradient is there and not published yet
    leaving: bool = False
    others: float = 0.0  # seconds of the present wait that are others' making
    times: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])  # compute, communication, waiting


class TimedNode:
    """A leaf or a node above: its decisions, its place, its work."""

    def __init__(self, node: int, tree: Tree, sync: Sync, clock: Clock, machine: int, *, casts: bool) -> None:
        self.node, self.machine = node, machine
        self.up = Node(node, leaf=node in tree.leaves)
        self.copies = Relay(keep=sync.delay + 1)
        self.cast = Downcast(tree.children(node))
        self.work = Worker(clock)
        self.down = Worker(clock) if casts else self.work


class TimedTree:
    """All of a run over a tree, as events of one clock."""

    def __init__(self, run: TimedRun, topology: Trees) -> None:
        sync, cluster, learners = run.course.first, run.cluster, run.learners
        if sync.local:
            raise UsageError(
                f"timing over a tree takes dials without steps of learners' own, got {sync}; use shards="
            )
        self._run, self._cluster, self._sync = run, cluster, sync
        self.clock, self.network = Clock(), SimNetwork(cluster)
        self.tree = Tree(range(learners), topology.fan_in)
        self.casts = topology.broadcast and not sync.waits
        self.learners = [TimedLearner(rank, cluster.machine_of_learner(rank)) for rank in range(learners)]
        self._pace = [cluster.pace(rank, seed=run.seed, learners=learners) for rank in range(learners)]
        self.nodes = {
            node: TimedNode(
                node,
                self.tree,
                sync,
                self.clock,
                cluster.machine_of_learner(min(self.tree.under(node))),
                casts=self.casts,
            )
            for node in self.tree.nodes
        }
        self._parts = run.part_bytes(topology.shards)
        self._bytes = sum(self._parts)
        self._shards = [Worker(self.clock) for _ in self._parts]
        self._casters = [Worker(self.clock) for _ in self._parts] if self.casts else self._shards
        self._places = [cluster.machine_of_shard(shard) for shard in range(topology.shards)]
        self._cast = Downcast(self.tree.children(ROOT))
        ids = {rank: rank for rank in range(learners)}
        self.sequence = Sequence(
            sync,
            initial=ids,
            batch_size=run.batch_size,
            limit=run.steps,
            warm=run.warm,
            sums=True,
            account=None,
        )
        self._intake = Intake(self.sequence)
        epochs, self._epoch = run.epochs, run.examples
        self._left = None if epochs is None else epochs * self._epoch
        self.going = set(ids)
        self._published: dict[tuple[int, int], float] = {}
        self._last: dict[int, float] = {}  # version -> when the last of its gradients was published
        self._taken_at: dict[int, float] = {}
        self.examples = 0  # folded
        self.history: list[EpochRecord] = []

    def run(self) -> None:
        seconds = self._run.seconds
        for learner in self.learners:
            self._decide(self.sequence.join(learner.rank, learner.rank, 0))
        if seconds is not None:
            self.clock.at(seconds, self.going.clear)
        self.clock.run(self.going)
        self._decide(self.sequence.finish())
        while self.clock.step():
            pass

    # -- learners --------------------------------------------------------------------------------------------

    def _compute(self, learner: TimedLearner) -> None:
        left = self._left
        if learner.rank not in self.going:
            return
        if left is not None and left <= 0:
            self._leave(learner)
            return
        within = self._epoch if left is None else (left - 1) % self._epoch + 1
        learner.examples = min(self._run.batch_size, within)
        if left is not None:
            self._left = left - learner.examples
        seconds = self._pace[learner.rank] * self._cluster.one_step(
            learner.examples, rank=learner.rank, step=learner.steps, seed=self._run.seed
        )
        learner.times[0] += seconds
        learner.computed = self.clock.now + seconds
        self.clock.after(seconds, partial(self._computed, learner))

    def _computed(self, learner: TimedLearner) -> None:
        learner.waits = True
        self._publish(learner)

    def _publish(self, learner: TimedLearner) -> None:
        """With broadcast as soon as its leaf has its former gradient and it has a draft left; it never merges two."""
        if not learner.waits or (self.casts and (learner.sending or len(learner.under_way) >= DRAFTS)):
            return
        now = self.clock.now
        learner.number += 1
        learner.steps += 1
        learner.under_way.add(learner.number)
        learner.sending, learner.waits = True, False
        self._published[learner.rank, learner.number] = now
        ticket = Ticket(
            learner.rank,
            learner.rank,
            learner.number,
            learner.version,
            learner.steps - 1,
            learner.examples,
            silent=self.casts,
        )
        leaf = self.nodes[self.tree.leaf[learner.rank]]
        copied = self._cluster.copy.seconds(self._bytes)
        arrival = self.network.send(now + copied, learner.machine, leaf.machine, self._bytes)
        self.clock.at(arrival, partial(self._gather, leaf, of_one(ticket)))
        if self.casts:
            learner.times[1] += now + copied - learner.computed
            learner.version = learner.buffers.swap()
            self.clock.after(copied, partial(self._compute, learner))
            self._refill(learner)

    def _go_on(self, learner: TimedLearner, version: int) -> None:
        """What it waited for is there."""
        stood = self.clock.now - learner.computed if learner.steps else 0.0
        others = min(stood, max(0.0, learner.others))
        learner.times[1] += stood - others
        learner.times[2] += others
        learner.version = version
        self._compute(learner)

    def _leave(self, learner: TimedLearner) -> None:
        """No data is left for it; what it published is delivered first."""
        learner.leaving = True
        if not learner.under_way:
            self.going.discard(learner.rank)
            self._decide(self.sequence.leave(learner.rank))

    # -- up --------------------------------------------------------------------------------------------------

    def _gather(self, node: TimedNode, sum_: Sum) -> None:
        def gathered() -> None:
            if node.node in self.tree.leaves:
                learner = self.learners[sum_.sender]
                learner.sending = False
                self._publish(learner)
            self._pass_on(node, node.up.publish(sum_))

        node.work.do(self._cluster.message + self._cluster.take.seconds(self._bytes), gathered)

    def _pass_on(self, node: TimedNode, passed: Iterable[Passed]) -> None:
        for each in passed:
            if isinstance(each, Up):
                self._send_up(node, each.sum)
            elif isinstance(each, SumDone) and node.node in self.tree.leaves:
                learner = self.learners[each.child]
                self._move(node.machine, learner.machine, partial(self._delivered, learner, each.number))
            else:
                child = self.nodes[each.child]
                self._move(node.machine, child.machine, partial(self._answered, child, each))

    def _answered(self, node: TimedNode, answer: SumDone | Again) -> None:
        if isinstance(answer, SumDone):
            self._pass_on(node, node.up.taken(answer.number))
        else:
            self._pass_on(node, node.up.again(answer.number, answer.without, answer.counted))

    def _delivered(self, learner: TimedLearner, number: int) -> None:
        learner.under_way.discard(number)
        if learner.leaving:
            self._leave(learner)
        else:
            self._publish(learner)

    def _send_up(self, node: TimedNode, sum_: Sum) -> None:
        above, now = self.tree.parent[node.node], self.clock.now
        if above != ROOT:
            parent = self.nodes[above]
            self._move(node.machine, parent.machine, partial(self._gather, parent, sum_), self._bytes)
            return
        arrivals = [
            self.network.send(now, node.machine, place, part)
            for place, part in zip(self._places, self._parts, strict=True)
        ]
        self.clock.at(max(arrivals), partial(self._at_root, node, sum_))

    def _at_root(self, node: TimedNode, sum_: Sum) -> None:
        """Its ticket when all shards have their part (M12); each adds it."""
        take, message = self._cluster.take, self._cluster.message
        for shard, part in zip(self._shards[1:], self._parts[1:], strict=True):
            shard.do(message + take.seconds(part), lambda: None)
        self._shards[0].do(message + take.seconds(self._parts[0]), partial(self._arrive, node, sum_))

    def _arrive(self, node: TimedNode, sum_: Sum) -> None:
        verdict = self._intake.arrive(sum_.tickets, sum_.counted)
        decisions = self.sequence.gradient(*sum_.tickets) if verdict.taken else ()
        answer = (
            SumDone(node.node, sum_.number)
            if verdict.taken
            else Again(node.node, sum_.number, verdict.without, verdict.counted)
        )
        for ticket in sum_.tickets:
            self._taken_at[ticket.learner] = self.clock.now
        self._move(self._places[0], node.machine, partial(self._answered, node, answer))
        self._decide(decisions)

    # -- the root --------------------------------------------------------------------------------------------

    def _decide(self, decisions: Iterable[Decision]) -> None:
        self._recount()
        for decision in decisions:
            if isinstance(decision, Fold):
                self._fold(decision)
            elif isinstance(decision, Release) and decision.read:
                self._shards[0].do(self._cluster.reply, partial(self._release, decision, self.clock.now))

    def _recount(self) -> None:
        if (count := self._intake.count()) is None:
            return
        for node in self.nodes.values():
            active = self._intake.active(self.tree.below(node.node)) if count.lockstep else {}
            counted = replace(count, active=active)
            self._move(self._places[0], node.machine, partial(self._count, node, counted))

    def _count(self, node: TimedNode, count: Count) -> None:
        self._pass_on(node, node.up.count(count))

    def _fold(self, fold: Fold) -> None:
        keys = [(ticket.learner, ticket.number) for ticket in fold.tickets]
        self._last[fold.version] = max(self._published.pop(key) for key in keys)
        self.examples += sum(ticket.count for ticket in fold.tickets)
        made = partial(self._made, fold.version, self.sequence.clock.last_update)
        done = last_of(len(self._shards), made)
        for shard, part in zip(self._shards, self._parts, strict=True):
            shard.do(self._cluster.fold.seconds(part), done)
        while self.examples >= self._epoch * (len(self.history) + 1):
            epoch = self._run.epoch(len(self.history), fold.version, self.clock.now, self.examples)
            self.history.append(epoch)

    def _made(self, version: int, staleness: float) -> None:
        """All shards have this version."""
        if self._run.on_update is not None:
            self._run.on_update(version, self.clock.now, staleness)
        if self.casts:
            self._cast_down(None, self._cast.arrived(version))
        if self.sequence.full and version == self.sequence.version:
            self.going.clear()

    # -- down, asked for -------------------------------------------------------------------------------------

    def _release(self, release: Release, decided: float) -> None:
        """Down the tree to the learner's leaf, which has the version or fetches it."""
        learner = self.learners[release.learner]
        if self._sync.lockstep:
            learner.others = self._last.get(release.version, 0.0) - learner.computed
        else:
            learner.others = decided - self._taken_at.get(learner.rank, decided)
        leaf = self.nodes[self.tree.leaf[learner.rank]]
        if release.version == learner.version or not learner.steps:  # it has them, or starts with them (R4)
            wakes: Action = partial(self._go_on, learner, release.version)
        else:
            wakes = partial(self._ask, leaf, learner.rank, release.number, release.version)
        route = [self.nodes[node].machine for node in reversed(self.tree.route(learner.rank))]
        self._hop([self._places[0], *route], wakes)

    def _hop(self, machines: list[int], then: Action) -> None:
        if len(machines) < 2:
            then()
        else:
            self._move(machines[0], machines[1], partial(self._hop, machines[1:], then))

    def _ask(self, node: TimedNode, child: int, number: int, version: int) -> None:
        self._relay(node, node.copies.ask(child, number, version, exact=self._sync.lockstep))

    def _relay(self, node: TimedNode, answers: Iterable[Fetch | Give]) -> None:
        for each in answers:
            if isinstance(each, Fetch) and self.tree.parent[node.node] == ROOT:
                self._move(node.machine, self._places[0], partial(self._serve, node, each))
            elif isinstance(each, Fetch):
                above = self.nodes[self.tree.parent[node.node]]
                self._move(node.machine, above.machine, partial(self._ask, above, node.node, 0, each.version))
            elif node.node in self.tree.leaves:
                learner = self.learners[each.child]
                self._hand_down(node, learner.machine, partial(self._received, learner, each.version))
            else:
                child = self.nodes[each.child]
                self._hand_down(node, child.machine, partial(self._copied, child, each.version))

    def _serve(self, node: TimedNode, fetch: Fetch) -> None:
        """The root's newest, or exactly that one, from all shards."""
        version = fetch.version if fetch.exact else self.sequence.version
        self._from_shards(self._shards, node, partial(self._copied, node, version))

    def _copied(self, node: TimedNode, version: int) -> None:
        self._relay(node, node.copies.arrived(version))

    def _received(self, learner: TimedLearner, version: int) -> None:
        self.clock.after(self._cluster.copy.seconds(self._bytes), partial(self._go_on, learner, version))

    # -- down, unasked ---------------------------------------------------------------------------------------

    def _cast_down(self, node: TimedNode | None, sends: Iterable[Send]) -> None:
        for send in sends:
            if node is not None and node.node in self.tree.leaves:
                learner = self.learners[send.child]
                learner.buffers.begin(send.version)
                self._hand_down(node, learner.machine, partial(self._filled, learner))
                continue
            child = self.nodes[send.child]
            then = partial(self._cast_at, node, child, send.version)
            if node is None:
                self._from_shards(self._casters, child, then)
            else:
                self._hand_down(node, child.machine, then)

    def _cast_at(self, sender: TimedNode | None, target: TimedNode, version: int) -> None:
        self._cast_down(target, target.cast.arrived(version))
        cast = self._cast if sender is None else sender.cast
        self._cast_down(sender, cast.sent(target.node))

    def _filled(self, learner: TimedLearner) -> None:
        learner.buffers.complete()
        self._refill(learner)

    def _refill(self, learner: TimedLearner) -> None:
        """A copy that was held for it may be used."""
        leaf = self.nodes[self.tree.leaf[learner.rank]]
        if learner.buffers.room:
            self._cast_down(leaf, leaf.cast.sent(learner.rank))

    # -- links -----------------------------------------------------------------------------------------------

    def _from_shards(self, workers: list[Worker], node: TimedNode, then: Action) -> None:
        arrived = last_of(len(self._parts), then)
        for worker, place, part in zip(workers, self._places, self._parts, strict=True):
            move = partial(self._move, place, node.machine, arrived, part)
            worker.do(self._cluster.serve.seconds(part), move)

    def _hand_down(self, node: TimedNode, machine: int, then: Action) -> None:
        """A copy of a version, to a child on that machine."""
        move = partial(self._move, node.machine, machine, then, self._bytes)
        node.down.do(self._cluster.serve.seconds(self._bytes), move)

    def _move(self, source: int, target: int, then: Action, nbytes: int = 0) -> None:
        self.clock.at(self.network.send(self.clock.now, source, target, nbytes), then)

    def times(self) -> LearnerTimes:
        """Of all learners together."""
        times = zip(*(learner.times for learner in self.learners), strict=True)
        compute, communication, waiting = map(sum, times)
        steps = sum(learner.steps for learner in self.learners)
        return LearnerTimes(compute=compute, communication=communication, waiting=waiting, steps=steps)


def time_tree(run: TimedRun, topology: Trees) -> Timing:
    """The same over a tree of servers."""
    if len(run.course.dials) > 1 or run.policy == "partition":
        what = f"the course '{run.course}'" if len(run.course.dials) > 1 else "policy='partition'"
        raise UsageError(f"timing over a tree takes one dial and data for whoever asks, got {what}")
    run.check_dials()
    tree = TimedTree(run, topology if topology.root.fixed else replace(topology, root=Servers(1, True)))
    sequence = tree.sequence
    run.begins(lambda: (sequence.version, tree.clock.now, tree.examples))
    with calm_collector(max(YOUNG, OBJECTS * run.learners)):
        tree.run()
    return Timing(
        seconds=tree.clock.now,
        updates=sequence.version,
        gradients=sequence.gradients,
        dropped=sequence.dropped,
        examples=tree.examples,
        staleness=sequence.clock.account(),
        times=tree.times(),
        cards=shares(tree.network, tree.clock.now),
        moved=tree.network.moved,
        events=tree.clock.events,
        history=tree.history,
    )
