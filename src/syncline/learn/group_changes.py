"""What a learner's loop has set in its optimizer's groups, apart from what the optimizer's own steps make of them.

For all-reduce, where an average is applied with the options that its gradient had, and a rate times a factor (M4): counters and
the like, which some optimizers keep in their groups, go on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch

from syncline.table.optimizer_template import Options, group_options
from syncline.table.parameter_groups import rated


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
            used = {key: value for key, value in option.items() if value != wished.get(key)}
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
