"""The rules of a dial, worked out from the fields of its record alone (M2–M4).

The accounts check decisions that follow `Sync`'s own properties and formulas. They may not ask these, so the same
quantities are computed here a second time, from the words of the semantics page.
"""

from __future__ import annotations

import math

from syncline.dial import Sync


class DialRules:
    """What one dial prescribes; attributes have the names that `Sync` gives them."""

    def __init__(self, sync: Sync) -> None:
        self._text = str(sync)
        self._splits, self._backup, self._reference = sync.splits, sync.backup, sync.reference_batch
        self.lead, self.slack, self.late, self.rate = sync.lead, sync.slack, sync.late, sync.rate
        self.lockstep = sync.one_from_each
        self.delay = sync.lead if sync.one_from_each and sync.lead is not None else 0
        self.waits = sync.one_from_each or sync.slack is not None or sync.lead is not None
        self.local = sync.push != 1 or sync.fetch != 1
        self.weighs = sync.rate == "staleness" and sync.splits is not None

    def __str__(self) -> str:
        return self._text

    def quorum(self, live: int, initial: int) -> int:
        """Return the gradients of one update, with so many learners live and at the start."""
        if self.lockstep:
            return live
        if self._splits is not None:
            return max(1, math.floor(live / self._splits))
        return max(1, min(initial - self._backup, live)) if self._backup else 1

    def factor(self, live: int, batch_size: int | None) -> float:
        """Return what the rate is multiplied by, before staleness."""
        if self._reference is not None and batch_size is not None:
            return (live * batch_size / self._reference) ** 0.5
        return self.quorum(live, live) / live if self.rate == "share" else 1.0

    def damping(self, sigma: int) -> float:
        """Return the weight of a gradient of this staleness in the mean of its update."""
        return 1 / sigma if self.weighs and sigma > 1 else 1.0

    def needed(self, version: int, base: int, iteration: int) -> int:
        """Return the version that a learner waits for after its gradient was taken; the dial began at version `base`."""
        if self.lockstep:
            return max(base, iteration + 1 - self.delay)
        return version + 1 if self.lead == 0 else 0
