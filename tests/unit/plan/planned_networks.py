"""Networks that tests plan, and the cluster they plan them for."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncline.cluster import Cluster

ETHERNET = Cluster.named("ethernet-1g")
BATCH = torch.empty(256, 3, 224, 224, device="meta")


def mlp(*sizes: int) -> nn.Sequential:
    pairs = itertools.pairwise(sizes)
    return nn.Sequential(*(layer for a, b in pairs for layer in (nn.Linear(a, b), nn.ReLU())))


class Ways(nn.Module):
    """Ways that part and meet."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.one, self.two = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 5, padding=2)
        self.out = nn.Linear(8 * 64, 300)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        x = self.one(x) + F.relu(self.two(x)) + x
        return self.out(x.flatten(1))
