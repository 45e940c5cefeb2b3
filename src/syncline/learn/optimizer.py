"""The optimizer that users step: publishes the gradient, waits as the dial says, reads one version (M1, M2).

It looks like the optimizer the user's factory made (groups, options, schedulers, `state_dict`); the real one
runs on the shards. Parameters change only inside `step`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from syncline.dial import Sync
from syncline.errors import LayoutError, LoopError, UsageError
from syncline.learn.surface import UNSAID
from syncline.learn.watching import Untouched
from syncline.ports import (
    DROPPED,
    KEEP,
    SILENT,
    STATES,
    Kind,
    Note,
    Reading,
    Reset,
    RunStopped,
    TableLink,
    gradient_note,
)
from syncline.table.layout import Tensors
from syncline.table.template import Options, group_options, merge, split
from syncline.topology import messages as m

if TYPE_CHECKING:
    from syncline.learn.session import ServerSession


T = TypeVar("T")
_UNSAID = object()


@dataclass(slots=True)
class Sum:
    """Gradients since the last push, in a slot."""

    slot: int = 0
    steps: int = 0
    present: list[bool] = field(default_factory=list)
    loss: Any = None
    tickets: dict[int, int] = field(default_factory=dict)  # slot -> the ticket it was last published with


class SharedOptimizer(torch.optim.Optimizer):
    """A table's end in a learner; made by `session.optimizer`."""

    def __init__(
        self,
        session: ServerSession,
        number: int,
        inner: torch.optim.Optimizer,
        link: TableLink,
        tensors: Tensors,
        steps: int = 0,
        *,
        wraps: bool = False,
    ) -> None:
        self.kind, self._wraps = type(inner), wraps
        super().__init__(inner.param_groups, dict(inner.defaults))
        self.number, self.version = number, -1
        self._stamp: int | None = None  # of the gradient that is being made, where it is not the version
        self._session, self._link = session, link
        self._parameters, self._buffers = tensors.parameters, tensors.buffers
        self._tickets = 0
        self._steps = steps
        self.sync = session.plan.course.first  # as of the last read
        self._sum = Sum()
        self._slot = -1  # the last that was filled
        self._fetching: tuple[int, int] | None = None  # (ticket, step by which it must be here)
        self._serial = 0
        self._loaded: list[dict[str, tuple[Any, Any]]] = [{} for _ in self.param_groups]
        self._options = self._said()
        self._seen: list[tuple[Any, ...]] = []
        self._tensor_options = False
        self._written = [-1] * len(link.slots)  # serial of the options in each slot
        self._on_gpu = any(parameter.is_cuda for parameter in self._parameters)
        if self._on_gpu:
            session.port.pin(link)
        self._dial = -1
        self._keep = False
        self._locals = 0  # local steps
        self._moved = False  # since the last read, by itself
        names = [entry.name for entry in link.layout.parameters.entries]
        self._untouched = Untouched(self._parameters, names)
        self.read(self.ticket())

    def __repr__(self) -> str:
        return (
            f"SharedOptimizer(table {self.number}, {self.kind.__name__} on {self._link.layout.shards} shards)"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if "_link" in self.__dict__:
            raise UsageError(
                "parameter groups cannot be added to a table that is open; give them to the optimizer's factory"
            )
        super().add_param_group(param_group)

    def ticket(self) -> int:
        """Numbers what this learner asks of this table."""
        self._tickets += 1
        return self._tickets - 1

    # -- the step ----------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Publish the gradient, wait as the dial says, read one version."""
        loss = None
        self._warn_of_writes()
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        session = self._session
        if session.ending:
            raise RunStopped
        session.port.spend(session.examples)
        try:
            self._step(loss)
        except Reset:  # this gradient is lost with the servers that had it
            session.rejoin()
        if self.sync.local:  # it has moved by itself
            self._untouched.note(self._steps)
        return loss

    def _warn_of_writes(self) -> None:
        """Of the loop, since the last read: they are in no gradient."""
        if (name := self._untouched.written()) is not None:
            self._session.watch.warn(
                "written",
                f"'{name}' was changed in place between two steps: with servers that is lost at the next read. "
                "session.put(model) after it makes it global; over topology='allreduce' it stays",
            )

    def _step(self, loss: Any) -> None:
        if self.sync.local:
            self._step_locally(loss)
        elif self._sum.steps:  # the dial has changed since: they go out together
            self._add()
            self._sum.loss = loss
            self.read(self.push())
        else:
            self.read(self._publish(loss))

    def _publish(self, loss: Any) -> int:
        index = self._slot = self._next_slot()
        slot = self._link.slots[index]
        full = self._fill(slot.gradients, slot.mask)
        return self._post(index, full, loss)

    def _next_slot(self) -> int:
        """In turn, whatever the dial: what was published under the one before may lie in a slot until its fold."""
        return (self._slot + 1) % (self._session.plan.delay + 1)

    def _post(self, index: int, full: bool, loss: Any) -> int:
        """The slot is filled: tell the leading shard."""
        session = self._session
        if self._buffers:
            torch._foreach_copy_(self._link.slots[index].buffers, self._buffers)
        self._write_options(index)
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()
        number = self.ticket()
        usage, slot = session.take_usage(), (index, self._serial, full)
        value = self._loss(loss)
        flags = self._flags(index)
        stamp, self._stamp = self.version if self._stamp is None else self._stamp, None
        note = gradient_note(self.number, number, stamp, self._steps, usage, slot, flags, value)
        self._steps += 1
        session.port.post(note)
        return number

    def _loss(self, loss: Any) -> float:
        """The closure's, or what the loop says."""
        session = self._session
        said, session.loss = session.loss if loss is None else loss, UNSAID
        value = said.item() if isinstance(said, Tensor) else float(said)
        if said is not UNSAID:
            session.watch.loss(value, self._steps, session.epoch)
        return value

    def _flags(self, index: int) -> int:
        flags = SILENT if self.sync.local else 0
        self._session.mark_random()
        if self._keep:  # a checkpoint follows
            self._keep = False
            self._link.slots[index].write_states(self._session.random_states())
            flags |= STATES
        return flags

    def farewell(self) -> None:
        """Nothing more will be published: leave the random states as of the last gradient."""
        self._link.slots[0].write_states(self._session.random_states(marked=True))
        self._session.port.post(Note(Kind.FAREWELL, self.number, flags=STATES))

    def rest(self, loader: int, upto: int) -> int:
        """Say that there is nothing to compute; the ticket with which to read afterwards."""
        number, flags = self.ticket(), 0
        if self._session.plan.saving.cuts:
            self._link.slots[0].write_states(self._session.random_states())
            flags = STATES
        note = Note(Kind.REST, self.number, number, loader=loader, upto=upto, flags=flags)
        self._session.port.post(note, ring=False)
        return number

    def _fill(self, into: list[Tensor], mask: Tensor) -> bool:
        """Copy the gradients into a slot; True if every parameter has one."""
        gradients: list[Any] = [parameter.grad for parameter in self._parameters]
        if all(gradient is not None for gradient in gradients):
            self._copy(into, gradients)
            return True
        present = [(a, b) for a, b in zip(into, gradients, strict=True) if b is not None]
        if present:
            targets, sources = zip(*present, strict=True)
            self._copy(list(targets), list(sources))
        mask.copy_(torch.tensor([gradient is not None for gradient in gradients], dtype=torch.uint8))
        return False

    def _copy(self, into: list[Tensor], gradients: list[Tensor]) -> None:
        refuse_sparse_gradients(gradients)
        if gradients[0].requires_grad:  # backward(create_graph=True)
            gradients = [gradient.detach() for gradient in gradients]
        torch._foreach_copy_(into, gradients, non_blocking=self._on_gpu)

    def _write_options(self, index: int) -> None:
        seen = [tuple(group.values()) for group in self.param_groups]
        if seen != self._seen or self._tensor_options:
            self._notice_options(seen)
        if self._written[index] != self._serial:
            self._link.slots[index].write_options(self._options)
            self._written[index] = self._serial

    def _notice_options(self, seen: list[tuple[Any, ...]]) -> None:
        """Comparing values is cheap; tensors among them may have changed in place, and are read out."""
        self._tensor_options = any(isinstance(value, Tensor) for values in seen for value in values)
        self._seen = [] if self._tensor_options else seen
        options = self._said()
        if options != self._options:
            self._options = options
            self._serial += 1

    def _said(self) -> Options:
        """The groups' options as they travel: of what a loaded state has set, what was said before, since the shards have
        loaded it themselves and may have changed it."""
        said = group_options(self)
        for option, loaded in zip(said, self._loaded, strict=True):
            for key, (value, before) in list(loaded.items()):
                if option[key] != value:
                    del loaded[key]
                elif before is _UNSAID:
                    del option[key]
                else:
                    option[key] = before
        return said

    def read(self, number: int) -> None:
        """Wait until this ticket is released, then take over the version it names."""
        self._take_over(self._wait(number))

    def _wait(self, number: int) -> Reading:
        return self._unless_refused(lambda: self._link.wait(number))

    def _unless_refused(self, wait: Callable[[], T]) -> T:
        try:
            return wait()
        except LoopError as error:
            self._session.refused(error)
            raise

    def rested(self, number: int) -> None:
        """There is data again: read what the others have; who steps by itself goes on where it was."""
        reading, before = self._wait(number), self.version
        self._warn_of_writes()
        if not (self.sync.local and reading.dial == self._dial):
            self._take_over(reading)
            # in lockstep rounds are what all publish next
            moved = self.version != before and not self.sync.lockstep
            if moved and self._session.examples and self._stamp is None:
                self._stamp = before  # batches of the next gradient were computed on it

    def _take_over(self, reading: Reading) -> None:
        version = reading.version
        self._keep = bool(reading.flags & KEEP)
        if reading.flags & DROPPED:
            self._slot -= 1  # the others of the ring are not free yet
        if reading.dial != self._dial:
            self._dial = reading.dial
            self._turn(self._session.port.dial(reading.dial))
        if version != self.version or self._moved:  # R4: no weights move when they are here already
            weights = self._link.weights(version, self.sync)
            targets = [parameter.data for parameter in self._parameters]
            torch._foreach_copy_(targets, weights, non_blocking=self._on_gpu)
            if self._on_gpu:
                torch.cuda.current_stream().synchronize()
            self.version, self._moved = version, False
        self._untouched.note(self._steps)

    def _turn(self, sync: Sync) -> None:
        """The dial has changed."""
        self.sync, self._fetching = sync, None
        self._session.sync = sync

    # -- local steps (M9) --------------------------------------------------------------------------------

    def _step_locally(self, loss: Any) -> None:
        """Move by itself, add to the sum, push and fetch when their steps have come.

        The shards fold and copy meanwhile. A fetch is waited for only when the next but one would begin.
        """
        self._sum.loss = loss.item() if isinstance(loss, Tensor) else loss
        self._add()
        if self.sync.fetch > 1:
            self._move()
        self._locals += 1
        if self._sum.steps >= self.sync.push:
            self.push()
        if self._locals % self.sync.fetch == 0 and self._fetching is None:
            self._fetching = (self._fetch(), self._locals + self.sync.fetch - 1)
        self._fetched()

    def _add(self) -> None:
        """Add the gradient to the sum, which lies in a slot."""
        total = self._sum
        if total.steps == 0:
            total.slot = self._slot = (self._slot + 1) % len(self._link.slots)
            self._await_slot(total.tickets.get(total.slot, 0))
            total.present = [False] * len(self._parameters)
        into = self._link.slots[total.slot].gradients
        fresh: list[tuple[Tensor, Tensor]] = []
        more: list[tuple[Tensor, Tensor]] = []
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is not None:
                pair = (into[index], parameter.grad.detach())
                (more if total.present[index] else fresh).append(pair)
                total.present[index] = True
        if fresh:
            self._copy([a for a, _ in fresh], [b for _, b in fresh])
        if more:
            torch._foreach_add_([a for a, _ in more], [b.to(a.device) for a, b in more])
        total.steps += 1

    def _await_slot(self, number: int) -> None:
        """Until what was published with this ticket is taken."""
        if not self._link.free(number):
            self._session.awaits(self.number, number)
            self._unless_refused(lambda: self._link.wait_free(number))

    @torch.no_grad()
    def _move(self) -> None:
        moving = [parameter for parameter in self._parameters if parameter.grad is not None]
        gradients = [parameter.grad for parameter in moving]
        if moving:
            torch._foreach_add_(moving, gradients, alpha=-self.sync.local_lr)  # type: ignore[arg-type,operator]
            self._moved = True

    def push(self) -> int:
        """Publish the sum, be it of fewer steps than the dial says; its ticket, or the last without one."""
        total = self._sum
        if total.steps == 0:
            return self._tickets - 1
        full = all(total.present)
        if not full:
            self._link.slots[total.slot].mask.copy_(torch.tensor(total.present, dtype=torch.uint8))
        total.tickets[total.slot] = self._post(total.slot, full, total.loss)
        total.steps, total.loss = 0, None
        return total.tickets[total.slot]

    def _fetched(self) -> None:
        """Take over what was fetched, if it is here or overdue; own movement since is lost (M9)."""
        if self._fetching is None:
            return
        number, due = self._fetching
        reading = self._link.released(number)
        if reading is None and self._locals >= due:
            self._session.awaits(self.number, number)
            reading = self._wait(number)
        if reading is None:
            return
        self._fetching = None
        if reading.dial != self._dial and any(ticket > number for ticket in self._sum.tickets.values()):
            number = self._fetch()  # pushed since: in another dial that may be folded while this reads
            self._session.awaits(self.number, number)
            reading = self._wait(number)
        self._take_over(reading)

    def _fetch(self) -> int:
        number = self.ticket()
        self._session.port.post(Note(Kind.FETCH, self.number, number))
        return number

    def rejoin(self, link: TableLink) -> None:
        """The same table on new servers: what was asked of the old ones is void."""
        self._link = link
        self._tickets = 0
        self._written = [-1] * len(link.slots)
        self._sum, self._slot, self._fetching = Sum(), -1, None
        self.version, self._stamp = -1, None
        self.read(self.ticket())

    # -- writes and states -------------------------------------------------------------------------------

    def holds(self, parameters: set[int]) -> bool:
        return any(id(parameter) in parameters for parameter in self._parameters)

    @torch.no_grad()
    def put(self) -> None:
        """This learner's present values become global with the next update."""
        values = [parameter.detach().clone() for parameter in self._parameters]
        self._session.insist(lambda: self._put(values))
        self._untouched.note(self._steps)

    def _put(self, values: list[Tensor]) -> None:
        index = self._next_slot()
        torch._foreach_copy_(self._link.slots[index].gradients, values)
        number = self.ticket()
        self._session.port.post(Note(Kind.PUT, self.number, number, slot=index))
        self._link.wait(number)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state as plain PyTorch gives it, of the newest version."""
        parts: list[m.StatePart] = self._session.insist(self._state_parts)
        if (whole := parts[0].whole) is not None:
            self._add_unsent(whole.get("param_groups", ()))
            return whole
        options = [dict(option) for option in parts[0].options]
        self._add_unsent(options)
        return merge(self._link.layout, options, [part.state for part in parts])

    def _add_unsent(self, options: Options) -> None:
        """What the loop has changed since the last gradient."""
        for option, said, sent in zip(options, self._said(), self._options, strict=False):
            option.update((key, said[key]) for key in said if said[key] != sent.get(key, _UNSAID))

    def _state_parts(self) -> list[m.StatePart]:
        number = self.ticket()
        self._session.port.post(Note(Kind.STATE, self.number, number))
        return self._session.port.request(m.AwaitState(self.number, number))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state of plain PyTorch's or of another run; every learner may call it."""
        if self._wraps or any(isinstance(key, str) for key in state_dict["state"]):
            self._take_options(state_dict.get("param_groups", ()))
            self._session.insist(lambda: self._load([], {}, state_dict))
            return
        options, state = split(self._link.layout, state_dict)
        self._take_options(options)
        self._session.insist(lambda: self._load(options, state))

    def _take_options(self, options: Options) -> None:
        for group, option, before, loaded in zip(
            self.param_groups, options, self._said(), self._loaded, strict=False
        ):
            taken = {key: value for key, value in option.items() if key not in ("params", "param_names")}
            group.update(taken)
            loaded.update((key, (value, before.get(key, _UNSAID))) for key, value in taken.items())

    def _load(
        self, options: Options, state: dict[int, dict[str, Any]], whole: dict[str, Any] | None = None
    ) -> None:
        number = self.ticket()
        self._session.port.request(m.LoadState(self.number, number, options, state, whole))
        self._session.port.post(Note(Kind.LOAD, self.number, number))
        self._link.wait(number)

    def release_hooks(self) -> None:
        """Nothing is held after the learner's function."""
        self._link = None  # type: ignore[assignment]


def refuse_sparse_gradients(gradients: Iterable[Tensor]) -> None:
    for gradient in gradients:
        if gradient.is_sparse:
            raise LayoutError(
                "a parameter has a sparse gradient, which does not travel; make its layer with sparse=False"
            )
