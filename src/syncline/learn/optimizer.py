"""The optimizer that users step: publishes the gradient, waits as the dial says, reads one version (M1, M2).

It looks like the optimizer the user's factory made (groups, options, schedulers, `state_dict`); the real one
runs on the shards. Parameters change only inside `step`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from syncline.errors import LayoutError, UsageError
from syncline.ports import Kind, Note, RunStopped, TableLink
from syncline.table.layout import Tensors
from syncline.table.template import group_options, merge, split
from syncline.topology import messages as m

if TYPE_CHECKING:
    from syncline.learn.session import Session


class SharedOptimizer(torch.optim.Optimizer):
    """A table's end in a learner; made by `session.optimizer`."""

    def __init__(
        self, session: Session, number: int, inner: torch.optim.Optimizer, link: TableLink, tensors: Tensors
    ) -> None:
        self.kind = type(inner)
        super().__init__(inner.param_groups, dict(inner.defaults))
        self.number, self.version = number, -1
        self._session, self._link = session, link
        self._parameters, self._buffers = tensors.parameters, tensors.buffers
        self._tickets = 0
        self._steps = 0
        self._serial = 0
        self._options: list[dict[str, Any]] = []
        self._seen: list[tuple[Any, ...]] = []
        self._tensor_options = False
        self._written = [-1] * len(link.slots)  # serial of the options in each slot
        self._on_gpu = any(parameter.is_cuda for parameter in self._parameters)
        if self._on_gpu:
            session.port.pin(link)
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
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        session = self._session
        if session.ending:
            raise RunStopped
        number = self._publish(loss)
        self.read(number)
        return loss

    def _publish(self, loss: Any) -> int:
        session = self._session
        index = self._steps % len(self._link.slots)
        slot = self._link.slots[index]
        full = self._fill(slot.gradients, slot.mask)
        if self._buffers:
            torch._foreach_copy_(slot.buffers, self._buffers)
        self._write_options(index)
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()
        number = self.ticket()
        count, loader, upto = session.take_usage()
        session.port.spend(count)
        value = loss.item() if isinstance(loss, Tensor) else float(loss) if loss is not None else session.loss
        note = Note(
            Kind.GRADIENT,
            self.number,
            number,
            self.version,
            self._steps,
            count,
            index,
            self._serial,
            full,
            loader,
            upto,
            value,
        )
        session.loss = float("nan")
        self._steps += 1
        session.port.post(note)
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
        for gradient in gradients:
            if gradient.is_sparse:
                raise LayoutError(
                    "a parameter has a sparse gradient, which does not travel; make its layer with sparse=False"
                )
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
        options = group_options(self)
        if options != self._options:
            self._options = options
            self._serial += 1

    def read(self, number: int) -> None:
        """Wait until this ticket is released, then take over the version it names."""
        version = self._link.wait(number)
        if version != self.version:  # R4: no weights move when they are here already
            weights = self._link.weights(version)
            targets = [parameter.data for parameter in self._parameters]
            torch._foreach_copy_(targets, weights, non_blocking=self._on_gpu)
            if self._on_gpu:
                torch.cuda.current_stream().synchronize()
            self.version = version

    # -- writes and states -------------------------------------------------------------------------------

    def holds(self, parameters: set[int]) -> bool:
        return any(id(parameter) in parameters for parameter in self._parameters)

    @torch.no_grad()
    def put(self) -> None:
        """This learner's present values become global with the next update."""
        index = self._steps % len(self._link.slots)
        torch._foreach_copy_(
            self._link.slots[index].gradients, [parameter.data for parameter in self._parameters]
        )
        number = self.ticket()
        self._session.port.post(Note(Kind.PUT, self.number, number, slot=index))
        self._link.wait(number)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state as plain PyTorch gives it, of the newest version."""
        number = self.ticket()
        self._session.port.post(Note(Kind.STATE, self.number, number))
        parts: list[m.StatePart] = self._session.port.request(m.AwaitState(self.number, number))
        return merge(self._link.layout, group_options(self), [part.state for part in parts])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state of plain PyTorch's or of another run; every learner may call it."""
        options, state = split(self._link.layout, state_dict)
        for group, option in zip(self.param_groups, options, strict=True):
            group.update(option)
        number = self.ticket()
        self._session.port.request(m.LoadState(self.number, number, options, state))
        self._session.port.post(Note(Kind.LOAD, self.number, number))
        self._link.wait(number)

    def release_hooks(self) -> None:
        """Nothing is held after the learner's function."""
        self._link = None  # type: ignore[assignment]
