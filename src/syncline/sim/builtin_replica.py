"""A built-in learner's replica: promised gradients and shared versions in place of tensors of its own; and what gives way.

`learn.stepper` says what happens when. Not responsible for data, nor for making gradients.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from syncline import messages as m
from syncline.learn.server_session import copy_all
from syncline.learn.stepper import Answer, FreeDraft, Replica, Stepper, Wait
from syncline.learn.stepper import Steps as Waits
from syncline.messages.to_leader import Gradient
from syncline.ports import FIRST_VALUES, Draft, Reading
from syncline.sim.batched.lazy_gradients import Promise, PromisedLane, Version
from syncline.sim.learner import TICKET
from syncline.sim.owned_memory import DRAFT, Drafts, Releases
from syncline.table.gradient_slot import private_slot

if TYPE_CHECKING:
    from syncline.sim.builtin_learner import Builtin

Steps = Generator[None, None, None]
TABLE = 0


class PromisedReplica(Replica):
    """Of one table, and one learner."""

    def __init__(self, learner: Builtin) -> None:
        self._learner, self._shop = learner, learner.shop
        self.stepper = Stepper(TABLE, learner.run_plan.course.first, self, learner.post)
        self.promise: Promise  # the gradient that is being made
        self._sum: Promise  # whose gradient the sum is
        self._serial, self._options = 0, b""
        self._lane: PromisedLane
        self.weights: Version
        self._newest: Version

    def open(self) -> Steps:
        learner, shop = self._learner, self._shop
        answer = yield from learner.inquire(m.Open(TABLE, shop.layout))
        if isinstance(answer, m.Initialise):
            self._initialise(answer)
            answer = yield from learner.inquire(m.Initialised(TABLE, shop.template))
        self._lane = answer.lane
        self._releases = Releases(answer.lane, shop.layout.shards)
        self._drafts = Drafts(answer.lane, shop.layout.shards, learner.clock)
        self._begin(answer)
        yield from self.drive(self.stepper.read(self.stepper.ticket()))

    def _initialise(self, answer: m.Initialise) -> None:
        shop, slot = self._shop, private_slot(self._shop.layout)
        copy_all(slot.gradients, [parameter.detach() for parameter in shop.parameters])
        answer.lane.first = slot
        answer.handle.begin(Draft(slot.gradients, shop.buffers, FIRST_VALUES, shop.tensors.others))

    def _begin(self, opened: m.Opened) -> None:
        """With the table's buffers, or where a checkpoint left this rank."""
        learner, personal = self._learner, opened.personal
        buffers = opened.handle.buffers
        if personal is not None:
            self.stepper.steps = personal.steps
            learner.step = max(learner.step, personal.steps)
            buffers = personal.buffers.get(TABLE, buffers)
            learner.kept_random = personal.random
        learner.own.buffers = [buffer.clone() for buffer in buffers]

    # -- waiting -----------------------------------------------------------------------------------------

    def drive(self, steps: Waits) -> Steps:
        """Give way until there is what they wait for."""
        found: Any = None
        while True:
            try:
                wait = steps.send(found)
            except StopIteration:
                return
            found = yield from self._await(wait)

    def _await(self, wait: Wait) -> Generator[None, None, Any]:
        learner = self._learner
        if isinstance(wait, FreeDraft):  # as one table's learners have nobody to tell, it waits at once
            return (yield from self._draft())
        if isinstance(wait, Answer):
            return (yield from learner.inquire(wait.message))
        assert wait.number is not None
        reading = self._releases.reading(wait.number)
        if reading is None and wait.block:
            there = partial(self._releases.there, wait.number)
            yield from learner.give_way(there, f"ticket {wait.number} of table {TABLE}", TICKET)
            reading = self._releases.reading(wait.number)
        return reading

    def _draft(self) -> Generator[None, None, Draft]:
        if (place := self._drafts.find()) is None:
            for time in self._drafts.known():
                self._learner.clock.at(time, self._learner.wake)
            yield from self._learner.give_way(lambda: self._drafts.find() is not None, DRAFT)
            place = self._drafts.find()
            assert place is not None
        self._drafts.hold(place)
        return Draft([], [], place)

    # -- a gradient --------------------------------------------------------------------------------------

    def fill(self, draft: Draft) -> list[bool]:
        self._sum = self._lane.slots[draft.place].promise = self.promise
        return self.added()

    def add(self, draft: Draft, *, first: bool) -> None:
        """The sum is the gradient of the first."""
        if first:
            self.fill(draft)
            return
        total, more = self._shop.computer.make(self._sum), self._shop.computer.make(self.promise)
        for index, present in enumerate(more.present):
            if present and total.present[index]:
                total.views[index].add_(more.views[index])
            elif present:
                total.views[index].copy_(more.views[index])
                total.present[index] = True
        self._sum.buffers = self.promise.buffers

    def added(self) -> list[bool]:
        gradient = self._sum.gradient
        return [] if gradient is None or all(gradient.present) else gradient.present

    def move(self, rate: float) -> None:
        """Onto weights of its own: a version is never changed."""
        gradient = self._shop.computer.make(self.promise)
        moving = [index for index, present in enumerate(gradient.present) if present]
        if moving:
            own = self._shop.versions.own(self.weights.segments)
            views = own.views
            torch._foreach_add_(
                [views[index] for index in moving],
                [gradient.views[index] for index in moving],
                alpha=-rate,
            )
            self.weights = own

    # -- what goes with it -------------------------------------------------------------------------------

    def seal(self, draft: Draft) -> int:
        learner = self._learner
        options = self._shop.options(learner.feed.epoch if learner.feed else 0)
        if options != self._options:
            self._options = options
            self._serial += 1
        self._lane.slots[draft.place].write_options(options)
        return self._serial

    def describe(self, said: Any, *, keep: bool) -> tuple[tuple[int, int, int], bytes, Any]:
        learner = self._learner
        usage = learner.take_usage()
        learner.mark_random()
        return usage, learner.random_states() if keep else b"", said

    def publish(self, draft: Draft, gradient: Gradient, present: list[bool]) -> None:
        self._lane.numbers[draft.place] = gradient.number
        self._learner.post(gradient)

    # -- reading -----------------------------------------------------------------------------------------

    def read(self, reading: Reading, *, known: bool) -> int:
        if not known:
            self._newest = self._whole(reading.version)
        self.weights = self._newest
        return self.stepper.version if known else reading.version

    def _whole(self, number: int) -> Version:
        """The version that was released, as it came."""
        arriving = self._lane.arriving
        version = arriving.pop(number)
        for old in [old for old in arriving if old < number]:
            del arriving[old]
        if self._learner.watched:
            self._learner.reads(TABLE, number, version.views)
        return version

    def begun(self) -> bool:
        return False  # every batch is a gradient

    def awaits(self, number: int) -> None:
        pass  # nothing else waits: there is one table
