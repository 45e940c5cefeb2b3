"""Regularisers: a penalty of the parameters that is added to every gradient, whatever the way to it.

    sl.train(…, regulariser=partial(l1, weight=1e-5))          # or any function model -> scalar

Biases and other vectors are left alone. Not responsible for weight decay, which optimizers and `RBM` have themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from syncline.errors import UsageError
from syncline.learn.gradient_ways import Backprop, Objective, Way, check_scalar

Penalty = Callable[[nn.Module], Tensor]


def l1(model: nn.Module, *, weight: float) -> Tensor:
    """weight · Σ |w|"""
    return weight * _total(each.abs().sum() for each in _weights(model))


def l2(model: nn.Module, *, weight: float) -> Tensor:
    """weight/2 · Σ w²"""
    return 0.5 * weight * _total(each.square().sum() for each in _weights(model))


def elastic(model: nn.Module, *, l1: float, l2: float) -> Tensor:
    """Both."""
    return _total((l1 * each.abs() + 0.5 * l2 * each.square()).sum() for each in _weights(model))


def group_lasso(model: nn.Module, *, weight: float) -> Tensor:
    """weight · Σ over units of the norm of their incoming weights: whole units go to zero."""
    return weight * _total((each.flatten(1).square().sum(1) + 1e-12).sqrt().sum() for each in _weights(model))


REGULARISERS: dict[str, Callable[..., Tensor]] = {
    "l1": l1,
    "l2": l2,
    "elastic": elastic,
    "group_lasso": group_lasso,
}


def _weights(model: nn.Module) -> list[Tensor]:
    found: list[Tensor] = [each for each in model.parameters() if each.dim() > 1]
    if not found:
        raise UsageError("the regulariser finds no weights: no parameter has two dimensions or more")
    return found


def _total(parts: Iterator[Tensor]) -> Tensor:
    return torch.stack(list(parts)).sum()


class Penalised:
    """An objective and a penalty."""

    def __init__(self, objective: Objective, penalty: Penalty) -> None:
        self._objective, self._penalty = objective, penalty

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        return self._objective(model, batch) + self._penalty(model)


class Regularised(Way):
    """A way that is no back-propagation, and a penalty on top."""

    def __init__(self, way: Way, penalty: Penalty) -> None:
        self._way, self._penalty = way, penalty

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        value = self._way(model, batch)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        penalty = self._penalty(model)
        check_scalar(penalty)
        gradients = torch.autograd.grad(penalty, parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return value + penalty.detach()

    def test(self, model: nn.Module, batch: Any) -> Tensor:
        return self._way.test(model, batch)

    def prepare(self, model: nn.Module, batch_size: int) -> None:
        self._way.prepare(model, batch_size)

    def kept(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return self._way.kept(state)


def regularised(way: Way, penalty: Penalty | None) -> Way:
    """What is trained; what is tested stays the way itself."""
    if penalty is None:
        return way
    if not callable(penalty):
        raise UsageError(
            f"regulariser must be a function of the model that gives a scalar, as partial(l1, weight=1e-5), got {penalty!r}"
        )
    return (
        Backprop(Penalised(way.objective, penalty))
        if isinstance(way, Backprop)
        else Regularised(way, penalty)
    )
