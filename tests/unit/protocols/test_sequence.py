"""The sequence of a table (M2, M3, M4, M8): random teams under every dial that works.

`Team` is a model of learners that obey the contract: each publishes only after its last ticket was released.
It checks every decision against its own account, so that a random script of events is a whole test.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from syncline.dial import Sync
from syncline.protocols.folding import Ticket, leader
from syncline.protocols.sequence import Decision, Drop, Fold, Full, Sequence, Take
from syncline.protocols.waiting import Release

Key = tuple[int, int]  # learner, number


@dataclass
class Learner:
    id: int
    rank: int
    initial: bool
    state: str = "new"  # then busy, waits, rests, gone
    number: int = 0  # of its last ticket
    held: int = -1  # the version it has
    steps: int = 0


class Team:
    """Learners, the sequence that decides for them, and an account of their own."""

    def __init__(self, text: str, size: int, *, joiners: int = 0, limit: int | None = None) -> None:
        self.sync, self.limit = Sync.parse(text), limit
        everybody = range(size + joiners)
        self.learners = {100 - r: Learner(100 - r, r, r < size) for r in everybody}  # ids fall, ranks rise
        self.sequence = Sequence(self.sync, initial={100 - r: r for r in range(size)}, limit=limit)
        self.version = 0
        self.fates: dict[Key, str] = {}  # published, then taken or dropped or lost, then folded
        self.taken: dict[Key, Ticket] = {}
        self.sigmas: list[int] = []
        self.sizes: list[int] = []
        self.finished = self.full = False

    # -- events ------------------------------------------------------------------------------------------

    def join(self, learner: Learner) -> None:
        learner.state = "waits"
        self.see(self.sequence.join(learner.id, learner.rank, learner.number))
        assert learner.state == "busy"  # a joiner reads at once (M8)

    def publish(self, learner: Learner) -> list[Decision]:
        self._ask(learner, "waits")
        ticket = Ticket(learner.id, learner.rank, learner.number, learner.held, learner.steps, 1)
        learner.steps += 1
        self.fates[learner.id, learner.number] = "published"
        decisions = self.sequence.gradient(ticket)
        self.see(decisions)
        if self.started and not self.sync.lockstep:  # it waits for nobody (M2)
            assert decisions[-1] == Release(learner.id, ticket.number, self.version)
        return decisions

    def rest(self, learner: Learner) -> None:
        self._ask(learner, "rests")
        self.see(self.sequence.rest(learner.id, learner.number))

    def resume(self, learner: Learner) -> None:
        learner.state = "waits"
        self.see(self.sequence.resume(learner.id))

    def reread(self, learner: Learner) -> None:
        self._ask(learner, "waits")
        held = learner.held
        self.see(self.sequence.reread(learner.id, learner.number))
        assert learner.state == "busy" and learner.held == held  # as after its last step

    def leave(self, learner: Learner) -> None:
        learner.state = "gone"
        for key, fate in self.fates.items():
            if key[0] == learner.id and fate == "published":  # before all had started: nobody has seen it
                self.fates[key] = "lost"
        self.see(self.sequence.leave(learner.id))

    def finish(self) -> None:
        self.finished = True
        self.see(self.sequence.finish())

    def _ask(self, learner: Learner, state: str) -> None:
        assert learner.state == "busy"
        learner.state = state
        learner.number += 1

    # -- decisions ---------------------------------------------------------------------------------------

    @property
    def started(self) -> bool:
        return all(learner.state != "new" for learner in self.learners.values() if learner.initial)

    def live(self) -> list[Learner]:
        return [learner for learner in self.learners.values() if learner.state not in ("new", "gone")]

    def active(self) -> set[int]:
        return {learner.id for learner in self.live() if learner.state != "rests"}

    def see(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, Take):
                self._move(decision.ticket, "published", "taken")
                self.taken[decision.ticket.learner, decision.ticket.number] = decision.ticket
            elif isinstance(decision, Drop):
                self._move(decision.ticket, "published", "dropped")
                assert self.limit is not None and (self.full or self.sync.delay)
            elif isinstance(decision, Fold):
                self._see_fold(decision)
            elif isinstance(decision, Release):
                self._see_release(decision)
            else:
                assert decision == Full(self.version) and self.version == self.limit and not self.full
                self.full = True
        self._agree()

    def _move(self, ticket: Ticket, before: str, after: str) -> None:
        key = (ticket.learner, ticket.number)
        assert self.started and self.fates[key] == before
        self.fates[key] = after

    def _see_fold(self, fold: Fold) -> None:
        for ticket in fold.tickets:
            self._move(ticket, "taken", "folded")
            assert self.taken.pop((ticket.learner, ticket.number)) == ticket
        self.sigmas += [self.version - ticket.stamp for ticket in fold.tickets]
        self.sizes.append(len(fold.tickets))
        if self.sync.lockstep:
            self._see_round(fold)
        else:
            quorum = self.sync.quorum(max(1, len(self.live())))
            assert len(fold.tickets) == quorum or (self.finished and len(fold.tickets) < quorum)
        assert fold.leader == leader(list(fold.tickets))
        assert fold.factor == self.sync.factor(len(self.live()), None)
        self.version += 1
        assert fold.version == self.version and (self.limit is None or self.version <= self.limit)

    def _see_round(self, fold: Fold) -> None:
        """One gradient of one iteration from each, in rank order, with the staleness of the dial."""
        ranks = [ticket.rank for ticket in fold.tickets]
        assert ranks == sorted(set(ranks))
        assert {ticket.iteration for ticket in fold.tickets} == {self.version}
        assert self.finished or self.active() <= {ticket.learner for ticket in fold.tickets}
        assert all(self.version - t.stamp == min(self.version, self.sync.delay) for t in fold.tickets)

    def _see_release(self, release: Release) -> None:
        learner = self.learners[release.learner]
        assert learner.state == "waits" and release.number == learner.number
        assert learner.held <= release.version <= self.version
        assert self.sync.lockstep or release.version == self.version  # the newest (M2)
        learner.state, learner.held = "busy", release.version

    def _agree(self) -> None:
        sequence = self.sequence
        held = Counter(self.fates.values())
        assert sequence.version == self.version
        assert sequence.pending == held["published"] + held["taken"]
        assert (sequence.gradients, sequence.dropped) == (held["folded"], held["dropped"])
        early = {learner for (learner, _), fate in self.fates.items() if fate == "published"}
        assert sequence.waiting().keys() == {le.id for le in self.live() if le.state != "busy"} - early
        assert sequence.stepping() == {le.id for le in self.live() if le.state == "waits"}
        if not self.sync.lockstep:
            quorum = self.sync.quorum(max(1, len(self.live())))
            assert len(self.taken) < quorum  # no update is due
        else:
            there = {t.learner for t in self.taken.values() if t.iteration == self.version}
            assert sequence.missing() == sorted(self.learners[i].rank for i in self.active() - there)
            assert sequence.missing() or not there  # no update is due
            for learner in self.live():  # what it reads is among the versions that are kept
                kept = self.version - learner.held <= self.sync.delay
                assert kept or learner.state != "busy" or self.finished

    # -- runs --------------------------------------------------------------------------------------------

    def possible(self) -> list[tuple[str, Callable[[Learner], object], Learner]]:
        found: list[tuple[str, Callable[[Learner], object], Learner]] = []
        for learner in self.learners.values():
            if learner.state == "new":
                found += [("join", self.join, learner)] * 4
            elif learner.state == "busy":
                found += [("publish", self.publish, learner)] * 12
                found += [("rest", self.rest, learner), ("reread", self.reread, learner)] * self.sync.lockstep
            elif learner.state == "rests":
                found += [("resume", self.resume, learner)] * 2
            if learner.state != "gone" and (learner.initial or learner.state != "new"):
                found.append(("leave", self.leave, learner))
        return found

    def play(self, script: Iterable[int]) -> None:
        for choice in script:
            if possible := self.possible():
                name, act, learner = possible[choice % len(possible)]
                event(f"{name} {learner.state}")
                act(learner)

    def drain(self, steps: int) -> None:
        """Everybody works to its end: nobody may wait for ever."""
        while waiting := [le for le in self.learners.values() if le.state != "gone"]:
            before = [(le.state, le.number) for le in waiting]
            for learner in waiting:
                if learner.state == "new":
                    self.join(learner)
                elif learner.state == "rests":
                    self.resume(learner)
                elif learner.state == "busy":
                    (self.publish if learner.steps < steps else self.leave)(learner)
            assert before != [(le.state, le.number) for le in waiting], "nobody can go on"

    def close(self) -> None:
        self.finish()
        assert not self.taken
        account = self.sequence.clock.account()
        assert account.gradients == len(self.sigmas) == sum(self.sizes)
        assert account.histogram == dict(sorted(Counter(self.sigmas).items()))
        assert account.max == max(self.sigmas, default=0)
        assert account.mean == pytest.approx(sum(self.sigmas) / max(1, len(self.sigmas)))


@st.composite
def dials(draw: st.DrawFn, size: int) -> str:
    return draw(
        st.one_of(
            st.sampled_from(["hardsync", "async"]),
            st.integers(1, size).map(lambda n: f"softsync:{n}"),
            st.integers(1, 3).map(lambda k: f"delayed:{k}"),
        )
    )


@st.composite
def teams(draw: st.DrawFn, *, limited: bool = False) -> Team:
    size = draw(st.integers(1, 5))
    limit = draw(st.integers(1, 8)) if limited else None
    return Team(draw(dials(size)), size, joiners=draw(st.integers(0, 2)), limit=limit)


def _long(seed: int) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(10**6) for _ in range(drawn.randrange(150))]


scripts = st.lists(st.integers(0, 10**6), max_size=40) | st.integers(0, 2**32).map(_long)
many = settings(max_examples=300, deadline=None)


@many
@given(teams(), scripts)
def test_whatever_happens_every_gradient_is_folded_once_and_nobody_waits_for_ever(
    team: Team, script: list[int]
) -> None:
    team.play(script)
    team.drain(max(learner.steps for learner in team.learners.values()) + 2)
    team.close()
    assert not team.sequence.waiting() and team.sequence.pending == 0
    assert set(team.fates.values()) <= {"folded", "lost"}


@many
@given(teams(), scripts)
def test_a_run_may_end_at_any_moment_and_what_was_taken_is_folded(team: Team, script: list[int]) -> None:
    team.play(script)
    team.close()
    left = {fate for fate in team.fates.values() if fate != "folded"}
    assert left <= ({"lost"} if team.started else {"lost", "published"})


@many
@given(teams(limited=True), scripts)
def test_after_the_last_update_gradients_are_dropped_counted_and_released(
    team: Team, script: list[int]
) -> None:
    team.play(script)
    team.drain(12)
    team.close()
    assert team.full == (team.version == team.limit)
    assert set(team.fates.values()) <= {"folded", "dropped", "lost"}
    assert team.full or "dropped" not in team.fates.values() or team.sync.delay


@many
@given(st.data(), scripts)
def test_with_fixed_membership_staleness_and_reads_are_exact(data: st.DataObject, script: list[int]) -> None:
    """delayed:k has σ = min(t, k) and reads version max(0, t+1−k) after step t; hardsync is k = 0 (M2)."""
    size, delay = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 3))
    team = Team(f"delayed:{delay}" if delay else "hardsync", size)
    for learner in team.learners.values():
        team.join(learner)
    for choice in script:
        busy = [learner for learner in team.learners.values() if learner.state == "busy"]
        team.publish(busy[choice % len(busy)])
        for learner in team.learners.values():
            if learner.state == "busy":
                assert learner.held == max(0, learner.steps - delay)
    assert team.sigmas == [min(t, delay) for t in range(team.version) for _ in range(size)]
    assert set(team.sizes) <= {size}


@pytest.mark.parametrize("text", ["hardsync", "softsync:1", "softsync:3", "async", "delayed:2"])
def test_nothing_is_taken_before_all_initial_learners_have_started(text: str) -> None:
    team = Team(text, 3)
    first, second, third = team.learners.values()
    team.join(first), team.join(second)
    assert team.publish(first) == [] and team.publish(second) == []
    assert team.sequence.pending == 2 and team.version == 0
    if text == "softsync:3":
        team.leave(third)  # lost before it came
    else:
        team.join(third)
        team.drain(1)
    assert "published" not in team.fates.values() and team.version >= 1


def round_robin(text: str, size: int, rounds: int) -> Team:
    team = Team(text, size)
    for learner in team.learners.values():
        team.join(learner)
    for _ in range(rounds):
        for learner in team.learners.values():
            team.publish(learner)
    return team


@pytest.mark.parametrize("size", [4, 30])
@pytest.mark.parametrize("text", ["softsync:1", "softsync:2", "softsync:4", "async"])
def test_equal_machines_have_mean_staleness_of_lambda_minus_one_over_c(text: str, size: int) -> None:
    """(λ−1)/c, exactly, once everybody has read (R2); c rounds are a whole number of updates."""
    c = Sync.parse(text).quorum(size)
    team = round_robin(text, size, 3 * c)
    steady = team.sigmas[c * size :]
    assert Fraction(sum(steady), len(steady)) == Fraction(size - 1, c)
    assert max(team.sigmas) <= 2 * size // c
    assert set(team.sizes) == {c}


@given(st.integers(1, 12), st.data())
def test_that_mean_holds_for_every_team_and_split(size: int, data: st.DataObject) -> None:
    splits = data.draw(st.integers(1, size))
    c = size // splits
    team = round_robin(f"softsync:{splits}", size, 3 * c)
    steady = team.sigmas[c * size :]
    assert Fraction(sum(steady), len(steady)) == Fraction(size - 1, c)


def test_a_leaving_learner_completes_the_quorum_it_was_missing_in() -> None:
    team = Team("hardsync", 3)
    first, second, third = team.learners.values()
    for learner in (first, second, third):
        team.join(learner)
    team.publish(third), team.publish(first)
    assert team.sequence.missing() == [1] and team.sequence.waiting() == {100: 1, 98: 1}
    team.leave(first)  # its gradient was taken: it counts
    team.leave(second)
    assert team.sizes == [2] and third.held == 1


def test_events_of_strangers_change_nothing() -> None:
    team = Team("hardsync", 1)
    team.join(team.learners[100])
    sequence = team.sequence
    assert sequence.gradient(Ticket(7, 0, 1, 0, 0, 1)) == []
    assert sequence.rest(7, 1) == sequence.reread(7, 1) == sequence.resume(7) == sequence.leave(7) == []
    assert sequence.resume(100) == []  # does not rest
    team._agree()


def test_steps_go_on_this_once_without_those_that_wait_elsewhere() -> None:
    sequence = Sequence(Sync.parse("hardsync"), initial={0: 0, 1: 1, 2: 2})
    for learner in range(3):
        sequence.join(learner, learner, 0)
    one, two = (Ticket(learner, learner, 1, 0, 0, 4) for learner in (1, 2))
    assert [type(each) for each in (*sequence.gradient(one), *sequence.gradient(two))] == [Take, Take]
    assert sequence.stepping() == {1, 2} and sequence.at_gate == 2
    fold, *released = sequence.go_on_without()
    assert isinstance(fold, Fold) and [ticket.learner for ticket in fold.tickets] == [1, 2]
    assert released == [Release(1, 1, 1), Release(2, 1, 1)] and sequence.stepping() == set()
    sequence.gradient(Ticket(1, 1, 2, 1, 1, 4))
    sequence.gradient(Ticket(2, 2, 2, 1, 1, 4))
    assert sequence.version == 1  # it is waited for again
    sequence.gradient(Ticket(0, 0, 1, 0, 0, 4))
    assert sequence.version == 2 and sequence.clock.histogram == {0: 4, 1: 1}


def test_slack_is_given_this_once_without_those_that_wait_elsewhere() -> None:
    sequence = Sequence(Sync.parse("ssp:0"), initial={0: 0, 1: 1})
    for learner in range(2):
        sequence.join(learner, learner, 0)
    sequence.gradient(Ticket(1, 1, 1, 0, 0, 4))
    assert sequence.stepping() == {1}
    assert sequence.go_on_without() == [Release(1, 1, 1)]
    sequence.gradient(Ticket(1, 1, 2, 1, 1, 4))
    assert sequence.stepping() == {1}  # the other counts from where it was left
    sequence.gradient(Ticket(0, 0, 1, 0, 0, 4))
    assert sequence.stepping() == set()


def test_who_fetches_computes_meanwhile() -> None:
    """The dial has changed: it waits for others' gradients, but is not blocked."""
    sequence = Sequence(Sync.parse("hardsync"), initial={0: 0, 1: 1})
    for learner in range(2):
        sequence.join(learner, learner, 0)
    sequence.gradient(Ticket(0, 0, 1, 0, 0, 4, silent=True))
    assert sequence.fetch(0, 2) == [] and sequence.stepping() == set()
