"""Who may go on, and with which version (M2): lead and slack as a pure gate.

A learner that published waits at the gate; the gate opens for it when the version it needs exists and the
slowest is near enough. Who waits is sorted by what it waits for: a step costs the same however many wait. Not
responsible for how a learner sleeps, nor for moving weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from syncline.dial import Sync
from syncline.protocols.membership import Members

RESTS = -1


@dataclass(slots=True, unsafe_hash=True)
class Release:
    """This learner may go on; `number` is the ticket it waited with. It gets the version where `read` says so.

    With `same` that is the version it has, and no weights move.
    """

    learner: int
    number: int
    version: int
    read: bool = True
    same: bool = False


class Gate:
    """The learners that wait, each for a version."""

    def __init__(self, sync: Sync, members: Members) -> None:
        self._members = members
        # learner -> (ticket number, version it needs, whether it only wants its slot back)
        self.waiting: dict[int, tuple[int, int, bool]] = {}
        self._order: dict[int, int] = {}  # learner -> counts arrivals
        self._arrivals = 0
        self._fresh: set[int] = set()  # learners to be looked at; the others wait for something below
        self._for_version: dict[int, list[int]] = {}  # version -> learners that may wait for it
        self._for_clock: dict[int, list[int]] = {}  # own clock -> learners that may be too far ahead
        self._last: dict[int, int] = {}  # learner -> the version it read last
        self._rested: set[int] = set()  # resumed, and not let go yet
        self.change(sync, 0)

    def change(self, sync: Sync, version: int) -> None:
        """Another dial from this version on: all that was published is folded, who waits for that goes on."""
        self._lockstep, self._delay, self._slack = sync.lockstep, sync.delay, sync.slack
        self._own_fold, self._waits = sync.lead == 0, sync.waits
        self._base = version  # versions before it are not kept
        self._rested.clear()
        self._last.clear()
        self.waiting = {
            learner: (number, version if needed != RESTS else RESTS, silent)
            for learner, (number, needed, silent) in self.waiting.items()
        }
        self._for_version, self._for_clock = {}, {}
        self._fresh = set(self.waiting)

    def arrive(self, learner: int, number: int, iteration: int, version: int, silent: bool = False) -> None:
        """It has published its gradient of this iteration, taken at this version; a silent one is let go with its fold."""
        if self._lockstep:
            needed = max(self._base, iteration + 1 - (0 if silent else self._delay))
        else:
            needed = version + 1 if self._own_fold else 0
        self._wait(learner, number, needed, silent)

    def let_go(self, learner: int, number: int, iteration: int, silent: bool) -> None:
        """Its gradient was dropped: it reads what it would have read after the one before."""
        self._wait(learner, number, max(self._base, iteration - self._delay) if self._lockstep else 0, silent)

    def hold(self, learner: int, number: int) -> None:
        """It rests until `resume`."""
        self._wait(learner, number, RESTS, False)

    def _wait(self, learner: int, number: int, needed: int, silent: bool) -> None:
        """A ticket's release is that of all before it: what one of those was to read comes with the last one."""
        last, _, silent_before = self.waiting.get(learner, (-1, 0, True))
        if last < number:
            if learner not in self.waiting:
                self._arrivals += 1
                self._order[learner] = self._arrivals
            self.waiting[learner] = (number, needed, silent and silent_before)
            self._fresh.add(learner)

    def rests_since(self, learner: int, number: int) -> bool:
        """It rests with a later ticket than this one, which came before the start."""
        last, needed, _ = self.waiting.get(learner, (-1, 0, True))
        return needed == RESTS and last > number

    def resume(self, learner: int, iteration: int) -> None:
        """It goes on with this iteration: it reads what it would have read after the one before."""
        number, needed, silent = self.waiting.get(learner, (0, 0, False))
        if needed == RESTS:
            wanted = max(self._base, iteration - self._delay) if self._lockstep else 0
            self.waiting[learner] = (number, wanted, silent)
            self._fresh.add(learner)
            if not self._waits and learner in self._last:
                self._rested.add(learner)  # it goes on with what it has, as if it had not rested

    def fetched(self, learner: int, version: int) -> None:
        """It reads this version without waiting."""
        self._last[learner] = version

    def leave(self, learner: int) -> None:
        self.waiting.pop(learner, None)
        self._order.pop(learner, None)
        self._last.pop(learner, None)
        self._rested.discard(learner)

    def open(self, version: int) -> list[Release]:
        """Everybody whose version is there and who is not too far ahead, in the order of arrival.

        Looked at are those whose place has changed, and who waited for what is there now; who may not go on is put where it will be
        found when it may.
        """
        if not self.waiting:
            return []
        furthest = math.inf if self._slack is None else (self._members.slowest or 0) + self._slack
        looked_at, self._fresh = self._fresh, set()
        for there in [needed for needed in self._for_version if needed <= version]:
            looked_at.update(self._for_version.pop(there))
        for near in [clock for clock in self._for_clock if clock <= furthest]:
            looked_at.update(self._for_clock.pop(near))
        free = []
        for learner in looked_at:
            if learner not in self.waiting:
                continue
            needed = self.waiting[learner][1]
            if needed > version:
                self._for_version.setdefault(needed, []).append(learner)
            elif needed != RESTS:
                clock = self._members.live[learner].clock if self._slack is not None else 0
                if clock <= furthest:
                    free.append(learner)
                else:
                    self._for_clock.setdefault(clock, []).append(learner)
        if len(free) > 1:
            free.sort(key=self._order.__getitem__)
        releases = []
        for learner in free:
            number, needed, silent = self.waiting.pop(learner)
            del self._order[learner]
            if learner in self._rested:
                self._rested.discard(learner)
                releases.append(Release(learner, number, self._last[learner], same=True))
                continue
            read = needed if self._lockstep else version
            if not silent:
                self._last[learner] = read
            releases.append(Release(learner, number, read, not silent))
        return releases

    def holds(self, learner: int, number: int) -> bool:
        """This ticket, or one after it, was not let go yet; it does not rest."""
        last, needed, _ = self.waiting.get(learner, (-1, RESTS, True))
        return last >= number and needed != RESTS

    def blocked(self) -> set[int]:
        """Learners that do nothing until they may go on."""
        return {
            learner for learner, (_, needed, silent) in self.waiting.items() if needed != RESTS and not silent
        }
