"""A built-in learner's end of the table: publishes promises, waits as the dial says, reads versions (M1, M2, M9).

`learn.optimizer.SharedOptimizer` is its plain reference. Not responsible for data, nor for making gradients.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, SupportsFloat

import torch

from syncline import messages as m
from syncline.dial import Sync
from syncline.engines.sim.learner import TICKET
from syncline.engines.sim.memory import DRAFT, Drafts, Releases
from syncline.engines.sim.promises import Promise, PromisedLane, Version
from syncline.learn.session import copy_all
from syncline.messages import to_leader as say
from syncline.ports import Reading, RunStopped

if TYPE_CHECKING:
    from syncline.engines.sim.builtin import Builtin

Steps = Generator[None, None, None]
TABLE = 0


@dataclass(slots=True)
class Sum:
    """Gradients since the last push."""

    steps: int = 0
    promise: Promise | None = None  # whose gradient the sum is
    loss: SupportsFloat = float("nan")
    ticket: int = -1  # of the last push


class TableEnd:
    """One table, seen by one learner."""

    def __init__(self, learner: Builtin) -> None:
        self._learner, self._shop = learner, learner.shop
        self._turn(learner.run_plan.course.first)  # as of the last read
        self.version = -1
        self._tickets = self._steps = self._locals = 0
        self._dial = -1
        self._keep = False
        self._serial, self._options = 0, b""
        self._lane: PromisedLane
        self.weights: Version
        self._sum = Sum()
        self._place: int | None = None  # of the draft that it has
        self._fetching: tuple[int, int] | None = None  # (ticket, step by which it must be here)
        self._dials = {0: learner.run_plan.course.first}  # that it knows, by number

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
        yield from self._read(self._ticket())

    def _initialise(self, answer: m.Initialise) -> None:
        shop = self._shop
        values = self._learner.first_values(answer.handle, shop.layout)
        copy_all(values[0], [parameter.detach() for parameter in shop.parameters])
        copy_all(values[1], shop.buffers)
        copy_all(values[2], shop.tensors.others)

    def _begin(self, opened: m.Opened) -> None:
        """With the table's buffers, or where a checkpoint left this rank."""
        learner, personal = self._learner, opened.personal
        buffers = opened.handle.buffers
        if personal is not None:
            self._steps = personal.steps
            learner.step = max(learner.step, personal.steps)
            buffers = personal.buffers.get(TABLE, buffers)
            learner.keep_random(personal.random)
        learner.own.buffers = [buffer.clone() for buffer in buffers]

    # -- the step ----------------------------------------------------------------------------------------

    def step(self, promise: Promise, examples: int) -> Steps:
        """The gradient is begun: spend its time, publish it, wait, read."""
        learner = self._learner
        if learner.ending:
            raise RunStopped
        yield from learner.compute(examples)
        if self._local:
            yield from self._step_locally(promise)
        elif self._sum.steps:  # the dial has changed since: they go out together
            yield from self._add(promise)
            self._sum.loss = promise.loss
            yield from self._read(self.push())
        else:
            yield from self._draft()
            yield from self._read(self._post(promise, promise.loss))

    def _draft(self) -> Steps:
        """Have one; wait until one is free."""
        if self._place is not None:
            return
        if (place := self._drafts.find()) is None:
            self._learner.wake_at(self._drafts.known())
            yield from self._learner.give_way(lambda: self._drafts.find() is not None, DRAFT)
            place = self._drafts.find()
            assert place is not None
        self._drafts.hold(place)
        self._place = place

    def _post(self, promise: Promise, loss: SupportsFloat) -> int:
        learner, place = self._learner, self._place
        assert place is not None
        self._place = None
        full = self._fill(place, promise)
        number = self._ticket()
        usage, states = learner.take_usage(), self._states()
        gradient = say.Gradient(
            TABLE,
            number,
            self.version,
            self._steps,
            *usage,
            self._serial,
            full,
            self._local,
            states,
            loss,
        )
        self._steps += 1
        self._lane.numbers[place] = number
        learner.post(gradient)
        return number

    def _fill(self, place: int, promise: Promise) -> bool:
        """The slot, with the promise and the group options; True if every parameter has a gradient."""
        learner, slot = self._learner, self._lane.slots[place]
        options = self._shop.options(learner.feed.epoch if learner.feed else 0)
        if options != self._options:
            self._options = options
            self._serial += 1
        slot.promise = promise
        slot.write_options(options)
        return promise.gradient is None or all(promise.gradient.present)

    def _states(self) -> bytes:
        self._learner.mark_random()
        keep, self._keep = self._keep, False
        return self._learner.random_states() if keep else b""

    def farewell(self) -> None:
        """Nothing more will be published: leave the random states as of the last gradient."""
        self._learner.post(say.Farewell(TABLE, self._learner.random_states(marked=True)))

    def rest(self, upto: int) -> int:
        """Say that there is nothing to compute; the ticket with which to read afterwards."""
        number = self._ticket()
        states = self._learner.random_states() if self._learner.run_plan.saving.cuts else b""
        self._learner.post(say.Rest(TABLE, number, 0, upto, states), later=True)
        return number

    def _ticket(self) -> int:
        self._tickets += 1
        return self._tickets - 1

    # -- reading -----------------------------------------------------------------------------------------

    def _wait(self, number: int) -> Generator[None, None, Reading]:
        reading = self._releases.reading(number)
        if reading is None:
            there = partial(self._releases.there, number)
            yield from self._learner.give_way(there, f"ticket {number} of table {TABLE}", TICKET)
            reading = self._releases.reading(number)
        assert reading is not None
        return reading

    def _read(self, number: int) -> Steps:
        yield from self._take_over((yield from self._wait(number)))

    def rested(self, number: int) -> Steps:
        """There is data again; who steps by itself goes on where it was."""
        reading = yield from self._wait(number)
        if not (self.sync.local and reading.dial == self._dial):
            yield from self._take_over(reading)

    def _take_over(self, reading: Reading) -> Steps:
        self._keep = reading.keep
        if reading.dial != self._dial:
            if reading.dial not in self._dials:
                self._dials[reading.dial] = yield from self._learner.inquire(m.AskDial(reading.dial))
            self._dial = reading.dial
            self._turn(self._dials[reading.dial])
        if reading.version != self.version:
            self._newest = self._whole(reading.version)
            self.version = reading.version
        self.weights = self._newest

    def _turn(self, sync: Sync) -> None:
        """Another dial."""
        self.sync, self._fetching = sync, None
        self._local = sync.local

    def _whole(self, number: int) -> Version:
        """The version that was released, as it came."""
        arriving = self._lane.arriving
        version = arriving.pop(number)
        for old in [old for old in arriving if old < number]:
            del arriving[old]
        if self._learner.watched:
            self._learner.reads(TABLE, number, version.views)
        return version

    # -- local steps (M9) --------------------------------------------------------------------------------

    def _step_locally(self, promise: Promise) -> Steps:
        """Move by itself, add to the sum, push and fetch when their steps have come."""
        self._sum.loss = promise.loss
        if self.sync.fetch > 1:
            self._move(promise)
        yield from self._add(promise)
        self._locals += 1
        if self._sum.steps >= self.sync.push:
            self.push()
        if self._locals % self.sync.fetch == 0 and self._fetching is None:
            self._fetching = (self._fetch(), self._locals + self.sync.fetch - 1)
        yield from self._fetched()

    def _move(self, promise: Promise) -> None:
        """Onto weights of its own: a version is never changed."""
        gradient = self._shop.computer.make(promise)
        moving = [index for index, present in enumerate(gradient.present) if present]
        if moving:
            assert self.sync.local_lr is not None
            own = self._shop.versions.own(self.weights.segments)
            views = own.views
            torch._foreach_add_(
                [views[index] for index in moving],
                [gradient.views[index] for index in moving],
                alpha=-self.sync.local_lr,
            )
            self.weights = own

    def _add(self, promise: Promise) -> Steps:
        """To the sum, which is the gradient of the first."""
        total = self._sum
        total.steps += 1
        if total.promise is None:
            yield from self._draft()
            total.promise = promise
        else:
            self._add_up(total.promise, promise)

    def _add_up(self, total: Promise, promise: Promise) -> None:
        first, more = self._shop.computer.make(total), self._shop.computer.make(promise)
        for index, present in enumerate(more.present):
            if present and first.present[index]:
                first.views[index].add_(more.views[index])
            elif present:
                first.views[index].copy_(more.views[index])
                first.present[index] = True
        total.buffers = promise.buffers

    def push(self) -> int:
        """Publish the sum, be it of fewer steps than the dial says; its ticket, or the last without one."""
        total = self._sum
        if total.promise is None:
            return self._tickets - 1
        promise, total.promise = total.promise, None
        total.ticket = self._post(promise, total.loss)
        total.steps = 0
        return total.ticket

    def _fetched(self) -> Steps:
        """Take over what was fetched, if it is here or overdue; own movement since is lost (M9)."""
        if self._fetching is None:
            return
        number, due = self._fetching
        reading = self._releases.reading(number)
        if self._locals >= due:
            reading = yield from self._wait(number)
        if reading is None:
            return
        self._fetching = None
        if reading.dial != self._dial and self._sum.ticket > number:
            reading = yield from self._wait(self._fetch())  # pushed since: it may be folded while this reads
        yield from self._take_over(reading)

    def _fetch(self) -> int:
        number = self._ticket()
        self._learner.post(say.Fetch(TABLE, number))
        return number
