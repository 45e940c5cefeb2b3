"""What the leading shard counts: examples by table, steps and losses by rank. Not responsible for versions and staleness."""

from __future__ import annotations

from collections import defaultdict
from typing import SupportsFloat

from syncline import messages as m

Losses = dict[int, list[float]]  # rank -> [sum, count]


class Counters:
    """One run's counts; those before a checkpoint included."""

    def __init__(self) -> None:
        self.examples: dict[int, int] = defaultdict(int)  # by table
        self.steps: dict[int, int] = defaultdict(int)  # by rank
        self._last: dict[int, float] = {}
        self._losses: dict[int, Losses] = defaultdict(_none)  # by epoch
        self._unread: list[tuple[int, SupportsFloat, int, dict[int, int]]] = []  # arguments of `_add`

    def resume(self, counts: m.Counts) -> None:
        """A run that goes on."""
        self.examples.update(counts.examples)
        self.steps.update(counts.steps)
        for epoch, losses in counts.losses.items():
            self._losses[epoch].update({rank: list(pair) for rank, pair in losses.items()})

    def folded(
        self, table: int, rank: int, examples: int, loss: SupportsFloat, epochs: dict[int, int]
    ) -> None:
        """A gradient is in an update; `epochs`: how many of its examples are of which."""
        self.examples[table] += examples
        if isinstance(loss, float):
            self._add(rank, loss, examples, epochs)
        else:
            self._unread.append((rank, loss, examples, epochs))

    def _add(self, rank: int, loss: float, count: float, epochs: dict[int, int]) -> None:
        if loss != loss:
            return
        self._last[rank] = loss
        whole = sum(epochs.values())
        for epoch, part in epochs.items():
            share = count if part == whole else count * part / whole
            account = self._losses[epoch][rank]
            account[0] += loss * share
            account[1] += share

    def read(self) -> None:
        """Losses whose values came later than their gradients' notes, all at once."""
        unread, self._unread = self._unread, []
        for rank, loss, count, epochs in unread:
            self._add(rank, float(loss), count, epochs)

    def epoch(self, epoch: int) -> tuple[float, dict[int, float]]:
        """It is done: the mean loss of its examples, over all and by rank."""
        self.read()
        losses = self._losses.pop(epoch, {})
        total = sum(pair[0] for pair in losses.values())
        count = sum(pair[1] for pair in losses.values())
        means = {rank: part / n for rank, (part, n) in sorted(losses.items()) if n}
        return total / count if count else float("nan"), means

    def last_losses(self) -> dict[int, float]:
        """By rank."""
        self.read()
        return dict(self._last)

    def counts(self) -> m.Counts:
        """For a checkpoint."""
        self.read()
        losses = {
            epoch: {rank: list(pair) for rank, pair in found.items()} for epoch, found in self._losses.items()
        }
        return m.Counts(dict(self.examples), losses, dict(self.steps))


def _none() -> Losses:
    return defaultdict(lambda: [0.0, 0.0])
