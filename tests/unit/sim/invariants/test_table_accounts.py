"""The account of a table: what a sequence of the protocols decides passes, whatever happens to it, and every breach is named."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.dial import as_sync
from syncline.messages import MakeTable
from syncline.protocols.folding import Ticket
from syncline.protocols.sequence import Change, Drop, Fold, Sequence, Take
from syncline.protocols.waiting import Release
from syncline.sim.invariants.dial_rules import DialRules
from syncline.sim.invariants.loader_accounts import Broken
from syncline.sim.invariants.table_accounts import Gradient, TableAccount


def make(sync: str, learners: int = 3, **options: Any) -> TableAccount:
    given_: dict[str, Any] = {"warm": 0, "batch_size": 4, "limit": None, "clip_norm": None} | options
    nothing: Any = None
    made = MakeTable(
        table=0,
        layout=nothing,
        template=nothing,
        dial=0,
        initial=dict.fromkeys(range(learners), 0),
        learners=learners,
        **given_,
    )
    return TableAccount(made, as_sync(sync))


# -- beside the protocol -------------------------------------------------------------------------------------

DIALS = [
    "hardsync",
    "delayed:1",
    "softsync:1",
    "softsync:2,rate=staleness",
    "async",
    "ssp:1",
    "backup:1",
    "async:rate=staleness",
]


class Run:
    """A sequence and an account that is told what it decides; learners publish as soon as they are let go."""

    def __init__(self, sync: str, limit: int | None) -> None:
        self.account = make(sync, limit=limit)
        self.sequence = Sequence(as_sync(sync), initial={0: 0, 1: 1, 2: 2}, batch_size=4, limit=limit)
        self.at: dict[int, int] = {}  # learner that computes -> the version it read
        self.numbers = dict.fromkeys(range(9), 0)
        self.follow(*(self.sequence.join(learner, learner, 0) for learner in range(3)))

    def follow(self, *decided: Iterable[Any]) -> None:
        account = self.account
        for decision in (each for decisions in decided for each in decisions):
            if isinstance(decision, Take):
                account.taken(decision.ticket)
            elif isinstance(decision, Drop):
                account.drop(decision)
            elif isinstance(decision, Fold):
                account.fold(decision)
            elif isinstance(decision, Change):
                account.change(self.sequence.sync)
            elif isinstance(decision, Release):
                account.release(decision)
                self.at[decision.learner] = decision.version
        account.due()

    def publish(self, learner: int) -> None:
        number = self.numbers[learner] = self.numbers[learner] + 1
        ticket = Ticket(learner, learner, number, self.at.pop(learner), number, 4)
        self.account.published(learner, number, Gradient(ticket.stamp, ticket.step))
        self.account.bounded(2, promised=False)
        self.follow(self.sequence.gradient(ticket))


@given(
    sync=st.sampled_from(DIALS),
    limit=st.sampled_from([None, 4]),
    turns=st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from(["", "", "", "", "leave", "join", "change"])),
        max_size=40,
    ),
)
@settings(max_examples=60)
def test_what_the_protocol_decides_is_never_broken(
    sync: str, limit: int | None, turns: list[tuple[int, str]]
) -> None:
    run, newest = Run(sync, limit), 3
    for which, what in turns:
        if what == "leave" and len(run.at) > 1:
            learner = sorted(run.at)[which % len(run.at)]
            del run.at[learner]
            run.account.left(learner)
            run.follow(run.sequence.leave(learner))
        elif what == "join" and newest < 9:
            run.account.joins(newest)
            run.follow(run.sequence.join(newest, newest, 0))
            newest += 1
        elif what == "change" and sync != "delayed:1":
            dial = as_sync(DIALS[which % 5 if which % 5 != 1 else 0])
            decisions = run.sequence.change(dial, 1)
            run.account.finishing = True  # what was taken is folded, be it too few
            run.follow(decisions)
            run.account.finishing = False
        elif run.at:
            run.publish(sorted(run.at)[which % len(run.at)])
    run.account.finishing = True
    run.follow(run.sequence.finish())
    run.account.over()
    sequence, account = run.sequence, run.account
    assert (account.version, account.folded, account.dropped) == (
        sequence.version,
        sequence.gradients,
        sequence.dropped,
    )


@given(
    sync=st.sampled_from([*DIALS, "softsync:3", "backup:2", "delayed:7", "hardsync:reference_batch=32"]),
    live=st.integers(1, 9),
    gone=st.integers(0, 4),
)
def test_the_rules_of_a_dial_are_those_that_it_follows(sync: str, live: int, gone: int) -> None:
    dial, initial = as_sync(sync), live + gone
    rules = DialRules(dial)
    assert (rules.quorum(live, initial), rules.factor(live, 4)) == (
        dial.quorum(live, initial),
        pytest.approx(dial.factor(live, 4)),
    )
    names = ("lockstep", "delay", "waits", "local", "weighs", "lead", "slack", "late", "rate")
    assert all(getattr(rules, name) == getattr(dial, name) for name in names) and str(rules) == str(dial)


# -- what cannot be ------------------------------------------------------------------------------------------


def ticket(learner: int, number: int = 1, stamp: int = 0, **more: Any) -> Ticket:
    return Ticket(learner, learner, number, stamp, number, 4, **more)


def begun(sync: str, *taken: int, **options: Any) -> TableAccount:
    """Three learners have read version 0 and published; these gradients are taken."""
    account = make(sync, **options)
    for learner in range(3):
        account.release(Release(learner, 0, 0))
        account.published(learner, 1, Gradient(0, 1))
    for learner in taken:
        account.taken(ticket(learner))
    return account


def fold(*learners: int, version: int = 1, factor: float = 1.0) -> Fold:
    tickets = tuple(ticket(learner) for learner in learners)
    return Fold(version, tickets, tickets[0], factor)


ALL = (0, 1, 2)


@pytest.mark.parametrize(("account", "does", "words"), [
    (lambda: begun("hardsync"), lambda it: it.published(0, 1, Gradient(0, 1)), "publishes ticket 1 twice"),
    (lambda: begun("hardsync", 0), lambda it: it.taken(ticket(0)), "is taken as"),
    (lambda: begun("hardsync"), lambda it: it.taken(ticket(0, 2)), "or never published"),
    (lambda: begun("hardsync"), lambda it: it.taken(ticket(0, stamp=1)), "is taken as"),
    (lambda: begun("hardsync"), lambda it: (it.members.pop(0), it.taken(ticket(0))), "has left or never joined"),
    (lambda: begun("async"), lambda it: it.drop(Drop(ticket(0))), "it is not late"),
    (lambda: begun("hardsync", *ALL), lambda it: it.fold(fold(*ALL, version=2)), "version 2 follows version 0"),
    (lambda: begun("hardsync", *ALL), lambda it: it.fold(fold(0, 1, 1)), "is made of tickets"),
    (lambda: begun("hardsync", *ALL, limit=0), lambda it: it.fold(fold(*ALL)), "the run was to end with 0"),
    (lambda: begun("hardsync", 0, 1), lambda it: (it.fold(fold(0, 1)), it.due()), r"without learners \[2\], which compute"),
    (lambda: begun("softsync:1", 0, 1), lambda it: (it.fold(fold(0, 1)), it.due()), "made of 2 gradients, the quorum is 3"),
    (lambda: begun("async", 0), lambda it: it.fold(fold(0, factor=0.5)), "at 0.5 of the rate, async"),
    (lambda: begun("hardsync", *ALL), lambda it: it.due(), "all have published for version 1, and it is not made"),
    (lambda: begun("softsync:1", *ALL), lambda it: it.due(), "3 gradients wait, the quorum of version 1 is 3"),
    (lambda: begun("hardsync", 0), lambda it: it.change(as_sync("async")), "while 1 gradients wait for their fold"),
    (lambda: begun("hardsync"), lambda it: it.release(Release(0, 1, 1)), "may read version 1 of 0"),
    (lambda: begun("async"), lambda it: it.release(Release(0, 1, 0)), "before its ticket 1 is taken"),
    (lambda: begun("hardsync", 0), lambda it: it.release(Release(0, 1, 0)), "reads version 0 after its iteration 0, hardsync says 1"),
    (lambda: begun("backup:1", 0), lambda it: it.release(Release(0, 1, 0)), "before the fold of its gradient"),
    (lambda: begun("async", 0), lambda it: it.release(Release(0, 1, 0)), "which completed a quorum"),
    (lambda: begun("hardsync", 0), lambda it: it.over(), "1 gradients were taken and never folded"),
    (lambda: begun("hardsync"), lambda it: it.over(), "were neither taken nor dropped"),
    (lambda: begun("hardsync", 0), lambda it: (it.published(0, 2, Gradient(0, 2)), it.bounded(1, promised=False)), "2 gradients under way, and 1 slots"),
    (lambda: make("hardsync"), lambda it: (it.release(Release(0, 0, 0)), it.published(0, 1, Gradient(0, 1)), it.taken(ticket(0)), it.fold(fold(0))), "have started"),
    (lambda: make("hardsync", warm=5), lambda it: (it.release(Release(0, 0, 0)), it.release(Release(1, 0, 0))), "the warm start goes to 5"),
])  # fmt: skip
def test_what_cannot_be_is_said(
    account: Callable[[], TableAccount], does: Callable[[TableAccount], Any], words: str
) -> None:
    found = account()
    with pytest.raises(Broken, match=words):
        does(found)


def folded(sync: str) -> TableAccount:
    """Version 1 is made of all three, and learner 0 has read it."""
    account = begun(sync, *ALL)
    account.fold(fold(*ALL))
    account.release(Release(0, 1, 1))
    return account


@pytest.mark.parametrize(("sync", "does", "words"), [
    ("softsync:1", lambda it: it.release(Release(0, 2, 0)), "reads version 0 after 1"),
    ("softsync:1", lambda it: it.release(Release(1, 1, 1, same=True)), "is said to have version 1, it has 0"),
    ("backup:1", lambda it: it.taken(ticket(1, 2)), "it is late"),
    ("softsync:1", lambda it: it.drop(Drop(ticket(1, 2))), "it is not late"),
    ("softsync:1", lambda it: (it.taken(ticket(1, 2)), it.fold(Fold(2, (ticket(1, 2, 2),), ticket(1, 2, 2), 1.0))), "is folded as"),
    ("hardsync", lambda it: (it.taken(ticket(1, 2, iteration=1)), it.fold(Fold(2, (ticket(1, 2),), ticket(1, 2), 1.0))), r"σ = 1 in version 2 under hardsync: it is min\(1, 0\)"),
])  # fmt: skip
def test_what_cannot_be_after_an_update_is_said(
    sync: str, does: Callable[[TableAccount], Any], words: str
) -> None:
    account = make(sync)
    if sync == "backup:1":
        account = begun(sync, 0, 1)
        account.fold(fold(0, 1))
    else:
        account = folded(sync)
    account.published(1, 2, Gradient(0, 2))
    with pytest.raises(Broken, match=words):
        does(account)


def test_nobody_runs_further_ahead_of_the_slowest_than_its_slack() -> None:
    account = make("ssp:1")
    for learner in range(3):
        account.release(Release(learner, 0, 0))
    for number in (1, 2):
        account.published(0, number, Gradient(number - 1, number))
        account.taken(ticket(0, number, number - 1))
        account.fold(Fold(number, (ticket(0, number, number - 1),), ticket(0, number), 1.0))
        if number == 1:
            account.release(Release(0, 1, 1))
    with pytest.raises(Broken, match=r"starts step 2 under ssp:1.*the slowest has made 0"):
        account.release(Release(0, 2, 2))
    account.rests(1, 0), account.rests(2, 0)
    account.release(Release(0, 2, 2))  # nobody else computes


def test_who_leaves_takes_along_what_was_not_taken() -> None:
    account = begun("softsync:1", 0)
    account.published(0, 2, Gradient(0, 2))
    assert account.left(0) == [Gradient(0, 2)] and account.pending == [(0, 1)]
    assert account.active() == {1, 2} and account.quorum() == 2
    account.rests(1, 1)
    assert "members 1: version 0, clock 0 (rests), 2: version 0" in account.words()


def test_who_rests_is_there_again_with_its_next_gradient() -> None:
    account = begun("softsync:1", 0)
    account.rests(0, 2)
    account.published(0, 2, Gradient(0, 2)), account.published(0, 3, Gradient(0, 3))
    account.taken(ticket(0, 2))
    assert account.active() == {1, 2}, "that one was published before its rest"
    account.taken(ticket(0, 3))
    assert account.active() == {0, 1, 2}
