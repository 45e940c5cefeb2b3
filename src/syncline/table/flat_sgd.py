"""SGD over whole segments: three operations for a table of any number of parameters and groups.

For tables on a GPU, where the plain optimizer's many small operations cost more than the gradient. The optimizer's own state is
kept as views, so it can be saved, loaded and stepped plainly at any time. Equal to the plain step to
rounding; not responsible for any other optimizer, nor for gradients that lack a parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from syncline.table.layout import Part

SAME = ("momentum", "dampening", "nesterov", "maximize")  # must be so in all groups
COUNT = ("lr", "weight_decay", *SAME)
PLANS_KEPT = 64  # for rates that change with each fold


@dataclass(frozen=True)
class _Rates:
    """A number for all parameters, or one for each element of each segment."""

    scale: float
    each: list[Tensor] | None


@dataclass(frozen=True, eq=False)
class StepPlan:
    """A step with given options; the same object for as long as they and the momentum's memory are the same."""

    fits: bool
    rates: _Rates
    decays: _Rates
    momentum: float
    dampening: float
    nesterov: bool
    maximize: bool


class FlatSGD:
    """Steps an `SGD` whose parameters are views of `weights`."""

    def __init__(self, optimizer: torch.optim.Optimizer, part: Part, weights: Sequence[Tensor]) -> None:
        self._optimizer, self._part, self.weights = optimizer, part, list(weights)
        self._group: dict[int, int] = {}  # id of a parameter -> its group
        for number, group in enumerate(optimizer.param_groups):
            self._group.update((id(parameter), number) for parameter in group["params"])
        self._plans: dict[tuple[Any, ...], StepPlan] = {}
        self._kept: dict[tuple[float, ...], list[Tensor]] = {}
        self.momentum: list[Tensor] = []
        self._last: StepPlan | None = None
        self._first: Tensor | None = None  # a view of it, to notice that it was replaced

    @staticmethod
    def fits(optimizer: torch.optim.Optimizer, weights: Sequence[Tensor]) -> bool:
        """Only where it is the same to rounding."""
        if type(optimizer) is not torch.optim.SGD:
            return False
        return all(segment.dtype in (torch.float32, torch.float64) for segment in weights)

    def step(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> bool:
        """One step with the gradient's segments; False where only the plain step will do, and nothing was done."""
        plan = self.plan(parameters)
        if plan is None:
            return False
        before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            for index, weights in enumerate(self.weights):
                self.move(plan, index, weights, gradients[index], weights)
        finally:
            torch._C._set_grad_enabled(before)
        return True

    def rebind(self, weights: Sequence[Tensor]) -> None:
        """The same values lie there from now on; what was captured with a plan was so for the place before."""
        self.weights = list(weights)
        self._plans.clear()
        self._last = None

    def changed(self) -> None:
        """The optimizer's options are others."""
        self._last = None

    def plan(self, parameters: Sequence[Tensor]) -> StepPlan | None:
        """Of a step with the options as they are; None where only the plain step will do."""
        plan = self._last
        if plan is None:
            plan = self._last = self._find_plan(parameters)
        if not plan.fits:
            return None
        if plan.momentum:
            state = self._optimizer.state.get(parameters[0])
            kept = state.get("momentum_buffer") if state is not None else None
            if kept is None or kept is not self._first:  # it is not what `_adopt` made of it
                if not self._adopt(parameters):
                    return None
                self._plans.clear()
                plan = self._last = self._find_plan(parameters)
        return plan

    def _find_plan(self, parameters: Sequence[Tensor]) -> StepPlan:
        groups = self._optimizer.param_groups
        key = tuple([group[name] for group in groups for name in COUNT])
        plan = self._plans.get(key)
        if plan is None:
            first = groups[0]
            same = all(group[name] == first[name] for group in groups for name in SAME)
            plan = self._plans[key] = StepPlan(
                fits=bool(parameters) and same and not any(isinstance(value, Tensor) for value in key),
                rates=self._rates([float(group["lr"]) for group in groups], parameters),
                decays=self._rates([float(group["weight_decay"]) for group in groups], parameters),
                **{name: first[name] for name in SAME},
            )
            if len(self._plans) > PLANS_KEPT:
                del self._plans[next(iter(self._plans))]
        return plan

    def move(self, plan: StepPlan, index: int, weights: Tensor, gradient: Tensor, into: Tensor) -> None:
        """One segment's step from these weights, into others or the same."""
        if plan.maximize:
            gradient = -gradient
        decays, rates = plan.decays, plan.rates
        if decays.scale and decays.each is None:
            gradient = torch.add(gradient, weights, alpha=decays.scale)
        elif decays.each is not None:
            gradient = torch.addcmul(gradient, decays.each[index], weights, value=decays.scale)
        if plan.momentum:
            kept = self.momentum[index]
            if plan.dampening:
                kept.mul_(plan.momentum).add_(gradient, alpha=1 - plan.dampening)
            else:
                torch.add(gradient, kept, alpha=plan.momentum, out=kept)
            gradient = torch.add(gradient, kept, alpha=plan.momentum) if plan.nesterov else kept
        if rates.each is None:
            torch.add(weights, gradient, alpha=-rates.scale, out=into)
        else:
            torch.addcmul(weights, rates.each[index], gradient, value=-rates.scale, out=into)

    def _rates(self, values: Sequence[float], parameters: Sequence[Tensor]) -> _Rates:
        """The largest times a number for each element; kept, for schedules mostly change the largest alone."""
        scale = max(values, key=abs)
        if all(value == scale for value in values):
            return _Rates(scale, None)
        relative = tuple(float(torch.tensor(value / scale, dtype=torch.float32)) for value in values)
        each = self._kept.get(relative)
        if each is None:
            each = self._kept[relative] = [torch.zeros_like(segment) for segment in self.weights]
            for piece, parameter in zip(self._part.pieces, parameters, strict=True):
                piece.of(each).fill_(relative[self._group[id(parameter)]])
        return _Rates(scale, each)

    def _adopt(self, parameters: Sequence[Tensor]) -> bool:
        """The momentum as one flat buffer of which the optimizer's are views; False before the first step."""
        state = self._optimizer.state
        buffers = [state[p].get("momentum_buffer") if p in state else None for p in parameters]
        if any(buffer is None for buffer in buffers):
            return False
        self.momentum = [torch.zeros_like(segment) for segment in self.weights]
        for piece, parameter, buffer in zip(self._part.pieces, parameters, buffers, strict=True):
            view = piece.of(self.momentum).view_as(parameter)
            view.copy_(buffer)  # type: ignore[arg-type]
            state[parameter]["momentum_buffer"] = view
        self._first = state[parameters[0]]["momentum_buffer"]
        return True
