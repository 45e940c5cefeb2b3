"""The nodes of a simulated tree (R7, M14): each adds what its children published, in memory of its own, and publishes the mean.

What it does when is decided by `protocols.tree_up`. Versions go from the shards to learners directly, or flow down the nodes unasked
(R8): `protocols.tree_down` gives each child the newest when the way to it is free, and a learner computes on one copy while the next
is filled. Nobody here writes into a copy: it is of one version for ever. `timing` has the times of versions that are asked for
through them. Not responsible for who is below whom (`protocols.tree_shape`), for what becomes of a sum, nor for when a learner swaps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from syncline.messages.to_leader import Gradient
from syncline.messages.to_leader import Sum as Told
from syncline.messages.to_tree_nodes import Counted, Refused, Taken, ToNodes
from syncline.protocols.folding import Ticket
from syncline.protocols.tree_down import Buffers, Downcast, Send
from syncline.protocols.tree_shape import ROOT
from syncline.protocols.tree_up import Node, Passed, Sum, SumDone, Up, of_one, weight
from syncline.sim.clock import Action, Worker, last_of
from syncline.sim.owned_memory import NEVER, SimLane
from syncline.table.accumulator import Mean, add_up
from syncline.table.gradient_slot import private_slot
from syncline.table.layout import Layout

if TYPE_CHECKING:
    from syncline.sim.learner import SimLearner
    from syncline.sim.simulation import Simulation


@dataclass(slots=True, eq=False)
class NodePart:
    """A copy of what a child published."""

    segments: list[Tensor]
    views: list[Tensor]
    mask: tuple[bool, ...]
    tickets: tuple[Ticket, ...]
    options: list[tuple[int, int, bytes]]  # (−step, rank, text) of each gradient
    gradients: tuple[tuple[int, Gradient], ...]
    buffers: tuple[list[Tensor], ...]

    def present(self) -> tuple[bool, ...]:
        return self.mask


class NodeTable:
    """One table's way through a node."""

    def __init__(self, node: Node, layout: Layout, lane: SimLane) -> None:
        self.node, self.layout, self.lane = node, layout, lane
        self.parts: dict[tuple[int, int], NodePart] = {}  # by child and number
        self.options, self.text = 0, b""


class SimNode:
    """One node; to the shards it is who publishes."""

    waits_for = None

    def __init__(self, world: Simulation, node: int) -> None:
        self._world, self.node = world, node
        self.learner = -1 - node  # its name where learners have theirs
        first = min(world.tree.under(node), default=None)
        self.machine = world.cluster.machine_of_learner(0) if first is None else world.learners[first].machine
        self.dead = False
        self.handled = self.decided = 0.0
        self._tables: dict[int, NodeTable] = {}
        self._work = Worker(world.clock)

    def _table(self, number: int) -> NodeTable:
        table = self._tables.get(number)
        if table is None:
            world = self._world
            layout = world.tables[number].layout
            lane = world.lanes[number, self.learner] = SimLane(layout, 2, world.clock)
            node = Node(self.node, leaf=self.node in world.tree.leaves)
            table = self._tables[number] = NodeTable(node, layout, lane)
        return table

    # -- up --------------------------------------------------------------------------------------------------

    def gradient(self, learner: SimLearner, message: Gradient) -> None:
        """A learner's has arrived."""
        lane = self._world.lanes.get((message.table, learner.learner))
        if self.dead or not isinstance(lane, SimLane) or message.number not in lane.numbers:
            return  # it has left, and nothing of it is needed
        lane.sending.discard(message.number)
        self._world.clock.at(self._world.clock.now, learner.wake)
        slot, table = lane.sent[lane.numbers.index(message.number)], self._table(message.table)
        name, rank, step = learner.learner, learner.rank, message.step
        ticket = Ticket(name, rank, message.number, message.stamp, step, message.examples)
        segments = [segment.clone() for segment in slot.segments]
        part = NodePart(
            segments,
            table.layout.parameters.views(segments),
            tuple(map(bool, slot.mask.tolist())) if not message.full else (True,) * len(slot.mask),
            (ticket,),
            [(-step, rank, bytes(slot.options_text()))],
            ((name, message),),
            ([each.clone() for each in slot.buffers],),
        )
        self._gather(message.table, of_one(ticket), part)

    def moved(self) -> None:
        """The node above is another: what was under way there goes again."""
        for number, table in self._tables.items():
            self._pass_on(number, table.node.moved({}))

    def _gather(self, number: int, sum_: Sum, part: NodePart) -> None:
        """Adding takes as long as at a shard; one thing after another."""
        world, table = self._world, self._table(number)
        table.parts[sum_.sender, sum_.number] = part

        def added() -> None:
            if not self.dead:
                self._pass_on(number, table.node.publish(sum_))

        self._work.do(world.cluster.take.seconds(sum(world.tables[number].part_bytes)), added)

    def _pass_on(self, number: int, passed: Iterable[Passed]) -> None:
        world, table = self._world, self._table(number)
        for each in passed:
            if isinstance(each, Up):
                self._send_up(number, each.sum, self._added(table, each.sum))
            elif isinstance(each, SumDone):
                table.parts.pop((each.child, each.number), None)
                self._done(number, each.child, each.number)
            else:
                refused = Refused(number, each.number, each.without, each.counted)
                if (child := world.nodes.get(each.child)) is not None:
                    world.send(self.machine, child.machine, partial(child.hear, refused))

    def _added(self, table: NodeTable, sum_: Sum) -> NodePart:
        """Return the mean of the parts, in the order of the sum."""
        parts = [table.parts[key] for key in sum_.parts]
        segments = [torch.empty_like(segment) for segment in parts[0].segments]
        mean = Mean(segments, table.layout.parameters.views(segments))
        add_up(mean, [(part, part.mask, weight(part.tickets, equal=sum_.equal)) for part in parts])
        return NodePart(
            segments,
            mean.views,
            mean.present,
            sum_.tickets,
            [option for part in parts for option in part.options],
            tuple(gradient for part in parts for gradient in part.gradients),
            tuple(buffers for part in parts for buffers in part.buffers),
        )

    def _send_up(self, number: int, sum_: Sum, body: NodePart) -> None:
        world, above = self._world, self._world.tree.parent[self.node]
        parts = world.tables[number].part_bytes
        if above != ROOT:
            parent = world.nodes[above]

            def arrive() -> None:
                if not parent.dead and not self.dead:
                    parent._gather(number, sum_, body)

            world.send(self.machine, parent.machine, arrive, sum(parts))
            return
        lane = self._fill(number, sum_, body)
        for shard in range(1, len(parts)):
            arrival = world.network.send(
                world.clock.now, self.machine, world.cluster.machine_of_shard(shard), parts[shard]
            )
            lane.under_way[shard, sum_.number] = arrival
        options, full = self._table(number).options, all(body.mask)
        numbers = number, sum_.number, sum_.iteration
        told = Told(*numbers, body.gradients, options, full, sum_.counted, body.buffers)

        def at_root() -> None:
            if not self.dead:
                world.servers[0].note(self, told)

        world.send(self.machine, world.first_machine, at_root, parts[0])

    def _fill(self, number: int, sum_: Sum, body: NodePart) -> SimLane:
        """The draft that the shards read."""
        table = self._table(number)
        lane = table.lane
        if NEVER not in lane.numbers:  # in lockstep they lie there until all have come
            lane.numbers.append(NEVER)
            lane.sent.append(private_slot(table.layout))
        place = lane.numbers.index(NEVER)
        lane.numbers[place] = sum_.number
        slot = lane.sent[place]
        torch._foreach_copy_(slot.segments, body.segments)
        slot.mask.copy_(torch.tensor(body.mask, dtype=torch.uint8))
        text = min(body.options)[2]
        if text != table.text:
            table.options, table.text = table.options + 1, text
        slot.write_options(text)
        return lane

    # -- what comes back -------------------------------------------------------------------------------------

    def freed(self, number: int, sum_number: int) -> None:
        """A shard needs this sum no more."""
        table = self._table(number)
        freed = [key for key in table.lane.freed if key[1] == sum_number]
        if len(freed) == table.layout.shards and sum_number in table.lane.numbers and not self.dead:
            for key in freed:
                del table.lane.freed[key]
            table.lane.numbers[table.lane.numbers.index(sum_number)] = NEVER

    def _done(self, number: int, child: int, done: int) -> None:
        world = self._world
        if self.node not in world.tree.leaves:
            if (below := world.nodes.get(child)) is not None:
                world.send(self.machine, below.machine, partial(below.hear, Taken(number, done)))
            return
        lane, learner = world.lanes.get((number, child)), world.learners[child]
        if lane is not None:
            arrival = world.clock.now + world.cluster.memory.latency
            for shard in range(world.tables[number].layout.shards):
                lane.freed[shard, done] = arrival
            world.clock.at(arrival, learner.wake)

    def hear(self, message: ToNodes) -> None:
        """The leading shard, or the node above, has something to say."""
        if self.dead or message.table not in self._world.tables:
            return
        table, node = message.table, self._table(message.table).node
        if isinstance(message, Taken):
            self._pass_on(table, node.taken(message.number))
        elif isinstance(message, Refused):
            lane = self._table(table).lane
            if message.number in lane.numbers:
                lane.numbers[lane.numbers.index(message.number)] = NEVER
            self._pass_on(table, node.again(message.number, message.without, message.counted))
        elif isinstance(message, Counted):
            below, count = self._world.tree.below(self.node), message.count
            counted = {
                child: [count.active[each] for each in learners if each in count.active]
                for child, learners in below.items()
            }
            active = {child: min(each) for child, each in counted.items() if each}
            self._pass_on(table, node.count(replace(count, active=active)))

    # -- who comes and goes ----------------------------------------------------------------------------------

    def lose(self, child: int) -> None:
        for number, table in self._tables.items():
            self._pass_on(number, table.node.lose(child))

    def welcome(self, child: int) -> None:
        for table in self._tables.values():
            table.node.welcome(child)


# -- versions down, unasked ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """A whole version."""

    version: int
    weights: list[Tensor]  # one view per parameter


class FlowEnd:
    """A learner's end of one table."""

    def __init__(self, flow: TableFlow, learner: SimLearner) -> None:
        self._flow, self.learner = flow, learner
        self.buffers, self.next = Buffers(-1), Copy(-1, [])

    def has(self, version: int) -> None:
        """It was read in another way."""
        self.buffers.version = max(self.buffers.version, version)

    def swap(self) -> Copy | None:
        """What has come; None: nothing newer."""
        before = self.buffers.version
        found = self.next if self.buffers.swap() > before else None
        self._flow.refill(self)
        return found


class TableFlow:
    """One table's versions on their way from the shards to the topmost nodes, from node to node, from leaf to learner."""

    def __init__(self, world: Simulation, table: int) -> None:
        self._world, self._all = world, world.flows
        self._table, self._layout = table, world.tables[table].layout
        self._parts = world.tables[table].part_bytes
        self._casters = [Worker(world.clock) for _ in self._parts]  # beside the shards' own work
        self._made: dict[int, dict[int, list[Tensor]]] = defaultdict(dict)  # version -> parts, by shard
        self._casts: dict[int, Downcast] = {}  # by node; ROOT: the shards
        self._copies: dict[int, Copy] = {}
        self._workers: dict[int, Worker] = {}
        self._ends: dict[int, FlowEnd] = {}  # by learner
        self._dial = -1  # that was said last
        self._free = False  # the dial in force is one under which nobody waits
        for node in (ROOT, *world.tree.nodes):
            self._casts[node] = Downcast(world.tree.children(node) if node not in world.tree.leaves else ())
            self._workers[node] = Worker(world.clock)

    @property
    def _void(self) -> bool:
        """The tree was planted anew since."""
        return self._world.flows is not self._all

    def said(self, dial: int) -> None:
        """A learner hears of the dial in force."""
        if dial == self._dial:
            return
        self._dial, self._free = dial, not self._world.dials[dial].waits
        if self._free and (newest := self._copies.get(ROOT)) is not None:
            self._send(ROOT, self._casts[ROOT].arrived(newest.version))

    def made(self, shard: int, version: int, part: list[Tensor]) -> None:
        """One has its part of a version."""
        parts = self._made[version]
        parts[shard] = part
        if len(parts) == self._layout.shards:
            whole = [each.new_empty(each.shape) for each in self._world.tables[self._table].weights]
            for index, held in parts.items():
                for target, values in zip(self._layout.parts[index].segments(whole), held, strict=True):
                    target.copy_(values)
            self._made = defaultdict(dict, {v: p for v, p in self._made.items() if v > version})
            self._copies[ROOT] = Copy(version, self._layout.parameters.views(whole))
            if self._free:
                self._send(ROOT, self._casts[ROOT].arrived(version))

    # -- learners ----------------------------------------------------------------------------------------

    def join(self, learner: SimLearner) -> FlowEnd:
        end = self._ends[learner.learner] = FlowEnd(self, learner)
        self._join(self._world.tree.leaf[learner.learner], learner.learner)
        return end

    def _join(self, node: int, child: int) -> None:
        self._send(node, self._casts[node].join(child))

    def leave(self, learner: int, leaf: int) -> None:
        if self._ends.pop(learner, None) is not None and leaf in self._casts:
            self._casts[leaf].lose(learner)

    def refill(self, end: FlowEnd) -> None:
        """A copy that was held for it may be used."""
        learner = end.learner.learner
        if self._void or not end.buffers.room:
            return
        if self._ends.get(learner) is end and learner in self._world.tree.leaf:
            leaf = self._world.tree.leaf[learner]
            self._send(leaf, self._casts[leaf].sent(learner))

    def lost(self, node: int, above: int, moves: Mapping[int, int | None], *, leaf: bool) -> None:
        """What was on its way to a node and from it is lost; those below it hear from another."""
        self._casts.pop(node, None)
        self._casts[above].lose(node)
        for child, target in moves.items():
            if not leaf:
                self._join(above, child)
            elif target is not None and child in self._ends:
                self._ends[child].buffers.drop()
                self._join(target, child)

    # -- down --------------------------------------------------------------------------------------------

    def _send(self, node: int, sends: Iterable[Send]) -> None:
        for send in sends if not self._void else ():
            copy, arrive = self._copies[node], partial(self._arrived, node, send.child)
            if node == ROOT:
                self._from_shards(self._world.nodes[send.child].machine, partial(arrive, copy))
                continue
            leaf = node in self._world.tree.leaves
            if leaf:
                self._ends[send.child].buffers.begin(copy.version)
            target = self._ends[send.child].learner if leaf else self._world.nodes[send.child]
            machine, nbytes = self._world.nodes[node].machine, sum(self._parts)
            move = partial(self._world.send, machine, target.machine, partial(arrive, copy), nbytes)
            self._workers[node].do(self._world.cluster.serve.seconds(nbytes), move)

    def _from_shards(self, machine: int, then: Action) -> None:
        arrived = last_of(len(self._parts), then)
        for shard, nbytes in enumerate(self._parts):
            source = self._world.cluster.machine_of_shard(shard)
            move = partial(self._world.send, source, machine, arrived, nbytes)
            self._casters[shard].do(self._world.cluster.serve.seconds(nbytes), move)

    def _arrived(self, node: int, child: int, copy: Copy) -> None:
        tree = self._world.tree
        if self._void:
            return
        if node in tree.leaves:
            end = self._ends.get(child)
            if end is not None and tree.leaf.get(child) == node and end.buffers.fills(copy.version):
                end.buffers.complete()
                end.next = copy
                self.refill(end)
        elif tree.parent.get(child) == node and not self._world.nodes[child].dead:
            self._copies[child] = copy
            self._send(child, self._casts[child].arrived(copy.version))
            if node in self._casts:
                self._send(node, self._casts[node].sent(child))
