"""The vector clock of every update of the first table (R6), as the leading shard reports it: in pieces of bounded size.

A row says: in this version is a gradient of this rank, computed on that version. Not responsible for keeping them
(report/clock_file.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from syncline import messages as m
from syncline.protocols.folding import Ticket

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
