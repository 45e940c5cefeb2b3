"""The words of the feed: positions of an epoch, what the ledger decides about them, and what of them is not settled.

Plain records. Not responsible for deciding anything (`ledger`).
"""

from __future__ import annotations

from dataclasses import dataclass
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

    def has_done(self, epoch: int) -> bool:
        return epoch < self.done or (epoch <= self.newest and epoch not in self.fresh)


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
