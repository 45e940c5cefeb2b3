"""What a checkpoint holds of one table of a learner among equals, and back: parameters, optimizer state, means in flight.

Not responsible for counts and positions, which the optimizer and the loaders keep themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from syncline.learn.allreduce_reducer import Reducer, Round
from syncline.roles.checkpoint_manifest import TableState
from syncline.roles.pipeline_states import MeanInFlight
from syncline.table.checkpoints import CheckpointError, piece_tensors
from syncline.table.layout import Layout
from syncline.table.optimizer_template import beside, to_host

Options = dict[str, Any]
_OTHER = object()  # what JSON does not have


def cut_table(
    layout: Layout, values: Sequence[Tensor], states: Mapping[int, dict[str, Any]]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Copies by name, as a shard that owns the whole table would have them; and the state that is no tensor."""
    part = layout.parts[0]
    by_piece = {
        (piece.entry, piece.start, piece.stop): {key: to_host(value) for key, value in state.items()}
        for piece in part.pieces
        if (state := states.get(piece.entry))
    }
    return piece_tensors(part, [to_host(value) for value in values], by_piece)


def refuse_hidden(inner: torch.optim.Optimizer) -> None:
    """State outside of `state` and `param_groups` would not be in a checkpoint: as wrappers of other optimizers have it."""
    for name, value in vars(inner).items():
        if name in ("state", "param_groups"):
            continue
        held = (
            value.values()
            if isinstance(value, dict)
            else value
            if isinstance(value, (list, tuple))
            else [value]
        )
        for each in held:
            if isinstance(each, (Tensor, torch.optim.Optimizer)):
                raise CheckpointError(
                    f"{type(inner).__name__} keeps a {type(each).__name__} in .{name}, which no checkpoint holds: only its "
                    ".state and .param_groups are kept"
                )


@torch.no_grad()
def load_table(
    inner: torch.optim.Optimizer,
    parameters: Sequence[nn.Parameter],
    kept: TableState,
    take: Callable[[int, Any], Any],
) -> None:
    """The inverse; of a whole tensor by its index, `take` gives what this process holds."""
    inner.state.clear()
    whole = {  # whose counts of steps lie on the device, too
        id(parameter)
        for group in inner.param_groups
        if group.get("fused") or group.get("capturable")
        for parameter in group["params"]
    }
    found, states = kept.content, kept.content.state or {}
    for index, parameter in enumerate(parameters):
        parameter.copy_(take(index, found.values[index]))
        if index in states:
            own = {key: take(index, value) for key, value in states[index].items()}
            state = beside(parameter, _copied(own))
            inner.state[parameter] = _moved(state, parameter.device) if id(parameter) in whole else state


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """Learners of one process share nothing."""
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}


def _moved(state: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in state.items()}


def flight_of(reducer: Reducer, current: Round) -> MeanInFlight:
    """A mean that is on its way, as far as all learners have it alike."""
    gradients = reducer.sums(current)
    return MeanInFlight(
        iteration=current.iteration,
        stamp=current.stamp,
        epochs=list(current.epochs),
        options=plain_groups(current.options),
        header=list(current.header),
        factor=reducer.factor(current),
        gradients=gradients,
    )


def plain_groups(groups: Sequence[Options]) -> list[Options]:
    """Options for JSON, tensors as numbers; without what is neither number nor text."""
    plain = [{key: _plain(value) for key, value in group.items()} for group in groups]
    return [{key: value for key, value in group.items() if value is not _OTHER} for group in plain]


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (list, tuple)):
        found = [_plain(each) for each in value]
        return _OTHER if any(each is _OTHER for each in found) else found
    return value if value is None or isinstance(value, bool | int | float | str) else _OTHER


def as_in(group: Options, options: Options) -> Options:
    """Options after a trip through JSON, of the kinds that the group has."""
    return {key: _like(group.get(key), value) for key, value in options.items()}


def _like(mine: Any, value: Any) -> Any:
    if isinstance(mine, tuple) and isinstance(value, list):
        return tuple(value)
    if isinstance(mine, Tensor) and not isinstance(value, Tensor):
        return torch.full_like(mine, value)
    return value
