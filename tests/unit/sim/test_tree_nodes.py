"""Nodes of a simulated tree: sums on their way up with the means of what they hold, and versions down, whole and newest first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from syncline.cluster import Cluster, Cost
from syncline.dial import as_sync
from syncline.messages.to_leader import Sum
from syncline.messages.to_tree_nodes import Counted, Refused, Taken
from syncline.protocols.tree_shape import Tree
from syncline.protocols.tree_up import Count
from syncline.sim.owned_memory import NEVER
from syncline.sim.tree_nodes import SimNode, TableFlow
from tests.unit.sim.small_world import EQUAL, SmallWorld, gradient


class World(SmallWorld):
    """Learners, two to a leaf; their numbers are published by the test."""

    def __init__(
        self, learners: int = 2, cluster: Cluster = EQUAL, *, shards: int = 1, sync: str = "softsync:1"
    ) -> None:
        super().__init__(cluster, learners=learners, sync=sync, shards=shards)
        self.open_table(shards, *range(learners))
        self.tree = Tree(range(learners), 2)
        self.learners = {each: Learner(self, each) for each in range(learners)}
        self.nodes = {node: SimNode(self, node) for node in self.tree.nodes}  # type: ignore[arg-type]
        for node in self.nodes.values() if sync != "hardsync" else ():
            node.hear(Counted(0, Count(1, False, False)))
        self.dials = {0: as_sync("async"), 1: as_sync("hardsync")}

    def publish(
        self, learner: int, number: int, value: float, *, examples: int = 4, full: bool = True
    ) -> None:
        """A gradient of this everywhere has arrived at its leaf."""
        lane = self.lanes[0, learner]
        place = number % 2
        lane.numbers[place], slot = number, lane.sent[place]
        for view in slot.gradients:
            view.fill_(value)
        slot.mask.copy_(torch.tensor([1, 0, 1, 0]))
        slot.write_options(b"[]")
        lane.sending.add(number)
        self.nodes[self.tree.leaf[learner]].gradient(
            self.learners[learner], gradient(number, examples=examples, full=full)
        )

    @property
    def sums(self) -> list[tuple[float, Sum]]:
        """That have reached the leading shard."""
        return [(moment, what) for moment, who, what in self.heard if isinstance(what, Sum)]

    def lane(self, node: int = 0) -> Any:
        return self.lanes[0, -1 - node]


class Learner:
    def __init__(self, world: SmallWorld, learner: int) -> None:
        self._world, self.learner, self.rank, self.machine = world, learner, learner, learner

    def wake(self) -> None:
        self._world.hear("wake", self.learner)


def parts(said: Sum) -> list[tuple[int, int]]:
    return [(learner, each.number) for learner, each in said.gradients]


# -- up ------------------------------------------------------------------------------------------------------


def test_what_came_while_a_sum_was_under_way_goes_up_as_one_mean_by_examples() -> None:
    world = World()
    world.publish(0, 1, 8.0)
    world.run()
    assert 1 not in world.lanes[0, 0].sending, "its leaf has it"
    world.publish(1, 1, 1.0, examples=6)
    world.publish(0, 2, 5.0, examples=2)
    world.run()
    assert [parts(said) for _, said in world.sums] == [[(0, 1)]]
    world.nodes[0].hear(Taken(0, 1))
    world.run()
    assert [parts(said) for _, said in world.sums] == [[(0, 1)], [(0, 2), (1, 1)]]
    lane, said = world.lane(), world.sums[1][1]
    slot = lane.sent[lane.numbers.index(said.number)]
    assert said.full and all((view == 2.0).all() for view in slot.gradients)
    assert world.lanes[0, 0].freed.keys() == {(0, 1)}, "its draft is free, the others' are not yet"
    assert [each.options for _, each in world.sums] == [1, 1], (
        "the group options came once, and have not changed since"
    )


def test_parameters_that_nobody_has_a_gradient_of_are_not_in_the_sum() -> None:
    world = World()
    world.publish(0, 1, 3.0, full=False)
    world.run()
    lane = world.lane()
    assert not world.sums[0][1].full and lane.sent[lane.numbers.index(1)].mask.tolist() == [1, 0, 1, 0]


def test_adding_takes_as_long_as_at_a_shard_one_after_another() -> None:
    world = World(cluster=replace(EQUAL, take=Cost(fixed=2.0)), sync="hardsync")
    world.nodes[0].hear(Counted(0, Count(1, True, False, {0: 0, 1: 0})))
    for learner in (1, 0):
        world.publish(learner, 1, 1.0)
    world.run()
    ((moment, said),) = world.sums
    assert parts(said) == [(0, 1), (1, 1)] and moment >= 4.0


def test_a_sum_that_was_refused_is_made_again_without_what_does_not_count() -> None:
    world = World()
    world.publish(0, 1, 8.0)
    world.run()
    world.publish(1, 1, 1.0)
    world.run()
    world.nodes[0].hear(Refused(0, 1, frozenset({(0, 1)})))
    world.run()
    assert [parts(said) for _, said in world.sums] == [[(0, 1)], [(1, 1)]]
    assert world.lane().numbers.count(NEVER) == 1, "the draft of the refused sum is free"


def test_a_draft_of_sums_is_free_when_all_shards_are_done_with_it() -> None:
    world = World(shards=2)
    world.publish(0, 1, 8.0)
    world.run()
    lane, node = world.lane(), world.nodes[0]
    assert lane.under_way.keys() == {(1, 1)}
    for shard in (0, 1):
        assert 1 in lane.numbers
        lane.freed[shard, 1] = world.clock.now
        node.freed(0, 1)
    assert 1 not in lane.numbers and not lane.freed


def test_higher_nodes_add_sums_of_leaves_and_tell_them_what_was_taken() -> None:
    world = World(8)  # four leaves, two nodes above them
    top = world.tree.parent[0]
    world.publish(0, 1, 2.0)
    world.publish(2, 1, 4.0)
    world.run()
    world.nodes[top].hear(Taken(0, 1))
    world.run()
    assert [parts(said) for _, said in world.sums] == [[(0, 1)], [(2, 1)]]
    assert world.lanes[0, 0].freed.keys() == {(0, 1)} and not world.lanes[0, 2].freed
    world.publish(0, 2, 3.0)
    world.nodes[top].hear(Taken(0, 2))
    world.run()
    assert parts(world.sums[2][1]) == [(0, 2)], "its leaf knew that the way was free"


def test_the_dead_and_those_who_left_send_nothing_on() -> None:
    world = World()
    world.nodes[0].dead = True
    world.publish(0, 1, 8.0)
    world.nodes[0].hear(Taken(0, 1))
    other = World()
    other.lanes.pop((0, 1))
    other.nodes[0].gradient(other.learners[1], gradient(1))
    world.run(), other.run()
    assert not world.heard and not other.heard


# -- versions down -------------------------------------------------------------------------------------------


def flow(learners: int = 2, shards: int = 1) -> tuple[World, TableFlow]:
    world = World(learners, shards=shards)
    world.flows = {}
    found = world.flows[0] = TableFlow(world, 0)  # type: ignore[arg-type]
    found.said(0)
    return world, found


def make(world: World, found: TableFlow, version: int, shards: int = 1) -> None:
    for shard in range(shards):
        slices = world.tables[0].layout.parts[shard].segments(world.tables[0].weights)
        found.made(shard, version, [torch.full_like(segment, float(version)) for segment in slices])


def test_a_version_reaches_every_learner_whole_when_all_shards_have_made_it() -> None:
    world, found = flow(4, shards=2)
    ends = [found.join(learner) for learner in world.learners.values()]
    assert all(end.swap() is None for end in ends)
    weights = world.tables[0].weights
    first = world.tables[0].layout.parts[0].segments(weights)
    found.made(0, 1, [torch.ones_like(segment) for segment in first])
    world.run()
    assert all(end.swap() is None for end in ends), "half of it"
    make(world, found, 1, 2)
    world.run()
    for end in ends:
        copy = end.swap()
        assert copy is not None and copy.version == 1 and all((view == 1.0).all() for view in copy.weights)
        assert end.swap() is None


def test_under_a_dial_that_waits_nothing_goes_down_unasked() -> None:
    world, found = flow()
    end = found.join(world.learners[0])
    found.said(1)
    make(world, found, 1)
    world.run()
    assert end.swap() is None
    found.said(0)  # and the newest at once, when nobody waits any more
    world.run()
    assert end.swap() is not None


def test_what_was_read_in_another_way_is_not_taken_over_again() -> None:
    world, found = flow()
    end = found.join(world.learners[0])
    make(world, found, 3)
    end.has(5)
    world.run()
    assert end.swap() is None and end.buffers.version == 5


def test_who_has_left_and_a_tree_that_was_planted_anew_get_nothing() -> None:
    world, found = flow()
    ends = [found.join(learner) for learner in world.learners.values()]
    found.leave(1, world.tree.leaf[1])
    make(world, found, 1)
    world.run()
    assert [end.swap() is None for end in ends] == [False, True]
    world.flows = {}
    make(world, found, 2)
    world.run()
    assert ends[0].swap() is None


@pytest.mark.parametrize("lost", ["leaf", "above"])
def test_those_below_a_lost_node_hear_from_another(lost: str) -> None:
    world, found = flow(8)
    ends = [found.join(learner) for learner in world.learners.values()]
    node = 0 if lost == "leaf" else world.tree.parent[0]
    above = world.tree.parent[node]
    moves = world.tree.lose(node)
    del world.nodes[node]
    found.lost(node, above, moves, leaf=lost == "leaf")
    make(world, found, 1)
    world.run()
    assert [end.swap() is not None for end in ends] == [True] * 8
