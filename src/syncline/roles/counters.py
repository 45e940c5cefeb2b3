"""What the leading shard counts and keeps beside its decisions: examples, steps and losses; learners' buffers and random states for
snapshots, results and checkpoints (M6); vector clocks of updates (R6).

Not responsible for versions and staleness.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, SupportsFloat

import numpy as np
import torch
from torch import Tensor

from syncline import messages as m
from syncline.protocols.folding import Ticket
from syncline.roles.checkpoint_manifest import learner_tensors

Losses = dict[int, list[float]]  # rank -> [sum, count]


class Counters:
    """One run's counts; those before a checkpoint included."""

    def __init__(self) -> None:
        self.examples: dict[int, int] = defaultdict(int)  # by table
        self.steps: dict[int, int] = defaultdict(int)  # by rank
        self.last: dict[int, float] = {}  # losses by rank
        self._losses: dict[int, Losses] = defaultdict(lambda: defaultdict(lambda: [0.0, 0.0]))  # by epoch
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
        self.last[rank] = loss
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

    def counts(self) -> m.Counts:
        """For a checkpoint."""
        self.read()
        losses = {
            epoch: {rank: list(pair) for rank, pair in found.items()} for epoch, found in self._losses.items()
        }
        return m.Counts(dict(self.examples), losses, dict(self.steps))


def joint_buffers(columns: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Mean of float buffers, maximum of the others (M6)."""
    return [
        torch.stack(column).mean(0) if column[0].is_floating_point() else torch.stack(column).amax(0)
        for column in map(list, zip(*columns, strict=True))
    ]


class LearnerStates:
    """Of all learners that are not lost."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[int, int], list[Tensor]] = {}  # by (table, learner)
        self.random: dict[int, bytes] = {}  # states by rank

    def keep(self, table: int, learner: int, buffers: Sequence[Tensor]) -> None:
        """Those of its last gradient, copied where they lie."""
        kept = self.buffers.get((table, learner))
        if kept is None or kept[0].device != buffers[0].device:
            self.buffers[table, learner] = [value.clone() for value in buffers]
        else:
            torch._foreach_copy_(kept, list(buffers))

    def lose(self, learner: int) -> None:
        """A lost learner's statistics do not count, unless a table has no others."""
        for table in [table for table, who in self.buffers if who == learner]:
            if sum(each == table for each, _ in self.buffers) > 1:
                del self.buffers[table, learner]

    def joint(self, table: int) -> list[Tensor] | None:
        """One table's buffers over all learners."""
        mine = [each for (of, _), each in sorted(self.buffers.items()) if of == table]
        return joint_buffers([[value.cpu() for value in each] for each in mine]) if mine else None

    def tensors(self, ranks: Mapping[int, int]) -> dict[str, Tensor]:
        """For a checkpoint, by name."""
        buffers = {
            (table, ranks[learner]): [value.cpu().clone() for value in values]
            for (table, learner), values in self.buffers.items()
        }
        return learner_tensors(self.random, buffers)


ROWS = 4096  # of one report


class VectorClocks:
    """Rows that are not reported yet."""

    def __init__(self, report: Callable[[Any], None]) -> None:
        self._report = report
        self._rows: list[tuple[int, int, int]] = []  # version, rank, stamp

    def fold(self, version: int, tickets: Iterable[Ticket]) -> None:
        """These gradients are in that version."""
        self._rows += [(version, ticket.rank, ticket.stamp) for ticket in tickets]
        if len(self._rows) >= ROWS:
            self.tell()

    def tell(self) -> None:
        """Report what there is."""
        if self._rows:
            rows, self._rows = self._rows, []
            self._report(m.Clocks(np.array(rows, dtype="<u4").tobytes()))
