"""The nodes of a run's tree, as its supervisor has them: their processes, who sends to which, what memory each is given (M14).

Not responsible for who goes where when one is lost (`protocols.tree`), nor for what a node does.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from syncline.engines.local.processes import Process, Processes
from syncline.engines.local.shared_memory import Region, WakeUp
from syncline.engines.local.table_memory import LEAF, Geometry, Lane
from syncline.engines.local.tree_node import (
    AddLearnerBelow,
    AddNodeBelow,
    Below,
    ChildLane,
    LoseChild,
    Moved,
    NodeSpec,
)
from syncline.engines.local.tree_root_end import AddNode, NodeDesk, NodeGone, NodeTable
from syncline.engines.run import RunSpec
from syncline.protocols.tree_shape import ROOT, Tree
from syncline.table.layout import Layout
from syncline.topologies import Trees

YIELDS = 200  # as a shard
Lanes = dict[int, tuple[Layout, Region]]  # by table


@dataclass(slots=True)
class _Learner:
    """What its leaf has of it, for the next one."""

    rank: int
    desk: Region
    bell: WakeUp
    lanes: Lanes = field(default_factory=dict)


class NodeCrew:
    """Those that live."""

    def __init__(
        self,
        spec: RunSpec,
        processes: Processes,
        geometry: Geometry,
        region: Callable[[int], Region],
        tell: Callable[[object], None],  # all shards, the leading one last
        beats: Callable[[int], tuple[Region, int]],  # where a node counts that it lives
        crashes: dict[str, int],
    ) -> None:
        assert isinstance(spec.plan.topology, Trees)
        self._spec, self._fan_in = spec, spec.plan.topology.fan_in
        self._forks, self._geometry, self._region, self._tell = processes, geometry, region, tell
        self._beats, self._crashes = beats, crashes
        self.tree = Tree(range(spec.plan.learners), self._fan_in)
        self.bells = [WakeUp() for _ in self.tree.nodes]
        self.processes: dict[int, Process] = {}  # by node
        self._learners: dict[int, _Learner] = {}
        self._desks: dict[int, Region] = {}  # by node
        self._lanes: dict[int, Lanes] = defaultdict(dict)
        self._ways: Counter[int] = Counter()  # node -> parents that it had before

    def start(self, root: WakeUp, learners: Iterable[int], *, again: bool) -> None:
        """With these below, in their order; `again`: to new servers they come wherever there is room."""
        if again:
            self.tree = Tree(range(self._spec.plan.learners), self._fan_in)
            for nobody in range(self._spec.plan.learners):
                self.tree.leave(nobody)
            for learner in learners:
                self.tree.join(learner)
        else:
            self.tree = Tree(learners, self._fan_in)
        for kept in (self._learners, self._lanes, self._ways):
            kept.clear()
        for node in self.tree.nodes:
            self._start(node, root)
        for node, parent in self.tree.parent.items():
            if parent != ROOT:
                self._send_to_parent(node)

    def _start(self, node: int, root: WakeUp) -> None:
        desk = self._desks[node] = self._region(NodeDesk.nbytes())
        spec = NodeSpec(
            node,
            node in self.tree.leaves,
            self.tree.parent[node],
            desk,
            self.bells,
            root,
            self._geometry,
            YIELDS,
            *self._beats(node),
            self._crashes.pop(f"node {node}", None),
        )
        self.processes[node] = self._forks.fork("node", node, node, spec, None, 1)
        self._tell(AddNode(node, desk, self.bells[node]))

    def make_table(self, table: int, layout: Layout) -> None:
        lockstep = self._spec.plan.course.first.lockstep
        for node, process in self.processes.items():
            lane = self._region(Lane.nbytes(layout, slots=self._geometry.sums))
            self._lanes[node][table] = (layout, lane)
            made = NodeTable(node, table, layout, lane, lockstep)
            self._tell(made)
            process.channel.post(made)
        for node, parent in self.tree.parent.items():
            if parent != ROOT:
                self._post(parent, ChildLane(node, table, *self._lanes[node][table]))

    def _post(self, node: int, message: object) -> None:
        self.processes[node].channel.post(message)

    # -- learners --------------------------------------------------------------------------------------------

    def add(self, learner: int, rank: int, desk: Region, bell: WakeUp) -> None:
        if learner not in self.tree.leaf:
            self.tree.join(learner)
        self._learners[learner] = _Learner(rank, desk, bell)
        self._send_to_leaf(learner)
        self._tell_below()

    def join_table(self, learner: int, table: int, layout: Layout, lane: Region) -> None:
        self._learners[learner].lanes[table] = (layout, lane)
        self._post(self.tree.leaf[learner], ChildLane(learner, table, layout, lane))

    def leave(self, learner: int) -> None:
        if self._learners.pop(learner, None) is not None and learner in self.tree.leaf:
            self._post(self.tree.leaf[learner], LoseChild(learner))
        self.tree.leave(learner)  # it has no leaf where the last one was lost
        self._tell_below()

    def _send_to_leaf(self, learner: int) -> None:
        known, leaf = self._learners[learner], self.tree.leaf[learner]
        known.desk.words[LEAF] = leaf  # before the leaf looks into its outbox
        self._post(leaf, AddLearnerBelow(learner, known.rank, known.desk, known.bell))
        for table, lane in known.lanes.items():
            self._post(leaf, ChildLane(learner, table, *lane))

    def _send_to_parent(self, node: int) -> None:
        parent = self.tree.parent[node]
        self._post(parent, AddNodeBelow(node, self._desks[node], self._ways[node]))
        for table, lane in self._lanes[node].items():
            self._post(parent, ChildLane(node, table, *lane))

    def _tell_below(self) -> None:
        """To those above leaves: who is where."""
        for node in set(self.processes) - set(self.tree.leaves):
            self._post(node, Below(self.tree.below(node)))

    # -- losses ----------------------------------------------------------------------------------------------

    def lose(self, node: int) -> str | None:
        """One is gone: where those below it send now, in words; None: it was the last leaf."""
        leaf, above = node in self.tree.leaves, self.tree.parent[node]
        moves = self.tree.lose(node)
        del self.processes[node]
        if not self.tree.leaves:
            return None
        if above != ROOT:
            self._post(above, LoseChild(node))
        said = self._move_learners(moves) if leaf else self._move_nodes(moves, above)
        self._tell_below()
        self._tell(NodeGone(node))
        return said

    def _move_learners(self, learners: Iterable[int]) -> str:
        moved = [learner for learner in learners if learner in self._learners]
        for learner in moved:
            self._send_to_leaf(learner)
        said = [f"{self._learners[each].rank} to node {self.tree.leaf[each]}" for each in moved]
        return f"learners send elsewhere: {', '.join(said)}" if said else "it had no learners"

    def _move_nodes(self, nodes: Iterable[int], above: int) -> str:
        for node in nodes:
            self._ways[node] += 1
            if above != ROOT:
                self._send_to_parent(node)
            self._post(node, Moved(above, self._ways[node]))
        to = "the root" if above == ROOT else f"node {above}"
        return f"nodes send to {to}: {', '.join(map(str, nodes))}"

    def close(self) -> None:
        for bell in self.bells:
            bell.close()
