"""Caffe's cifar10_full, the network of Rudra's CIFAR-10 experiments (R10), and its optimizer.

89,578 parameters. It wants pixels of 0…255 minus the per-pixel mean of the training set, not scaled:
`syncline.data.cifar10(folder, pixels="centred")`. Legend: N images.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncline.errors import UsageError
from syncline.nn.file_arguments import COUNT, check

STARTS = {"conv1": 1e-4, "conv2": 0.01, "conv3": 0.01, "ip1": 0.01}  # standard deviations of the weights
LAST_DECAY = 250.0  # times the weight decay, on the last weights
BIAS_RATE = 2.0  # times the learning rate, on all biases


class WithinChannelNorm(nn.Module):
    """Local response normalisation within a channel: x / (1 + α/n² Σ x²)^β over a window of n×n.

    As Caffe counts: the border is padded with zeros, and the sum is always divided by n².
    """

    def __init__(self, size: int = 3, alpha: float = 5e-5, beta: float = 0.75) -> None:
        super().__init__()
        if size < 1 or size % 2 == 0:
            raise UsageError(f"the window of WithinChannelNorm must be odd, got {size}")
        self.size, self.alpha, self.beta = size, alpha, beta

    def forward(self, x: Tensor) -> Tensor:
        mean = F.avg_pool2d(x.square(), self.size, stride=1, padding=self.size // 2)
        return x * (1 + self.alpha * mean).pow(-self.beta)

    def extra_repr(self) -> str:
        return f"size={self.size}, alpha={self.alpha}, beta={self.beta}"


class Cifar10Full(nn.Module):
    """Three 5×5 convolutions of 32, 32, 64 with pooling 3/2 (max, average, average), then one linear layer.

    Pooling rounds up as Caffe does: windows hang over the border, and an average counts only what is inside.
    """

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        check(COUNT, classes=classes)
        self.conv1 = nn.Conv2d(3, 32, 5, padding=2)
        self.conv2 = nn.Conv2d(32, 32, 5, padding=2)
        self.conv3 = nn.Conv2d(32, 64, 5, padding=2)
        self.ip1 = nn.Linear(64 * 4 * 4, classes)
        self.highest = nn.MaxPool2d(3, stride=2, ceil_mode=True)
        self.average = nn.AvgPool2d(3, stride=2, ceil_mode=True)
        self.norm = WithinChannelNorm(3, 5e-5, 0.75)
        for name, deviation in STARTS.items():
            layer = self.get_submodule(name)
            nn.init.normal_(layer.weight, std=deviation)  # type: ignore[arg-type]
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(F.relu(self.highest(self.conv1(x))))  # (N, 32, 16, 16)
        x = self.norm(self.average(F.relu(self.conv2(x))))  # (N, 32, 8, 8)
        x = self.average(F.relu(self.conv3(x)))  # (N, 64, 4, 4)
        return self.ip1(x.flatten(1))


def cifar10_full_groups(
    model: nn.Module, *, lr: float = 0.001, weight_decay: float = 0.004
) -> list[dict[str, Any]]:
    """Parameter groups with Caffe's multipliers: biases at twice the rate; the last weights decay 250 times as much, their bias not.

    The biases of the convolutions decay like weights, since Caffe's `decay_mult` is 1 unless set.
    """
    named = dict(model.named_parameters())
    missing = [name for name in ("ip1.weight", "ip1.bias") if name not in named]
    if missing:
        raise UsageError(
            f"cifar10_full_groups needs a model with a layer ip1, {type(model).__name__} has none; use cifar10_full"
        )
    last_weight, last_bias = named.pop("ip1.weight"), named.pop("ip1.bias")
    weights = [value for name, value in named.items() if not name.endswith("bias")]
    biases = [value for name, value in named.items() if name.endswith("bias")]
    return [
        {"params": weights, "lr": lr, "weight_decay": weight_decay},
        {"params": biases, "lr": lr * BIAS_RATE, "weight_decay": weight_decay},
        {"params": [last_weight], "lr": lr, "weight_decay": weight_decay * LAST_DECAY},
        {"params": [last_bias], "lr": lr * BIAS_RATE, "weight_decay": 0.0},
    ]


def cifar10_full_sgd(
    model: nn.Module, *, lr: float = 0.001, momentum: float = 0.9, weight_decay: float = 0.004
) -> torch.optim.SGD:
    """SGD over `cifar10_full_groups`, for `optimizer=`."""
    return torch.optim.SGD(
        cifar10_full_groups(model, lr=lr, weight_decay=weight_decay), lr=lr, momentum=momentum
    )
