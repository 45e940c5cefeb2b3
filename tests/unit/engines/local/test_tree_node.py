"""A tree's node on shared memory: what its children published goes up as one mean, once, and comes back as answers to them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from syncline import messages as m
from syncline.engines.local import tree_node
from syncline.engines.local.record_codec import Whole, encode, encode_answer
from syncline.engines.local.shared_memory import Region, WakeUp
from syncline.engines.local.table_memory import Geometry, Lane
from syncline.engines.local.tree_node import PARTS, LocalNode, NodeDesk, NodeEnd, NodeSpec, run_node
from syncline.messages.to_leader import Gradient
from syncline.messages.to_tree_nodes import Counted, Refused, Taken
from syncline.protocols.tree_shape import ROOT
from syncline.protocols.tree_up import Count
from tests.unit.engines.local.doubles import Post, Turns, layout_of

LAYOUT = layout_of(2, 3)
SLOTS, SUMS = 2, 4


def again(given: Region) -> Region:
    """As another process has it."""
    return Region(given.nbytes, os.dup(given.fd))


class Learner:
    """A leaf's child."""

    def __init__(self, learner: int) -> None:
        self.learner, self.bell = learner, WakeUp()
        self.lane_regions = [Region(Lane.nbytes(LAYOUT, slots=SLOTS)) for _ in range(2)]  # by table
        self.lanes = [Lane(region, LAYOUT, slots=SLOTS) for region in self.lane_regions]
        self.lane = self.lanes[0]

    def publish(
        self,
        number: int,
        value: float,
        *,
        table: int = 0,
        examples: int = 1,
        slot: int = 0,
        present: tuple[int, ...] = (),
    ) -> None:
        lane = self.lanes[table]
        for segment in lane.slots[slot].segments:
            segment.fill_(value)
        lane.slots[slot].write_options(b"options of %d" % self.learner)
        if present:
            lane.slots[slot].mask.copy_(torch.tensor(present, dtype=torch.uint8))
        said = Gradient(table, number, 0, 0, examples, 0, 1, 0, not present, False, b"", 0.5)
        lane.outbox.push(encode(said, slot))

    def joins(self) -> list[Any]:
        """What its leaf is told."""
        return [(LocalNode.add_child, self.learner, None, WakeUp(), self.learner), self.lane_of(0)]

    def lane_of(self, table: int) -> tuple[Any, ...]:
        return LocalNode.add_lane, self.learner, table, LAYOUT, again(self.lane_regions[table])

    def passed(self, number: int, slot: int = 0) -> bool:
        return self.lane.passed.freed(slot, number)


class World:
    """One node, with the root's and its parent's ends of its desk."""

    def __init__(self, *, leaf: bool = True, lockstep: bool = True, parent: int = ROOT) -> None:
        desk, lane = Region(NodeDesk.nbytes()), Region(Lane.nbytes(LAYOUT, slots=SUMS))
        self.lane = Lane(lane, LAYOUT, slots=SUMS)
        own = NodeDesk(again(desk))
        self.root, self.above = NodeEnd(own.sums, own.answers), NodeEnd(own.over, own.back, 0)
        self.answers, self.own = own.answers, own
        self.beats, self.bells = Region(8), [WakeUp(), WakeUp()]
        self.spec = NodeSpec(
            9, leaf, parent, desk, WakeUp(), *self.bells, Geometry(SLOTS, 1, sums=SUMS), self.beats
        )
        self.post: Any = Post((LocalNode.add_table, 0, LAYOUT, lane))
        if not lockstep:
            self.answer(active(lockstep=False))

    def settle(self) -> Iterator[None]:
        """All that it was told is done."""
        yield
        while self.post.letters:
            yield
        yield

    def up(self, end: NodeEnd | None = None) -> tuple[list[tuple[int, int]], Whole, list[float]] | None:
        """Its next sum: learners and numbers in it, what it says of itself, and the values."""
        found = (end or self.root).pop()
        if found is None:
            return None
        *parts, last = found
        whole = Whole.of(last)
        slot = self.lane.slots[whole.slot]
        numbers = [(part.learner, int(part.said[2])) for part in parts]
        return numbers, whole, sorted({value for each in slot.segments for value in each.tolist()})

    def answer(self, message: Any, end: NodeEnd | None = None, way: int = 0) -> None:
        (end or self.root).tell(encode_answer(message, way))
        (end or self.root).flush()

    def lives(self, monkeypatch: pytest.MonkeyPatch, story: Iterator[None]) -> None:
        monkeypatch.setattr(tree_node, "Waiter", lambda bell, yields: Turns(story, self.post))
        run_node(self.post, self.spec)
        assert not self.post.said, self.post.said[0].traceback


def active(*learners: int, at: int = 0, lockstep: bool = True) -> Counted:
    return Counted(0, Count(1, lockstep, False, dict.fromkeys(learners, at)))


def test_in_lockstep_a_leaf_passes_one_mean_by_examples_up_when_all_have_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, one, two = World(), Learner(1), Learner(2)
    world.post.letters += [*one.joins(), *two.joins()]

    def story() -> Iterator[None]:
        yield from world.settle()
        world.answer(active(1, 2))
        two.publish(1, 4.0, examples=1)
        yield from world.settle()
        assert world.up() is None
        one.publish(1, 1.0, examples=3)
        yield from world.settle()
        assert world.up() == ([(1, 1), (2, 1)], Whole(0, 1, 0, 1, 1, 0, 1), [1.75])
        assert os.eventfd_read(world.bells[0].fd) and not one.passed(1)
        assert world.lane.slots[0].options_text() == b"options of 1"
        world.answer(Taken(0, 1))
        yield from world.settle()
        assert one.passed(1) and two.passed(1)

    world.lives(monkeypatch, story())
    assert world.beats.words[0] > 5


def test_under_a_free_dial_what_has_come_goes_up_when_the_way_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, one, two = World(lockstep=False), Learner(1), Learner(2)
    world.post.letters += [*one.joins(), *two.joins()]

    def story() -> Iterator[None]:
        one.publish(1, 1.0)
        yield from world.settle()
        assert world.up() == ([(1, 1)], Whole(0, 1, -1, 1, 1, 0, 1), [1.0])
        one.publish(2, 2.0, slot=1), two.publish(1, 4.0)
        yield from world.settle()
        assert world.up() is None, "one is under way"
        world.answer(Taken(0, 1))
        yield from world.settle()
        numbers, whole, values = world.up() or ([], None, [])
        assert (numbers, values) == ([(1, 2), (2, 1)], [3.0]) and whole is not None and whole.slot == 1

    world.lives(monkeypatch, story())


def test_a_sum_waits_for_a_slot_that_all_shards_have_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    world, one = World(lockstep=False), Learner(1)
    world.post.letters += one.joins()

    def story() -> Iterator[None]:
        yield from world.settle()
        for number in range(1, SUMS + 1):
            one.publish(number, float(number), slot=number % SLOTS)
            yield from world.settle()
            assert world.up() is not None
            world.answer(Taken(0, number))
            yield from world.settle()
        one.publish(SUMS + 1, 9.0)
        yield from world.settle()
        assert world.up() is None
        world.lane.drafts.free(0, 2, 3)
        yield from world.settle()
        numbers, whole, _ = world.up() or ([], None, [])
        assert numbers == [(1, SUMS + 1)] and whole is not None and whole.slot == 2

    world.lives(monkeypatch, story())


def test_what_a_former_leaf_has_passed_on_is_not_passed_on_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world, one = World(lockstep=False), Learner(1)
    one.publish(1, 1.0), one.publish(2, 2.0, slot=1)
    one.lane.passed.free(0, 0, 1)
    world.post.letters += one.joins()

    def story() -> Iterator[None]:
        yield from world.settle()
        assert (world.up() or [])[0] == [(1, 2)] and world.up() is None

    world.lives(monkeypatch, story())


def test_a_refused_sum_goes_again_without_what_counts_already(monkeypatch: pytest.MonkeyPatch) -> None:
    world, one, two = World(), Learner(1), Learner(2)
    world.post.letters += [*one.joins(), *two.joins()]

    def story() -> Iterator[None]:
        yield from world.settle()
        world.answer(active(1, 2))
        one.publish(1, 1.0), two.publish(1, 4.0)
        yield from world.settle()
        assert (world.up() or [])[0] == [(1, 1), (2, 1)]
        world.answer(Refused(0, 1, frozenset({(1, 1)})))
        world.answer(active(2))
        yield from world.settle()
        assert one.passed(1) and not two.passed(1)
        numbers, whole, values = world.up() or ([], None, [])
        assert (numbers, values) == ([(2, 1)], [4.0]) and whole is not None and whole.number == 2

    world.lives(monkeypatch, story())


def test_a_leaf_that_takes_a_learner_over_finds_the_gradients_of_all_its_tables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, one = World(lockstep=False), Learner(1)
    second = Region(Lane.nbytes(LAYOUT, slots=SUMS))
    for table in (0, 1):
        for slot in range(SLOTS):
            one.publish(1 + slot, 1.0, table=table, slot=slot)
    world.post.letters += [(LocalNode.add_table, 1, LAYOUT, second), *one.joins(), one.lane_of(1)]
    world.answer(Counted(1, Count(1, False, False)))

    def story() -> Iterator[None]:
        yield from world.settle()
        found = set()
        for _ in range(2 * SLOTS):
            if (sum_ := world.up()) is not None:
                found |= {(sum_[1].table, number) for _, number in sum_[0]}
                world.answer(Taken(sum_[1].table, sum_[1].number))
            yield from world.settle()
        assert found == {(0, 1), (0, 2), (1, 1), (1, 2)}

    world.lives(monkeypatch, story())


def test_a_lost_child_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    world, one, two = World(), Learner(1), Learner(2)
    world.post.letters += [*one.joins(), *two.joins()]

    def story() -> Iterator[None]:
        yield from world.settle()
        world.answer(active(1, 2))
        one.publish(1, 1.0)
        yield from world.settle()
        assert world.up() is None
        world.post.letters.append((LocalNode.lose_child, 2))
        yield from world.settle()
        assert (world.up() or [])[0] == [(1, 1)]

    world.lives(monkeypatch, story())


def test_a_child_that_is_lost_before_its_table_is_known_leaves_the_node_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, one, two = World(lockstep=False), Learner(1), Learner(2)
    one.publish(1, 1.0)
    joins, _ = one.joins()
    world.post.letters += [joins, (LocalNode.lose_child, 1), *two.joins()]

    def story() -> Iterator[None]:
        two.publish(1, 4.0)
        yield from world.settle()
        assert (world.up() or [])[0] == [(2, 1)]

    world.lives(monkeypatch, story())


# -- above the leaves ------------------------------------------------------------------------------------------


class Below:
    """A node below, which says what its learner said."""

    def __init__(self, node: int) -> None:
        self.node, self.learner = node, Learner(10 * node)
        self.desk_region, self.lane_region = (
            Region(NodeDesk.nbytes()),
            Region(Lane.nbytes(LAYOUT, slots=SUMS)),
        )
        self.desk, self.lane = NodeDesk(again(self.desk_region)), Lane(self.lane_region, LAYOUT, slots=SUMS)

    def joins(self, way: int = 0) -> list[Any]:
        lane = (LocalNode.add_lane, self.node, 0, LAYOUT, again(self.lane_region))
        return [(LocalNode.add_child, self.node, again(self.desk_region), WakeUp(), None, way), lane]

    def publish(
        self, number: int, value: float, *, examples: int = 1, way: int = 0, last: bool = True
    ) -> None:
        for segment in self.lane.slots[0].segments:
            segment.fill_(value)
        learner = self.learner.learner
        said = encode(Gradient(0, number, 0, 0, examples, 0, 1, 0, True, False, b"", 0.5))
        self.desk.over.push((way, learner, learner, *said))
        if last:
            self.desk.over.push(Whole(0, number, 0, 1, True, 0, 1).record(way))

    def answers(self) -> list[tuple[Any, ...]]:
        found = []
        while (record := self.desk.back.pop()) is not None:
            found.append(record)
        return found


def test_a_node_adds_its_nodes_means_by_all_their_examples_and_tells_them_what_the_root_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, two, three = World(leaf=False, lockstep=False), Below(2), Below(3)
    world.post.letters += [*two.joins(), *three.joins(way=1)]

    def story() -> Iterator[None]:
        yield from world.settle()
        two.publish(5, 1.0, examples=2, last=False)
        three.publish(7, 9.0, way=0)  # to another node, before it was moved here
        yield from world.settle()
        assert world.up() is None
        three.publish(8, 4.0, examples=1, way=1)
        yield from world.settle()
        assert (world.up() or [])[0] == [(30, 8)]
        two.publish(5, 1.0, examples=4)
        world.answer(Taken(0, 1))
        yield from world.settle()
        numbers, _, values = world.up() or ([], None, [])
        assert numbers == [(20, 5), (20, 5)] and values == [1.0], "all that came before the last record"
        assert three.answers() == encode_answer(Taken(0, 8), 1) and two.answers() == []

    world.lives(monkeypatch, story())


def test_a_node_that_is_moved_sends_again_to_the_one_above_and_hears_the_former_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, one = World(lockstep=False, parent=4), Learner(1)
    world.post.letters += one.joins()

    def story() -> Iterator[None]:
        yield from world.settle()
        one.publish(1, 1.0)
        yield from world.settle()
        assert (world.up(world.above) or [])[0] == [(1, 1)] and world.up() is None
        world.post.letters.append((LocalNode.move, 5, 1, WakeUp()))
        yield from world.settle()
        new = NodeEnd(world.own.over, world.own.back, 1)
        numbers, whole, values = world.up(new) or ([], None, [])
        assert (numbers, values) == ([(1, 1)], [1.0]) and whole is not None and whole.slot == 0
        world.answer(Taken(0, whole.number), new, way=0)
        yield from world.settle()
        assert not one.passed(1), "the former one's word"
        world.answer(Taken(0, whole.number), new, way=1)
        yield from world.settle()
        assert one.passed(1)

    world.lives(monkeypatch, story())


def test_what_the_former_node_above_half_said_is_void_though_the_node_is_moved_while_it_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, one = World(lockstep=False, parent=4), Learner(1)
    world.post.letters += one.joins()

    def story() -> Iterator[None]:
        yield from world.settle()
        one.publish(1, 1.0)
        yield from world.settle()
        _, whole, _ = world.up(world.above) or ([], None, [])
        assert whole is not None
        without, _ = encode_answer(Refused(0, whole.number, frozenset({(1, 1)})), 0)
        world.own.back.push(without)
        yield
        world.answer(Counted(1, Count(1, False, False)))  # of a table that it hears of after it was moved
        new = NodeEnd(world.own.over, world.own.back, 1)
        world.answer(Refused(0, whole.number + 1, frozenset()), new, way=1)
        lane = Region(Lane.nbytes(LAYOUT, slots=SUMS))
        world.post.letters += [
            (LocalNode.hear_below, {}),
            (LocalNode.move, 5, 1, WakeUp()),
            (LocalNode.add_table, 1, LAYOUT, lane),
        ]
        yield from world.settle()
        assert not one.passed(1), "the former one's word"
        assert (world.up(new) or [])[0] == [(1, 1)]

    world.lives(monkeypatch, story())


def test_what_an_end_has_no_room_for_follows_in_order() -> None:
    own = NodeDesk(Region(NodeDesk.nbytes()))
    end, count = NodeEnd(own.sums, own.answers), 300
    end.tell(encode_answer(active(*range(count))))
    found = []
    while end.flush():
        while (record := own.answers.pop()) is not None:
            found.append(record)
    assert found == encode_answer(active(*range(count))) and len(found) > PARTS


def test_what_goes_wrong_in_a_node_is_said_with_where(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.post.letters.append((LocalNode.add_lane, 1, 0, None, None))
    monkeypatch.setattr(tree_node, "Waiter", lambda bell, yields: Turns(iter([None] * 9), world.post))
    with pytest.raises(AttributeError):
        run_node(world.post, world.spec)
    (raised,) = world.post.said
    assert isinstance(raised, m.ShardRaised) and raised.shard == 9 and "add_lane" in raised.traceback


def test_values_that_some_children_lack_are_means_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    world, one, two = World(), Learner(1), Learner(2)
    world.post.letters += [*one.joins(), *two.joins()]

    def story() -> Iterator[None]:
        yield from world.settle()
        world.answer(active(1, 2))
        one.publish(1, 1.0), two.publish(1, 3.0, present=(0, 1))
        yield from world.settle()
        _, whole, _ = world.up() or ([], None, [])
        assert whole is not None and whole.full
        gradients = world.lane.slots[whole.slot].gradients
        assert [set(each.tolist()) for each in gradients] == [{0.5}, {2.0}]

    world.lives(monkeypatch, story())
