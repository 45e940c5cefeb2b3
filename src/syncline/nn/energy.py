"""Energy models: what contrastive divergence asks of one, and the units they are made of.

Random numbers come from torch's generators, which every learner has seeded for itself. Legend: N examples, V visible and
H hidden units, K chains.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from syncline.errors import UsageError

CHAINS = "chains"  # the buffer of persistent chains; each learner has its own, and no saved model has any


class Contrastive(ABC):
    """What `gradient="cd:k"` and `"pcd:k"` train."""

    @abstractmethod
    def contrastive_divergence(self, data: Tensor, steps: int = 1, *, persistent: bool = False) -> Tensor:
        """Add the gradient of k Gibbs steps to `.grad`; the reconstruction error, for the record."""

    @abstractmethod
    def reconstruction_error(self, data: Tensor) -> Tensor:
        """Mean over examples of the squared error after one way up and down, without drawing."""

    @abstractmethod
    def begin_chains(self, count: int) -> None:
        """Persistent chains, all units off, unless there are so many already."""

    def check_way(self, persistent: bool) -> None:
        """Refuse plain or persistent chains, where the model has no such way."""
        return


class Units:
    """A kind of units: their mean given the input, samples given the mean, and their part of free energies."""

    def __init__(self, kind: str, classes: int | None = None, count: int = 0) -> None:
        if kind not in ("bernoulli", "gaussian", "softmax"):
            raise UsageError(f"units are 'bernoulli', 'gaussian' or 'softmax', got {kind!r}")
        if (kind == "softmax") != (classes is not None):
            raise UsageError("units='softmax' needs classes=, the size of each group; other units have none")
        if classes is not None and (not isinstance(classes, int) or classes < 2 or count % classes):
            raise UsageError(f"{count} softmax units are no groups of classes={classes!r}")
        self.kind, self.classes = kind, classes

    def mean(self, inputs: Tensor) -> Tensor:
        if self.kind == "bernoulli":
            return torch.sigmoid(inputs)
        return self._groups(inputs).softmax(-1).flatten(-2) if self.kind == "softmax" else inputs

    def sample(self, mean: Tensor) -> Tensor:
        if self.kind == "bernoulli":
            return torch.bernoulli(mean)
        if self.kind == "gaussian":
            return mean + torch.randn_like(mean)
        groups = self._groups(mean)
        drawn = torch.multinomial(groups.reshape(-1, groups.shape[-1]), 1)
        return torch.zeros_like(groups).reshape(-1, groups.shape[-1]).scatter_(1, drawn, 1.0).view_as(mean)

    def log_sum(self, inputs: Tensor) -> Tensor:
        """log Σ over all states of these units of exp(state · input); Gaussian ones with exp(−state²/2). (…, units) → (…)"""
        if self.kind == "bernoulli":
            return nn.functional.softplus(inputs).sum(-1)
        if self.kind == "softmax":
            return self._groups(inputs).logsumexp(-1).sum(-1)
        return 0.5 * inputs.square().sum(-1) + 0.5 * inputs.shape[-1] * LOG_2PI

    def _groups(self, values: Tensor) -> Tensor:
        assert self.classes is not None
        return values.unflatten(-1, (-1, self.classes))


LOG_2PI = 1.8378770664093453


def fill(parameter: Tensor, gradient: Tensor) -> None:
    """Add to `.grad`, where the parameter is trained."""
    if parameter.requires_grad:
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def keep_chains(model: nn.Module, count: int, units: int, like: Tensor) -> None:
    """Of a model whose chains have so many units."""
    there = getattr(model, CHAINS, None)
    if there is None or there.shape != (count, units):
        model.register_buffer(CHAINS, like.new_zeros(count, units).detach(), persistent=False)


class Parts(Contrastive):
    """Several energy models, each on what reaches it from below; frozen ones only pass on."""

    @abstractmethod
    def reached(self, data: Tensor) -> Iterator[tuple[Contrastive, Tensor]]:
        """Those that are trained, and their data."""

    @abstractmethod
    def members(self) -> list[Contrastive]:
        """Those that are trained."""

    @torch.no_grad()
    def contrastive_divergence(self, data: Tensor, steps: int = 1, *, persistent: bool = False) -> Tensor:
        errors = [
            part.contrastive_divergence(reaching, steps, persistent=persistent)
            for part, reaching in self.reached(data)
        ]
        return torch.stack(errors).sum()

    @torch.no_grad()
    def reconstruction_error(self, data: Tensor) -> Tensor:
        return torch.stack(
            [part.reconstruction_error(reaching) for part, reaching in self.reached(data)]
        ).sum()

    def begin_chains(self, count: int) -> None:
        for part in self.members():
            part.begin_chains(count)

    def check_way(self, persistent: bool) -> None:
        for part in self.members():
            part.check_way(persistent)


def is_trained(part: object) -> bool:
    return isinstance(part, nn.Module) and any(parameter.requires_grad for parameter in part.parameters())
