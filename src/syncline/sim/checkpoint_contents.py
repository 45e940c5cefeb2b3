"""What a checkpoint of a simulated run holds beside the run itself: its moment. With it a run goes on to the same bits.

A simulated checkpoint is exact: the run that wrote it goes on from it, too, as a resumed one would. Not responsible for
tables, feeds and random states, which are in every checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from syncline.engines.run import RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Where a simulated run stands."""

    learners: int  # the run was started with
    seconds: float = 0.0
    ranks: list[int] = field(default_factory=list)  # that live
    last_rank: int = -1  # the highest that was ever given
    returned: list[int] = field(default_factory=list)  # ranks
    losses: list[tuple[int, int]] = field(default_factory=list)  # (rank, in a row without a step)
    cut_asked: float = 0.0
    played: list[str] = field(default_factory=list)  # lines of the script

    @classmethod
    def of(cls, spec: RunSpec) -> Moment:
        """Where this run begins: at a checkpoint's moment, unless it is to have another number of learners."""
        kept = spec.storage.restored.simulated if spec.storage.restored is not None else None
        if kept is not None and kept["learners"] == spec.plan.learners and kept["ranks"]:
            return cls(**{**kept, "losses": [(rank, count) for rank, count in kept["losses"]]})
        seconds = kept["seconds"] if kept is not None else 0.0
        return cls(learners=spec.plan.learners, seconds=seconds, ranks=list(range(spec.plan.learners)))


def with_states(tensors: dict[str, Tensor], states: Iterable[tuple[int, bytes]]) -> dict[str, Tensor]:
    """A checkpoint's learners with the random states that they have now, by rank."""
    kept = dict(tensors)  # who has left keeps its last ones
    for rank, state in states:
        kept[f"random/{rank}"] = torch.frombuffer(bytearray(state), dtype=torch.uint8)
    return kept
