"""A net as what contrastive divergence trains: the energy models among its layers, each on what reaches it from below."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from syncline.errors import UsageError
from syncline.nn.energy import Contrastive, Parts, is_trained
from syncline.nn.net import Net


class NetParts(Parts):
    """The energy models among a net's layers."""

    def __init__(self, net: Net) -> None:
        self._net = net

    def members(self) -> list[Contrastive]:
        return [each for each in self._net.children() if isinstance(each, Contrastive) and is_trained(each)]

    def reached(self, data: Tensor) -> Iterator[tuple[Contrastive, Tensor]]:
        for module, inputs in self._net.reaching(data):
            if isinstance(module, Contrastive) and is_trained(module):
                yield module, inputs[0]

    def check_way(self, persistent: bool) -> None:
        if not self.members():
            raise UsageError(
                "the net has no rbm layer that is trained: contrastive divergence has nothing to do"
            )
        super().check_way(persistent)


def parts_of(model: nn.Module) -> Contrastive:
    """A model as what contrastive divergence trains."""
    return NetParts(model) if isinstance(model, Net) else model  # type: ignore[return-value]
