"""What a checkpoint holds of one table of a learner among equals, and back: parameters, optimizer state, means in flight; and what its
loop has set in the optimizer's groups, apart from what the optimizer's own steps make of them.

Not responsible for counts and positions, which the optimizer and the loaders keep themselves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from syncline.roles.checkpoint_manifest import TableState
from syncline.table.checkpoints import CheckpointError, piece_tensors
from syncline.table.layout import Layout
from syncline.table.optimizer_template import Options, group_options, to_host
from syncline.table.parameter_groups import rated

Group = dict[str, Any]
_OTHER = object()  # what JSON does not have


def cut_table(
    inner: torch.optim.Optimizer, layout: Layout, values: Sequence[Tensor], states: Mapping[int, Group]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Copies by name, as a shard that owns the whole table would have them; and the state that is no tensor.

    State outside of `state` and `param_groups` would not be in a checkpoint, as wrappers of other optimizers have it: refused.
    """
    for name, value in vars(inner).items():
        held = value.values() if isinstance(value, dict) else value
        for each in held if isinstance(value, (dict, list, tuple)) else [value]:
            if isinstance(each, (Tensor, torch.optim.Optimizer)) and name not in ("state", "param_groups"):
                raise CheckpointError(
                    f"{type(inner).__name__} keeps a {type(each).__name__} in .{name}, which no checkpoint holds: only its "
                    ".state and .param_groups are kept"
                )
    part = layout.parts[0]
    by_piece = {
        (piece.entry, piece.start, piece.stop): {key: to_host(value) for key, value in state.items()}
        for piece in part.pieces
        if (state := states.get(piece.entry))
    }
    return piece_tensors(part, [to_host(value) for value in values], by_piece)


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
        own = {key: take(index, value) for key, value in states.get(index, {}).items()}
        for key, value in own.items():
            if isinstance(value, Tensor):  # copies, since learners of one process share nothing
                there = value.shape == parameter.shape or id(parameter) in whole
                own[key] = value.to(parameter.device, copy=True) if there else value.clone()
        if index in states:
            inner.state[parameter] = own


def plain_groups(groups: Sequence[Group]) -> list[Group]:
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


def as_in(group: Group, options: Group) -> Group:
    """Return options, which may come from JSON, as the kinds that the group has, and where it has its tensors."""
    found = {}
    for key, value in options.items():
        mine = group.get(key)
        if isinstance(mine, tuple) and isinstance(value, list):
            value = tuple(value)
        elif isinstance(mine, Tensor):
            value = value.to(mine.device) if isinstance(value, Tensor) else torch.full_like(mine, value)
        found[key] = value
    return found


class GroupChanges:
    """Of one optimizer, and of those that it holds: the factor is for their rates too."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        inner: Sequence[torch.optim.Optimizer] = (),
        made: Iterable[str] = (),
    ) -> None:
        self._optimizer, self._inner = optimizer, inner
        self._made = set(made)  # keys that the optimizer's own steps change: they are its state
        self._left = group_options(optimizer)  # by the last step
        self._wished = group_options(optimizer)

    def now(self) -> Options:
        """All options as the loop has set them."""
        for wished, left, option in zip(
            self._wished, self._left, group_options(self._optimizer), strict=True
        ):
            wished.update((key, value) for key, value in option.items() if value != left.get(key))
            left.update(option)
        return [dict(wished) for wished in self._wished]

    def own(self) -> Options:
        """What the optimizer's steps have made in its groups, for a checkpoint."""
        return [
            {key: group[key] for key in sorted(self._made) if key in group}
            for group in self._optimizer.param_groups
        ]

    @contextlib.contextmanager
    def as_of(self, options: Options, factor: float) -> Iterator[None]:
        """For a step: what the loop has changed since is as it was, and the rate times the factor."""
        now, swapped = self.now(), []
        for group, option, wished in zip(self._optimizer.param_groups, options or now, now, strict=True):
            used = as_in(group, {key: value for key, value in option.items() if value != wished.get(key)})
            swapped.append((group, {key: group.get(key) for key in used}, used))
            group.update(used)
        for group in rated(self._optimizer, self._inner) if factor != 1.0 else ():
            used = {"lr": group["lr"] * factor}
            swapped.append((group, {"lr": group["lr"]}, used))
            group.update(used)
        before = group_options(self._optimizer)
        try:
            yield
        finally:
            for given, left in zip(before, group_options(self._optimizer), strict=True):
                self._made.update(key for key, value in left.items() if value != given.get(key))
            for group, kept, used in reversed(swapped):
                group.update((key, kept[key]) for key in used if group[key] is used[key])
            self._left = group_options(self._optimizer)
