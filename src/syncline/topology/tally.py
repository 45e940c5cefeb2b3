"""What the leading shard counts: examples by table, steps and losses by rank. Not responsible for versions and staleness."""

from __future__ import annotations

from collections import defaultdict
from typing import SupportsFloat

from syncline.topology import messages as m


class Tally:
    """One run's counts; those before a checkpoint included."""

    def __init__(self) -> None:
        self.examples: dict[int, int] = defaultdict(int)  # by table
        self.steps: dict[int, int] = defaultdict(int)  # by rank
        self._last: dict[int, float] = {}
        self._losses: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])  # rank -> [sum, count]
        self._unread: list[tuple[int, SupportsFloat, int]] = []  # (rank, loss, examples)

    def resume(self, counts: m.Counts) -> None:
        """A run that goes on."""
        self.examples.update(counts.examples)
        self.steps.update(counts.steps)
        self._losses.update({rank: list(pair) for rank, pair in counts.losses.items()})

    def folded(self, table: int, rank: int, examples: int, loss: SupportsFloat) -> None:
        """A gradient is in an update."""
        self.examples[table] += examples
        if isinstance(loss, float):
            self._add(rank, loss, examples)
        else:
            self._unread.append((rank, loss, examples))

    def _add(self, rank: int, loss: float, count: int) -> None:
        if loss == loss:
            self._last[rank] = loss
            account = self._losses[rank]
            account[0] += loss * count
            account[1] += count

    def read(self) -> None:
        """Losses whose values came later than their gradients' notes, all at once."""
        unread, self._unread = self._unread, []
        for rank, loss, count in unread:
            self._add(rank, float(loss), count)

    def epoch(self) -> tuple[float, dict[int, float]]:
        """The mean loss since the last call, over all examples and by rank."""
        self.read()
        total = sum(pair[0] for pair in self._losses.values())
        count = sum(pair[1] for pair in self._losses.values())
        means = {rank: part / n for rank, (part, n) in sorted(self._losses.items()) if n}
        self._losses.clear()
        return total / count if count else float("nan"), means

    def last_losses(self) -> dict[int, float]:
        """By rank."""
        self.read()
        return dict(self._last)

    def counts(self) -> m.Counts:
        """For a checkpoint."""
        self.read()
        losses = {rank: list(pair) for rank, pair in self._losses.items()}
        return m.Counts(dict(self.examples), losses, dict(self.steps))
