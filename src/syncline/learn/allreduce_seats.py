"""One group alone, whose seats are the processes of an all-reduce run (M16): as torchrun starts them.

All seats are learner 0: the same batches, seeds and steps. Gradients of what every seat holds are added up, each seat updates
its slices by itself. Checkpoints, results and `opt.state_dict()` have the whole model's layout. Not responsible for who speaks to
the coordinator: the port of every seat but the first is mute.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from syncline.errors import LayoutError, UsageError
from syncline.learn.allreduce_optimizer import AllReduceOptimizer
from syncline.learn.allreduce_session import AllReduceSession
from syncline.learn.local_update import whole_states
from syncline.learn.seats import check_partitioned, whole_layout
from syncline.learn.session import Factory
from syncline.parallel.module import Part, Partitioned
from syncline.ports import CollectivePort
from syncline.roles.checkpoint_manifest import Restored
from syncline.roles.run_plan import Seat
from syncline.table.layout import Flat, Layout, Tensors
from syncline.table.optimizer_template import ELEMENTWISE


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

    def _names(self, flat: Flat) -> list[str]:
        return [entry.name for entry in flat.entries]

    def values(self) -> list[Tensor]:
        names = self._names(self.layout.parameters)
        return [self._model.whole(name, p) for name, p in zip(names, self.parameters, strict=True)]

    def buffers(self) -> list[Tensor]:
        names = self._names(self.layout.buffers)
        return [self._model.whole(name, b).cpu() for name, b in zip(names, self._buffers, strict=True)]

    def own_buffers(self, buffers: list[Tensor]) -> list[Tensor]:
        parts = parts_of(self.layout.buffers, self._model)
        return [part.take(self._rank, buffer) for part, buffer in zip(parts, buffers, strict=True)]

    def own(self, index: int, value: Any) -> Any:
        return self._parts[index].own(self._rank, value)

    def states(self) -> dict[int, dict[str, Any]]:
        names, states = self._names(self.layout.parameters), super().states()
        cut = {index: names[index] for index, part in enumerate(self._parts) if not part.replicated}
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

    def __init__(self, port: CollectivePort, config: Seat, restored: Restored | None, seat: int) -> None:
        super().__init__(port, config, restored)
        self.seat, self.seats = seat, config.seats

    def optimizer(self, model: nn.Module, factory: Factory) -> AllReduceOptimizer:
        """The table has the whole model's layout."""
        check_partitioned(model, self.seats)
        return super().optimizer(model, factory)

    def _lay_out(self, model: nn.Module, inner: torch.optim.Optimizer) -> tuple[Layout, Tensors]:
        assert isinstance(model, Partitioned)
        local, tensors = super()._lay_out(model, inner)
        layout = whole_layout(local, model.parts)
        cut = not all(part.replicated for part in parts_of(layout.parameters, model))
        if cut and type(inner) not in ELEMENTWISE:
            raise LayoutError(
                f"{type(inner).__name__} may look at whole tensors, of which a seat has slices; use one of "
                f"{', '.join(kind.__name__ for kind in ELEMENTWISE)}, or plan='data'"
            )
        return layout, tensors

    def _alike(self, model: nn.Module, layout: Layout, tensors: Tensors) -> Sequence[Tensor]:
        assert isinstance(model, Partitioned)
        kinds = (
            (layout.parameters, tensors.parameters),
            (layout.buffers, tensors.buffers),
            (layout.others, tensors.others),
        )
        return [
            tensor
            for flat, found in kinds
            for part, tensor in zip(parts_of(flat, model), found, strict=True)
            if part.replicated
        ]


def parts_of(flat: Flat, model: Partitioned) -> list[Part]:
    return [model.parts[entry.name] for entry in flat.entries]
