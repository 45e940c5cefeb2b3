"""Who waits for whom at the coordinator: equal loops are never told that they differ, loops that do never wait for ever.

Coordinator and leading shard as they are, over queues whose messages take any time.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline import messages as m
from syncline.dial import Course
from syncline.errors import UsageError
from syncline.messages.to_leader import Meet
from syncline.ports import CoordinatorPort, ServerPort
from syncline.protocols.meetings import EPOCH, LOADER, STEP, TABLE, MeetingPlace
from syncline.roles.coordinator import Coordinator
from syncline.roles.run_plan import RunPlan
from syncline.roles.server import ServerRole
from syncline.roles.waiting_at_coordinator import WaitingLearners, brought, differing, like, mean_of
from tests.unit.roles.doubles import coordinator_port, layout, told

Loop = list[str]  # "mean", or a loader's letter
loops = st.lists(st.sampled_from(["mean", "a", "b"]), max_size=5).map(
    lambda loop: [op for number, op in enumerate(loop) if op == "mean" or op not in loop[:number]]
)


class Crew:
    """Learners that go through their loops, return, and end when they are refused."""

    def __init__(self, loops: list[Loop], choose: Callable[[int], int]) -> None:
        self._choose = choose
        self._loops = [list(loop) for loop in loops]
        self._queues: dict[str, deque[Callable[[], None]]] = defaultdict(deque)
        self._opened = [0] * len(loops)
        self.refused: dict[int, str] = {}
        self.over: set[int] = set()
        learners = {rank: rank for rank in range(len(loops))}
        office = MagicMock(spec=CoordinatorPort, shards=1)
        office.tell_shards.side_effect = lambda event: self._send("shard", lambda: self._told(event))
        office.reply.side_effect = lambda learner, answer: self._send(
            f"to {learner}", lambda: self._hear(learner, answer)
        )
        server = MagicMock(spec=ServerPort, shard=0, shards=1)
        server.tell.side_effect = lambda message: self._send(
            "coordinator", lambda: self._coordinator.from_shard(message)
        )
        plan = RunPlan(course=Course.of("async"), learners=len(loops))
        self._coordinator = Coordinator(office, plan, learners)
        self._role = ServerRole(server)
        self._coordinator.begin()
        self.play()  # the shards hear of it before they hear of learners
        for learner in learners:
            self._go_on(learner)

    def _send(self, queue: str, arrive: Callable[[], None]) -> None:
        self._queues[queue].append(arrive)

    def play(self) -> None:
        """Whatever queue's first message may arrive next."""
        while waiting := sorted(name for name, queue in self._queues.items() if queue):
            self._queues[waiting[self._choose(len(waiting))]].popleft()()

    def _told(self, event: Any) -> None:
        while isinstance(event, m.Leave) and (notes := self._queues[f"notes {event.learner}"]):
            notes.popleft()()  # what it said before it left comes before its leaving
        self._role.handle(event)

    def _go_on(self, learner: int) -> None:
        if not self._loops[learner]:
            self._leave(learner)
            return
        place = self._loops[learner].pop(0)
        request: Any = m.MeanOf(torch.tensor(float(learner)))
        if place == "mean":
            self._send(f"notes {learner}", partial(self._role.note, learner, Meet()))
        else:
            request = m.OpenLoader(self._opened[learner], 8, 2, "ledger", None)
            self._opened[learner] += 1
        self._send(f"asks {learner}", lambda: self._coordinator.from_learner(learner, request))

    def _hear(self, learner: int, answer: Any) -> None:
        if isinstance(answer, m.Refused):
            self.refused[learner] = str(answer.error)
            self._leave(learner)
        else:
            self._go_on(learner)

    def _leave(self, learner: int) -> None:
        self.over.add(learner)
        self._send(f"asks {learner}", lambda: self._coordinator.leave(learner, lost=False))


@settings(max_examples=300, deadline=None)
@given(loops, st.integers(2, 4), st.data())
def test_equal_loops_never_differ(loop: Loop, learners: int, data: st.DataObject) -> None:
    crew = Crew([loop] * learners, lambda count: data.draw(st.integers(0, count - 1)))
    crew.play()
    assert crew.refused == {} and crew.over == set(range(learners))


@settings(max_examples=300, deadline=None)
@given(st.lists(loops, min_size=2, max_size=4), st.data())
def test_different_loops_never_wait_for_ever(loops: list[Loop], data: st.DataObject) -> None:
    """Who waits for learners that have returned goes on without them; who waits for each other is told."""
    crew = Crew(loops, lambda count: data.draw(st.integers(0, count - 1)))
    crew.play()
    assert crew.over == set(range(len(loops)))
    for problem in crew.refused.values():
        assert "wait in session.mean" in problem and "open loader" in problem


def test_the_words_say_who_waits_where_and_what_to_do() -> None:
    places = {
        None: [2],
        MeetingPlace(EPOCH, 0): [0, 3],
        MeetingPlace(TABLE, 1): [1],
        MeetingPlace(LOADER, 2): [4],
    }
    assert differing(places) == (
        "learners' loops differ, and all wait for each other: learners [2] wait in session.mean, learners [0, 3] wait at "
        "loader 0 for its next epoch, learners [1] open table 1, learners [4] open loader 2. Every learner must open the "
        "same tables and loaders in the same order and call session.mean equally often; learners have unequal numbers of "
        "batches: call it after the loop over a loader, not inside."
    )
    assert "session.mean" not in differing({MeetingPlace(EPOCH, 0): [0], MeetingPlace(LOADER, 1): [1]})


def test_the_words_say_who_steps_what() -> None:
    assert differing({None: [2], MeetingPlace(STEP, 0): [0], MeetingPlace(STEP, 1): [1, 3]}) == (
        "learners' loops differ, and all wait for each other: learners [2] wait in session.mean, learners [0] wait in a "
        "step of table 0, learners [1, 3] wait in a step of table 1. Every learner must step the same tables in the same "
        "order and call session.mean equally often."
    )


# -- the room alone ------------------------------------------------------------------------------------------


class Room(WaitingLearners):
    """Learners 5, 6 and 7, whose ranks fall; what it says is remembered."""

    def __init__(self) -> None:
        self.port, self.live = coordinator_port(), {5: 2, 6: 1, 7: 0}
        super().__init__(self.port, self.live)

    def ask(self, learner: int, message: Any) -> None:
        self.asked[learner] = message
        self.look(learner)

    def bring(self, learner: int, value: Any) -> None:
        self.ask(learner, m.MeanOf(brought(value)))
        self.try_met()

    def answers(self) -> list[tuple[int, Any]]:
        return told(self.port.reply)


def test_a_meeting_is_answered_by_rank_when_all_that_was_brought_is_here() -> None:
    room = Room()
    room.bring(5, 1)
    room.met(m.Met((5, 6)))
    assert room.answers() == []
    room.bring(6, 2)
    assert [(learner, mean.item()) for learner, mean in room.answers()] == [(6, 1.5), (5, 1.5)]
    room.bring(6, 9)  # for the next one
    room.met(m.Met((6, 7)))
    del room.live[7]  # it brought nothing
    room.try_met()
    assert room.answers() == [(6, torch.tensor(9.0, dtype=torch.float64))] and room.asked == {}


def test_different_shapes_are_refused_to_all() -> None:
    room = Room()
    room.bring(5, torch.zeros(2)), room.bring(7, 1.0)
    room.met(m.Met((5, 7)))
    refused = room.answers()
    assert [learner for learner, _ in refused] == [7, 5]
    assert all("got learner 0: (), learner 2: (2,)" in str(answer.error) for _, answer in refused)


def test_new_shards_hear_again_who_opens_something() -> None:
    room, place = Room(), MeetingPlace(TABLE, 0)
    room.ask(5, m.Open(0, layout()))
    assert told(room.port.tell_shards) == [m.Opening(1, {5: place})]
    room.reset()
    room.tell(), room.tell()
    assert told(room.port.tell_shards) == [m.Opening(2, {5: place})]
    room.reply(5, None)
    room.tell()
    assert told(room.port.tell_shards) == [m.Opening(3, {5: None})]


def test_all_stand_still_only_if_nobody_has_gone_on_or_is_missing() -> None:
    room = Room()
    room.ask(5, m.Open(0, layout()))
    told(room.port.tell_shards)
    for number, learners in ((0, {5, 6, 7}), (1, {5, 6})):
        room.standstill(m.Standstill(number, learners))
    assert told(room.port.tell_shards) == []
    room.standstill(m.Standstill(1, {5, 6, 7}))
    assert told(room.port.tell_shards) == [m.Standstill(1, {5, 6, 7})]


def test_who_waits_in_different_steps_is_called_and_told_when_it_asks() -> None:
    room = Room()
    room.met(m.Met((), {5: MeetingPlace(STEP, 0), 6: MeetingPlace(STEP, 1)}))
    assert told(room.port.announce) == [m.Call()] and room.answers() == []
    for learner in (5, 7, 5):
        room.answer_call(learner)
    (first, refused), *others = room.answers()
    assert first == 5 and "learners [2] wait in a step of table 0" in str(refused.error)
    assert others == [(7, None), (5, None)]


def test_nobody_is_told_that_loops_differ_while_the_run_ends() -> None:
    room = Room()
    room.ending = True
    room.bring(5, 3)
    room.met(m.Met((5,), {6: MeetingPlace(EPOCH, 0)}))
    assert [(learner, mean.item()) for learner, mean in room.answers()] == [(5, 3.0)]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("x", "got str"),
        (torch.zeros(1, dtype=torch.complex64), "got a tensor of torch.complex64"),
        (None, "NoneType"),
    ],
)
def test_what_has_no_mean_is_refused(value: Any, said: str) -> None:
    with pytest.raises(UsageError, match=f"takes a number or a tensor of real numbers, .*{said}"):
        brought(value)


def test_means_come_back_as_what_was_brought() -> None:
    mean = mean_of({3: brought(2), 1: brought(torch.tensor(1))})
    assert mean.item() == 1.5
    assert like(mean, 2) == 1.5 and isinstance(like(mean, 2), float)
    assert like(mean, torch.tensor(1, dtype=torch.int64)).dtype == torch.float32
    assert like(mean, torch.tensor(1.0, dtype=torch.bfloat16)).dtype == torch.bfloat16
    row = mean_of({0: brought([1, 2])})
    mine = like(row, [1, 2])
    mine += 1
    assert row.tolist() == [1.0, 2.0]  # each has its own
