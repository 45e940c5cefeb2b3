"""Networks of the papers, and those that job files name."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from syncline.models.image_networks import (
    AlexNet,
    Cifar10Full,
    GoogLeNet,
    auxiliary_loss,
    cifar10_full_sgd,
    locally_connected,
)
from syncline.models.image_networks import cifar10_full_groups as cifar10_full_groups
from syncline.models.vector_networks import Autoencoder, Recurrent, mlp, reconstruction, speech
from syncline.nn.deep_energy import DBM, DBN
from syncline.nn.energy import CRBM, RBM

MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp": mlp,
    "cifar10_full": Cifar10Full,
    "alexnet": AlexNet,
    "googlenet": GoogLeNet,
    "speech": speech,
    "locally_connected": locally_connected,
    "recurrent": Recurrent,
    "autoencoder": Autoencoder,
    "rbm": RBM,
    "dbn": DBN,
    "dbm": DBM,
    "crbm": CRBM,
}
OBJECTIVES: dict[str, Callable[..., torch.Tensor]] = {
    "reconstruction": reconstruction,
    "auxiliary_loss": auxiliary_loss,
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"cifar10_full_sgd": cifar10_full_sgd}
