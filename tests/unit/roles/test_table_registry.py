"""Tables and loaders that learners open (M6, M7): who initialises, who begins together, what shards hear again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from syncline import messages as m
from syncline.dial import Course
from syncline.errors import LayoutError, UsageError
from syncline.protocols.epoch_positions import Standing
from syncline.protocols.sequence import Account
from syncline.roles.checkpoint_manifest import LoaderState, Restored, TableState
from syncline.roles.run_plan import RunPlan, Saving
from syncline.roles.table_registry import TableRegistry
from syncline.roles.waiting_at_coordinator import WaitingLearners
from syncline.table.checkpoint_content import Source, table_file
from syncline.table.checkpoints import Written
from tests.unit.roles.doubles import coordinator_port, layout, template, told

LOADER = m.OpenLoader(0, 8, 2, "ledger", None)


class Desk:
    """Learners of ids 50, 51 …, whose ranks fall."""

    def __init__(self, learners: int = 3, restored: Restored | None = None, **options: Any) -> None:
        self.port = coordinator_port()
        self.live = {50 + number: learners - 1 - number for number in range(learners)}
        plan = RunPlan(course=Course.of("hardsync"), learners=learners, **options)
        self.room = WaitingLearners(self.port, self.live)
        self.registry = TableRegistry(self.port, plan, self.live, self.room, lambda: 4)
        self.registry.expect(dict(self.live), restored or Restored(name="the start", seed=0))

    def ask(self, learner: int, message: Any) -> None:
        self.room.asked[learner] = message
        handlers: dict[type, Any] = {
            m.Open: self.registry.open,
            m.Initialised: self.registry.initialised,
            m.OpenLoader: self.registry.open_loader,
        }
        handlers[type(message)](learner, message)

    def leave(self, learner: int) -> None:
        del self.live[learner]
        self.room.leave(learner)
        self.registry.leave(learner)
        self.registry.hand_over(learner)

    def make(self, number: int = 0, shards: int = 1) -> None:
        """All open it, and the lowest rank has initialised it."""
        for learner in self.live:
            self.ask(learner, m.Open(number, layout(shards)))
        self.ask(min(self.live, key=lambda learner: self.live[learner]), m.Initialised(number, template()))
        told(self.port.reply), told(self.port.tell_shards)

    def answered(self) -> dict[int, Any]:
        return dict(told(self.port.reply))

    def shards_heard(self, *kinds: type) -> list[Any]:
        return told(self.port.tell_shards, *kinds)


# -- tables ------------------------------------------------------------------------------------------------------


def test_the_lowest_rank_initialises_whoever_comes_first_and_is_the_first_to_be_answered() -> None:
    desk = Desk()
    desk.ask(50, m.Open(0, layout()))
    desk.ask(51, m.Open(0, layout()))
    assert desk.answered() == {}
    desk.ask(52, m.Open(0, layout()))
    assert desk.answered() == {52: m.Initialise(0, layout())}
    desk.ask(52, m.Initialised(0, template()))
    replies = told(desk.port.reply)
    assert [learner for learner, _ in replies] == [52, 51, 50]
    assert {answer for _, answer in replies} == {m.Opened(0, layout())} and desk.room.asked == {}
    make, *joins = desk.shards_heard()
    assert (make.table, make.dial, make.initial) == (0, 4, desk.live)
    assert [(join.learner, join.rank, join.first) for join in joins] == [
        (52, 0, True),
        (51, 1, False),
        (50, 2, False),
    ]


def test_the_next_rank_initialises_where_the_lowest_is_lost() -> None:
    desk = Desk()
    for learner in (50, 51, 52):
        desk.ask(learner, m.Open(0, layout()))
    desk.answered()
    desk.leave(52)
    assert desk.answered() == {51: m.Initialise(0, layout())}
    desk.live[70] = 0  # it takes the lost one's place, but the first values are another's
    desk.ask(70, m.Open(0, layout()))
    desk.ask(51, m.Initialised(0, template()))
    assert [learner for learner, _ in told(desk.port.reply)] == [51, 70, 50]


def test_who_waits_for_another_table_does_not_initialise_this_one() -> None:
    desk = Desk(2)
    desk.make()
    desk.ask(51, LOADER)
    desk.ask(50, m.Open(1, layout()))
    assert desk.answered() == {} and not desk.registry.tables[1].made


def test_another_layout_is_refused_with_the_rank_and_the_difference() -> None:
    desk = Desk(2)
    desk.ask(51, m.Open(0, layout(buffers=1)))
    with pytest.raises(
        LayoutError, match=r"table 0: learner 1 built another layout .*, buffers: 1 against 0"
    ):
        desk.ask(50, m.Open(0, layout()))


def test_a_joiner_is_answered_at_once() -> None:
    desk = Desk(2)
    desk.make()
    desk.live[70] = 9
    desk.ask(70, m.Open(0, layout()))
    assert desk.answered() == {70: m.Opened(0, layout())}
    assert desk.shards_heard() == [m.JoinTable(0, 70, 9, None)]


def test_in_a_warm_start_the_lowest_rank_begins_alone() -> None:
    desk = Desk(warm=5)
    assert desk.registry.initial == {52: 0}
    desk.ask(50, LOADER)
    assert desk.answered() == {50: 3}
    again = Desk(warm=5)
    kept = TableState(layout=layout(), optimizer="", account=Account(version=5))
    again.registry.expect(dict(again.live), Restored(name="a checkpoint", seed=0, tables={0: kept}))
    assert again.registry.initial == again.live  # it is over


# -- loaders -----------------------------------------------------------------------------------------------------


def test_all_begin_a_loader_together_by_rank() -> None:
    desk = Desk()
    for learner in (50, 51):
        desk.ask(learner, LOADER)
    assert desk.answered() == {} and len(desk.shards_heard(m.MakeLoader)) == 1
    desk.ask(52, LOADER)
    assert [learner for learner, _ in told(desk.port.reply)] == [52, 51, 50]
    assert desk.shards_heard() == [m.JoinLoader(0, desk.live)]


def test_who_is_lost_or_had_gone_on_by_itself_is_not_waited_for() -> None:
    desk = Desk()
    for learner in (50, 51):
        desk.ask(learner, LOADER)
    desk.leave(52)
    assert desk.answered() == {50: 3, 51: 3}  # the parts of the `partition` policy
    desk.registry.leave(50)  # it has joined again, after the servers were lost
    desk.ask(50, m.OpenLoader(1, 8, 2, "ledger", None))
    assert desk.answered() == {50: 3}
    desk.leave(50), desk.leave(51)
    assert desk.answered() == {}


def test_nobody_begins_with_those_that_wait_elsewhere() -> None:
    desk = Desk(2)
    desk.room.asked[51] = m.MeanOf(torch.tensor(1.0))
    desk.ask(50, LOADER)
    desk.live[70] = 9
    desk.ask(70, LOADER)  # it joined later, and is nobody that they wait for
    assert desk.answered() == {70: 2}
    desk.ask(51, LOADER)
    assert desk.answered().keys() == {50, 51}


def test_another_loader_of_that_number_is_refused() -> None:
    desk = Desk(2)
    desk.ask(51, LOADER)
    with pytest.raises(
        UsageError, match=r"learner 1 opened loader 0 with 9 examples .*, another learner with 8"
    ):
        desk.ask(50, m.OpenLoader(0, 9, 2, "ledger", None))


def test_a_loader_of_a_checkpoint_goes_on_in_its_parts() -> None:
    standing = Standing.before(2)
    kept = LoaderState(size=8, policy="ledger", parts=7, standing=standing)
    desk = Desk(1, Restored(name="a checkpoint", seed=0, loaders={0: kept}))
    desk.ask(50, LOADER)
    (make,) = desk.shards_heard(m.MakeLoader)
    assert (make.parts, make.standing) == (7, standing) and desk.answered() == {50: 7}


# -- servers that are new ----------------------------------------------------------------------------------------


def test_new_shards_hear_of_tables_whose_first_values_are_on_the_disk_and_of_no_other() -> None:
    desk = Desk(2, saving=Saving(cuts=True))
    desk.make(0, shards=2), desk.make(1)
    for shard in range(2):
        file = table_file(0, shard)
        desk.registry.first(m.Saved(-1, file, Written(file, 1, 1)))
    desk.ask(50, LOADER)
    desk.shards_heard()
    desk.registry.make_again()
    made, loader = desk.shards_heard()
    assert (made.table, made.source, made.first) == (0, Source(None, 0, 2), False)
    assert loader.opened == LOADER and not desk.registry.tables[1].made
    back = {50: m.Rejoin(tables=1, loaders=1), 51: m.Rejoin(tables=1, loaders=0)}
    assert desk.registry.join_again(back) == {learner: [m.Opened(0, layout(2))] for learner in back}
    *tables, loaders = desk.shards_heard()
    assert [join.learner for join in tables] == [50, 51] and loaders == m.JoinLoader(0, {50: 1})


def test_first_values_are_not_gone_back_to_after_a_checkpoint_that_has_the_table() -> None:
    desk = Desk(1)
    desk.make()
    file = table_file(0, 0)
    desk.registry.first(m.Saved(-1, file, None, "the disk is full"))
    assert desk.registry.tables[0].start(0) is None
    desk.registry.first(m.Saved(-1, file, Written(file, 1, 1)))
    assert desk.registry.tables[0].start(0) == Source(None, 0, 1)
    desk.registry.in_checkpoint([0])
    assert desk.registry.tables[0].start(0) is None


def test_old_checkpoints_are_needed_until_all_their_tables_are_open() -> None:
    kept = TableState(layout=layout(), optimizer="torch.optim.sgd.SGD", account=Account())
    desk = Desk(1, Restored(name="a checkpoint", seed=0, tables={0: kept, 1: kept}))
    desk.make(0)
    assert desk.registry.waits_for_checkpoint
    desk.make(1)
    assert not desk.registry.waits_for_checkpoint


def test_new_shards_read_the_tables_of_a_checkpoint_there() -> None:
    source = Source("/run/12", 0, 1)
    kept = TableState(
        layout=layout(), optimizer="torch.optim.sgd.SGD", account=Account(version=12), source=source
    )
    desk = Desk(1, Restored(name="a checkpoint", seed=0, tables={0: kept}), saving=Saving(cuts=True))
    desk.make()
    desk.registry.make_again()
    (made,) = desk.shards_heard()
    assert (made.source, made.account, made.first) == (source, kept.account, False)
