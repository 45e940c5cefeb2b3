"""What batch methods share: where one stands and when it ends, options checked when built; and, of those that search along a
direction, all but the direction: the line search on the shards, restarts from steepest descent, the state.

An iteration with a line search takes one round trip for each evaluation (the first makes the direction too) and one more.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import msgspec

from syncline.batch import commands as c
from syncline.batch.line_search import armijo, wolfe
from syncline.errors import UsageError

LineSearch = Literal["wolfe", "armijo"]
MEASURE = (c.Dot("g.g", "g", "g"), c.Largest("largest", "g"))


@dataclass(slots=True)
class Standing:
    """Plain data, part of the state."""

    method: str
    iteration: int = 0
    evaluations: int = 0
    evaluated: bool = False  # g and what follows belong to x and the present data
    loss: float = math.inf
    squared: float = 0.0  # g·g
    largest: float = 0.0  # max |gᵢ|
    decrease: float | None = None  # by the last iteration, relative to max(1, |loss|)

    @classmethod
    def of(cls, method: str, state: c.State | None) -> Standing:
        if state is None:
            return cls(method)
        if state.get("method") != method:
            raise UsageError(f"{method} cannot go on from a state of {state.get('method', 'no method')}")
        if missing := [each.name for each in fields(cls) if each.name not in state]:
            raise UsageError(f"{method} cannot go on from a state without {', '.join(missing)}")
        return msgspec.convert(dict(state), cls)

    def begin(self, got: c.Scalars) -> bool:
        """The evaluation at x with which the method begins; False where it is not finite."""
        self.evaluations += 1
        self.evaluated, self.decrease = True, None
        return self._arrive(got["loss"], got)

    def advance(self, loss: float, got: c.Scalars) -> bool:
        """An iteration ends at the point of this loss; False, and nothing changes, where it is not finite."""
        before = self.loss
        if not self._arrive(loss, got):
            return False
        self.iteration += 1
        scale = max(1.0, abs(before), abs(loss))
        self.decrease = before / scale - loss / scale  # the difference itself may overflow
        return True

    def _arrive(self, loss: float, got: c.Scalars) -> bool:
        if not all(map(math.isfinite, (loss, got["g.g"], got["largest"]))):
            return False
        self.loss, self.squared, self.largest = loss, got["g.g"], got["largest"]
        return True

    def record(self, step: float, restarted: bool = False) -> c.Record:
        return c.Record(self.iteration, self.loss, step, self.largest, self.evaluations, restarted)

    def end(self, why: str, message: str) -> c.End:
        counts = f"{self.iteration} iterations, {self.evaluations} evaluations"
        message = f"{message}; loss {self.loss:.9g} after {counts}"
        return c.End(why, message, self.iteration, self.evaluations, self.loss)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Of all methods here."""

    tolerance: float = 1e-6  # end where max |gᵢ| is within it
    decrease: float = 1e-9  # end where an iteration lowers the loss by at most so much of max(1, |loss|)
    deterministic: bool = False  # portions are added in a fixed order: for who evaluates, not for the method

    def __post_init__(self) -> None:
        for name in ("tolerance", "decrease"):
            need(self, name, 0 <= number(self, name) < math.inf, "a number >= 0")
        need(self, "deterministic", isinstance(self.deterministic, bool), "True or False")

    def reached(self, at: Standing) -> tuple[str, str] | None:
        """Why to end, in a word and in a sentence."""
        if at.largest == 0:
            return "gradient", "the gradient is zero"
        if at.largest <= self.tolerance:
            return "gradient", f"the gradient's largest entry {at.largest:.3g} is within {self.tolerance:g}"
        if at.decrease is not None and 0 <= at.decrease <= self.decrease:
            fell = f"the loss fell by {at.decrease:.3g} of max(1, |loss|)"
            return "decrease", f"{fell}, within {self.decrease:g}"
        return None


def need(options: Any, name: str, holds: bool, wanted: str) -> None:
    if not holds:
        raise UsageError(f"{type(options).__name__}({name}={getattr(options, name)!r}): {name} is {wanted}")


def number(options: Any, name: str) -> float:
    """The option, if it is a number at all; nan, which no range holds, if not."""
    value = getattr(options, name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def whole(options: Any, name: str, least: int) -> None:
    value = getattr(options, name)
    fits = isinstance(value, int) and not isinstance(value, bool) and value >= least
    need(options, name, fits, f"a whole number >= {least}")


# -- methods with a line search --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Descent(Options, ABC):
    """Options of a method with a line search; subclasses give the direction."""

    line_search: LineSearch = "wolfe"
    c1: float = 1e-3  # a step must be lower by so much of the slope
    c2: float = 0.9  # and flatter than so much of it
    trials: int = 20  # evaluations in one line search

    name: ClassVar[str]

    def __post_init__(self) -> None:
        super().__post_init__()
        choices = get_args(LineSearch)
        need(self, "line_search", self.line_search in choices, " or ".join(map(repr, choices)))
        need(self, "c1", 0 < number(self, "c1") < 0.5, "a number between 0 and 0.5")
        need(self, "c2", self.c1 < number(self, "c2") < 1, f"a number between c1 = {self.c1:g} and 1")
        whole(self, "trials", 1)

    @property
    @abstractmethod
    def vectors(self) -> tuple[str, ...]: ...

    @abstractmethod
    def direction(self, state: c.State | None) -> Direction: ...

    def __call__(self, state: c.State | None = None) -> c.Steps:
        """From the start, or on from a state; with `{**state, "evaluated": False}` x is evaluated first: the data are others."""
        return _descend(self, Standing.of(self.name, state), self.direction(state))


class Move(NamedTuple):
    """x is moved by step·d; its gradient is in g, the one before in `old_gradient`."""

    step: float
    loss: float
    slope: float
    slope_before: float


class Direction(ABC):
    """Makes d; knows what it needs of the iterations before."""

    @property
    @abstractmethod
    def old_gradient(self) -> str:
        """The vector that has the gradient before, during a line search."""

    @property
    @abstractmethod
    def plain(self) -> bool:
        """The next d is that of steepest descent."""

    @abstractmethod
    def make(self, squared: float) -> tuple[c.Program, float]:
        """The commands that make d, and the first step to try; `squared` is g·g."""

    @abstractmethod
    def update(self, move: Move | None) -> c.Program:
        """The commands after a move, or after g changed without one."""

    @abstractmethod
    def learn(self, got: c.Scalars, move: Move | None) -> None:
        """What those gave, and g·g."""

    @abstractmethod
    def forget(self) -> None:
        """Steepest descent next."""

    @abstractmethod
    def data(self) -> c.State: ...


def _descend(options: Descent, at: Standing, direction: Direction) -> c.Steps:
    if not at.evaluated:
        got = yield (c.Evaluate(), *direction.update(None), *MEASURE)
        if not at.begin(got):
            found = f"loss {got['loss']}, gradient {got['largest']}"
            return at.end("not finite", f"{found} where the method begins")
        direction.learn(got, None)
    while (reached := options.reached(at)) is None:
        plain = direction.plain
        move = yield from _move(options, direction, at)
        if move is None and not plain:
            direction.forget()
            plain, move = True, (yield from _move(options, direction, at))
        if move is None:
            return at.end("line search", "no step lowers the loss, not even along steepest descent")
        got = yield (*direction.update(move), *MEASURE)
        if not at.advance(move.loss, got):
            yield (c.Copy("x", "old x"),)
            return at.end("not finite", "the gradient is not finite where the loss is lower")
        direction.learn(got, move)
        restarted = plain and at.iteration > 1
        yield c.Iteration({**asdict(at), **direction.data()}, at.record(move.step, restarted))
    return at.end(*reached)


def _move(
    options: Descent, direction: Direction, at: Standing
) -> Generator[c.Program, c.Scalars, Move | None]:
    """A line search; None, with x and g as before, where it fails."""
    make, step = direction.make(at.squared)
    keep = (c.Dot("slope before", "d", "g"), c.Copy("old x", "x"), c.Swap(direction.old_gradient, "g"))
    got = yield (*make, *keep, *_trial(step))
    at.evaluations += 1
    before, chosen = got["slope before"], 0.0
    if -math.inf < before < 0:
        kind = wolfe if options.line_search == "wolfe" else armijo
        search = kind(at.loss, before, step, c1=options.c1, c2=options.c2, trials=options.trials)
        next(search)  # the step that is tried already
        try:
            while True:
                step = search.send((got["loss"], got["slope"]))
                got = yield _trial(step)
                at.evaluations += 1
        except StopIteration as end:
            chosen = end.value
    if chosen and chosen != step:  # an earlier trial was the best
        got = yield _trial(chosen)
        at.evaluations += 1
    if chosen and -math.inf < got["loss"] <= at.loss and math.isfinite(got["slope"]):
        return Move(chosen, got["loss"], got["slope"], before)
    yield (c.Copy("x", "old x"), c.Swap(direction.old_gradient, "g"))
    return None


def _trial(step: float) -> c.Program:
    return (c.Combine("x", ((1.0, "old x"), (step, "d"))), c.Evaluate(), c.Dot("slope", "d", "g"))


def first_step(squared: float) -> float:
    """A move of length one along −g, where nothing is known of the loss's scale."""
    return 1 / math.sqrt(squared) if squared > 1e-300 else 1.0
