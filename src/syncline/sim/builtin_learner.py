"""A built-in learner: `train`'s loop as a handler of events, without a thread.

It says to coordinator and leading shard exactly what `run_training` says through a session: `learn.training`,
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
from syncline.learn.server_session import copy_all
from syncline.learn.stepper import Answer, FeedWait, FreeDraft, Portions, Replica, Rested, Stepper, Wait
from syncline.learn.stepper import Steps as Waits
from syncline.messages.to_leader import Farewell, Gradient
from syncline.ports import FIRST_VALUES, Draft, Portion, Reading, RunStopped
from syncline.sim.batched.lazy_gradients import Own, Promise, PromisedLane, Version
from syncline.sim.clock import Clock
from syncline.sim.fibers import Handler
from syncline.sim.learner import COMPUTING, TICKET, WAITING, SimLearner
from syncline.sim.owned_memory import DRAFT, Drafts, Releases
from syncline.sim.random_states import Random
from syncline.table.gradient_slot import private_slot

if TYPE_CHECKING:
    from syncline.sim.batched.shared_model import SharedModel
    from syncline.sim.simulation import Simulation

Steps = Generator[None, None, None]
LOADER = TABLE = 0
CPU = torch.device("cpu")


class Builtin(SimLearner):
    """One learner of `train`, as a handler."""

    def __init__(self, world: Simulation, learner: int, rank: int, shop: SharedModel) -> None:
        self.shop = shop
        super().__init__(world, learner, rank)
        self.run_plan = world.spec.plan
        self.table: PromisedReplica | None = None
        self.feed: Feed | None = None
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
        outside = Random()
        seed_random(self.run_plan.seed + self.rank)
        own = Own(self.rank, Random(), [])
        outside.restore()
        return own

    def _make_replica(self) -> PromisedReplica:
        return PromisedReplica(self)

    def _life(self) -> Steps:
        table = self.table = self._make_replica()
        yield from table.open()
        feed = self.feed = Feed(self)
        yield from feed.open()
        epochs = self.shop.plan.epochs
        try:
            while not self.ending and (epochs is None or feed.epoch < epochs):
                yield from self._epoch(table, feed)
        except RunStopped:
            feed.leave()
        if not self.ending:
            table.stepper.push()
        if self.run_plan.saving.cuts:  # nothing more is published: the random states of the last gradient
            self.post(Farewell(TABLE, self.random_states(marked=True)))

    def _epoch(self, table: PromisedReplica, feed: Feed) -> Steps:
        self._restore_random()
        feed.begin()
        while not self.ending or feed.waiting:
            yield from feed.fetch()
            if not feed.waiting:
                break
            portion = feed.waiting.pop(0)
            self._fresh, self._used = True, portion.number + 1
            self._count += portion.stop - portion.start
            table.promise = self._promise(table, portion, feed.parts)
            if self.ending:
                raise RunStopped
            yield from self.compute(self._count)
            yield from table.drive(table.stepper.step(table.promise.loss))
        feed.leave()

    def _promise(self, table: PromisedReplica, portion: Portion, parts: int) -> Promise:
        indices = self.shop.indices(portion.epoch, portion.start, portion.stop, parts)
        promise = Promise(table.weights, indices, portion.stop - portion.start, self.own)
        self.shop.computer.promise(promise)
        return promise

    # -- waiting, as a session does ----------------------------------------------------------------------

    def give_way(self, ready: Callable[[], Any], what: str, time: str = WAITING) -> Steps:
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

    @property
    def clock(self) -> Clock:
        return self._world.clock

    def inquire(self, message: Any) -> Generator[None, None, Any]:
        """Ask the coordinator; its answer."""
        self.tell(message)
        yield from self.give_way(lambda: bool(self._answers), f"an answer to {type(message).__name__}")
        answer = self._answers.pop()
        if isinstance(answer, m.Refused):
            raise answer.error
        return answer

    def compute(self, examples: int) -> Steps:
        """The time of one gradient."""
        self._begin_computing(examples)
        yield from self.give_way(lambda: not self.pause.working, "its own computation", COMPUTING)

    @property
    def ending(self) -> bool:
        world, limit = self._world, self.run_plan.limit
        if limit is not None and self.table is not None and self.table.stepper.version >= limit:
            return True
        return world.stopping or self.dead or world.recorder.error is not None

    def rest(self, loader: int, index: int) -> None:
        """Nothing to compute: nobody need wait for this learner."""
        assert self.table is not None
        if self._rests is None:
            states = self.random_states() if self.run_plan.saving.cuts else b""
            self._rests = self.table.stepper.rest(loader, index, states, later=True)

    @property
    def resting(self) -> bool:
        return self._rests is not None

    def rested(self) -> Steps:
        """There is data again: read what the others have by now."""
        assert self.table is not None
        if self._rests is not None:
            yield from self.table.drive(self.table.stepper.rested(self._rests))
            self._rests = None

    def ended(self, index: int) -> None:
        """The epoch is over, and its batches are in gradients."""
        assert self.table is not None
        if not self._fresh and not self.table.stepper.sync.lockstep:
            self.rest(LOADER, index)

    def take_usage(self) -> tuple[int, int, int]:
        """(examples, loader, portions used) of the gradient that is published now."""
        count, self._count = self._count, 0
        self._rests = None
        fresh, self._fresh = self._fresh, False
        return count or 1, LOADER if fresh else -1, self._used if fresh else 0

    # -- random states -----------------------------------------------------------------------------------

    def _restore_random(self) -> None:
        if self.kept_random:
            outside = Random()
            unpack_random(self.kept_random, CPU)
            self.own.random.save()
            outside.restore()
            self.kept_random = b""

    def mark_random(self) -> None:
        """A gradient is published: what torch draws from here on belongs to the next."""
        if self.run_plan.saving.cuts:
            self._mark = self.own.random.torch

    def states(self) -> bytes:
        return self.random_states() if self.started and not self.dead else b""

    def random_states(self, *, marked: bool = False) -> bytes:
        outside = Random()
        self.own.random.restore()
        try:
            return pack_random(CPU, self._mark if marked else None)
        finally:
            outside.restore()


class Feed:
    """A built-in learner's loader: which portions it has ahead of their use."""

    def __init__(self, learner: Builtin) -> None:
        self._learner, self._shop = learner, learner.shop
        self.parts = 1
        self.waiting: list[Portion] = []  # handed out ahead of their use
        self._portion = Portions(LOADER, learner.post, learner.rest, lambda: learner.resting)
        self._wanted = AHEAD + self._shop.ahead
        self._more = True

    @property
    def epoch(self) -> int:
        return self._portion.epoch

    def open(self) -> Steps:
        learner, plan = self._learner, self._shop.plan
        opening = m.OpenLoader(LOADER, self._shop.size, plan.batch_size, plan.policy, learner.run_plan.epochs)
        self.parts = yield from learner.inquire(opening)
        yield from self._drive(self._portion.welcome())

    def begin(self) -> None:
        """A further epoch."""
        self._portion.enter()
        self._more = True

    def fetch(self) -> Steps:
        """Have the next portion, and as many after it as are read ahead."""
        ahead = self._shop.ahead
        while self._more and len(self.waiting) <= ahead and not self._learner.ending:
            portion = self._at_hand()
            if portion is None:
                portion = yield from self._drive(self._portion.next(self._wanted, block=not self.waiting))
            if portion is None:
                break
            self._more = not portion.end
            if self._more:
                self.waiting.append(portion)

    def leave(self) -> None:
        """The epoch is over for this learner."""
        assert self._learner.table is not None
        self._learner.table.stepper.push()
        if self._portion.ended:
            self._learner.ended(self._portion.index)
        self._portion.leave()

    def _drive(self, steps: Generator[FeedWait, Any, Any]) -> Generator[None, None, Any]:
        """Give way until there is what they wait for."""
        learner, found = self._learner, None
        portions = learner.portions
        while True:
            try:
                wait = steps.send(found)
            except StopIteration as done:
                return done.value
            found = None
            if isinstance(wait, Rested):
                yield from learner.rested()
                continue
            key = (wait.loader, wait.number)
            if wait.block:
                there = partial(self._there, key)
                yield from learner.give_way(there, f"data of loader {LOADER}")
            found = portions.pop(key, None)

    def _there(self, key: tuple[int, int]) -> bool:
        return key in self._learner.portions or self._learner.stopping()

    def _at_hand(self) -> Portion | None:
        """What `next` gives in most cases, for less."""
        portion = self._portion
        if not portion.at_hand():
            return None
        portion.ask(self._wanted)
        return portion.seen(self._learner.portions.pop((LOADER, portion.index), None))


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
            there = partial(self._releases.reading, wait.number)
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
