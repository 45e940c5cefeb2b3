"""A simulated shard: one thing after another, what it decides goes out when the work before it is done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from syncline.cluster import Cluster, Cost, Link
from syncline.messages.log import Fold, Leave, PutValues, Take
from syncline.ports import Portion, Reading, Serving
from syncline.sim.owned_memory import DRAFT
from syncline.sim.server import SimServer
from tests.unit.sim.small_world import EQUAL, LATENCY, SETUP, SmallWorld, layout_of

TAKE = Take(
    table=0,
    learner=0,
    number=3,
    options=0,
    full=True,
    examples=4,
    rank=0,
    iteration=0,
    alone=False,
    weight=1.0,
)


class Role:
    """In a server role's place: notes what it gets, and does with its port what the test says."""

    def __init__(self, port: Any, world: SmallWorld, does: Callable[[Any, Any], None]) -> None:
        self._port, self._world, self._does = port, world, does
        self.replay = SimpleNamespace(settled=True)

    def note(self, learner: int, message: Any) -> None:
        self.handle(message)

    def handle(self, what: Any) -> None:
        self._world.hear("role", what)
        self._does(self._port, what)

    entry = handle


class World(SmallWorld):
    does: Any = staticmethod(lambda port, what: None)

    def make_role(self, port: Any) -> Any:
        return Role(port, self, lambda port, what: self.does(port, what))


def shard(
    cluster: Cluster = EQUAL, *, shards: int = 1, index: int = 0, does: Any = None
) -> tuple[World, SimServer]:
    world = World(cluster, shards=shards)
    world.does = does or world.does
    world.open_table(shards, 0, 1)
    server = world.servers[index] = SimServer(world, index)  # type: ignore[arg-type]
    world.learners = {0: Somebody(world, 0), 1: Somebody(world, 1)}
    return world, server


class Somebody:
    """In a learner's place."""

    waits_for: str | None = None
    handled = decided = -1.0

    def __init__(self, world: SmallWorld, learner: int) -> None:
        self._world, self.learner, self.machine = world, learner, learner

    def wake(self) -> None:
        self._world.hear(f"wake {self.learner}", None)

    def give(self, portion: Portion) -> None:
        self._world.hear(f"give {self.learner}", portion)

    def take_in(self, shard: int, seconds: float, arrive: Callable[[], None]) -> None:
        self._world.hear(f"take in {self.learner}", seconds)
        arrive()


def heard(world: SmallWorld, *who: str) -> list[tuple[float, Any]]:
    return [(moment, what) for moment, each, what in world.heard if not who or each in who]


# -- one thing after another ---------------------------------------------------------------------------------


def test_messages_are_handled_in_their_order_and_each_costs_its_time() -> None:
    world, server = shard(replace(EQUAL, message=2.0))
    server.handle("first")
    server.note(world.learners[0], "second")
    world.run(1.0)
    server.entry(TAKE)
    world.run()
    assert heard(world) == [(0.0, "first"), (2.0, "second"), (4.0, TAKE)]
    assert world.learners[0].handled == 2.0


@pytest.mark.parametrize("entry", [TAKE, PutValues(0, 0, 3, 0, 1)])
def test_an_entry_waits_for_the_part_that_it_speaks_of(entry: Any) -> None:
    world, server = shard(shards=2, index=1)
    world.lanes[0, 0].under_way = {(1, 3): 5.0, (0, 3): 9.0, (1, 4): 9.0}
    server.entry(entry)
    server.handle("later")
    world.run()
    assert heard(world) == [(5.0, entry), (5.0, "later")]


def test_what_it_says_leaves_when_the_work_before_it_is_done() -> None:
    def does(port: SimServer, what: Any) -> None:
        port.tell("before")
        port.spend(Serving(Fold, 0))
        port.tell("between")
        port.spend(Serving(Take, 0, 2))
        port.grant(1, Portion(0, 0, 0, 0, 4))

    world, server = shard(replace(EQUAL, fold=Cost(fixed=3.0), take=Cost(fixed=1.0)), does=does)
    server.handle("go")
    world.run()
    assert heard(world)[1:] == [
        (LATENCY, "before"), (3.0 + LATENCY, "between"), (5.0 + LATENCY, Portion(0, 0, 0, 0, 4))
    ]  # fmt: skip
    assert world.counts["folded"] == 1


def test_work_costs_by_the_bytes_of_its_own_part() -> None:
    cluster = replace(EQUAL, take=Cost(per_byte=1.0), fold=Cost(per_byte=10.0))
    ends = []
    for index in (0, 1):
        world, server = shard(
            cluster, shards=2, index=index, does=lambda port, what: port.spend(Serving(what, 0))
        )
        server.handle(Take)
        server.handle(Fold)
        world.run()
        mine = world.tables[0].part_bytes[index]
        assert world.clock.now == 11.0 * mine
        ends.append(mine)
    assert ends[0] != ends[1]


def test_a_pause_holds_what_comes_and_prolongs_what_is_under_way() -> None:
    world, server = shard(
        replace(EQUAL, fold=Cost(fixed=3.0)), does=lambda port, what: port.spend(Serving(Fold, 0))
    )
    server.handle("first")
    world.run(1.0)
    server.pause.begin(1.0, 2.0)
    server.handle("second")
    world.run()
    assert heard(world) == [(0.0, "first"), (5.0, "second")]
    server.pause.begin(8.0, 4.0)
    server.handle("third")
    world.run()
    assert heard(world)[2:] == [(12.0, "third")]


def test_the_dead_do_nothing_and_what_they_sent_is_lost() -> None:
    def does(port: SimServer, what: Any) -> None:
        port.tell("told")
        port.spend(Serving(Fold, 0))
        port.tell("told later")
        port.append(TAKE)

    world, server = shard(replace(EQUAL, fold=Cost(fixed=3.0)), shards=2, does=does)
    server.handle("first")
    server.handle("second")
    server.dead = True
    server.handle("third")
    world.run()
    assert heard(world) == [(0.0, "first")]


def test_a_learner_is_forgotten_when_nothing_more_is_needed_of_it() -> None:
    world, server = shard()
    server.role.replay.settled = False  # a fold waits for the other shards' norms
    server.entry(Leave(1))
    assert not heard(world, "forget")
    server.role.replay.settled = True
    server.handle("norms")
    assert heard(world, "forget") == [(0.0, 1)]


def test_the_leading_shards_decisions_go_to_all_others() -> None:
    world, server = shard(shards=3, does=lambda port, what: port.append(TAKE))
    server.handle("go")
    world.run()
    assert heard(world, "entry 1", "entry 2") == [(LATENCY, TAKE)] * 2 and not heard(world, "entry 0")


# -- what learners get ---------------------------------------------------------------------------------------


def does_as_told(port: SimServer, what: Callable[[SimServer], None]) -> None:
    what(port)


def with_version(world: World, server: SimServer, version: int, value: float) -> list[torch.Tensor]:
    """Its memory of that."""
    memory = server.memory(0)
    memory.offer(0, version)  # type: ignore[attr-defined]
    for segment in memory.places[0]:
        segment.fill_(value)
    return memory.places[0]


def test_a_version_is_sent_once_and_as_it_was() -> None:
    cluster = replace(EQUAL, serve=Cost(fixed=2.0), copy=Cost(fixed=1.0), reply=4.0)
    world, server = shard(cluster, does=does_as_told)
    segments, lane = with_version(world, server, 5, 1.5), world.lanes[0, 0]

    def releases(port: SimServer) -> None:
        port.release(0, 0, 3, Reading(5))
        for segment in segments:  # it goes on to the next
            segment.fill_(9.0)

    server.handle(releases)
    world.run()
    sent = world.tables[0].part_bytes[0]
    assert world.network.moved == sent and (lane.inbox[0][:9] == 1.5).all()
    assert heard(world, "take in 0") == [(6.0 + LATENCY + SETUP, 1.0)] and world.learners[0].decided == 0.0
    assert lane.reading(3) == Reading(5) and heard(world, "wake 0")
    server.handle(lambda port: port.release(0, 0, 4, Reading(5)))
    world.run()
    assert world.network.moved == sent and lane.reading(4) == Reading(5), "it has that version"


@pytest.mark.parametrize("waits", [DRAFT, "a ticket"])
def test_a_free_draft_wakes_only_who_waits_for_one(waits: str) -> None:
    world, server = shard()
    lane, target = world.lanes[0, 0], world.learners[0]
    lane.numbers[1], lane.under_way[0, 3], target.waits_for, world.poisons = 3, 1.0, waits, True
    server.memory(0)
    server.release(0, 0, 3, None)
    assert lane.freed == {(0, 3): LATENCY} and not lane.under_way
    assert all(view.isnan().all() for view in lane.sent[1].gradients), "it has no business there any more"
    assert not any(view.isnan().any() for view in lane.sent[0].gradients)
    world.run()
    assert heard(world) == ([(LATENCY, None)] if waits == DRAFT else [])


def test_who_has_left_gets_nothing() -> None:
    world, server = shard()
    del world.lanes[0, 0]
    server.release(0, 0, 3, None)
    server.release(0, 0, 3, Reading(5))
    world.run()
    assert not heard(world)


def test_it_reads_what_was_sent_and_not_what_is_being_filled() -> None:
    world, server = shard()
    lane = world.lanes[0, 1]
    lane.numbers[1] = 7
    assert server.receive(0, 1, 7) is lane.sent[1]


def test_it_keeps_one_place_unless_older_versions_are_read() -> None:
    assert len(shard()[1].memory(0).places) == 1
    world = World(sync="delayed:2")
    world.tables[0] = world.make_table(layout_of())
    assert len(SimServer(world, 0).memory(0).places) == 6  # type: ignore[arg-type]


def test_inside_a_machine_the_learner_copies_for_itself() -> None:
    cluster = replace(EQUAL, serve=Cost(fixed=2.0), beside=True, memory=Link(latency=0.125))
    world, server = shard(cluster, does=does_as_told)
    with_version(world, server, 5, 1.0)
    for learner in (0, 1):
        server.handle(lambda port, learner=learner: port.release(0, learner, 3, Reading(5)))
        world.run()
    assert heard(world, "take in 0", "take in 1") == [(0.125, 0.0), (0.125 + 2.0 + LATENCY + SETUP, 0.0)]
    assert torch.equal(world.lanes[0, 0].inbox[0], world.lanes[0, 1].inbox[0])
