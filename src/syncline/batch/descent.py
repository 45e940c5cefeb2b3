"""Batch methods that search along a direction: what L-BFGS and conjugate gradients share.

Responsible for the line search on the shards, for restarts from steepest descent, and for the state. Not responsible
for the direction, all that such methods differ in. One iteration takes one round trip for each evaluation (the first
makes the direction too) and one more.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import asdict, dataclass
from typing import ClassVar, Literal, NamedTuple, get_args

from syncline.batch.commands import (
    Combine,
    Copy,
    Dot,
    Evaluate,
    Iteration,
    Program,
    Scalars,
    State,
    Steps,
    Swap,
)
from syncline.batch.line_search import armijo, wolfe
from syncline.batch.method_state import MEASURE, Options, Standing, need, number, whole

LineSearch = Literal["wolfe", "armijo"]


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
    def direction(self, state: State | None) -> Direction: ...

    def __call__(self, state: State | None = None) -> Steps:
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
    def make(self, squared: float) -> tuple[Program, float]:
        """The commands that make d, and the first step to try; `squared` is g·g."""

    @abstractmethod
    def update(self, move: Move | None) -> Program:
        """The commands after a move, or after g changed without one."""

    @abstractmethod
    def learn(self, got: Scalars, move: Move | None) -> None:
        """What those gave, and g·g."""

    @abstractmethod
    def forget(self) -> None:
        """Steepest descent next."""

    @abstractmethod
    def data(self) -> State: ...


def _descend(options: Descent, at: Standing, direction: Direction) -> Steps:
    if not at.evaluated:
        got = yield (Evaluate(), *direction.update(None), *MEASURE)
        if not at.begin(got):
            return at.end(
                "not finite", f"loss {got['loss']}, gradient {got['largest']} where the method begins"
            )
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
            yield (Copy("x", "old x"),)
            return at.end("not finite", "the gradient is not finite where the loss is lower")
        direction.learn(got, move)
        restarted = plain and at.iteration > 1
        yield Iteration({**asdict(at), **direction.data()}, at.record(move.step, restarted))
    return at.end(*reached)


def _move(options: Descent, direction: Direction, at: Standing) -> Generator[Program, Scalars, Move | None]:
    """A line search; None, with x and g as before, where it fails."""
    make, step = direction.make(at.squared)
    keep = (Dot("slope before", "d", "g"), Copy("old x", "x"), Swap(direction.old_gradient, "g"))
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
    yield (Copy("x", "old x"), Swap(direction.old_gradient, "g"))
    return None


def _trial(step: float) -> Program:
    return (Combine("x", ((1.0, "old x"), (step, "d"))), Evaluate(), Dot("slope", "d", "g"))


def first_step(squared: float) -> float:
    """A move of length one along −g, where nothing is known of the loss's scale."""
    return 1 / math.sqrt(squared) if squared > 1e-300 else 1.0
