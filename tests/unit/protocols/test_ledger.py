"""The feed's ledger (M7, M8): examples of every rule, then random runs of whole teams under all policies."""

import random
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.errors import RunError, UsageError
from syncline.protocols.epoch_positions import Decision, End, EpochDone, Grant, Standing
from syncline.protocols.ledger import Ledger


def ledger_of(team: int, **options: Any) -> Ledger:
    ledger = Ledger(**({"size": 10, "batch_size": 2, "learners": team} | options))
    for learner in range(team):
        assert ledger.join(learner, learner) == []
    return ledger


NEVER = 1 << 30  # an index that no answer has yet


def spans(decisions: Iterable[Decision]) -> list[tuple[int, int, int, int]]:
    return [(d.learner, d.epoch, d.start, d.stop) for d in decisions if isinstance(d, Grant)]


def idle(ledger: Ledger, learner: int) -> bool:
    """Lockstep quorums need not wait for it: it has nothing to compute until others go on."""
    member = ledger._learners.get(learner)
    if member is None:
        return True
    # An end may be given ahead: until its last batches are taken it still computes. At the barrier it does
    # not: what is left open there was consumed, and belongs to a later gradient.
    return (member.ended or learner in ledger._held) and (not member.open or member.queued > 0)


def finish(ledger: Ledger, learner: int, epoch: int = 0) -> list[Decision]:
    """One learner alone: ask, take and settle until its epoch ends or it has to wait."""
    seen: list[Decision] = []
    while decisions := ledger.ask(learner, epoch) or ledger.block(learner, NEVER):
        seen += decisions
        if any(isinstance(d, End) for d in decisions):
            break
        seen += ledger.settled(learner, max(d.index for d in decisions if isinstance(d, Grant)) + 1)
    return seen


# -- whoever asks -------------------------------------------------------------------------------------------


def test_whoever_asks_gets_the_next_positions_until_nothing_is_left() -> None:
    ledger = ledger_of(2, size=5)
    assert ledger.ask(1, 0) == [Grant(1, 0, 0, 0, 2)]
    assert ledger.ask(0, 0) == [Grant(0, 0, 0, 2, 4)]
    assert ledger.ask(1, 0) == [Grant(1, 1, 0, 4, 5)]
    assert ledger.ask(0, 0) == [End(0, 1, 0)]
    assert ledger.ask(0, 0) == []  # asked ahead: void
    assert ledger.ask(0, 1) == [Grant(0, 2, 1, 0, 2)]
    assert ledger.ask(1, 0) == [End(1, 2, 0)]


def test_an_epoch_is_done_when_its_own_last_position_is_settled_whatever_is_left_of_earlier_ones() -> None:
    """M10: a slow learner's batch of epoch 0 keeps only that epoch open."""
    ledger = ledger_of(2, size=4)
    ledger.ask(0, 0), ledger.ask(1, 0), ledger.ask(0, 0), ledger.ask(0, 1), ledger.ask(0, 1)
    assert ledger.taken(1, 1) == []
    assert ledger.epochs(0, 4) == {0: 2, 1: 4} and ledger.epochs(0, 3) == {0: 2, 1: 2}
    assert ledger.settled(0, 4) == [EpochDone(1)]  # its part of epoch 0 and all of epoch 1
    assert (ledger.done, ledger.not_done(0), ledger.not_done(1)) == (0, 0, 2)
    standing = ledger.standing()
    assert [standing.has_done(epoch) for epoch in range(3)] == [False, True, False]
    assert ledger.settled(1, 1) == [EpochDone(0)] and ledger.done == 2
    assert ledger.settled(1, 1) == []


def test_an_epoch_that_was_done_early_stays_done_in_a_ledger_that_goes_on() -> None:
    ledger = ledger_of(2, size=4)
    ledger.ask(0, 0), ledger.ask(1, 0), ledger.ask(0, 0), ledger.ask(0, 1), ledger.ask(0, 1)
    ledger.settled(0, 4)
    again = ledger_of(1, size=4, standing=ledger.standing())
    assert again.ask(0, 1) == [Grant(0, 0, 0, 2, 4)]  # what the slow one had
    assert again.ask(0, 1) == [End(0, 1, 1)]
    assert again.settled(0, 1) == [EpochDone(0)] and again.done == 2
    assert again.ask(0, 2) == [Grant(0, 2, 2, 0, 2)]


def test_what_a_lost_learner_had_is_handed_out_first_and_what_was_taken_is_not() -> None:
    ledger = ledger_of(2)
    ledger.ask(0, 0), ledger.ask(1, 0), ledger.ask(1, 0)
    ledger.taken(1, 1)
    assert ledger.leave(1) == []
    assert spans(ledger.ask(0, 0)) == [(0, 0, 4, 6)]
    assert spans(finish(ledger, 0)) == [(0, 0, 6, 8), (0, 0, 8, 10)]
    assert ledger.settled(1, 1) == [EpochDone(0)]  # after it left


@pytest.mark.parametrize("gone", [False, True])
def test_a_gradient_may_be_dropped_before_one_of_its_learner_is_folded(gone: bool) -> None:
    ledger = ledger_of(1, size=6)
    for _ in range(3):
        ledger.ask(0, 0)
    ledger.taken(0, 1), ledger.taken(0, 2)
    if gone:
        ledger.taken(0, 3), ledger.leave(0)
    assert ledger.settled(0, 3, since=2) == []
    assert sum(stop - start for _, start, stop in ledger.standing().returned) == 4  # of both that wait
    assert ledger.settled(0, 1) == [] and ledger.settled(0, 2) == [EpochDone(0)]


def test_what_comes_back_after_the_end_opens_the_next_epoch_and_keeps_its_own() -> None:
    ledger = ledger_of(2, size=4)
    ledger.ask(1, 0)
    assert finish(ledger, 0)[-1] == End(0, 1, 0)
    ledger.leave(1)
    assert ledger.ask(0, 1) == [Grant(0, 2, 0, 0, 2)]
    assert ledger.settled(0, 3) == [EpochDone(0)]
    assert spans(ledger.ask(0, 1)) == [(0, 1, 0, 2)]


def test_a_range_of_a_later_epoch_is_not_given_to_a_learner_in_an_earlier_one() -> None:
    ledger = ledger_of(3, size=4)
    ledger.ask(2, 0), ledger.ask(0, 0), ledger.ask(0, 0), ledger.ask(0, 1)
    ledger.taken(0, 1)
    ledger.leave(0)
    assert ledger.ask(1, 0) == [End(1, 0, 0)]
    assert spans(ledger.ask(1, 1)) == [(1, 1, 0, 2)]


def test_a_joiner_starts_in_the_newest_epoch() -> None:
    ledger = ledger_of(1, size=2)
    finish(ledger, 0), finish(ledger, 0, 1)
    ledger.join(7, 1)
    assert ledger.epoch(7) == 1
    with pytest.raises(RunError, match="learner 7 asks for epoch 1, but started in epoch 2"):
        ledger.ask(7, 0)
    assert ledger.ask(7, 1) == [End(7, 0, 1)]
    assert ledger.ask(7, 2) == [Grant(7, 1, 2, 0, 2)]


def test_a_batch_larger_than_the_epoch() -> None:
    assert finish(ledger_of(1, size=3, batch_size=8), 0) == [Grant(0, 0, 0, 0, 3), EpochDone(0), End(0, 1, 0)]


# -- breaking out -------------------------------------------------------------------------------------------


def test_what_a_break_leaves_unread_goes_to_those_still_in_the_epoch() -> None:
    ledger = ledger_of(2)
    ledger.ask(0, 0), ledger.ask(0, 0)
    ledger.taken(0, 1)
    assert ledger.close(0, 1) == []
    assert ledger.ask(0, 0) == []
    assert spans(ledger.ask(1, 0)) == [(1, 0, 2, 4)]
    assert spans(ledger.ask(0, 1)) == [(0, 1, 0, 2)]


def test_when_all_break_out_the_rest_is_skipped_and_the_next_epoch_starts_afresh() -> None:
    ledger = ledger_of(2)
    ledger.ask(0, 0), ledger.ask(0, 0), ledger.ask(1, 0)
    ledger.settled(0, 1)
    assert ledger.close(0, 1) == []
    assert ledger.close(1, 1) == []
    assert ledger.settled(1, 1) == [EpochDone(0, skipped=6)]
    assert spans(ledger.ask(0, 1)) == [(0, 1, 0, 2)]


def test_closing_after_the_end_or_before_the_first_ask_changes_nothing() -> None:
    ledger = ledger_of(1, size=2)
    ledger.close(0, 0)
    assert finish(ledger, 0) == [Grant(0, 0, 0, 0, 2), EpochDone(0), End(0, 1, 0)]
    ledger.close(0, 2)
    assert finish(ledger, 0, 1) == [Grant(0, 2, 1, 0, 2), EpochDone(1), End(0, 3, 1)]


def test_a_break_before_an_end_that_was_asked_ahead() -> None:
    ledger = ledger_of(1, size=4)
    assert [type(d) for _ in range(3) for d in ledger.ask(0, 0)] == [Grant, Grant, End]
    ledger.settled(0, 1)
    assert ledger.close(0, 1) == [EpochDone(0, skipped=2)]
    assert spans(ledger.ask(0, 1)) == [(0, 1, 0, 2)]


def test_asking_for_the_next_epoch_leaves_the_one_before() -> None:
    ledger = ledger_of(1, size=4)
    ledger.ask(0, 0)
    assert ledger.ask(0, 1) == [Grant(0, 1, 1, 0, 2)]
    assert ledger.settled(0, 1) == [EpochDone(0, skipped=2)]


def test_epochs_that_everybody_passed_over_are_skipped_whole() -> None:
    ledger = ledger_of(1, size=4)
    ledger.ask(0, 0)
    assert ledger.ask(0, 2) == [Grant(0, 1, 2, 0, 2), EpochDone(1, skipped=4)]
    assert ledger.settled(0, 1) == [EpochDone(0, skipped=2)] and ledger.done == 2


# -- the last epoch -----------------------------------------------------------------------------------------


def test_the_last_epoch_waits_for_what_others_have_and_takes_it_over() -> None:
    ledger = ledger_of(2, size=4, epochs=1)
    ledger.ask(1, 0), ledger.ask(0, 0)
    ledger.taken(0, 1)
    assert ledger.ask(0, 0) == []  # held
    assert ledger.leave(1) == [Grant(0, 1, 0, 0, 2)]
    assert ledger.ask(0, 0) == []  # asked ahead: it may still compute
    assert ledger.block(0, 1) == []  # its answer of that index is on its way
    assert ledger.block(0, 2) == [End(0, 2, 0)]  # its own open grant does not hold it
    assert ledger.settled(0, 2) == [EpochDone(0)]


def test_the_held_end_when_nothing_can_come_back() -> None:
    ledger = ledger_of(3, size=2, epochs=1)
    ledger.ask(2, 0)
    assert ledger.ask(0, 0) == ledger.ask(1, 0) == []
    assert ledger.block(0, 0) == ledger.block(1, 0) == []
    assert ledger.taken(2, 1) == [End(1, 0, 0), End(0, 0, 0)]


def test_two_that_are_blocked_do_not_hold_each_other_and_one_stays() -> None:
    ledger = ledger_of(2, size=4, epochs=1)
    ledger.ask(0, 0), ledger.ask(1, 0)
    assert ledger.ask(0, 0) == ledger.ask(1, 0) == []
    assert ledger.block(0, 1) == []  # learner 1 still computes
    assert ledger.block(1, 1) == [End(1, 1, 0)]  # both have consumed something and wait for more
    assert ledger.leave(1) == [Grant(0, 1, 0, 2, 4)]


def test_the_last_open_batch_of_a_dying_learner_finds_another() -> None:
    """Both asked ahead; who has nothing left stays while the other computes, whoever asked first."""
    ledger = ledger_of(2, size=4, epochs=1)
    ledger.ask(1, 0), ledger.ask(0, 0)
    ledger.ask(0, 0), ledger.ask(1, 0)
    ledger.taken(1, 1)
    assert ledger.block(1, 1) == []
    assert ledger.leave(0) == [Grant(1, 1, 0, 2, 4)]
    assert ledger.settled(1, 2) == [EpochDone(0)]


def test_an_end_voids_all_outstanding_asks() -> None:
    ledger = ledger_of(2, size=2, epochs=1)
    ledger.ask(1, 0)
    assert [ledger.ask(0, 0) for _ in range(3)] == [[], [], []]
    assert ledger.block(0, 0) == []
    assert ledger.taken(1, 1) == [End(0, 0, 0)]


def test_who_joins_after_the_last_epoch_or_asks_beyond_it_gets_an_end() -> None:
    ledger = ledger_of(1, size=2, epochs=1)
    finish(ledger, 0)
    ledger.join(5, 0)
    assert (ledger.ask(5, 0), ledger.block(5, 0)) == ([], [End(5, 0, 0)])
    assert ledger.ask(5, 1) == [End(5, 1, 1)]
    assert ledger.ask(5, 1) == []


# -- lockstep -----------------------------------------------------------------------------------------------


def test_a_round_is_one_slice_in_parts_by_rank_whoever_asks_first() -> None:
    ledger = ledger_of(3, size=14, lockstep=True)
    assert ledger.ask(2, 0) == [Grant(2, 0, 0, 4, 6)]
    assert ledger.ask(2, 0) == [Grant(2, 1, 0, 10, 12)]  # ahead
    assert ledger.ask(0, 0) == [Grant(0, 0, 0, 0, 2)]
    assert [spans(ledger.ask(1, 0)) for _ in range(2)] == [[(1, 0, 2, 4)], [(1, 0, 8, 10)]]
    assert ledger.ask(2, 0) == [End(2, 2, 0)]  # the last slice has two positions, for rank 0
    assert [spans(ledger.ask(0, 0)) for _ in range(2)] == [[(0, 0, 6, 8)], [(0, 0, 12, 14)]]


def test_nobody_begins_an_epoch_before_all_have_asked_for_it() -> None:
    ledger = ledger_of(2, size=6, lockstep=True)
    for learner in (0, 1):
        ledger.ask(learner, 0), ledger.settled(learner, 1)
    assert ledger.ask(1, 0) == [End(1, 1, 0)]
    assert idle(ledger, 1) and not idle(ledger, 0)
    assert ledger.ask(1, 1) == []  # the barrier
    ledger.ask(0, 0)
    assert ledger.ask(0, 0) == [End(0, 2, 0)]
    assert not idle(ledger, 0)  # the end came ahead: it still computes its last batch
    assert ledger.settled(0, 2) == [EpochDone(0)]
    assert idle(ledger, 0) and idle(ledger, 1)
    assert ledger.ask(0, 1) == [Grant(0, 3, 1, 0, 2), Grant(1, 2, 1, 2, 4)]
    assert not idle(ledger, 0) and not idle(ledger, 1)


def test_a_batch_consumed_without_a_step_does_not_block_the_barrier() -> None:
    ledger = ledger_of(2, size=6, lockstep=True)
    ledger.ask(0, 0), ledger.ask(1, 0), ledger.ask(0, 0), ledger.ask(1, 0)
    assert not idle(ledger, 1)  # it may be computing
    ledger.ask(1, 1)
    assert idle(ledger, 1)
    ledger.ask(0, 0)
    assert ledger.taken(0, 2) == []
    assert [span[0] for span in spans(ledger.ask(0, 1))] == [0, 1]


def test_after_a_loss_the_rounds_are_of_the_living_and_begin_with_what_came_back() -> None:
    ledger = ledger_of(3, size=20, lockstep=True)
    ledger.ask(0, 0), ledger.ask(1, 0)
    assert not idle(ledger, 2)
    ledger.leave(2)
    assert idle(ledger, 2)
    assert ledger.ask(1, 0) == [Grant(1, 1, 0, 6, 8)]
    assert ledger.ask(0, 0) == [Grant(0, 1, 0, 4, 6)]  # never asked for, but reserved


def test_a_loss_opens_the_barrier() -> None:
    ledger = ledger_of(2, size=4, lockstep=True)
    ledger.ask(1, 0)
    finish(ledger, 0)
    assert ledger.ask(0, 1) == []
    assert spans(ledger.leave(1)) == [(0, 0, 2, 4)]  # what came back, before the new epoch


def test_all_break_out_of_a_lockstep_epoch() -> None:
    ledger = ledger_of(2, size=12, lockstep=True)
    for learner in (0, 1):
        ledger.ask(learner, 0), ledger.ask(learner, 0), ledger.settled(learner, 1)
    assert ledger.close(0, 1) == []
    assert idle(ledger, 0)
    assert ledger.ask(0, 1) == []
    assert ledger.close(1, 1) == [EpochDone(0, skipped=8)]
    assert ledger.ask(1, 1) == [Grant(0, 2, 1, 0, 2), Grant(1, 2, 1, 2, 4)]


def test_who_finds_no_part_in_the_last_round_is_idle_until_something_comes_back() -> None:
    ledger = ledger_of(2, size=6, lockstep=True, epochs=1)
    for learner in (0, 1):
        ledger.ask(learner, 0), ledger.settled(learner, 1)
    ledger.ask(0, 0)
    assert ledger.ask(1, 0) == []
    assert idle(ledger, 1)
    assert ledger.leave(0) == [Grant(1, 1, 0, 4, 6)]
    assert not idle(ledger, 1)


def test_a_part_that_its_learner_has_not_asked_for_yet_can_come_back() -> None:
    ledger = ledger_of(2, size=3, lockstep=True, epochs=1)
    ledger.ask(0, 0), ledger.taken(0, 1)
    assert ledger.ask(0, 0) == []
    assert ledger.leave(1) == [Grant(0, 1, 0, 2, 3)]


def test_a_loop_left_at_the_barrier_is_an_epoch_not_seen() -> None:
    ledger = ledger_of(2, size=4, lockstep=True)
    ledger.ask(1, 0)
    finish(ledger, 0)
    assert ledger.ask(0, 1) == ledger.close(0, 2) == ledger.ask(0, 2) == []
    assert ledger.settled(1, 1) == [EpochDone(0)]
    assert ledger.ask(1, 0) == [End(1, 1, 0)]
    assert spans(ledger.ask(1, 1)) == [(1, 1, 0, 2)]
    assert spans(finish(ledger, 1, 1)) == [(1, 1, 2, 4)]
    assert spans(ledger.ask(1, 2)) == [(0, 2, 0, 2), (1, 2, 2, 4)]


def test_one_that_leaves_the_barrier_for_good_opens_it_for_the_others() -> None:
    ledger = ledger_of(2, size=4, lockstep=True, epochs=2)
    ledger.ask(1, 0)
    finish(ledger, 0)
    assert ledger.ask(0, 1) == []
    assert ledger.ask(0, 2) == [End(0, 2, 2)]
    ledger.settled(1, 1)
    assert finish(ledger, 1) == [End(1, 1, 0)]
    assert spans(finish(ledger, 1, 1)) == [(1, 1, 0, 2), (1, 1, 2, 4)]
    assert ledger.ask(1, 2) == [End(1, 5, 2)]
    ledger.join(2, 0)
    assert ledger.epoch(2) == 1  # there is no epoch beyond the last


# -- partition ----------------------------------------------------------------------------------------------


def test_a_partition_is_fixed_and_disjoint() -> None:
    ledger = ledger_of(3, size=10, partition=True)
    for epoch in (0, 1):
        for rank, part in enumerate([(0, 2, 3), (3, 5, 6), (6, 8, 10)]):
            got = spans(finish(ledger, rank, epoch))
            assert [span[2:] for span in got] == [part[:2], part[1:]]


def test_parts_of_the_lost_go_to_whoever_has_finished_its_own() -> None:
    ledger = ledger_of(2, size=8, partition=True)
    ledger.ask(1, 0)
    ledger.leave(1)
    assert [span[2:] for span in spans(finish(ledger, 0))] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert [span[2:] for span in spans(finish(ledger, 0, 1))] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    ledger.join(2, 1)
    assert [span[2:] for span in spans(finish(ledger, 0, 2))] == [(0, 2), (2, 4)]


def test_the_part_of_one_that_broke_out_goes_to_whoever_has_finished_its_own() -> None:
    ledger = ledger_of(2, size=8, partition=True)
    ledger.ask(1, 0), ledger.taken(1, 1)
    ledger.close(1, 1)
    assert [span[2:] for span in spans(finish(ledger, 0))] == [(0, 2), (2, 4), (6, 8)]


def test_the_last_epoch_of_a_partition_waits_for_what_others_have_not_begun() -> None:
    ledger = ledger_of(2, size=4, partition=True, epochs=1)
    assert spans(finish(ledger, 0)) == [(0, 0, 0, 2)]
    assert spans(ledger.leave(1)) == [(0, 0, 2, 4)]


def test_lockstep_rounds_of_a_partition_give_each_its_own_next() -> None:
    ledger = ledger_of(2, size=8, partition=True, lockstep=True)
    assert [spans(ledger.ask(1, 0)) for _ in range(2)] == [[(1, 0, 4, 6)], [(1, 0, 6, 8)]]
    assert [spans(ledger.ask(0, 0)) for _ in range(2)] == [[(0, 0, 0, 2)], [(0, 0, 2, 4)]]


# -- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [{"size": 0}, {"batch_size": 0}, {"epochs": 0}, {"learners": 0}])
def test_sizes_are_at_least_one(wrong: dict[str, int]) -> None:
    name = next(iter(wrong))
    with pytest.raises(UsageError, match=f"{name} >= 1, got {name} = 0"):
        ledger_of(1, **wrong)


def test_an_id_joins_once_and_a_gradient_needs_its_learner() -> None:
    ledger = ledger_of(1)
    with pytest.raises(RunError, match="joins the feed twice"):
        ledger.join(0, 1)
    ledger.leave(0)
    with pytest.raises(RunError, match="gradient of learner 0 is taken"):
        ledger.taken(0, 1)
    assert ledger.ask(0, 0) == ledger.close(0, 0) == ledger.leave(0) == ledger.settled(0, 1) == []


# -- whole teams, at random ---------------------------------------------------------------------------------


@dataclass
class Worker:
    """A learner's loop: asks ahead, reads, steps once in `stride` batches."""

    id: int
    epoch: int
    ahead: int
    stride: int
    asked: int = 0  # in this epoch
    inbox: deque[Grant | End] = field(default_factory=deque)
    next_index: int = 0
    upto: int = 0
    consumed: list[Grant] = field(default_factory=list)  # since its last step
    blocked: int = -1  # the index that it said it is blocked at
    in_step: bool = False
    at_end: bool = False  # of the last epoch, for all that the ledger knows


@dataclass
class Team:
    """Plays learners, sequence and faults against one ledger, and keeps its own account of every position."""

    options: dict[str, Any]
    total: int  # epochs that every learner runs
    workers_count: int
    ahead: int
    stride: int
    kills: int
    joins: int
    breaks: int
    chance: random.Random
    changes: int = 0
    standing: Standing | None = None
    stop_after: int | None = None  # events

    def __post_init__(self) -> None:
        self.ledger = Ledger(**self.options, standing=self.standing)
        self.lockstep = self.options["lockstep"]
        self.size = self.options["size"]
        self.workers: dict[int, Worker] = {}
        self.granted: dict[tuple[int, int], int] = {}  # position -> learner; taken and settled ones as well
        self.taken: set[tuple[int, int]] = set()
        self.settled: Counter[int] = Counter()  # by epoch
        self.published: deque[tuple[int, int, list[Grant]]] = deque()
        self.unsettled: deque[tuple[int, int, list[Grant]]] = deque()
        self.folds: list[list[Grant]] = []
        self.done: list[EpochDone] = []
        self.events: list[tuple[str, tuple[int, ...]]] = []
        self.heard: list[list[Decision]] = []
        self.broken = False
        for rank in range(self.workers_count):
            self.join(rank)

    # the ledger's side

    def tell(self, event: str, *values: int) -> None:
        decisions = call(self.ledger, event, *values)
        self.events.append((event, values))
        self.heard.append(decisions)
        for decision in decisions:
            if isinstance(decision, EpochDone):
                self.check_done(decision)
            else:
                self.deliver(decision)
        self.check_holds()

    def check_holds(self) -> None:
        reserved = 0  # parts of joint rounds that their learners have not asked for
        for worker in self.workers.values():
            held = {position for position, learner in self.granted.items() if learner == worker.id}
            unsettled = sum(
                g.stop - g.start
                for learner, _, grants in self.unsettled
                if learner == worker.id
                for g in grants
            )
            comes_back, taken = self.ledger.holds(worker.id)
            assert taken == unsettled
            assert comes_back >= len(held - self.taken)
            reserved += comes_back - len(held - self.taken)
        assert reserved == 0 or self.lockstep
        assert reserved <= self.total * self.size - len(self.granted)  # of what nobody has

    def deliver(self, decision: Grant | End) -> None:
        worker = self.workers[decision.learner]
        assert decision.index == worker.next_index
        assert decision.epoch <= worker.epoch
        worker.next_index += 1
        worker.inbox.append(decision)
        if isinstance(decision, Grant):
            assert 0 <= decision.start < decision.stop <= self.size
            assert decision.stop - decision.start <= self.options["batch_size"]
            for position in positions(decision):
                assert position not in self.granted, f"{position} is with {self.granted[position]}"
                self.granted[position] = worker.id
        elif decision.epoch + 1 == self.options["epochs"] and not self.broken:
            worker.at_end = True
            if all(other.at_end for other in self.workers.values()):
                self.check_drained(worker)

    def check_drained(self, last: Worker) -> None:
        """Nobody is left to take anything over: nothing may be left with others, nor with the ledger."""
        assert len(self.granted) == self.total * self.size
        others = {self.granted[position] for position in self.granted.keys() - self.taken} - {last.id}
        assert not others

    def check_done(self, done: EpochDone) -> None:
        """Once, and only when all of it is settled or skipped."""
        assert done.epoch not in {each.epoch for each in self.done}
        assert self.settled[done.epoch] == self.size - done.skipped
        assert not done.skipped or self.broken
        self.done.append(done)

    def come_back(self, grants: Iterable[Grant]) -> None:
        for grant in grants:
            for position in positions(grant):
                if position not in self.taken:
                    del self.granted[position]

    # the workers' side

    def join(self, rank: int) -> Worker:
        learner = len([event for event, _ in self.events if event == "join"])
        self.tell("join", learner, rank)
        worker = Worker(learner, self.ledger.epoch(learner), self.ahead, self.stride)
        self.workers[learner] = worker
        return worker

    def choices(self) -> list[tuple[str, Worker | None]]:
        """All that may happen next and is no fault."""
        possible: list[tuple[str, Worker | None]] = []
        for worker in self.workers.values():
            if worker.in_step:
                continue
            if worker.epoch == self.total:
                if all(learner != worker.id for learner, _, _ in self.published):
                    possible.append(("leave", worker))
                continue
            if worker.asked < worker.ahead:
                possible.append(("ask", worker))
            if worker.inbox:
                possible.append(("read", worker))
            elif worker.asked and worker.blocked != worker.next_index:
                possible.append(("block", worker))
        if self.published and (not self.lockstep or self.quorum()):
            possible.append(("take", None))
        if self.unsettled:
            possible.append(("settle", None))
        return possible

    def quorum(self) -> bool:
        has = {learner for learner, _, _ in self.published}
        return all(worker in has or idle(self.ledger, worker) for worker in self.workers)

    def do(self, name: str, worker: Worker | None) -> None:
        getattr(self, f"do_{name}")(*([worker] if worker else []))
        over = {each.epoch for each in self.done}
        assert over >= {epoch for epoch, count in self.settled.items() if count == self.size}  # at once
        assert self.ledger.done == min(set(range(self.total + 1)) - over)

    def do_ask(self, worker: Worker) -> None:
        worker.asked += 1
        self.tell("ask", worker.id, worker.epoch)

    def do_block(self, worker: Worker) -> None:
        worker.blocked = worker.next_index
        self.tell("block", worker.id, worker.next_index)

    def do_read(self, worker: Worker) -> None:
        decision = worker.inbox.popleft()
        worker.upto = decision.index + 1
        worker.asked -= 1
        if isinstance(decision, End):
            assert decision.epoch == worker.epoch
            self.next_epoch(worker)
            return
        worker.consumed.append(decision)
        if len(worker.consumed) >= worker.stride:
            self.published.append((worker.id, worker.upto, worker.consumed))
            worker.consumed = []
            worker.in_step = self.lockstep

    def next_epoch(self, worker: Worker) -> None:
        worker.epoch += 1
        worker.asked = 0
        worker.inbox.clear()

    def do_break(self, worker: Worker) -> None:
        self.broken = True
        self.come_back(grant for grant in worker.inbox if isinstance(grant, Grant))
        self.next_epoch(worker)
        self.tell("close", worker.id, worker.upto)

    def do_leave(self, worker: Worker) -> None:
        """Returned or killed."""
        mine = [entry for entry in self.published if entry[0] == worker.id]
        for entry in mine:
            self.published.remove(entry)
        self.come_back(grant for _, _, grants in mine for grant in grants)
        self.come_back([*worker.consumed, *(grant for grant in worker.inbox if isinstance(grant, Grant))])
        del self.workers[worker.id]
        self.tell("leave", worker.id)

    # the sequence's side

    def do_take(self) -> None:
        entries = list(self.published) if self.lockstep else [self.published[0]]
        self.folds.append([grant for _, _, grants in entries for grant in grants])
        for learner, upto, grants in entries:
            self.published.popleft()
            self.taken |= {position for grant in grants for position in positions(grant)}
            self.unsettled.append((learner, upto, grants))
            self.tell("taken", learner, upto)
        for learner, _, _ in entries if self.lockstep else []:
            self.workers[learner].in_step = False

    def do_change(self) -> None:
        """What was published is folded before another dial holds."""
        while self.published:
            self.do_take()
        for worker in self.workers.values():
            worker.in_step = False
        self.lockstep = not self.lockstep
        self.tell("change", self.lockstep)

    def do_settle(self) -> None:
        learner, upto, grants = self.unsettled.popleft()
        for grant in grants:
            self.settled[grant.epoch] += grant.stop - grant.start
        self.tell("settled", learner, upto)

    # a run

    def fault(self) -> None:
        """Perhaps one: a death at any moment, a joiner, a break."""
        roll = self.chance.random()
        in_loop = [w for w in self.workers.values() if w.epoch < self.total and not w.in_step]
        if self.kills and self.workers and roll < 0.05:
            self.kills -= 1
            self.do_leave(self.chance.choice(list(self.workers.values())))
        elif self.joins and roll < 0.1:
            self.joins -= 1
            self.join(self.chance.randrange(self.workers_count + 2))
        elif self.breaks and in_loop and roll < 0.2:
            self.breaks -= 1
            self.do_break(self.chance.choice(in_loop))
        elif self.changes and roll > 0.95:
            self.changes -= 1
            self.do_change()

    def run(self) -> None:
        for _ in range(100_000):
            if self.stop_after is not None and len(self.events) >= self.stop_after:
                return
            self.fault()
            possible = self.choices()
            if not possible:
                assert not self.workers, f"stuck: {self.workers}"
                return
            self.do(*self.chance.choice(possible))
        raise AssertionError("no end")

    def rescue(self) -> None:
        """Learners that come when all have left find what was lost, and finish."""
        self.kills = self.breaks = self.joins = self.changes = 0
        if len(self.done) < self.total:
            self.join(0).stride = 1
            self.run()


def call(ledger: Ledger, event: str, *values: int) -> list[Decision]:
    if event == "change":
        return ledger.change(lockstep=bool(values[0]))
    decisions: list[Decision] = getattr(ledger, event)(*values)
    return decisions


def positions(grant: Grant) -> list[tuple[int, int]]:
    return [(grant.epoch, position) for position in range(grant.start, grant.stop)]


@st.composite
def teams(
    draw: st.DrawFn, *, faults: bool = True, lockstep: bool | None = None, changes: bool = False
) -> Team:
    lockstep = draw(st.booleans()) if lockstep is None else lockstep
    total, workers = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    last_is_known = draw(st.booleans())
    budget = st.integers(0, 4) if faults else st.just(0)
    return Team(
        options={
            "size": draw(st.integers(1, 40)),
            "batch_size": draw(st.integers(1, 6)),
            "epochs": total if last_is_known else None,
            "lockstep": lockstep,
            "partition": draw(st.booleans()),
            "learners": workers,
        },
        total=total,
        workers_count=workers,
        ahead=draw(st.integers(1, 4)),
        # a held learner that waits for more data before it steps would block lockstep quorums
        stride=1 if (lockstep or changes) and last_is_known else draw(st.integers(1, 3)),
        kills=draw(budget),
        joins=draw(budget),
        breaks=draw(budget),
        changes=draw(st.integers(1, 4)) if changes else 0,
        chance=random.Random(draw(st.integers(0, 2**32))),
    )


@settings(max_examples=400, deadline=None)
@given(teams())
def test_a_team_always_ends_and_every_position_is_settled_once(team: Team) -> None:
    team.run()
    team.rescue()
    assert sorted(done.epoch for done in team.done) == list(range(team.total))
    assert sum(team.settled.values()) + sum(done.skipped for done in team.done) == team.total * team.size
    standing = team.ledger.standing()
    assert not standing.returned and not standing.fresh and not team.ledger._gone


def test_an_epoch_that_was_left_at_its_barrier_is_skipped_when_its_last_learner_dies() -> None:
    options: dict[str, Any] = {
        "size": 7,
        "batch_size": 1,
        "lockstep": True,
        "partition": False,
        "learners": 2,
    }
    team = Team(
        {**options, "epochs": None},
        total=3,
        workers_count=2,
        ahead=1,
        stride=2,
        kills=2,
        joins=1,
        breaks=3,
        chance=random.Random(353),
        changes=2,
    )
    team.run()
    team.rescue()
    assert [done.epoch for done in team.done] == [0, 1, 2]


@settings(max_examples=200, deadline=None)
@given(teams(faults=False))
def test_without_faults_nothing_is_skipped_nor_left_to_others(team: Team) -> None:
    stepped_through = team.stride == 1
    team.run()
    if stepped_through:
        ordered = team.done if team.lockstep else sorted(team.done, key=lambda done: done.epoch)
        assert ordered == [EpochDone(epoch) for epoch in range(team.total)]


@settings(max_examples=200, deadline=None)
@given(teams(faults=False, lockstep=True))
def test_in_lockstep_every_fold_is_the_next_joint_slice(team: Team) -> None:
    """M7: a user can repeat the run in plain PyTorch, however far ahead learners ask."""
    team.stride = 1
    for worker in team.workers.values():
        worker.stride = 1
    team.run()
    size, joint = team.size, team.workers_count * team.options["batch_size"]
    folds = [sorted(position for grant in fold for position in positions(grant)) for fold in team.folds]
    if not team.options["partition"]:
        assert folds == [
            [(epoch, position) for position in range(start, min(start + joint, size))]
            for epoch in range(team.total)
            for start in range(0, size, joint)
        ]
    assert all(len({epoch for epoch, _ in fold}) == 1 for fold in folds)


@settings(max_examples=100, deadline=None)
@given(teams(changes=True))
def test_the_same_events_give_the_same_decisions(team: Team) -> None:
    team.run()
    again = Ledger(**team.options)
    assert [call(again, event, *values) for event, values in team.events] == team.heard


@settings(max_examples=200, deadline=None)
@given(teams(faults=False))
def test_a_partition_without_losses_is_kept(team: Team) -> None:
    options = team.options | {"partition": True}
    team = Team(options, team.total, team.workers_count, team.ahead, 1, 0, 0, 0, team.chance)
    team.run()
    bounds = [rank * team.size // team.workers_count for rank in range(team.workers_count + 1)]
    grants = [d for decisions in team.heard for d in decisions if isinstance(d, Grant)]
    assert all(
        bounds[grant.learner] <= grant.start < grant.stop <= bounds[grant.learner + 1] for grant in grants
    )
    assert len(team.done) == team.total


# -- another dial -------------------------------------------------------------------------------------------


@settings(max_examples=400, deadline=None)
@given(teams(changes=True))
def test_whenever_the_dial_changes_every_position_is_settled_once(team: Team) -> None:
    team.run()
    team.rescue()
    assert sorted(done.epoch for done in team.done) == list(range(team.total))
    assert sum(team.settled.values()) + sum(done.skipped for done in team.done) == team.total * team.size
    standing = team.ledger.standing()
    assert not standing.returned and not standing.fresh and not team.ledger._gone


def test_a_change_opens_the_barrier_and_parts_of_a_round_go_to_whoever_asks() -> None:
    ledger = ledger_of(2, size=6, lockstep=True)
    assert spans(ledger.ask(1, 0)) == [(1, 0, 2, 4)]  # learner 0's part is 0…2
    assert ledger.holds(0) == (2, 0)
    assert ledger.change(lockstep=True) == []
    assert ledger.change(lockstep=False) == [] and ledger.holds(0) == (0, 0)
    assert spans(ledger.ask(1, 0)) == [(1, 0, 0, 2)] and spans(ledger.ask(1, 0)) == [(1, 0, 4, 6)]
    assert ledger.ask(0, 0) == [End(0, 0, 0)]
    assert ledger.change(lockstep=True) == []
    assert ledger.ask(0, 1) == ledger.ask(0, 1) == []  # learner 1 is still in epoch 0
    assert spans(ledger.change(lockstep=False)) == [(0, 1, 0, 2), (0, 1, 2, 4)]


# -- to be gone on with ---------------------------------------------------------------------------------------


def settle_all(team: Team) -> None:
    """To a version boundary: nothing is taken and not folded; in lockstep whole rounds are."""
    while team.unsettled:
        team.do_settle()


@settings(max_examples=400, deadline=None)
@given(
    teams(changes=True), st.integers(0, 120), st.booleans(), st.integers(1, 6), st.booleans(), st.booleans()
)
def test_a_ledger_can_be_put_down_at_any_moment_and_taken_up_by_other_learners(
    team: Team, stop: int, boundary: bool, workers: int, lockstep: bool, same: bool
) -> None:
    """Every position that is not settled is handed out once, whoever had it."""
    team.stop_after = stop
    team.run()
    if boundary:
        settle_all(team)
    standing = team.ledger.standing()
    if same:
        workers, lockstep = len(team.workers) or 1, team.lockstep
    options = team.options | {"lockstep": lockstep, "learners": team.options["learners"]}
    stride = 1 if team.options["epochs"] else team.stride
    parts = (team.total, workers, team.ahead, stride, 0, 0, 0, team.chance)
    after = go_on(team, Team(options, *parts, standing=standing))
    if not options["partition"]:
        assert after.ledger.standing() == standing
    after.run()
    after.rescue()
    assert sorted(done.epoch for done in after.done) == list(range(team.total))
    assert sum(after.settled.values()) + sum(d.skipped for d in after.done) == team.total * team.size
    standing = after.ledger.standing()
    assert not standing.returned and not standing.fresh


def go_on(team: Team, after: Team) -> Team:
    """With what the first team has settled."""
    unsettled = {p for _, _, grants in team.unsettled for grant in grants for p in positions(grant)}
    after.done, after.settled, after.broken = list(team.done), team.settled.copy(), team.broken
    after.taken = team.taken - unsettled
    after.granted = dict.fromkeys(after.taken, -1)
    return after


@settings(max_examples=300, deadline=None)
@given(teams(faults=False, lockstep=True), st.integers(0, 120))
def test_the_same_learners_form_the_same_rounds_again(team: Team, stop: int) -> None:
    """So that a lockstep run that was interrupted goes on with the same bits."""
    parts = (team.total, team.workers_count, team.ahead, 1, 0, 0, 0)
    before, through = (
        Team(team.options, *parts, random.Random(i), stop_after=n) for i, n in enumerate((stop, None))
    )
    before.run(), through.run()
    settle_all(before)
    after = go_on(before, Team(team.options, *parts, team.chance, standing=before.ledger.standing()))
    after.run()
    assert [*rounds(before), *rounds(after)] == rounds(through)


def rounds(team: Team) -> list[list[tuple[int, int, int, int]]]:
    """The folds, with the rank of each part."""
    ranks = {
        (g.epoch, g.start): g.learner for decisions in team.heard for g in decisions if isinstance(g, Grant)
    }
    return [sorted((ranks[g.epoch, g.start], g.epoch, g.start, g.stop) for g in fold) for fold in team.folds]
