"""The nodes of a run's tree, as its machines have them: their processes, who sends to which, what memory each is given (M14).

On several machines every machine's crew knows the whole tree and hears the same in the same order, and does what concerns it: a leaf
is a machine, a node above stands on the machine of its first child. Not responsible for who goes where when one is lost
(`protocols.tree_shape`), nor for what a node does.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from syncline.engines.local.exchange import LINE
from syncline.engines.local.host_interface import Forget, LaneHere, NodeKnown, NodeMoved, Sites
from syncline.engines.local.processes import Process, Processes
from syncline.engines.local.server import Call, LocalServer
from syncline.engines.local.shared_memory import Region, WakeUp
from syncline.engines.local.table_memory import LEAF, Lane
from syncline.engines.local.tree_node import LocalNode, NodeDesk, NodeSpec, name_of, run_node
from syncline.engines.run import RunSpec
from syncline.protocols.tree_shape import ROOT, Tree
from syncline.table.layout import Layout
from syncline.topologies import Trees

if TYPE_CHECKING:
    from syncline.engines.local.local_host import LocalHost

SERVERS = -1  # owns memory that goes with the servers
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

    def __init__(self, spec: RunSpec, processes: Processes, host: LocalHost) -> None:
        assert isinstance(spec.plan.topology, Trees)
        self._spec, self._fan_in = spec, spec.plan.topology.fan_in
        self._forks, self._geometry, self._host = processes, host.geometry, host
        self._several = host.relay_of is not None  # machines
        self.tree = Tree(range(spec.plan.learners), self._fan_in)
        kept = [host.site] if self._several else self.tree.nodes
        self._kept = {node: WakeUp() for node in kept}  # bells that learners ring, whatever leaf is there
        self._machines: list[int] = []  # for learners
        self._serves = True  # shards are here
        self.sites: dict[int, int] = {}  # node -> its machine
        self.processes: dict[int, Process] = {}  # by node, those here
        self.beats: dict[int, Region] = {}
        self._root: WakeUp
        self._bells: dict[int, WakeUp] = {}
        self._learners: dict[int, _Learner] = {}  # here
        self._desks: dict[int, Region] = {}  # of nodes that concern this machine
        self._lanes: dict[int, Lanes] = defaultdict(dict)
        self._tables: dict[int, Layout] = {}
        self._ways: Counter[int] = Counter()  # node -> parents that it had before
        self._of_nodes: tuple[dict[int, Any], ...] = (
            self.processes,
            self.beats,
            self._desks,
            self._lanes,
            self._bells,
        )

    @property
    def bells(self) -> list[WakeUp]:
        """Of leaves, for learners: in the order of what is said to them."""
        return list(self._kept.values())

    @property
    def near(self) -> frozenset[int]:
        """Machines with nodes above or below those here: what is below a lost one sends to the one above it."""
        ways = [{self.sites[node] for node in self.tree.way(leaf)} for leaf in self.tree.leaves]
        return frozenset(site for way in ways if self._host.site in way for site in way)

    # -- the tree ----------------------------------------------------------------------------------------

    def plant(self, sites: Sites, learners: Mapping[int, int], *, again: bool) -> None:
        """With these learners (and their machines) below; `again`: to new servers they come wherever there is room.

        Of several machines the first has a leaf in any case: when all others are lost learners come there.
        """
        self._serves = bool(sites.of(self._host.site))
        if self._several:
            if not again:
                self._machines = sorted(set(learners.values()))
            used = [site for site in self._machines if site in sites.live]
            self.tree = Tree.over(used, self._fan_in, [0] if 0 not in used else ())
            self.sites = {leaf: leaf for leaf in self.tree.leaves}
            for node in self.tree.nodes:
                if node not in self.sites:
                    self.sites[node] = self.sites[min(self.tree.children(node))]
            for learner, site in learners.items():
                self.tree.place(learner, site)
            return
        count = self._spec.plan.learners
        self.tree = Tree(range(count) if again else learners, self._fan_in)
        for nobody in range(count) if again else ():
            self.tree.leave(nobody)
        for learner in learners if again else ():
            self.tree.join(learner)
        self.sites = dict.fromkeys(self.tree.nodes, self._host.site)

    def start(self, root: WakeUp) -> None:
        self._root = root
        for each in (*self._of_nodes, self._learners, self._ways, self._tables):
            each.clear()
        for node in self.tree.nodes:  # whoever is elsewhere, the relay wakes there
            here = self._here(node)
            self._bells[node] = (self._kept.get(node) or WakeUp()) if here else self._host.relay_bell
        for node in reversed(self.tree.nodes):  # whoever is above is there first
            self._begin(node)
        for node in self.tree.nodes:
            self._send_to_parent(node)
        self._tell_below()

    def _here(self, node: int) -> bool:
        return node != ROOT and self.sites[node] == self._host.site

    def _begin(self, node: int) -> None:
        if self._here(node) or self._serves or self.tree.parent[node] in self.processes:
            self._meet(node)

    def _meet(self, node: int) -> None:
        """Those here that have to do with it get what memory there is between them: all shards, the node above it, the relay."""
        desk, bell = self._region(NodeDesk.nbytes()), self._bells[node]
        self._desks[node] = desk
        above = self.tree.parent[node]
        if self._here(node):
            beats = self.beats[node] = self._region(8 * LINE)
            leaf, upper = node in self.tree.leaves, self._bells.get(above, self._root)
            spec = NodeSpec(node, leaf, above, desk, bell, self._root, upper, self._geometry, beats)
            run = partial(run_node, spec=spec)
            self.processes[node] = self._forks.fork("node", node, node, run, part=f"tree node {node}")
        self._host.post_all(Call(LocalServer.add_node, (node, desk, bell)))
        site = self.sites[node]
        known = NodeKnown(name_of(node), site, self._site(above), desk, bell, self._bells.get(above))
        self._host.tell_relay(known)
        for table, layout in self._tables.items():
            self._make_lane(node, table, layout)

    def _region(self, nbytes: int) -> Region:
        return self._host.region(nbytes, SERVERS)

    def _site(self, node: int) -> int | None:
        return None if node == ROOT else self.sites[node]

    def make_table(self, table: int, layout: Layout) -> None:
        self._tables[table] = layout
        for node in self._desks:
            self._make_lane(node, table, layout)
        for node in self._desks:
            self._post(self.tree.parent[node], LocalNode.add_lane, node, table, *self._lanes[node][table])

    def _make_lane(self, node: int, table: int, layout: Layout) -> None:
        lane = self._region(Lane.nbytes(layout, slots=self._geometry.sums))
        self._lanes[node][table] = (layout, lane)
        self._host.post_all(Call(LocalServer.add_node_table, (node, table, layout, lane)))
        self._post(node, LocalNode.add_table, table, layout, lane)
        self._host.tell_relay(LaneHere(table, name_of(node), layout, lane))

    def _post(self, node: int, method: Callable[..., None], *arguments: Any) -> None:
        """Call it there, if that node is here."""
        if node in self.processes:
            self.processes[node].channel.post((method, *arguments))

    # -- learners --------------------------------------------------------------------------------------------

    def join(self, learner: int, site: int) -> None:
        """One begins on that machine."""
        if learner not in self.tree.leaf:
            if self._several:
                self.tree.place(learner, next(leaf for leaf in self.tree.leaves if self.sites[leaf] == site))
            else:
                self.tree.join(learner)
        self._tell_below()

    def add(self, learner: int, rank: int, desk: Region, bell: WakeUp) -> None:
        """One here."""
        self._learners[learner] = _Learner(rank, desk, bell)
        self._send_to_leaf(learner)

    def join_table(self, learner: int, table: int, layout: Layout, lane: Region) -> None:
        if learner in self._learners:
            self._learners[learner].lanes[table] = (layout, lane)
            self._post(self.tree.leaf[learner], LocalNode.add_lane, learner, table, layout, lane)

    def leave(self, learner: int) -> None:
        if self._learners.pop(learner, None) is not None and learner in self.tree.leaf:
            self._post(self.tree.leaf[learner], LocalNode.lose_child, learner)
        self.tree.leave(learner)  # it has no leaf where the last one was lost
        self._tell_below()

    def _send_to_leaf(self, learner: int) -> None:
        known, leaf = self._learners[learner], self.tree.leaf[learner]
        known.desk.words[LEAF] = 0 if self._several else leaf  # before the leaf looks into its outboxes
        self._post(leaf, LocalNode.add_child, learner, None, known.bell, known.rank)
        for table, lane in known.lanes.items():
            self._post(leaf, LocalNode.add_lane, learner, table, *lane)

    def _send_to_parent(self, node: int) -> None:
        parent = self.tree.parent[node]
        if parent not in self.processes:
            return
        if node not in self._desks:
            self._meet(node)
        desk, bell = self._desks[node], self._bells[node]
        self._post(parent, LocalNode.add_child, node, desk, bell, None, self._ways[node])
        for table, lane in self._lanes[node].items():
            self._post(parent, LocalNode.add_lane, node, table, *lane)

    def _tell_below(self) -> None:
        """To those here: who is where."""
        for node in self.processes:
            if node in self.tree.parent:
                self._post(node, LocalNode.hear_below, self.tree.below(node))

    # -- losses ----------------------------------------------------------------------------------------------

    def lose(self, node: int) -> str | None:
        """One is gone: where those below it send now, in words; None: it was the last leaf."""
        if self._several and node in self.tree.leaves:
            return self._renew(node)
        return self._drop(node)

    def lose_site(self, site: int) -> None:
        """A machine is gone, with all that was on it."""
        for node in [node for node, at in self.sites.items() if at == site and node in self.tree.parent]:
            for learner in self.tree.children(node) if node in self.tree.leaves else ():
                self.tree.leave(learner)
            self._drop(node)

    def _drop(self, node: int) -> str | None:
        leaf, above = node in self.tree.leaves, self.tree.parent[node]
        moves = self.tree.lose(node)
        if not self.tree.leaves:
            self.processes.pop(node, None)
            return None
        said = self._move_learners(moves) if leaf else self._move_nodes(moves, above)
        self._forget(node, above)
        return said

    def _renew(self, leaf: int) -> str:
        """Another leaf begins there; it finds in its learners' outboxes what nobody has passed on."""
        above, new = self.tree.parent[leaf], self.tree.renew(leaf)
        self.sites[new], self._bells[new] = self.sites[leaf], self._bells[leaf]
        self._begin(new)
        self._tell_below()
        self._send_to_parent(new)
        if self._here(new):
            self._move_learners(self._learners)
        self._forget(leaf, above)
        return f"node {new} takes its place on machine {self.sites[new]}"

    def _forget(self, node: int, above: int) -> None:
        """Those here hear that nothing more comes from it."""
        for each in self._of_nodes:
            each.pop(node, None)
        self._post(above, LocalNode.lose_child, node)
        self._tell_below()
        self._host.post_all(Call(LocalServer.lose_node, (node,)))
        self._host.tell_relay(Forget(name_of(node)))

    def _move_learners(self, learners: Iterable[int]) -> str:
        moved = [learner for learner in learners if learner in self._learners]
        for learner in moved:
            self._send_to_leaf(learner)
        said = [f"{self._learners[each].rank} to node {self.tree.leaf[each]}" for each in moved]
        return f"learners send elsewhere: {', '.join(said)}" if said else "it had no learners"

    def _move_nodes(self, nodes: Iterable[int], above: int) -> str:
        bell = self._bells.get(above)
        for node in nodes:
            self._ways[node] += 1
            self._send_to_parent(node)
            self._host.tell_relay(NodeMoved(name_of(node), self._site(above), self._ways[node], bell))
            self._post(node, LocalNode.move, above, self._ways[node], bell or self._root)
        to = "the root" if above == ROOT else f"node {above}"
        return f"nodes send to {to}: {', '.join(map(str, nodes))}"

    def close(self) -> None:
        for bell in (*self._bells.values(), *self._kept.values()):
            bell.close()
