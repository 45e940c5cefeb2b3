"""Who waits for whom at the coordinator: equal loops are never told that they differ, loops that do never wait for ever.

Coordinator and leading shard as they are, over queues whose messages take any time.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import MagicMock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline import messages as m
from syncline.dial import Course
from syncline.messages.to_leader import Meet
from syncline.ports import CoordinatorPort, ServerPort
from syncline.protocols.meetings import EPOCH, LOADER, TABLE, MeetingPlace
from syncline.roles.coordinator import Coordinator
from syncline.roles.run_plan import RunPlan
from syncline.roles.server import ServerRole
from syncline.roles.waiting_learners import differing

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
