"""The parameter groups of a shard's optimizer: what learners say of them, and what its own steps make of them (M4, M5).

Learners send all options of their groups, but only what they changed since the last time is taken over: counters and the
like, which some optimizers keep in their groups, stay. The rate factor of the dial is in force in a step, and in no state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from syncline.table.optimizer_template import Options, group_options, own_options


class Groups:
    """One optimizer's; `options` is how learners' groups were in the beginning."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, options: Options, inner: Sequence[torch.optim.Optimizer] = ()
    ) -> None:
        self._optimizer = optimizer
        self._inner = inner  # those that it holds: the factor is for their rates too
        self._told = [{key: _as_sent(value) for key, value in option.items()} for option in options]
        self._factor = 1.0
        # of each group: as it is, and times the factor
        self._rates: list[tuple[dict[str, Any], Any, Any]] = []

    def follow(self, options: Options, factor: float) -> None:
        """Take over what learners changed, and have the rate times the factor in force."""
        self._unscale()
        for group, told, option in zip(self._optimizer.param_groups, self._told, options, strict=True):
            if told != option:
                for key, value in option.items():
                    if key not in told or told[key] != value:
                        told[key] = value
                        tuples = isinstance(group.get(key), tuple) and isinstance(value, list)
                        changed = {
                            "capturable": group.get("capturable"),
                            key: tuple(value) if tuples else value,
                        }
                        group[key] = own_options(changed, group["params"])[key]
        self._scale(factor)

    def _unscale(self) -> None:
        """A rate that the optimizer itself has changed meanwhile stays changed."""
        for group, rate, scaled in self._rates:
            group["lr"] = rate if group["lr"] == scaled else group["lr"] / self._factor
        self._rates = []

    def _scale(self, factor: float) -> None:
        self._factor = factor
        if factor != 1.0:
            for group in rated(self._optimizer, self._inner):
                self._rates.append((group, group["lr"], group["lr"] * factor))
                group["lr"] = self._rates[-1][2]

    @contextlib.contextmanager
    def unscaled(self) -> Iterator[None]:
        """The rates as they are without the factor, for whoever looks at the optimizer's state or changes it."""
        self._unscale()
        try:
            yield
        finally:
            self._scale(self._factor)

    def values(self) -> Options:
        """As the optimizer has them, without the factor."""
        with self.unscaled():
            return group_options(self._optimizer)

    def own(self) -> Options:
        """Those that no learner has said: what the optimizer has changed, or a loaded state."""
        return [
            {
                key: sent
                for key, value in option.items()
                if (sent := _as_sent(value)) != told.get(key, _UNSAID)
            }
            for option, told in zip(self.values(), self._told, strict=True)
        ]

    def load(self, options: Sequence[dict[str, Any]]) -> None:
        """Of another state; what learners have said is still what they say."""
        with self.unscaled():
            for group, option in zip(self._optimizer.param_groups, options, strict=True):
                group.update(own_options(option, group["params"]))


def rated(
    optimizer: torch.optim.Optimizer, inner: Sequence[torch.optim.Optimizer] = ()
) -> list[dict[str, Any]]:
    """Its groups, and those of the optimizers that it holds, once each."""
    groups = {id(group): group for group in optimizer.param_groups}
    groups |= {id(group): group for each in inner for group in each.param_groups if "lr" in group}
    return list(groups.values())


_UNSAID = object()


def _as_sent(value: Any) -> Any:
    """Options travel as JSON."""
    return list(value) if isinstance(value, tuple) else value
