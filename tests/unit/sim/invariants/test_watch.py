"""Who looks on: every account is fed, checked after each event, and what is broken says when and who does what."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from syncline import messages as m
from syncline.errors import InvariantError
from syncline.messages import to_leader as say
from syncline.protocols.epoch_positions import EpochDone, Grant
from syncline.protocols.folding import Ticket
from syncline.protocols.sequence import Drop, Fold, Take
from syncline.protocols.staleness import StalenessClock
from syncline.protocols.waiting import Release
from syncline.sim.invariants.watch import Watch
from syncline.table.optimizer_template import OptimizerTemplate
from tests.unit.sim.small_world import SmallWorld, gradient


class World(SmallWorld):
    """Two learners that have read version 0 of a table, and a loader of eight examples; a shard that says nothing."""

    def __init__(self, sync: str = "hardsync", epochs: int | None = None, limit: int | None = None) -> None:
        super().__init__(sync=sync)
        table = self.open_table(1, 0, 1)
        self.watch = watch = Watch(self)  # type: ignore[arg-type]
        leader = SimpleNamespace(dispatcher=SimpleNamespace(standings=dict))
        self.servers = [SimpleNamespace(role=SimpleNamespace(leader=leader))]
        template: Any = SimpleNamespace(kind=None, options=[{}], of=OptimizerTemplate.of)
        made = {"table": 0, "layout": table.layout, "template": template, "dial": 0, "initial": {0: 0, 1: 1}}
        watch.told(m.MakeTable(**made, learners=2, warm=0, batch_size=4, limit=limit, clip_norm=None))
        opening = m.OpenLoader(0, 8, 4, "ledger", epochs)
        watch.told(m.MakeLoader(opened=opening, dial=0, parts=1, snapshot=False))
        for learner in (0, 1):
            watch.decided(0, Release(learner, 0, 0))
            watch.decided(0, Grant(learner, 0, 0, 4 * learner, 4 * learner + 4))

    def waiting(self) -> dict[int, str]:
        return {0: "a ticket"}

    def publish(self, learner: int, number: int = 1, **given: Any) -> Ticket:
        lane = self.lanes[0, learner]
        lane.numbers[0] = number
        lane.slots[0].write_options(b'[{"lr": 0.0}]')
        said = gradient(number, **({"loader": 0, "upto": number, "examples": 4} | given))
        self.watch.posted(learner, said)
        return Ticket(learner, learner, number, said.stamp, said.step, said.examples)

    def fold(self, *tickets: Ticket, version: int = 1) -> None:
        for ticket in tickets:
            self.watch.decided(0, Take(ticket))
        self.watch.decided(0, Fold(version, tickets, tickets[0], 1.0))
        for ticket in tickets:
            self.watch.decided(0, Release(ticket.learner, ticket.number, version))

    def end(self, **counted: int) -> None:
        """The run says this of itself."""
        said = {"version": 1, "gradients": 2, "dropped": 0, "pending": 0, "examples": 8} | counted
        clock = StalenessClock()
        clock.fold(0, [0] * said["gradients"])
        statistics = m.Statistics(0, {0: SimpleNamespace(**said, staleness=clock.account())})  # type: ignore[dict-item]
        self.recorder.outcome = SimpleNamespace(statistics=statistics)
        self.watch.over()


def test_a_run_that_keeps_the_rules_passes() -> None:
    world = World(epochs=1)
    world.fold(world.publish(0), world.publish(1))
    world.watch.decided(0, EpochDone(0, 0))
    world.watch.after()
    world.end()
    assert world.recorder.error is None and world.watch.events == 1


def test_what_is_broken_ends_the_run_and_says_when_and_who_waits_for_what() -> None:
    world = World()
    world.clock.now = 2.5
    ticket = world.publish(0)
    with pytest.raises(InvariantError, match=r"event 0 at 2\.5 s: version 3 follows version 0") as caught:
        world.fold(ticket, version=3)
    assert world.recorder.error is caught.value
    for words in ("table 0 at version 0 under hardsync", "loader 0: 0 epochs done", "{0: 'a ticket'}"):
        assert words in str(caught.value)


def late(world: World) -> None:
    world.watch.decided(0, Take(world.publish(0)))
    world.watch.decided(0, Take(world.publish(1)))
    world.watch.after()


def more_examples_than_batches(world: World) -> None:
    world.fold(world.publish(0, examples=5), world.publish(1))


def three_drafts(world: World) -> None:
    for number in (1, 2, 3):
        world.publish(0, number, loader=-1)


def many_events(world: World) -> None:
    world.watch.most = 3
    for _ in range(4):
        world.watch.after()


def ledger_that_forgets(world: World) -> None:
    world.servers[0].role.leader.dispatcher.standings = lambda: {
        0: SimpleNamespace(fresh={0: {}}, returned=[], skipped={0: 0})
    }
    world.watch.noted(0, say.CloseLoader(0, 1))
    world.watch.after()


@pytest.mark.parametrize(("does", "words"), [
    (late, "all have published for version 1, and it is not made"),
    (more_examples_than_batches, "a gradient of 5 examples is folded, its batches hold 4"),
    (three_drafts, "3 gradients under way, and 2 slots"),
    (many_events, "the run goes on after 3 events"),
    (ledger_that_forgets, "of epoch 0 8 examples are not settled, the ledger knows of 0"),
    (lambda world: world.watch.decided(0, EpochDone(0, 0)), "8 are in gradients that are not folded"),
    (lambda world: world.watch.decided(0, Drop(world.publish(0))), "it is not late"),
])  # fmt: skip
def test_every_account_is_asked(does: Any, words: str) -> None:
    with pytest.raises(InvariantError, match=words):
        does(World())


@pytest.mark.parametrize("counted", [
    {"version": 2}, {"gradients": 1}, {"dropped": 1}, {"pending": 1}, {"examples": 7}
])  # fmt: skip
def test_what_the_run_says_of_itself_is_what_was_counted(counted: dict[str, int]) -> None:
    world = World()
    world.fold(world.publish(0), world.publish(1))
    with pytest.raises(InvariantError, match="table 0: the run says version, gradients"):
        world.end(**counted)


@pytest.mark.parametrize(
    ("limit", "stops", "whole"), [(None, False, True), (9, False, False), (None, True, False)]
)
def test_epochs_are_whole_unless_the_run_was_cut_short(limit: int | None, stops: bool, whole: bool) -> None:
    world = World(epochs=2, limit=limit)
    world.fold(world.publish(0), world.publish(1))
    world.watch.decided(0, EpochDone(0, 0))
    if stops:
        world.watch.stopped()
    if whole:
        with pytest.raises(InvariantError, match="only 1 of 2 epochs are done"):
            world.end()
    else:
        world.end()


def test_who_waits_for_data_is_not_waited_for_until_it_comes() -> None:
    world = World()
    world.watch.noted(1, say.Rest(0, 1, 0, 1))  # its portion 1 is not there
    world.fold(world.publish(0))
    world.watch.after()
    with pytest.raises(InvariantError, match="position 0 of epoch 0 is settled"):
        world.watch.decided(0, Grant(1, 1, 0, 0, 4))


def test_new_servers_begin_with_new_accounts() -> None:
    world = World()
    world.publish(0)
    world.watch.went_back()
    world.watch.after()
    assert "table" not in str(world.watch.error("nothing"))
