"""Optimizer states that learners ask for, or load: the shards' parts are gathered, their answers counted."""

from __future__ import annotations

from collections.abc import Callable

from syncline import messages as m
from syncline.ports import CoordinatorPort
from syncline.roles.waiting_learners import WaitingLearners

Key = tuple[int, int, int]  # table, number, learner


class OptimizerStates:
    """Those under way; `shards_of` is the number of shards that hold a table."""

    def __init__(self, port: CoordinatorPort, room: WaitingLearners, shards_of: Callable[[int], int]) -> None:
        self._port, self._room, self._shards_of = port, room, shards_of
        self._parts: dict[Key, dict[int, m.StatePart]] = {}
        self._waits: set[Key] = set()  # learners that wait for parts
        self._loaded: dict[Key, int] = {}  # shards that have got a state to load

    def reset(self) -> None:
        """The shards that were asked are gone."""
        self._parts.clear()
        self._waits.clear()
        self._loaded.clear()

    def load(self, learner: int, message: m.LoadState) -> None:
        self._loaded[message.table, message.number, learner] = 0
        self._port.tell_shards((learner, message))

    def loaded(self, message: m.Loaded) -> None:
        key = (message.table, message.number, message.learner)
        self._loaded[key] += 1
        if self._loaded[key] == self._port.shards:
            del self._loaded[key]
            self._room.reply(message.learner, True)

    def wait(self, learner: int, message: m.AwaitState) -> None:
        """It has asked the shards, and waits for their parts."""
        key = (message.table, message.number, learner)
        self._waits.add(key)
        self._try(key)

    def part(self, message: m.StatePart) -> None:
        key = (message.table, message.number, message.learner)
        self._parts.setdefault(key, {})[message.shard] = message
        self._try(key)

    def _try(self, key: Key) -> None:
        parts = self._parts.get(key, {})
        if key in self._waits and len(parts) == self._shards_of(key[0]):
            del self._parts[key]
            self._waits.discard(key)
            self._room.reply(key[2], [parts[shard] for shard in sorted(parts)])
