"""The delayed pipeline of all-reduce (A3): which reduction is applied at which step, and how its depth adapts.

At step t the reduction of iteration t starts, and all older than the last k are applied; at the end those in flight.
`Vote` changes k from what the learners measured, summed over all of them, so that all reach the same k at the same step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

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
        return self._decide(could)

    def _decide(self, could: bool) -> int | None:
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
