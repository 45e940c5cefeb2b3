"""Steps of several tables that wait for each other (M8): equal loops always go on, whoever joins, leaves or is told late;
loops that differ end by name.

The leading shard as it is, over queues whose messages take any time.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import MagicMock

from hypothesis import given, settings
from hypothesis import strategies as st

from syncline import messages as m
from syncline.dial import as_sync
from syncline.messages.log import Entry, Release
from syncline.messages.to_leader import NO_LOADER, Gradient, Meet, Rest, ToLeader
from syncline.ports import OUTSIDE, ServerPort
from syncline.protocols.meetings import STEP, TABLE, Decision, MeetingPlace, Met
from syncline.roles.barrier import PATIENCE, Barrier
from syncline.roles.data_dispatcher import DataDispatcher
from syncline.roles.leader import Leader
from syncline.roles.server import LogApplier
from tests.unit.roles.doubles import server_port, told

many = settings(max_examples=200, deadline=None)
TABLES = {"a": 0, "b": 1}
words = st.text("abm", max_size=6)  # steps of two tables, and meetings
dials = st.sampled_from(["hardsync", "delayed:1", "ssp:0", "ssp:1", "backup:1", "softsync:1"])


class Crew:
    """Learners that go through their loops and return; who is told that loops differ ends."""

    def __init__(
        self,
        loops: list[str],
        sync: str,
        choose: Callable[[int], int],
        leavers: tuple[int, ...] = (),
        *,
        warm: int = 0,
    ) -> None:
        self._warm = warm
        self._choose, self._loops = choose, dict(enumerate(loops))
        self._queues: dict[str, deque[Callable[[], None]]] = defaultdict(deque)
        self._tickets: dict[tuple[int, int], int] = defaultdict(int)
        self._waits: dict[int, Any] = {}  # what a learner waits for: (table, number), or a meeting
        self._read: dict[tuple[int, int], int] = defaultdict(int)  # the version that it has of a table
        self._leavers = set(leavers)
        self.told: dict[int, m.Met] = {}
        self.over: set[int] = set()
        port = MagicMock(spec=ServerPort, shard=0, shards=1)
        port.tell.side_effect = self._reported
        replay = MagicMock(spec=LogApplier, dials={0: as_sync(sync)})
        replay.replay.side_effect = self._entry
        self._leader = Leader(port, replay)
        learners = {each: each for each in self._loops}
        initial = {0: 0} if warm else learners  # one alone
        self._leader.resume(m.Resume(initial=tuple(initial)))
        for table in TABLES.values():
            self._make(table, initial, len(learners))
        for learner in learners:
            if warm:
                self._queues[f"new {learner}"].append(partial(self._enter, learner))
            else:
                self._enter(learner)

    def _make(self, table: int, initial: dict[int, int], learners: int) -> None:
        layout = MagicMock(shards=1)
        layout.buffers.entries = []
        self._leader.make_table(
            m.MakeTable(
                table=table,
                layout=layout,
                template=MagicMock(),
                dial=0,
                initial=initial,
                learners=learners,
                warm=self._warm if table == 0 else 0,
                batch_size=None,
                limit=None,
                clip_norm=None,
                handle=None,
            )
        )

    def add(self, loop: str) -> None:
        """It joins some time."""
        learner = len(self._loops)
        self._loops[learner] = loop
        self._queues[f"new {learner}"].append(lambda: self._enter(learner))

    def _enter(self, learner: int) -> None:
        if self._warm:
            self._waits[learner] = (0, 0)  # what it reads first
            self._join(0, learner)
            return
        for table in TABLES.values():
            self._join(table, learner)
        self._go_on(learner)

    def _join(self, table: int, learner: int) -> None:
        self._tickets[learner, table] = 0
        self._leader.join_table(m.JoinTable(table, learner, learner, None))

    def play(self) -> None:
        """Whatever queue's first message may arrive next."""
        while waiting := sorted(name for name, queue in self._queues.items() if queue):
            self._queues[waiting[self._choose(len(waiting))]].popleft()()

    # -- what learners do --------------------------------------------------------------------------------

    def _post(self, learner: int, message: ToLeader) -> None:
        self._queues[f"notes {learner}"].append(partial(self._leader.note, learner, message))

    def _go_on(self, learner: int) -> None:
        self._waits.pop(learner, None)
        loop = self._loops[learner]
        if not loop or (learner in self._leavers and self._choose(2)):
            self._leave(learner)
            return
        self._loops[learner] = loop[1:]
        if loop[0] == "m":
            for table in TABLES.values():
                self._post(learner, Rest(table, self._ticket(learner, table), NO_LOADER, 0))
            self._waits[learner] = "m"
            self._post(learner, Meet())
        else:
            table = TABLES[loop[0]]
            number = self._ticket(learner, table)
            self._waits[learner] = (table, number)
            stamp = self._read[learner, table]
            self._post(
                learner, Gradient(table, number, stamp, 0, 1, NO_LOADER, 0, 0, True, False, b"", math.nan)
            )

    def _ticket(self, learner: int, table: int) -> int:
        self._tickets[learner, table] += 1
        return self._tickets[learner, table]

    def _leave(self, learner: int) -> None:
        """It returned, raised or died; what it said before comes before."""
        self.over.add(learner)
        self._waits.pop(learner, None)
        leave = partial(self._leader.leave, m.Leave(learner, learner))
        self._queues[f"notes {learner}"].append(leave)

    # -- what they hear ----------------------------------------------------------------------------------

    def _entry(self, entry: Entry) -> None:
        if isinstance(entry, Release):
            hear = partial(self._released, entry.learner, (entry.table, entry.number), entry.version)
            self._queues[f"to {entry.learner}"].append(hear)

    def _released(self, learner: int, what: tuple[int, int], version: int) -> None:
        self._read[learner, what[0]] = version
        if self._waits.get(learner) == what:
            if what == (0, 0):
                self._join(1, learner)
            self._go_on(learner)

    def _reported(self, message: Any) -> None:
        if isinstance(message, m.Met):
            for learner in message.learners:
                self._queues[f"to {learner}"].append(partial(self._met, learner, message))
            for learner, place in message.others.items():
                assert place.what == STEP
                self._queues[f"to {learner}"].append(partial(self._called, learner, message))

    def _met(self, learner: int, message: m.Met) -> None:
        if message.others:
            self._refuse(learner, message)
        elif learner not in self.over:
            self._go_on(learner)

    def _called(self, learner: int, message: m.Met) -> None:
        if learner in self._waits:
            self._refuse(learner, message)

    def _refuse(self, learner: int, message: m.Met) -> None:
        self.told[learner] = message
        self._leave(learner)


@many
@given(words, st.integers(2, 4), dials, st.integers(0, 2), st.data())
def test_equal_loops_always_go_on(loop: str, learners: int, sync: str, joiners: int, data: Any) -> None:
    """Some leave anywhere, others join at any time."""
    crew = Crew([loop] * learners, sync, lambda count: data.draw(st.integers(0, count - 1)), leavers=(1, 5))
    for _ in range(joiners):
        crew.add(loop)
    crew.play()
    assert crew.told == {} and crew.over == set(range(learners + joiners))


def test_learners_that_backup_left_behind_are_not_told_that_loops_differ() -> None:
    """One is two steps behind, another leaves: those that remain wait in steps of different tables."""
    draws = iter([0, 0, 0, 3, *[0] * 23, 1, 1])
    crew = Crew(["abaabb"] * 3, "backup:1", lambda count: min(next(draws, 0), count - 1), leavers=(1,))
    crew.play()
    assert crew.told == {} and crew.over == {0, 1, 2}


@many
@given(st.integers(1, 6), st.integers(2, 4), dials, st.data())
def test_a_warm_start_goes_on_whoever_comes_first(warm: int, learners: int, sync: str, data: Any) -> None:
    """After a loss all start anew: who was to work alone may come when another does, and comes to no table before its end."""
    crew = Crew(["ab" * 6] * learners, sync, lambda count: data.draw(st.integers(0, count - 1)), warm=warm)
    crew.play()
    assert crew.told == {} and crew.over == set(range(learners))


@many
@given(st.lists(words, min_size=2, max_size=4), dials, st.data())
def test_loops_that_differ_never_wait_for_ever(loops: list[str], sync: str, data: Any) -> None:
    crew = Crew(loops, sync, lambda count: data.draw(st.integers(0, count - 1)))
    crew.play()
    assert crew.over == set(range(len(loops)))
    for message in crew.told.values():
        tables = {place.number for place in message.others.values()}
        assert tables == {0, 1} or message.learners


@many
@given(st.sampled_from(["hardsync", "delayed:1", "ssp:0", "ssp:1"]), st.integers(2, 4), st.data())
def test_steps_of_different_tables_are_told(sync: str, learners: int, data: Any) -> None:
    """Each has steps that the others never make."""
    loops = ["aaaa", "bbbb", "aaaa", "m"][:learners]
    crew = Crew(loops, sync, lambda count: data.draw(st.integers(0, count - 1)))
    crew.play()
    assert crew.told and crew.over == set(range(learners))
    places = {place for message in crew.told.values() for place in message.others.values()}
    assert places == {MeetingPlace(STEP, 0), MeetingPlace(STEP, 1)}


# -- the barrier alone ---------------------------------------------------------------------------------------


class Alone:
    """Learners 0, 1, … of ranks 10, 11 …, none of them in a step or at a loader."""

    def __init__(self, learners: int, *, back: bool = False) -> None:
        self.port, self.decided = server_port(), list[Decision]()
        ranks = {learner: 10 + learner for learner in range(9)}
        feeding = MagicMock(spec=DataDispatcher)
        feeding.waiting.return_value = {}
        self.barrier = Barrier(self.port, ranks, feeding, {}, self._carry_out)
        self.barrier.resume(m.Resume(initial=tuple(range(learners)), back=back))
        for learner in range(learners):
            self.barrier.join(learner, cold=False)

    def _carry_out(self, place: int, decisions: list[Decision]) -> None:
        assert place == OUTSIDE
        self.decided += decisions

    def warned(self) -> list[str]:
        return [message.text for message in told(self.port.tell, m.Warned)]


def test_who_makes_many_steps_in_lockstep_while_others_wait_is_named_once() -> None:
    alone = Alone(3)
    alone.barrier.come(0), alone.barrier.come(1)
    for count in range(1, 2 * PATIENCE):
        alone.barrier.stepped(2, lockstep=True)
        warned = alone.warned()
        assert len(warned) == (count == PATIENCE)
        for text in warned:
            assert "learner 12 has made 10 steps while learners [10, 11] wait in it" in text


def test_free_learners_are_named_only_when_they_have_returned() -> None:
    alone = Alone(2)
    alone.barrier.come(0)
    for _ in range(PATIENCE + 3):
        alone.barrier.stepped(1, lockstep=False)
    assert alone.warned() == []
    alone.barrier.leave(1, closed=True)
    assert "learner 11 has returned after 13 steps" in alone.warned()[0]
    assert alone.decided == [Met((0,))]


def test_who_was_lost_who_came_later_and_who_is_back_in_its_loop_is_not_named() -> None:
    lost, later, back = Alone(2), Alone(1), Alone(2, back=True)
    later.barrier.join(1, cold=False)
    for alone in (lost, later, back):
        alone.barrier.come(0)
        for _ in range(PATIENCE):
            alone.barrier.stepped(1, lockstep=alone is not lost)
        alone.barrier.leave(1, closed=alone is not lost)
        assert alone.warned() == []


def test_steps_are_counted_from_one_meeting_to_the_next() -> None:
    alone = Alone(2)
    for _ in range(3):
        alone.barrier.come(0)
        for _ in range(PATIENCE - 1):
            alone.barrier.stepped(1, lockstep=True)
        alone.barrier.come(1)
        alone.barrier.over(Met((0, 1)))
    assert alone.warned() == [] and alone.decided == [Met((0, 1))] * 3


def test_who_waits_for_the_warm_starts_end_is_in_no_meeting_before() -> None:
    alone = Alone(2)
    alone.barrier.join(1, cold=True)
    alone.barrier.come(0)
    assert alone.decided == [Met((0,))]
    assert alone.barrier.warmed(1) and not alone.barrier.warmed(1) and not alone.barrier.warmed(0)
    alone.barrier.come(0)
    assert alone.decided == [Met((0,))]
    alone.barrier.come(1)
    assert alone.decided[1:] == [Met((0, 1))]


def test_what_was_heard_of_openings_is_asked_again_before_anybody_is_told_that_loops_differ() -> None:
    alone, place = Alone(2), MeetingPlace(TABLE, 1)
    alone.barrier.come(0)
    alone.barrier.opening(m.Opening(7, {1: place}))
    assert told(alone.port.tell) == [m.Standstill(7, {0, 1})] and alone.decided == []
    alone.barrier.standstill(m.Standstill(6, {0, 1}))  # an older question's answer
    assert alone.decided == []
    alone.barrier.standstill(m.Standstill(7, {0, 1}))
    assert alone.decided == [Met((0,), ((1, place),))]
    alone.barrier.opening(m.Opening(8, {1: None}))
    assert not alone.barrier.openings and not alone.barrier.tangled
