"""A tree's crew: whatever comes and is lost, each node has been told of just those that send to it, and of their memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline import messages as m
from syncline.engines.local.host_interface import Forget, NodeKnown, NodeMoved, Sites
from syncline.engines.local.local_host import LocalHost
from syncline.engines.local.server import Call, LocalServer
from syncline.engines.local.shared_pickle import pack
from syncline.engines.local.table_memory import LEAF
from syncline.engines.local.tree_node import LocalNode, name_of
from syncline.protocols.tree_shape import ROOT
from syncline.topologies import Servers, Trees
from tests.unit.engines.local.doubles import Children, layout_of, said_to, spec_of

LAYOUT = layout_of(3)


class Told:
    """What a node knows by what it was told."""

    def __init__(self, node: int, parent: int, said: list[Any]) -> None:
        self.node, self.parent, self.way = node, parent, 0
        self.children: dict[int, int] = {}  # and at which of its parents' ways
        self.lanes: set[tuple[int, int]] = set()
        self.tables: set[int] = set()
        self.below: dict[int, list[int]] = {}
        doing: dict[Callable[..., Any], Callable[..., Any]] = {
            LocalNode.add_child: self._add,
            LocalNode.add_lane: lambda child, table, *memory: self.lanes.add((child, table)),
            LocalNode.add_table: lambda table, *rest: self.tables.add(table),
            LocalNode.lose_child: lambda child: self.children.pop(child, None),
            LocalNode.hear_below: lambda below: setattr(self, "below", below),
            LocalNode.move: self._move,
        }
        for method, *arguments in said:
            doing[method](*arguments)

    def _add(self, child: int, desk: Any, bell: Any, rank: int | None, way: int = 0) -> None:
        self.children[child] = way
        self.lanes = {lane for lane in self.lanes if lane[0] != child}

    def _move(self, parent: int, way: int, above: Any) -> None:
        self.parent, self.way = parent, way


class Crew:
    """A machine with a tree over its learners."""

    def __init__(self, learners: int, fan_in: int, *, sites: Sites | None = None, site: int = 0) -> None:
        self.children: Any = Children()
        spec = spec_of(learners, Trees(fan_in=fan_in, root=Servers(1, True)))
        relay = (lambda parts: parts) if sites is not None else None
        self.host = LocalHost(
            spec,
            self.children,
            pack("task"),
            print,
            print,
            sites=sites,
            site=site,
            relay=relay,  # type: ignore[arg-type]
        )
        assert self.host.nodes is not None
        self.nodes, self.tables, self.joined = self.host.nodes, list[int](), set[tuple[int, int]]()
        self.sites = sites or Sites((0,))

    def begin(self, learners: dict[int, int]) -> Crew:
        """With these learners, and their machines."""
        self.host.start_servers(0, self.sites, learners, again=False)
        for learner, site in learners.items():
            self.start(learner, site)
        return self

    def start(self, learner: int, site: int = 0) -> None:
        self.host.introduce(learner, learner - 1, site)
        if site == self.host.site:
            self.host.start_learner(learner, learner - 1)

    def make_table(self, table: int) -> None:
        self.host._table(table, LAYOUT)
        self.nodes.make_table(table, LAYOUT)
        self.tables.append(table)

    def join_table(self, learner: int, table: int) -> None:
        self.host.tell_shards(m.JoinTable(table, learner, learner - 1))
        self.joined.add((learner, table))

    def told(self, node: int) -> Told:
        process = self.nodes.processes[node]
        spec = self.children.runs[process.pid].keywords["spec"]
        return Told(node, spec.parent, said_to(process))

    def check(self) -> None:
        tree = self.nodes.tree
        assert set(self.nodes.processes) == set(tree.parent)
        for node in tree.nodes:
            told, children = self.told(node), tree.children(node)
            assert set(told.children) == set(children) and told.parent == tree.parent[node]
            assert told.tables == set(self.tables)
            assert {key: sorted(of) for key, of in told.below.items()} == {
                key: sorted(of) for key, of in tree.below(node).items()
            }
            if node in tree.leaves:
                assert told.lanes >= {lane for lane in self.joined if lane[0] in children}
                for learner in children:
                    desk = self.children.spec_of("learner", learner - 1).desk
                    assert desk.words[LEAF] == node, "whom it wakes"
            else:
                assert told.lanes >= {(child, table) for child in children for table in self.tables}
                assert all(told.children[child] == self.told(child).way for child in children)
        calls = [each for each in said_to(self.children.of("shard")) if isinstance(each, Call)]
        there = {each.arguments[0] for each in calls if each.method is LocalServer.add_node}
        lost = {each.arguments[0] for each in calls if each.method is LocalServer.lose_node}
        assert there - lost == set(tree.nodes)


@settings(max_examples=25)
@given(st.integers(1, 9), st.integers(2, 3), st.integers(0, 10**6))
def test_after_any_joins_and_losses_every_node_knows_just_its_own(
    learners: int, fan_in: int, seed: int
) -> None:
    draw = random.Random(seed)
    crew = Crew(learners, fan_in).begin(dict.fromkeys(range(1, learners + 1), 0))
    crew.check()
    new = learners + 1
    for step in range(8):
        tree = crew.nodes.tree
        what = draw.choice(["start", "forget", "lose", "table", "join table"])
        if what == "start":
            crew.start(new)
            new += 1
        elif what == "table":
            crew.make_table(step)
        elif what == "join table" and crew.tables and tree.leaf:
            crew.join_table(draw.choice(sorted(tree.leaf)), draw.choice(crew.tables))
        elif what == "forget" and tree.leaf:
            crew.host.forget(draw.choice(sorted(tree.leaf)))
        elif what == "lose":
            node = draw.choice(tree.nodes)
            last = tree.leaves == [node]
            assert (crew.host.lose_node(node) is None) == last
            if last:
                return
        crew.check()


def test_where_those_below_a_lost_node_send_now_is_said() -> None:
    crew = Crew(5, 2).begin(dict.fromkeys(range(1, 6), 0))  # leaves 0, 1, 2 below nodes 3, 4
    assert crew.host.lose_node(0) == "learners send elsewhere: 0 to node 2, 1 to node 1"
    assert crew.host.lose_node(3) == "nodes send to the root: 1"
    assert crew.told(1).parent == ROOT and crew.told(1).way == 1
    crew.host.forget(3), crew.host.forget(4), crew.host.forget(2)
    assert crew.host.lose_node(1) == "it had no learners"
    assert crew.host.lose_node(2) is None, "the last leaf"


def test_a_tree_of_new_servers_has_those_that_live_wherever_there_is_room() -> None:
    crew = Crew(4, 2).begin(dict.fromkeys(range(1, 5), 0))
    crew.host.forget(2), crew.host.forget(1)
    crew.host.end_servers()
    crew.host.start_servers(1, crew.sites, {3: 0, 4: 0}, again=True)
    assert {learner: crew.nodes.tree.leaf[learner] for learner in (3, 4)} == {3: 0, 4: 1}
    crew.host.tell_shards(m.JoinLoader(0, {3: 2, 4: 3}))  # they are told of anew
    assert [set(crew.told(leaf).children) for leaf in (0, 1)] == [{3}, {4}]


def test_learners_wake_the_leaf_of_their_number_whichever_process_that_is() -> None:
    crew = Crew(4, 2).begin(dict.fromkeys(range(1, 5), 0))
    bells = crew.children.spec_of("learner", 3).leaves
    assert len(bells) == 2
    specs = [crew.children.runs[crew.nodes.processes[leaf].pid].keywords["spec"] for leaf in (0, 1)]
    assert [spec.bell.fd for spec in specs] == [bell.fd for bell in bells]
    assert all(spec.above.fd == spec.root.fd for spec in specs), "above them is the root"


def said(crew: Crew, kind: Any) -> list[Any]:
    return [each for each in said_to(crew.children.of("relay", crew.host.site)) if isinstance(each, kind)]


@pytest.mark.parametrize("site", [0, 1])
def test_on_several_machines_a_leaf_is_a_machine_and_each_starts_its_own(site: int) -> None:
    sites = Sites((0,), (0, 1, 2))
    crew = Crew(3, 2, sites=sites, site=site).begin({1: 0, 2: 1, 3: 2})
    tree = crew.nodes.tree
    assert tree.leaves == [0, 1, 2] and [tree.leaf[learner] for learner in (1, 2, 3)] == [0, 1, 2]
    assert set(crew.nodes.processes) == {0: {0, 3}, 1: {1}}[site], "a node above is with its first child"
    assert set(crew.told(site).children) == {site + 1}
    meets = {0: {0: 0, 1: 0, 2: 2, 3: None, 4: None}, 1: {1: 0}}[
        site
    ]  # where shards are, all; with the machine above each
    assert {each.name: each.parent for each in said(crew, NodeKnown)} == {
        name_of(node): above for node, above in meets.items()
    }


def test_a_machines_lost_leaf_is_renewed_there_and_its_learners_stay() -> None:
    crew = Crew(2, 2, sites=Sites((0,), (0, 1)), site=1).begin({1: 0, 2: 1})
    before = crew.nodes.processes[1]
    assert crew.host.lose_node(1) == "node 2 takes its place on machine 1"
    assert crew.nodes.processes[2] is not before and set(crew.told(2).children) == {2}
    assert [each.learner for each in said(crew, Forget)] == [name_of(1)]
    assert crew.host.lose_node(0) == "node 3 takes its place on machine 0"
    assert set(crew.nodes.processes) == {2}, "that one is started there"


def test_what_was_below_a_lost_machine_sends_to_the_one_above_it() -> None:
    sites = Sites((0,), (0, 1, 2, 3))
    crew = Crew(4, 2, sites=sites, site=1).begin({1: 0, 2: 1, 3: 2, 4: 3})
    assert crew.nodes.tree.parent[1] == 4 and crew.nodes.sites[4] == 0
    crew.host.lose_site(0)
    assert crew.told(1).parent == ROOT == crew.nodes.tree.parent[1] and 1 not in crew.nodes.tree.leaf
    assert [(each.name, each.parent, each.way) for each in said(crew, NodeMoved)] == [(name_of(1), None, 1)]
