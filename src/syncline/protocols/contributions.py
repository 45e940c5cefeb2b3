"""Everybody brings one thing: complete when every live member has brought its own, or left.

Used to open loaders, where all begin with the first epoch. Members that join later are not waited for in
meetings that are already complete. Meetings that learners' loops may come to unequally are `meetings`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class Contributions:
    """Meetings by key; a meeting completes once."""

    def __init__(self, members: Iterable[int]) -> None:
        self._members = set(members)
        self._brought: dict[Any, dict[int, Any]] = {}

    def join(self, member: int) -> None:
        self._members.add(member)

    def bring(self, key: Any, member: int, thing: Any) -> dict[int, Any] | None:
        """All that was brought, once all live members are there; else None."""
        self._brought.setdefault(key, {})[member] = thing
        return self._complete(key)

    def withdraw(self, key: Any, member: int) -> None:
        """It brings nothing, after all: the meeting waits for it again."""
        self._brought.get(key, {}).pop(member, None)

    def leave(self, member: int) -> list[tuple[Any, dict[int, Any]]]:
        """The meetings that its leaving completes."""
        self._members.discard(member)
        for brought in self._brought.values():
            brought.pop(member, None)
        complete = [(key, self._complete(key)) for key in list(self._brought)]
        return [(key, brought) for key, brought in complete if brought]

    def _complete(self, key: Any) -> dict[int, Any] | None:
        brought = self._brought[key].keys()
        if len(brought) < len(self._members) or self._members - brought:
            return None
        return self._brought.pop(key)

    def missing(self, key: Any) -> list[int]:
        return sorted(self._members - self._brought.get(key, {}).keys())
