"""A built-in learner's end of the table: publishes promises, waits as the dial says, reads versions (M1, M2, M9).

`learn.optimizer.SharedOptimizer` is its plain reference. Not responsible for data, nor for making gradients.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, SupportsFloat

import torch

from syncline.dial import Sync
from syncline.engines.sim.learner import TICKET
from syncline.engines.sim.memory import Releases
from syncline.engines.sim.promises import Promise, PromisedLane, Version
from syncline.learn.session import copy_all
from syncline.ports import KEEP, SILENT, STATES, Kind, Note, Reading, RunStopped, gradient_note
from syncline.topology import messages as m

if TYPE_CHECKING:
    from syncline.engines.sim.builtin import Builtin

Steps = Generator[None, None, None]
TABLE = 0


@dataclass(slots=True)
class Sum:
    """Gradients since the last push."""

    steps: int = 0
    slot: int = 0
    promise: Promise | None = None  # whose gradient the sum is
    loss: SupportsFloat = float("nan")
    tickets: dict[int, int] = field(default_factory=dict)  # slot -> the ticket it was last published with


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
        self._fetching: tuple[int, int] | None = None  # (ticket, step by which it must be here)

    def open(self) -> Steps:
        learner, shop = self._learner, self._shop
        answer = yield from learner.ask(m.Open(TABLE, shop.layout))
        if isinstance(answer, m.Initialise):
            self._initialise(answer)
            answer = yield from learner.ask(m.Initialised(TABLE, shop.template))
        self._lane = answer.lane
        self._memory = answer.handle
        self._releases = Releases(answer.lane, shop.layout.shards)
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
            index = self._steps % self._slots
            yield from self._read(self._post(index, promise, promise.loss))

    def _post(self, index: int, promise: Promise, loss: SupportsFloat) -> int:
        learner = self._learner
        full = self._fill(index, promise)
        number = self._ticket()
        usage, slot = learner.take_usage(), (index, self._serial, full)
        flags = self._flags(index)
        note = gradient_note(TABLE, number, self.version, self._steps, usage, slot, flags, loss)
        self._steps += 1
        learner.post(note)
        return number

    def _fill(self, index: int, promise: Promise) -> bool:
        """The slot, with the promise and the group options; True if every parameter has a gradient."""
        learner, slot = self._learner, self._lane.slots[index]
        options = self._shop.options(learner.feed.epoch if learner.feed else 0)
        if options != self._options:
            self._options = options
            self._serial += 1
        slot.promise = promise
        slot.write_options(options)
        return promise.gradient is None or all(promise.gradient.present)

    def _flags(self, index: int) -> int:
        flags = SILENT if self._local else 0
        self._learner.mark_random()
        if self._keep:  # a checkpoint follows
            self._keep = False
            self._lane.slots[index].write_states(self._learner.random_states())
            flags |= STATES
        return flags

    def farewell(self) -> None:
        """Nothing more will be published: leave the random states as of the last gradient."""
        self._lane.slots[0].write_states(self._learner.random_states(marked=True))
        self._learner.post(Note(Kind.FAREWELL, TABLE, flags=STATES))

    def rest(self, upto: int) -> int:
        """Say that there is nothing to compute; the ticket with which to read afterwards."""
        number, flags = self._ticket(), 0
        if self._learner.run_plan.saving.cuts:
            self._lane.slots[0].write_states(self._learner.random_states())
            flags = STATES
        note = Note(Kind.REST, TABLE, number, loader=0, upto=upto, flags=flags)
        self._learner.post(note, ring=False)
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
        self._take_over((yield from self._wait(number)))

    def rested(self, number: int) -> Steps:
        """There is data again; who steps by itself goes on where it was."""
        reading = yield from self._wait(number)
        if not (self.sync.local and reading.dial == self._dial):
            self._take_over(reading)

    def _take_over(self, reading: Reading) -> None:
        self._keep = bool(reading.flags & KEEP)
        if reading.dial != self._dial:
            self._dial = reading.dial
            self._turn(self._learner.dial(reading.dial))
        if reading.version != self.version:
            self._newest = self._whole(reading.version)
            self.version = reading.version
        self.weights = self._newest

    def _turn(self, sync: Sync) -> None:
        """Another dial."""
        self.sync, self._fetching = sync, None
        self._local, self._slots = sync.local, sync.delay + 1

    def _whole(self, number: int) -> Version:
        """The version that was released: as it came, or from the table, which holds still in lockstep."""
        arriving = self._lane.arriving
        version = arriving.pop(number, None)
        for old in [old for old in arriving if old < number]:
            del arriving[old]
        if version is None:
            memory = self._memory
            source = memory.history[number % len(memory.history)] if self.sync.delay else memory.weights
            self._shop.computer.settle()
            version = self._shop.versions.whole(number, source)
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
            total.slot = (total.slot + 1) % len(self._lane.slots)
            yield from self._wait_free(total.tickets.get(total.slot, 0))
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

    def _wait_free(self, number: int) -> Steps:
        """The slot of this ticket may be used again."""
        yield from self._learner.give_way(lambda: self._releases.free(number), f"the slot of ticket {number}")

    def push(self) -> int:
        """Publish the sum, be it of fewer steps than the dial says; its ticket, or the last without one."""
        total = self._sum
        if total.promise is None:
            return self._tickets - 1
        promise, total.promise = total.promise, None
        total.tickets[total.slot] = self._post(total.slot, promise, total.loss)
        total.steps = 0
        return total.tickets[total.slot]

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
        if reading.dial != self._dial and any(ticket > number for ticket in self._sum.tickets.values()):
            reading = yield from self._wait(self._fetch())  # pushed since: it may be folded while this reads
        self._take_over(reading)

    def _fetch(self) -> int:
        number = self._ticket()
        self._learner.post(Note(Kind.FETCH, TABLE, number))
        return number
