"""Nonlinear conjugate gradients: Polak and Ribière's, never negative, with Powell's restarts.

Needs five vectors whatever the problem. Not responsible for how far to go, nor for when to end (`descent`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from syncline.batch.commands import Combine, Dot, Program, Scalars, State
from syncline.batch.method_base import Descent, Direction, Move, first_step

PARALLEL = 0.2  # gradients of two iterations are far from orthogonal: restart (Powell 1977)


@dataclass(frozen=True, kw_only=True)
class ConjugateGradient(Descent):
    """Five vectors on the shards; its line search is tighter than that of L-BFGS."""

    c2: float = 0.1

    name: ClassVar[str] = "conjugate gradient"

    @property
    def vectors(self) -> tuple[str, ...]:
        return ("x", "g", "d", "old x", "old g")

    def direction(self, state: State | None) -> Direction:
        kept = {key: state[key] for key in ("beta", "slope", "reach")} if state else {}
        return _Conjugate(**kept)


class _Conjugate(Direction):
    """d = −g + β·d."""

    old_gradient = "old g"

    def __init__(self, beta: float = 0.0, slope: float = 0.0, reach: float = 0.0) -> None:
        self._beta = beta
        self._slope = slope  # g·d, of the last d
        self._reach = reach  # step · |slope| of the last move: what the next is expected to have
        self._squared = 0.0

    @property
    def plain(self) -> bool:
        return self._beta == 0

    def make(self, squared: float) -> tuple[Program, float]:
        self._squared = squared
        slope = -squared + self._beta * self._slope
        if not -math.inf < slope < 0:
            self.forget()
            slope = -squared
        step = self._reach / -slope if slope else 0.0
        terms = ((-1.0, "g"), (self._beta, "d")) if self._beta else ((-1.0, "g"),)
        return (Combine("d", terms),), step if 0 < step < math.inf else first_step(squared)

    def update(self, move: Move | None) -> Program:
        return (Dot("g.old g", "g", "old g"),) if move is not None else ()

    def learn(self, got: Scalars, move: Move | None) -> None:
        self.forget()
        if move is None:
            return
        reach = -move.step * move.slope_before
        self._slope, self._reach = move.slope, reach if math.isfinite(reach) else 0.0
        parallel, squared = got["g.old g"], got["g.g"]
        if self._squared > 0 and abs(parallel) < PARALLEL * squared:
            beta = max(0.0, (squared - parallel) / self._squared)
            self._beta = beta if math.isfinite(beta) else 0.0

    def forget(self) -> None:
        self._beta = 0.0

    def data(self) -> State:
        return {"beta": self._beta, "slope": self._slope, "reach": self._reach}
