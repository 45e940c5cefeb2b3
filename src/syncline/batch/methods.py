"""The batch methods. Gradient descent is the plainest, to be read first. Nonlinear conjugate gradients (Polak and Ribière's, never
negative, with Powell's restarts) and L-BFGS (directions from the last few steps, Liu and Nocedal 1989) search along a direction.

The history of L-BFGS lies on the shards. The two-loop recursion runs on the dots between its vectors and g, which are kept
here, so that the direction is one linear combination (Chen, Wang and Zhou 2014): the round trips of an iteration do
not grow with the history. Not responsible for how far to go, nor for when to end (`descent`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import ClassVar

import msgspec

from syncline.batch import commands as c
from syncline.batch.descent import (
    MEASURE,
    Descent,
    Direction,
    Move,
    Options,
    Standing,
    first_step,
    need,
    number,
    whole,
)
from syncline.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class GradientDescent(Options):
    """v = momentum·v − lr·g, x += v. One round trip an iteration, four vectors. It may rise on its way; where it ends, x is the
    best point seen."""

    lr: float
    momentum: float = 0.9

    name: ClassVar[str] = "gradient descent"
    vectors: ClassVar[tuple[str, ...]] = ("x", "g", "v", "best")

    def __post_init__(self) -> None:
        super().__post_init__()
        need(self, "lr", 0 < number(self, "lr") < math.inf, "a number > 0")
        need(self, "momentum", 0 <= number(self, "momentum") < 1, "a number from 0 to 1, without 1")

    def __call__(self, state: c.State | None = None) -> c.Steps:
        at = Standing.of(self.name, state)
        best = msgspec.convert(state["best"], float) if state and at.evaluated else math.inf
        return self._steps(at, best)

    def _steps(self, at: Standing, best: float) -> c.Steps:
        if not at.evaluated:
            rest = (c.Fill("v", 0.0),) if at.iteration == 0 else ()
            got = yield (*rest, c.Evaluate(), *MEASURE)
            if not at.begin(got):
                return at.end("not finite", f"{got} where the method begins")
        move = (c.Scale("v", self.momentum), c.Axpy("v", -self.lr, "g"), c.Axpy("x", 1.0, "v"))
        while (reached := self.reached(at)) is None:
            keep = (c.Copy("best", "x"),) if at.loss < best else ()
            best = min(best, at.loss)
            got = yield (*keep, *move, c.Evaluate(), *MEASURE)
            at.evaluations += 1
            if not at.advance(got["loss"], got):
                at.loss, reached = math.inf, ("not finite", f"{got} at the next step; try lr < {self.lr:g}")
                break
            yield c.Iteration({**asdict(at), "best": best}, at.record(self.lr))
        if best < at.loss:
            yield (c.Copy("x", "best"),)
            at.loss = best
        return at.end(*reached)


PARALLEL = 0.2  # gradients of two iterations are far from orthogonal: restart (Powell 1977)


@dataclass(frozen=True, kw_only=True)
class ConjugateGradient(Descent):
    """Five vectors on the shards; its line search is tighter than that of L-BFGS."""

    c2: float = 0.1

    name: ClassVar[str] = "conjugate gradient"

    @property
    def vectors(self) -> tuple[str, ...]:
        return ("x", "g", "d", "old x", "old g")

    def direction(self, state: c.State | None) -> Direction:
        kept = (
            {key: msgspec.convert(state[key], float) for key in ("beta", "slope", "reach")} if state else {}
        )
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

    def make(self, squared: float) -> tuple[c.Program, float]:
        self._squared = squared
        slope = -squared + self._beta * self._slope
        if not -math.inf < slope < 0:
            self.forget()
            slope = -squared
        step = self._reach / -slope if slope else 0.0
        terms = ((-1.0, "g"), (self._beta, "d")) if self._beta else ((-1.0, "g"),)
        return (c.Combine("d", terms),), step if 0 < step < math.inf else first_step(squared)

    def update(self, move: Move | None) -> c.Program:
        return (c.Dot("g.old g", "g", "old g"),) if move is not None else ()

    def learn(self, got: c.Scalars, move: Move | None) -> None:
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

    def data(self) -> c.State:
        return {"beta": self._beta, "slope": self._slope, "reach": self._reach}


ROUNDING = 2.3e-16  # of the decrease that a slope promises: smaller curvature is none


@dataclass(frozen=True, kw_only=True)
class LBFGS(Descent):
    """2·history + 4 vectors on the shards. Pairs whose s·y is not positive are skipped."""

    history: int = 10

    name: ClassVar[str] = "lbfgs"

    def __post_init__(self) -> None:
        super().__post_init__()
        whole(self, "history", 1)

    @property
    def vectors(self) -> tuple[str, ...]:
        pairs = (f"{kind}{slot}" for kind in "sy" for slot in range(self.history))
        return ("x", "g", "d", "old x", *pairs)

    def direction(self, state: c.State | None) -> Direction:
        used = msgspec.convert(state["history"], list[int]) if state else []
        if any(slot >= self.history for slot in used):
            raise UsageError(
                f"LBFGS(history={self.history}) cannot go on from a state with a history of {max(used) + 1}; use that"
            )
        dots = msgspec.convert(state["dots"], dict[str, float]) if state else {}
        if state and state["evaluated"]:
            _recursion(used, dots)  # raises where a product is missing
        return _QuasiNewton(self.history, used, dots)


class _QuasiNewton(Direction):
    """d = −H·g, by dots: `dots["s0.y1"]` is s₀·y₁, by slots of the ring."""

    def __init__(self, size: int, used: list[int], dots: dict[str, float]) -> None:
        self._size, self._used, self._dots = size, used, dots  # used: oldest first
        self._slot = 0  # free: it has the old gradient during a line search, then perhaps the new pair

    @property
    def old_gradient(self) -> str:
        return f"y{self._slot}"

    @property
    def plain(self) -> bool:
        return not self._used

    def make(self, squared: float) -> tuple[c.Program, float]:
        terms = _recursion(self._used, self._dots)
        if not all(math.isfinite(by) for by, _ in terms):
            self.forget()
            terms = _recursion([], {})
        step = 1.0 if self._used else first_step(squared)
        if len(self._used) == self._size:
            del self._used[0]
        self._slot = next(slot for slot in range(self._size) if slot not in self._used)
        return (c.Combine("d", terms),), step

    def update(self, move: Move | None) -> c.Program:
        if move is None:
            return tuple(_with_gradient(self._used))
        s, y, others = f"s{self._slot}", f"y{self._slot}", self._used
        pair = (c.Combine(s, ((1.0, "x"), (-1.0, "old x"))), c.Combine(y, ((1.0, "g"), (-1.0, y))))
        own = (_dot(s, y), _dot(y, y))
        crossed = (d for j in others for d in (_dot(f"s{j}", y), _dot(s, f"y{j}"), _dot(f"y{j}", y)))
        return (*pair, *own, *crossed, *_with_gradient([*others, self._slot]))

    def learn(self, got: c.Scalars, move: Move | None) -> None:
        self._dots.update((name, value) for name, value in got.items() if "." in name)
        if not all(map(math.isfinite, got.values())):
            self.forget()
        elif move is not None:
            s, y = f"s{self._slot}", f"y{self._slot}"
            if got[f"{y}.{y}"] > 0 and got[f"{s}.{y}"] > -ROUNDING * move.step * move.slope_before:
                self._used.append(self._slot)

    def forget(self) -> None:
        self._used.clear()

    def data(self) -> c.State:
        live = {f"{kind}{slot}" for kind in "sy" for slot in self._used} | {"g"}
        return {
            "history": list(self._used),
            "dots": {name: value for name, value in self._dots.items() if live.issuperset(name.split("."))},
        }


def _dot(a: str, b: str) -> c.Dot:
    """Named alike whichever way round."""
    a, b = sorted((a, b))
    return c.Dot(f"{a}.{b}", a, b)


def _with_gradient(slots: Iterable[int]) -> list[c.Dot]:
    return [_dot(f"{kind}{slot}", "g") for slot in slots for kind in "sy"]


def _recursion(used: list[int], dots: dict[str, float]) -> tuple[tuple[float, str], ...]:
    """The two loops of −H·g, as the coefficients of s, y and g."""

    def dot(a: str, b: str) -> float:
        return dots[".".join(sorted((a, b)))]

    alpha: dict[int, float] = {}
    for i in reversed(used):
        rest = dot(f"s{i}", "g") - sum(alpha[j] * dot(f"s{i}", f"y{j}") for j in alpha)
        alpha[i] = rest / dot(f"s{i}", f"y{i}")
    gamma = dot(f"s{used[-1]}", f"y{used[-1]}") / dot(f"y{used[-1]}", f"y{used[-1]}") if used else 1.0
    weight: dict[int, float] = {}  # of s
    for i in used:
        q = dot(f"y{i}", "g") - sum(alpha[j] * dot(f"y{i}", f"y{j}") for j in used)
        r = gamma * q + sum(weight[j] * dot(f"s{j}", f"y{i}") for j in weight)
        weight[i] = alpha[i] - r / dot(f"s{i}", f"y{i}")
    of_s = [(-weight[i], f"s{i}") for i in used]
    of_y = [(gamma * alpha[i], f"y{i}") for i in used]
    return ((-gamma, "g"), *of_s, *of_y)
