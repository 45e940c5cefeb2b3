"""What a run is to do: one description, made before it starts, that every party of it reads. Plain records.

Not responsible for where it runs, for what happens at faults, nor for where its files are (`engines.run.RunSpec`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from syncline.dial import Course
from syncline.topologies import Servers, Topology, Trees


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """What is kept of a run while it goes on."""

    cuts: bool = False  # checkpoints are written, be it by another process
    every: int | None = None  # versions from one to the next
    seconds: float | None = None
    clocks: bool = False  # the vector clock of every update


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """One run: over what, under which dials, for how long."""

    course: Course
    learners: int  # to begin with
    topology: Topology = Servers(1, True)  # noqa: RUF009 - frozen
    seed: int = 0
    warm: int = 0  # updates that the first learner makes alone
    batch_size: int | None = None
    joint_batch: int | None = None  # examples of one update, where known
    limit: int | None = None  # updates
    epochs: int | None = None  # of the first loader, where `train` knows it
    clip_norm: float | None = None
    local: bool = False  # with one group, what is cut over its seats is updated by them (M16)
    snapshots: bool = False  # the first loader's epochs end with a snapshot
    saving: Saving = Saving()

    @property
    def servers(self) -> Servers:
        """Of a run that has them; of a tree those at its root."""
        found = self.topology.root if isinstance(self.topology, Trees) else self.topology
        assert isinstance(found, Servers)
        return found

    @property
    def delay(self) -> int:
        """Of the dial that runs furthest ahead."""
        return max(sync.delay for _, sync in self.course.dials)

    @property
    def kept(self) -> int:
        """Versions that stay readable: where the dial changes, up to `delay` updates follow at once while the slowest
        still reads the oldest."""
        return 2 * self.delay + 1 if self.delay else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """What one learner knows from the start."""

    plan: RunPlan
    rank: int
    device: str = "cpu"
    reader: bool = True  # a thread reads ahead; it draws when it likes
    seats: int = 1  # processes of this learner
    devices: tuple[str, ...] = ()  # of its processes
    cut: Any = None  # how its model is cut over them
