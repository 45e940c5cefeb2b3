"""Deep energy models: belief networks (DBN), RBMs on top of each other, and Boltzmann machines (DBM).

A DBN is trained greedily, then unrolled or made a classifier:

    for number in range(len(dbn.rbms)):
        dbn.only(number)                                   # the others pass on
        dbn = sl.train(dbn, data, gradient="cd:1", …).model
    net = dbn.only(None).classifier(10)                    # DBN–DNN: back-propagation from here

DBM:  E(v, h¹, h², …) = −h¹ᵀ W¹ v − h²ᵀ W² h¹ − … − Σ_l b_lᵀ h_l, with v as layer 0
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from syncline.errors import UsageError
from syncline.nn.argument_checks import COUNT, check
from syncline.nn.energy import CHAINS, RBM, Contrastive, Parts, fill, is_trained, keep_chains


class DBN(nn.Module, Parts):
    """RBMs of these sizes, visible units first; calling it gives the means of the highest units.

    `units` are the lowest, `code` the highest ones; further options are those of `RBM`, for all.
    """

    def __init__(
        self, sizes: Sequence[int], *, units: str = "bernoulli", code: str = "bernoulli", **options: Any
    ) -> None:
        super().__init__()
        if not isinstance(sizes, list | tuple) or len(sizes) < 2:
            raise UsageError(f"a DBN takes at least two sizes, visible units first, got {sizes!r}")
        last = len(sizes) - 2
        self.rbms = nn.ModuleList(
            RBM(
                below,
                above,
                units=units if number == 0 else "bernoulli",
                code=code if number == last else "bernoulli",
                **options,
            )
            for number, (below, above) in enumerate(pairwise(sizes))
        )

    def forward(self, visible: Tensor) -> Tensor:
        visible = visible.flatten(1)
        for rbm in self.rbms:
            visible = rbm(visible)
        return visible

    def only(self, number: int | None) -> DBN:
        """Train this RBM alone; None: all."""
        for index, rbm in enumerate(self.rbms):
            rbm.requires_grad_(number is None or index == number)
        return self

    def reached(self, data: Tensor) -> Iterator[tuple[Contrastive, Tensor]]:
        data = data.flatten(1)
        trained = [is_trained(rbm) for rbm in self.rbms]
        for number, rbm in enumerate(self.rbms):
            if trained[number]:
                yield rbm, data  # type: ignore[misc]
            if not any(trained[number + 1 :]):
                return
            data = rbm(data)

    def members(self) -> list[Contrastive]:
        return [rbm for rbm in self.rbms if is_trained(rbm)]  # type: ignore[misc]

    def check_way(self, persistent: bool) -> None:
        if not self.members():
            raise UsageError("all RBMs of this DBN are frozen; dbn.only(number) chooses which one is trained")

    @torch.no_grad()
    def sample(self, count: int, steps: int = 100) -> Tensor:
        """Visible means: Gibbs steps in the highest RBM, then down."""
        top: RBM = self.rbms[-1]  # type: ignore[assignment]
        start = torch.bernoulli(torch.full((count, top.weight.shape[1]), 0.5, device=top.weight.device))
        values = top.gibbs(start, steps)
        for rbm in reversed(self.rbms[:-1]):
            values = rbm.visible(values)  # type: ignore[operator]
        return values

    def classifier(self, classes: int) -> nn.Sequential:
        """A DNN that begins with these weights, and one more layer (DBN–DNN)."""
        layers: list[nn.Module] = [nn.Flatten()]
        for rbm in self.rbms:
            layers += _up(rbm)  # type: ignore[arg-type]
        return nn.Sequential(*layers, nn.Linear(self.rbms[-1].weight.shape[0], classes))  # type: ignore[arg-type,index]

    def autoencoder(self) -> nn.Sequential:
        """Unrolled: up through all RBMs and down again, as layers of their own that begin with these weights.

        The output is the lowest layer's input, to be trained with `bce_with_logits` (Bernoulli) or `mse` (Gaussian units).
        """
        up: list[nn.Module] = [nn.Flatten()]
        down: list[nn.Module] = []
        for rbm in self.rbms:
            up += _up(rbm)  # type: ignore[arg-type]
            down = [_linear(rbm.weight.t(), rbm.visible_bias), nn.Sigmoid(), *down]  # type: ignore[operator,arg-type]
        return nn.Sequential(*up, *down[:-1])


def _up(rbm: RBM) -> list[nn.Module]:
    return [_linear(rbm.weight, rbm.hidden_bias), *([nn.Sigmoid()] if rbm.code.kind == "bernoulli" else [])]


@torch.no_grad()
def _linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], device=weight.device, dtype=weight.dtype)
    made.weight.copy_(weight)
    made.bias.copy_(bias)
    return made


class DBM(nn.Module, Contrastive):
    """`weights` (above × below each) and `biases` of layers of these sizes, visible units first.

    Calling it gives the means of the highest units, after `sweeps` of mean field. It is trained by `gradient="pcd:k"`.
    """

    chains: Tensor

    def __init__(
        self, sizes: Sequence[int], *, sweeps: int = 10, decay: float = 0.0, std: float = 0.01
    ) -> None:
        super().__init__()
        if not isinstance(sizes, list | tuple) or len(sizes) < 2:
            raise UsageError(f"a DBM takes at least two sizes, visible units first, got {sizes!r}")
        check(COUNT, sweeps=sweeps, **{f"sizes[{number}]": size for number, size in enumerate(sizes)})
        self.sizes, self.sweeps, self.decay = tuple(sizes), sweeps, decay
        self.weights = nn.ParameterList(torch.randn(above, below) * std for below, above in pairwise(sizes))
        self.biases = nn.ParameterList(torch.zeros(size) for size in sizes)

    def forward(self, visible: Tensor) -> Tensor:
        return self.mean_field(visible.flatten(1))[-1]

    def extra_repr(self) -> str:
        return " – ".join(map(str, self.sizes))

    @torch.no_grad()
    def mean_field(self, visible: Tensor) -> list[Tensor]:
        """Means of all layers given the visible units: a way up with doubled weights, then sweeps up to down."""
        layers, last = [visible], len(self.sizes) - 1
        for level in range(1, last + 1):
            doubled = 1.0 if level == last else 2.0
            inputs = torch.addmm(self.biases[level], layers[-1], self.weights[level - 1].t(), alpha=doubled)
            layers.append(torch.sigmoid(inputs))
        for _ in range(self.sweeps):
            for level in range(1, last + 1):
                layers[level] = self.mean(level, layers)
        return layers

    def mean(self, level: int, layers: Sequence[Tensor]) -> Tensor:
        """Of a layer's units given the layers beside it."""
        inputs = self.biases[level]
        if level:
            inputs = torch.addmm(inputs, layers[level - 1], self.weights[level - 1].t())
        if level + 1 < len(layers):
            inputs = torch.addmm(inputs, layers[level + 1], self.weights[level])
        return torch.sigmoid(inputs)

    @torch.no_grad()
    def gibbs(self, layers: Sequence[Tensor], steps: int = 1) -> list[Tensor]:
        """Samples of all layers, so many steps on: odd layers given the even ones, then even ones."""
        layers = list(layers)
        for _ in range(steps):
            for first in (1, 0):
                for level in range(first, len(layers), 2):
                    layers[level] = torch.bernoulli(self.mean(level, layers))
        return layers

    # -- training ----------------------------------------------------------------------------------------

    def check_way(self, persistent: bool) -> None:
        if not persistent:
            raise UsageError("a DBM needs chains that go on: give gradient='pcd:k', for example 'pcd:5'")

    def begin_chains(self, count: int) -> None:
        keep_chains(self, count, sum(self.sizes), self.biases[0])

    @torch.no_grad()
    def contrastive_divergence(self, data: Tensor, steps: int = 1, *, persistent: bool = True) -> Tensor:
        self.check_way(persistent)
        data = data.flatten(1)
        if not hasattr(self, CHAINS):
            self.begin_chains(len(data))
        seen = self.gibbs(self.chains.split(self.sizes, 1), steps)
        self.chains.copy_(torch.cat(seen, 1))
        on = self.mean_field(data)
        here, there = 1 / len(data), 1 / len(seen[0])
        for level, weight in enumerate(self.weights):
            gradient = there * seen[level + 1].t() @ seen[level] - here * on[level + 1].t() @ on[level]
            fill(weight, gradient.add_(weight, alpha=self.decay))
        for bias, drawn, mean in zip(self.biases, seen, on, strict=True):
            fill(bias, drawn.mean(0) - mean.mean(0))
        return self._error(data, on)

    @torch.no_grad()
    def reconstruction_error(self, data: Tensor) -> Tensor:
        data = data.flatten(1)
        return self._error(data, self.mean_field(data))

    def _error(self, data: Tensor, on: Sequence[Tensor]) -> Tensor:
        return (data - self.mean(0, on)).square().sum() / len(data)
