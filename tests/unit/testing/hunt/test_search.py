"""Test that the fault hunt finds nothing in the protocols, and every bug that is planted in them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from syncline.dial import Sync
from syncline.messages.log import Change, Entry
from syncline.protocols import sequence
from syncline.protocols.epoch_positions import EpochPositions
from syncline.protocols.folding import Folding, Ticket
from syncline.protocols.ledger import Ledger
from syncline.protocols.meetings import Meetings
from syncline.protocols.membership import Members
from syncline.protocols.sequence import Sequence
from syncline.protocols.staleness import StalenessClock
from syncline.protocols.waiting import Gate, Release
from syncline.roles.counters import Counters
from syncline.roles.server import LogApplier
from syncline.sim.owned_memory import Traffic
from syncline.table.accumulator import Mean
from syncline.table.shard import Shard
from syncline.testing.hunt import DIALS, Case, hunt, play, random_case, shorten
from syncline.testing.hunt.case_player import SHARED, sweep
from tests.integration.small_runs import alive
from tests.ready_python import ReadyPython

Patch = pytest.MonkeyPatch


def test_nothing_is_broken() -> None:
    assert hunt(range(3), DIALS) is None


# -- planted bugs ------------------------------------------------------------------------------------------


def keep_what_the_lost_had(patch: Patch) -> None:
    """A lost learner's batches are not handed out again."""
    patch.setattr(EpochPositions, "give_back", lambda self, spans: None)


def fold_again(patch: Patch) -> None:
    """A gradient of the last update is in the next one too."""
    rest, last = Folding.rest, dict[int, Ticket]()

    def again(self: Folding, version: int) -> list[Ticket]:
        tickets = rest(self, version)
        if tickets and not self._lockstep:
            before = last.get(id(self))
            last[id(self)] = tickets[0]
            return [*tickets, before] if before is not None else tickets
        return tickets

    patch.setattr(Folding, "rest", again)


def one_more_step_ahead(patch: Patch) -> None:
    """ssp lets learners run s + 1 ahead."""
    opened = Gate.open

    def open_(self: Gate, version: int) -> list[Release]:
        slowest = self._members.slowest
        self._members.slowest = None if slowest is None else slowest + 1
        try:
            return opened(self, version)
        finally:
            self._members.slowest = slowest

    patch.setattr(Gate, "open", open_)


def go_on_before_the_fold(patch: Patch) -> None:
    """Lockstep learners read the version that their gradient is not in."""
    arrive = Gate.arrive

    def early(
        self: Gate, learner: int, number: int, iteration: int, version: int, silent: bool = False
    ) -> None:
        arrive(self, learner, number, iteration - 1 if self._lockstep else iteration, version, silent)

    patch.setattr(Gate, "arrive", early)


def drop_without_counting(patch: Patch) -> None:
    gradient = Sequence.gradient

    def uncounted(self: Sequence, *tickets: Ticket) -> list[Any]:
        dropped = self.dropped
        decisions = gradient(self, *tickets)
        self.dropped = dropped
        return decisions

    patch.setattr(Sequence, "gradient", uncounted)


def quorum_of_the_first_learners(patch: Patch) -> None:
    """Quorums do not follow those that leave."""
    quorum = Sync.quorum
    patch.setattr(Sync, "quorum", lambda self, live, initial=None: quorum(self, initial or live, initial))


def quorums_off_by(difference: int) -> Callable[[Patch], None]:
    """Return a plant that folds this many gradients too many, within what learners can give."""

    def plant(patch: Patch) -> None:
        quorum = Sync.quorum

        def wrong(self: Sync, live: int, initial: int | None = None) -> int:
            return min(live, max(1, quorum(self, live, initial) + difference))

        patch.setattr(Sync, "quorum", wrong)

    plant.__name__ = f"quorums_off_by_{difference}"
    return plant


def held_back_a_step(patch: Patch) -> None:
    """Let learners run s − 1 ahead only under ssp."""
    opened = Gate.open

    def open_(self: Gate, version: int) -> list[Release]:
        slack = self._slack
        self._slack = None if slack is None else max(0, slack - 1)
        try:
            return opened(self, version)
        finally:
            self._slack = slack

    patch.setattr(Gate, "open", open_)


def dropped_counts_as_folded(patch: Patch) -> None:
    enter = Sequence._enter

    def counts(self: Sequence, ticket: Ticket) -> Any:
        dropped = self.dropped
        decision = enter(self, ticket)
        self.gradients += self.dropped - dropped
        self.dropped = dropped
        return decision

    patch.setattr(Sequence, "_enter", counts)


def staleness_of_the_oldest(patch: Patch) -> None:
    """Count all gradients of an update with the staleness of its oldest."""
    fold = StalenessClock.fold

    def oldest(self: StalenessClock, version_before: int, stamps: Any) -> float:
        found = list(stamps)
        return fold(self, version_before, [min(found)] * len(found))

    patch.setattr(StalenessClock, "fold", oldest)


def options_of_the_lowest_rank(patch: Patch) -> None:
    """Take an update's options from the lowest rank, not from the learner furthest along."""
    patch.setattr(sequence, "leader", lambda tickets: min(tickets, key=lambda ticket: ticket.rank))


def gradients_in_flight_are_forgotten(patch: Patch) -> None:
    """Keep the options of the last 64 gradients of a learner only."""
    take = LogApplier._take

    def forgets(self: LogApplier, entry: Any) -> None:
        take(self, entry)
        for taken in self._taken.values():
            taken.pop((entry.learner, entry.number - 64), None)

    patch.setattr(LogApplier, "_take", forgets)


def remember_the_dead(patch: Patch) -> None:
    """Lockstep waits for learners that are gone."""
    leave = Members.leave

    def stays(self: Members, learner: int) -> Any:
        member = leave(self, learner)
        if member is not None and self.live:
            self.live[learner] = member
        return member

    patch.setattr(Members, "leave", stays)


def done_when_taken(patch: Patch) -> None:
    """Batches count as done before their gradient is folded."""
    patch.setattr(Ledger, "taken", Ledger.settled)


def a_shard_that_skips(patch: Patch) -> None:
    """The second shard does not learn of changes of the dial."""
    do = LogApplier.replay

    def skips(self: LogApplier, entry: Entry) -> None:
        if not (isinstance(entry, Change) and self._port.shard == 1):
            do(self, entry)

    patch.setattr(LogApplier, "replay", skips)


def drafts_are_never_waited_for(patch: Patch) -> None:
    patch.setattr(Traffic, "_free", lambda self, number: True)


def versions_kept_in_the_wrong_place(patch: Patch) -> None:
    apply = Shard.apply

    def misplaced(self: Shard, options: Any, factor: float) -> None:
        self._store.version += 1
        apply(self, options, factor)
        self._store.version -= 1

    patch.setattr(Shard, "apply", misplaced)


def a_mean_without_weights(patch: Patch) -> None:
    """A short last batch counts like a whole one."""
    add = Mean.add

    def unweighted(self: Mean, gradient: Any, present: Any, count: int, damping: float = 1.0) -> None:
        add(self, gradient, present, count + 1, damping)

    patch.setattr(Mean, "add", unweighted)


def warm_start_one_short(patch: Patch) -> None:
    made = Sequence.__init__

    def short(self: Sequence, sync: Any, **options: Any) -> None:
        made(self, sync, **{**options, "warm": max(0, options.get("warm", 0) - 1)})

    patch.setattr(Sequence, "__init__", short)


def meetings_wait_for_the_dead(patch: Patch) -> None:
    patch.setattr(Meetings, "leave", lambda self, learner: [])


def who_meets_is_waited_for(patch: Patch) -> None:
    """Quorums wait for the gradients of learners in a meeting."""
    rest = Sequence.rest

    def computes(self: Sequence, learner: int, number: int) -> list[Any]:
        decisions = rest(self, learner, number)
        if learner in self.members.live:
            self.members.rouse(self.members.live[learner])
        return decisions

    patch.setattr(Sequence, "rest", computes)


def who_met_is_not_there_again(patch: Patch) -> None:
    """Rounds are folded without those that come out of a meeting."""

    def still_rests(self: Sequence, learners: Any) -> list[Any]:
        live = [learner for learner in learners if learner in self.members.live]
        for learner in live:
            self._gate.resume(learner, max(self.members.live[learner].next_iteration, self.version))
        return list(self._gate.open(self.version))

    patch.setattr(Sequence, "met", still_rests)


def what_a_loop_left_is_lost(patch: Patch) -> None:
    """Batches that were read ahead of a `break` belong to nobody."""
    close = Ledger.close

    def loses(self: Ledger, learner: int, upto: int) -> Any:
        if learner in self._learners:
            member = self._learners[learner]
            while member.open and member.open[-1][0] >= upto:
                member.open.pop()
        return close(self, learner, upto)

    patch.setattr(Ledger, "close", loses)


def late_gradients_are_folded(patch: Patch) -> None:
    """backup takes what should be dropped."""
    gradient = Sequence.gradient

    def takes(self: Sequence, *tickets: Ticket) -> list[Any]:
        if self.sync.late == "drop" and tickets[0].stamp == self.version - 1:
            self.version -= 1
            try:
                decisions = gradient(self, *tickets)
            finally:
                self.version += 1
            return decisions
        return gradient(self, *tickets)

    patch.setattr(Sequence, "gradient", takes)


def epochs_wait_for_earlier_ones(patch: Patch) -> None:
    """An epoch of which all is settled is not done while an earlier one is open."""
    finish = EpochPositions.finish

    def in_order(self: EpochPositions) -> Any:
        later = {epoch: state for epoch, state in self._unfinished.items() if epoch > self.done}
        for epoch in later:
            del self._unfinished[epoch]
        newest, self.newest = self.newest, self.done
        found = finish(self)
        self.newest = newest
        self._unfinished.update(later)
        self.over = bool(found)
        return found

    patch.setattr(EpochPositions, "finish", in_order)


def dropped_examples_take_others_along(patch: Patch) -> None:
    """With each late gradient that is dropped, examples of another are not counted."""
    folded = Counters.folded

    def fewer(self: Counters, table: int, rank: int, examples: int, *rest: Any) -> None:
        folded(self, table, rank, examples - (self.examples[table] % 5 == 4), *rest)

    patch.setattr(Counters, "folded", fewer)


def batches_grow_on_their_way(patch: Patch) -> None:
    """A gradient counts more examples than its batches hold."""
    gradient = Sequence.gradient

    def more(self: Sequence, *tickets: Ticket) -> Any:
        for ticket in tickets:
            ticket.count += ticket.count == 3
        return gradient(self, *tickets)

    patch.setattr(Sequence, "gradient", more)


PLANTED: list[tuple[Callable[[Patch], None], tuple[str, ...]]] = [
    (keep_what_the_lost_had, ("hardsync", "async")),
    (fold_again, ("softsync:1", "softsync:2")),
    (one_more_step_ahead, ("ssp:0", "ssp:2")),
    (go_on_before_the_fold, ("hardsync",)),
    (drop_without_counting, ("backup:1",)),
    (quorum_of_the_first_learners, ("softsync:1",)),
    (quorums_off_by(1), ("softsync:2", "backup:1")),
    (quorums_off_by(-1), ("softsync:1", "backup:1")),
    (held_back_a_step, ("ssp:2",)),
    (dropped_counts_as_folded, ("backup:1",)),
    (staleness_of_the_oldest, ("softsync:1",)),
    (options_of_the_lowest_rank, ("softsync:1",)),
    (gradients_in_flight_are_forgotten, ("delayed:1", "delayed:3")),
    (remember_the_dead, ("hardsync",)),
    (done_when_taken, ("softsync:1", "delayed:3")),
    (a_shard_that_skips, ("hardsync until 1 then softsync:1",)),
    (drafts_are_never_waited_for, ("downpour:push=1,fetch=6,local_lr=0.1",)),
    (versions_kept_in_the_wrong_place, ("delayed:1", "delayed:3")),
    (a_mean_without_weights, ("hardsync", "softsync:1")),
    (warm_start_one_short, ("async", "hardsync")),
    (meetings_wait_for_the_dead, ("hardsync",)),
    (who_meets_is_waited_for, ("hardsync",)),
    (who_met_is_not_there_again, ("hardsync", "delayed:1")),
    (what_a_loop_left_is_lost, ("async",)),
    (late_gradients_are_folded, ("backup:1",)),
    (epochs_wait_for_earlier_ones, ("async",)),
    (dropped_examples_take_others_along, ("backup:1",)),
    (batches_grow_on_their_way, ("async",)),
]


@pytest.mark.sweep(5)
@pytest.mark.parametrize(("plant", "dials"), PLANTED, ids=[plant.__name__ for plant, _ in PLANTED])
def test_a_planted_bug_is_found_and_shortened(
    plant: Callable[[Patch], None], dials: tuple[str, ...], monkeypatch: Patch
) -> None:
    plant(monkeypatch)
    found = hunt(range(60), dials)
    assert found is not None, "60 seeds did not show it"
    again = play(found.case)
    assert again is not None and again.kind == found.failure.kind  # the shortened case shows the same
    assert len(found.case.script.split(";")) <= max(2, len(found.drawn.script.split(";")) // 2)
    monkeypatch.undo()
    assert play(found.case) is None  # and nothing without the bug


@pytest.mark.parametrize("difference", [-1, 1])
def test_a_wrong_quorum_breaks_an_invariant(difference: int, monkeypatch: Patch) -> None:
    """Plant an error in the dial, which the account must not ask."""
    case = Case(sync="softsync:2,rate=given", learners=4, examples=40)
    assert play(case) is None
    quorums_off_by(difference)(monkeypatch)
    failure = play(case)
    assert failure is not None and "quorum" in failure.text


# -- shortening --------------------------------------------------------------------------------------------


def test_shortening_keeps_only_what_is_needed() -> None:
    lines = [f"pause learner {rank} for 1 s at {rank}.1234 s" for rank in range(6)]
    case = Case(
        script="; ".join(lines),
        epochs=3,
        learners=4,
        shards=2,
        examples=40,
        cluster="equal:latency=0.1,message=1",
    )
    short = shorten(case, lambda it: "learner 4" in it.script and it.learners >= 2)
    assert short.script == "pause learner 4 for 1 s at 4 s"
    assert (short.learners, short.epochs, short.shards, short.examples, short.cluster) == (
        2,
        1,
        1,
        1,
        "equal",
    )


def test_shortening_ends() -> None:
    tried = []

    def fails(case: Case) -> bool:
        tried.append(case)
        return True

    short = shorten(random_case(1, "async"), fails, tries=40)
    assert len(tried) <= 40 and short.script == ""


# -- nothing stays behind ----------------------------------------------------------------------------------


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "signals", [[signal.SIGKILL], [signal.SIGINT, signal.SIGINT]], ids=["kill", "Ctrl-C"]
)
def test_workers_end_with_the_hunt(signals: list[signal.Signals]) -> None:
    command = [
        sys.executable,
        "-m",
        "syncline",
        "simulate",
        "--faults",
        "random",
        "--seeds",
        "100000",
        "--jobs",
        "2",
    ]
    with ReadyPython(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        while len(workers := _children(process.pid)) < 2:
            assert process.poll() is None
            time.sleep(0.02)
        for number in signals:
            process.send_signal(number)
    deadline = time.monotonic() + 60
    while any(alive(pid) for pid in workers):
        assert time.monotonic() < deadline, "they live on"
        time.sleep(0.02)
    sweep(SHARED)


def _children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in found.read_text().split()] if found.exists() else []
