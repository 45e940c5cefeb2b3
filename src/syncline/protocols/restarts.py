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


def begins_anew(
    *, unaware: bool, lost: bool, others: bool, stopping: bool, returned: bool, replace: bool
) -> bool:
    """The last learner has gone without having noticed that shards were lost: is what it made made again?

    `unaware`: it never met the new shards. A loss is only repeated where somebody returned before, and nobody takes
    the lost one's place.
    """
    repeat = not lost or (returned and not replace)
    return unaware and repeat and not others and not stopping
