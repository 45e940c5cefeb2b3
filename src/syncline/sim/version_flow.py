"""Versions that flow down a simulated tree unasked (R8): from the shards to the topmost nodes, from node to node, from leaf to learner.

`protocols.tree_down` decides: each child gets the newest when the way to it is free, and a learner computes on one copy while the
next is filled. Nobody here writes into a copy: it is of one version for ever. Not responsible for when a learner swaps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from syncline.protocols.tree_down import Buffers, Downcast, Send
from syncline.protocols.tree_shape import ROOT
from syncline.sim.clock import Action, Worker, last_of

if TYPE_CHECKING:
    from syncline.sim.learner import SimLearner
    from syncline.sim.simulation import Simulation


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
    """One table's."""

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
