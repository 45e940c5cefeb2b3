"""A built-in learner: what it says to whom in which order, what it computes when, and how its loop ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from syncline import messages as m
from syncline.errors import UsageError
from syncline.learn.model_factories import pack_random
from syncline.messages.to_leader import AskBatch, Blocked, Farewell, Gradient, Rest
from syncline.ports import OUTSIDE, Portion, Reading
from syncline.roles.run_plan import Saving
from syncline.sim.batched.lazy_gradients import Gradient as Made
from syncline.sim.batched.lazy_gradients import PromisedLane, Versions
from syncline.sim.builtin_learner import Builtin
from tests.unit.sim.small_world import LATENCY, SETUP, SmallWorld, layout_of


class Computer:
    """Makes gradients of ones; notes what was promised."""

    def __init__(self, layout: Any) -> None:
        self._layout = layout
        self.promised: list[Any] = []
        self.versions = Versions(layout, lambda: SimpleNamespace(segments=self._new(0.0)))

    def _new(self, value: float) -> list[torch.Tensor]:
        return [
            torch.full_like(segment, value) for segment in self._layout.parameters.new(torch.device("cpu"))
        ]

    def promise(self, promise: Any) -> None:
        segments = self._new(1.0)
        views = self._layout.parameters.views(segments)
        promise.gradient, promise.loss = Made(segments, views, [True] * len(views)), 0.25
        self.promised.append((promise.version.number, promise.indices.tolist()))

    def make(self, promise: Any) -> Made:
        return promise.gradient

    def fills(self, version: Any) -> bool:
        return False


class Shop:
    """In a shared model's place."""

    ahead, template = 0, "template"

    def __init__(self, epochs: int | None) -> None:
        self.layout = layout_of()
        self.computer = Computer(self.layout)
        self.plan = SimpleNamespace(batch_size=4, policy="ledger", epochs=epochs)
        self.size = 8

    def indices(self, epoch: int, start: int, stop: int, parts: int) -> torch.Tensor:
        return torch.arange(start, stop) + 100 * epoch

    def options(self, epoch: int) -> bytes:
        return b"[]" if epoch == 0 else b"[1]"


class Run:
    """One learner, with the test in the place of the coordinator and of the leading shard."""

    def __init__(
        self, *portions: tuple[int, int], sync: str = "softsync:1", epochs: int | None = 1, **plan: Any
    ) -> None:
        """These positions have been handed out to it when it begins; then the epoch ends, where there is a number of them."""
        self.world = SmallWorld(sync=sync, epochs=epochs, **plan)
        self.shop = Shop(epochs)
        table = self.world.open_table(layout=self.shop.layout)
        self.lane = PromisedLane(self.shop.computer, 2, 1, self.world.clock)  # type: ignore[arg-type]
        self.world.lanes[0, 0] = self.lane
        self.learner = self.world.learners[0] = Builtin(self.world, 0, 0, self.shop)  # type: ignore[arg-type]
        self.learner.start()
        assert isinstance(self.next("coordinator"), m.Open)
        self.learner.answer(m.Opened(0, self.shop.layout, handle=table, lane=self.lane))
        self.release(0, 0)
        assert self.next("coordinator") == m.OpenLoader(0, 8, 4, "ledger", epochs)
        self.learner.answer(1)
        ends = [(0, 0)] if epochs is not None else []
        for index, (start, stop) in enumerate([*portions, *ends]):
            self.learner.give(Portion(0, index, 0, start, stop, end=int(stop == 0)))
        self.asked = 0
        self.learner.give(Portion(0, OUTSIDE, 0, 0, 0))  # it joins in epoch 0

    def next(self, who: str) -> Any:
        """What it says next to the coordinator, or to the leading shard (`note`)."""
        self.world.run()
        while isinstance(self.world.heard[0][2], AskBatch):
            self.asked += 1
            del self.world.heard[0]
        _, heard, what = self.world.heard.pop(0)
        assert heard == who, (heard, what)
        return what

    def release(self, number: int, version: int, **more: Any) -> None:
        self.shop.computer.versions.get(version)
        self.lane.inbox(self.shop.computer.versions.get(version), 0)
        self.lane.released[0] = (number, Reading(version, **more))
        self.learner.wake()

    def take(self, gradient: Gradient) -> None:
        self.lane.freed[0, gradient.number] = self.world.clock.now


def test_it_computes_publishes_and_reads_until_the_epochs_are_over() -> None:
    run = Run((0, 4), (4, 8))
    for index, version in ((0, 0), (1, 3)):
        said = run.next("note")
        assert isinstance(said, Gradient)
        assert (said.number, said.stamp, said.step) == (index + 1, version, index)
        assert (said.examples, said.loader, said.upto, float(said.loss), said.full) == (
            4,
            0,
            index + 1,
            0.25,
            True,
        )
        assert run.asked == index + 2, "two are asked for ahead"
        run.take(said)
        run.release(index + 1, version + 3)
    assert isinstance(run.next("note"), Rest), "nobody need wait for it"
    assert run.next("returned") is None and run.learner.fiber.done
    assert run.shop.computer.promised == [(0, [0, 1, 2, 3]), (3, [4, 5, 6, 7])]
    times = run.learner.times()
    assert (times.compute, times.steps) == (2.0, 2)


def test_where_there_is_no_data_it_rests_and_reads_again_when_there_is() -> None:
    run = Run(epochs=None)
    rest, blocked = run.next("note"), run.next("note")
    assert isinstance(rest, Rest) and (rest.number, rest.index) == (1, 0) and blocked == Blocked(0, 0)
    run.learner.give(Portion(0, 0, 0, 0, 4))
    run.world.run()
    assert run.learner.waits_for == "ticket 1 of table 0" and not run.shop.computer.promised
    run.release(1, 7)
    assert run.next("note").stamp == 7 and run.shop.computer.promised == [(7, [0, 1, 2, 3])]


def test_what_it_draws_is_its_own() -> None:
    run = Run()
    before = torch.get_rng_state()
    states = run.learner.random_states()
    assert torch.equal(torch.get_rng_state(), before) and states != pack_random(torch.device("cpu"))
    assert states == Run().learner.random_states()
    assert run.learner.states() == states
    run.learner.kill()
    assert run.learner.states() == b""


def test_who_is_refused_raises_and_the_run_is_told() -> None:
    world = SmallWorld(epochs=1)
    learner = Builtin(world, 0, 0, Shop(1))  # type: ignore[arg-type]
    learner.start()
    learner.answer(m.Refused(UsageError("no such table")))
    world.run()
    assert [who for _, who, _ in world.heard] == ["coordinator", "raised"]
    assert "no such table" in str(world.heard[1][2])


def test_a_run_that_is_stopped_ends_it_before_its_next_gradient() -> None:
    run = Run((0, 4), (4, 8))
    run.take(run.next("note"))
    run.world.stopping = True
    run.release(1, 1)
    assert run.next("returned") is None
    assert run.learner.fiber.done and run.shop.computer.promised == [(0, [0, 1, 2, 3])]


def test_a_set_number_of_updates_ends_it() -> None:
    run = Run((0, 4), (4, 8), epochs=None, limit=1)
    run.take(run.next("note"))
    run.release(1, 1)
    assert run.next("returned") is None and run.learner.fiber.done


def test_it_waits_for_a_free_draft_and_a_pause_holds_it() -> None:
    run = Run((0, 4), sync="async", epochs=None)
    run.lane.numbers = [91, 92]  # both are out
    run.world.run()
    assert run.learner.waits_for == "a draft that is free"
    run.lane.freed[0, 92] = run.world.clock.now
    held = run.world.clock.now + 5.0
    run.learner.pause.begin(run.world.clock.now, 5.0)
    run.learner.wake()
    assert isinstance(run.next("note"), Gradient) and run.world.clock.now == held + LATENCY + SETUP
    assert run.lane.numbers == [91, 1]


@pytest.mark.parametrize("cuts", [True, False])
def test_random_states_are_said_where_checkpoints_are_written(cuts: bool) -> None:
    run = Run(saving=Saving(cuts=cuts))
    rest = run.next("note")
    assert isinstance(rest, Rest) and bool(rest.states) == cuts
    if cuts:
        farewell = run.next("note")
        assert isinstance(farewell, Farewell) and farewell.states == run.learner.random_states(marked=True)
    assert run.next("returned") is None
