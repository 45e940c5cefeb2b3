"""Gathers the checkpoints of an all-reduce run: every learner's own part, and the first one's of what all have alike.

Not responsible for when they are cut, nor for the files: whoever hosts the keeper writes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from syncline import messages as m
from syncline.protocols.sequence import Account
from syncline.protocols.spans import Standing
from syncline.roles.checkpoint_manifest import LEARNERS, learner_tensors, manifest
from syncline.roles.pipeline_states import PipelineState, pipelines_json
from syncline.table.checkpoints import Written


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """What all learners have alike, without the tensors."""

    files: list[str]  # that the first learner writes
    accounts: dict[int, Account]
    examples: dict[int, int]
    optimizers: dict[int, str]
    pipelines: dict[int, PipelineState]
    loaders: dict[int, m.OpenLoader]
    standings: dict[int, Standing]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerCut:
    """One learner's part of a checkpoint; `joint` from learner 0 only."""

    number: int
    personal: m.Personal
    losses: tuple[float, int]  # of the epoch so far: (sum over examples, examples)
    flights: dict[int, list[tuple[float, int]]] = field(default_factory=dict)  # the same of those, by table
    joint: Joint | None = None


@dataclass(slots=True)
class _Open:
    parts: dict[int, PeerCut] = field(default_factory=dict)  # by rank
    saved: dict[str, m.Saved] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GatheredCut:
    """All of a checkpoint is there but the learners' own file."""

    parts: dict[int, PeerCut]
    saved: list[m.Saved]

    @property
    def number(self) -> int:
        return self.parts[0].number

    @property
    def files(self) -> list[Written]:
        return [each.written for each in self.saved if each.written is not None]

    @property
    def problem(self) -> str:
        return next((each.problem for each in self.saved if each.problem), "")

    def learners(self) -> tuple[str, dict[str, Tensor]]:
        """The file of random states and buffers."""
        random = {rank: part.personal.random for rank, part in self.parts.items()}
        buffers: dict[tuple[int, int], Sequence[Tensor]] = {
            (table, rank): values
            for rank, part in self.parts.items()
            for table, values in part.personal.buffers.items()
        }
        return LEARNERS, learner_tensors(random, buffers)

    def manifest(
        self, *, seed: int, sync: str, layouts: Mapping[int, Any], history: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        joint = self.parts[0].joint
        assert joint is not None
        epoch = joint.standings[0].done if 0 in joint.standings else 0
        counts = m.Counts(
            joint.examples,
            {epoch: {rank: list(part.losses) for rank, part in self.parts.items()}},
            {rank: part.personal.steps for rank, part in self.parts.items()},
        )
        flights = {rank: part.flights for rank, part in self.parts.items()}
        found = manifest(
            m.Cut(self.number, joint.files, joint.accounts, joint.standings, counts),
            seed=seed,
            sync=sync,
            chosen=[],
            learners=len(self.parts),
            tables={table: (layouts[table], name) for table, name in joint.optimizers.items()},
            loaders={number: (loader, len(self.parts)) for number, loader in joint.loaders.items()},
            history=history,
        )
        return {**found, "pipelines": pipelines_json(joint.pipelines, flights)}


def own_losses(
    losses: Mapping[int, Mapping[int, Sequence[float]]], rank: int, learners: int
) -> tuple[float, int]:
    """Of a rank in a run that goes on; the first takes over those of ranks that there are no more."""
    by_rank = [pair for epoch in losses.values() for pair in epoch.items()]
    mine = [each for other, each in by_rank if other == rank or (rank == 0 and other >= learners)]
    return sum(loss for loss, _ in mine), int(sum(count for _, count in mine))


class AllReduceCheckpoints:
    """Those that are not complete, by number."""

    def __init__(self, learners: int) -> None:
        self._learners = learners
        self._cuts: dict[int, _Open] = {}

    @property
    def open(self) -> bool:
        return bool(self._cuts)

    def add(self, rank: int, message: PeerCut | m.Saved) -> GatheredCut | None:
        """One more part; all of them, when it was the last."""
        cut = self._cuts.setdefault(message.number, _Open())
        if isinstance(message, PeerCut):
            cut.parts[rank] = message
        else:
            cut.saved[message.name] = message
        if len(cut.parts) < self._learners:
            return None
        joint = cut.parts[0].joint
        assert joint is not None
        if set(joint.files) - cut.saved.keys():
            return None
        del self._cuts[message.number]
        return GatheredCut(cut.parts, [cut.saved[name] for name in joint.files])
