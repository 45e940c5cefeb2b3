"""What a batch method says (M18): small commands on named vectors, and what it gives at the end of an iteration.

Every shard carries out the commands of a program in order on its own part of the vectors; only scalars come back,
by the name the command gives them. Not responsible for carrying anything out, nor for which commands a method needs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Generator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from syncline.errors import UsageError


@dataclass(frozen=True, slots=True)
class Dot:
    """Σ aᵢbᵢ, in float64, shards added in their order."""

    name: str
    a: str
    b: str


@dataclass(frozen=True, slots=True)
class Largest:
    """max |aᵢ|; nan where any is nan."""

    name: str
    a: str


@dataclass(frozen=True, slots=True)
class Copy:
    to: str
    of: str


@dataclass(frozen=True, slots=True)
class Swap:
    a: str
    b: str


@dataclass(frozen=True, slots=True)
class Fill:
    to: str
    value: float


@dataclass(frozen=True, slots=True)
class Scale:
    to: str
    by: float


@dataclass(frozen=True, slots=True)
class Axpy:
    """to += by · of"""

    to: str
    by: float
    of: str


@dataclass(frozen=True, slots=True)
class Multiply:
    """to *= of, coefficient by coefficient."""

    to: str
    of: str


@dataclass(frozen=True, slots=True)
class Combine:
    """to = Σ by · of over the terms, from their values before; `to` may be one of them."""

    to: str
    terms: tuple[tuple[float, str], ...]


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Loss and gradient of the whole batch at a vector: learners read it once, and add up portions."""

    at: str = "x"
    gradient: str = "g"
    loss: str = "loss"


Command = Dot | Largest | Copy | Swap | Fill | Scale | Axpy | Multiply | Combine | Evaluate
# One message: one round trip, or one evaluation with what goes before and after it.
Program = tuple[Command, ...]
Scalars = Mapping[str, float]
State = dict[str, Any]  # plain data: what json.dumps takes


@dataclass(frozen=True, slots=True)
class Record:
    """One iteration, for the history; `evaluations` counts all so far."""

    iteration: int
    loss: float
    step: float  # what the direction was multiplied by
    gradient_norm: float  # max |gᵢ|
    evaluations: int
    restarted: bool = False  # what the method knew of earlier iterations was of no use


@dataclass(frozen=True, slots=True)
class Iteration:
    """x is the new iterate (a version); with the vectors as they are now, the method goes on from this state."""

    state: State
    record: Record


@dataclass(frozen=True, slots=True)
class End:
    """Why a method ended; x is the best iterate."""

    why: str  # gradient | decrease | line search | not finite, or a word of the method's own
    message: str
    iterations: int
    evaluations: int
    loss: float


# A program is answered with its scalars, an iteration with {}.
Steps = Generator[Program | Iteration, Scalars, End]


class BatchMethod(Protocol):
    """Options, the vectors that have to lie on the shards (x, the weights, among them), and what to do from a state on."""

    @property
    def vectors(self) -> tuple[str, ...]: ...

    def __call__(self, state: State | None = None) -> Steps: ...


def is_method(given: object) -> bool:
    """Something with named vectors that can be called with a state; no class that makes one."""
    return callable(given) and not isinstance(given, type) and hasattr(given, "vectors")


def results(program: Program) -> tuple[str, ...]:
    """The names of the scalars that come back."""
    measuring = (c for c in program if isinstance(c, Dot | Largest | Evaluate))
    return tuple(c.loss if isinstance(c, Evaluate) else c.name for c in measuring)


def check(program: Program, vectors: Collection[str]) -> None:
    """Refuse what no shard could carry out."""
    for command in program:
        if not isinstance(command, Command):
            raise UsageError(f"a program is a tuple of commands, got {command!r} in it")
        # the vectors it names and its numbers
        if isinstance(command, Combine):
            operands = [command.to, *(part for term in command.terms for part in term)]
        else:
            operands = [getattr(command, key) for key in command.__slots__ if key not in ("name", "loss")]
        for operand in operands:
            if isinstance(operand, str):
                if operand not in vectors:
                    raise UsageError(
                        f"{command} names {operand!r}; the method's vectors are {', '.join(vectors)}"
                    )
            elif not math.isfinite(operand):
                raise UsageError(
                    f"{command} has the number {operand}; the method must end or restart instead"
                )
    names = results(program)
    if len(set(names)) < len(names):
        raise UsageError(f"two results of one program have the same name: {', '.join(sorted(names))}")
