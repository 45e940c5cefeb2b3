"""Ways to a gradient: what fills the `.grad` of a model's parameters from a batch, and says the loss.

    "backprop"        the gradient of a loss or objective, by autograd
    "cd:k", "pcd:k"   contrastive divergence: k Gibbs steps from the data, or of chains that go on from batch to batch
    a callable        (model, batch) -> loss, whatever it does

A regulariser is a penalty of the parameters that is added to every gradient, whatever the way to it:

    sl.train(…, regulariser=partial(l1, weight=1e-5))          # or any function model -> scalar

Biases and other vectors are left alone. Not responsible for where gradients go (the optimizer's `step`), for what energy models are
(nn/), nor for weight decay, which optimizers and `RBM` have themselves.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from syncline.dial import nearest
from syncline.errors import UsageError
from syncline.nn.energy import CHAINS, Contrastive
from syncline.nn.net import Net, parts_of
from syncline.parallel.module import Partitioned

Loss = Callable[[Any, Any], Tensor]
Objective = Callable[[nn.Module, Any], Tensor]
WAYS = ("backprop", "cd", "pcd")


class Way(ABC):
    """Fills `.grad` of a model from a batch."""

    @abstractmethod
    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """The gradients are in `.grad` afterwards, added to what was there; the loss, for the record."""

    def test(self, model: nn.Module, batch: Any) -> Tensor:
        """A number to evaluate with, without gradients."""
        raise NotImplementedError  # refused before

    def prepare(self, model: nn.Module, batch_size: int) -> None:
        """Before the first batch, wherever the model was made."""
        return

    def kept(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Of a run's last tensors, those that belong to the model."""
        return state

    def check(self, model: nn.Module) -> None:
        """Refuse a model that this is no way for."""
        return

    def check_evaluation(self) -> None:
        """Refuse a data set to evaluate on, where there is nothing to say about one."""
        return

    def check_seats(self) -> None:
        """Refuse a model that is cut over the seats of a group."""
        return

    def to_cut(self, model: nn.Module) -> nn.Module:
        """Return the module to cut over the seats of a group: the model, or a net as the sum of its losses."""
        return model


class Supervised:
    """A loss of (output, target) as an objective of (model, batch); None: those that a net has as layers."""

    def __init__(self, loss: Loss | None) -> None:
        self._loss = loss

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        if self.inside and isinstance(model, Partitioned):
            total: Tensor = model(**model.skeleton.inputs_of(batch))  # type: ignore[operator]
            return total
        return self.parts(model, batch)[0]

    @property
    def inside(self) -> bool:
        """True if the losses are layers of the net."""
        return self._loss is None

    def parts(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any, Any]:
        """The loss, and what it is of: output and target."""
        if self._loss is None:
            assert isinstance(model, Net)
            return model.parts(batch)
        if not isinstance(batch, (list, tuple)) or len(batch) != 2:
            parts = f" of {len(batch)}" if isinstance(batch, (list, tuple, dict)) else ""
            raise UsageError(
                f"loss= takes batches of (input, target), the data gives a {type(batch).__name__}{parts}; "
                "use objective=(model, batch) -> scalar"
            )
        inputs, targets = batch
        output = model(inputs)
        return self._loss(output, targets), output, targets


class Backprop(Way):
    """Back-propagation."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        value = self.objective(model, batch)
        check_loss(value)
        value.backward()
        return value

    def test(self, model: nn.Module, batch: Any) -> Tensor:
        return self.objective(model, batch)

    def to_cut(self, model: nn.Module) -> nn.Module:
        objective = self.objective.objective if isinstance(self.objective, Penalised) else self.objective
        inside = isinstance(objective, Supervised) and objective.inside
        return model.with_losses() if inside and isinstance(model, Net) else model


class Divergence(Way):
    """Contrastive divergence of the energy models in a model, each on what reaches it."""

    def __init__(self, steps: int, *, persistent: bool) -> None:
        self.steps, self.persistent = steps, persistent

    def __repr__(self) -> str:
        return f"{'pcd' if self.persistent else 'cd'}:{self.steps}"

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        parts = parts_of(model)
        return parts.contrastive_divergence(first_of(batch), self.steps, persistent=self.persistent)

    def test(self, model: nn.Module, batch: Any) -> Tensor:
        return parts_of(model).reconstruction_error(first_of(batch))

    def prepare(self, model: nn.Module, batch_size: int) -> None:
        if self.persistent:
            parts_of(model).begin_chains(batch_size)

    def kept(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Chains are the learners' own: their mean is nobody's state."""
        return {name: value for name, value in state.items() if name.rpartition(".")[2] != CHAINS}

    def check(self, model: nn.Module) -> None:
        if not isinstance(model, Contrastive | Net):
            raise UsageError(
                f"gradient='{self}' trains energy models, as syncline.nn.RBM or DBN, or a net with rbm layers, got "
                f"{type(model).__name__}"
            )
        parts_of(model).check_way(self.persistent)

    def check_seats(self) -> None:
        raise UsageError(
            f"gradient='{self}' samples from whole layers, of which a seat has slices: seats make gradients by back-propagation; "
            "use group=1 and more learners"
        )


class Given(Way):
    """The user's own."""

    def __init__(self, function: Callable[[nn.Module, Any], Any]) -> None:
        self._function = function

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        value = self._function(model, batch)
        check_scalar(value)
        if all(parameter.grad is None for parameter in model.parameters()):
            raise UsageError("the function given as gradient= has filled no parameter's .grad; it has to")
        return value

    def check_evaluation(self) -> None:
        raise UsageError(
            "evaluate= with an own gradient= must be a function of the model: there is no loss to test a data set with"
        )

    def check_seats(self) -> None:
        raise UsageError(
            "a gradient= of your own does not know which slices a seat has: seats make gradients by back-propagation; give a loss or "
            "an objective, or use launch with sl.partition"
        )


def first_of(batch: Any) -> Tensor:
    """What energy models see of a batch: itself, or its first part."""
    found = batch[0] if isinstance(batch, list | tuple) and batch else batch
    if not isinstance(found, Tensor):
        raise UsageError(
            f"contrastive divergence takes batches that are a tensor or begin with one, got {type(batch).__name__}"
        )
    return found


def way_of(gradient: Any, model: nn.Module, loss: Loss | None, objective: Objective | None) -> Way:
    """The way that `train`'s arguments name, for this model; raises UsageError."""
    if gradient == "backprop":
        if loss is None and objective is None and isinstance(model, Net) and model.losses:
            return Backprop(Supervised(None))
        if (loss is None) == (objective is None):
            raise UsageError(
                "give either loss=(output, target) -> scalar or objective=(model, batch) -> scalar"
            )
        return Backprop(objective or Supervised(loss))
    if loss is not None or objective is not None:
        what = "loss" if loss is not None else "objective"
        raise UsageError(f"gradient={gradient!r} needs no {what}=: leave it out, or gradient=")
    way = parse_way(gradient)
    way.check(model)
    return way


def parse_way(gradient: Any) -> Way:
    """Of anything but back-propagation."""
    if callable(gradient):
        return Given(gradient)
    name, _, steps = gradient.partition(":") if isinstance(gradient, str) else ("", "", "")
    if name not in ("cd", "pcd"):
        hint = nearest(name, WAYS) if name else ""
        raise UsageError(
            f"gradient must be 'backprop', 'cd:k', 'pcd:k' or a function (model, batch) -> loss, got {gradient!r}{hint}"
        )
    if not re.fullmatch(r"[1-9]\d{0,5}", steps or "1"):
        raise UsageError(f"gradient={gradient!r}: k is a number of Gibbs steps, at least 1, as in '{name}:1'")
    return Divergence(int(steps or 1), persistent=name == "pcd")


def check_scalar(value: Any) -> None:
    if isinstance(value, Tensor) and value.numel() == 1:
        return
    if value is None:
        got, instead = "None", "the function has to return it"
    elif isinstance(value, Tensor):
        got, instead = f"a tensor of shape {tuple(value.shape)}", "reduce it, for example with .mean()"
    elif isinstance(value, nn.Module):
        name = type(value).__name__
        got, instead = f"the module {name}", f"call one: {name}()(output, target)"
    else:
        got, instead = type(value).__name__, "return the tensor itself, not .item() or a tuple"
    raise UsageError(f"the loss must be a scalar tensor, got {got}; {instead}")


def check_loss(value: Any) -> None:
    """A scalar that backward can begin with."""
    check_scalar(value)
    if not value.requires_grad:
        raise UsageError(
            "the loss does not depend on a parameter that is trained: it was detached, made under torch.no_grad() or anew from "
            "numbers, or all that it depends on has requires_grad=False"
        )


Penalty = Callable[[nn.Module], Tensor]


def l1(model: nn.Module, *, weight: float) -> Tensor:
    """weight · Σ |w|"""
    return weight * _over_weights(model, lambda each: each.abs().sum())


def l2(model: nn.Module, *, weight: float) -> Tensor:
    """weight/2 · Σ w²"""
    return 0.5 * weight * _over_weights(model, lambda each: each.square().sum())


def elastic(model: nn.Module, *, l1: float, l2: float) -> Tensor:
    """Both."""
    return _over_weights(model, lambda each: (l1 * each.abs() + 0.5 * l2 * each.square()).sum())


def group_lasso(model: nn.Module, *, weight: float) -> Tensor:
    """weight · Σ over units of the norm of their incoming weights: whole units go to zero."""
    return weight * _over_weights(model, lambda each: (each.flatten(1).square().sum(1) + 1e-12).sqrt().sum())


REGULARISERS: dict[str, Callable[..., Tensor]] = {
    "l1": l1,
    "l2": l2,
    "elastic": elastic,
    "group_lasso": group_lasso,
}


def _over_weights(model: nn.Module, penalty: Callable[[Tensor], Tensor]) -> Tensor:
    found = [penalty(each) for each in model.parameters() if each.dim() > 1]
    if not found:
        raise UsageError("the regulariser finds no weights: no parameter has two dimensions or more")
    return torch.stack(found).sum()


class Penalised:
    """Sum of an objective and a penalty of the parameters."""

    def __init__(self, objective: Objective, penalty: Penalty) -> None:
        self.objective, self._penalty = objective, penalty

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        loss = self.objective(model, batch)
        seats = isinstance(model, Partitioned)
        return loss + (_over_seats(self._penalty, model) if seats else self._penalty(model))  # type: ignore[arg-type]


def _over_seats(penalty: Penalty, model: Partitioned) -> Tensor:
    """Return the penalty of the whole model.

    Its gradient belongs to this seat: its slices, and an equal share of each parameter that all seats hold.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    group, parts = model.group, model.parts
    if isinstance(penalty, partial) and penalty.func in SEPARABLE:
        cut = [p for name, p in named.items() if not parts[name].replicated and p.dim() > 1]
        both = [p for name, p in named.items() if parts[name].replicated and p.dim() > 1]
        shares = [(cut, 1.0), (both, 1 / group.size)]
        own = torch.stack([share * penalty(nn.ParameterList(some)) for some, share in shares if some]).sum()
        return own + (group.add(own.detach()) - own).detach()
    tensors = model.gather()
    whole = [tensors[name].requires_grad_() for name in named]
    value: Tensor = functional_call(
        _Call(model.skeleton, penalty), {f"model.{name}": tensor for name, tensor in tensors.items()}, ()
    )
    check_scalar(value)
    own = value.new_zeros(())
    gradients = torch.autograd.grad(value, whole, allow_unused=True) if value.requires_grad else ()
    for (name, p), gradient in zip(named.items(), gradients, strict=False):
        if gradient is not None:
            share = 1 / group.size if parts[name].replicated else 1.0
            own = own + share * (p * parts[name].take(group.rank, gradient)).sum()
    return own + (value - own).detach()


class _Call(nn.Module):
    """Module around a function of a model, since torch.func calls modules."""

    def __init__(self, model: nn.Module, function: Callable[[nn.Module], Tensor]) -> None:
        super().__init__()
        self.model, self._function = model, function

    def forward(self) -> Tensor:
        return self._function(self.model)


SEPARABLE = (l1, l2, elastic)  # sums over single weights, so that slices give parts of the sum


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
    if isinstance(way, Backprop):
        return Backprop(Penalised(way.objective, penalty))
    return Regularised(way, penalty)
