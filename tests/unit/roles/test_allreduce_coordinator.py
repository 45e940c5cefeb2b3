"""What learners among equals report, put together: epochs, ends, checkpoints; and where they meet."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from syncline import messages as m
from syncline.protocols.epoch_positions import Standing
from syncline.protocols.sequence import Account
from syncline.protocols.staleness import Staleness
from syncline.roles.allreduce_coordinator import (
    AllReduceCoordinator,
    Copy,
    Deeper,
    GatheredCut,
    Joint,
    Meet,
    PeerAccount,
    PeerClosed,
    PeerCut,
    PeerEpoch,
    PeerTable,
    own_losses,
)
from syncline.table.checkpoints import Written
from tests.unit.roles.doubles import layout

CALM = Staleness(gradients=4, mean=0.0, max=0, histogram={0: 4})


class Desk(AllReduceCoordinator):
    """Of two learners; more processes where they have seats."""

    def __init__(self, processes: int = 2) -> None:
        self.out: list[Any] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.replies: list[tuple[int, Any]] = []
        self.failures: list[str] = []
        self.kept: list[GatheredCut] = []
        super().__init__(
            2,
            processes,
            emit=self.out.append,
            event=lambda what, **details: self.events.append((what, details)),
            reply=lambda rank, answer: self.replies.append((rank, answer)),
            fail=lambda error: self.failures.append(str(error)),
            keep=self.kept.append,
        )


def copy(version: int, value: float, first: bool) -> Copy:
    return Copy(version, [torch.ones(3)] if first else None, [torch.tensor([value])])


def closed(
    rank: int, *, version: int = 4, checksum: int = 9, loss: float = 1.0, steps: int = 4
) -> PeerClosed:
    account = PeerAccount(version, 8, 32, CALM, checksum)
    return PeerClosed(steps, loss, {0: account}, {0: copy(version, float(rank), rank == 0)})


# -- meetings ----------------------------------------------------------------------------------------------------


def test_everybody_hears_what_all_brought_by_rank_meeting_after_meeting() -> None:
    desk = Desk(3)
    desk.hear(2, Meet("mean", "c")), desk.hear(0, Meet("mean", "a"))
    desk.hear(0, Meet("open", "later"))
    assert desk.replies == [] and desk.waiting().keys() == {0, 2}
    desk.hear(1, Meet("mean", "b"))
    assert desk.replies == [(rank, ["a", "b", "c"]) for rank in range(3)]
    assert desk.waiting() == {0: Meet("open", "later")} and desk.failures == []


def test_learners_at_different_places_fail_by_name() -> None:
    desk = Desk()
    desk.hear(0, Meet("a mean", 1)), desk.hear(1, Meet("an optimizer", 2))
    assert "learner 1 is at an optimizer while learner 0 is at a mean" in desk.failures[0]


def test_who_returned_before_the_others_fails_the_run_whichever_is_heard_first() -> None:
    for messages in ((1, closed(1)), (0, Meet("a mean", 1))), ((0, Meet("a mean", 1)), (1, closed(1))):
        desk = Desk()
        for rank, message in messages:
            assert desk.failures == []
            desk.hear(rank, message)
        assert "learner 1 returned after 4 steps while learner 0 is at a mean" in desk.failures[0]


# -- reports -----------------------------------------------------------------------------------------------------


def test_an_epochs_loss_is_over_all_examples_and_its_snapshot_has_joint_buffers() -> None:
    desk = Desk()
    for rank, (loss, count) in enumerate(((6.0, 2), (2.0, 2))):
        copies = {0: copy(5, float(rank), rank == 0)}
        assert desk.out == []
        desk.hear(rank, PeerEpoch(epoch=1, version=5, examples=40, loss=loss, count=count, copies=copies))
    weights, end = desk.out
    assert (weights.tag, weights.version, weights.buffers) == ("epoch:1", 5, [torch.tensor([0.5])])
    assert end == m.EpochEnd(0, 1, 5, 40, 2.0, {0: 3.0, 1: 1.0}, 1, 2)


def test_a_learner_without_examples_has_no_mean_loss() -> None:
    desk = Desk()
    for rank in (0, 1):
        desk.hear(rank, PeerEpoch(epoch=0, version=1, examples=4, loss=3.0 * (1 - rank), count=3 - 3 * rank))
    assert (desk.out[0].loss, desk.out[0].losses) == (1.0, {0: 1.0})
    desk.hear(0, PeerEpoch(epoch=1, version=1, examples=4, loss=0.0, count=0))
    desk.hear(1, PeerEpoch(epoch=1, version=1, examples=4, loss=0.0, count=0))
    assert math.isnan(desk.out[1].loss) and desk.out[1].losses == {}


def test_the_end_is_told_when_every_process_has_come_to_it() -> None:
    desk = Desk(3)
    for rank in (2, 1, 0):
        assert desk.out == []
        desk.hear(rank, closed(rank, loss=math.nan if rank else 0.5))
    weights, finished = desk.out
    assert (weights.tag, weights.buffers) == (
        "final",
        [torch.tensor([0.5])],
    )  # of learners, not of their seats
    statistics = finished.statistics
    assert (statistics.steps, statistics.losses) == ({0: 4, 1: 4}, {0: 0.5})
    assert statistics.tables == {0: m.TableStatistics(4, 8, 0, 32, CALM, {}, [], 0)} and desk.failures == []


@pytest.mark.parametrize("other", [{"version": 3}, {"checksum": 8}])
def test_copies_that_differ_at_the_end_fail_the_run(other: dict[str, int]) -> None:
    desk = Desk()
    desk.hear(0, closed(0)), desk.hear(1, closed(1, **other))
    assert isinstance(desk.out[-1], m.Finished)
    assert "the copies of table 0 differ at the end: learner 1 is at version" in desk.failures[0]


def test_a_delay_that_adapts_is_an_event_and_what_is_for_others_passes() -> None:
    desk = Desk()
    desk.hear(0, Deeper(0, 12, 1, 2, 0.25))
    assert desk.events == [
        (
            "delay 1 → 2: 25% of the time was spent waiting",
            {"kind": "delay", "version": 12, "table": 0, "delay": 2},
        )
    ]
    desk.hear(1, m.Log({"a": 1})), desk.hear(1, warned := m.Warned("look", "cause"))
    desk.hear(0, PeerTable(3, layout()))
    assert desk.out == [(1, m.Log({"a": 1})), warned] and desk.layouts == {3: layout()}


# -- checkpoints -------------------------------------------------------------------------------------------------


def part(rank: int, files: list[str] | None = None) -> PeerCut:
    joint = files and Joint(
        files=files,
        accounts={0: Account(version=8)},
        examples={0: 32},
        optimizers={0: "torch.optim.sgd.SGD"},
        pipelines={},
        loaders={0: m.OpenLoader(0, 16, 4, "ledger", None)},
        standings={0: Standing.before(2)},
    )
    personal = m.Personal(8, b"r%d" % rank, {0: [torch.tensor([float(rank)])]})
    return PeerCut(number=8, personal=personal, losses=(3.0 + rank, 4), joint=joint or None)


def test_a_checkpoint_is_kept_when_all_parts_and_files_are_there_in_any_order() -> None:
    messages: list[tuple[int, Any]] = [
        (0, m.Saved(8, "b", Written("b", 1, 1))),
        (1, part(1)),
        (0, part(0, ["a", "b"])),
        (0, m.Saved(8, "a", None, "the disk is full")),
    ]
    for turn in range(4):
        desk = Desk()
        for rank, message in messages[turn:] + messages[:turn]:
            assert desk.kept == []
            desk.hear(rank, message)
        (cut,) = desk.kept
        assert not desk.cutting and cut.files == [Written("b", 1, 1)] and cut.problem == "the disk is full"


def test_the_record_of_a_checkpoint_counts_every_rank() -> None:
    cut = GatheredCut(8, 2, {0: part(0, ["a"]), 1: part(1)})
    name, tensors = cut.learners()
    assert name == "learners.safetensors"
    assert tensors.keys() == {"random/0", "random/1", "buffer/0/0/0", "buffer/0/1/0"}
    found = SimpleNamespace(**cut.manifest(seed=1, sync="hardsync", layouts={0: layout()}, history=[]))
    assert found.counts == {
        "examples": {0: 32},
        "losses": {2: {0: [3.0, 4], 1: [4.0, 4]}},  # of the epoch that is not done
        "steps": {0: 8, 1: 8},
    }
    assert (found.learners, found.loaders[0]["parts"], found.tables[0]["optimizer"]) == (
        2,
        2,
        "torch.optim.sgd.SGD",
    )


def test_the_first_learner_takes_over_the_losses_of_ranks_that_are_no_more() -> None:
    losses = {1: {0: [1.0, 2.0], 1: [4.0, 3.0], 2: [8.0, 5.0]}, 2: {0: [16.0, 1.0]}}
    assert own_losses(losses, 0, 2) == (25.0, 8)
    assert own_losses(losses, 1, 2) == (4.0, 3)
    assert own_losses(losses, 3, 4) == (0, 0)
