"""Learners' words about their data: what the ledgers hear of them, and the answers that are nobody's decision."""

from __future__ import annotations

from typing import Any

from syncline import messages as m
from syncline.messages.to_leader import AskBatch, Blocked, CloseLoader
from syncline.ports import OUTSIDE, Portion
from syncline.protocols.epoch_positions import Decision, End, EpochDone, Grant
from syncline.protocols.meetings import EPOCH, MeetingPlace
from syncline.roles.data_dispatcher import DataDispatcher
from tests.unit.roles.doubles import server_port, told

ONE, OTHER = 5, 6  # learners


class Feed:
    """Loaders of ten positions, in batches of four, with learners of ranks 0 and 1; decisions are carried out as the leader does."""

    def __init__(self, *, loaders: int = 1, lockstep: bool = False, snapshot: bool = False) -> None:
        self.port, self.decided = server_port(), list[tuple[int, Decision]]()
        self.dispatcher = DataDispatcher(self.port, {ONE: 0, OTHER: 1}, self._carry_out)
        for loader in range(loaders):
            opened = m.OpenLoader(loader, 10, 4, "ledger", None)
            self.dispatcher.make_loader(
                m.MakeLoader(opened=opened, dial=0, parts=2, snapshot=snapshot), lockstep=lockstep
            )

    def join(self, *learners: int) -> None:
        for learner in learners:
            for loader in self.dispatcher.standings():
                self.dispatcher.join(loader, learner, later=False)
        told(self.port.grant)

    def _carry_out(self, loader: int, decisions: list[Decision]) -> None:
        for each in decisions:
            self.decided.append((loader, each))
            if isinstance(each, Grant):
                portion = Portion(loader, each.index, each.epoch, each.start, each.stop)
                self.dispatcher.grant(portion, each.learner)

    def batch(self, learner: int, epoch: int = 0, loader: int = 0) -> None:
        self.dispatcher.ask(learner, AskBatch(loader, epoch))

    def granted(self) -> list[Any]:
        return told(self.port.grant)

    def made(self, *kinds: type) -> list[Decision]:
        found = [each for _, each in self.decided if isinstance(each, kinds)]
        self.decided.clear()
        return found


def test_who_joins_hears_its_first_epoch_outside_the_count() -> None:
    feed = Feed()
    feed.dispatcher.join(0, ONE, later=False)
    assert feed.granted() == [(ONE, Portion(0, OUTSIDE, 0, 0, 0))]
    feed.batch(ONE)
    assert feed.granted() == [(ONE, Portion(0, 0, 0, 0, 4))]


def test_nobody_counts_on_who_waits_for_the_warm_starts_end() -> None:
    feed = Feed(lockstep=True)
    feed.dispatcher.join(0, ONE, later=False)
    feed.dispatcher.join(0, OTHER, later=True)
    feed.granted()
    feed.batch(ONE)
    assert feed.granted() == [(ONE, Portion(0, 0, 0, 0, 4))]  # no part of the round is kept for another
    feed.dispatcher.welcome_late(OTHER), feed.dispatcher.welcome_late(OTHER)
    assert feed.granted() == [(OTHER, Portion(0, OUTSIDE, 0, 0, 0))]


def test_who_rests_is_roused_by_its_portion_once() -> None:
    feed = Feed()
    feed.join(ONE)
    assert feed.dispatcher.rest(0, ONE, 0)
    assert feed.dispatcher.grant(Portion(0, 0, 0, 0, 4), ONE)
    assert not feed.dispatcher.grant(Portion(0, 1, 0, 4, 8), ONE)
    assert not feed.dispatcher.rest(0, ONE, 1)  # that is on its way
    assert feed.dispatcher.rest(0, ONE, 2)
    feed.dispatcher.met([ONE])
    assert not feed.dispatcher.grant(Portion(0, 2, 0, 8, 10), ONE)


def test_a_portion_of_another_loader_rouses_nobody() -> None:
    feed = Feed(loaders=2)
    feed.join(ONE)
    assert feed.dispatcher.rest(1, ONE, 0)
    assert not feed.dispatcher.grant(Portion(0, 0, 0, 0, 4), ONE)


def test_who_breaks_out_of_an_epoch_hears_how_many_portions_it_was_given() -> None:
    feed = Feed()
    feed.join(ONE)
    feed.batch(ONE), feed.batch(ONE)
    feed.granted()
    feed.dispatcher.close(ONE, CloseLoader(0, 1))
    assert feed.granted()[0] == (ONE, Portion(0, OUTSIDE, 0, 2, 0, 1))


def test_the_epoch_of_a_gradient_is_that_of_its_batches() -> None:
    feed = Feed()
    feed.join(ONE)
    for _ in range(3):
        feed.batch(ONE)
    feed.dispatcher.taken(ONE, [(0, 2)])
    assert feed.dispatcher.settled(ONE, [(0, 2)]) == {0: 8}
    assert feed.made(EpochDone) == [] and feed.dispatcher.done(0) == 0
    feed.dispatcher.taken(ONE, [(0, 3)])
    assert feed.dispatcher.settled(ONE, [(0, 3)]) == {0: 2}
    assert feed.made(EpochDone) == [EpochDone(0)] and feed.dispatcher.done(0) == 1


def test_a_gradient_without_batches_belongs_where_its_learners_last_ones_do_while_that_is_open() -> None:
    feed = Feed()
    feed.join(ONE)
    for _ in range(3):
        feed.batch(ONE)
    assert feed.dispatcher.settled(ONE, []) == {0: 1}
    feed.dispatcher.taken(ONE, [(0, 3)])
    feed.dispatcher.settled(ONE, [(0, 3)])
    assert feed.dispatcher.settled(ONE, []) == {1: 1}  # the epoch before is done and told
    assert DataDispatcher(feed.port, {}, feed._carry_out).settled(ONE, []) == {0: 1}  # there is no loader


def test_what_a_leaving_learner_has_comes_back_but_for_what_is_in_gradients() -> None:
    feed = Feed()
    feed.join(ONE, OTHER)
    feed.batch(ONE), feed.batch(ONE)
    feed.dispatcher.taken(ONE, [(0, 1)])
    assert feed.dispatcher.going(ONE) == (4, 4)
    feed.dispatcher.leave(ONE, lost=True)
    feed.granted()
    feed.batch(OTHER)
    assert feed.granted() == [(OTHER, Portion(0, 0, 0, 4, 8))]


def test_loops_over_several_loaders_that_wait_for_each_other_go_on_at_the_last_one() -> None:
    """One begins a further epoch of the first loader, the other of the second: neither waits for ever."""
    feed = Feed(loaders=2, lockstep=True)
    feed.join(ONE, OTHER)
    for loader in (0, 1):  # both have had all of the first epoch
        for _ in range(3):
            feed.batch(ONE, loader=loader), feed.batch(OTHER, loader=loader)
    feed.made(), feed.granted()
    for learner, loader in ((ONE, 0), (OTHER, 1)):
        feed.batch(learner, 1, loader)
        feed.dispatcher.block(learner, Blocked(loader, 3))
    assert feed.dispatcher.waiting() == {ONE: MeetingPlace(EPOCH, 0), OTHER: MeetingPlace(EPOCH, 1)}
    assert feed.granted() == []
    feed.dispatcher.untangle()
    assert {(learner, portion.loader) for learner, portion in feed.granted()} == {(OTHER, 1)}


def test_ends_are_decisions_and_snapshots_are_of_loaders_that_want_them() -> None:
    feed = Feed(snapshot=True)
    feed.join(ONE)
    for _ in range(4):
        feed.batch(ONE)
    assert feed.made(End) == [End(ONE, 3, 0)] and feed.dispatcher.evaluated == {0}
    assert Feed().dispatcher.evaluated == set()
