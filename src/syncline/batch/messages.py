"""What the coordinator of a batch method, its shards and its learners say to each other: plain records, no vector.

Not responsible for carrying them.
"""

from __future__ import annotations

from dataclasses import dataclass

from syncline.batch.commands import End, Iteration, Program
from syncline.batch.portions import Batch, Cancel

# -- to all shards -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Run:
    """Carry out commands, none of them an `Evaluate`; answered by Ran."""

    number: int
    commands: Program


@dataclass(frozen=True, slots=True)
class Add:
    """Add the sum in a slot to a vector, or put it there where it is the first; answered by Added."""

    slot: int
    to: str
    first: bool


@dataclass(frozen=True, slots=True)
class Save:
    """Write the vectors to the files of this checkpoint; answered by what was written."""

    number: int


# -- from a shard --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ran:
    shard: int
    number: int
    measured: tuple[float, ...]  # in the order of the commands that measure


@dataclass(frozen=True, slots=True)
class Added:
    shard: int
    slot: int


# -- to a learner; and `Cancel` --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Give:
    """Add up portions start…stop−1 of the batch into a slot; answered by Answered, or Dropped after a Cancel."""

    learner: int
    evaluation: int
    task: int
    start: int
    stop: int
    batch: Batch
    slot: int


# -- from a learner ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ready:
    """It can compute."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The sum of its gradients is in the slot."""

    evaluation: int
    task: int
    loss: float  # the sum over examples
    examples: int


@dataclass(frozen=True, slots=True)
class Dropped:
    evaluation: int
    task: int


# -- to the engine ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reached:
    """x is a new iterate, and nothing moves until `proceed`."""

    iteration: Iteration
    batch: Batch


@dataclass(frozen=True, slots=True)
class Over:
    """The method has ended, or (None) it was told to."""

    end: End | None


Action = Run | Add | Give | Cancel | Reached | Over
