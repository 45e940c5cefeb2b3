"""The feed of all-reduce: who computes what in each round of an epoch, without asking anybody (M7, A5, A6).

The same joint slices as hardsync's over servers. In the last round some may have no examples left; they repeat
examples with weight zero, so that all learners take the same steps. Not responsible for the order behind the positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple


class Share(NamedTuple):
    """Positions start..stop of the epoch's order; `weight` of them count: all or none."""

    start: int
    stop: int
    weight: int


def equal_shares(joint: int, learners: int) -> tuple[int, ...]:
    """A joint batch over the learners: the first take one more where it does not divide."""
    return tuple(joint // learners + (rank < joint % learners) for rank in range(learners))


class Rounds:
    """The rounds of one loader's epoch for one learner; `batches` are the batch sizes of all, by rank."""

    def __init__(self, *, size: int, batches: Sequence[int], rank: int, partition: bool) -> None:
        self._batch, learners = batches[rank], len(batches)
        if partition:
            bounds = [part * size // learners for part in range(learners + 1)]
            self._low, self._high, self._stride = bounds[rank], bounds[rank + 1], self._batch
            rounds = [-(-(b - a) // batch) for (a, b), batch in zip(pairwise(bounds), batches, strict=True)]
            self.count = max(rounds)
        else:
            self._low, self._high, self._stride = sum(batches[:rank]), size, sum(batches)
            self.count = -(-size // self._stride)
        self._spare = (self._low, min(self._high, self._low + self._batch))
        if self._spare[0] >= self._spare[1]:  # not even one example of its own
            self._spare = (0, min(size, self._batch))

    def share(self, number: int) -> Share:
        """This learner's part of that round."""
        start = self._low + number * self._stride
        stop = min(self._high, start + self._batch)
        if start >= stop:
            return Share(*self._spare, 0)
        return Share(start, stop, stop - start)
