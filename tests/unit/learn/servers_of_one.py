"""The servers of one learner, in its own process and without waiting: gradients are folded as they come, portions are handed out when they are looked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from syncline import messages as m
from syncline.dial import Course, Sync
from syncline.learn.server_session import ServerSession
from syncline.messages import to_leader as say
from syncline.ports import (
    OUTSIDE,
    Computing,
    Draft,
    LearnerPort,
    Portion,
    Reading,
    Reset,
    Serving,
    TablePort,
)
from syncline.roles.run_plan import RunPlan, Seat
from syncline.table.gradient_slot import options_of
from syncline.table.layout import DTYPES, Flat
from syncline.table.optimizer_template import OptimizerTemplate, piece_states


def empty(flat: Flat) -> list[Tensor]:
    return [torch.zeros(entry.shape, dtype=DTYPES[entry.dtype]) for entry in flat.entries]


class Table(TablePort):
    """The whole of a table on one shard, which runs the user's own optimizer."""

    def __init__(self, servers: ServersOfOne, opened: m.Initialise) -> None:
        self.layout, self._servers = opened.layout, servers
        self.values = empty(self.layout.parameters)
        self.buffers, self.others = empty(self.layout.buffers), empty(self.layout.others)
        self.version = 0
        self.reads: list[tuple[int, int]] = []  # (version, tensors that were copied)
        self.overtakes = 0  # reads that find nothing

    def make(self, template: OptimizerTemplate) -> None:
        self.optimizer, self.parameters = template.build(self.layout.parts[0], self.layout, self.values)

    def draft(self, *, block: bool = True) -> Draft | None:
        gradients, buffers = empty(self.layout.parameters), empty(self.layout.buffers)
        return Draft(gradients, buffers, "a draft", empty(self.layout.others))

    def publish(self, draft: Draft, message: Any, options: bytes = b"", present: Sequence[bool] = ()) -> None:
        self._servers.said.append(message)
        if isinstance(message, m.Initialised):
            self.others = draft.others
        if isinstance(message, say.Gradient):
            here = present or [True] * len(self.parameters)
            for group, option in zip(self.optimizer.param_groups, options_of(options), strict=True):
                group.update(option)
            for parameter, gradient, there in zip(self.parameters, draft.gradients, here, strict=True):
                parameter.grad = gradient if there else None
            self.optimizer.step()
        else:
            for value, given in zip(self.values, draft.gradients, strict=True):
                value.copy_(given)
        self.buffers = draft.buffers
        self.version += not isinstance(message, m.Initialised)

    def wait(self, number: int | None, *, block: bool = True) -> Reading | None:
        self._servers.look()
        return Reading(self.version, self._servers.dial, self._servers.keep)

    def read(self, reading: Reading | None, into: list[Tensor]) -> int | None:
        if self.overtakes:
            self.overtakes -= 1
            return None
        self.reads.append((self.version, len(into)))
        with torch.no_grad():
            for target, value in zip(into, self.values, strict=False):
                target.copy_(value)
        return self.version


class ServersOfOne(LearnerPort):
    """What a session may ask, of a coordinator and shards that have one learner."""

    learner = rank = 0

    def __init__(self) -> None:
        self.said: list[Any] = []  # all that was posted, asked, published and told, in its order
        self.tables: list[Table] = []
        self.refusals: dict[type, Exception] = {}  # of what is asked
        self.dials: list[Sync] = []
        self.dial, self.keep, self.stops, self.renewed = 0, False, False, False
        self._loaders: dict[int, m.OpenLoader] = {}
        self._granted: dict[int, list[Portion]] = {}
        self._asked: dict[int, deque[int]] = {}  # epochs, of what was not looked for yet
        self._outside: dict[int, deque[Portion]] = {}

    def look(self) -> None:
        """Once for new servers, whatever is waited for."""
        if self.renewed:
            self.renewed = False
            raise Reset

    def of(self, *kinds: type) -> list[Any]:
        return [each for each in self.said if isinstance(each, kinds)]

    def tell(self, message: Any) -> None:
        self.said.append(message)

    def spend(self, work: Computing | Serving) -> None:
        self.said.append(work)

    def stopping(self) -> bool:
        return self.stops

    def ask(self, message: Any) -> Any:
        self.said.append(message)
        self.look()
        if type(message) in self.refusals:
            raise self.refusals[type(message)]
        match message:
            case m.Open():
                return m.Initialise(message.table, message.layout)
            case m.Initialised():
                self.tables[message.table].make(message.template)
                return m.Opened(message.table, self.tables[message.table].layout)
            case m.OpenLoader():
                self._loaders[message.loader] = message
                self._join(message.loader)
                return 1
            case m.AskDial():
                return self.dials[message.number]
            case m.MeanOf():
                return message.value
            case m.AwaitState():
                return [self._state(self.tables[message.table], message)]
            case m.Rejoin():
                for loader in self._loaders:
                    self._join(loader)
                return m.Rejoined([m.Opened(each, table.layout) for each, table in enumerate(self.tables)])
        return None

    def _state(self, table: Table, asked: m.AwaitState) -> m.StatePart:
        state = piece_states(table.optimizer, table.layout.parts[0], table.parameters)
        groups = table.optimizer.param_groups
        options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        return m.StatePart(asked.table, asked.number, 0, 0, options, state)

    def _join(self, loader: int) -> None:
        self._granted[loader], self._asked[loader] = [], deque()
        self._outside[loader] = deque([Portion(loader, OUTSIDE, 0, 0, 0)])

    def post(self, message: Any, *, later: bool = False) -> None:
        self.said.append(message)
        if isinstance(message, say.AskBatch):
            self._asked[message.loader].append(message.epoch)
        elif isinstance(message, say.CloseLoader):
            self._asked[message.loader].clear()
            count = len(self._granted[message.loader])
            self._outside[message.loader].append(Portion(message.loader, OUTSIDE, 0, count, 0))

    def _grant(self, loader: int, epoch: int) -> None:
        """The next of that epoch's, if it has any; of a stream each epoch is one."""
        granted, opened = self._granted[loader], self._loaders[loader]
        last = granted[-1] if granted and granted[-1].epoch == epoch else None
        if last is None or not last.end:
            start = last.stop if last else 0
            stop = min(start + opened.batch_size, opened.size)
            end = int(start == stop) if opened.size else 0
            granted.append(Portion(loader, len(granted), epoch, start, stop, end))

    def portion(self, loader: int, index: int, *, block: bool) -> Portion | None:
        self.look()
        if index == OUTSIDE:
            return self._outside[loader].popleft()
        granted, asked = self._granted[loader], self._asked[loader]
        while asked and index >= len(granted):
            self._grant(loader, asked.popleft())
        return granted[index] if index < len(granted) else None

    def open(self, opened: Any) -> Table:
        if isinstance(opened, m.Initialise):
            self.tables.append(Table(self, opened))
        return self.tables[opened.table]


def session_of_one(
    sync: str = "hardsync", *, learners: int = 1, servers: ServersOfOne | None = None, **plan: Any
) -> tuple[ServerSession, ServersOfOne]:
    """A learner of so many that are heard of nowhere else."""
    servers = servers or ServersOfOne()
    course = Course.of(sync)
    servers.dials = [dial for _, dial in course.dials]
    plan = RunPlan(course=course, learners=learners, **plan)
    return ServerSession(servers, Seat(plan=plan, rank=0, reader=False)), servers
