"""What the leading shard keeps of learners for snapshots, results and checkpoints: their buffers and random states (M6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from syncline.roles.checkpoint_manifest import learner_tensors


def joint_buffers(columns: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Mean of float buffers, maximum of the others (M6)."""
    return [
        torch.stack(column).mean(0) if column[0].is_floating_point() else torch.stack(column).amax(0)
        for column in map(list, zip(*columns, strict=True))
    ]


class LearnerStates:
    """Of all learners that are not lost."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, int], list[Tensor]] = {}  # by (table, learner)
        self.random: dict[int, bytes] = {}  # states by rank

    def bring(self, table: int, learner: int, buffers: list[Tensor]) -> None:
        """A learner comes with these."""
        self._buffers[table, learner] = buffers

    def keep(self, table: int, learner: int, buffers: Sequence[Tensor]) -> None:
        """Those of its last gradient, copied where they lie."""
        kept = self._buffers.get((table, learner))
        if kept is None or kept[0].device != buffers[0].device:
            self._buffers[table, learner] = [value.clone() for value in buffers]
        else:
            torch._foreach_copy_(kept, list(buffers))

    def lose(self, learner: int) -> None:
        """A lost learner's statistics do not count, unless a table has no others."""
        for table in [table for table, who in self._buffers if who == learner]:
            if sum(each == table for each, _ in self._buffers) > 1:
                del self._buffers[table, learner]

    def joint(self, table: int) -> list[Tensor] | None:
        """One table's buffers over all learners."""
        kept = [
            [value.cpu() for value in each] for (t, _), each in sorted(self._buffers.items()) if t == table
        ]
        return joint_buffers(kept) if kept else None

    def tensors(self, ranks: Mapping[int, int]) -> dict[str, Tensor]:
        """For a checkpoint, by name."""
        buffers = {
            (table, ranks[learner]): [value.cpu().clone() for value in values]
            for (table, learner), values in self._buffers.items()
        }
        return learner_tensors(self.random, buffers)
