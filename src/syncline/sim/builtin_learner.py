"""A built-in learner: `train`'s loop as a handler of events, without a thread.

It says to coordinator and leading shard exactly what `run_training` says through a session: `learn.train_and_evaluate`,
`learn.session` and `learn.feed` are its plain reference, tests compare the two to the bit. A generator that gives way where a session
would block; `learn.stepper` says what happens when. Its replica has promised gradients and shared versions in place of tensors of
its own (`batched.lazy_gradients`); nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from syncline import messages as m
from syncline.errors import InvariantError
from syncline.learn.loader import AHEAD
from syncline.learn.model_factories import pack_random, seed_random, unpack_random
from syncline.learn.session import copy_all
from syncline.learn.stepper import FeedWait, FreeDraft, Portions, Replica, Rested, Stepper
from syncline.learn.stepper import Steps as Waits
from syncline.messages.to_leader import Farewell, Gradient
from syncline.ports import FIRST_VALUES, Draft, Portion, Reading, RunStopped
from syncline.sim.batched.lazy_gradients import Own, Promise, PromisedLane, Version
from syncline.sim.fibers import Handler
from syncline.sim.learner import COMPUTING, TICKET, WAITING, SimLearner
from syncline.sim.owned_memory import DRAFT
from syncline.sim.random_states import Random
from syncline.table.gradient_slot import private_slot

if TYPE_CHECKING:
    from syncline.sim.batched.shared_model import SharedModel
    from syncline.sim.simulation import Simulation

Steps = Generator[None, None, None]
LOADER = TABLE = 0
CPU = torch.device("cpu")


class Builtin(SimLearner):
    """One learner of `train`, as a handler; its loader is its own, its table's end a `PromisedReplica`."""

    def __init__(self, world: Simulation, learner: int, rank: int, shop: SharedModel) -> None:
        self.shop = shop
        super().__init__(world, learner, rank)
        self.run_plan = world.spec.plan
        self.table: PromisedReplica | None = None
        self._portion = Portions(LOADER, self.post, self._rest, lambda: self._rests is not None)
        self._read: list[Portion] = []  # handed out ahead of their use
        self._ahead = shop.ahead
        self._more = True  # portions in this epoch
        self._rests: int | None = None  # the ticket with which it reads after its rest
        self._fresh = False  # batches since the last gradient was published
        self._count = self._used = 0
        self._mark: torch.Tensor | None = None
        self._ready: Callable[[], Any] = lambda: True
        self.kept_random = b""  # of a run that goes on: in force with the first batch

    def _make_fiber(self) -> Handler:
        return Handler(self._main_steps())

    def _main_steps(self) -> Steps:
        try:
            self.own = self._make_own()
            yield from self._life()
            self.leave(lambda: self._world.returned(self, None))
        except InvariantError as error:
            self._world.fail(error)
        except Exception as error:
            self._raised(error)

    def _resume(self) -> None:
        self.fiber.resume()

    def _make_own(self) -> Own:
        states = Random()
        with states.drawn():
            seed_random(self.run_plan.seed + self.rank)
        return Own(self.rank, states, [])

    def _make_replica(self) -> PromisedReplica:
        return PromisedReplica(self)

    def _life(self) -> Steps:
        table, plan = self._make_replica(), self.shop.plan
        self.table = table
        yield from table.open()
        opening = m.OpenLoader(LOADER, self.shop.size, plan.batch_size, plan.policy, self.run_plan.epochs)
        parts = yield from self.inquire(opening)
        yield from self._drive(self._portion.welcome())
        try:
            while not self.ending and (plan.epochs is None or self.epoch < plan.epochs):
                yield from self._epoch(table, parts)
        except RunStopped:
            self._leave_epoch(table.stepper)
        if not self.ending:
            table.stepper.push()
        if self.run_plan.saving.cuts:  # nothing more is published: the random states of the last gradient
            self.post(Farewell(TABLE, self.random_states(marked=True)))

    def _epoch(self, table: PromisedReplica, parts: int) -> Steps:
        if self.kept_random:
            with self.own.random.drawn():
                unpack_random(self.kept_random, CPU)
            self.kept_random = b""
        self._more = True
        while not self.ending or self._read:
            yield from self._fetch()
            if not self._read:
                break
            portion = self._read.pop(0)
            self._fresh, self._used = True, portion.number + 1
            self._count += portion.stop - portion.start
            table.promise = self._promise(table, portion, parts)
            if self.ending:
                raise RunStopped
            self._begin_computing(self._count)
            yield from self.give_way(lambda: not self.pause.working, "its own computation", COMPUTING)
            yield from table.drive(table.stepper.step(table.promise.loss))
        self._leave_epoch(table.stepper)

    def _leave_epoch(self, stepper: Stepper) -> None:
        """It is over for this learner."""
        stepper.push()
        if self._portion.ended and not self._fresh and not stepper.sync.lockstep:
            self._rest(LOADER, self._portion.index)
        self._portion.leave()

    def _promise(self, table: PromisedReplica, portion: Portion, parts: int) -> Promise:
        indices = self.shop.indices(portion.epoch, portion.start, portion.stop, parts)
        promise = Promise(table.weights, indices, portion.stop - portion.start, self.own)
        self.shop.computer.promise(promise)
        return promise

    # -- portions of data --------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        return self._portion.epoch

    def _fetch(self) -> Steps:
        """Have the next portion, and as many after it as are read ahead."""
        feed, wanted = self._portion, AHEAD + self._ahead
        while self._more and len(self._read) <= self._ahead and not self.ending:
            portion = None
            if feed.at_hand():  # what `next` gives in most cases, for less
                feed.ask(wanted)
                portion = feed.seen(self.portions.pop((LOADER, feed.index), None))
            if portion is None:
                portion = yield from self._drive(feed.next(wanted, block=not self._read))
            if portion is None:
                break
            self._more = not portion.end
            if self._more:
                self._read.append(portion)

    def _drive(self, steps: Generator[FeedWait, Any, Any]) -> Generator[None, None, Any]:
        """Give way until there is what they wait for."""
        found = None
        while True:
            try:
                wait = steps.send(found)
            except StopIteration as done:
                return done.value
            found = None
            if not isinstance(wait, Rested):
                key = (wait.loader, wait.number)
                if wait.block:
                    yield from self.give_way(partial(self._there, key), f"data of loader {LOADER}")
                found = self.portions.pop(key, None)
            elif self._rests is not None:  # there is data again: read what the others have by now
                assert self.table is not None
                yield from self.table.drive(self.table.stepper.rested(self._rests))
                self._rests = None

    def _there(self, key: tuple[int, int]) -> bool:
        return key in self.portions or self.stopping()

    def _rest(self, loader: int, index: int) -> None:
        """Nothing to compute: nobody need wait for this learner."""
        assert self.table is not None
        if self._rests is None:
            states = self.random_states() if self.run_plan.saving.cuts else b""
            self._rests = self.table.stepper.rest((loader, index), states, later=True)

    def take_usage(self) -> tuple[int, int, int]:
        """(examples, loader, portions used) of the gradient that is published now; what torch draws from here on is the next's."""
        count, self._count = self._count, 0
        self._rests = None
        fresh, self._fresh = self._fresh, False
        if self.run_plan.saving.cuts:
            self._mark = self.own.random.torch
        return count or 1, LOADER if fresh else -1, self._used if fresh else 0

    # -- waiting, as a session does ----------------------------------------------------------------------

    def give_way(self, ready: Callable[[], Any], what: str, time: int = WAITING) -> Steps:
        """Until it is so: who wakes it looks first."""
        began = self._world.clock.now
        if not ready():
            self.waits_for, self._ready = what, ready
            yield
            self.waits_for = None
        self.passed(began, time)

    def wake(self) -> None:
        if self.waits_for is None or not self._ready() or self.fiber.done:
            return
        clock, until = self._world.clock, self.pause.until
        if clock.now < until:
            clock.at(until, self.wake)
        else:
            self.fiber.resume()  # it draws only where a gradient is made, from its own states

    def inquire(self, message: Any) -> Generator[None, None, Any]:
        """Ask the coordinator; its answer."""
        self.tell(message)
        yield from self.give_way(lambda: bool(self._answers), f"an answer to {type(message).__name__}")
        answer = self._answers.pop()
        if isinstance(answer, m.Refused):
            raise answer.error
        return answer

    @property
    def ending(self) -> bool:
        world, limit = self._world, self.run_plan.limit
        if limit is not None and self.table is not None and self.table.stepper.version >= limit:
            return True
        return world.stopping or self.dead or world.recorder.error is not None

    # -- random states -----------------------------------------------------------------------------------

    def states(self) -> bytes:
        return self.random_states() if self.started and not self.dead else b""

    def random_states(self, *, marked: bool = False) -> bytes:
        with self.own.random.drawn():
            return pack_random(CPU, self._mark if marked else None)


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
            self._begin(answer)
            answer = yield from learner.inquire(m.Initialised(TABLE, shop.template))
        self._lane = answer.lane
        self._begin(answer)
        yield from self.drive(self.stepper.read(self.stepper.ticket()))

    def _begin(self, answer: m.Initialise | m.Opened) -> None:
        """First values; else with the table's buffers, or where a checkpoint left this rank."""
        learner, shop = self._learner, self._shop
        if isinstance(answer, m.Initialise):
            slot = answer.lane.first = private_slot(shop.layout)
            copy_all(slot.gradients, [parameter.detach() for parameter in shop.tensors.parameters])
            answer.handle.begin(
                Draft(slot.gradients, shop.tensors.buffers, FIRST_VALUES, shop.tensors.others)
            )
            return
        personal, buffers = answer.personal, answer.handle.buffers
        if personal is not None:
            self.stepper.steps = personal.steps
            learner.step = max(learner.step, personal.steps)
            buffers = personal.buffers.get(TABLE, buffers)
            learner.kept_random = personal.random
        learner.own.buffers = [buffer.clone() for buffer in buffers]

    def drive(self, steps: Waits) -> Steps:
        """Give way until there is what they wait for."""
        learner, reading = self._learner, self._lane.reading
        found: Any = None
        while True:
            try:
                wait = steps.send(found)
            except StopIteration:
                return
            if isinstance(wait, FreeDraft):  # as one table's learners have nobody to tell, it waits at once
                found = yield from self._draft()
            elif isinstance(wait, m.AskDial):
                found = yield from learner.inquire(wait)
            else:
                assert wait.number is not None
                found = reading(wait.number)
                if found is None and wait.block:
                    what = f"ticket {wait.number} of table {TABLE}"
                    yield from learner.give_way(partial(reading, wait.number), what, TICKET)
                    found = reading(wait.number)

    def _draft(self) -> Generator[None, None, Draft]:
        lane = self._lane
        if (place := lane.free_slot()) is None:
            lane.plan(self._learner.wake)
            yield from self._learner.give_way(lambda: lane.free_slot() is not None, DRAFT)
            place = lane.free_slot()
            assert place is not None
        lane.hold(place)
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
            own = self._shop.computer.versions.own(self.weights.segments)
            views = own.views
            torch._foreach_add_(
                [views[index] for index in moving],
                [gradient.views[index] for index in moving],
                alpha=-rate,
            )
            self.weights = own

    # -- what goes with it -------------------------------------------------------------------------------

    def seal(self, draft: Draft, said: Any, *, keep: bool) -> tuple[tuple[int, int, int], int, bytes, Any]:
        learner = self._learner
        options = self._shop.options(learner.epoch)
        if options != self._options:
            self._options = options
            self._serial += 1
        self._lane.slots[draft.place].write_options(options)
        return learner.take_usage(), self._serial, learner.random_states() if keep else b"", said

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
