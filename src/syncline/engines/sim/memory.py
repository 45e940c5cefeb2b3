"""A simulated run's memory: tables, and each learner's slots and inbox. Not responsible for when anything moves."""

from __future__ import annotations

import torch
from torch import Tensor

from syncline.ports import Reading
from syncline.table.layout import Layout
from syncline.table.slot import private_slot


class SimTable:
    """One table's memory."""

    def __init__(self, layout: Layout, kept: int) -> None:
        self.layout = layout
        self.weights = self._segments()
        self.history = [self._segments() for _ in range(kept)]
        flats = (layout.buffers, layout.others)
        self.buffers, self.others = (
            flat.views(flat.segments(torch.zeros(flat.nbytes, dtype=torch.uint8))) for flat in flats
        )

    def _segments(self) -> list[Tensor]:
        flat = self.layout.parameters
        return flat.segments(torch.zeros(flat.nbytes, dtype=torch.uint8))


class SimLane:
    """One learner's slots and inbox of one table."""

    def __init__(self, layout: Layout, slots: int) -> None:
        self.slots = [private_slot(layout) for _ in range(slots)]
        flat = layout.parameters
        self.inbox = flat.segments(torch.zeros(flat.nbytes, dtype=torch.uint8))
        self.released: dict[int, tuple[int, Reading]] = {}  # by shard, with its ticket
        self.freed: dict[int, int] = {}  # by shard
