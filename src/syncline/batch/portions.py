"""Who computes which portion of a batch (M18): a pure state machine, events in, decisions out.

A batch is cut into portions much smaller than a learner's share. Whoever is free gets a task: a few consecutive
portions, whose sum it sends in one answer, so that a death loses one task. When nothing is left, portions that are
out are handed out again, one at a time; the first answer counts. A sum counts only as a whole: as soon as one of its
portions is answered by another, the task is cancelled and its other portions go back. Not responsible for reading
data or drawing indices, for adding sums, nor for parameters, which a learner reads once for each evaluation number.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from syncline.errors import RunError, UsageError

Schedule = Callable[[int], int]  # iteration, from 0 -> examples


@dataclass(frozen=True, slots=True)
class Batch:
    """The examples of one iteration; `drawn` is None where it is the whole data set, else a sample (D7)."""

    examples: int
    portions: int
    drawn: int | None  # the iteration that it was drawn for


@dataclass(frozen=True, slots=True)
class Samples:
    """`size` examples in portions of `portion`; `schedule` says how many an iteration takes."""

    size: int
    portion: int
    schedule: Schedule | int | None = None

    def at(self, iteration: int) -> Batch:
        examples = self.schedule(iteration) if callable(self.schedule) else self.schedule
        examples = self.size if examples is None else examples
        if isinstance(examples, bool) or not isinstance(examples, int) or examples < 1:
            raise UsageError(
                f"the sample of iteration {iteration} must be a whole number of examples >= 1, got {examples!r}"
            )
        examples = min(examples, self.size)
        drawn = iteration if examples < self.size else None
        return Batch(examples, -(-examples // self.portion), drawn)


@dataclass(frozen=True, slots=True)
class Assign:
    """Compute portions start…stop−1, in order, after the tasks before; answer once, with their sum."""

    learner: int
    evaluation: int
    task: int
    start: int
    stop: int


@dataclass(frozen=True)
class _About:
    learner: int
    evaluation: int
    task: int


class Cancel(_About):
    """The sum would be discarded: drop the task before its next portion, or before it begins."""


class Take(_About):
    """Add this sum now; it has come."""


class Discard(_About):
    """The sum is of another evaluation, or of portions that count already."""


@dataclass(frozen=True, slots=True)
class Done:
    """Every portion is in exactly one of the sums that were taken."""

    evaluation: int


Decision = Assign | Cancel | Take | Discard | Done


@dataclass(frozen=True, slots=True)
class Statistics:
    taken: int = 0  # sums
    discarded: int = 0
    copied: int = 0  # tasks that were handed out a second time, or more often
    returned: int = 0  # portions that went back


@dataclass(slots=True)
class _Learner:
    # tasks not answered, cancelled ones too -> evaluation
    pending: dict[int, int] = field(default_factory=dict)
    next: int = -1  # the unit after those it had: it has read up to there
    home: int = -1  # where it began in this evaluation, or the last


@dataclass(frozen=True, slots=True)
class _Task:
    learner: int
    start: int
    stop: int


class Portions:
    """One evaluation after the other; `every` portions make a sum.

    A learner holds `ahead` tasks beyond the one it computes, to read data ahead. At most `copies` learners compute
    a portion at a time. `deterministic`: tasks are fixed chunks of `every` portions, taken in their order; at most
    `window` (3 + `ahead` for each learner) chunks are out or wait. Inside, a *unit* is a portion, or such a chunk.
    """

    def __init__(
        self,
        *,
        every: int = 4,
        copies: int = 3,
        ahead: int = 1,
        deterministic: bool = False,
        window: int | None = None,
    ) -> None:
        given = {"every": every, "copies": copies, "ahead": ahead, "window": window}
        for name, value in given.items():
            if value is not None and value < (least := 0 if name == "ahead" else 1):
                raise UsageError(f"portions need {name} >= {least}, got {name} = {value}")
        self._every, self._copies, self._ahead = every, copies, ahead
        self._unit = every if deterministic else 1  # portions
        self._ordered, self._window = deterministic, window
        self._learners: dict[int, _Learner] = {}
        self._idle: dict[int, None] = {}  # nothing pending, in the order in which they became so
        self._short: dict[int, None] = {}  # fewer pending than they may hold ahead
        self._evaluation, self._portions = -1, 0
        self._tasks: dict[int, _Task] = {}  # live: none of their units is answered
        self._made = 0
        self._out: list[Decision] = []
        self._counts = {"taken": 0, "discarded": 0, "copied": 0, "returned": 0}
        self._clear(0)

    def statistics(self) -> Statistics:
        return Statistics(**self._counts)

    # -- events ----------------------------------------------------------------------------------------------

    def begin(self, evaluation: int, portions: int) -> list[Decision]:
        """A new evaluation; what is out of the one before is cancelled."""
        if portions < 1:
            raise UsageError(f"a batch needs at least one portion, got {portions}")
        if evaluation <= self._evaluation:
            raise RunError(f"evaluation {evaluation} begins after {self._evaluation}; numbers rise")
        for task in list(self._tasks):
            self._cancel(task)
        for take in self._waiting.values():
            self._discard(take.learner, take.evaluation, take.task)
        self._evaluation, self._portions = evaluation, portions
        self._clear(-(-portions // self._unit))
        for learner in self._learners.values():
            learner.next, learner.home = learner.home, -1
        return self._advance()

    def join(self, learner: int) -> list[Decision]:
        if learner in self._learners:
            raise RunError(f"learner {learner} joins twice; every learner needs an id of its own")
        self._learners[learner] = _Learner()
        self._note(learner)
        return self._advance()

    def leave(self, learner: int) -> list[Decision]:
        """It is gone: what it has not answered goes back."""
        member = self._learners.pop(learner, None)
        if member is None:
            return []
        self._idle.pop(learner, None), self._short.pop(learner, None)
        for task in [task for task in member.pending if task in self._tasks]:
            self._give_back(task)
        return self._advance()

    def answer(self, learner: int, evaluation: int, task: int) -> list[Decision]:
        """The task's sum has come, whole; it outlives the learner."""
        if self._settle(learner, evaluation, task):
            self._accept(task)
        else:
            self._discard(learner, evaluation, task)
        return self._advance()

    def drop(self, learner: int, evaluation: int, task: int) -> list[Decision]:
        """It will not answer this task, and is free for another."""
        if self._settle(learner, evaluation, task):
            self._give_back(task)
        return self._advance()

    def _settle(self, learner: int, evaluation: int, task: int) -> bool:
        """It has said all about this task; whether that was live."""
        member = self._learners.get(learner)
        if member is None or member.pending.get(task) != evaluation:
            return False
        del member.pending[task]
        self._note(learner)
        return task in self._tasks

    # -- tasks -----------------------------------------------------------------------------------------------

    def _clear(self, units: int) -> None:
        self._free = Gaps(units)
        self._holders: dict[int, set[int]] = {}  # unit that is out -> live tasks
        self._left = units  # not taken
        # heap of (tasks, age, unit); what is stale is skipped
        self._copyable: list[tuple[int, int, int]] = []
        self._first = 0  # the first unit not taken, where they are in order
        self._waiting: dict[int, Take] = {}  # sums whose turn has not come

    def _accept(self, number: int) -> None:
        task = self._tasks.pop(number)
        rivals: set[int] = set()
        for unit in range(task.start, task.stop):
            rivals |= self._holders.pop(unit) - {number}
        for rival in sorted(rivals):
            self._cancel(rival)
        take = Take(task.learner, self._evaluation, number)
        if not self._ordered:
            self._take(take, task.stop - task.start)
            return
        self._waiting[task.start] = take
        while self._first in self._waiting:
            self._first += 1
            self._take(self._waiting.pop(self._first - 1), 1)

    def _take(self, take: Take, units: int) -> None:
        self._counts["taken"] += 1
        self._out.append(take)
        self._left -= units
        if self._left == 0:
            self._out.append(Done(self._evaluation))

    def _discard(self, learner: int, evaluation: int, task: int) -> None:
        self._counts["discarded"] += 1
        self._out.append(Discard(learner, evaluation, task))

    def _cancel(self, number: int) -> None:
        self._out.append(Cancel(self._tasks[number].learner, self._evaluation, number))
        self._give_back(number)

    def _give_back(self, number: int) -> None:
        """The task is live no more: what nobody else has of it is free again."""
        task = self._tasks.pop(number)
        for unit in range(task.start, task.stop):
            holders = self._holders.get(unit)
            if holders is None:
                continue
            holders.remove(number)
            if holders:
                self._note_copies(unit)
            else:
                del self._holders[unit]
                self._free.give(unit)
                self._counts["returned"] += self._stop(unit + 1) - unit * self._unit

    def _note_copies(self, unit: int) -> None:
        if len(self._holders[unit]) < self._copies:
            heapq.heappush(self._copyable, (len(self._holders[unit]), self._made, unit))

    def _stop(self, units: int) -> int:
        return min(units * self._unit, self._portions)

    # -- who gets what ---------------------------------------------------------------------------------------

    def _note(self, learner: int) -> None:
        """Whether it may be given something."""
        held = len(self._learners[learner].pending)
        for group, fits in ((self._idle, held == 0), (self._short, 0 < held <= self._ahead)):
            if fits:
                group.setdefault(learner)
            else:
                group.pop(learner, None)

    def _advance(self) -> list[Decision]:
        """The idle first: a task each, or a copy; then tasks ahead, while there are plenty."""
        while self._idle and self._hand_out(next(iter(self._idle)), copies=True):
            pass
        while self._short and len(self._free) > len(self._learners):
            if not self._hand_out(next(iter(self._short)), copies=False):
                break
        out, self._out = self._out, []
        return out

    def _hand_out(self, learner: int, *, copies: bool) -> bool:
        member = self._learners[learner]
        if self._overdue(learner):
            copied, start, stop = True, self._first, self._first + 1
        elif (span := self._fresh(member)) is not None:
            copied, (start, stop) = False, span
            self._free.take(start, stop)
            member.next = stop
            member.home = start if member.home < 0 else member.home
        elif copies and (unit := self._to_copy()) is not None:
            copied, start, stop = True, unit, unit + 1
        else:
            return False
        self._counts["copied"] += copied
        number = self._made = self._made + 1
        self._tasks[number] = _Task(learner, start, stop)
        member.pending[number] = self._evaluation
        for unit in range(start, stop):
            self._holders.setdefault(unit, set()).add(number)
            self._note_copies(unit)
        self._note(learner)
        self._out.append(Assign(learner, self._evaluation, number, start * self._unit, self._stop(stop)))
        return True

    def _overdue(self, learner: int) -> bool:
        """Many sums wait for one that a single other learner computes: it is copied before all have to wait."""
        holders = self._holders.get(self._first, ())
        if len(self._waiting) < max(1, self._width() // (3 + self._ahead)) or self._copies == 1:
            return False
        return len(holders) == 1 and self._tasks[min(holders)].learner != learner

    def _width(self) -> int:
        return self._window or (3 + self._ahead) * len(self._learners)

    def _fresh(self, member: _Learner) -> tuple[int, int] | None:
        """Units that nobody has: the lowest chunk; or the neighbours of what it had, or some of the largest gap.

        A gap that another is about to go into is begun in the middle. Tasks get shorter towards the end, so that
        learners end together.
        """
        if not self._free:
            return None
        if self._ordered:
            start = self._free.lowest()
            return (start, start + 1) if start < self._first + self._width() else None
        length = max(1, min(self._every, len(self._free) // (2 * len(self._learners))))
        start, stop = self._free.at(member.next) or self._free.largest()
        if start != member.next and stop - start >= 2 * length:
            others = {other.next for other in self._learners.values()}
            start = (start + stop) // 2 if start in others else start
        return start, min(stop, start + length)

    def _to_copy(self) -> int | None:
        """The unit that fewest compute, the oldest of these."""
        while self._copyable:
            tasks, _, unit = heapq.heappop(self._copyable)
            if len(self._holders.get(unit, ())) == tasks:
                return unit
        return None


class Gaps:
    """Which whole numbers are free: a byte for each, 1 or 0; a gap is a run of ones."""

    def __init__(self, size: int) -> None:
        self._map, self._free = bytearray(b"\1" * size), size

    def __len__(self) -> int:
        return self._free

    def at(self, number: int) -> tuple[int, int] | None:
        """The rest of its gap from this number on, if it is free."""
        if not 0 <= number < len(self._map) or not self._map[number]:
            return None
        stop = self._map.find(0, number)
        return number, stop if stop >= 0 else len(self._map)

    def lowest(self) -> int:
        return self._map.find(1)

    def largest(self) -> tuple[int, int]:
        return max((run.span() for run in re.finditer(b"\1+", self._map)), key=lambda span: span[1] - span[0])

    def take(self, start: int, stop: int) -> None:
        """These are free, and now are not."""
        self._map[start:stop] = bytes(stop - start)
        self._free -= stop - start

    def give(self, number: int) -> None:
        """This is free again."""
        self._map[number] = 1
        self._free += 1
