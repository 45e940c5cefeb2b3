"""A learner's own memory of one table: its parameters and gradients, and how they get into drafts and from versions.

Not responsible for when.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, SupportsFloat

import torch
from torch import Tensor

from syncline.errors import LayoutError
from syncline.learn.session import UNSAID
from syncline.learn.stepper import Replica
from syncline.learn.usage_warnings import Untouched
from syncline.messages.to_leader import Gradient
from syncline.ports import Draft, Reading, TablePort
from syncline.table.layout import Tensors

if TYPE_CHECKING:
    from syncline.learn.optimizer import SharedOptimizer
    from syncline.learn.server_session import ServerSession


class ModelReplica(Replica):
    """The tensors of a model, on any device."""

    def __init__(
        self, session: ServerSession, optimizer: SharedOptimizer, table: TablePort, tensors: Tensors
    ) -> None:
        self.table = table
        self._session, self._optimizer = session, optimizer
        self._parameters, self._buffers = tensors.parameters, tensors.buffers
        self._on_gpu = any(parameter.is_cuda for parameter in self._parameters)
        self._moved = False  # since the last read, by itself
        self._present: list[bool] = []  # in the sum
        self._options = b""
        self.untouched = Untouched(
            self._parameters, [entry.name for entry in table.layout.parameters.entries]
        )

    @torch.no_grad()
    def restore_buffers(self, buffers: Sequence[Tensor]) -> None:
        for mine, kept in zip(self._buffers, buffers, strict=True):
            mine.copy_(kept)

    # -- a gradient --------------------------------------------------------------------------------------

    def fill(self, draft: Draft) -> list[bool]:
        into, gradients = draft.gradients, [parameter.grad for parameter in self._parameters]
        if all(gradient is not None for gradient in gradients):
            self._copy(into, gradients)  # type: ignore[arg-type]
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

    def add(self, draft: Draft, *, first: bool) -> None:
        if first:
            self._present = [False] * len(self._parameters)
        fresh: list[tuple[Tensor, Tensor]] = []
        more: list[tuple[Tensor, Tensor]] = []
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is not None:
                pair = (draft.gradients[index], parameter.grad.detach())
                (more if self._present[index] else fresh).append(pair)
                self._present[index] = True
        if fresh:
            self._copy([a for a, _ in fresh], [b for _, b in fresh])
        if more:
            torch._foreach_add_([a for a, _ in more], [b.to(a.device) for a, b in more])

    def added(self) -> list[bool]:
        return [] if all(self._present) else self._present

    @torch.no_grad()
    def move(self, rate: float) -> None:
        moving = [parameter for parameter in self._parameters if parameter.grad is not None]
        gradients = [parameter.grad for parameter in moving]
        if moving:
            torch._foreach_add_(moving, gradients, alpha=-rate)  # type: ignore[arg-type]
            self._moved = True

    # -- what goes with it -------------------------------------------------------------------------------

    def seal(self, draft: Draft) -> int:
        if self._buffers:
            torch._foreach_copy_(draft.buffers, self._buffers)
        serial, self._options = self._optimizer.look_at_options()
        if self._on_gpu and not any(gradient.is_cuda for gradient in draft.gradients[:1]):
            torch.cuda.current_stream().synchronize()
        return serial

    def usage(self) -> tuple[int, int, int]:
        return self._session.take_usage()

    def loss(self, said: Any) -> SupportsFloat:
        """The closure's, or what the loop says; on a card nobody waits for it here."""
        session, steps = self._session, self._optimizer.stepper.steps
        found, session.loss = session.loss if said is None else said, UNSAID
        if isinstance(found, Tensor) and found.is_cuda:
            session.watch.loss_on_card(found, steps, session.epoch)
            return found.detach()
        value = found.item() if isinstance(found, Tensor) else float(found)
        if found is not UNSAID:
            session.watch.loss(value, steps, session.epoch)
        return value

    def states(self, *, keep: bool) -> bytes:
        self._session.mark_random()
        return self._session.random_states() if keep else b""

    def publish(self, draft: Draft, gradient: Gradient, present: list[bool]) -> None:
        self.table.publish(draft, gradient, self._options, present)

    # -- reading -----------------------------------------------------------------------------------------

    def read(self, reading: Reading, *, known: bool) -> int | None:
        stepper = self._optimizer.stepper
        self._session.sync = stepper.sync
        if known and not self._moved:  # R4: no weights move that are here already
            self.table.read(reading, [])
            version: int | None = stepper.version
        else:
            version = self.table.read(reading, [parameter.data for parameter in self._parameters])
        if version is not None:
            self._moved = False
            self.untouched.note(stepper.steps)
        return version

    @torch.no_grad()
    def flow(self) -> int:
        stepper = self._optimizer.stepper
        version = self.table.read(None, list(self._parameters))
        if version is None:
            return stepper.version
        self.untouched.note(stepper.steps)
        return version

    def overtaken(self) -> bool:
        return self.table.overtaken

    def several(self) -> bool:
        return self._session.several

    def begun(self) -> bool:
        return bool(self._session.examples)

    def awaits(self, number: int) -> None:
        self._session.awaits(self._optimizer.number, number)


def refuse_sparse_gradients(gradients: Iterable[Tensor]) -> None:
    for gradient in gradients:
        if gradient.is_sparse:
            raise LayoutError(
                "a parameter has a sparse gradient, which does not travel; make its layer with sparse=False"
            )
