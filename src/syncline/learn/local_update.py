"""Parameters that are cut over a group's seats, updated where they are (M16): over servers with one group, and where the seats are the
processes of an all-reduce run, as torchrun starts them.

Each seat steps its slices with the user's own optimizer; gradients of what every seat holds go the usual way. Beside servers the
table gets values and state of the slices when a checkpoint follows, and at the end. Over all-reduce all seats are learner 0: the same
batches, seeds and steps; checkpoints, results and `opt.state_dict()` have the whole model's layout. Not responsible for when that is
right (`Plan.local` says it), nor for who speaks to the coordinator: the port of every seat but the first is mute.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from syncline import messages as m
from syncline.errors import LayoutError, UsageError
from syncline.learn.allreduce_optimizer import AllReduceOptimizer
from syncline.learn.allreduce_session import AllReduceSession
from syncline.learn.optimizer import SharedOptimizer
from syncline.parallel.module import Part, Partitioned
from syncline.ports import CollectivePort, Reset, TablePort
from syncline.roles.checkpoint_manifest import Restored
from syncline.roles.run_plan import Seat
from syncline.table.layout import Flat, Layout, Tensors
from syncline.table.optimizer_template import ELEMENTWISE, bare_step, beside, split

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
        self.untouched.look()
        if self._session.ending:
            raise self._session.unwind()
        own = [parameter for index, parameter in enumerate(self.parameters) if index in self._own]
        rest = [parameter for index, parameter in enumerate(self.parameters) if index not in self._own]
        self._session.committed = True  # slices and the rest make this step together, or neither
        try:
            with without_gradients(rest):
                self._step_own()
            self.untouched.note(self.stepper.steps)
            with without_gradients(own):
                if self.stepper.keep:
                    self.hand_over()
                return super()._stepped(again)
        except Reset:  # while it was handed over: this step is lost with the servers
            self._session.rejoin()
            return loss
        finally:
            self._session.committed = False

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

    def _numbers(self) -> list[tuple[int, int]]:
        """As the optimizer counts them, and as the table does."""
        entries = (index for group in self._table.layout.groups for index in group)
        return [(number, index) for number, index in enumerate(entries) if index in self._own]

    def state_dict(self) -> dict[str, Any]:
        if self._own:
            self._session.insist(self._hand_state)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self._own:
            self._session.insist(self._take_over)


class GroupOptimizer(AllReduceOptimizer):
    """Adds up gradients of what every seat holds, and steps the seat's slices with them."""

    def _to_reduce(self, model: nn.Module) -> list[int]:
        assert isinstance(model, Partitioned)
        self._model, self._rank = model, model.group.rank
        self._parts = parts_of(self.layout.parameters, model)
        return [index for index, part in enumerate(self._parts) if part.replicated]

    @torch.no_grad()
    def _clip(self, limit: float) -> None:
        """By the norm of the whole model's gradient: slices are added over the seats, copies counted once."""
        gradients = [parameter.grad for parameter in self.parameters]
        squares = torch.zeros(2, dtype=torch.float64, device=self._session.device)  # of copies, of slices
        for gradient, part in zip(gradients, self._parts, strict=True):
            if gradient is not None:
                squares[int(not part.replicated)] += gradient.double().square().sum()
        norm = (squares[0] + self._model.group.add(squares)[1]).sqrt()
        torch.nn.utils.clip_grads_with_norm_(self.parameters, limit, norm)

    def applications(self) -> Any:
        raise UsageError("applications in any order are not for seats of a group: use step()")

    # -- of the whole model ------------------------------------------------------------------------------

    def values(self) -> list[Tensor]:
        entries = self.layout.parameters.entries
        return [self._model.whole(entry.name, p) for entry, p in zip(entries, self.parameters, strict=True)]

    def buffers(self) -> list[Tensor]:
        entries = self.layout.buffers.entries
        return [
            self._model.whole(entry.name, b).cpu() for entry, b in zip(entries, self._buffers, strict=True)
        ]

    def others(self) -> list[Tensor]:
        entries = self.layout.others.entries
        return [
            self._model.whole(entry.name, each).cpu()
            for entry, each in zip(entries, self._others, strict=True)
        ]

    def own_buffers(self, buffers: list[Tensor]) -> list[Tensor]:
        parts = parts_of(self.layout.buffers, self._model)
        return [part.take(self._rank, buffer) for part, buffer in zip(parts, buffers, strict=True)]

    def own(self, index: int, value: Any) -> Any:
        return self._parts[index].own(self._rank, value)

    def states(self) -> dict[int, dict[str, Any]]:
        entries, states = self.layout.parameters.entries, super().states()
        cut = {index: entries[index].name for index, part in enumerate(self._parts) if not part.replicated}
        meet = partial(self._port.meet, "the optimizer's state of what is cut")
        return states | whole_states(self._model, cut, self.parameters, states, meet)

    def state_dict(self) -> dict[str, Any]:
        return {**self.inner.state_dict(), "state": self.states()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Of the whole model, the same in every seat."""
        state = {
            index: {key: self.own(index, value) for key, value in entry.items()}
            for index, entry in state_dict["state"].items()
        }
        super().load_state_dict({**state_dict, "state": state})


class GroupSession(AllReduceSession):
    """One seat's view of the run."""

    table = GroupOptimizer
    draws_as_one = False  # rank 0 evaluates in a thread of the same process, which may draw numbers too

    def __init__(self, port: CollectivePort, config: Seat, restored: Restored | None, seat: int) -> None:
        super().__init__(port, config, restored)
        self.seat, self.seats = seat, config.seats

    def _lay_out(self, model: nn.Module, inner: torch.optim.Optimizer) -> tuple[Layout, Tensors]:
        whole = as_partitioned(model, self.seats)
        local, tensors = super()._lay_out(model, inner)
        layout = whole_layout(local, whole.parts)
        cut = not all(part.replicated for part in parts_of(layout.parameters, whole))
        if cut and type(inner) not in ELEMENTWISE:
            raise LayoutError(
                f"{type(inner).__name__} may look at whole tensors, of which a seat has slices; use one of "
                f"{', '.join(kind.__name__ for kind in ELEMENTWISE)}, or plan='data'"
            )
        return layout, tensors

    def _alike(self, model: nn.Module, layout: Layout, tensors: Tensors) -> Sequence[Tensor]:
        assert isinstance(model, Partitioned)
        flats = (layout.parameters, layout.buffers, layout.others)
        parts = [part for flat in flats for part in parts_of(flat, model)]
        every = super()._alike(model, layout, tensors)
        return [tensor for part, tensor in zip(parts, every, strict=True) if part.replicated]


def parts_of(flat: Flat, model: Partitioned) -> list[Part]:
    return [model.parts[entry.name] for entry in flat.entries]


# -- a whole model, and its parts --------------------------------------------------------------------------


def as_partitioned(model: nn.Module, seats: int) -> Partitioned:
    if not isinstance(model, Partitioned):
        raise UsageError(
            f"session.optimizer in a group of {seats} seats takes a partitioned model: "
            f"sl.partition({type(model).__name__}(...), plan, example); got {type(model).__name__}"
        )
    return model


def whole_layout(layout: Layout, parts: dict[str, Part]) -> Layout:
    """Of a whole model, from that of its slices."""

    def whole(flat: Flat) -> Flat:
        if strange := [entry.name for entry in flat.entries if entry.name not in parts]:
            raise LayoutError(
                f"the optimizer holds a parameter ({strange[0]}) that is not the partitioned model's"
            )
        return Flat(tuple(replace(entry, shape=parts[entry.name].shape) for entry in flat.entries))

    return replace(
        layout,
        parameters=whole(layout.parameters),
        buffers=whole(layout.buffers),
        others=whole(layout.others),
    )


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
