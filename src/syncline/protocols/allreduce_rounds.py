"""The feed of all-reduce: who computes what in each round of an epoch, without asking anybody (M7, A5, A6).

The same joint slices as hardsync's over servers. In the last round some may have no examples left; they repeat
examples with weight zero, so that all learners take the same steps. An epoch that was left in the middle goes on with the spans
that are left of it. Not responsible for the order behind the positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from syncline.errors import UsageError
from syncline.protocols.spans import Standing

# what is left of an epoch: one for all, or (`partition`) one for each rank
Spans = tuple[tuple[int, int], ...]


class Share(NamedTuple):
    """Positions start..stop of the epoch's order; `weight` of them count: all or none."""

    start: int
    stop: int
    weight: int


def equal_shares(joint: int, learners: int) -> tuple[int, ...]:
    """A joint batch over the learners: the first take one more where it does not divide."""
    return tuple(joint // learners + (rank < joint % learners) for rank in range(learners))


def whole(size: int, learners: int, *, partition: bool) -> Spans:
    """A whole epoch."""
    if not partition:
        return ((0, size),)
    return tuple(pairwise(part * size // learners for part in range(learners + 1)))


class Rounds:
    """The rounds of one loader's epoch for one learner; `batches` are the batch sizes of all, by rank."""

    def __init__(
        self,
        *,
        size: int,
        batches: Sequence[int],
        rank: int,
        partition: bool,
        left: Spans | None = None,
    ) -> None:
        self._batch, self._batches, self._partition = batches[rank], tuple(batches), partition
        parts = whole(size, len(batches), partition=partition)
        self._left = left or parts
        own = rank if partition else 0
        before = 0 if partition else sum(batches[:rank])
        self._stride = self._batch if partition else sum(batches)
        self._low, self._high = self._left[own][0] + before, self._left[own][1]
        strides = batches if partition else (self._stride,)
        self.count = max(-(-(b - a) // s) for (a, b), s in zip(self._left, strides, strict=True))
        low, high = parts[own][0] + before, parts[own][1]
        self._spare = (low, min(high, low + self._batch))
        if self._spare[0] >= self._spare[1]:  # not even one example of its own
            self._spare = (0, min(size, self._batch))

    def share(self, number: int) -> Share:
        """This learner's part of that round."""
        start = self._low + number * self._stride
        stop = min(self._high, start + self._batch)
        if start >= stop:
            return Share(*self._spare, 0)
        return Share(start, stop, stop - start)

    def after(self, rounds: int) -> Spans:
        """What is left of the epoch after so many."""
        strides = self._batches if self._partition else (self._stride,)
        return tuple((min(b, a + rounds * s), b) for (a, b), s in zip(self._left, strides, strict=True))


def standing(epoch: int, left: Spans) -> Standing:
    """Of a feed in that epoch, with so much of it left; as a ledger says it."""
    open_spans = {owner: span for owner, span in enumerate(left) if span[0] < span[1]}
    if not open_spans:
        return Standing(done=epoch + 1, newest=epoch, fresh={}, returned=[], skipped={}, broken=[])
    return Standing(
        done=epoch, newest=epoch, fresh={epoch: open_spans}, returned=[], skipped={epoch: 0}, broken=[]
    )


def at_start(epoch: int) -> Standing:
    """Of a feed before that epoch."""
    return Standing(done=epoch, newest=epoch - 1, fresh={}, returned=[], skipped={}, broken=[])


def left_of(found: Standing, *, size: int, learners: int, parts: int, partition: bool) -> Spans | None:
    """What is left of the epoch that a feed stands in; None: it stands before one. Refused where that is no slice."""
    if partition and parts != learners:
        raise UsageError(
            f"policy='partition' of {parts} learners cannot go on over all-reduce with {learners}, whose subsets are others; "
            f"resume with learners={parts}"
        )
    if not found.fresh and not found.returned:
        return None
    epochs = {*found.fresh, *(epoch for epoch, _, _ in found.returned)}
    if epochs != {found.done}:
        raise UsageError(
            f"examples of the epochs {', '.join(map(str, sorted(epochs)))} are not folded yet; over all-reduce a run goes on in "
            "one epoch: resume it with topology='servers'"
        )
    spans = [*found.fresh.get(found.done, {}).values(), *((a, b) for _, a, b in found.returned)]
    return tuple(_tail(spans, part) for part in whole(size, learners, partition=partition))


def _tail(spans: Sequence[tuple[int, int]], part: tuple[int, int]) -> tuple[int, int]:
    """The end of a part that these spans are, if they are one."""
    inside = sorted(span for span in spans if part[0] <= span[0] and span[1] <= part[1] and span[0] < span[1])
    low = inside[0][0] if inside else part[1]
    if [low, *(stop for _, stop in inside)] != [*(start for start, _ in inside), part[1]]:
        raise UsageError(
            f"what is not folded yet ({inside}) is not the end of {part}; over all-reduce a run goes on with the rest of an "
            "epoch: resume it with topology='servers'"
        )
    return low, part[1]
