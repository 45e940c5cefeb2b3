"""Gradient descent on the whole batch, with momentum: the plainest batch method, to read first.

One round trip an iteration, four vectors. It may rise on its way; where it ends, x is the best point seen.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import ClassVar

from syncline.batch.commands import Axpy, Copy, Evaluate, Fill, Iteration, Scale, State, Steps
from syncline.batch.method_base import MEASURE, Options, Standing, need, number


@dataclass(frozen=True, kw_only=True)
class GradientDescent(Options):
    """v = momentum·v − lr·g, x += v."""

    lr: float
    momentum: float = 0.9

    name: ClassVar[str] = "gradient descent"
    vectors: ClassVar[tuple[str, ...]] = ("x", "g", "v", "best")

    def __post_init__(self) -> None:
        super().__post_init__()
        need(self, "lr", 0 < number(self, "lr") < math.inf, "a number > 0")
        need(self, "momentum", 0 <= number(self, "momentum") < 1, "a number from 0 to 1, without 1")

    def __call__(self, state: State | None = None) -> Steps:
        at = Standing.of(self.name, state)
        best = state["best"] if state and at.evaluated else math.inf
        return self._steps(at, best)

    def _steps(self, at: Standing, best: float) -> Steps:
        if not at.evaluated:
            rest = (Fill("v", 0.0),) if at.iteration == 0 else ()
            got = yield (*rest, Evaluate(), *MEASURE)
            if not at.begin(got):
                return at.end("not finite", f"{got} where the method begins")
        move = (Scale("v", self.momentum), Axpy("v", -self.lr, "g"), Axpy("x", 1.0, "v"))
        while (reached := self.reached(at)) is None:
            keep = (Copy("best", "x"),) if at.loss < best else ()
            best = min(best, at.loss)
            got = yield (*keep, *move, Evaluate(), *MEASURE)
            at.evaluations += 1
            if not at.advance(got["loss"], got):
                at.loss, reached = math.inf, ("not finite", f"{got} at the next step; try lr < {self.lr:g}")
                break
            yield Iteration({**asdict(at), "best": best}, at.record(self.lr))
        if best < at.loss:
            yield (Copy("x", "best"),)
            at.loss = best
        return at.end(*reached)
