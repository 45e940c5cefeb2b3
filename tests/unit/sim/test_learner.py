"""A simulated learner: where its time goes, what it sends in which order, what wakes it, and what ends it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from syncline import messages as m
from syncline.cluster import Cost
from syncline.engines.run import Task
from syncline.errors import InvariantError, UsageError
from syncline.messages.to_leader import Used
from syncline.ports import Computing, Portion, Reading, Reset, RunStopped
from syncline.sim.fibers import Killed
from syncline.sim.learner import COMPUTING, TICKET, WAITING, SimLearner, call, copy_arguments
from tests.unit.sim.small_world import EQUAL, LATENCY, SETUP, SmallWorld, gradient


def started(task: Callable[[SimLearner], Any], **given: Any) -> tuple[SmallWorld, SimLearner]:
    """A learner whose function does this with its port, and has begun."""
    world = SmallWorld(**given, task=lambda session: task(session.port))
    learner = world.learners[0] = SimLearner(world, 0, 0)  # type: ignore[arg-type]
    learner.start()
    return world, learner


def heard(world: SmallWorld) -> list[tuple[float, str]]:
    """Who heard something when; but for the session's own last word."""
    return [(moment, who) for moment, who, what in world.heard if not isinstance(what, m.Closed)]


# -- its time ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("began", "handled", "decided", "now", "waiting"),
    [
        (0.0, 2.0, 5.0, 8.0, 3.0),  # the leader had its gradient at 2, and let it go on at 5
        (3.0, 2.0, 5.0, 8.0, 2.0),  # it waits since 3 only
        (0.0, 5.0, 2.0, 8.0, 0.0),  # the last decision was about another gradient
        (6.0, 2.0, 9.0, 8.0, 2.0),  # no longer than it waited
    ],
)
def test_of_a_wait_for_a_ticket_others_have_what_they_took(
    began: float, handled: float, decided: float, now: float, waiting: float
) -> None:
    world, learner = started(lambda port: None)
    learner.handled, learner.decided, world.clock.now = handled, decided, now
    learner.passed(began, TICKET)
    times = learner.times()
    assert (times.communication, times.waiting, times.compute) == (now - began - waiting, waiting, 0.0)
    learner.passed(began, COMPUTING), learner.passed(began, WAITING)
    assert (learner.times().compute, learner.times().waiting) == (now - began, waiting + now - began)


def test_it_computes_at_its_own_pace_and_later_where_it_is_paused() -> None:
    ends: list[float] = []

    def task(port: SimLearner) -> None:
        for _ in range(2):
            port.spend(Computing(4))
            ends.append(port.now())

    world, learner = started(task, cluster=replace(EQUAL, speeds=(0.5,)))
    world.run(1.0)
    learner.pause.begin(world.clock.now, 3.0)
    world.run()
    assert ends == [5.0, 7.0] and (learner.times().compute, learner.times().steps, learner.step) == (
        7.0,
        2,
        2,
    )
    assert heard(world) == [(7.0 + LATENCY, "returned")]


# -- waiting -------------------------------------------------------------------------------------------------


def test_it_gives_way_until_its_data_is_there() -> None:
    got: list[Portion | None] = []

    def task(port: SimLearner) -> None:
        got.append(port.portion(0, 0, block=False))
        got.append(port.portion(0, 0, block=True))

    _, learner = started(task)
    assert got == [None] and learner.waits_for == "data of loader 0"
    learner.give(Portion(0, 1, 0, 4, 8))
    assert got == [None], "that is another's number"
    learner.give(Portion(0, 0, 0, 0, 4))
    assert got[1] == Portion(0, 0, 0, 0, 4) and learner.waits_for is None and learner.fiber.done


def test_who_is_paused_wakes_when_that_is_over() -> None:
    world, learner = started(lambda port: port.portion(0, 0, block=True))
    learner.pause.begin(0.0, 2.0)
    learner.give(Portion(0, 0, 0, 0, 4))
    assert learner.waits_for is not None
    world.run()
    assert heard(world) == [(2.0 + LATENCY, "returned")]


def test_who_is_called_in_a_step_asks_why_it_waits() -> None:
    done: list[bool] = []

    def task(port: SimLearner) -> None:
        port.until_released(lambda: bool(done), "a ticket")

    world, learner = started(task)
    learner.wake()
    assert not world.heard
    learner.call()
    world.run()
    assert [what for _, _, what in world.heard] == [m.Called()]
    learner.answer(m.Called())
    assert not learner.fiber.done and learner.waits_for == "a ticket"
    done.append(True)
    learner.wake()
    assert learner.fiber.done


@pytest.mark.parametrize(
    "answer", [m.Refused(KeyError("no")), m.Stale(), m.Rejoined([], "another desk"), "yes"]
)
def test_an_answer_is_given_back_or_raised(answer: Any) -> None:
    got: list[Any] = []

    def task(port: SimLearner) -> None:
        try:
            got.append(port.ask("please"))
        except (KeyError, Reset) as error:
            got.append(type(error))

    world, learner = started(task)
    world.run()
    assert [what for _, _, what in world.heard] == ["please"] and not got
    learner.answer(answer)
    assert got == [{m.Refused: KeyError, m.Stale: Reset}.get(type(answer), answer)]
    assert learner.stale == isinstance(answer, m.Rejoined), (
        "it says from now on what it has to say to that desk"
    )


def test_nobody_waits_for_servers_that_are_gone() -> None:
    raised: list[bool] = []

    def task(port: SimLearner) -> None:
        with pytest.raises(Reset):
            port.portion(0, 0, block=True)
        raised.append(True)

    world, learner = started(task)
    world.servers = ["new ones"]
    learner.wake()
    assert raised


# -- sending -------------------------------------------------------------------------------------------------


def test_nothing_that_it_says_overtakes_what_it_said_before() -> None:
    def task(port: SimLearner) -> None:
        port.post(gradient(1))  # copied for two seconds, then bulk on its way
        port.post(Used(0, 1))
        port.tell("over")

    cluster = replace(EQUAL, copy=Cost(fixed=2.0))
    world = SmallWorld(cluster, task=lambda session: task(session.port))
    world.open_table(1, 0)
    SimLearner(world, 0, 0).start()  # type: ignore[arg-type]
    world.run()
    said = [gradient(1), Used(0, 1), "over", m.Closed(), None]
    assert [(moment, what) for moment, _, what in world.heard] == [
        (2.0 + LATENCY + SETUP, each) for each in said
    ]


def test_each_shard_knows_when_its_part_is_there() -> None:
    world = SmallWorld(replace(EQUAL, learners_per_machine=1), shards=2)
    world.open_table(2, 0)
    learner = SimLearner(world, 0, 0)  # type: ignore[arg-type]
    learner.post(gradient(7))
    assert world.lanes[0, 0].under_way == {(1, 7): LATENCY + SETUP} and learner.stepped
    world.run()
    assert heard(world) == [(LATENCY + SETUP, "note")]


def test_a_dead_learner_says_nothing_more_and_is_lost_when_all_that_it_said_is_there() -> None:
    unwound: list[str] = []

    def task(port: SimLearner) -> None:
        try:
            port.spend(Computing(4))
        finally:
            port.post(Used(0, 1))
            unwound.append("it is")

    world, learner = started(task)
    learner.send(lambda: world.hear("note", "before"), world.first_machine, 100)
    assert learner.kill() == LATENCY + SETUP and unwound == ["it is"] and learner.stopping()
    world.run()
    assert heard(world) == [(LATENCY + SETUP, "note")]
    with pytest.raises(Killed):
        learner.until(lambda: False, "anything")
    learner.start()
    assert learner.states() == b""


@pytest.mark.parametrize(
    ("error", "who"),
    [(KeyError("lost shoe"), "raised"), (InvariantError("broken"), "run"), (RunStopped(), "returned")],
)
def test_an_error_is_its_learners_and_what_is_broken_is_the_runs(error: BaseException, who: str) -> None:
    def task(port: SimLearner) -> None:
        raise error

    world, _ = started(task)
    world.run()
    assert [each for _, each in heard(world)] == ([who] if who != "run" else [])
    assert (world.recorder.error is error) == (who == "run")


# -- its table -----------------------------------------------------------------------------------------------


def test_what_it_publishes_is_a_copy_and_its_draft_no_number_any_more() -> None:
    world = SmallWorld()
    handle = world.open_table(1, 0)
    world.poisons = True
    learner, lane = SimLearner(world, 0, 0), world.lanes[0, 0]  # type: ignore[arg-type]
    table = learner.open(m.Opened(0, handle.layout, handle=handle, lane=lane))
    draft = table.draft(block=False)
    assert draft is not None
    for view in draft.gradients:
        view.fill_(3.0)
    table.publish(draft, gradient(1, full=False), b"[]", [True, False, True, False])
    assert lane.numbers[draft.place] == 1 and all(view.isnan().all() for view in draft.gradients)
    assert all((view == 3.0).all() for view in lane.sent[draft.place].gradients)
    assert lane.sent[draft.place].mask.tolist() == [1, 0, 1, 0]
    other = table.draft(block=False)
    assert other is not None and table.draft(block=False) is None, "two slots"
    lane.inbox[0].fill_(5.0)
    lane.released[0] = (1, Reading(8))
    into = [torch.zeros_like(view) for view in draft.gradients]
    reading = table.wait(1, block=False)
    assert table.read(reading, into) == 8 and all((view == 5.0).all() for view in into)


# -- what it is given ----------------------------------------------------------------------------------------


class Uncopied:
    def __deepcopy__(self, memo: Any) -> None:
        raise TypeError("no copies of me")


def test_learners_have_copies_of_everything_but_data() -> None:
    data, model = TensorDataset(torch.zeros(3)), nn.Linear(2, 2)
    given = ({"data": [data], "model": model}, Task(call, (data,)))
    copied = copy_arguments(given)
    assert copied[0]["data"][0] is data and copied[1].arguments[0] is data
    assert copied[0]["model"] is not model and torch.equal(copied[0]["model"].weight, model.weight)
    with pytest.raises(UsageError, match="no copies of me; make it inside the function"):
        copy_arguments([Uncopied()])
