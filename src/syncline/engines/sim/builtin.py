"""A built-in learner: `train`'s loop as a handler of events, without a thread.

It says to coordinator and leading shard exactly what `run_training` says through a session: `learn.training`,
`learn.session` and `learn.feed` are its plain reference, tests compare the two to the bit. A generator that gives way where a session
would block. Gradients are promised (`promises`), not made here.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import torch

from syncline import messages as m
from syncline.engines.record import learner_error
from syncline.engines.sim.clock import Clock
from syncline.engines.sim.fibers import Handler
from syncline.engines.sim.learner import WAITING, SimLearner
from syncline.engines.sim.promises import Own, Promise
from syncline.engines.sim.states import Random
from syncline.engines.sim.stepping import TableEnd
from syncline.errors import InvariantError
from syncline.learn.feed import AHEAD
from syncline.learn.randomness import pack_random, seed_random, unpack_random
from syncline.messages.to_leader import AskBatch, Blocked
from syncline.ports import OUTSIDE, Portion, RunStopped

if TYPE_CHECKING:
    from syncline.engines.sim.workshop import Workshop
    from syncline.engines.sim.world import World

Steps = Generator[None, None, None]
LOADER = 0
CPU = torch.device("cpu")


class Builtin(SimLearner):
    """One learner of `train`, as a handler."""

    def __init__(self, world: World, learner: int, rank: int, shop: Workshop) -> None:
        self.shop = shop
        super().__init__(world, learner, rank)
        self.run_plan = world.spec.plan
        self.table: TableEnd | None = None
        self.feed: Feed | None = None
        self._rests: int | None = None  # the ticket with which it reads after its rest
        self._fresh = False  # batches since the last gradient was published
        self._count = self._used = 0
        self._mark: torch.Tensor | None = None
        self._ready: Callable[[], bool] = lambda: True
        self._kept_random = b""

    def _make_fiber(self) -> Handler:
        return Handler(self._main_steps())

    def _main_steps(self) -> Steps:
        try:
            self.own = self._make_own()
            yield from self._life()
            self.send(lambda: self._world.returned(self, None))
        except InvariantError as error:
            self._world.fail(error)
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            failure = learner_error(self.rank, error, text)
            self.send(lambda: self._world.raised(self, failure))

    def _resume(self) -> None:
        self.fiber.resume()

    def _make_own(self) -> Own:
        outside = Random()
        seed_random(self.run_plan.seed + self.rank)
        own = Own(self.rank, Random(), [])
        outside.restore()
        return own

    def _make_end(self) -> TableEnd:
        return TableEnd(self)

    def _life(self) -> Steps:
        table = self.table = self._make_end()
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
            table.push()
        if self.run_plan.saving.cuts:
            table.farewell()

    def _epoch(self, table: TableEnd, feed: Feed) -> Steps:
        self._restore_random()
        feed.begin()
        while not self.ending or feed.waiting:
            yield from feed.fetch()
            portion = feed.take()
            if portion is None:
                break
            self._fresh, self._used = True, portion.number + 1
            self._count += portion.stop - portion.start
            promise = self._promise(table, portion, feed.parts)
            yield from table.step(promise, self._count)
        feed.leave()

    def _promise(self, table: TableEnd, portion: Portion, parts: int) -> Promise:
        indices = self.shop.indices(portion.epoch, portion.start, portion.stop, parts)
        promise = Promise(table.weights, indices, portion.stop - portion.start, self.own)
        self.shop.computer.promise(promise)
        return promise

    # -- waiting, as a session does ----------------------------------------------------------------------

    def give_way(self, ready: Callable[[], bool], what: str, time: str = WAITING) -> Steps:
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

    def wake_at(self, times: list[float]) -> None:
        for time in times:
            self._world.clock.at(time, self.wake)

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
        clock = self._world.clock
        began = clock.now
        self._begin_computing(examples)
        self.waits_for, self._ready = "its own computation", self._idle
        yield
        self.waits_for = None
        self._compute += clock.now - began

    def _idle(self) -> bool:
        return not self.pause.working

    @property
    def ending(self) -> bool:
        world, limit = self._world, self.run_plan.limit
        if limit is not None and self.table is not None and self.table.version >= limit:
            return True
        return world.stopping or self.dead or world.recorder.error is not None

    def rest(self, index: int) -> None:
        """Nothing to compute: nobody need wait for this learner."""
        assert self.table is not None
        if self._rests is None:
            self._rests = self.table.rest(index)

    @property
    def resting(self) -> bool:
        return self._rests is not None

    def rested(self) -> Steps:
        """There is data again: read what the others have by now."""
        assert self.table is not None
        if self._rests is not None:
            yield from self.table.rested(self._rests)
            self._rests = None

    def ended(self, index: int) -> None:
        """The epoch is over, and its batches are in gradients."""
        assert self.table is not None
        if not self._fresh and not self.table.sync.lockstep:
            self.rest(index)

    def take_usage(self) -> tuple[int, int, int]:
        """(examples, loader, portions used) of the gradient that is published now."""
        count, self._count = self._count, 0
        self._rests = None
        fresh, self._fresh = self._fresh, False
        return count or 1, LOADER if fresh else -1, self._used if fresh else 0

    # -- random states -----------------------------------------------------------------------------------

    def keep_random(self, states: bytes) -> None:
        """Of a run that goes on: in force with the first batch."""
        self._kept_random = states

    def _restore_random(self) -> None:
        if self._kept_random:
            outside = Random()
            unpack_random(self._kept_random, CPU)
            self.own.random.save()
            outside.restore()
            self._kept_random = b""

    def mark_random(self) -> None:
        """A gradient is published: what torch draws from here on belongs to the next."""
        if self.run_plan.saving.cuts:
            self._mark = self.own.random.torch_state

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
    """A built-in learner's loader: asks for portions and takes them in their order, as `learn.feed.Loader` does."""

    def __init__(self, learner: Builtin) -> None:
        self._learner, self._shop = learner, learner.shop
        self.epoch = 0
        self.parts = 1
        self.waiting: list[Portion] = []  # handed out ahead of their use
        self._index = self._asked = 0
        self._asking = AskBatch(LOADER, 0)
        self._started = self._ended = False
        self._more = True

    def open(self) -> Steps:
        learner, plan = self._learner, self._shop.plan
        opening = m.OpenLoader(LOADER, self._shop.size, plan.batch_size, plan.policy, learner.run_plan.epochs)
        self.parts = yield from learner.inquire(opening)
        first = yield from self._portion(OUTSIDE)
        self.epoch = first.epoch if first else self.epoch

    def begin(self) -> None:
        """A further epoch."""
        self._started, self._more = False, True

    def fetch(self) -> Steps:
        """Have the next portion, and as many after it as are read ahead."""
        ahead = self._shop.ahead
        while self._more and len(self.waiting) <= ahead and not self._learner.ending:
            portion = self._at_hand() or (yield from self._next(block=not self.waiting))
            if portion is None:
                break
            self._more = not portion.end
            if self._more:
                self.waiting.append(portion)

    def take(self) -> Portion | None:
        return self.waiting.pop(0) if self.waiting else None

    def leave(self) -> None:
        """The epoch is over for this learner."""
        assert self._learner.table is not None
        self._learner.table.push()
        if self._ended:
            self._learner.ended(self._index)
        self._ended = False
        self.epoch += 1

    def _portion(self, index: int) -> Generator[None, None, Portion | None]:
        learner, key = self._learner, (LOADER, index)
        portions = learner.portions
        yield from learner.give_way(lambda: key in portions or learner.stopping(), f"data of loader {LOADER}")
        return portions.pop(key, None)

    def _ask(self) -> None:
        wanted = self._index + AHEAD + self._shop.ahead
        if self._asked < wanted and self._asking.epoch != self.epoch:
            self._asking = AskBatch(LOADER, self.epoch)
        while self._asked < wanted:
            self._learner.post(self._asking, later=True)
            self._asked += 1

    def _next(self, *, block: bool) -> Generator[None, None, Portion | None]:
        """The next portion of this epoch; None: not there (or the run ends)."""
        learner = self._learner
        if not self._started:
            self._started = True
            if self._index > 0:  # a further epoch begins, for all at once: rest before asking
                learner.rest(self._index)
                self._ask()
                return self._seen((yield from self._rest_until()))
        self._ask()
        portion = learner.portions.pop((LOADER, self._index), None)
        if portion is None and block:
            learner.rest(self._index)
            portion = yield from self._rest_until()
        elif portion is not None and learner.resting:
            learner.rest(self._index)
            yield from learner.rested()
        return self._seen(portion)

    def _at_hand(self) -> Portion | None:
        """What `_next` gives in most cases, for less."""
        learner = self._learner
        if not self._started or learner.resting:
            return None
        self._ask()
        portion = learner.portions.pop((LOADER, self._index), None)
        return None if portion is None else self._seen(portion)

    def _rest_until(self) -> Generator[None, None, Portion | None]:
        self._learner.post(Blocked(LOADER, self._index))
        portion = yield from self._portion(self._index)
        if portion is not None:
            yield from self._learner.rested()
        return portion

    def _seen(self, portion: Portion | None) -> Portion | None:
        if portion is not None:
            self._index += 1
            if portion.end:
                self._asked = self._index
                self._ended = True
        return portion
