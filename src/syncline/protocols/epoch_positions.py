"""The positions of every epoch (M7): those not handed out, those that came back, how many are not settled; and what is said of them.

Responsible for cutting batches from them, for the fixed parts of `partition`, and for what a checkpoint keeps of them. Pure.
Not responsible for who gets which, nor for when (`ledger`).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Grant:
    """This learner computes positions start…stop−1 of that epoch's order."""

    learner: int
    index: int  # counts the grants and ends of this learner
    epoch: int  # of the positions: older than the learner's own where they came back
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class End:
    """This learner's loader of that epoch ends; its other asks for it are void."""

    learner: int
    index: int
    epoch: int


@dataclass(frozen=True, slots=True)
class EpochDone:
    """Every position of the epoch is settled, but for those that nobody wanted."""

    epoch: int
    skipped: int = 0  # left over where learners broke out of their loops


Decision = Grant | End | EpochDone


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What of each epoch is not settled: enough to go on with the feed later, with any number of learners."""

    done: int  # epochs, in order: later ones may be done before them
    newest: int
    fresh: dict[int, dict[int, tuple[int, int]]]  # epoch that is not done -> owner -> not handed out
    returned: list[tuple[int, int, int]]  # (epoch, start, stop) of all that was handed out and is not settled
    skipped: dict[int, int]
    broken: list[int]

    @classmethod
    def before(cls, epoch: int) -> Standing:
        """Of a feed that has not begun that epoch."""
        return cls(done=epoch, newest=epoch - 1, fresh={}, returned=[], skipped={}, broken=[])

    def has_done(self, epoch: int) -> bool:
        return epoch < self.done or (epoch <= self.newest and epoch not in self.fresh)

    def contradiction(self, size: int) -> str:
        """Name what cannot be true of data of that size (-1: a stream); empty where everything fits."""
        if not (0 <= self.done <= self.newest + 1 and self.skipped.keys() == self.fresh.keys()):
            return f"{self.done} epochs are done, {self.newest} is the newest, {sorted(self.fresh)} are open"
        spans = [Span(*each) for each in self.returned]
        spans += [Span(epoch, *ends) for epoch, owners in self.fresh.items() for ends in owners.values()]
        for span in spans:
            if span.epoch not in self.fresh or not 0 <= span.start < span.stop or span.stop > size >= 0:
                return f"no examples {span.start} to {span.stop} of {size} are open in epoch {span.epoch}"
        closed = [epoch for epoch in self.fresh if not self.done <= epoch <= self.newest]
        return f"epoch {closed[0]} is open, and done" if closed else ""


class Span(NamedTuple):
    """Positions start…stop−1 of an epoch; sorts by age."""

    epoch: int
    start: int
    stop: int

    def cut(self, length: int) -> tuple[Span, Span | None]:
        """The first `length` positions, and the rest if there is one."""
        middle = self.start + length
        if middle >= self.stop:
            return self, None
        return Span(self.epoch, self.start, middle), Span(self.epoch, middle, self.stop)


@dataclass(slots=True)
class _Epoch:
    fresh: dict[int, Span]  # not handed out yet, by owner
    left: int  # positions neither settled nor skipped
    skipped: int = 0


class EpochPositions:
    """All epochs that have begun; `parts` of them have owners where it is a `partition`, by rank."""

    def __init__(
        self,
        *,
        size: int,
        batch_size: int,
        partition: bool = False,
        parts: int = 1,
        standing: Standing | None = None,
    ) -> None:
        self._size, self._batch_size = size, batch_size
        self.partition, self._parts = partition, parts
        self._unfinished: dict[int, _Epoch] = {}
        self.returned: list[Span] = []  # a heap, oldest first
        self.newest = -1  # epoch
        self.done = 0  # epochs, in order: later ones may be done before them
        self.broken: set[int] = set()  # epochs that somebody broke out of
        self.over = False  # the last position of an epoch is settled: `finish` has to look
        self.orphans = False  # parts of owners that may not have come again
        if standing is not None:
            self._restore(standing)

    # -- epochs ----------------------------------------------------------------------------------------------

    def begin(self, epoch: int, ranks: set[int]) -> None:
        """Up to that epoch; parts of owners that are not there are for everybody."""
        while self.newest < epoch:
            self.newest += 1
            shares = self._owned(self.newest) if self.partition else {0: Span(self.newest, 0, self._size)}
            if self.partition:
                self.give_back(shares.pop(rank) for rank in list(shares) if rank not in ranks)
            self._unfinished[self.newest] = _Epoch(fresh=shares, left=self._size)

    def finish(self) -> list[EpochDone]:
        """The epochs that are done since the last time: each as soon as its own last position is settled (M10)."""
        self.over = False
        found = [EpochDone(epoch, s.skipped) for epoch, s in self._unfinished.items() if not s.left]
        for each in found:
            del self._unfinished[each.epoch]
            self.broken.discard(each.epoch)
        self.done = self.not_done(self.done)
        return found

    def not_done(self, epoch: int) -> int:
        """That epoch, or the first after it that is not done."""
        while epoch <= self.newest and epoch not in self._unfinished:
            epoch += 1
        return epoch

    def left(self, epoch: int) -> int:
        """Positions of it that are neither settled nor skipped."""
        state = self._unfinished.get(epoch)
        return state.left if state is not None else 0

    def skip(self, epoch: int) -> None:
        """Nobody wants what is left of it."""
        state = self._unfinished[epoch]
        back = [span for span in self.returned if span.epoch == epoch]
        skipped = length(state.fresh.values()) + length(back)
        state.fresh.clear()
        state.left -= skipped
        self.over |= state.left == 0
        state.skipped += skipped
        if back:
            self.returned = [span for span in self.returned if span.epoch != epoch]
            heapq.heapify(self.returned)

    # -- positions -------------------------------------------------------------------------------------------

    def has(self, epoch: int) -> bool:
        """There is something to hand out in that epoch."""
        state = self._unfinished.get(epoch)
        return bool(self.returned or (state is not None and state.fresh))

    def next(self, epoch: int, rank: int) -> Span | None:
        """A batch for a learner of that rank: first what came back, or (`partition`) first of its own part."""
        if self.partition:
            return self._next_fresh(epoch, rank) or self._next_returned(epoch)
        return (self.returned and self._next_returned(epoch)) or self._next_fresh(epoch, 0)

    def _next_fresh(self, epoch: int, owner: int) -> Span | None:
        state = self._unfinished.get(epoch)
        whole = state.fresh.get(owner) if state is not None else None
        if state is None or whole is None:
            return None
        span, rest = whole.cut(self._batch_size)
        if rest:
            state.fresh[owner] = rest
        else:
            del state.fresh[owner]
        return span

    def _next_returned(self, epoch: int) -> Span | None:
        if not self.returned or self.returned[0].epoch > epoch:
            return None
        span, rest = heapq.heappop(self.returned).cut(self._batch_size)
        if rest:
            heapq.heappush(self.returned, rest)
        return span

    def give_back(self, spans: Iterable[Span]) -> None:
        for span in spans:
            heapq.heappush(self.returned, span)

    def settle(self, span: Span) -> None:
        state = self._unfinished[span.epoch]
        state.left -= span.stop - span.start
        if not state.left:
            self.over = True

    # -- owners ----------------------------------------------------------------------------------------------

    def _owned(self, epoch: int) -> dict[int, Span]:
        """The part of each rank."""
        bounds = [part * self._size // self._parts for part in range(self._parts + 1)]
        return {rank: Span(epoch, *ends) for rank, ends in enumerate(pairwise(bounds)) if ends[0] < ends[1]}

    def owners(self) -> set[int]:
        """Ranks that have a part of their own."""
        return set(self._owned(0)) if self.partition else set()

    def owns(self, rank: int) -> bool:
        """Something of its own part is not handed out."""
        return self.partition and any(rank in state.fresh for state in self._unfinished.values())

    def disown(self, rank: int, epoch: int | None = None) -> None:
        """What is not handed out of its part goes to the others: of that epoch, or of all."""
        if not self.partition:
            return
        for number, state in self._unfinished.items():
            if (epoch is None or number == epoch) and rank in state.fresh:
                self.give_back([state.fresh.pop(rank)])

    def adopt(self, ranks: set[int]) -> None:
        """All have come who go on with the feed: what has no owner in its epoch any more is for everybody."""
        self.orphans = False
        owners = ranks if self.partition else ({0} if ranks else set())
        for epoch, state in self._unfinished.items():
            for owner in [each for each in state.fresh if epoch < self.newest or each not in owners]:
                self.give_back([state.fresh.pop(owner)])

    # -- checkpoints -----------------------------------------------------------------------------------------

    def standing(self, held: Iterable[Span]) -> Standing:
        """Everything not settled, with what learners hold."""
        return Standing(
            done=self.done,
            newest=self.newest,
            fresh={
                epoch: {owner: (span.start, span.stop) for owner, span in state.fresh.items()}
                for epoch, state in self._unfinished.items()
            },
            returned=sorted((span.epoch, span.start, span.stop) for span in (*self.returned, *held)),
            skipped={epoch: state.skipped for epoch, state in self._unfinished.items()},
            broken=sorted(self.broken),
        )

    def _restore(self, standing: Standing) -> None:
        self.done, self.newest = standing.done, standing.newest
        self.returned = sorted(Span(*span) for span in standing.returned)  # a sorted list is a heap
        self.broken = set(standing.broken)
        self.orphans = self.over = True
        for epoch, owners in standing.fresh.items():
            fresh = {owner: Span(epoch, *ends) for owner, ends in owners.items()}
            back = [span for span in self.returned if span.epoch == epoch]
            left = length(fresh.values()) + length(back)
            # what owners had of their parts comes first in these again, so that joint rounds are as they were
            ends = {span.stop: span for span in back}
            for owner, part in self._owned(epoch).items() if self.partition else ():
                start = fresh[owner].start if owner in fresh else part.stop
                while start > part.start and start in ends:
                    self.returned.remove(ends[start])
                    start = ends[start].start
                if start < part.stop:
                    fresh[owner] = part._replace(start=start)
            self._unfinished[epoch] = _Epoch(fresh=fresh, left=left, skipped=standing.skipped[epoch])


def length(spans: Iterable[Span]) -> int:
    return sum(span.stop - span.start for span in spans)
