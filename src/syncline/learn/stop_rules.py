"""When a run is good enough: at a loss, after epochs without a better one, or at a norm of the gradient (S1, S8).

A callback of epoch records, and a metric that they need. Not responsible for ending anything: a callback that returns True is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from syncline.dial import nearest
from syncline.errors import UsageError
from syncline.learn.batches import to_device
from syncline.learn.model_factories import CPU, copied
from syncline.learn.training import Counted, Evaluation, Training

NORM = "gradient_norm"
RULES = ("loss", "plateau", NORM, "metric")
EXAMPLES = 4096  # of which the gradient's norm is taken


class Stop:
    """Whether an epoch's record is the last: `loss` at most, `plateau` epochs without a better one, `gradient_norm` at most.

    `metric` is what plateau looks at: "test loss" where there is an evaluation, else "loss", or a metric by name; accuracy is
    better when higher.
    """

    def __init__(
        self,
        *,
        loss: float | None = None,
        plateau: int | None = None,
        gradient_norm: float | None = None,
        metric: str | None = None,
    ) -> None:
        self.loss, self.plateau, self.gradient_norm, self.metric = loss, plateau, gradient_norm, metric
        self._best, self._since = math.inf, 0

    def __call__(self, record: Any) -> bool:
        below = self.loss is not None and record.loss <= self.loss
        flat = self.gradient_norm is not None and record.metrics.get(NORM, math.inf) <= self.gradient_norm
        return below or flat or self._stands(record)

    def _stands(self, record: Any) -> bool:
        if self.plateau is None:
            return False
        value = self._value(record)
        better = value < self._best
        self._best, self._since = min(value, self._best), 0 if better else self._since + 1
        return self._since >= self.plateau

    def _value(self, record: Any) -> float:
        if self.metric is None:
            return float(record.metrics.get("loss", record.loss))
        if self.metric not in record.metrics:
            there = ", ".join(record.metrics) or "none"
            raise UsageError(f"stop: no metric is called {self.metric!r}; there are: {there}")
        value = float(record.metrics[self.metric])
        return -value if self.metric == "accuracy" else value


def read_stop(given: Any) -> Stop | None:
    """A table of RULES, a Stop, or None; raises UsageError."""
    if given is None or isinstance(given, Stop):
        return given
    if not isinstance(given, Mapping) or not set(given) - {"metric"}:
        raise UsageError(
            f"stop takes a table with loss, plateau or {NORM}, as {{'plateau': 5}}, got {given!r}"
        )
    for name, value in given.items():
        if name not in RULES:
            raise UsageError(
                f"stop: unknown rule {name!r}{nearest(str(name), RULES)}; there are: {', '.join(RULES)}"
            )
        if not _fits(name, value):
            raise UsageError(f"stop: {name} must be {WANTED[name]}, got {value!r}")
    return Stop(**given)


WANTED = {
    "loss": "a finite number",
    "plateau": "a whole number of epochs, at least 1",
    NORM: "a finite number above 0",
    "metric": "the name of a metric",
}


def _fits(name: str, value: Any) -> bool:
    if name == "metric":
        return isinstance(value, str) and bool(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return False
    return name == "loss" or (value > 0 if name == NORM else isinstance(value, int) and value >= 1)


class GradientNorm:
    """An evaluation that also tells the norm of the mean gradient over examples of the training data, evenly spread."""

    def __init__(
        self,
        inner: Evaluation | None,
        plan: Training,
        device: torch.device = CPU,
    ) -> None:
        self._inner, self._plan, self._device = inner, plan, device
        self._made: nn.Module | None = None

    def on(self, device: torch.device) -> GradientNorm:
        """The same on another device."""
        inner = self._inner.on(device) if self._inner is not None else None
        return GradientNorm(inner, self._plan, device)

    def __call__(self, state: dict[str, Tensor]) -> dict[str, float]:
        metrics = self._inner(state) if self._inner is not None else {}
        if self._made is None:  # in the process that evaluates
            model = self._plan.model
            self._made = (copied(model) if isinstance(model, nn.Module) else model()).to(self._device)
            self._plan.way.prepare(self._made, self._plan.batch_size)
        self._made.load_state_dict(state, strict=False)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return {**metrics, NORM: self._norm(copied(self._made))}

    def _norm(self, model: nn.Module) -> float:
        plan = self._plan
        size = len(plan.data)  # type: ignore[arg-type]
        chosen = Subset(plan.data, range(0, size, -(-size // EXAMPLES)))
        totals = [torch.zeros_like(parameter) for parameter in model.parameters()]
        batches = DataLoader(chosen, batch_size=plan.batch_size, collate_fn=Counted(plan.collate))
        for examples, batch in batches:
            model.zero_grad()
            plan.way(model, to_device(batch, self._device))
            for total, parameter in zip(totals, model.parameters(), strict=True):
                if parameter.grad is not None:
                    total.add_(parameter.grad, alpha=examples / len(chosen))
        return math.sqrt(sum(float(total.square().sum()) for total in totals))


def with_norm(
    inner: Evaluation | None, stop: Stop | None, plan: Training
) -> Evaluation | GradientNorm | None:
    """The evaluation, with the norm where a run stops at one."""
    return inner if stop is None or stop.gradient_norm is None else GradientNorm(inner, plan)


def refuse_streams(stop: Stop | None, data: Dataset[Any]) -> None:
    if stop is not None and stop.gradient_norm is not None and isinstance(data, IterableDataset):
        raise UsageError(
            f"stop: {NORM} needs data with a length, of which it takes examples; streams have none"
        )
