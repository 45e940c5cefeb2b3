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

from syncline import messages as m
from syncline.dial import Sync
from syncline.errors import LayoutError, LoopError, UsageError
from syncline.learn.surface import UNSAID
from syncline.learn.watching import Untouched
from syncline.messages import to_leader as say
from syncline.ports import Draft, Reading, Reset, RunStopped, TablePort
from syncline.table.layout import Tensors
from syncline.table.slot import options_text
from syncline.table.template import Options, group_options, merge, split

if TYPE_CHECKING:
    from syncline.learn.session import ServerSession


T = TypeVar("T")
_UNSAID = object()


@dataclass(slots=True)
class Sum:
    """Gradients since the last push, in a draft."""

    steps: int = 0
    present: list[bool] = field(default_factory=list)
    loss: Any = None
    ticket: int = -1  # of the last push


class SharedOptimizer(torch.optim.Optimizer):
    """A table's end in a learner; made by `session.optimizer`."""

    def __init__(
        self,
        session: ServerSession,
        number: int,
        inner: torch.optim.Optimizer,
        table: TablePort,
        tensors: Tensors,
        steps: int = 0,
        *,
        wraps: bool = False,
    ) -> None:
        self.kind, self._wraps = type(inner), wraps
        super().__init__(inner.param_groups, dict(inner.defaults))
        self.number, self.version = number, -1
        self._stamp: int | None = None  # of the gradient that is being made, where it is not the version
        self._session, self._table = session, table
        self._parameters, self._buffers = tensors.parameters, tensors.buffers
        self._tickets = 0
        self._steps = steps
        self.sync = session.plan.course.first  # as of the last read
        self._sum = Sum()
        self._draft: Draft | None = None  # that is being filled
        self._fetching: tuple[int, int] | None = None  # (ticket, step by which it must be here)
        self._serial = 0
        self._loaded: list[dict[str, tuple[Any, Any]]] = [{} for _ in self.param_groups]
        self._options = self._said()
        self._options_text = options_text(self._options)
        self._seen: list[tuple[Any, ...]] = []
        self._tensor_options = False
        self._on_gpu = any(parameter.is_cuda for parameter in self._parameters)
        self._dial = -1
        self._keep = False
        self._locals = 0  # local steps
        self._moved = False  # since the last read, by itself
        names = [entry.name for entry in table.layout.parameters.entries]
        self._untouched = Untouched(self._parameters, names)
        self.read(self.ticket())

    def __repr__(self) -> str:
        return f"SharedOptimizer(table {self.number}, {self.kind.__name__} on {self._table.layout.shards} shards)"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if "_table" in self.__dict__:
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
        draft = self._drafted()
        present = self._fill(draft.gradients)
        return self._post(draft, present, loss)

    def _drafted(self) -> Draft:
        """Kept until it is published: what cannot be published is filled again."""
        if self._draft is None:
            self._draft = self._table.draft(block=False) or self._await_draft()
        return self._draft

    def _await_draft(self) -> Draft:
        self._session.awaits(self.number, self._tickets - 1)
        draft = self._unless_refused(self._table.draft)
        assert draft is not None
        return draft

    def _post(self, draft: Draft, present: list[bool], loss: Any) -> int:
        """The draft is filled: publish it."""
        session = self._session
        if self._buffers:
            torch._foreach_copy_(draft.buffers, self._buffers)
        self._look_at_options()
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()
        number = self.ticket()
        usage = session.take_usage()
        value = self._loss(loss)
        states = self._states()
        stamp, self._stamp = self.version if self._stamp is None else self._stamp, None
        gradient = say.Gradient(
            self.number,
            number,
            stamp,
            self._steps,
            *usage,
            self._serial,
            not present,
            self.sync.local,
            states,
            value,
        )
        self._steps += 1
        self._draft = None
        self._table.publish(draft, gradient, self._options_text, present)
        return number

    def _loss(self, loss: Any) -> float:
        """The closure's, or what the loop says."""
        session = self._session
        said, session.loss = session.loss if loss is None else loss, UNSAID
        value = said.item() if isinstance(said, Tensor) else float(said)
        if said is not UNSAID:
            session.watch.loss(value, self._steps, session.epoch)
        return value

    def _states(self) -> bytes:
        """Of the random generators, where a checkpoint follows."""
        self._session.mark_random()
        if not self._keep:
            return b""
        self._keep = False
        return self._session.random_states()

    def farewell(self) -> None:
        """Nothing more will be published: leave the random states as of the last gradient."""
        states = self._session.random_states(marked=True)
        self._session.port.post(say.Farewell(self.number, states))

    def rest(self, loader: int, index: int, *, later: bool) -> int:
        """Say that there is nothing to compute; the ticket with which to read afterwards."""
        number = self.ticket()
        rest = say.Rest(self.number, number, loader, index, self._states_at_rest())
        self._session.port.post(rest, later=later)
        return number

    def reread(self, *, later: bool) -> int:
        """Say that it is there again; the ticket with which to read."""
        number = self.ticket()
        self._session.port.post(say.Reread(self.number, number, self._states_at_rest()), later=later)
        return number

    def _states_at_rest(self) -> bytes:
        return self._session.random_states() if self._session.plan.saving.cuts else b""

    def _fill(self, into: list[Tensor]) -> list[bool]:
        """Copy the gradients into a draft; which parameters have one, nothing where all have."""
        gradients: list[Any] = [parameter.grad for parameter in self._parameters]
        if all(gradient is not None for gradient in gradients):
            self._copy(into, gradients)
            return []
        present = [(a, b) for a, b in zip(into, gradients, strict=True) if b is not None]
        if present:
            targets, sources = zip(*present, strict=True)
            self._copy(list(targets), list(sources))
        return [gradient is not None for gradient in gradients]

    def _copy(self, into: list[Tensor], gradients: list[Tensor]) -> None:
        refuse_sparse_gradients(gradients)
        if gradients[0].requires_grad:  # backward(create_graph=True)
            gradients = [gradient.detach() for gradient in gradients]
        torch._foreach_copy_(into, gradients, non_blocking=self._on_gpu)

    def _look_at_options(self) -> None:
        seen = [tuple(group.values()) for group in self.param_groups]
        if seen != self._seen or self._tensor_options:
            self._notice_options(seen)

    def _notice_options(self, seen: list[tuple[Any, ...]]) -> None:
        """Comparing values is cheap; tensors among them may have changed in place, and are read out."""
        self._tensor_options = any(isinstance(value, Tensor) for values in seen for value in values)
        self._seen = [] if self._tensor_options else seen
        options = self._said()
        if options != self._options:
            self._options_text, self._options = options_text(options), options
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
        reading = self._unless_refused(lambda: self._table.wait(number))
        assert reading is not None
        return reading

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
        self._keep = reading.keep
        if reading.dial != self._dial:
            self._turn(self._session.dial(reading.dial))
            self._dial = reading.dial
        if reading.version <= self.version and not self._moved:  # R4: no weights move that are here already
            self._table.read(reading, [])
        else:
            version = self._table.read(reading, [parameter.data for parameter in self._parameters])
            if version is None:
                self._overtaken(reading)
                return
            self.version, self._moved = version, False
        self._untouched.note(self._steps)

    def _overtaken(self, reading: Reading) -> None:
        """Newer versions came faster than it could read: one is delivered."""
        number = self.ticket()
        self._session.port.post(say.Fetch(self.number, number, deliver=True))
        delivered = self._wait(number)
        self._take_over(delivered._replace(keep=delivered.keep or reading.keep))

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
        """Add the gradient to the sum, which lies in a draft."""
        total, into = self._sum, self._drafted().gradients
        if total.steps == 0:
            total.present = [False] * len(self._parameters)
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
        present = [] if all(total.present) else total.present
        total.ticket = self._post(self._drafted(), present, total.loss)
        total.steps, total.loss = 0, None
        return total.ticket

    def _fetched(self) -> None:
        """Take over what was fetched, if it is here or overdue; own movement since is lost (M9)."""
        if self._fetching is None:
            return
        number, due = self._fetching
        reading = self._table.wait(number, block=False)
        if reading is None and self._locals >= due:
            self._session.awaits(self.number, number)
            reading = self._wait(number)
        if reading is None:
            return
        self._fetching = None
        if reading.dial != self._dial and self._sum.ticket > number:
            number = self._fetch()  # pushed since: it may be folded while this reads
            self._session.awaits(self.number, number)
            reading = self._wait(number)
        self._take_over(reading)

    def _fetch(self) -> int:
        number = self.ticket()
        self._session.port.post(say.Fetch(self.number, number))
        return number

    def rejoin(self, table: TablePort) -> None:
        """The same table on new servers: what was asked of the old ones is void."""
        self._table = table
        self._tickets = 0
        self._sum, self._draft, self._fetching = Sum(), None, None
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
        draft = self._table.draft()
        assert draft is not None
        torch._foreach_copy_(draft.gradients, values)
        number = self.ticket()
        self._table.publish(draft, say.Put(self.number, number))
        self._table.wait(number)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state as plain PyTorch gives it, of the newest version."""
        parts: list[m.StatePart] = self._session.insist(self._state_parts)
        if (whole := parts[0].whole) is not None:
            self._add_unsent(whole.get("param_groups", ()))
            return whole
        options = [dict(option) for option in parts[0].options]
        self._add_unsent(options)
        return merge(self._table.layout, options, [part.state for part in parts])

    def _add_unsent(self, options: Options) -> None:
        """What the loop has changed since the last gradient."""
        for option, said, sent in zip(options, self._said(), self._options, strict=False):
            option.update((key, said[key]) for key in said if said[key] != sent.get(key, _UNSAID))

    def _state_parts(self) -> list[m.StatePart]:
        number = self.ticket()
        self._session.port.post(say.AskState(self.number, number))
        return self._session.port.ask(m.AwaitState(self.number, number))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state of plain PyTorch's or of another run; every learner may call it."""
        if self._wraps or any(isinstance(key, str) for key in state_dict["state"]):
            self._take_options(state_dict.get("param_groups", ()))
            self._session.insist(lambda: self._load([], {}, state_dict))
            return
        options, state = split(self._table.layout, state_dict)
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
        self._session.port.ask(m.LoadState(self.number, number, options, state, whole))
        self._session.port.post(say.Load(self.number, number))
        self._table.wait(number)

    def release_hooks(self) -> None:
        """Nothing is held after the learner's function."""
        self._table = None  # type: ignore[assignment]


def refuse_sparse_gradients(gradients: Iterable[Tensor]) -> None:
    for gradient in gradients:
        if gradient.is_sparse:
            raise LayoutError(
                "a parameter has a sparse gradient, which does not travel; make its layer with sparse=False"
            )
