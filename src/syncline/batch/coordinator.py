"""The coordinator of a batch method (D6, M18): runs the generator, never sees a parameter. Events in, actions out.

A program goes to the shards in the parts that its evaluations leave; the sums of portions lie in numbered slots, which
shards add to the gradient in the order that is said here. Pure: not responsible for carrying anything out, for slots'
memory, nor for checkpoints.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from syncline.batch import commands as c
from syncline.batch import messages as m
from syncline.batch import portions as p
from syncline.errors import UsageError

AHEAD = 1  # tasks that a learner holds beyond the one it computes


def slots_of(learners: int, *, deterministic: bool) -> int:
    """Sums that may lie about at a time: held by learners, waiting for their turn, being added."""
    return (1 + AHEAD) * learners + (window_of(learners) if deterministic else 0) + 2


def window_of(learners: int) -> int:
    return 4 * learners


@dataclass(frozen=True, slots=True)
class Held:
    """A task that is out, or whose sum is there."""

    learner: int
    slot: int
    loss: float = 0.0
    examples: int = 0


class Coordinator:
    """One run of a method over so many shards; learners join and leave. `slots` may grow."""

    def __init__(
        self,
        method: c.BatchMethod,
        samples: p.Samples,
        *,
        shards: int,
        slots: int,
        portions: p.Portions,
        limit: int | None = None,
        state: c.State | None = None,
        iteration: int = 0,
    ) -> None:
        self._method, self._samples, self._portions = method, samples, portions
        self._shards, self._limit = shards, limit
        self._free = deque(range(slots))
        self._slots = slots
        self._tasks: dict[int, Held] = {}  # out
        self._sums: dict[int, Held] = {}  # answered, not yet taken or discarded
        self._adding: dict[int, int] = {}  # slot -> shards that have not added it
        self._assigned: deque[p.Assign] = deque()  # without a slot as yet
        self._number = self.evaluation = 0
        self._out: list[m.Action] = []
        self.stopping = False
        self.examples = 0  # in sums that were taken
        self.still = False  # the vectors are those of the last iteration
        self._set(state, iteration)

    def _set(self, state: c.State | None, iteration: int) -> None:
        self.iteration, self._state = iteration, state
        self._batch = self._samples.at(iteration)
        if state is not None and self._batch != self._samples.at(iteration - 1):
            state = {**state, "evaluated": False}
        self._steps = self._method(state)
        self._running: c.Program = ()
        self._measured: dict[int, tuple[float, ...]] = {}  # by shard
        self._rest: c.Program = ()  # of the program, beginning with what is being evaluated
        self._got: dict[str, float] = {}
        self._open: c.Evaluate | None = None  # portions of it are out
        self._loss, self._count = 0.0, 0

    def busy(self) -> set[int]:
        """Learners that have something to compute."""
        return {held.learner for held in self._tasks.values()}

    def awaited(self) -> set[int]:
        """Shards that have something to do."""
        return {*range(self._shards)} - self._measured.keys() if self._running else set()

    def statistics(self) -> p.Statistics:
        return self._portions.statistics()

    # -- the engine's events -------------------------------------------------------------------------------

    def begin(self) -> list[m.Action]:
        if self.done():
            self._out.append(m.Over(None))
        else:
            self._next(None)
        return self._take()

    def done(self) -> bool:
        return self.stopping or (self._limit is not None and self.iteration >= self._limit)

    def proceed(self) -> list[m.Action]:
        """The iteration was recorded: on with the next one, unless it was the last."""
        if self.done():
            self._out.append(m.Over(None))
            return self._take()
        following = self._samples.at(self.iteration)
        if following != self._batch:  # other data: what is known of x is void
            assert self._state is not None
            self._batch = following
            self._steps.close()
            self._steps = self._method({**self._state, "evaluated": False})
            self._next(None)
        else:
            self._next({})
        return self._take()

    def stop(self) -> None:
        """After this iteration."""
        self.stopping = True

    def go_back(self, state: c.State | None, iteration: int) -> None:
        """The shards are gone, and what was under way is void: `begin` when others have the vectors of that iteration."""
        self._steps.close()
        self._free.extend(sorted(self._adding))
        self._adding.clear()
        self._set(state, iteration)

    def grow(self, slots: int) -> None:
        """So many more."""
        self._free.extend(range(self._slots, self._slots + slots))
        self._slots += slots

    # -- shards' events ------------------------------------------------------------------------------------

    def ran(self, message: m.Ran) -> list[m.Action]:
        if message.number != self._number or not self._running:
            return []
        self._measured[message.shard] = message.measured
        if len(self._measured) == self._shards:
            measuring = [each for each in self._running if isinstance(each, c.Dot | c.Largest)]
            columns = zip(*(self._measured[shard] for shard in range(self._shards)), strict=True)
            for command, values in zip(measuring, columns, strict=True):  # shards in their order
                unknown = isinstance(command, c.Largest) and any(map(math.isnan, values))
                largest = math.nan if unknown else max(values)
                self._got[command.name] = sum(values) if isinstance(command, c.Dot) else largest
            self._running = ()
            self._continue()
        return self._take()

    def added(self, message: m.Added) -> list[m.Action]:
        if message.slot in self._adding:
            self._adding[message.slot] -= 1
            if self._adding[message.slot] == 0:
                del self._adding[message.slot]
                self._release(message.slot)
        return self._take()

    # -- learners' events ----------------------------------------------------------------------------------

    def join(self, learner: int) -> list[m.Action]:
        self._decide(self._portions.join(learner))
        return self._take()

    def leave(self, learner: int) -> list[m.Action]:
        """It is gone for good: nothing more is written to its slots."""
        self._assigned = deque(each for each in self._assigned if each.learner != learner)
        for task in [task for task, held in self._tasks.items() if held.learner == learner]:
            self._free.append(self._tasks.pop(task).slot)
        self._decide(self._portions.leave(learner))
        return self._take()

    def answered(self, learner: int, message: m.Answered) -> list[m.Action]:
        held = self._tasks.pop(message.task, None)
        if held is not None:
            self._sums[message.task] = Held(learner, held.slot, message.loss, message.examples)
            self._decide(self._portions.answer(learner, message.evaluation, message.task))
        return self._take()

    def dropped(self, learner: int, message: m.Dropped) -> list[m.Action]:
        held = self._tasks.pop(message.task, None)
        if held is not None:
            self._release(held.slot)
            self._decide(self._portions.drop(learner, message.evaluation, message.task))
        return self._take()

    # -- the program ---------------------------------------------------------------------------------------

    def _next(self, got: dict[str, float] | None) -> None:
        try:
            said = next(self._steps) if got is None else self._steps.send(got)
        except StopIteration as stop:
            end: c.End = stop.value
            self._out.append(m.Over(end))
            return
        self._say(said)

    def _say(self, said: c.Program | c.Iteration) -> None:
        if isinstance(said, c.Iteration):
            self.iteration, self._state, self.still = said.record.iteration, said.state, True
            self._out.append(m.Reached(said, self._batch))
            return
        c.check(said, self._method.vectors)
        rest: list[c.Command] = []
        for each in said:
            if isinstance(each, c.Evaluate) and each.gradient in ("x", each.at):
                raise UsageError(f"{each}: the gradient needs a vector of its own, neither x nor {each.at!r}")
            if isinstance(each, c.Evaluate) and each.at != "x":  # learners read x: brought there, and back
                rest += (c.Swap("x", each.at), each, c.Swap("x", each.at))
            else:
                rest.append(each)
        self._got, self._rest = {}, tuple(rest)
        self._continue()

    def _continue(self) -> None:
        """The next part of the program: up to an evaluation, that evaluation, or its end."""
        cut = next((i for i, each in enumerate(self._rest) if isinstance(each, c.Evaluate)), len(self._rest))
        part, self._rest = self._rest[:cut], self._rest[cut:]
        if part:
            self._number += 1
            self.still = False
            self._running, self._measured = part, {}
            self._out.append(m.Run(self._number, part))
        elif self._rest and isinstance(self._rest[0], c.Evaluate):
            self._open = self._rest[0]
            self.evaluation += 1
            self._loss, self._count = 0.0, 0
            self._decide(self._portions.begin(self.evaluation, self._batch.portions))
        else:
            self._next(self._got)

    # -- portions ------------------------------------------------------------------------------------------

    def _decide(self, decisions: Iterable[p.Decision]) -> None:
        queue = deque(decisions)
        while queue:
            decision = queue.popleft()
            if isinstance(decision, p.Assign):
                self._assigned.append(decision)
            elif isinstance(decision, p.Cancel):
                queue.extend(self._cancel(decision))
            elif isinstance(decision, p.Take):
                held = self._sums.pop(decision.task)
                if self._open is None:  # of an evaluation that is void
                    self._release(held.slot)
                    continue
                self._out.append(m.Add(held.slot, self._open.gradient, self._count == 0))
                self._adding[held.slot] = self._shards
                self._loss += held.loss
                self._count += held.examples
                self.examples += held.examples
            elif isinstance(decision, p.Discard):
                if (late := self._sums.pop(decision.task, None)) is not None:
                    self._release(late.slot)
            elif self._open is not None and decision.evaluation == self.evaluation:
                command, self._open = self._open, None
                self._got[command.loss] = self._loss / self._count
                self._rest = (c.Scale(command.gradient, 1 / self._count), *self._rest[1:])
                self._continue()
        self._hand_out()

    def _cancel(self, cancel: p.Cancel) -> list[p.Decision]:
        for assigned in self._assigned:
            if assigned.task == cancel.task:  # nobody has it yet
                self._assigned.remove(assigned)
                return self._portions.drop(cancel.learner, cancel.evaluation, cancel.task)
        self._out.append(cancel)
        return []

    def _release(self, slot: int) -> None:
        self._free.append(slot)
        self._hand_out()

    def _hand_out(self) -> None:
        while self._assigned and self._free:
            each = self._assigned.popleft()
            slot = self._free.popleft()
            self._tasks[each.task] = Held(each.learner, slot)
            self._out.append(
                m.Give(each.learner, each.evaluation, each.task, each.start, each.stop, self._batch, slot)
            )

    def _take(self) -> list[m.Action]:
        out, self._out = self._out, []
        return out
