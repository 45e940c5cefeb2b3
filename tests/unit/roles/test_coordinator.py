"""The coordinator by itself: who is answered when, what shards hear of dials and checkpoints, how a run goes back and ends."""

from __future__ import annotations

from typing import Any

import pytest

from syncline import messages as m
from syncline.dial import Course, Sync
from syncline.protocols.epoch_positions import Standing
from syncline.protocols.sequence import Account
from syncline.roles.checkpoint_manifest import LoaderState, Restored
from syncline.roles.coordinator import PAST, Coordinator
from syncline.roles.run_plan import RunPlan, Saving
from syncline.table.checkpoints import FIRST, Written
from tests.unit.roles.doubles import coordinator_port, layout, template, told

FILES = ["table0-shard0.safetensors", "learners.safetensors"]
LOADER = m.OpenLoader(0, 8, 2, "ledger", None)


class Desk(Coordinator):
    """Learners 0 and 1, whose ranks are their numbers; checkpoints are written."""

    def __init__(self, dials: Any = "hardsync", restored: Restored | None = None, **options: Any) -> None:
        self.port = coordinator_port(shards=options.pop("shards", 1))
        plan = RunPlan(course=Course.of(dials), learners=2, saving=Saving(cuts=True), **options)
        super().__init__(self.port, plan, {0: 0, 1: 1}, restored)
        self.begin()

    def make(self, shards: int = 1) -> None:
        for learner in (1, 0):
            self.from_learner(learner, m.Open(0, layout(shards)))
        self.from_learner(0, m.Initialised(0, template()))
        self.heard(), self.answers()

    def cut(self, number: int = 4) -> None:
        accounts, standings = {0: Account(version=number)}, dict[int, Standing]()
        self.from_shard(m.Cut(number, FILES, accounts, standings, m.Counts()))

    def save(self, *names: str, problem: str = "", number: int = 4) -> None:
        for name in names:
            self.from_shard(m.Saved(number, name, None if problem else Written(name, 1, 1), problem))

    def answers(self) -> list[Any]:
        return told(self.port.reply)

    def heard(self, *kinds: type) -> list[Any]:
        return told(self.port.tell_shards, *kinds)

    def announced(self) -> list[Any]:
        return told(self.port.announce)


def restored_at(epoch: int, **options: Any) -> Restored:
    standing = Standing.before(epoch)
    kept = LoaderState(size=100, policy="ledger", parts=2, standing=standing)
    return Restored(name="the checkpoint", seed=0, loaders={0: kept}, **options)


def test_a_loader_that_was_refused_is_refused_again() -> None:
    """Its data is not that of the checkpoint; the second learner must not join what nobody has made."""
    desk = Desk("async", restored_at(0))
    for learner in (0, 1):
        desk.from_learner(learner, LOADER)
        ((answered, answer),) = desk.answers()
        assert answered == learner and "made with 100 examples in loader 0" in str(answer.error)
        desk.leave(learner, lost=True)
    assert desk.heard(m.MakeLoader, m.JoinLoader) == []


# -- dials -------------------------------------------------------------------------------------------------------


def test_a_run_that_goes_on_begins_with_the_dial_of_its_epoch_or_what_was_chosen_since() -> None:
    course, chosen = {0: "hardsync", 3: "async"}, Sync.parse("softsync:1")
    for epoch, begin in ((1, 0), (4, 1)):
        desk = Desk(course, restored_at(epoch))
        assert [(dial.number, dial.epoch) for dial in desk.heard(m.Dial)] == [(0, 0), (1, 3)]
        desk.make()
        desk.from_learner(0, m.Open(1, layout())), desk.from_learner(0, m.Initialised(1, template()))
        assert [make.dial for make in desk.heard(m.MakeTable)] == [begin]
    for since, begin in ((2, 1), (3, 2)):  # by hand, before or after the course turned
        restored = restored_at(4, sync=str(Course.of(course)), chosen=[(chosen, since)])
        desk = Desk(course, restored)
        assert desk.heard(m.Dial)[-1] == m.Dial(2, chosen, PAST)
        desk.from_learner(0, m.Open(0, layout())), desk.from_learner(0, m.Initialised(0, template()))
        assert [make.dial for make in desk.heard(m.MakeTable)] == [begin]


def test_a_dial_that_is_turned_has_a_number_that_learners_can_ask_for() -> None:
    desk = Desk()
    desk.heard()
    desk.change(Sync.parse("async"))
    assert desk.heard() == [m.Dial(1, Sync.parse("async"), None)]
    desk.from_learner(1, m.AskDial(1))
    assert desk.answers() == [(1, Sync.parse("async"))]


# -- checkpoints -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("early", [0, 1, 2])
def test_a_checkpoint_is_committed_when_its_record_and_all_its_files_are_there(early: int) -> None:
    desk = Desk()
    desk.make()
    desk.save(*FILES[:early])
    desk.cut()
    assert (desk.cutting, desk.port.commit.called) == (early < 2, early == 2)
    desk.save(*FILES[early:])
    (number, record, files) = desk.port.commit.call_args.args
    assert (number, [each.name for each in files]) == (4, FILES) and record["tables"][0]["account"][
        "version"
    ] == 4
    assert not desk.cutting and desk.heard() == [m.CutDone()]


def test_a_file_that_could_not_be_written_is_told_and_what_there_is_goes() -> None:
    desk = Desk()
    desk.make()
    desk.cut()
    desk.save(FILES[0])
    desk.save(FILES[1], problem="the disk is full")
    assert desk.port.commit.call_args.args == (4, None, ())
    assert told(desk.port.tell) == [m.Checkpointed(4, "", "the disk is full")] and desk.heard() == [
        m.CutDone()
    ]
    desk.save(FILES[0], problem="no room", number=FIRST)  # of first values
    assert told(desk.port.tell) == [m.Checkpointed(0, "", "no room")] and not desk.cutting


def test_the_end_waits_for_a_checkpoint_that_is_being_written() -> None:
    desk = Desk()
    desk.make()
    desk.cut()
    desk.finish()
    assert desk.heard() == []
    desk.save(*FILES)
    assert desk.heard() == [m.CutDone(), m.Finish(cut=True)]


@pytest.mark.parametrize("examples", [0, 96])
def test_the_state_of_a_run_that_has_failed_is_saved_where_something_was_trained(examples: int) -> None:
    desk = Desk()
    desk.save_failed()
    assert not desk.saving_failed, "there is no table"
    desk.make()
    desk.save_failed()
    assert desk.saving_failed and desk.heard() == [m.AskCut(now=True)]
    counts = m.Counts(examples={0: examples})
    desk.from_shard(m.Cut(4, FILES, {0: Account(version=4)}, {}, counts, failed=True))
    desk.save(*FILES)
    assert not desk.saving_failed and (desk.port.commit.call_args.args[1] is not None) == bool(examples)
    desk.finish()
    desk.save_failed()
    assert desk.heard() == [m.CutDone(), m.Finish(cut=True)], "shards have their last one"


def test_a_run_that_fails_while_it_finishes_waits_for_the_checkpoint_of_its_end() -> None:
    desk = Desk()
    desk.make()
    desk.finish()
    desk.save_failed()
    assert desk.saving_failed and desk.heard() == [m.Finish(cut=True)], "which the shards have not begun"
    desk.cut()
    desk.save(*FILES)
    assert not desk.saving_failed
    desk.save_failed()
    assert not desk.saving_failed, "it is written"


def test_a_stop_in_lockstep_cuts_a_whole_round_first_and_no_other_at_the_end() -> None:
    desk = Desk()
    desk.make()
    desk.stop(), desk.stop()
    assert desk.heard() == [m.AskCut()] and desk.announced() == []
    desk.cut()
    assert desk.announced() == [m.Stop()]
    desk.save(*FILES)
    desk.finish()
    assert desk.heard() == [m.CutDone(), m.Finish(cut=False)]


def test_free_learners_stop_at_once() -> None:
    desk = Desk("async")
    desk.make()
    desk.stop()
    assert desk.announced() == [m.Stop()] and desk.heard() == []


# -- servers that are new ----------------------------------------------------------------------------------------


def test_learners_of_servers_that_are_gone_rejoin_together() -> None:
    desk = Desk()
    desk.make()
    desk.from_learner(1, LOADER)
    desk.cut()
    desk.recover(None, {})
    assert desk.stale == {0, 1} and not desk.cutting and desk.announced() == [m.Renewed()]
    assert desk.answers() == [(1, m.Stale())]
    desk.from_learner(0, LOADER)
    assert desk.answers() == [(0, m.Stale())]
    desk.from_learner(1, m.Rejoin(0, 0))
    assert desk.answers() == [] and desk.meeting() == {1}
    desk.from_learner(0, m.Rejoin(0, 0))
    assert desk.answers() == [(0, m.Rejoined([])), (1, m.Rejoined([]))] and desk.stale == set()


def test_who_is_lost_before_it_rejoins_is_not_waited_for() -> None:
    desk = Desk()
    desk.recover(None, {})
    desk.from_learner(1, m.Rejoin(0, 0))
    desk.leave(0, lost=True)
    assert desk.answers() == [(1, m.Rejoined([]))]
    desk.from_learner(0, m.Rejoin(0, 0))  # its last words
    assert desk.answers() == [] and desk.live == {1: 1}


# -- what goes through its hands -----------------------------------------------------------------------------------


def test_parts_of_an_optimizers_state_are_given_in_the_order_of_the_shards_whenever_they_come() -> None:
    desk = Desk(shards=3)
    desk.make(shards=2)
    late, early = (m.StatePart(0, 5, 1, shard, [], {}) for shard in (0, 1))
    desk.from_shard(early)
    desk.from_learner(1, m.AwaitState(0, 5))
    assert desk.answers() == []
    desk.from_shard(late)
    assert desk.answers() == [(1, [late, early])]
    blob = m.LoadState(0, 6, [], {})
    desk.from_learner(1, blob)
    assert desk.heard() == [(1, blob)]
    loaded = [m.Loaded(0, 6, 1, shard) for shard in range(3)]
    for each in loaded:
        assert desk.answers() == []
        desk.from_shard(each)  # from those without a part of the table too
    assert desk.answers() == [(1, loaded)]


def test_a_learner_that_returned_by_itself_has_closed() -> None:
    desk = Desk()
    desk.heard()
    desk.from_learner(1, m.Closed())
    desk.leave(1, lost=False), desk.leave(0, lost=True)
    assert desk.heard(m.Leave) == [m.Leave(1, 1, False, True), m.Leave(0, 0, True, False)]


def test_the_last_update_ends_the_run_and_reports_pass() -> None:
    desk = Desk()
    end = m.EpochEnd(0, 0, 3, 8, 1.0, {}, 0, 1)
    desk.from_shard(end), desk.from_learner(1, m.Log({"a": 1}))
    assert told(desk.port.tell) == [end, (1, m.Log({"a": 1}))] and not desk.reached
    desk.from_shard(m.Reached(9))
    assert desk.reached and desk.announced() == [m.Stop()]
