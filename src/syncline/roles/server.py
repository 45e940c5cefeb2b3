"""The servers topology: shards that fold, one of which leads (M3, M11).

`ServerRole` is one shard process's handler: an event comes in, effects go out through the port. Every shard
replays one log of decisions; the leading shard also makes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from syncline import messages as m
from syncline.messages.log import Entry
from syncline.messages.to_leader import ToLeader
from syncline.ports import ServerPort
from syncline.protocols.spans import Standing
from syncline.roles.leader import Leader
from syncline.roles.log_applier import LogApplier
from syncline.table.optimizer_template import Options
from syncline.table.shard import Shard


class ServerRole:
    """One shard process's handler."""

    def __init__(self, port: ServerPort, replay: LogApplier | None = None) -> None:
        self._port = port
        self._replay = replay or LogApplier(port)
        self._leader = Leader(port, self._replay) if port.shard == 0 else None

    def watch(self, decided: Callable[[int, Any], None], carried_out: Callable[[Entry], None]) -> None:
        """Somebody looks on: at every decision of the leading shard, and at every entry that was carried out."""
        self._replay.watch = carried_out
        if self._leader is not None:
            self._leader.watch = decided

    @property
    def settled(self) -> bool:
        """All that was logged is carried out; what left in it is not needed any more."""
        return self._replay.settled

    def shard(self, table: int) -> Shard:
        """This server's part of a table."""
        return self._replay.shard(table)

    def options(self, table: int, learner: int, number: int) -> Options:
        """The group options that came with a gradient."""
        if self._leader is not None:
            learner, number = self._leader.named(table, learner, number)
        return self._replay.options(table, learner, number)

    def note(self, learner: int, message: ToLeader) -> None:
        """What a learner says (leading shard only)."""
        assert self._leader is not None
        self._leader.note(learner, message)

    def entry(self, entry: Entry) -> None:
        """A decision of the leading shard."""
        self._replay.replay(entry)

    def handle(self, event: Any) -> None:
        """An event from the coordinator or another shard."""
        kind = type(event)
        if kind is m.Dial:
            self._replay.dials[event.number] = event.sync
            if self._leader:
                self._leader.dial(event)
        elif kind is m.MakeTable:
            self._replay.make_table(event)
            if self._leader:
                self._leader.make_table(event)
        elif kind is m.JoinTable:
            if event.first:
                self._replay.begin(event)
            if self._leader:
                self._leader.join_table(event)
        elif kind is m.Norms:
            self._replay.norms(event)
        elif kind is tuple:  # (learner, LoadState)
            learner, blob = event
            self._replay.keep_blob(learner, blob)
            self._port.tell(m.Loaded(blob.table, blob.number, learner))
        elif self._leader is not None:
            self._lead(event)

    def standings(self) -> dict[int, Standing]:
        """What of each loader's epochs is not settled (leading shard only)."""
        assert self._leader is not None
        return self._leader.standings()

    def examples(self, table: int) -> int:
        """In updates so far (leading shard only)."""
        assert self._leader is not None
        return self._leader.examples(table)

    def last_staleness(self, table: int) -> float:
        """Of the last update (leading shard only)."""
        assert self._leader is not None
        return self._leader.last_staleness(table)

    def statistics(self) -> m.Statistics:
        """The account so far (leading shard only)."""
        assert self._leader is not None
        return self._leader.statistics(0)

    def _lead(self, event: Any) -> None:
        assert self._leader is not None
        kind = type(event)
        if kind is m.MakeLoader:
            self._leader.make_loader(event)
        elif kind is m.JoinLoader:
            self._leader.join_loader(event)
        elif kind is m.Leave:
            self._leader.leave(event.learner, event.rank, lost=event.lost, closed=event.closed)
        elif kind is m.NodesMoved:
            self._leader.moved(event.lost)
        elif kind is m.Resume:
            self._leader.resume(event)
        elif kind is m.Opening:
            self._leader.opening(event)
        elif kind is m.Standstill:
            self._leader.standstill(event)
        elif kind is m.AskCut:
            self._leader.ask_cut()
        elif kind is m.CutDone:
            self._leader.cut_done()
        elif kind is m.AskStatistics:
            self._port.tell(self._leader.statistics(event.number))
        elif kind is m.Finish:
            self._leader.finish(cut=event.cut)
            self._port.tell(m.Finished(self._leader.statistics(-1)))
