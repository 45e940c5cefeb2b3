"""Networks of the papers, and those that job files name."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from syncline.models.alexnet import AlexNet
from syncline.models.autoencoder import Autoencoder, reconstruction
from syncline.models.cifar10_full import Cifar10Full, cifar10_full_sgd
from syncline.models.cifar10_full import cifar10_full_groups as cifar10_full_groups
from syncline.models.distbelief import locally_connected, speech
from syncline.models.googlenet import GoogLeNet, auxiliary_loss
from syncline.models.mlp import mlp
from syncline.models.recurrent import Recurrent
from syncline.nn.conditional_rbm import CRBM
from syncline.nn.dbm import DBM
from syncline.nn.dbn import DBN
from syncline.nn.rbm import RBM

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
