"""Where this process stands among those that torchrun has started, and the store in which they find each other.

The whole network can read and write the store: no secret may lie in it, and nothing from it may be unpickled.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from syncline.errors import UsageError
from syncline.table.checkpoints import CheckpointError

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class TorchrunPlace:
    """One of `learners` processes (or seats of one learner); `local_rank` of `local` on this machine."""

    rank: int
    learners: int
    local_rank: int
    local: int
    master: str
    one_host: bool = False  # torchrun says that all processes are on this machine

    @classmethod
    def here(cls) -> TorchrunPlace | None:
        """None where nobody has started this process for a group."""
        if any(name not in os.environ for name in NEEDED):
            return None
        rank, learners = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return cls(
            rank,
            learners,
            int(os.environ.get("LOCAL_RANK", rank)),
            int(os.environ.get("LOCAL_WORLD_SIZE", learners)),
            os.environ["MASTER_ADDR"],
            one_host=learners == 1 or os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"],
        )

    @property
    def neighbours(self) -> range:
        """Ranks on this machine."""
        first = self.rank - self.local_rank
        return range(first, first + self.local)

    def check(self, *, topology: str, learners: int, default: int, wait: bool, group: int) -> int:
        """The number of learners; what cannot be under torchrun is refused."""
        if topology.partition(":")[0] != "allreduce":
            raise UsageError(
                f"under torchrun every process is a learner, and nobody starts servers: topology={topology!r} cannot be; "
                "pass topology='allreduce', or start the script without torchrun"
            )
        if not wait:
            raise UsageError("wait=False cannot be under torchrun: the caller's process is itself a learner")
        if group > 1:
            if group != self.learners or learners not in (1, default):
                raise UsageError(
                    f"learners={learners}, group={group}, but torchrun has started {self.learners} processes, which are the seats of one "
                    f"learner; give learners=1, group={self.learners}, or start the script without torchrun"
                )
            return 1
        if learners not in (default, self.learners):
            raise UsageError(
                f"learners={learners}, but torchrun has started {self.learners} processes; leave learners= out"
            )
        return self.learners


class Refusal(CheckpointError, UsageError):
    """A rank cannot begin; all of them hear why."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a rank comes with."""

    host: str
    device: str
    refused: str  # why it cannot begin
    checkpoint: tuple[int, int] | None  # version and seal of the one it has read


def difference(arrived: Sequence[Arrival]) -> str:
    """Why these cannot begin together."""
    for rank, each in enumerate(arrived):
        if each.refused:
            seen = "; every rank must see the folder of resume=" if rank else ""
            return f"rank {rank} on {each.host}: {each.refused}{seen}"
    first = arrived[0]
    for rank, each in enumerate(arrived):
        if each.checkpoint != first.checkpoint:
            versions = [found.checkpoint[0] if found.checkpoint else None for found in (each, first)]
            return (
                f"rank {rank} on {each.host} reads another checkpoint (of version {versions[0]}) than rank 0 on {first.host} "
                f"(of version {versions[1]}): resume= must name one folder that all ranks see"
            )
    return ""


_runs = 0  # of this process
_store: Any = None


def next_store() -> Any:
    """A part of torchrun's store for one run; all processes make their runs in the same order."""
    global _runs, _store
    if _store is None:
        _store, _, _ = next(iter(dist.rendezvous("env://")))
    _runs += 1
    return dist.PrefixStore(f"syncline/{_runs}", _store)
