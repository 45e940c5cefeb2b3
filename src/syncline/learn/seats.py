"""A group's seats, each a process with one session of the same learner (M15).

Every seat runs the same loop on the same batches. The first one speaks for all: it asks the servers and tells the others
what it was answered, so that all sessions go the same way. Each writes and reads its windows of the table alone; a
gradient is published when all have written theirs. Not responsible for processes and memory: engines are.
"""

from __future__ import annotations

import contextlib
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from syncline import messages as m
from syncline.errors import LayoutError, LoopError
from syncline.learn.loader import Loader
from syncline.learn.local_update import SeatOptimizer, as_partitioned, whole_layout
from syncline.learn.server_session import ServerSession, shards_for
from syncline.learn.session import Factory
from syncline.messages.to_leader import Gradient, Put, ToLeader
from syncline.parallel.module import Partitioned
from syncline.parallel.seat_tensors import Targets, Windows, shard_cuts
from syncline.ports import Computing, Draft, LearnerPort, Portion, Reading, Reset, Serving, TablePort
from syncline.roles.run_plan import Seat
from syncline.table.layout import Layout, Tensors
from syncline.table.nested_optimizers import look
from syncline.table.optimizer_template import OptimizerTemplate

TRIES = 8  # to read one version in all seats, before one is delivered


class Line(ABC):
    """Between the seats of one group."""

    seat: int
    seats: int

    @abstractmethod
    def tell(self, answer: Any) -> None:
        """The first seat tells all others."""

    @abstractmethod
    def hear(self) -> Any:
        """What the first seat tells; waits for it."""

    @abstractmethod
    def done(self, word: bytes) -> None:
        """To the first seat: this one has come here; with a word."""

    @abstractmethod
    def gather(self) -> list[bytes]:
        """What all others said with `done`; waits for them."""


class SeatPort(LearnerPort):
    """The port of one seat's session: the first seat's asks the engine's, the others' hear what it said."""

    def __init__(self, port: LearnerPort, line: Line) -> None:
        self.learner, self.rank = port.learner, port.rank
        self._port, self.line, self.leads = port, line, line.seat == 0
        self.windows: list[Shares] = []  # by table
        self.tables: dict[int, SeatTable] = {}

    def told(self, what: str, action: Callable[[], Any]) -> Any:
        """The first seat's answer, or what it raised, in every seat."""
        if self.leads:
            try:
                answer = action()
            except BaseException as error:
                self.line.tell(("", error))
                raise
            self.line.tell((what, answer))
            return answer
        said, answer = self.line.hear()
        if isinstance(answer, BaseException) and said == "":
            raise answer
        if said != what:
            raise LoopError(
                f"seat {self.line.seat} of learner {self.rank} is at {what!r} where the first seat is at {said!r}: all seats of a "
                "group run the same loop; what depends on session.seat must not call the session"
            )
        return answer

    def first_only(self, action: Callable[[], None]) -> None:
        """Of which the others hear only if the servers are gone."""
        if self.leads:
            try:
                action()
            except Reset as reset:
                self.line.tell(("", reset))
                raise

    def gather(self, own: bytes) -> list[bytes]:
        """In the first seat what all say; nothing in the others, which do not wait."""
        if self.leads:
            return [own, *self.line.gather()]
        self.line.done(own)
        return []

    def agree(self, own: Any) -> list[Any]:
        """Everybody's, in every seat; small."""
        said = [pickle.loads(each) for each in self.gather(pickle.dumps(own))]
        found: list[Any] = self.told("agree", lambda: said)
        return found

    def spend(self, work: Computing | Serving) -> None:
        if self.leads:
            self._port.spend(work)

    def tell(self, message: Any) -> None:
        if self.leads:
            self._port.tell(message)

    def left_loop(self, *, again: bool) -> None:
        if self.leads:
            self._port.left_loop(again=again)

    def ask(self, message: Any) -> Any:
        def asked() -> Any:
            answer = self._port.ask(message)
            return replace(answer, desk=None) if isinstance(answer, m.Rejoined) else answer

        answer = self.told(type(message).__name__, asked)
        if isinstance(answer, m.Rejoined):
            return replace(answer, tables=[self._own(each) for each in answer.tables])
        return self._own(answer) if isinstance(answer, m.Opened) else answer

    def _own(self, opened: m.Opened) -> m.Opened:
        """With this seat's part of the buffers that a checkpoint holds."""
        if opened.personal is None:
            return opened
        read, table = self.windows[opened.table].buffers.read, opened.table
        buffers = {each: read(kept) for each, kept in opened.personal.buffers.items() if each == table}
        return replace(opened, personal=replace(opened.personal, buffers=buffers))

    def post(self, message: ToLeader, *, later: bool = False) -> None:
        self.first_only(lambda: self._port.post(message, later=later))

    def portion(self, loader: int, index: int, *, block: bool) -> Portion | None:
        what = f"batch {index} of loader {loader}"
        found: Portion | None = self.told(what, lambda: self._port.portion(loader, index, block=block))
        return found

    def open(self, opened: m.Opened | m.Initialise) -> SeatTable:
        whole: Any = self._port.open(opened)
        found = SeatTable(whole, self.windows[opened.table], self)
        if isinstance(opened, m.Opened):
            self.tables[opened.table] = found
        return found

    def stopping(self) -> bool:
        return bool(self.told("stopping", self._port.stopping))


class Shares(NamedTuple):
    """A seat's windows of one table."""

    parameters: Windows
    buffers: Windows
    others: Windows


def joined_masks(masks: Sequence[bytes]) -> list[bool]:
    """Which parameters have a gradient in some seat; nothing where all have."""
    if not all(masks):
        return []
    found = [any(each) for each in zip(*masks, strict=True)]
    return [] if all(found) else found


class SeatTable(TablePort):
    """A table, seen by one seat; `whole`: the engine's end, which several processes have."""

    def __init__(self, whole: Any, shares: Shares, port: SeatPort) -> None:
        self.layout = whole.layout
        self._whole, self._port, self._shares = whole, port, shares
        self._drafts: dict[int, tuple[Draft, Draft, list[Targets]]] = {}  # by place: whole, own windows
        self.buffers = shares.buffers.read(whole.buffers)
        self.others = shares.others.read(whole.others)
        whole.narrow_to(lambda version: self._rest(shares.parameters.read(version)), shares.parameters.reads)
        self.own: frozenset[int] = frozenset()  # entries that seats update themselves: they were read once

    def _rest(self, tensors: list[Tensor]) -> list[Tensor]:
        return [each for index, each in enumerate(tensors) if index not in self.own] if self.own else tensors

    def draft(self, *, block: bool = True) -> Draft | None:
        def place() -> Any:
            found = self._whole.draft(block=block)
            return None if found is None else found.place

        found = self._port.told("draft", place)
        if found is None:
            return None
        if found not in self._drafts:
            whole, shares = self._whole.at(found), self._shares
            targets = [shares.parameters.targets(whole.gradients), shares.buffers.targets(whole.buffers)]
            if whole.others:
                targets.append(shares.others.targets(whole.others))
            gradients, buffers, *others = (each.tensors for each in targets)
            self._drafts[found] = whole, Draft(gradients, buffers, found, *others), targets
        return self._drafts[found][1]

    def publish(
        self,
        draft: Draft,
        message: Gradient | Put | m.Initialised,
        options: bytes = b"",
        present: Sequence[bool] = (),
    ) -> None:
        """When all seats have written."""
        whole, own, targets = self._drafts[draft.place]
        for gradient, here in zip(own.gradients, present, strict=False):
            if not here:  # others may have one
                gradient.zero_()
        for each in targets:
            each.flush()
        found = joined_masks(self._port.gather(bytes(present)))
        if isinstance(message, Gradient):
            message = message._replace(full=not found)
        self._port.first_only(lambda: self._whole.publish(whole, message, options, found))

    def wait(self, number: int | None, *, block: bool = True) -> Reading | None:
        found: Reading | None = self._port.told(
            f"wait for {number}", lambda: self._whole.wait(number, block=block)
        )
        return found

    def read(self, reading: Reading | None, into: list[Tensor]) -> int | None:
        """One version in all seats: who has an older one than another reads again."""
        assert reading is not None, "nothing flows to seats unasked"
        into = self._rest(into)
        version = self._agreed(reading, into) if into else reading.version
        if self._port.leads:
            self._whole.has_read()
        return version

    def _agreed(self, reading: Reading, into: list[Tensor]) -> int | None:
        version = self._whole.copy(reading, into)
        for _ in range(TRIES):
            found = self._port.agree(-1 if version is None else version)
            if min(found) < 0:
                return None
            if min(found) == max(found):
                return version
            if version is not None and version < max(found):
                version = self._whole.copy(reading._replace(version=max(found)), into)
        return None


class Batches:
    """A loader of a seat. A loop that was left tells the servers at the session's next call, not while an error is on its way:
    the other seats may not have it, and would not be there to hear the answer."""

    def __init__(self, loader: Loader, session: SeatSession) -> None:
        self._loader, self._session = loader, session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        self._session.settle()
        return _Loop(iter(self._loader), self._session.left)


class _Loop(Iterator[Any]):
    def __init__(self, batches: Iterator[Any], left: list[Iterator[Any]]) -> None:
        self._batches, self._left = batches, left

    def __next__(self) -> Any:
        return next(self._batches)

    def __del__(self) -> None:
        self._left.append(self._batches)


class SeatSession(ServerSession):
    """One seat's view of the run."""

    port: SeatPort
    shared = SeatOptimizer
    _tables: list[SeatOptimizer]  # type: ignore[assignment]

    def __init__(self, port: SeatPort, config: Seat, seat: int) -> None:
        super().__init__(port, config)
        self.seat, self.seats = seat, config.seats
        self.committed = False  # a step is under way that all of the group make
        self.left: list[Any] = []  # loops over loaders that nobody goes on with

    def settle(self) -> None:
        """Close what was left."""
        while self.left:
            self.left.pop().close()

    def loader(self, data: Dataset[Any], **options: Any) -> Any:
        self.settle()
        return Batches(super().loader(data, **options), self)

    def put(self, model: nn.Module) -> None:
        self.settle()
        super().put(model)

    def mean(self, value: float | Tensor) -> Any:
        self.settle()
        return super().mean(value)

    @property
    def ending(self) -> bool:
        return not self.committed and super().ending

    def close(self) -> None:
        self.settle()
        for table in self._tables if self.refused is None else ():
            with contextlib.suppress(Reset):
                table.hand_over()
        super().close()

    def optimizer(self, model: nn.Module, factory: Factory) -> SeatOptimizer:
        """The table has the whole model's layout."""
        whole = as_partitioned(model, self.seats)
        self.settle()
        table = super().optimizer(model, factory)
        assert isinstance(table, SeatOptimizer)
        table.bind(whole, local=self.plan.local)
        return table

    def _lay_out(self, model: nn.Module, inner: torch.optim.Optimizer) -> tuple[Layout, Tensors]:
        assert isinstance(model, Partitioned)
        if look(inner).wraps:
            raise LayoutError(
                f"{type(inner).__name__} holds optimizers or parameters itself, which cannot be done over a group's seats: use "
                "group=1, or one of torch.optim's"
            )
        local, tensors = super()._lay_out(model, inner)
        layout = whole_layout(local, model.parts)
        layout = replace(layout, shards=shards_for(inner, self.plan.servers, layout.parameters.nbytes))
        layout = replace(layout, cuts=shard_cuts(layout, model.parts, self.seats))
        shares = []
        for flat in (layout.parameters, layout.buffers, layout.others):
            names = [entry.name for entry in flat.entries]
            shares.append(Windows(model.parts, names, model.group.rank, model.group.size))
        self.port.windows[len(self._tables) :] = [Shares(*shares)]
        return layout, tensors

    def _template(self, inner: torch.optim.Optimizer, layout: Layout) -> OptimizerTemplate:
        """State that an optimizer begins with is that of a seat's slices: where it is one number, it is so of the whole."""
        template = OptimizerTemplate.of(inner)
        state = {
            index: {key: _whole(value, layout, index, inner) for key, value in entry.items()}
            for index, entry in template.state.items()
        }
        return replace(template, state=state)


def _whole(value: Any, layout: Layout, index: int, inner: torch.optim.Optimizer) -> Any:
    parameter = [p for group in inner.param_groups for p in group["params"]][index]
    shape = layout.parameters.entries[index].shape
    if not isinstance(value, Tensor) or value.shape != parameter.shape or value.shape == shape:
        return value
    if value.numel() and not bool((value == value.reshape(-1)[0]).all()):
        raise LayoutError(
            f"{type(inner).__name__} begins with a state of different numbers for each place of a parameter, which a seat has only "
            "its slice of: use group=1"
        )
    filler = value.reshape(-1)[0].item() if value.numel() else 0.0
    return torch.full(shape, filler, dtype=value.dtype)
