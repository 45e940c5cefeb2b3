"""A group's seats, each a process with one session of the same learner (M15).

Every seat runs the same loop on the same batches. The first one speaks for all: it asks the servers and tells the others
what it was answered, so that all sessions go the same way. Each writes and reads its windows of the table alone; a
gradient is published when all have written theirs. Not responsible for processes and memory: engines are.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from syncline.dial import Sync
from syncline.errors import LayoutError, LoopError, UsageError
from syncline.learn.feed import Loader
from syncline.learn.optimizer import SharedOptimizer
from syncline.learn.session import ServerSession, shards_for
from syncline.learn.surface import Factory
from syncline.parallel.module import Part, Partitioned
from syncline.parallel.seats import Targets, Windows
from syncline.ports import Kind, LearnerPort, Note, Portion, Reading, Reset, Slot, TableLink
from syncline.table.layout import Flat, Layout, Tensors
from syncline.table.template import OptimizerTemplate
from syncline.topology import messages as m
from syncline.topology.plan import Seat

WRITES = (Kind.GRADIENT, Kind.PUT)  # what lies in a slot
READS = (*WRITES, Kind.FETCH, Kind.REST)  # after which what was read before may change


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
    def done(self, mask: bytes) -> None:
        """To the first seat: this one has written and read; which parameters have a gradient here, if not all."""

    @abstractmethod
    def gather(self) -> list[bytes]:
        """What all others said with `done`; waits for them."""


class SeatPort(LearnerPort):
    """The port of one seat's session: the first seat's asks the engine's, the others' hear what it said."""

    def __init__(self, port: LearnerPort, line: Line) -> None:
        self.learner, self.rank = port.learner, port.rank
        self._port, self._line, self._leads = port, line, line.seat == 0
        self.windows: list[Shares] = []  # by table
        self._links: dict[int, SeatLink] = {}
        self._first: list[Targets] = []  # a new table's first values, until they are written

    def ask(self, what: str, action: Callable[[], Any]) -> Any:
        """The first seat's answer, or what it raised, in every seat."""
        if not self._leads:
            return self._heard(what)
        try:
            answer = action()
        except BaseException as error:
            self._line.tell(("", error))
            raise
        self._line.tell((what, answer))
        return answer

    def _heard(self, what: str) -> Any:
        said, answer = self._line.hear()
        if isinstance(answer, BaseException) and said == "":
            raise answer
        if said != what:
            raise LoopError(
                f"seat {self._line.seat} of learner {self.rank} is at {what!r} where the first seat is at {said!r}: all seats of a "
                "group run the same loop; what depends on session.seat must not call the session"
            )
        return answer

    def now(self) -> float:
        return time.monotonic()

    def spend(self, examples: int) -> None:
        if self._leads:
            self._port.spend(examples)

    def post(self, note: Note, *, ring: bool = True) -> None:
        if note.kind in READS:
            note = self._together(note)
        if self._leads:
            try:
                self._port.post(note, ring=ring)
            except Reset as reset:
                self._line.tell(("", reset))
                raise

    def _together(self, note: Note) -> Note:
        """When all seats have written; the first one's note says which parameters have a gradient in any of them."""
        mask = b""
        slot = self._links[note.table].seat_slots[note.slot] if note.kind in WRITES else None
        if slot is not None:
            mask = slot.flush(full=bool(note.full))
        if not self._leads:
            self._line.done(mask)
            return note
        masks = [mask, *self._line.gather()]
        if slot is None or all(not each for each in masks):
            return note
        return note._replace(full=int(slot.join(masks)))

    def ring(self) -> None:
        if self._leads:
            self._port.ring()

    def portion(self, loader: int, index: int, *, block: bool) -> Portion | None:
        what = f"batch {index} of loader {loader}"
        found: Portion | None = self.ask(what, lambda: self._port.portion(loader, index, block=block))
        return found

    def request(self, message: Any) -> Any:
        if isinstance(message, m.Initialised):
            self._write_first()
        answer = self.ask(type(message).__name__, lambda: self._port.request(message))
        return self._own(answer) if isinstance(answer, m.Opened) else answer

    def _write_first(self) -> None:
        for targets in self._first:
            targets.flush()
        self._first = []
        if self._leads:
            self._line.gather()
        else:
            self._line.done(b"")

    def _own(self, opened: m.Opened) -> m.Opened:
        """With this seat's part of the buffers that a checkpoint holds."""
        if opened.personal is None:
            return opened
        read = self.windows[opened.table].buffers.read
        buffers = {
            table: read(kept) for table, kept in opened.personal.buffers.items() if table == opened.table
        }
        return replace(opened, personal=replace(opened.personal, buffers=buffers))

    def tell(self, message: Any) -> None:
        if self._leads:
            self._port.tell(message)

    def first_values(self, handle: Any, layout: Layout) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        wholes, shares = self._port.first_values(handle, layout), self.windows[-1]
        kinds = (shares.parameters, shares.buffers, shares.others)
        self._first = [windows.targets(whole) for windows, whole in zip(kinds, wholes, strict=True)]
        parameters, buffers, others = (targets.tensors for targets in self._first)
        return parameters, buffers, others

    def pin(self, link: TableLink) -> None:
        assert isinstance(link, SeatLink)
        self._port.pin(link.whole)

    def attach(self, opened: m.Opened) -> SeatLink:
        link = SeatLink(self._port.attach(opened), self.windows[opened.table], self)
        self._links[opened.table] = link
        return link

    def rejoin(self, tables: int, loaders: int) -> list[m.Opened]:
        opened = self.ask("rejoin", lambda: self._port.rejoin(tables, loaders))
        return [self._own(each) for each in opened]

    def dial(self, number: int) -> Sync:
        return self._port.dial(number)

    def stopping(self) -> bool:
        return bool(self.ask("stopping", self._port.stopping))

    @property
    def leads(self) -> bool:
        return self._leads


class Shares:
    """A seat's windows of one table."""

    def __init__(self, layout: Layout, model: Partitioned) -> None:
        def windows(flat: Flat) -> Windows:
            names = [entry.name for entry in flat.entries]
            return Windows(model.parts, names, model.group.rank, model.group.size)

        self.parameters, self.buffers = windows(layout.parameters), windows(layout.buffers)
        self.others = windows(layout.others)


class SeatSlot:
    """A seat's windows of one slot; options and random states are the first seat's to say."""

    def __init__(self, slot: Slot, shares: Shares, *, leads: bool) -> None:
        self._slot, self._leads = slot, leads
        self._gradients = shares.parameters.targets(slot.gradients)
        self._buffers = shares.buffers.targets(slot.buffers)
        self.gradients, self.buffers = self._gradients.tensors, self._buffers.tensors
        self.mask = torch.zeros_like(slot.mask)

    def flush(self, *, full: bool) -> bytes:
        """All is written; the mask, if not every parameter has a gradient here."""
        present = None if full else self.mask.tolist()
        if present is not None:  # others may have one
            for gradient, here in zip(self.gradients, present, strict=True):
                if not here:
                    gradient.zero_()
        self._gradients.flush()
        self._buffers.flush()
        return b"" if present is None else bytes(present)

    def join(self, masks: Sequence[bytes]) -> bool:
        """Write which parameters have a gradient in some seat; whether all have."""
        count = len(self.gradients)
        found = [any(not mask or mask[index] for mask in masks) for index in range(count)]
        self._slot.mask.copy_(torch.tensor(found, dtype=torch.uint8))
        return all(found)

    def write_options(self, options: list[dict[str, Any]]) -> None:
        if self._leads:
            self._slot.write_options(options)

    def write_states(self, states: bytes) -> None:
        if self._leads:
            self._slot.write_states(states)


class SeatLink(TableLink):
    """A table, seen by one seat."""

    def __init__(self, whole: TableLink, shares: Shares, port: SeatPort) -> None:
        self.whole, self.layout = whole, whole.layout
        self._port, self._shares = port, shares
        self.seat_slots = [SeatSlot(slot, shares, leads=port.leads) for slot in whole.slots]
        self.slots = self.seat_slots
        self.buffers = shares.buffers.read(whole.buffers)
        self.others = shares.others.read(whole.others)

    def weights(self, version: int, sync: Sync) -> list[Tensor]:
        return self._shares.parameters.read(self.whole.weights(version, sync))

    def released(self, number: int) -> Reading | None:
        found: Reading | None = self._port.ask(f"look for {number}", lambda: self.whole.released(number))
        return found

    def wait(self, number: int) -> Reading:
        found: Reading = self._port.ask(f"wait for {number}", lambda: self.whole.wait(number))
        return found

    def free(self, number: int) -> bool:
        return bool(self._port.ask(f"see whether {number} is free", lambda: self.whole.free(number)))

    def wait_free(self, number: int) -> None:
        self._port.ask(f"wait until {number} is free", lambda: self.whole.wait_free(number))


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

    def __init__(self, port: SeatPort, config: Seat, seat: int) -> None:
        super().__init__(port, config)
        self.seat, self.seats = seat, config.seats
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

    def close(self) -> None:
        self.settle()
        super().close()

    def optimizer(self, model: nn.Module, factory: Factory) -> SharedOptimizer:
        """The table has the whole model's layout; gradients of what every seat holds are added up before each step."""
        if not isinstance(model, Partitioned):
            raise UsageError(
                f"session.optimizer in a group of {self.seats} seats takes a partitioned model: "
                f"sl.partition({type(model).__name__}(...), plan, example); got {type(model).__name__}"
            )
        self.settle()
        table = super().optimizer(model, factory)
        table.register_step_pre_hook(_reducing(model, self.settle))
        return table

    def _lay_out(
        self, model: nn.Module, inner: torch.optim.Optimizer, *, wraps: bool
    ) -> tuple[Layout, Tensors]:
        assert isinstance(model, Partitioned)
        if wraps:
            raise LayoutError(
                f"{type(inner).__name__} holds optimizers or parameters itself, which cannot be done over a group's seats: use "
                "group=1, or one of torch.optim's"
            )
        local, tensors = super()._lay_out(model, inner, wraps=wraps)
        layout = whole_layout(local, model.parts)
        size = layout.parameters.nbytes
        shards = shards_for(inner, self.plan.servers, size)
        layout = replace(layout, shards=shards)
        self.port.windows[len(self._tables) :] = [Shares(layout, model)]
        return layout, tensors

    def _template(self, inner: torch.optim.Optimizer, layout: Layout) -> OptimizerTemplate:
        """State that an optimizer begins with is that of a seat's slices: where it is one number, it is so of the whole."""
        template = OptimizerTemplate.of(inner)
        state = {
            index: {key: _whole(value, layout, index, inner) for key, value in entry.items()}
            for index, entry in template.state.items()
        }
        return replace(template, state=state)


def whole_layout(layout: Layout, parts: dict[str, Part]) -> Layout:
    """Of a whole model, from that of its slices."""

    def whole(flat: Flat) -> Flat:
        return Flat(tuple(replace(entry, shape=parts[entry.name].shape) for entry in flat.entries))

    return replace(
        layout,
        parameters=whole(layout.parameters),
        buffers=whole(layout.buffers),
        others=whole(layout.others),
    )


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


def _reducing(model: Partitioned, settle: Callable[[], None]) -> Callable[..., Any]:
    def before(optimizer: Any, args: Any, kwargs: Any) -> Any:
        """The closure runs here, so that its gradients are there to be added up."""
        settle()
        table, *rest = args
        closure = rest[0] if rest else kwargs.get("closure")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        model.reduce_gradients()
        return (table, (lambda: loss) if closure is not None else None), {}

    return before
