"""How often the lost are brought back: shards between two checkpoints, learners that never step. Bounded, both.

Not responsible for starting anything.
"""

from __future__ import annotations

from collections import Counter

MOST = 3


class Restarts:
    """Counts losses that led nowhere."""

    def __init__(self) -> None:
        self.shards = 0  # losses since the last checkpoint
        self.learners: Counter[int] = Counter()  # rank -> losses in a row without a step

    def shard_lost(self) -> bool:
        """False: it was lost too often without a checkpoint in between."""
        self.shards += 1
        return self.shards <= MOST

    def checkpointed(self) -> None:
        self.shards = 0

    def learner_lost(self, rank: int, *, stepped: bool) -> bool:
        """False: its replacements die before their first step."""
        self.learners[rank] = 0 if stepped else self.learners[rank] + 1
        return self.learners[rank] < MOST
