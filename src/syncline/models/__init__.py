"""Networks of the papers, and those that job files name."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from syncline.models.cifar10_full import Cifar10Full, cifar10_full_groups, cifar10_full_sgd
from syncline.models.mlp import mlp

MODELS: dict[str, Callable[..., nn.Module]] = {"mlp": mlp, "cifar10_full": Cifar10Full}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"cifar10_full_sgd": cifar10_full_sgd}

__all__ = ["MODELS", "OPTIMIZERS", "Cifar10Full", "cifar10_full_groups", "cifar10_full_sgd", "mlp"]
