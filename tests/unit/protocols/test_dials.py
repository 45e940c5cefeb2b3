"""Every dial, and changes between them, on the sequence (M2, M3, M4, M8, M9): random crews with an account of their own.

`Crew` plays learners as `learn.optimizer` does: who knows of a free dial pushes without waiting and fetches now and
then, everybody else publishes after its last ticket was released. A learner knows the dial of its last reading. Every decision
is checked against clocks, quorums and staleness that the crew counts itself.
"""

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from syncline.dial import Sync
from syncline.protocols.folding import Ticket
from syncline.protocols.sequence import Account, Change, Decision, Drop, Fold, Full, Sequence, Take
from syncline.protocols.waiting import Release

LOCAL = "downpour:push=1,fetch=3,local_lr=0.1"
SLOTS = 2


@dataclass
class Learner:
    id: int
    rank: int
    sync: Sync
    initial: bool = True
    state: str = "new"  # then cold, busy, waits, rests, gone
    number: int = 0  # of its last ticket
    held: int = -1  # the version it has
    steps: int = 0
    clock: int = 0  # as slack counts
    fetching: int = -1  # the ticket of its fetch, if one is under way
    pushed: list[int] = field(default_factory=list)  # silent tickets whose slots are not free
    waits_for: int = -1  # the ticket
    meets: bool = False  # it rests in a meeting


class Crew:
    def __init__(
        self, text: str, size: int, *, joiners: int = 0, warm: int = 0, account: Account | None = None
    ) -> None:
        self.sync = Sync.parse(text)
        self.size, self.warm = size, warm
        self.learners = {90 - r: Learner(90 - r, r, self.sync, r < size) for r in range(size + joiners)}
        first = {90 - r: r for r in range(1 if warm else size)}
        self.sequence = Sequence(self.sync, initial=first, learners=size, warm=warm, account=account)
        self.expected = set(first)
        self.version = self.sequence.version
        self.before = (self.sequence.gradients, self.sequence.dropped)
        self.fates: dict[tuple[int, int], str] = {}
        self.taken: list[Ticket] = []
        self.sigmas: list[int] = []
        self.folds: list[Fold] = []
        self.finishing = False
        self.dials: list[Sync] = [self.sync]
        self.changing: Sync | None = None

    # -- events ------------------------------------------------------------------------------------------

    def join(self, learner: Learner) -> None:
        learner.state = "cold" if self.version < self.warm and self.members() else "waits"
        learner.waits_for = learner.number
        if learner.state == "waits":
            self._enter(learner)
        self.see(self.sequence.join(learner.id, learner.rank, learner.number))
        assert learner.state in ("cold", "busy")  # nobody waits for its first read, but in a warm start

    def _enter(self, learner: Learner) -> None:
        self.expected.discard(learner.id)
        learner.state = "waits"
        learner.clock = self.slowest(but=learner) or 0

    def publish(self, learner: Learner) -> None:
        silent = learner.sync.local
        self._ticket(learner, "busy" if silent else "waits")
        if silent:
            learner.pushed.append(learner.number)
        self.fates[learner.id, learner.number] = "published"
        ticket = Ticket(learner.id, learner.rank, learner.number, learner.held, learner.steps, 1)
        ticket.silent = silent
        learner.steps += 1
        self.see(self.sequence.gradient(ticket))

    def fetch(self, learner: Learner) -> None:
        self._ticket(learner, "busy")
        learner.fetching = learner.number
        self.see(self.sequence.fetch(learner.id, learner.number))

    def wait(self, learner: Learner) -> None:
        """It has come as far as it may without what it fetches."""
        learner.state, learner.waits_for = "waits", learner.fetching

    def rest(self, learner: Learner) -> None:
        self._ticket(learner, "rests")
        self.see(self.sequence.rest(learner.id, learner.number))

    def resume(self, learner: Learner) -> None:
        learner.state = "waits"
        self._rouse(learner)
        self.see(self.sequence.resume(learner.id))

    def meet(self, learner: Learner) -> None:
        self.rest(learner)
        learner.meets = True

    def met(self, _: Learner) -> None:
        """A meeting is over: all of it count again at once."""
        back = [learner for learner in self.learners.values() if learner.meets and learner.state == "rests"]
        for learner in sorted(back, key=lambda le: (le.clock, le.rank)):
            learner.state, learner.meets = "waits", False
            self._rouse(learner)
        self.see(self.sequence.met([learner.id for learner in back]))
        # what it pushed by itself before the dial turned to lockstep is its part of the round: it reads that
        rounds = {ticket.learner for ticket in self.taken} if self.sync.lockstep else set()
        slack = self.sync.slack is not None
        assert slack or all(learner.state == "busy" or learner.id in rounds for learner in back)

    def reread(self, learner: Learner) -> None:
        self._ticket(learner, "waits")
        self.see(self.sequence.reread(learner.id, learner.number))

    def leave(self, learner: Learner) -> None:
        cold = [le for le in self.learners.values() if le.state == "cold" and le is not learner]
        learner.state = "gone"
        self.expected.discard(learner.id)
        for key, fate in self.fates.items():
            if key[0] == learner.id and fate == "published":
                self.fates[key] = "lost"
        decisions = self.sequence.leave(learner.id)
        if not self.members() and cold:  # the next works alone
            self._enter(min(cold, key=lambda le: le.rank))
        self.see(decisions)

    def change(self, text: str) -> None:
        self.changing = Sync.parse(text)
        self.dials.append(self.changing)
        self.finishing = True
        self.see(self.sequence.change(self.changing, len(self.dials) - 1))
        assert self.changing is None

    def _ticket(self, learner: Learner, state: str) -> None:
        assert learner.state == "busy"
        learner.state = state
        learner.number += 1
        learner.waits_for = learner.number

    def _rouse(self, learner: Learner) -> None:
        learner.clock = max(learner.clock, self.slowest(but=learner) or 0)

    # -- what the crew knows -----------------------------------------------------------------------------

    @property
    def started(self) -> bool:
        return not self.expected

    def members(self) -> list[Learner]:
        return [le for le in self.learners.values() if le.state not in ("new", "gone", "cold")]

    def active(self) -> list[Learner]:
        return [le for le in self.members() if le.state != "rests"]

    def slowest(self, but: Learner | None = None) -> int | None:
        return min((le.clock for le in self.active() if le is not but), default=None)

    def quorum(self) -> int:
        """M3, of the present dial."""
        sync = self.sync
        if sync.backup:
            return max(1, min(self.size - sync.backup, len(self.active())))
        return max(1, len(self.members()) // sync.splits) if sync.splits else 1

    # -- decisions ---------------------------------------------------------------------------------------

    def see(self, decisions: Iterable[Decision]) -> None:
        decisions = list(decisions)
        self.finishing |= any(isinstance(decision, Change) for decision in decisions)
        for decision in decisions:
            if isinstance(decision, Take):
                self._see_take(decision.ticket)
            elif isinstance(decision, Drop):
                self._move(decision.ticket, "published", "dropped")
                assert self.sync.late == "drop" and decision.ticket.stamp < self.version
            elif isinstance(decision, Fold):
                self._see_fold(decision)
            elif isinstance(decision, Release):
                self._see_release(decision)
            else:
                self._see_change(decision)
        self._agree()

    def _move(self, ticket: Ticket, before: str, after: str) -> None:
        key = (ticket.learner, ticket.number)
        assert self.started and self.fates[key] == before
        self.fates[key] = after

    def _see_take(self, ticket: Ticket) -> None:
        self._move(ticket, "published", "taken")
        self.taken.append(ticket)
        learner = self.learners[ticket.learner]
        learner.clock += 1
        assert self.sync.late != "drop" or ticket.stamp == self.version
        damped = self.sync.splits is not None and self.sync.rate == "staleness"
        assert ticket.weight == (1 / max(1, self.version - ticket.stamp) if damped else 1.0)

    def _see_fold(self, fold: Fold) -> None:
        assert fold.tickets and fold.version == self.version + 1
        for ticket in fold.tickets:
            self._move(ticket, "taken", "folded")
            self.taken.remove(ticket)
        sigmas = [self.version - ticket.stamp for ticket in fold.tickets]
        assert min(sigmas) >= 0
        self.sigmas += sigmas
        if self.sync.lockstep:
            ranks = [ticket.rank for ticket in fold.tickets]
            assert ranks == sorted(set(ranks))
            there = {ticket.learner for ticket in fold.tickets}
            assert self.finishing or {le.id for le in self.active()} <= there
        else:
            quorum = self.quorum()
            assert len(fold.tickets) == quorum or (self.finishing and len(fold.tickets) < quorum)
        assert fold.factor == pytest.approx(self._factor(sigmas))
        self.folds.append(fold)
        self.version += 1
        if self.version == self.warm:
            for learner in sorted(self.learners.values(), key=lambda le: le.rank):
                if learner.state == "cold":
                    self._enter(learner)

    def _factor(self, sigmas: list[int]) -> float:
        """M4."""
        present = max(1, len(self.members()))
        if self.sync.rate == "share":
            return (max(1, present // self.sync.splits) if self.sync.splits else 1) / present
        if self.sync.rate == "staleness" and self.sync.splits is None:
            return 1 / max(1, sum(sigmas) / len(sigmas))
        return 1.0

    def _see_release(self, release: Release) -> None:
        learner = self.learners[release.learner]
        learner.pushed = [number for number in learner.pushed if number > release.number]
        if not release.read:
            assert release.number != learner.waits_for or learner.state == "busy"
            return
        assert learner.held <= release.version <= self.version
        if release.same:  # it rested where nobody waits for anybody: it goes on with what it has
            assert release.version == learner.held and not self.sync.waits
        else:
            assert self.sync.lockstep or release.version == self.version  # the newest (M2)
        if -1 < learner.fetching <= release.number:
            learner.fetching = -1
            assert learner.state in ("waits", "busy")
        else:
            assert learner.state == "waits" and release.number == learner.waits_for
            slack, slowest = self.sync.slack, self.slowest()
            assert slack is None or slowest is None or learner.clock <= slowest + slack
        learner.state, learner.held, learner.sync = "busy", release.version, self.sync

    def _see_change(self, change: Change | Full) -> None:
        assert change == Change(len(self.dials) - 1) and self.changing
        assert not self.taken
        self.sync, self.changing, self.finishing = self.changing, None, False
        for learner in self.members():
            learner.clock = 0

    def _agree(self) -> None:
        sequence, fates = self.sequence, Counter(self.fates.values())
        assert sequence.version == self.version
        assert sequence.pending == fates["published"] + fates["taken"]
        assert sequence.gradients - self.before[0] == fates["folded"] == len(self.sigmas)
        assert sequence.dropped - self.before[1] == fates["dropped"]
        if self.started and not self.finishing:
            assert self.sync.lockstep or len(self.taken) < self.quorum()
            self._no_standstill()

    def _no_standstill(self) -> None:
        """Somebody can compute, or nobody has data (and who waits for that says so)."""
        assert not self.active() or any(le.state == "busy" for le in self.active())

    # -- runs --------------------------------------------------------------------------------------------

    def possible(self, learner: Learner) -> list[str]:
        if learner.state == "new":
            return ["join"] * 4
        if learner.state == "rests":
            return ["met" if learner.meets else "resume"] * 2 + ["leave"]
        if learner.state != "busy":
            return ["leave"]
        names = ["leave"]
        if len(learner.pushed) < SLOTS:
            names += ["publish"] * 12
        if learner.sync.local:
            names += ["fetch"] * 5 if learner.fetching < 0 else ["wait"] * 5
        return [*names, "rest", "reread", "meet"]

    def play(self, script: Iterable[tuple[int, str | None]]) -> None:
        for choice, dial in script:
            if dial is not None:
                event(f"to {dial}")
                self.change(dial)
                continue
            found = [
                (name, le)
                for le in self.learners.values()
                for name in self.possible(le)
                if self._in_order(name, le)
            ]
            if found:
                name, learner = found[choice % len(found)]
                getattr(self, name)(learner)

    def _in_order(self, name: str, learner: Learner) -> bool:
        """A warm start's first comes first (the coordinator lets it initialise the table); joiners come alive."""
        if learner.state == "new" and (name == "leave" or self.warm):
            return name == "join" and not (self.expected - {learner.id})
        return True

    def drain(self) -> None:
        """Everybody works three steps more, then leaves: nobody may wait for ever."""
        last = max(le.steps for le in self.learners.values()) + 3
        while left := [le for le in self.learners.values() if le.state != "gone"]:
            before = [(le.state, le.number) for le in left]
            for learner in left:
                if learner.state == "new" and self._in_order("join", learner):
                    self.join(learner)
                elif learner.state == "rests":
                    self.met(learner) if learner.meets else self.resume(learner)
                elif learner.state == "busy":
                    if learner.steps >= last:
                        self.leave(learner)
                    elif learner.fetching >= 0 and (len(learner.pushed) >= SLOTS or learner.steps % 3 == 0):
                        self.wait(learner)
                    elif len(learner.pushed) < SLOTS:
                        self.publish(learner)
                        if learner.sync.local and learner.fetching < 0 and learner.state == "busy":
                            self.fetch(learner)
            assert before != [(le.state, le.number) for le in left], f"nobody can go on: {left}"

    def close(self) -> None:
        self.finishing = True
        self.see(self.sequence.finish())
        assert not self.taken and not self.sequence.waiting() and self.sequence.pending == 0
        assert set(self.fates.values()) <= {"folded", "dropped", "lost"}
        histogram = Counter(self.sigmas)
        histogram[0] += self.before[0]  # a run that goes on had them all fresh
        assert Counter(self.sequence.account().histogram) == histogram


@st.composite
def dials(draw: st.DrawFn, size: int) -> str:
    numbers = st.integers(1, size)
    kinds = [
        st.sampled_from(["hardsync", "async", "async:rate=staleness", "downpour"]),
        st.just(LOCAL),
        numbers.map(lambda n: f"softsync:{n}"),
        numbers.map(lambda n: f"softsync:{n},rate=staleness"),
        st.integers(1, 3).map(lambda k: f"delayed:{k}"),
        st.integers(0, 3).map(lambda s: f"ssp:{s}"),
    ]
    if size > 1:
        kinds.append(st.integers(1, size - 1).map(lambda b: f"backup:{b}"))
    return draw(st.one_of(kinds))


Script = list[tuple[int, str | None]]


@st.composite
def runs(draw: st.DrawFn, *, changes: bool = False, warm: bool = False) -> tuple[Crew, Script]:
    size = draw(st.integers(1, 5))
    version = draw(st.sampled_from([0, 0, 7]))
    account = (
        Account(version=version, gradients=9, dropped=2, histogram={0: 9}) if version and not warm else None
    )
    crew = Crew(
        draw(dials(size)),
        size,
        account=account,
        joiners=draw(st.integers(0, 2)),
        warm=draw(st.integers(1, 6)) if warm else 0,
    )
    chance = random.Random(draw(st.integers(0, 2**32)))
    moves: Script = [(chance.randrange(10**6), None) for _ in range(draw(st.integers(0, 150)))]
    if changes:
        for text in draw(st.lists(dials(size), min_size=1, max_size=4)):
            moves.insert(chance.randrange(len(moves) + 1), (0, text))
    return crew, moves


many = settings(max_examples=400, deadline=None)


@many
@given(runs())
def test_under_every_dial_each_gradient_is_folded_once_or_dropped_and_nobody_waits_for_ever(
    run: tuple[Crew, Script],
) -> None:
    crew, script = run
    crew.play(script)
    crew.drain()
    crew.close()


@settings(max_examples=800, deadline=None)
@given(runs(changes=True))
def test_any_dial_may_become_any_other_at_any_moment(run: tuple[Crew, Script]) -> None:
    """M8: at a version boundary; what was taken is folded before it."""
    crew, script = run
    crew.play(script)
    crew.drain()
    crew.close()


@many
@given(runs(changes=True, warm=True))
def test_a_warm_start_is_one_learner_alone_until_its_version(run: tuple[Crew, Script]) -> None:
    """M8, D4: λ = 1 until version n; who works alone may die."""
    crew, script = run
    crew.play(script)
    crew.drain()
    crew.close()
    alone = [ticket.learner for fold in crew.folds if fold.version <= crew.warm for ticket in fold.tickets]
    assert all(len(fold.tickets) == 1 for fold in crew.folds if fold.version <= crew.warm)
    order = [learner for learner, _ in Counter(alone).items()]
    assert alone == sorted(alone, key=order.index)  # one, and after its death the next


# -- by hand -----------------------------------------------------------------------------------------------


def crew_of(text: str, size: int, *, joiners: int = 0, warm: int = 0) -> tuple[Crew, list[Learner]]:
    crew = Crew(text, size, joiners=joiners, warm=warm)
    learners = list(crew.learners.values())
    for learner in learners[:size]:
        crew.join(learner)
    return crew, learners


def states(learners: Iterable[Learner]) -> str:
    return " ".join(learner.state for learner in learners)


@pytest.mark.parametrize("slack", [0, 1, 3])
def test_ssp_lets_nobody_run_further_ahead_than_its_slack(slack: int) -> None:
    crew, (first, second) = crew_of(f"ssp:{slack}", 2)
    for _ in range(slack):
        crew.publish(first)
        assert first.state == "busy"
    crew.publish(first)
    assert first.state == "waits" and crew.version == slack + 1  # its gradient is folded: only it waits
    assert crew.sequence.waiting().keys() == {first.id} and crew.sequence.missing() == [second.rank]
    crew.publish(second)
    assert first.state == "busy" and first.held == slack + 2  # the newest, not that of its own fold
    assert crew.sequence.missing() == []


def test_ssp_waits_neither_for_who_rests_nor_for_what_it_missed() -> None:
    crew, (first, second, third) = crew_of("ssp:1", 3)
    crew.rest(third)
    for _ in range(5):
        crew.publish(first), crew.publish(second)
    assert states((first, second)) == "busy busy" and third.clock == 0
    crew.resume(third)
    assert (third.state, third.held, third.clock) == ("busy", 10, 5)
    crew.publish(first)
    assert first.state == "busy"
    crew.publish(first)
    assert first.state == "waits" and crew.sequence.missing() == [1, 2]


def test_ssp_counts_a_joiner_from_the_slowest_and_forgets_who_leaves() -> None:
    crew, (first, second, third) = crew_of("ssp:2", 2, joiners=1)
    for _ in range(4):
        crew.publish(first), crew.publish(second)
    crew.publish(first), crew.publish(first)
    crew.join(third)
    assert third.clock == 4 and first.state == "busy"
    crew.publish(first)
    crew.publish(third)
    assert first.state == "waits"  # for the second
    crew.leave(second)
    assert first.state == "busy"


def test_ssp_does_not_wait_for_one_that_comes_back_far_behind() -> None:
    """Its clock is moved up, never back."""
    crew, (first, second) = crew_of("ssp:1", 2)
    crew.publish(first), crew.publish(first)
    assert first.state == "waits"
    crew.rest(second)
    assert first.state == "busy"
    crew.rest(first)
    crew.resume(second)
    assert second.clock == 0  # nobody else computes
    crew.publish(second)
    crew.resume(first)
    assert first.state == "busy" and first.clock == 2


def test_backup_folds_the_first_and_drops_the_last() -> None:
    crew, (first, second, third) = crew_of("backup:1", 3)
    crew.publish(third)
    assert third.state == "waits"
    crew.publish(first)
    assert states((first, second, third)) == "busy busy busy"  # the second still computes
    assert [ticket.rank for ticket in crew.folds[0].tickets] == [2, 0]  # as they came
    crew.publish(second)  # on version 0: too late
    assert crew.sequence.dropped == 1 and second.state == "busy" and second.held == 1
    crew.publish(second), crew.publish(third)
    assert len(crew.folds) == 2 and crew.sequence.gradients == 4


def test_backup_takes_what_is_left_of_the_learners() -> None:
    """M3: min(λ₀ − b, λ), λ₀ the learners that the run started with."""
    crew, (first, second, third, fourth) = crew_of("backup:1", 4)
    crew.publish(first), crew.publish(second)
    crew.leave(fourth)
    assert crew.version == 0  # three of four are needed, and three are left
    crew.leave(third)
    assert len(crew.folds[0].tickets) == 2 and states((first, second)) == "busy busy"
    crew.publish(first)
    crew.rest(second)
    assert crew.version == 2 and first.state == "busy"


def test_a_late_gradient_of_one_that_is_gone_changes_nothing() -> None:
    crew, (first, second, third) = crew_of("backup:1", 3)
    crew.publish(first), crew.publish(second)
    crew.leave(third)
    late = Ticket(third.id, third.rank, 1, 0, 0, 1)
    assert crew.sequence.gradient(late) == [] and crew.sequence.dropped == 0


def test_damping_divides_the_rate_by_the_staleness_where_each_gradient_is_an_update() -> None:
    """Zhang et al. 2016 (M4): lr / max(1, σ), and the gradient itself is as it was."""
    crew, (first, second) = crew_of("async:rate=staleness", 2)
    for _ in range(3):
        crew.publish(first)
    crew.publish(second)
    assert [fold.factor for fold in crew.folds] == [1.0, 1.0, 1.0, pytest.approx(1 / 3)]
    assert all(ticket.weight == 1.0 for fold in crew.folds for ticket in fold.tickets)


def test_damping_weighs_each_gradient_where_an_update_has_several() -> None:
    crew, (first, second) = crew_of("softsync:1,rate=staleness", 2)
    for _ in range(5):
        crew.publish(first)
    crew.publish(second)
    assert [[ticket.weight for ticket in fold.tickets] for fold in crew.folds] == [[1, 1], [1, 1], [1, 0.5]]
    assert all(fold.factor == 1.0 for fold in crew.folds)


def test_a_warm_start_lets_the_others_read_the_version_it_ends_with() -> None:
    crew, (first, second, third) = crew_of("hardsync", 3, warm=2)
    assert states((first, second, third)) == "busy cold cold"
    assert crew.sequence.waiting() == {second.id: 2, third.id: 2}
    crew.publish(first)
    crew.leave(first)  # then the next works alone
    assert states((second, third)) == "busy cold" and second.held == 1
    crew.publish(second)
    assert states((second, third)) == "busy busy" and third.held == 2
    crew.publish(third)
    assert crew.version == 2 and third.state == "waits"


def test_the_warm_start_of_backup_knows_how_many_learners_the_run_has() -> None:
    crew, (first, second, third) = crew_of("backup:1", 3, warm=1)
    crew.publish(first)
    crew.publish(first)
    assert crew.version == 1  # 3 − 1 are needed now
    crew.publish(second)
    assert crew.version == 2 and third.state == "busy"


def test_a_fetch_reads_the_newest_at_once_and_pushes_wait_for_nothing() -> None:
    """M9."""
    crew, (first, second) = crew_of(LOCAL, 2)
    for _ in range(4):
        crew.publish(second)
        assert second.pushed == []  # its slot is free again
    crew.publish(first)
    assert first.held == 0
    crew.fetch(first)
    assert (first.held, first.fetching, crew.version) == (5, -1, 5)


def test_a_fetch_under_a_new_lockstep_dial_reads_with_the_fold_of_all_that_was_pushed() -> None:
    crew, (first, second) = crew_of(LOCAL, 2)
    crew.change("hardsync")
    crew.publish(first)
    crew.fetch(first)
    crew.publish(first)  # it does not know yet
    assert first.fetching >= 0 and len(first.pushed) == 2
    crew.publish(second), crew.fetch(second)
    assert crew.version == 1 and first.fetching >= 0
    assert second.state == "busy" and second.fetching == -1 and second.sync.lockstep
    crew.publish(second)
    assert crew.version == 2
    assert (first.fetching, first.held, first.pushed) == (-1, 2, [])


def test_who_pushed_before_the_start_and_has_no_data_since_still_rests() -> None:
    crew = Crew(LOCAL, 2)
    first, second = crew.learners.values()
    crew.join(first)
    crew.publish(first)  # nothing is taken before all have started
    crew.rest(first)
    crew.join(second)
    assert crew.version == 1 and crew.sequence.waiting() == {first.id: -1}
    crew.change("hardsync")
    crew.publish(second), crew.fetch(second)
    assert crew.version == 2 and second.held == 2  # alone
    crew.resume(first)
    assert first.held == 2 and first.pushed == []


def test_a_change_folds_what_was_taken_and_lets_who_waits_for_it_go_on() -> None:
    crew, (first, second, third) = crew_of("delayed:1", 3)
    crew.publish(first), crew.publish(second)
    crew.change("async")
    assert len(crew.folds[0].tickets) == 2 and states((first, second, third)) == "busy busy busy"
    crew.publish(third)  # stamped before the change
    assert crew.sigmas == [0, 0, 1]
    crew.change("softsync:1")
    crew.publish(first)
    crew.change("softsync:3")
    assert crew.version == 3 and len(crew.folds[-1].tickets) == 1


def test_a_change_from_hardsync_comes_at_once_whoever_still_computes() -> None:
    crew, (first, second, third) = crew_of("hardsync", 3)
    crew.publish(first), crew.publish(second)
    crew.change("async")
    assert len(crew.folds[0].tickets) == 2 and states((first, second, third)) == "busy busy busy"
    assert not first.sync.lockstep
    crew.publish(third)  # of the round that was cut short
    assert crew.sigmas == [0, 0, 1] and not third.sync.lockstep


def test_a_meeting_leaves_slack_as_it_was() -> None:
    crew, (first, second) = crew_of("ssp:2", 2)
    crew.publish(first), crew.publish(first)
    crew.meet(first), crew.meet(second)
    crew.met(first)
    assert (first.clock, second.clock, first.state, second.state) == (2, 0, "busy", "busy")
    crew.publish(first)
    assert first.state == "waits"  # three steps ahead


def test_who_met_counts_again_before_anybody_publishes() -> None:
    crew, (first, second) = crew_of("hardsync", 2)
    crew.meet(first)
    crew.publish(second)
    assert crew.version == 1  # nobody waits for who is in a meeting
    crew.meet(second)
    crew.met(first)
    assert first.held == second.held == 1
    crew.publish(second)
    assert crew.version == 1 and second.state == "waits"
    crew.publish(first)
    assert crew.version == 2 and len(crew.folds[-1].tickets) == 2


def test_a_fetch_under_a_new_dial_with_slack_waits_for_the_slowest() -> None:
    crew, (first, second) = crew_of(LOCAL, 2)
    crew.change("ssp:0")
    crew.publish(first)
    crew.fetch(first)
    assert first.fetching >= 0
    crew.publish(second)
    assert first.fetching == -1 and first.sync.slack == 0


def test_a_change_to_ssp_counts_clocks_anew() -> None:
    crew, (first, _) = crew_of("async", 2)
    for _ in range(9):
        crew.publish(first)
    crew.change("ssp:1")
    crew.publish(first)
    assert first.state == "busy"
    crew.publish(first)
    assert first.state == "waits"


def test_events_of_strangers_change_nothing_under_any_dial() -> None:
    crew, _ = crew_of("ssp:0", 2)
    assert crew.sequence.fetch(7, 1) == crew.sequence.reread(7, 1) == crew.sequence.leave(7) == []
