"""Who may go on, and with which version (M2): lead and slack as a pure gate.

A learner that published waits at the gate; the gate opens for it when the version it needs exists. Not
responsible for how a learner sleeps, nor for moving weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from syncline.dial import Sync


@dataclass(slots=True, unsafe_hash=True)
class Release:
    """This learner may read this version; `number` is the ticket it waited with."""

    learner: int
    number: int
    version: int


class Gate:
    """The learners that wait, each for a version."""

    def __init__(self, sync: Sync) -> None:
        self._lockstep = sync.lockstep
        self._delay = sync.delay
        self._waiting: dict[int, tuple[int, int]] = {}  # learner -> (ticket number, version it needs)

    def arrive(self, learner: int, number: int, iteration: int) -> None:
        """It has published its gradient of this iteration."""
        self._waiting[learner] = (number, max(0, iteration + 1 - self._delay) if self._lockstep else 0)

    def hold(self, learner: int, number: int) -> None:
        """It rests until `resume`."""
        self._waiting[learner] = (number, -1)

    def resume(self, learner: int, iteration: int) -> None:
        """It goes on with this iteration: it reads what it would have read after the one before."""
        number, needed = self._waiting.get(learner, (0, 0))
        if needed == -1:
            self._waiting[learner] = (number, max(0, iteration - self._delay))

    def leave(self, learner: int) -> None:
        self._waiting.pop(learner, None)

    def open(self, version: int) -> list[Release]:
        """Everybody whose version is there, in the order of arrival."""
        free = [learner for learner, (_, needed) in self._waiting.items() if 0 <= needed <= version]
        releases = []
        for learner in free:
            number, needed = self._waiting.pop(learner)
            releases.append(Release(learner, number, needed if self._lockstep else version))
        return releases

    def waiting(self) -> dict[int, int]:
        """Learner to the version it waits for (-1: it rests)."""
        return {learner: needed for learner, (_, needed) in self._waiting.items()}
