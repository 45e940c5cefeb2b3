"""Epochs of streams (M7): who may begin one, and when it is over for all."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.errors import RunError
from syncline.protocols.epoch_positions import Decision, End, EpochDone, Grant, Standing
from syncline.protocols.streams import NEVER, StreamEpochs


def begun(learners: int, *, lockstep: bool = False) -> StreamEpochs:
    """All are in the first epoch."""
    streams = StreamEpochs(lockstep=lockstep)
    for learner in range(learners):
        streams.join(learner, learner)
    for learner in range(learners):
        assert streams.ask(learner, 0) == [Grant(learner, 0, 0, 0, 0)]
    return streams


def read(streams: StreamEpochs, learner: int, upto: int) -> list[Decision]:
    """One gradient of its batches up to there is folded."""
    return [*streams.taken(learner, upto), *streams.settled(learner, upto)]


def test_an_epoch_is_done_with_the_last_gradient_of_the_last_share() -> None:
    streams = begun(2)
    assert read(streams, 0, 1) == streams.close(0, 2) == streams.close(1, 1) == []
    assert read(streams, 1, 1) == []
    assert read(streams, 0, 2) == [EpochDone(0)]


def test_who_is_ahead_does_not_end_the_epoch_of_the_others() -> None:
    streams = begun(2)
    streams.close(0, 1)
    read(streams, 0, 1)
    assert streams.ask(0, 1) == [Grant(0, 1, 1, 0, 0)]
    streams.close(0, 2)
    assert read(streams, 0, 2) == streams.close(1, 1) == []
    assert read(streams, 1, 1) == [EpochDone(0)]
    assert streams.ask(1, 1) == [Grant(1, 1, 1, 0, 0)]
    streams.close(1, 2)
    assert read(streams, 1, 2) == [EpochDone(1)]


def test_a_gradient_of_two_epochs_ends_both_when_it_is_folded() -> None:
    streams = begun(1)
    streams.close(0, 1)
    streams.ask(0, 1)
    streams.close(0, 2)
    assert streams.taken(0, 2) == []
    assert streams.settled(0, 2) == [EpochDone(0), EpochDone(1)]


def test_in_lockstep_a_further_epoch_begins_for_all_at_once() -> None:
    streams = begun(2, lockstep=True)
    streams.close(0, 1)
    assert streams.ask(0, 1) == streams.block(0, 1) == []
    assert streams.stuck() == streams.waiting() == {0}
    read(streams, 0, 1)
    streams.close(1, 1)
    assert read(streams, 1, 1) == [EpochDone(0)]
    assert streams.ask(1, 1) == [Grant(0, 1, 1, 0, 0), Grant(1, 1, 1, 0, 0)]
    assert streams.stuck() == set()


def test_nobody_waits_in_lockstep_for_who_has_left_or_waits_elsewhere() -> None:
    for elsewhere in (False, True):
        streams = begun(2, lockstep=True)
        streams.close(0, 1)
        streams.ask(0, 1)
        decisions = streams.part_ways() if elsewhere else streams.leave(1, lost=True)
        assert Grant(0, 1, 1, 0, 0) in decisions


def test_another_dial_lets_those_go_that_wait() -> None:
    streams = begun(2, lockstep=True)
    streams.close(0, 1)
    streams.ask(0, 1)
    assert streams.change(lockstep=False) == [Grant(0, 1, 1, 0, 0)]


def test_an_empty_share_begins_no_epoch_before_others_do() -> None:
    """Else its learner would run through them without end."""
    streams = begun(2)
    streams.close(0, 0)
    assert streams.ask(0, 1) == []
    streams.close(1, 1)
    assert read(streams, 1, 1) == [EpochDone(0)]
    assert streams.ask(1, 1) == [Grant(1, 1, 1, 0, 0), Grant(0, 1, 1, 0, 0)]


@pytest.mark.parametrize("lockstep", [False, True])
def test_an_epoch_in_which_nobody_would_find_anything_ends_at_once(lockstep: bool) -> None:
    """Those who might are lost, or have returned: then it may be the run that is over."""
    streams = begun(2, lockstep=lockstep)
    streams.close(0, 0)
    streams.ask(0, 1)
    assert streams.leave(1, lost=True) == [End(0, 1, NEVER), EpochDone(0)]
    streams = begun(2, lockstep=lockstep)
    streams.close(0, 0)
    streams.ask(0, 1)
    assert streams.leave(1, lost=False) == [End(0, 1, 1)]
    assert streams.ask(0, 2) == [End(0, 2, 2)]
    streams = begun(1, lockstep=lockstep)
    streams.close(0, 0)
    assert EpochDone(0) not in streams.ask(0, 1)


def test_a_lost_share_is_not_waited_for_but_its_gradients_are() -> None:
    streams = begun(2)
    streams.close(0, 1)
    read(streams, 0, 1)
    streams.taken(1, 1)
    assert streams.leave(1, lost=True) == []
    assert streams.settled(1, 1) == [EpochDone(0)]


def test_an_epoch_that_the_end_of_the_run_cut_short_is_never_done() -> None:
    streams = begun(2)
    streams.close(0, 1)
    read(streams, 0, 1)
    assert streams.leave(1, lost=False) == streams.leave(0, lost=False) == []


def test_who_returns_after_its_last_epoch_ends_it() -> None:
    streams = begun(2)
    streams.close(0, 1)
    streams.taken(0, 1)
    streams.close(1, 0)
    assert streams.leave(0, lost=False) == streams.leave(1, lost=False) == []
    assert streams.settled(0, 1) == [EpochDone(0)]


def test_gradients_may_be_dropped_before_earlier_ones_are_folded() -> None:
    streams = begun(1)
    streams.taken(0, 1)
    streams.close(0, 2)
    assert streams.settled(0, 2, 1) == []
    assert streams.settled(0, 1) == [EpochDone(0)]


def test_joiners_start_in_the_newest_epoch_that_is_not_done() -> None:
    streams = begun(1)
    streams.close(0, 1)
    read(streams, 0, 1)
    streams.join(7, 1)
    assert streams.epoch(7) == 1
    with pytest.raises(RunError, match="asks for epoch 1, but started in epoch 2"):
        streams.ask(7, 0)
    assert streams.ask(7, 1) == [Grant(7, 0, 1, 0, 0)]
    with pytest.raises(RunError, match="joins the feed twice"):
        streams.join(7, 1)


def test_a_run_that_goes_on_begins_the_epoch_again_that_was_not_over() -> None:
    streams = begun(1)
    streams.close(0, 1)
    read(streams, 0, 1)
    streams.ask(0, 1)
    standing = streams.standing()
    assert isinstance(standing, Standing) and standing.done == 1
    again = StreamEpochs(standing=standing)
    again.join(0, 0)
    assert again.epoch(0) == 1
    again.ask(0, 1)
    again.close(0, 1)
    assert read(again, 0, 1) == [EpochDone(1)]


class Reader:
    """A learner that reads random shares, publishes each batch, and is sometimes lost."""

    def __init__(self, number: int, shares: list[int]) -> None:
        self.number, self.shares = number, shares
        self.epoch, self.given, self.left = 0, 0, -1  # left < 0: it has to ask
        self.waits, self.over = False, False
        self.unfolded: list[int] = []


@settings(max_examples=200, deadline=None)
@given(st.randoms(use_true_random=False), st.booleans(), st.integers(1, 4), st.integers(1, 4))
def test_all_epochs_are_done_in_order_whatever_happens(
    chance: Random, lockstep: bool, learners: int, epochs: int
) -> None:
    streams = StreamEpochs(lockstep=lockstep)
    readers = [Reader(n, [chance.randrange(n > 0, 4) for _ in range(epochs)]) for n in range(learners)]
    readers[0].shares = [chance.randrange(1, 4) for _ in range(epochs)]
    for reader in readers:
        streams.join(reader.number, reader.number)
    done: list[int] = []

    def heard(decisions: list[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, EpochDone):
                live = [reader for reader in readers if not reader.over]
                assert all(r.epoch > decision.epoch or r.left == 0 for r in live)
                done.append(decision.epoch)
            elif isinstance(decision, Grant):
                readers[decision.learner].waits = False
                readers[decision.learner].left = readers[decision.learner].shares[decision.epoch]

    def act(reader: Reader) -> None:
        if reader.unfolded and chance.random() < 0.5:
            heard(streams.settled(reader.number, reader.unfolded.pop(0)))
        elif reader.left < 0:
            reader.waits = True
            heard(streams.ask(reader.number, reader.epoch))
        elif reader.left > 0:
            reader.left, reader.given = reader.left - 1, reader.given + 1
            if reader.left == 0:
                heard(streams.close(reader.number, reader.given))
            reader.unfolded.append(reader.given)
            heard(streams.taken(reader.number, reader.given))
        else:
            heard(streams.close(reader.number, reader.given))  # an empty share; else it is said already
            reader.epoch, reader.left = reader.epoch + 1, -1
            if reader.epoch == epochs or (reader.number and chance.random() < 0.1):
                reader.over = True
                heard(streams.leave(reader.number, lost=chance.random() < 0.5))

    while any(not reader.over for reader in readers):
        ready = [reader for reader in readers if not reader.over and not reader.waits]
        assert ready, "all wait for ever"
        act(chance.choice(ready))
    for reader in readers:
        for upto in reader.unfolded:
            heard(streams.settled(reader.number, upto))
    assert done == list(range(epochs))
