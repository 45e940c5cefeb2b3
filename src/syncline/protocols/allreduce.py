"""What learners among equals decide alike, without asking anybody: all-reduce has no leader.

`Rounds`: who computes what in each round of an epoch (M7, A5, A6). The same joint slices as hardsync's over servers; in the last round
some may have no examples left and repeat some with weight zero, so that all take the same steps. An epoch that was left in
the middle goes on with the spans that are left of it.
`plan_buckets` and `Filling`: which parameters are reduced together, and when a bucket's reduction may start (A2). Buckets are filled
in the order in which backward makes gradients; all start the same buckets in the same order, whatever order gradients come in.
`Pipeline` and `Vote`: which reduction is applied at which step, and how the pipeline's depth adapts (A3). At step t the reduction of
iteration t starts, and all older than the last k are applied; all learners reach the same k at the same step.
Not responsible for the order behind positions, for memory, nor for the reduction itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from syncline.errors import UsageError
from syncline.protocols.epoch_positions import Standing

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
        return Standing.before(epoch + 1)
    return Standing(
        done=epoch, newest=epoch, fresh={epoch: open_spans}, returned=[], skipped={epoch: 0}, broken=[]
    )


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
            f"examples of the epochs {', '.join(str(epoch + 1) for epoch in sorted(epochs))} are not folded yet; over all-reduce a run goes on in "
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


# -- buckets -----------------------------------------------------------------------------------------------


def plan_buckets(
    sizes: Sequence[int], kinds: Sequence[str], limit: int | None
) -> tuple[tuple[int, ...], ...]:
    """Indices of parameters by bucket, the last parameters first; `sizes` in bytes, `kinds` their dtypes.

    A bucket closes when it holds `limit` bytes (None: never); a parameter is never cut. Without a limit there is one
    bucket for each dtype.
    """
    done: list[tuple[int, ...]] = []
    open_: dict[str, list[int]] = {}
    for index in reversed(range(len(sizes))):
        bucket = open_.setdefault(kinds[index], [])
        bucket.append(index)
        if limit is not None and sum(sizes[i] for i in bucket) >= limit:
            done.append(tuple(bucket))
            del open_[kinds[index]]
    done += [tuple(bucket) for bucket in open_.values()]
    return tuple(sorted(done, key=lambda bucket: -bucket[-1]))  # whose last gradient comes first


class Filling:
    """One backward: gradients come in any order, buckets start in theirs."""

    def __init__(self, buckets: Sequence[Sequence[int]]) -> None:
        self._bucket_of = {index: number for number, bucket in enumerate(buckets) for index in bucket}
        self._sizes = [len(bucket) for bucket in buckets]
        self.begin()

    def begin(self) -> None:
        """A new backward."""
        self._missing = list(self._sizes)
        self._come: set[int] = set()
        self.started = 0  # buckets

    @property
    def complete(self) -> bool:
        """Every bucket has been started."""
        return self.started == len(self._sizes)

    def come(self, index: int) -> range:
        """This parameter's gradient is there: the buckets to start now."""
        if index in self._come:
            return range(0)
        self._come.add(index)
        self._missing[self._bucket_of[index]] -= 1
        first = self.started
        while self.started < len(self._sizes) and self._missing[self.started] == 0:
            self.started += 1
        return range(first, self.started)

    def has(self, index: int) -> bool:
        return index in self._come

    def rest(self) -> range:
        """Backward is over, no more gradients come: all that were not started."""
        first, self.started = self.started, len(self._sizes)
        return range(first, self.started)


# -- the pipeline ------------------------------------------------------------------------------------------


TURNS = 3  # enough to tell one step more from one less


def turn(steps: int) -> tuple[float, ...]:
    """One learner's part of a count that all of them see: who has taken how many steps, modulo three."""
    return tuple(float(steps % TURNS == each) for each in range(TURNS))


def ahead(counts: Sequence[float], steps: int) -> int:
    """How many have taken one step more than a learner with so many; a step left out is seen before the next is taken."""
    return int(counts[(steps + 1) % TURNS])


def behind(counts: Sequence[float], steps: int) -> int:
    """How many have taken one step less."""
    return int(counts[(steps - 1) % TURNS])


class Pipeline:
    """Iterations in flight, oldest first."""

    def __init__(self, depth: int) -> None:
        self.depth = depth  # k
        self.started = 0  # iterations
        self._flying: deque[int] = deque()

    def start(self) -> int:
        """One more iteration's reduction starts; its number."""
        self._flying.append(self.started)
        self.started += 1
        return self.started - 1

    def resume(self, started: int, flying: Sequence[int]) -> None:
        """Go on where a run before was."""
        self.started = started
        self._flying.extend(flying)

    def due(self) -> int | None:
        """The iteration to apply now, if one is older than the last k."""
        return self._flying.popleft() if len(self._flying) > self.depth else None

    def oldest(self) -> int | None:
        """The next that will be due."""
        return self._flying[0] if self._flying else None

    def flush(self) -> int | None:
        """The end: the oldest in flight."""
        return self._flying.popleft() if self._flying else None


@dataclass(slots=True)
class Vote:
    """How deep the pipeline of `delayed:auto<=limit` is.

    Each reduction carries the sums over all learners of the seconds they visibly waited, of all their seconds, and of
    how many found the reduction after it complete already. Waiting makes the pipeline deeper; a window in which
    everybody found the next one complete makes it less deep, the first time soon, then ever more seldom.
    """

    limit: int
    learners: int
    depth: int = 1
    window: int = 8  # applications between two decisions
    much: float = 0.05  # share of waiting that makes it deeper
    share: float = 0.0  # of waiting, at the last decision
    _waited: float = 0.0
    _spent: float = 0.0
    _early: int = 0
    _seen: int = 0
    _quiet: int = 0  # windows in a row in which it could have been less deep
    _patience: dict[int, int] = field(
        default_factory=dict
    )  # depth -> quiet windows until it is left downwards

    def add(self, waited: float, spent: float, early: int) -> int | None:
        """One application; the new depth, if it changes."""
        self._waited += waited
        self._spent += spent
        self._early += early >= self.learners
        self._seen += 1
        if self._seen < self.window:
            return None
        self.share = self._waited / self._spent if self._spent > 0 else 0.0
        could = self._early == self._seen
        self._waited, self._spent, self._early, self._seen = 0.0, 0.0, 0, 0
        if self.share > self.much:
            self._quiet = 0
            if self.depth == self.limit:
                return None
            self.depth += 1
            # it was not deep enough one step below: coming back there takes twice as long
            self._patience[self.depth] = 2 * self._patience.get(self.depth, 1)
            return self.depth
        self._quiet = self._quiet + 1 if could else 0
        if self.depth > 1 and self._quiet >= self._patience.get(self.depth, 1):
            self.depth -= 1
            self._quiet = 0
            return self.depth
        return None
