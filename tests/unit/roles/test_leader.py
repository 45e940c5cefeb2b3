"""From decisions to the log: what the leading shard writes, cuts, counts and tells, in which order."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from syncline import messages as m
from syncline.dial import Sync
from syncline.messages import log
from syncline.messages import to_leader as say
from syncline.ports import Portion
from syncline.roles.leader import Leader
from syncline.roles.server import LogApplier
from tests.unit.roles.doubles import gradient, layout, server_port, table, told


class Desk:
    """Learners 0, 1 … of ranks 10, 11 …, who have joined every table; the log is not carried out."""

    def __init__(
        self,
        dial: str = "hardsync",
        learners: int = 2,
        *,
        tables: int = 1,
        shards: int = 1,
        buffers: int = 0,
        limit: int | None = None,
        **resume: Any,
    ) -> None:
        self.port, self.log = server_port(shards=shards), list[log.Entry]()
        self.replay = MagicMock(spec=LogApplier, dials={0: Sync.parse(dial)})
        self.replay.replay.side_effect = self.log.append
        self.leader = Leader(self.port, self.replay)
        everybody = {learner: 10 + learner for learner in range(learners)}
        self.leader.hear(m.Resume(initial=tuple(everybody), **resume))
        of = layout(shards, buffers=buffers)
        for number in range(tables):
            self.leader.hear(table(number, learners=learners, of=of, initial=everybody, limit=limit))
            for learner, rank in everybody.items():
                self.leader.hear(m.JoinTable(number, learner, rank))
        self.written()

    def load(self, size: int, batch_size: int, *, epochs: int | None = None, snapshot: bool = False) -> None:
        opened = m.OpenLoader(0, size, batch_size, "ledger", epochs)
        self.leader.hear(m.MakeLoader(opened=opened, dial=0, parts=1, snapshot=snapshot))
        self.leader.hear(m.JoinLoader(0, {0: 10}))

    def publish(self, learner: int, number: int = 1, **said: Any) -> None:
        self.leader.note(learner, gradient(number, **said))

    def written(self, *kinds: type) -> list[Any]:
        found, self.log[:] = list(self.log), []
        return [each for each in found if not kinds or isinstance(each, kinds)]

    def told(self, *kinds: type) -> list[Any]:
        return told(self.port.tell, *kinds)


# -- gradients ---------------------------------------------------------------------------------------------------


def test_a_round_is_taken_as_it_came_folded_then_everybody_is_released() -> None:
    desk = Desk()
    desk.publish(1, step=4, examples=3, options=2)
    assert [type(each) for each in desk.written()] == [log.Take]
    desk.publish(0, step=5, full=False)
    take, fold, *released = desk.written()
    assert take == log.Take(0, 0, 1, 0, False, 1, 10, 0, False, 1.0)
    assert fold == log.Fold(0, 0, 1, 0, 1, 1.0)  # with the options of who is furthest along
    assert released == [log.Release(0, learner, 1, 1, False, False) for learner in (1, 0)]


def test_an_update_of_one_gradient_is_announced_with_it() -> None:
    desk = Desk("async")
    desk.publish(1)
    take, fold, _ = desk.written()
    assert take.alone and (fold.learner, fold.version) == (1, 1)


def test_other_shards_hear_only_of_tables_that_they_share() -> None:
    for shards in (1, 2):
        desk = Desk(shards=shards, learners=1)
        told(desk.port.append)
        desk.publish(0)
        assert told(desk.port.append) == (desk.written() if shards > 1 else [])


def test_a_gradient_after_the_last_update_is_free_again_and_the_run_is_told_that_it_is_there() -> None:
    desk = Desk("async", limit=1)
    desk.publish(0)
    assert desk.told(m.Reached) == [m.Reached(1)]
    desk.written()
    desk.publish(1)
    assert desk.written(log.Free, log.Take, log.Fold) == [log.Free(0, 1, 1)]
    (account,) = desk.leader.statistics(3).tables.values()
    assert (account.version, account.gradients, account.dropped) == (1, 1, 1)


def test_buffers_of_the_last_gradients_are_kept_before_drafts_are_free() -> None:
    desk = Desk(buffers=1)
    for learner, value in ((0, 1.0), (1, 3.0)):
        desk.port.receive.return_value.buffers = [torch.full((2,), value)]
        desk.publish(learner)
    (mean,) = desk.replay.buffers(0)
    assert mean.tolist() == [2.0, 2.0]
    desk.leader.hear(m.Leave(1, 11, lost=True))
    assert [each.tolist() for each in desk.replay.buffers(0)] == [[1.0, 1.0]]


def test_who_was_overtaken_gets_the_newest_version_sent_while_it_is_there() -> None:
    desk = Desk()
    fetch = say.Fetch(0, 1, deliver=True)
    desk.leader.note(1, fetch)
    assert desk.written() == [log.Release(0, 1, 1, 0, False, True)]
    desk.leader.hear(m.Leave(1, 11))
    assert desk.written() == [log.Leave(1)]
    desk.leader.note(1, fetch)
    assert desk.written() == []


@pytest.mark.parametrize(
    ("word", "entry"),
    [
        (say.Put(0, 7), log.PutValues(0, 1, 7, 11, 0)),
        (say.AskState(0, 7), log.GiveState(0, 1, 7)),
        (say.Load(0, 7), log.LoadState(0, 1, 7, 0)),
    ],
)
def test_what_learners_ask_of_a_table_has_its_place_in_the_log(word: Any, entry: log.Entry) -> None:
    desk = Desk()
    desk.leader.note(1, word)
    assert desk.written() == [entry]


# -- checkpoints -------------------------------------------------------------------------------------------------


def test_a_checkpoint_holds_one_version_of_all_tables_and_the_random_states_of_it() -> None:
    desk = Desk("async", learners=1, tables=2, shards=2, cuts=True, every=2)
    for number in (1, 2):
        for at in (0, 1):
            desk.publish(0, number, table=at, stamp=number - 1, states=b"r%d" % number)
    entries = desk.written(log.Fold, log.Cut, log.Release)
    versions = [(type(each).__name__, each.table, getattr(each, "keep", None)) for each in entries]
    assert versions == [
        *(("Fold", 0, None), ("Release", 0, False), ("Fold", 1, None), ("Release", 1, True)),
        *(("Fold", 0, None), ("Release", 0, True), ("Fold", 1, None), ("Release", 1, False)),
        *(("Cut", 0, None), ("Cut", 1, None)),
    ]
    (cut,) = desk.told(m.Cut)
    files = [f"table{number}-shard{shard}.safetensors" for number in (0, 1) for shard in (0, 1)]
    assert (cut.number, cut.files) == (2, [*files, "learners.safetensors"])
    assert {number: account.version for number, account in cut.accounts.items()} == {0: 2, 1: 2}
    assert cut.counts.steps == {10: 4} and cut.counts.examples == {0: 2, 1: 2}
    ((number, name, tensors, _),) = told(desk.port.save)
    assert (number, name) == (2, "learners.safetensors") and bytes(tensors["random/10"].numpy()) == b"r2"


def test_a_checkpoint_that_is_due_comes_before_the_next_version() -> None:
    """What came before the start makes several versions at once."""
    desk = Desk("async", learners=1, cuts=True, every=2)
    desk.leader.hear(m.JoinTable(0, 7, 17))
    desk.leader.make_table(table(1, initial={0: 10, 7: 17}, learners=2))
    desk.leader.hear(m.JoinTable(1, 0, 10))
    for number in (1, 2, 3):
        desk.publish(0, number, table=1)
    assert desk.written(log.Fold) == []
    desk.leader.hear(m.JoinTable(1, 7, 17))
    order = [
        (type(each), getattr(each, "version", 0)) for each in desk.written(log.Fold, log.Cut) if each.table
    ]
    assert order == [(log.Fold, 1), (log.Fold, 2), (log.Cut, 0), (log.Fold, 3)]


def test_the_end_folds_what_is_there_and_cuts_a_last_checkpoint() -> None:
    for cut in (True, False):
        desk = Desk("softsync:1", cuts=True)
        desk.publish(0, examples=5)
        desk.written()
        desk.leader.hear(m.Finish(cut))
        assert [type(each) for each in desk.written(log.Fold, log.Finish, log.Cut)] == [
            *(log.Fold, log.Finish),
            *[log.Cut] * cut,
        ]
        *_, finished = desk.told()
        assert finished.statistics.tables[0].examples == 5 and finished.statistics.steps == {10: 1}


def test_a_run_that_has_failed_is_cut_at_once_and_nothing_that_is_pending_is_folded() -> None:
    desk = Desk("hardsync", cuts=True)
    desk.publish(0, examples=5)
    desk.written()
    desk.leader.hear(m.AskCut(now=True))
    assert [type(each) for each in desk.written(log.Fold, log.Cut)] == [log.Cut]
    assert [cut.failed for cut in desk.told(m.Cut)] == [True]
    desk.leader.hear(m.AskCut(now=True))
    assert desk.told(m.Cut) == [], "one is being written"
    desk.leader.hear(m.CutDone())
    assert len(desk.told(m.Cut)) == 1


# -- loaders -----------------------------------------------------------------------------------------------------


def test_an_epoch_ends_with_its_losses_a_snapshot_and_the_dial_of_the_next() -> None:
    desk = Desk(learners=1)
    desk.load(4, 2, snapshot=True)
    desk.replay.dials[1] = Sync.parse("async")
    desk.leader.hear(m.Dial(1, desk.replay.dials[1], 1))
    for number, loss in ((1, 1.0), (2, 4.0)):
        desk.leader.note(0, say.AskBatch(0, 0))
        desk.publish(0, number, stamp=number - 1, loader=0, upto=number, examples=2, loss=loss)
    assert desk.told(m.EpochEnd) == [m.EpochEnd(0, 0, 2, 4, 2.5, {10: 2.5}, 1, 1)]
    assert desk.written(log.Snapshot, log.Change) == [log.Snapshot(0, 0), log.Change(0, 1)]


def test_who_rests_goes_on_with_its_portion() -> None:
    desk = Desk("async", learners=1)
    desk.load(4, 2)
    desk.leader.note(0, say.Rest(0, 1, 0, 0, b"s"))
    assert desk.written(log.Release) == []
    told(desk.port.grant)
    desk.leader.note(0, say.AskBatch(0, 0))
    assert told(desk.port.grant) == [(0, Portion(0, 0, 0, 0, 2))]
    assert desk.written(log.Release) == [log.Release(0, 0, 1, 0, False, False)]


def test_what_a_lost_learner_had_is_told() -> None:
    desk = Desk()
    desk.load(8, 2)
    for _ in range(2):
        desk.leader.note(0, say.AskBatch(0, 0))
    desk.publish(0, loader=0, upto=1, examples=2)
    desk.leader.hear(m.Leave(0, 10, lost=True))
    assert desk.told(m.Left) == [m.Left(0, 10, 2, 2)]
    assert desk.written(log.Leave) == [log.Leave(0)] and told(desk.port.append, log.Leave) == [log.Leave(0)]
