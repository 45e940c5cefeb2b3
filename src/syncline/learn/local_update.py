"""A seat's end of a table. With one group, parameters that are cut over its seats are updated where they are (M16).

Each seat steps its slices with the user's own optimizer, and publishes gradients of the others alone. The table gets values and
state of the slices when a checkpoint follows, and at the end. Not responsible for when that is right: `Plan.local` says it.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from syncline import messages as m
from syncline.learn.optimizer import SharedOptimizer
from syncline.parallel.module import Part, Partitioned
from syncline.ports import Reset, RunStopped, TablePort
from syncline.table.layout import Tensors
from syncline.table.optimizer_template import bare_step, merge, split

if TYPE_CHECKING:
    from syncline.learn.seats import SeatSession


class SeatOptimizer(SharedOptimizer):
    """Gradients of what every seat holds are added up before each step."""

    _session: SeatSession

    def __init__(
        self,
        session: SeatSession,
        number: int,
        inner: torch.optim.Optimizer,
        table: TablePort,
        tensors: Tensors,
        steps: int = 0,
        *,
        wraps: bool = False,
    ) -> None:
        super().__init__(session, number, inner, table, tensors, steps, wraps=wraps)
        self._inner, self._step_own = inner, bare_step(inner)  # with the same groups
        self._own: dict[int, Part] = {}  # entries that it updates itself

    def bind(self, model: Partitioned, *, local: bool) -> None:
        """The model is this one; `local`: what is cut is updated here."""
        self._model = model
        parts = [model.parts[entry.name] for entry in self._table.layout.parameters.entries]
        self._own = {index: part for index, part in enumerate(parts) if local and not part.replicated}
        if self._own:
            self._session.insist(self._take_over)

    def rejoin(self, table: TablePort) -> None:
        super().rejoin(table)
        if self._own:
            self._take_over()

    # -- the step ----------------------------------------------------------------------------------------

    def _stepped(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:  # here, so that its gradients are there to be added up
            with torch.enable_grad():
                loss = closure()
        self._session.settle()
        self._model.reduce_gradients()
        again = (lambda: loss) if closure is not None else None
        if not self._own:
            return super()._stepped(again)
        self._warn_of_writes()
        if self._session.ending:
            raise RunStopped
        self._session.committed = True  # slices and the rest make this step together, or neither
        try:
            return self._step_both(again, loss)
        finally:
            self._session.committed = False

    def _step_both(self, again: Callable[[], Any] | None, loss: Any) -> Any:
        own = [parameter for index, parameter in enumerate(self._parameters) if index in self._own]
        rest = [parameter for index, parameter in enumerate(self._parameters) if index not in self._own]
        gradients = without_gradients(rest)
        self._step_own()
        given_back(rest, gradients)
        self._replica.untouched.note(self.stepper.steps)
        gradients = without_gradients(own)
        try:
            if self.stepper.keeping:
                self.hand_over()
            return super()._stepped(again)
        except Reset:  # while it was handed over: this step is lost with the servers
            self._session.rejoin()
            return loss
        finally:
            given_back(own, gradients)

    # -- between the table and its own -------------------------------------------------------------------

    def hand_over(self) -> None:
        """The table's next version has this seat's slices too, and the optimizer's state of them."""
        if self._own:
            self._put([parameter.detach().clone() for parameter in self._parameters])
            self._hand_state()

    def _hand_state(self) -> None:
        """The first seat puts all seats' together; of what the others say to the servers nothing is heard."""
        mine = {index: self._inner.state.get(self._parameters[index], {}) for index in self._own}
        seats = [pickle.loads(each) for each in self._session.port.gather(pickle.dumps(mine))]
        whole = self._whole_state(self._state_parts())
        for number, index in self._numbers():
            if found := joined_state(self._own[index], [seat[index] for seat in seats]):
                whole["state"][number] = found
        self._load(*split(self._table.layout, whole))

    def _take_over(self) -> None:
        """Its slices of the optimizer's state, out of the table's; it has read the values."""
        whole = self._whole_state(self._state_parts())["state"]
        for number, index in self._numbers():
            parameter = self._parameters[index]
            self._inner.state.pop(parameter, None)
            if number in whole:
                found = {key: self._taken(index, value) for key, value in whole[number].items()}
                self._inner.state[parameter] = found
        self._session.port.tables[self.number].own = frozenset(self._own)

    def _whole_state(self, parts: list[m.StatePart]) -> dict[str, Any]:
        options = [dict(option) for option in parts[0].options]
        return merge(self._table.layout, options, [part.state for part in parts])

    def _numbers(self) -> list[tuple[int, int]]:
        """As the optimizer counts them, and as the table does."""
        entries = (index for group in self._table.layout.groups for index in group)
        return [(number, index) for number, index in enumerate(entries) if index in self._own]

    def _taken(self, index: int, value: Any) -> Any:
        part, parameter = self._own[index], self._parameters[index]
        if not isinstance(value, Tensor):
            return value
        if tuple(value.shape) != part.shape:
            return value.clone()
        return part.take(self._model.group.rank, value).to(parameter.device)

    # -- as users see it ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        if self._own:
            self._session.insist(self._hand_state)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self._own:
            self._session.insist(self._take_over)


def joined_state(part: Part, seats: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """An optimizer's state of a whole parameter, from that of every seat's slice; who holds nothing of it has none."""
    found: dict[str, Any] = {}
    for rank, state in enumerate(seats):
        holds = math.prod(part.local_shape(rank)) > 0
        for key, value in state.items() if holds else ():
            if not isinstance(value, Tensor) or tuple(value.shape) != part.local_shape(rank):
                found.setdefault(key, value)
            else:
                whole = found.setdefault(key, torch.zeros(part.shape, dtype=value.dtype))
                part.put(rank, whole, value.cpu())
    return found


def without_gradients(parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """They have none any more; those that they had."""
    found = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return found


def given_back(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
