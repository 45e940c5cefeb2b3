"""A shard carries out the log: what is done when, what a learner may read, when a draft is free again."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from syncline import messages as m
from syncline.dial import Sync
from syncline.messages import log
from syncline.ports import FIRST_VALUES, Reading, Serving
from syncline.roles import server
from syncline.roles.server import LogApplier, ServerRole
from syncline.table.checkpoints import FIRST, CheckpointError
from syncline.table.gradient_slot import options_text, private_slot
from tests.unit.roles.doubles import layout, server_port, table, told


class PlainShard(MagicMock):
    """Counts versions, and remembers what it was to do; `lies`: gradients are folded where they lie."""

    lies = False

    def make(
        self, of: Any, index: int, *_: Any, version: int = 0, clip_norm: float | None = None, **__: Any
    ) -> Any:
        self.layout, self.part, self.clip_norm, self.version = of, of.parts[index], clip_norm, version
        self.take.side_effect = lambda *_, **__: not self.lies
        self.gather.return_value = 0
        self.norms.return_value = torch.tensor([3.0])
        self.apply.side_effect = self.count
        return self

    def count(self, *_: Any) -> None:
        self.version += 1


class Server:
    """One shard of one table, and drafts that say which options their gradient has."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, shards: int = 1, dial: str = "hardsync", **options: Any
    ) -> None:
        self.shard, self.port = PlainShard(), server_port(shards=shards)
        monkeypatch.setattr(server, "Shard", self.shard.make)
        of = layout(shards)
        self.slots = [private_slot(of) for _ in range(3)]
        self.port.receive.side_effect = lambda table, learner, number: self.slots[learner]
        self.applier = LogApplier(self.port)
        self.applier.dials[0] = Sync.parse(dial)
        self.applier.make_table(table(of=of, **options))

    def say(self, learner: int, lr: float) -> None:
        self.slots[learner].write_options(options_text([{"lr": lr}]))

    def take(self, learner: int, number: int = 1, *, options: int = 0, iteration: int = 0) -> None:
        self.applier.replay(log.Take(0, learner, number, options, True, 2, learner, iteration, False, 1.0))

    def fold(self, learner: int, version: int, number: int = 1, *, iteration: int = 0) -> None:
        self.applier.replay(log.Fold(0, learner, number, iteration, version, 0.5))

    def released(self) -> list[tuple[int, int, Reading | None]]:
        return [each[1:] for each in told(self.port.release)]


@pytest.fixture
def one(monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server(monkeypatch)
    for learner in range(3):
        made.say(learner, 1.0)
    return made


def test_a_draft_is_free_when_it_is_added_up_or_with_the_fold_that_reads_it_there(one: Server) -> None:
    one.take(0)
    assert one.released() == [(0, 1, None)]
    one.shard.lies = True
    one.take(1), one.take(2, iteration=1)
    assert one.released() == []
    one.fold(1, 1)
    assert one.released() == [(1, 1, None)]  # the other is of the next round
    one.fold(2, 2, iteration=1)
    assert one.released() == [(2, 1, None)]


def test_under_a_free_dial_a_fold_is_of_all_that_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    free = Server(monkeypatch, dial="softsync:1")
    free.shard.lies = True
    for learner, iteration in ((0, 0), (1, 5)):
        free.say(learner, 1.0)
        free.take(learner, iteration=iteration)
    free.fold(0, 1)
    assert free.released() == [(0, 1, None), (1, 1, None)]


def test_an_update_goes_by_the_options_of_its_gradient(one: Server) -> None:
    one.say(1, 0.25)
    for learner in (0, 1):
        one.take(learner)
    assert one.applier.options(0, 0, 0, 1) == [{"lr": 1.0}]
    one.fold(1, 1)
    one.shard.apply.assert_called_once_with([{"lr": 0.25}], 0.5)


def test_options_are_read_again_when_their_count_says_so(one: Server) -> None:
    one.take(0)
    one.say(0, 9.0)
    one.take(0, 2, iteration=1), one.take(0, 3, options=1, iteration=2)
    found = [one.applier.options(0, number - 1, 0, number) for number in (1, 2, 3)]
    assert found == [[{"lr": 1.0}], [{"lr": 1.0}], [{"lr": 9.0}]]


def test_options_are_kept_until_the_fold_that_may_need_them(one: Server) -> None:
    for number in range(1, 1001):
        one.say(0, float(number))
        one.take(0, number, options=number, iteration=number - 1)
    one.take(1)
    for number in range(1, 1001):
        one.fold(0, number, number, iteration=number - 1)
        assert one.shard.apply.call_args.args[0] == [{"lr": float(number)}]
        with pytest.raises(KeyError):
            one.applier.options(0, number - 1, 0, number)


def test_the_leading_shard_warns_once_of_different_options_in_lockstep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for index in (0, 1):
        one = Server(monkeypatch)
        one.port.shard = index
        for learner in range(3):
            one.say(learner, 0.5 if learner == 1 else 1.0)
        for version in (1, 2):
            for learner in range(3):
                one.take(learner, version, options=version, iteration=version - 1)
            one.fold(0, version, version, iteration=version - 1)
        warned = told(one.port.tell, m.Warned)
        assert len(warned) == (index == 0)
        for each in warned:
            assert "ranks [1] differ from rank 0" in each.text and each.cause == "options"


def test_options_are_compared_also_while_the_log_waits_for_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Server(monkeypatch, shards=2, clip_norm=1.0, dial="delayed:2")
    for learner in (0, 1):
        one.say(learner, 1.0)
        one.take(learner)
    one.fold(0, 1)  # it waits for the other shard's norms, and what follows with it
    one.say(1, 0.5)
    for learner in (0, 1):
        one.take(learner, 2, options=1, iteration=1)
    one.fold(0, 2, 2, iteration=1)
    assert not told(one.port.tell, m.Warned)
    one.applier.norms(m.Norms(0, 1, [torch.zeros(len(part.pieces)) for part in one.shard.layout.parts]))
    assert len(told(one.port.tell, m.Warned)) == 1


def test_clipping_over_several_shards_holds_the_log_until_all_norms_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = Server(monkeypatch, shards=2, clip_norm=1.0)
    seen: list[log.Entry] = []
    one.applier.watch = seen.append
    one.say(0, 1.0)
    one.take(0), one.fold(0, 1)
    one.applier.replay(log.Release(0, 0, 1, 1, False, False))
    assert told(one.port.share) == [(0, 1, torch.tensor([3.0]))] and not one.applier.settled
    assert one.shard.version == 0 and one.released() == [(0, 1, None)] and len(seen) == 1
    norms = [torch.zeros(len(part.pieces)) for part in one.shard.layout.parts]
    norms[0][0], norms[1][0] = 3.0, 4.0  # of the parameter that lies on both
    one.applier.norms(m.Norms(0, 1, norms))
    assert one.applier.settled and one.shard.version == 1
    assert one.shard.clip.call_args.args[0] == pytest.approx(5.0)
    assert one.released() == [(0, 1, Reading(1, 0, False, False))]
    assert [type(each) for each in seen] == [log.Take, log.Fold, log.Release]


def test_one_shard_clips_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Server(monkeypatch, clip_norm=1.0)
    one.say(0, 1.0)
    one.take(0), one.fold(0, 1)
    assert one.shard.version == 1 and not one.port.share.called


def test_a_shard_that_makes_another_version_than_the_log_says_is_no_shard_of_it(one: Server) -> None:
    one.take(0)
    with pytest.raises(AssertionError, match="shard 0 made version 1, the log says 2"):
        one.fold(0, 2)


def test_readings_name_the_dial_in_force(one: Server) -> None:
    one.applier.dials[3] = Sync.parse("async")
    one.applier.replay(log.Release(0, 0, 1, 0, True, False))
    one.applier.replay(log.Change(0, 3))
    one.applier.replay(log.Release(0, 0, 2, 0, False, True))
    assert one.released() == [(0, 1, Reading(0, 0, True, False)), (0, 2, Reading(0, 3, False, True))]
    one.shard.change.assert_called_once_with(Sync.parse("async"))


def test_values_that_are_put_free_their_draft_and_let_the_learner_go_on(one: Server) -> None:
    one.applier.replay(log.PutValues(0, 2, 5, 1, 4))
    assert one.shard.put.call_args.args[0] == 1
    assert one.released() == [(2, 5, None), (2, 5, Reading(4))]


def test_a_shard_without_a_part_of_a_table_leaves_its_log_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Server(monkeypatch)
    beside = LogApplier(server_port(shard=1, shards=2))
    beside.make_table(table())
    beside.replay(log.Release(0, 0, 1, 0, False, False))
    beside.begin(m.JoinTable(0, 0, 0, first=True))
    assert beside.shards == {} and one.applier.shards.keys() == {0}


def test_first_values_come_from_a_draft_and_are_written_down_where_that_is_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for first in (False, True):
        one = Server(monkeypatch, first=first)
        one.applier.begin(m.JoinTable(0, 1, 1, first=True))
        assert one.shard.begin.called and one.released()[0] == (1, FIRST_VALUES, None)
        files = [call[:2] for call in told(one.port.save)]
        assert files == [(FIRST, "table0-shard0.safetensors")] * first


def test_an_optimizers_state_that_came_is_loaded_where_the_log_says(one: Server) -> None:
    role = ServerRole(one.port, one.applier)
    role.handle((2, m.LoadState(0, 7, [{"lr": 1}], {0: {}})))
    assert told(one.port.tell) == [m.Loaded(0, 7, 2, 0)] and not one.shard.load.called
    role.entry(log.LoadState(0, 2, 7, 3))
    one.shard.load.assert_called_once_with([{"lr": 1}], {0: {}}, None)
    assert one.released() == [(2, 7, Reading(3))] and one.applier.blobs == {}


def test_a_state_that_no_file_can_hold_is_told(one: Server) -> None:
    one.shard.cut.side_effect = CheckpointError("a generator is no tensor")
    one.applier.replay(log.Cut(0, 8))
    assert told(one.port.tell) == [m.Saved(8, "table0-shard0.safetensors", None, "a generator is no tensor")]
    one.shard.cut.side_effect, one.shard.cut.return_value = None, ({}, {"a": {}})
    one.applier.replay(log.Cut(0, 9))
    assert told(one.port.save) == [(9, "table0-shard0.safetensors", {}, {"a": {}})]


def test_weights_are_told_at_an_epochs_end_and_at_the_runs(one: Server) -> None:
    one.applier.buffers = lambda number: [torch.ones(1)]
    one.applier.replay(log.Snapshot(0, 4))
    one.applier.replay(log.Finish(0, 0))
    parts = told(one.port.tell, m.WeightsPart)
    assert [(part.tag, part.version, part.buffers) for part in parts] == [
        ("epoch:4", 0, [torch.ones(1)]),
        ("final", 0, [torch.ones(1)]),
    ]
    assert one.shard.settle.called  # what was put counts without a fold


def test_a_simulated_clock_hears_of_every_gradient_and_fold(one: Server) -> None:
    one.take(0)
    one.shard.lies = True
    one.take(1)
    one.shard.gather.return_value = 1
    one.fold(0, 1)
    takes = Serving(log.Take, 0), Serving(log.Take, 0, 1)
    assert told(one.port.spend) == [*takes, Serving(log.Fold, 0)]


def test_only_the_first_shard_leads() -> None:
    assert hasattr(ServerRole(server_port()), "leader")
    other = ServerRole(server_port(shard=1, shards=2))
    other.handle(m.Dial(2, Sync.parse("async"), None))
    assert not hasattr(other, "leader") and other.replay.dials == {2: Sync.parse("async")}
