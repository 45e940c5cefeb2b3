"""The parameter groups of a shard's optimizer: what learners say of them, and what its own steps make of them (M4, M5).

Learners send all options of their groups, but only what they changed since the last time is taken over: counters and the
like, which some optimizers keep in their groups, stay. The rate factor of the dial is in force in a step, and in no state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from syncline.table.template import Options, group_options


class Groups:
    """One optimizer's; `options` is how learners' groups were in the beginning."""

    def __init__(self, optimizer: torch.optim.Optimizer, options: Options) -> None:
        self._optimizer = optimizer
        self._told = [{key: _as_sent(value) for key, value in option.items()} for option in options]
        self._factor = 1.0
        self._rates: list[tuple[Any, Any]] = []  # of each group: as it is, and times the factor

    def follow(self, options: Options, factor: float) -> None:
        """Take over what learners changed, and have the rate times the factor in force."""
        self._unscale()
        for group, told, option in zip(self._optimizer.param_groups, self._told, options, strict=True):
            if told != option:
                for key, value in option.items():
                    if key not in told or told[key] != value:
                        told[key] = value
                        group[key] = _as_it_was(value, group.get(key))
        self._scale(factor)

    def _unscale(self) -> None:
        """A rate that the optimizer itself has changed meanwhile stays changed."""
        for group, (rate, scaled) in zip(self._optimizer.param_groups, self._rates, strict=False):
            group["lr"] = rate if group["lr"] == scaled else group["lr"] / self._factor
        self._rates = []

    def _scale(self, factor: float) -> None:
        self._factor = factor
        if factor != 1.0:
            for group in self._optimizer.param_groups:
                self._rates.append((group["lr"], group["lr"] * factor))
                group["lr"] = self._rates[-1][1]

    def values(self) -> Options:
        """As the optimizer has them, without the factor."""
        factor = self._factor
        self._unscale()
        try:
            return group_options(self._optimizer)
        finally:
            self._scale(factor)

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
        self._unscale()
        for group, option in zip(self._optimizer.param_groups, options, strict=True):
            group.update(option)
        self._scale(self._factor)


_UNSAID = object()


def _as_sent(value: Any) -> Any:
    """Options travel as JSON."""
    return list(value) if isinstance(value, tuple) else value


def _as_it_was(value: Any, before: Any) -> Any:
    return tuple(value) if isinstance(before, tuple) and isinstance(value, list) else value
