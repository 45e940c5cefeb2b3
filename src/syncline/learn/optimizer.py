"""The optimizer that users step: publishes the gradient, waits as the dial says, reads one version (M1, M2).

It looks like the optimizer the user's factory made (groups, options, schedulers, `state_dict`); the real one
runs on the shards. Parameters change only inside `step`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, SupportsFloat

import torch
from torch import Tensor

from syncline import messages as m
from syncline.errors import LoopError, UsageError
from syncline.learn.session import UNSAID, TableOptimizer, copy_all, sparse_gradient
from syncline.learn.stepper import FreeDraft, Replica, Sealed, Stepper, Steps
from syncline.learn.usage_warnings import Untouched, hooked
from syncline.messages import to_leader as say
from syncline.ports import Computing, Draft, Reading, Reset, TablePort
from syncline.table.gradient_slot import options_text
from syncline.table.layout import Tensors
from syncline.table.optimizer_template import Options, group_options, merge, own_options, split
from syncline.topologies import Trees

if TYPE_CHECKING:
    from syncline.learn.server_session import ServerSession


_UNSAID = object()


class SharedOptimizer(TableOptimizer, Replica):
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
        super().__init__(number, inner, tensors)
        self._session, self._table, self._wraps = session, table, wraps
        self._on_gpu = any(parameter.is_cuda for parameter in tensors.parameters)
        self._serial = 0
        self._loaded: list[dict[str, tuple[Any, Any]]] = [{} for _ in self.param_groups]
        self._options = self._said()
        self._options_text = options_text(self._options)
        self._seen: list[tuple[Any, ...]] = []
        self._tensor_options = False
        self._moved = False  # since the last read, by itself
        self._present: list[bool] = []  # in the sum
        names = [entry.name for entry in table.layout.parameters.entries]
        self.untouched = Untouched(tensors.parameters, names, session.watch)
        topology = session.plan.topology
        self.stepper = Stepper(
            number,
            session.plan.course.first,
            self,
            session.port.post,
            steps,
            tree=isinstance(topology, Trees),
            casts=isinstance(topology, Trees) and topology.broadcast,
        )
        self.drive(self.stepper.read(self.stepper.ticket()))

    def __repr__(self) -> str:
        return f"SharedOptimizer(table {self.number}, {self.kind.__name__} on {self._table.layout.shards} shards)"

    @property
    def version(self) -> int:
        """That it has."""
        return self.stepper.version

    # -- the step ----------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Publish the gradient, wait as the dial says, read one version."""
        # torch's wrapper costs a tenth of a small step
        if torch.autograd._profiler_enabled() or hooked(self):
            return _hooked_step(self, closure)
        self._session.watch.steps += 1
        return self._stepped(closure)

    step.hooked = True  # type: ignore[attr-defined]  # torch leaves it as it is

    def _stepped(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if self._on_gpu and torch.cuda.is_current_stream_capturing():
            raise UsageError(
                "session.optimizer's step cannot be in a CUDA graph: it talks to other processes. Capture forward and backward "
                "(torch.cuda.make_graphed_callables), and step outside"
            )
        self.untouched.look()
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        session, stepper = self._session, self.stepper
        if session.ending:
            raise session.unwind()
        session.port.spend(Computing(session.examples))
        said = loss.item() if isinstance(loss, Tensor) and stepper.sync.local else loss
        try:
            self.drive(stepper.step(said))
        except Reset:  # this gradient is lost with the servers that had it
            session.rejoin()
        if stepper.sync.local:  # it has moved by itself
            self.untouched.note(stepper.steps)
        return loss

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

    def drive(self, steps: Steps) -> None:
        """Block on the port for what they wait for."""
        found: Any = None
        while True:
            try:
                wait = steps.send(found)
            except StopIteration:
                return
            if isinstance(wait, m.AskDial):
                found = self._session.port.ask(wait)
                continue
            try:
                if isinstance(wait, FreeDraft):
                    found = self._table.draft(block=wait.block)
                else:
                    found = self._table.wait(wait.number, block=wait.block)
            except LoopError as error:
                self._session.refused = error
                raise

    def rested(self, number: int) -> None:
        """There is data again: read what the others have; who steps by itself goes on where it was."""
        self.untouched.look()
        self.drive(self.stepper.rested(number))

    def rejoin(self, table: TablePort, personal: m.Personal | None) -> None:
        """The same table on new servers: what was asked of the old ones is void; buffers are the checkpoint's."""
        self._table = table
        self.stepper.begin()
        self.drive(self.stepper.read(self.stepper.ticket()))
        if personal is not None and self.number in personal.buffers:
            copy_all(self._buffers, personal.buffers[self.number])

    # -- as the stepper's replica: a gradient ------------------------------------------------------------

    def fill(self, draft: Draft) -> list[bool]:
        into, gradients = [], []
        for target, parameter in zip(draft.gradients, self.parameters, strict=True):
            if (gradient := parameter.grad) is not None:
                into.append(target)
                gradients.append(gradient)
        self._copy(into, gradients)
        if len(gradients) == len(self.parameters):
            return []
        return [parameter.grad is not None for parameter in self.parameters]

    def _copy(self, into: list[Tensor], gradients: list[Tensor]) -> None:
        for gradient in gradients:
            if gradient.is_sparse:
                raise sparse_gradient()
        if gradients and gradients[0].requires_grad:  # backward(create_graph=True)
            gradients = [gradient.detach() for gradient in gradients]
        if gradients:
            torch._foreach_copy_(into, gradients, non_blocking=self._on_gpu)

    def add(self, draft: Draft, *, first: bool) -> None:
        if first:
            self._present = [False] * len(self.parameters)
        fresh: list[tuple[Tensor, Tensor]] = []
        more: list[tuple[Tensor, Tensor]] = []
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                pair = (draft.gradients[index], parameter.grad.detach())
                (more if self._present[index] else fresh).append(pair)
                self._present[index] = True
        self._copy([a for a, _ in fresh], [b for _, b in fresh])
        if more:
            torch._foreach_add_([a for a, _ in more], [b.to(a.device) for a, b in more])

    def added(self) -> list[bool]:
        return [] if all(self._present) else self._present

    @torch.no_grad()
    def move(self, rate: float) -> None:
        moving = [parameter for parameter in self.parameters if parameter.grad is not None]
        gradients = [parameter.grad for parameter in moving]
        if moving:
            torch._foreach_add_(moving, gradients, alpha=-rate)  # type: ignore[arg-type]
            self._moved = True

    def seal(self, draft: Draft, said: Any, *, keep: bool) -> Sealed:
        """The loss is the closure's, or what the loop says; on a card nobody waits for it here."""
        session, steps = self._session, self.stepper.steps
        if self._buffers:
            torch._foreach_copy_(draft.buffers, self._buffers)
        seen = [tuple(group.values()) for group in self.param_groups]
        if seen != self._seen or self._tensor_options:
            self._notice_options(seen)
        if self._on_gpu and not any(gradient.is_cuda for gradient in draft.gradients[:1]):
            torch.cuda.current_stream().synchronize()
        usage = session.take_usage()
        found, session.loss = session.loss if said is None else said, UNSAID
        loss: SupportsFloat
        if isinstance(found, Tensor) and found.is_cuda:
            session.watch.loss_on_card(found, steps, session.epoch)
            loss = found.detach()
        else:
            loss = found.item() if isinstance(found, Tensor) else float(found)
            if found is not UNSAID and not math.isfinite(loss):
                session.watch.not_finite(loss, steps, session.epoch)
        states = session.gradient_states(keep=keep) if session.plan.saving.cuts else b""
        return usage, self._serial, states, loss

    def publish(self, draft: Draft, gradient: say.Gradient, present: list[bool]) -> None:
        self._table.publish(draft, gradient, self._options_text, present)

    # -- and reading -------------------------------------------------------------------------------------

    def read(self, reading: Reading, *, known: bool) -> int | None:
        stepper = self.stepper
        self._session.sync = stepper.sync
        if known and not self._moved:  # R4: no weights move that are here already
            self._table.read(reading, [])
            version: int | None = stepper.version
        else:
            version = self._table.read(reading, [parameter.data for parameter in self.parameters])
        if version is not None:
            self._moved = False
            self.untouched.note(stepper.steps)
        return version

    @torch.no_grad()
    def flow(self) -> int:
        version = self._table.read(None, list(self.parameters))
        if version is None:
            return self.stepper.version
        self.untouched.note(self.stepper.steps)
        return version

    def overtaken(self) -> bool:
        return self._table.overtaken

    def several(self) -> bool:
        return len(self._session.loaders) > 1

    def begun(self) -> bool:
        return bool(self._session.examples)

    def awaits(self, number: int) -> None:
        self._session.awaits(self.number, number)

    # -- writes and states -------------------------------------------------------------------------------

    @torch.no_grad()
    def put(self) -> None:
        """This learner's present values become global with the next update."""
        values = [parameter.detach().clone() for parameter in self.parameters]
        self._session.insist(lambda: self._put(values))
        self.untouched.note(self.stepper.steps)

    def _put(self, values: list[Tensor]) -> None:
        self.drive(self.stepper.deliver())
        draft = self._table.draft()
        assert draft is not None
        torch._foreach_copy_(draft.gradients, values)
        number = self.stepper.ticket()
        self._table.publish(draft, say.Put(self.number, number))
        self._table.wait(number)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state as plain PyTorch gives it, of the newest version; with what the loop has changed since the last
        gradient."""
        whole: dict[str, Any] = self._session.insist(self._whole_state)
        groups = zip(whole.get("param_groups", ()), self._said(), self._options, strict=False)
        for group, said, sent in groups:
            group.update((key, said[key]) for key in said if said[key] != sent.get(key, _UNSAID))
        return whole

    def _whole_state(self) -> dict[str, Any]:
        number = self.stepper.ticket()
        self._session.port.post(say.AskState(self.number, number))
        parts: list[m.StatePart] = self._session.port.ask(m.AwaitState(self.number, number))
        if parts[0].whole is not None:
            return parts[0].whole
        return merge(self._table.layout, parts[0].options, [part.state for part in parts])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state of plain PyTorch's or of another run; every learner may call it."""
        whole: dict[str, Any] | None = None
        state: dict[int, dict[str, Any]] = {}
        if self._wraps or any(isinstance(key, str) for key in state_dict["state"]):
            whole, options = state_dict, state_dict.get("param_groups", [])
        else:
            options, state = split(self._table.layout, state_dict)
        groups = zip(self.param_groups, options, self._said(), self._loaded, strict=False)
        for group, option, before, loaded in groups:
            taken = {key: value for key, value in option.items() if key not in ("params", "param_names")}
            group.update(own_options(taken, group["params"]))
            loaded.update((key, (value, before.get(key, _UNSAID))) for key, value in taken.items())
        self._session.insist(lambda: self._load(options if whole is None else [], state, whole))

    def _load(
        self, options: Options, state: dict[int, dict[str, Any]], whole: dict[str, Any] | None = None
    ) -> None:
        self.drive(self.stepper.deliver())
        number = self.stepper.ticket()
        self._session.port.ask(m.LoadState(self.number, number, options, state, whole))
        self._session.port.post(say.Load(self.number, number))
        self._table.wait(number)

    def release(self) -> None:
        """Nothing is held after the learner's function."""
        self._table = None  # type: ignore[assignment]


def _step_of_its_kind(optimizer: SharedOptimizer, closure: Callable[[], Any] | None = None) -> Any:
    """Run the step of the optimizer's class. torch's wrapper calls the function it wraps, not the method that overrides it."""
    return optimizer._stepped(closure)


_hooked_step = torch.optim.Optimizer.profile_hook_step(_step_of_its_kind)
