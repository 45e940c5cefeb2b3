"""Networks of the papers, and those that job files name."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from syncline.models.alexnet import AlexNet
from syncline.models.cifar10_full import Cifar10Full, cifar10_full_groups, cifar10_full_sgd
from syncline.models.googlenet import GoogLeNet, auxiliary_loss
from syncline.models.mlp import mlp

MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp": mlp,
    "cifar10_full": Cifar10Full,
    "alexnet": AlexNet,
    "googlenet": GoogLeNet,
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"cifar10_full_sgd": cifar10_full_sgd}

__all__ = [
    "MODELS",
    "OPTIMIZERS",
    "AlexNet",
    "Cifar10Full",
    "GoogLeNet",
    "auxiliary_loss",
    "cifar10_full_groups",
    "cifar10_full_sgd",
    "mlp",
]
