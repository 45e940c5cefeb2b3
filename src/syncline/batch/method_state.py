"""Where a batch method stands, and when it ends: what all methods here share.

Responsible for the stops, for options checked when built, and for the plain data of an iteration. Not responsible
for directions and steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from syncline.batch.commands import Dot, End, Largest, Record, Scalars, State
from syncline.errors import UsageError

MEASURE = (Dot("g.g", "g", "g"), Largest("largest", "g"))


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
    def of(cls, method: str, state: State | None) -> Standing:
        if state is None:
            return cls(method)
        if state.get("method") != method:
            raise UsageError(f"{method} cannot go on from a state of {state.get('method', 'no method')}")
        return cls(**{field.name: state[field.name] for field in fields(cls)})

    def begin(self, got: Scalars) -> bool:
        """The evaluation at x with which the method begins; False where it is not finite."""
        self.evaluations += 1
        self.evaluated, self.decrease = True, None
        return self._arrive(got["loss"], got)

    def advance(self, loss: float, got: Scalars) -> bool:
        """An iteration ends at the point of this loss; False, and nothing changes, where it is not finite."""
        before = self.loss
        if not self._arrive(loss, got):
            return False
        self.iteration += 1
        scale = max(1.0, abs(before), abs(loss))
        self.decrease = before / scale - loss / scale  # the difference itself may overflow
        return True

    def _arrive(self, loss: float, got: Scalars) -> bool:
        if not all(map(math.isfinite, (loss, got["g.g"], got["largest"]))):
            return False
        self.loss, self.squared, self.largest = loss, got["g.g"], got["largest"]
        return True

    def record(self, step: float, restarted: bool = False) -> Record:
        return Record(self.iteration, self.loss, step, self.largest, self.evaluations, restarted)

    def end(self, why: str, message: str) -> End:
        counts = f"{self.iteration} iterations, {self.evaluations} evaluations"
        return End(
            why,
            f"{message}; loss {self.loss:.9g} after {counts}",
            self.iteration,
            self.evaluations,
            self.loss,
        )


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
            return (
                "decrease",
                f"the loss fell by {at.decrease:.3g} of max(1, |loss|), within {self.decrease:g}",
            )
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
