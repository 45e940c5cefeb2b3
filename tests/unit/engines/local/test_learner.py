"""A learner's ports on shared memory, with its shards' ends of that memory in the test's hands; and how a learner ends."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from syncline import messages as m
from syncline.engines.local import learner
from syncline.engines.local.exchange import DELIVERED, KEEP
from syncline.engines.local.learner import (
    CALLS,
    GENERATION,
    STOP,
    LearnerSpec,
    LocalLearnerPort,
    returned,
    run_evaluator,
    run_learner,
)
from syncline.engines.local.record_codec import decode
from syncline.engines.local.shared_memory import Region, WakeUp
from syncline.engines.local.table_memory import DESK_NOTES, LEAF, WAITS, Geometry, Lane, Mailbox, TableMemory
from syncline.engines.run import Task
from syncline.errors import UsageError
from syncline.messages.to_leader import AskBatch, Gradient, Rest
from syncline.ports import Portion, Reading, Reset, RunStopped
from syncline.roles.run_plan import Seat
from tests.unit.engines.local.doubles import Post, Turns, layout_of, sent, spec_of

LAYOUT = layout_of(4, 5000, shards=2)


class World:
    """A learner, and what it shares with two shards; whenever it waits the next of `then` happens."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, letters: tuple[Any, ...] = (), leaves: int = 0
    ) -> None:
        self.then: list[Callable[[], Any]] = []
        monkeypatch.setattr(learner, "Waiter", lambda bell, yields: Turns(self._story()))
        regions = [Region(size) for size in (64, Mailbox.nbytes())]
        self.hub, self.desk = regions[0].words, Mailbox(regions[1])
        self.shard_bell, self.leaves = WakeUp(), [WakeUp() for _ in range(leaves)]
        geometry, seat = Geometry(slots=2, places=3), Seat(plan=spec_of().plan, rank=1)
        spec = LearnerSpec(7, *regions, WakeUp(), self.shard_bell, geometry, 0, seat, self.leaves)
        self.post: Any = Post(*letters)
        self.port = LocalLearnerPort(self.post, spec)
        handle, lane = Region(TableMemory.nbytes(LAYOUT, places=3)), Region(Lane.nbytes(LAYOUT, slots=2))
        self.shelf, self.lane = TableMemory(handle, LAYOUT, places=3), Lane(lane, LAYOUT, slots=2)
        self.table = self.port.open(m.Opened(0, LAYOUT, handle=handle, lane=lane))

    def _story(self) -> Any:
        while self.then:
            self.then.pop(0)()
            yield

    def heard(self, ring: Any = None) -> list[Any]:
        """What the leading shard reads, with the slot of each draft."""
        found = []
        while (record := (ring or self.desk.notes).pop()) is not None:
            found.append(decode(record, lambda table, slot: self.lane.slots[slot].read_states()))
        return found

    def publish(self, number: int, **changed: Any) -> int:
        """A gradient in the next draft; its place."""
        draft = self.table.draft()
        assert draft is not None
        self.table.publish(draft, GRADIENT._replace(number=number, **changed), b"options", [True, False])
        return int(draft.place)

    def free(self, slot: int, number: int, *shards: int) -> None:
        for shard in shards or (0, 1):
            self.lane.drafts.free(shard, slot, number)

    def make(self, version: int, place: int, *shards: int) -> None:
        """These shards' parts of a version."""
        for shard in shards or (0, 1):
            for segment in LAYOUT.parts[shard].segments(self.shelf.ring[place]):
                segment.fill_(version)
            self.shelf.versions.offer(shard, place, version)


GRADIENT = Gradient(0, 1, 0, 0, 8, 0, 1, 0, True, False, b"", 0.5)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def rung(bell: WakeUp) -> bool:
    try:
        return os.eventfd_read(bell.fd) > 0
    except BlockingIOError:
        return False


def new() -> list[Tensor]:
    return [torch.zeros(4), torch.zeros(5000)]


# -- what is said ----------------------------------------------------------------------------------------------


def test_what_is_posted_wakes_the_leading_shard_unless_it_may_be_read_later(world: World) -> None:
    world.port.post(AskBatch(2, 3), later=True)
    assert not rung(world.shard_bell)
    world.port.post(AskBatch(2, 4))
    assert rung(world.shard_bell)
    assert [said for said, _ in world.heard()] == [AskBatch(2, 3), AskBatch(2, 4)]


def test_random_states_that_go_without_a_gradient_lie_in_the_first_slot(world: World) -> None:
    world.port.post(Rest(0, 5, 1, 2, b"states"))
    assert world.heard() == [(Rest(0, 5, 1, 2, b"states"), 0)]


def test_a_full_desk_is_waited_for_and_nothing_is_lost(world: World) -> None:
    world.then = [lambda: None, world.desk.notes.pop]
    for epoch in range(DESK_NOTES + 1):
        world.port.post(AskBatch(0, epoch))
    assert not world.then and [said.epoch for said, _ in world.heard()] == list(range(1, DESK_NOTES + 1))


def test_nobody_waits_for_a_desk_of_servers_that_are_gone(world: World) -> None:
    for epoch in range(DESK_NOTES):
        world.port.post(AskBatch(0, epoch))
    world.then = [lambda: world.hub.__setitem__(GENERATION, 1)]
    with pytest.raises(Reset):
        world.port.post(AskBatch(0, 99))


@pytest.mark.parametrize(
    "answer, error, words",
    [(m.Stale(), Reset, None), (m.Refused(UsageError("no such loader")), UsageError, "no such")],
)
def test_an_answer_may_be_a_refusal(
    answer: Any, error: Any, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(monkeypatch, (answer, "granted"))
    with pytest.raises(error, match=words):
        world.port.ask(m.MeanOf(torch.ones(1)))
    assert world.port.ask(m.Called()) == "granted" and world.post.said[1:] == [m.Called()]


def test_who_rejoins_speaks_to_the_new_servers_and_forgets_the_old_ones_portions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    region = Region(Mailbox.nbytes())
    desk = Mailbox(region)
    world = World(monkeypatch, (m.Rejoined([], (1, region)),))
    world.desk.portions.push(Portion(0, 5, 0, 0, 8))
    assert world.port.portion(0, 9, block=False) is None
    world.hub[GENERATION] = 1
    with pytest.raises(Reset):
        world.port.check()
    world.port.ask(m.Rejoin(1, 1))
    world.port.check()
    world.port.post(AskBatch(0, 0))
    assert world.port.portion(0, 5, block=False) is None
    assert not world.heard() and len(world.heard(desk.notes)) == 1


# -- what is waited for ----------------------------------------------------------------------------------------


def test_portions_are_found_by_loader_and_number_in_whatever_order_they_come(world: World) -> None:
    given = [Portion(loader, number, 0, number, number + 1) for loader, number in ((0, 1), (1, 0), (0, 0))]
    for portion in given[:2]:
        world.desk.portions.push(portion)
    assert world.port.portion(0, 0, block=False) is None
    waits: list[int] = []
    world.then = [lambda: waits.append(world.desk.words[WAITS]), lambda: world.desk.portions.push(given[2])]
    assert world.port.portion(0, 0, block=True) == given[2] and waits == [1]
    assert (
        world.port.portion(1, 0, block=True) == given[1] and world.port.portion(0, 1, block=True) == given[0]
    )
    assert world.desk.words[WAITS] == 0


def test_a_portion_is_not_waited_for_when_the_run_ends_or_its_servers_are_gone(world: World) -> None:
    world.then = [lambda: world.hub.__setitem__(GENERATION, 1)]
    with pytest.raises(Reset):
        world.port.portion(0, 0, block=True)
    world.hub[STOP] = 1
    assert world.port.stopping() and world.port.portion(0, 0, block=True) is None


def test_who_is_called_while_it_waits_asks_why_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, (None, m.Refused(UsageError("loops differ"))))
    call = lambda: world.hub.__setitem__(CALLS, world.hub[CALLS] + 1)  # noqa: E731
    world.then = [call, lambda: None, call]
    with pytest.raises(UsageError, match="loops differ"):
        world.port.until(lambda: None)
    assert world.post.said == [m.Called()] * 2 and world.desk.words[WAITS] == 0


# -- drafts ----------------------------------------------------------------------------------------------------


def test_a_draft_is_free_again_when_no_shard_needs_it(world: World) -> None:
    assert (world.publish(1), world.publish(2)) == (0, 1)
    assert world.table.draft(block=False) is None
    world.free(0, 1, 0)
    assert world.table.draft(block=False) is None, "the other shard reads it still"
    world.then = [lambda: None, lambda: world.free(0, 1)]
    assert world.publish(3) == 0 and not world.then
    world.free(1, 2)
    assert world.publish(4) == 1


def test_a_draft_that_is_being_filled_is_nobody_elses(world: World) -> None:
    first, second = world.table.draft(), world.table.draft(block=False)
    assert first is not None and second is not None and (first.place, second.place) == (0, 1)
    assert world.table.draft(block=False) is None


def test_over_a_tree_a_gradient_lies_where_the_leaf_reads_it_and_the_leaf_frees_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, leaves=3)
    world.desk.words[LEAF] = 2
    assert world.publish(1) == 0 and not world.heard() and world.lane.outbox.written == 1
    assert [rung(bell) for bell in (world.shard_bell, *world.leaves)] == [False, False, False, True]
    world.lane.passed.free(0, 0, 1)
    assert world.publish(2) == 0


def test_options_and_mask_go_with_a_gradient_where_they_say_something_new(world: World) -> None:
    slot = world.lane.slots[0]
    world.publish(1)
    assert slot.options_text() == b"options" and slot.mask.tolist() == [0, 0]
    slot.write_options(b"seen"), world.free(0, 1)
    world.publish(2, full=False, states=b"random")
    assert slot.options_text() == b"seen" and slot.mask.tolist() == [1, 0]
    world.free(0, 2)
    world.publish(3, options=1)
    assert slot.options_text() == b"options"
    assert [(said.number, said.states, place) for said, place in world.heard()] == [
        (1, b"", 0),
        (2, b"random", 0),
        (3, b"", 0),
    ]


# -- what is read ----------------------------------------------------------------------------------------------


def test_a_reading_is_there_when_every_shard_has_released_the_ticket(world: World) -> None:
    world.lane.replies.release(0, 4, 9, 2, KEEP)
    assert world.table.wait(4, block=False) is None
    world.then = [lambda: world.lane.replies.release(1, 4, 9)]
    assert world.table.wait(4) == Reading(9, 2, keep=True, delivered=False)
    for shard in (0, 1):
        world.lane.replies.release(shard, 5, 10, 2, DELIVERED)
    assert world.table.wait(5, block=False) == Reading(10, 2, keep=False, delivered=True)


def test_the_released_version_is_copied_and_said_to_be_read(world: World) -> None:
    for shard in (0, 1):
        world.lane.replies.release(shard, 4, 9)
    reading, into = world.table.wait(4), new()
    world.make(9, 1), world.make(10, 2)
    assert world.lane.replies.reads(4)
    assert world.table.read(reading, into) == 9 and {x for each in into for x in each.tolist()} == {9.0}
    assert not world.lane.replies.reads(4)


def test_who_is_overtaken_reads_a_newer_version_or_wants_one_delivered(world: World) -> None:
    world.make(12, 0)
    into = new()
    assert world.table.copy(Reading(9), into) == 12 and bool((into[1] == 12).all())
    world.make(13, 0, 0)
    assert world.table.copy(Reading(9), into) is None, "shards are between two versions"
    for segment in world.lane.inbox:
        segment.fill_(14.0)
    assert world.table.copy(Reading(14, delivered=True), into) == 14 and bool((into[0] == 14).all())


def test_what_comes_unasked_is_read_when_it_is_newer(world: World) -> None:
    world.make(3, 0)
    into = new()
    assert world.table.read(None, into) == 3 and bool((into[1] == 3).all())
    assert world.table.read(None, into) is None
    world.make(5, 1)
    assert world.table.read(None, into) == 5


def test_waiting_for_nothing_in_particular_is_over_when_all_drafts_are_free(world: World) -> None:
    world.publish(1), world.publish(2)
    world.then = [lambda: world.free(1, 2), lambda: world.free(0, 1)]
    assert world.table.wait(None) is None and not world.then


# -- its function ----------------------------------------------------------------------------------------------


class Session:
    def __init__(self, *given: Any) -> None:
        self.closed = 0

    def seed(self) -> None:
        pass

    @contextmanager
    def until_stopped(self) -> Iterator[None]:
        with suppress(RunStopped):
            yield

    def close(self) -> None:
        self.closed += 1


def lives(monkeypatch: pytest.MonkeyPatch, task: Any) -> tuple[int, list[Any]]:
    """Its exit code and its last words."""
    world = World(monkeypatch, (task,))
    monkeypatch.setattr(learner, "ServerSession", Session)
    spec: Any = world.port._spec
    return run_learner(world.post, spec), world.post.said


def test_a_learner_says_what_its_function_gave_back(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lives(monkeypatch, Task(lambda session, a, b: a + b, (1,), {"b": 2})) == (0, [m.Returned(3)])


def test_a_function_that_the_end_of_the_run_unwinds_gives_nothing_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stopped(session: Any) -> None:
        raise RunStopped

    assert lives(monkeypatch, Task(stopped)) == (0, [m.Returned(None)])


class OneWay(Exception):
    """Travels, and does not arrive."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__("both")


def test_an_error_that_does_not_arrive_is_told_by_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(session: Any, error: Exception) -> None:
        raise error

    code, (plain,) = lives(monkeypatch, Task(raising, (ValueError("no data"),)))
    assert code == 1 and repr(plain.error) == "ValueError('no data')" and "in raising" in plain.traceback
    code, (odd,) = lives(monkeypatch, Task(raising, (OneWay(1, 2),)))
    assert code == 1 and odd.error is None and "OneWay: both" in odd.traceback


def test_what_cannot_travel_back_is_named_and_the_rest_of_the_run_stays() -> None:
    found = sent(returned(open))
    assert found.value is open and not found.problem
    found = sent(returned(each for each in ()))
    assert found.value is None and found.problem.startswith("generator: ")


def test_a_task_may_stand_in_for_a_learner_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = lives(monkeypatch, lambda channel, spec: channel.send(spec.learner) or 3)
    assert (code, said) == (3, [7])


def test_the_evaluator_tests_one_snapshot_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner.os, "nice", lambda more: None)
    post: Any = Post(lambda state: {"n": len(state)}, (3, {"a": 1}), (4, {}))
    run_evaluator(post)
    assert post.said == [(3, {"n": 1}), (4, {"n": 0})]
    post = Post(lambda state: 1 // len(state), (3, {}))
    run_evaluator(post)
    assert isinstance(post.said[0].error, ZeroDivisionError)
