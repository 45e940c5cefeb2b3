"""A learner's side of a table and of a feed: what it says and waits for under each dial, without a server."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline import messages as m
from syncline.dial import Sync
from syncline.learn.stepper import FreeDraft, PortionOf, Portions, Replica, Rested, Stepper, Ticket
from syncline.messages import to_leader as say
from syncline.ports import OUTSIDE, Portion, Reading

LOCAL = "downpour:push={push},fetch={fetch},local_lr=0.1"


class Table(Replica):
    """A replica that notes what is done with it; gradients are numbers, and the one that is being made is `own`."""

    def __init__(self, sync: str, **options: bool) -> None:
        self.said: list[Any] = []
        self.own, self.total, self.moves = 0, 0, 0
        self.overtakes = 0
        self.published: list[int] = []
        self.tickets: list[Ticket] = []
        self.newest, self.dial, self.keep = 0, 0, False
        self.here = True  # a version that is not waited for
        self.dials = [Sync.parse(sync)]
        self.reads: list[tuple[int, bool]] = []
        self.stepper = Stepper(0, self.dials[0], self, self.post, **options)
        self.run(self.stepper.read(self.stepper.ticket()))

    def post(self, message: Any, later: bool = False) -> None:
        self.said.append(message)

    def run(self, steps: Any) -> None:
        found: Any = None
        try:
            while True:
                wait = steps.send(found)
                if isinstance(wait, m.AskDial):
                    found = self.dials[wait.number]
                elif isinstance(wait, FreeDraft):
                    found = "draft" if wait.block or self.here else None
                else:
                    self.tickets.append(wait)
                    reading = Reading(self.newest, self.dial, self.keep)
                    found = reading if wait.block or self.here else None
        except StopIteration:
            return

    def step(self, own: int = 1) -> None:
        self.own = own
        self.run(self.stepper.step(None))

    def gradients(self) -> list[say.Gradient]:
        return [each for each in self.said if isinstance(each, say.Gradient)]

    # -- as a replica ------------------------------------------------------------------------------------

    def fill(self, draft: Any) -> list[bool]:
        self.total = self.own
        return []

    def add(self, draft: Any, *, first: bool) -> None:
        self.total = self.own + (0 if first else self.total)

    def added(self) -> list[bool]:
        return []

    def move(self, rate: float) -> None:
        self.moves += 1

    def seal(self, draft: Any, said: Any, *, keep: bool) -> Any:
        return (1, -1, 0), 0, b"kept" if keep else b"", 0.0

    def publish(self, draft: Any, gradient: say.Gradient, present: list[bool]) -> None:
        self.published.append(self.total)
        self.said.append(gradient)

    def read(self, reading: Reading, *, known: bool) -> int | None:
        if self.overtakes:
            self.overtakes, self.keep = self.overtakes - 1, False  # which was said once
            return None
        self.reads.append((reading.version, known))
        return reading.version

    def flow(self) -> int:
        return self.newest

    def begun(self) -> bool:
        return True

    def awaits(self, number: int) -> None:
        self.said.append(say.Await(0, number))


# -- steps ---------------------------------------------------------------------------------------------------


def test_each_step_publishes_one_gradient_and_reads_the_version_of_its_ticket() -> None:
    table = Table("hardsync")
    for number in range(3):
        table.newest = number + 1
        table.step(own=10 + number)
    assert table.published == [10, 11, 12]
    assert [(g.number, g.stamp, g.step, g.silent) for g in table.gradients()] == [
        (1, 0, 0, False),
        (2, 1, 1, False),
        (3, 2, 2, False),
    ]
    assert [wait.number for wait in table.tickets] == [0, 1, 2, 3] and all(
        wait.block for wait in table.tickets
    )
    assert table.reads == [(0, False), (1, False), (2, False), (3, False)]


def test_a_version_that_it_has_is_known() -> None:
    table = Table("softsync:1")
    table.step()
    assert table.reads[-1] == (0, True)


def test_random_states_go_with_the_gradient_after_it_was_told_of_a_checkpoint() -> None:
    table = Table("hardsync")
    for keep in (True, False, False):
        table.keep = keep
        table.step()
    assert [gradient.states for gradient in table.gradients()] == [b"", b"kept", b""]


def test_who_is_overtaken_reads_one_that_is_delivered() -> None:
    table = Table("async")
    table.overtakes, table.keep = 2, True
    table.step()
    assert [each for each in table.said if isinstance(each, say.Fetch)] == [
        say.Fetch(0, 2, deliver=True),
        say.Fetch(0, 3, deliver=True),
    ]
    assert len(table.reads) == 2 and table.stepper.keep


@settings(max_examples=40, deadline=None)
@given(
    push=st.integers(1, 5),
    fetch=st.integers(1, 5),
    steps=st.integers(1, 25),
    here=st.booleans(),
)
def test_no_local_gradient_is_lost_and_fetches_come_in_time(
    push: int, fetch: int, steps: int, here: bool
) -> None:
    if push == fetch == 1:
        return
    table = Table(LOCAL.format(push=push, fetch=fetch))
    table.here, before = here, len(table.tickets)
    for number in range(steps):
        table.step(own=2**number)
    sums = [sum(2**each for each in range(low, low + push)) for low in range(0, steps - push + 1, push)]
    assert table.published == sums, "every so many steps their sum goes out"
    left = 2**steps - 1 - sum(sums)
    table.stepper.push()
    assert table.published == sums + [left] * (left > 0)
    assert table.moves == (steps if fetch > 1 else 0)
    waited = [wait for wait in table.tickets[before:] if wait.block and wait.number is not None]
    fetched = len(table.reads) - 1
    if here:
        assert not waited and fetched == steps // fetch
    else:  # each is waited for in the last step before the next would begin
        assert fetched == len(waited) == max(0, (steps + 1) // fetch - 1)


def test_another_dial_takes_over_with_what_was_added_before() -> None:
    table = Table(LOCAL.format(push=3, fetch=1))
    table.dials.append(Sync.parse("hardsync"))
    table.dial = 1
    table.step(own=1)
    assert table.published == [] and table.stepper.sync == table.dials[1]
    table.step(own=4)
    assert table.published == [5], "they go out together"
    table.step(own=2)
    assert table.published == [5, 2]


def test_over_a_tree_with_versions_that_flow_down_nothing_is_waited_for() -> None:
    table = Table("async", tree=True, casts=True)
    table.tickets.clear()
    for number in range(3):
        table.newest = number
        table.step()
    assert all(gradient.silent for gradient in table.gradients()) and table.stepper.version == 2
    assert table.tickets and not any(wait.block for wait in table.tickets)
    table.run(table.stepper.deliver())
    assert table.tickets[-1] == Ticket(None), "what it did not wait for is there"
    table.run(table.stepper.deliver())
    assert table.tickets.count(Ticket(None)) == 1
    table.dials.append(Sync.parse("hardsync"))
    table.dial = 1
    table.step()
    assert table.stepper.sync == table.dials[1]
    table.step()
    assert not table.gradients()[-1].silent and table.tickets[-1].block


# -- rests ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sync, stamp",
    [("softsync:1", 0), ("hardsync", 3)],  # in lockstep rounds are what all publish next
)
def test_after_a_rest_the_gradient_is_of_the_version_it_was_begun_on(sync: str, stamp: int) -> None:
    table = Table(sync)
    number = table.stepper.rest((7, 2), b"states", later=True)
    assert table.said == [say.Rest(0, number, 7, 2, b"states")]
    table.newest = 3
    table.run(table.stepper.rested(number))
    table.step()
    assert table.gradients()[0].stamp == stamp and table.stepper.version == 3


def test_it_says_that_there_is_something_again() -> None:
    table = Table("hardsync")
    assert table.stepper.rest(None, b"", later=False) == 1 and table.said == [say.Reread(0, 1, b"")]


# -- the feed ------------------------------------------------------------------------------------------------


class Feed:
    """One loader's portions; `there` are those that were handed out."""

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.there: dict[int, Portion] = {OUTSIDE: Portion(0, OUTSIDE, 4, 0, 0)}
        self.resting, self.rested = False, 0
        self.portions = Portions(0, self.post, self.rest, lambda: self.resting)
        self.run(self.portions.welcome())

    def post(self, message: Any, later: bool = False) -> None:
        self.said.append(message)

    def rest(self, loader: int, index: int) -> None:
        if not self.resting:
            self.said.append("rests")
        self.resting = True

    def run(self, steps: Any) -> Any:
        found: Any = None
        try:
            while True:
                wait = steps.send(found)
                found = None
                if isinstance(wait, Rested):
                    self.resting, self.rested = False, self.rested + 1
                else:
                    assert isinstance(wait, PortionOf)
                    found = self.there.get(wait.number)
        except StopIteration as done:
            return done.value

    def next(self, *, block: bool = True, ahead: int = 2) -> Portion | None:
        found: Portion | None = self.run(self.portions.next(ahead, block=block))
        return found

    def hand_out(self, count: int, *, end: bool = False) -> None:
        for _ in range(count):
            number = len(self.there) - 1
            self.there[number] = Portion(0, number, 4, number, number + 1)
        if end:
            self.there[len(self.there) - 1] = Portion(0, len(self.there) - 1, 4, 0, 0, 1)


def test_portions_are_asked_for_ahead_and_taken_in_their_order() -> None:
    feed = Feed()
    assert feed.portions.epoch == 4
    feed.hand_out(3)
    assert [feed.next().number for _ in range(3)] == [0, 1, 2]  # type: ignore[union-attr]
    assert feed.said == [say.AskBatch(0, 4)] * 4 and feed.portions.at_hand()


def test_it_rests_only_while_it_must_wait() -> None:
    feed = Feed()
    assert feed.next(block=False) is None and not feed.resting and feed.portions.index == 0
    assert feed.next(block=True) is None and feed.said[-2:] == ["rests", say.Blocked(0, 0)]
    assert feed.resting and feed.rested == 0, "the run has ended: nothing is read"
    feed.hand_out(1)
    assert feed.next(block=False) == feed.there[0] and feed.rested == 1


def test_a_further_epoch_begins_with_a_rest_until_it_is_there() -> None:
    feed = Feed()
    feed.hand_out(1, end=True)
    feed.next(), feed.next()
    assert feed.portions.ended and feed.portions.asked == feed.portions.index == 2
    feed.portions.leave()
    assert feed.portions.epoch == 5 and not feed.portions.at_hand()
    feed.hand_out(1)
    feed.said.clear()
    assert feed.next() == feed.there[2] and feed.rested == 1
    assert feed.said == ["rests", *[say.AskBatch(0, 5)] * 2, say.Blocked(0, 2)]
