"""What the coordinator tells whoever started the run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Checkpointed:
    """A checkpoint is complete (said by the coordinator), or failed."""

    number: int
    path: str
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Warned:
    """For the user, once for each cause."""

    text: str
    cause: str
