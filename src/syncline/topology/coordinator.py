"""The coordinator: opens tables and loaders, gathers means and states, sees learners come and go.

A handler beside the learners' fast path: it never sees a gradient. Runs in the supervisor of the local
engine and inside the simulator; effects go out through its port.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from syncline.dial import Sync
from syncline.errors import LayoutError, UsageError
from syncline.ports import CoordinatorPort
from syncline.protocols.rendezvous import Rendezvous
from syncline.table.layout import Layout
from syncline.table.template import OptimizerTemplate
from syncline.topology import messages as m


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the coordinator must know of a run."""

    sync: Sync
    batch_size: int | None = None
    limit: int | None = None
    clip_norm: float | None = None
    snapshots: bool = False  # the first loader's epochs end with a snapshot


@dataclass(slots=True)
class _Table:
    layout: Layout
    handle: Any = None
    made: bool = False
    initialiser: int | None = None
    waiting: dict[int, Layout] = field(default_factory=dict)


class Coordinator:
    """Learners, tables and loaders of one run."""

    def __init__(self, port: CoordinatorPort, plan: Plan, learners: dict[int, int]) -> None:
        self._port, self._plan = port, plan
        self._initial = dict(learners)
        self.live = dict(learners)  # learner -> rank
        self._tables: dict[int, _Table] = {}
        self._loaders: dict[int, m.OpenLoader] = {}
        self._meet = Rendezvous(learners)
        self._parts: dict[tuple[int, int, int], dict[int, m.StatePart]] = {}
        self._loads: dict[tuple[int, int, int], int] = {}
        self.reached = False

    def layout(self, table: int) -> Layout:
        return self._tables[table].layout

    @property
    def tables(self) -> list[int]:
        return [number for number, table in sorted(self._tables.items()) if table.made]

    # -- learners ----------------------------------------------------------------------------------------

    def from_learner(self, learner: int, message: Any) -> None:
        """A learner's request, in words of `topology.messages`."""
        handlers: dict[type, Callable[[int, Any], None]] = {
            m.Open: self._open,
            m.Initialised: self._initialised,
            m.OpenLoader: self._open_loader,
            m.MeanOf: self._mean,
            m.LoadState: self._load,
            m.AwaitState: self._await_state,
            m.Log: lambda rank, log: self._port.emit((self.live.get(rank), log)),
        }
        try:
            handlers[type(message)](learner, message)
        except (UsageError, LayoutError) as error:
            self._port.reply(learner, m.Refused(error))

    def leave(self, learner: int, *, lost: bool) -> None:
        """It returned, raised or died."""
        if self.live.pop(learner, None) is None:
            return
        self._port.tell_shards(m.Leave(learner, lost))
        for key, brought in self._meet.leave(learner):
            self._met(key, brought)
        for number, table in self._tables.items():
            table.waiting.pop(learner, None)
            if table.initialiser == learner and not table.made:
                table.initialiser = None
            self._choose_initialiser(number, table)

    # -- tables ------------------------------------------------------------------------------------------

    def _open(self, learner: int, message: m.Open) -> None:
        table = self._tables.setdefault(message.table, _Table(message.layout))
        if difference := table.layout.difference(message.layout):
            rank = self.live[learner]
            raise LayoutError(
                f"table {message.table}: learner {rank} built another layout than the learners before it, {difference}. "
                "Every learner must create the same model and optimizer in the same order; "
                "seeds may differ, shapes and groups may not."
            )
        if table.made:
            self._join(message.table, table, learner)
            return
        table.waiting[learner] = message.layout
        self._choose_initialiser(message.table, table)

    def _choose_initialiser(self, number: int, table: _Table) -> None:
        """The lowest live rank's parameters initialise the table (M6)."""
        if table.made or table.initialiser is not None or not self.live:
            return
        lowest = min(self.live, key=lambda learner: self.live[learner])
        if lowest in table.waiting:
            table.initialiser = lowest
            if table.handle is None:
                table.handle = self._port.make_table(number, table.layout)
            self._port.reply(lowest, m.Initialise(table.handle))

    def _initialised(self, learner: int, message: m.Initialised) -> None:
        table = self._tables[message.table]
        table.made = True
        plan = self._plan
        self._port.tell_shards(self._make(message.table, table, message.template, plan))
        for waiting in sorted(table.waiting, key=lambda waiting: self._initial.get(waiting, waiting)):
            self._join(message.table, table, waiting)
        table.waiting.clear()

    def _make(self, number: int, table: _Table, template: OptimizerTemplate, plan: Plan) -> m.MakeTable:
        expected = {learner: rank for learner, rank in self._initial.items() if learner in self.live}
        return m.MakeTable(
            number,
            table.layout,
            template,
            plan.sync,
            expected,
            plan.batch_size,
            plan.limit if number == 0 else None,
            plan.clip_norm,
            table.handle,
        )

    def _join(self, number: int, table: _Table, learner: int) -> None:
        lane = self._port.make_lane(number, learner, table.layout)
        self._port.tell_shards(m.JoinTable(number, learner, self.live[learner], lane))
        self._port.reply(learner, m.Opened(number, table.layout, table.handle, lane))

    # -- loaders -----------------------------------------------------------------------------------------

    def _open_loader(self, learner: int, message: m.OpenLoader) -> None:
        first = self._loaders.setdefault(message.loader, message)
        if first != message:
            raise UsageError(
                f"learner {self.live[learner]} opened loader {message.loader} with {message.size} examples in batches "
                f"of {message.batch_size} ({message.policy}), another learner with {first.size} in batches of "
                f"{first.batch_size} ({first.policy}). Every learner must open the same loaders in the same order."
            )
        if first is message:
            self._port.tell_shards(self._make_loader(message))
        if learner in self._initial:  # all begin with the first epoch, and a joint round is cut for all
            brought = self._meet.bring(("loader", message.loader), learner, message)
            if brought is not None:
                self._met(("loader", message.loader), brought)
        else:
            self._join_loader(message.loader, [learner])

    def _make_loader(self, message: m.OpenLoader) -> m.MakeLoader:
        return m.MakeLoader(
            message.loader,
            message.size,
            message.batch_size,
            message.policy,
            message.epochs,
            self._plan.sync.lockstep,
            len(self._initial),
            self._plan.snapshots and message.loader == 0,
        )

    def _join_loader(self, loader: int, learners: list[int]) -> None:
        self._port.tell_shards(m.JoinLoader(loader, {learner: self.live[learner] for learner in learners}))
        for learner in learners:
            self._port.reply(learner, True)

    # -- meetings ----------------------------------------------------------------------------------------

    def _mean(self, learner: int, message: m.MeanOf) -> None:
        brought = self._meet.bring(("mean", message.index), learner, message.value)
        if brought is not None:
            self._met(("mean", message.index), brought)

    def _met(self, key: tuple[str, int], brought: dict[int, Any]) -> None:
        kind, number = key
        ordered = sorted(brought, key=lambda learner: self.live[learner])
        if kind == "loader":
            self._join_loader(number, ordered)
            return
        values = [torch.as_tensor(brought[learner], dtype=torch.float64) for learner in ordered]
        mean = torch.stack(values).mean(0)
        for learner in ordered:
            self._port.reply(learner, _like(mean, brought[learner]))

    # -- optimizer states --------------------------------------------------------------------------------

    def _load(self, learner: int, message: m.LoadState) -> None:
        self._loads[message.table, message.number, learner] = 0
        self._port.tell_shards((learner, message))

    def _await_state(self, learner: int, message: m.AwaitState) -> None:
        self._parts.setdefault((message.table, message.number, learner), {})
        self._try_state((message.table, message.number, learner), asked=True)

    def _try_state(self, key: tuple[int, int, int], *, asked: bool) -> None:
        parts = self._parts.get(key, {})
        if asked:
            self._loads[key] = -1  # marks that the learner waits
        if len(parts) == self._tables[key[0]].layout.shards and self._loads.get(key) == -1:
            del self._parts[key], self._loads[key]
            self._port.reply(key[2], [parts[shard] for shard in sorted(parts)])

    # -- shards ------------------------------------------------------------------------------------------

    def from_shard(self, message: Any) -> None:
        kind = type(message)
        if kind is m.StatePart:
            key = (message.table, message.number, message.learner)
            self._parts.setdefault(key, {})[message.shard] = message
            self._try_state(key, asked=False)
        elif kind is m.Loaded:
            self._loaded(message)
        elif kind is m.Reached:
            self.reached = True
            self._port.stop_learners()
        else:
            self._port.emit(message)

    def _loaded(self, message: m.Loaded) -> None:
        key = (message.table, message.number, message.learner)
        self._loads[key] += 1
        if self._loads[key] == self._shards():
            del self._loads[key]
            self._port.reply(message.learner, True)

    def _shards(self) -> int:
        return self._port.shards


def _like(mean: Tensor, value: Any) -> Any:
    return mean.to(value.dtype) if isinstance(value, Tensor) else mean.item() if mean.dim() == 0 else mean
