"""What is counted in a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from syncline.protocols.staleness import Staleness


@dataclass(frozen=True, slots=True)
class Counts:
    """What the leading shard has counted, beside the tables' and loaders' own accounts."""

    examples: dict[int, int] = field(default_factory=dict)  # by table
    losses: dict[int, dict[int, list[float]]] = field(default_factory=dict)  # epoch -> rank -> [sum, count]
    steps: dict[int, int] = field(default_factory=dict)  # by rank


@dataclass(frozen=True, slots=True)
class TableStatistics:
    version: int
    gradients: int
    dropped: int
    examples: int
    staleness: Staleness
    waiting: dict[int, int]  # rank -> version it waits for (-1: for data)
    missing: list[int]  # ranks that the next lockstep update waits for
    pending: int


@dataclass(frozen=True, slots=True)
class ProcessStatistics:
    """One process of a run, or one simulated."""

    role: str  # "learner", "shard" or "evaluator"
    rank: int
    pid: int
    state: str  # "computing", "waits for version 7", "returned", "lost" …
    steps: int = 0
    loss: float | None = None
    machine: str = ""  # its name, where it is another than the caller's


@dataclass(frozen=True, slots=True)
class Statistics:
    number: int
    tables: dict[int, TableStatistics] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)  # rank -> gradients published
    losses: dict[int, float] = field(default_factory=dict)  # rank -> last loss
    processes: tuple[ProcessStatistics, ...] = ()
    refused: int = 0  # connections and frames on a cluster that were not the run's own, or no frames at all
