"""Deep belief networks: RBMs on top of each other, trained greedily, then unrolled or made a classifier.

for number in range(len(dbn.rbms)):
    dbn.only(number)                                   # the others pass on
    dbn = sl.train(dbn, data, gradient="cd:1", …).model
net = dbn.only(None).classifier(10)                    # DBN–DNN: back-propagation from here
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from syncline.errors import UsageError
from syncline.nn.energy import Contrastive, Parts, is_trained
from syncline.nn.rbm import RBM


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
            down = [*_down(rbm), *down]  # type: ignore[arg-type]
        return nn.Sequential(*up, *down[:-1])


def _up(rbm: RBM) -> list[nn.Module]:
    return [_linear(rbm.weight, rbm.hidden_bias), *([nn.Sigmoid()] if rbm.code.kind == "bernoulli" else [])]


def _down(rbm: RBM) -> list[nn.Module]:
    return [_linear(rbm.weight.t(), rbm.visible_bias), nn.Sigmoid()]


@torch.no_grad()
def _linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], device=weight.device, dtype=weight.dtype)
    made.weight.copy_(weight)
    made.bias.copy_(bias)
    return made
