"""A seat's end of a table. With one group, parameters that are cut over its seats are updated where they are (M16).

Each seat steps its slices with the user's own optimizer, and publishes gradients of the others alone. The table gets values and
state of the slices when a checkpoint follows, and at the end. Not responsible for when that is right: `Plan.local` says it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from syncline import messages as m
from syncline.learn.optimizer import SharedOptimizer
from syncline.parallel.module import Part, Partitioned
from syncline.ports import Reset, RunStopped, TablePort
from syncline.table.optimizer_template import bare_step, beside, merge, split

if TYPE_CHECKING:
    from syncline.learn.seats import SeatSession


class SeatOptimizer(SharedOptimizer):
    """Gradients of what every seat holds are added up before each step."""

    _session: SeatSession

    def __init__(
        self, session: SeatSession, number: int, inner: torch.optim.Optimizer, *given: Any, **options: Any
    ) -> None:
        super().__init__(session, number, inner, *given, **options)
        self._inner, self._step_own = inner, bare_step(inner)  # with the same groups
        self._own: dict[int, Part] = {}  # entries that it updates itself

    def bind(self, model: Partitioned, *, local: bool) -> None:
        """The model is this one; `local`: what is cut is updated here."""
        self._model = model
        parts = [model.parts[entry.name] for entry in self._table.layout.parameters.entries]
        self._own = {index: part for index, part in enumerate(parts) if local and not part.replicated}
        if self._own:
            self._session.insist(self._take_over)

    def rejoin(self, table: TablePort, personal: m.Personal | None) -> None:
        super().rejoin(table, personal)
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
        self._look_for_writes()
        if self._session.ending:
            raise RunStopped
        self._session.committed = True  # slices and the rest make this step together, or neither
        try:
            return self._step_both(again, loss)
        finally:
            self._session.committed = False

    def _step_both(self, again: Callable[[], Any] | None, loss: Any) -> Any:
        own = [parameter for index, parameter in enumerate(self.parameters) if index in self._own]
        rest = [parameter for index, parameter in enumerate(self.parameters) if index not in self._own]
        with without_gradients(rest):
            self._step_own()
        self.untouched.note(self.stepper.steps)
        with without_gradients(own):
            try:
                if self.stepper.keep:
                    self.hand_over()
                return super()._stepped(again)
            except Reset:  # while it was handed over: this step is lost with the servers
                self._session.rejoin()
                return loss

    # -- between the table and its own -------------------------------------------------------------------

    def hand_over(self) -> None:
        """The table's next version has this seat's slices too, and the optimizer's state of them."""
        if self._own:
            self._put([parameter.detach().clone() for parameter in self.parameters])
            self._hand_state()

    def _hand_state(self) -> None:
        """Of what other seats than the first say to the servers nothing is heard."""
        names = {index: self._table.layout.parameters.entries[index].name for index in self._own}
        states = {index: self._inner.state.get(self.parameters[index], {}) for index in self._own}
        found = whole_states(self._model, names, self.parameters, states, self._session.port.agree)
        whole = self._whole_state()
        for number, index in self._numbers():
            if index in found:
                whole["state"][number] = found[index]
        self._load(*split(self._table.layout, whole))

    def _take_over(self) -> None:
        """Its slices of the optimizer's state, out of the table's; it has read the values."""
        whole = self._whole_state()["state"]
        for number, index in self._numbers():
            parameter = self.parameters[index]
            self._inner.state.pop(parameter, None)
            if number in whole:
                part, rank = self._own[index], self._model.group.rank
                found = {key: part.own(rank, value) for key, value in whole[number].items()}
                self._inner.state[parameter] = beside(parameter, found)
        self._session.port.tables[self.number].own = frozenset(self._own)

    def _whole_state(self) -> dict[str, Any]:
        parts = self._state_parts()
        options = [dict(option) for option in parts[0].options]
        return merge(self._table.layout, options, [part.state for part in parts])

    def _numbers(self) -> list[tuple[int, int]]:
        """As the optimizer counts them, and as the table does."""
        entries = (index for group in self._table.layout.groups for index in group)
        return [(number, index) for number, index in enumerate(entries) if index in self._own]

    # -- as users see it ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        if self._own:
            self._session.insist(self._hand_state)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self._own:
            self._session.insist(self._take_over)


def whole_states(
    model: Partitioned,
    names: Mapping[int, str],
    parameters: Sequence[Tensor],
    states: Mapping[int, dict[str, Any]],
    meet: Callable[[Any], list[Any]],
) -> dict[int, dict[str, Any]]:
    """An optimizer's states of whole parameters, those of `names`, from every seat's slices; all seats call it.

    First each says what it has, of a slice its dtype: who holds nothing of a parameter may have no state of it.
    """

    def as_said(value: Any, parameter: Tensor) -> Any:
        return value.dtype if isinstance(value, Tensor) and value.shape == parameter.shape else value

    everybody = meet(
        {
            index: {key: as_said(value, parameters[index]) for key, value in state.items()}
            for index in names
            if (state := states.get(index))
        }
    )
    found: dict[int, dict[str, Any]] = {}
    for index, name in names.items():
        shape = model.parts[name].local_shape
        holds = (seat for rank, seat in enumerate(everybody) if index in seat and 0 not in shape(rank))
        for key, value in next(holds, {index: {}})[index].items():
            if isinstance(value, torch.dtype):
                own = states.get(index, {}).get(key)
                own = torch.zeros_like(parameters[index], dtype=value) if own is None else own
                value = model.whole(name, own)
            found.setdefault(index, {})[key] = value
    return found


@contextlib.contextmanager
def without_gradients(parameters: Sequence[Tensor]) -> Iterator[None]:
    """They have none meanwhile."""
    found = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = gradient
