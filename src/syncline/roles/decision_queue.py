"""The order in which the leading shard carries out decisions. Not responsible for what that means."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from syncline.protocols.folding import Ticket
from syncline.protocols.sequence import Fold, Take

Action = Callable[[int, Ticket], None]


class Worklist:
    """Decisions are carried out in their order; what one of them brings about comes after all that were there.

    Accounts and the feed come last: first of all, learners that wait are released. A checkpoint that is due is cut before
    another version can follow.
    """

    def __init__(self, carry_out: Callable[[int, Any], None], cut: Callable[[], None]) -> None:
        self._carry_out, self._cut = carry_out, cut
        self.cut_due = False
        self._todo: deque[tuple[int, Any]] = deque()
        self._later: deque[tuple[Action, int, Ticket]] = deque()
        self._working = False

    @property
    def following(self) -> Any:
        """The next decision, if there is one."""
        return self._todo[0][1] if self._todo else None

    def later(self, action: Action, table: int, ticket: Ticket) -> None:
        self._later.append((action, table, ticket))

    def add(self, place: int, decisions: Sequence[Any]) -> None:
        """A table's decisions, or a loader's; they are carried out now, unless some are being carried out already."""
        for decision in decisions:
            self._todo.append((place, decision))
        if self._working or not decisions:
            return
        self._working = True
        try:
            self._work()
        finally:
            self._working = False

    def _work(self) -> None:
        todo, later = self._todo, self._later
        while todo or later:
            if todo and not (self.cut_due and isinstance(todo[0][1], Take | Fold)):
                self._carry_out(*todo.popleft())
            elif later:
                action, table, ticket = later.popleft()
                action(table, ticket)
            else:
                self._cut()
        if self.cut_due:
            self._cut()
