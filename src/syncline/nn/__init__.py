"""Layers, nets and energy models: plain `nn.Module`s and functions.

Nets as data (layers, layer_records, net); RBM, DBN and what else contrastive divergence trains (energy, deep_energy); large
locally connected networks and their unsupervised training (COTS: block_local, autoencoder, greedy).
Not responsible for running on many workers; modules made here go through `syncline.train` like any other.
"""

from syncline.nn.autoencoder import FusedStack, Objective, TiedAutoencoder, joint_update
from syncline.nn.block_local import (
    BlockLocal2d,
    BlockLocalDecoder2d,
    L2Pool2d,
    LocalContrastNorm2d,
    Stack,
    StackShape,
    build_stacks,
)
from syncline.nn.deep_energy import DBM, DBN
from syncline.nn.energy import CRBM, RBM, windows
from syncline.nn.greedy import Greedy, GreedyRecord
from syncline.nn.layer_records import NetError
from syncline.nn.net import Net, by_layer, load_net, save_net

__all__ = [
    "CRBM",
    "DBM",
    "DBN",
    "RBM",
    "BlockLocal2d",
    "BlockLocalDecoder2d",
    "FusedStack",
    "Greedy",
    "GreedyRecord",
    "L2Pool2d",
    "LocalContrastNorm2d",
    "Net",
    "NetError",
    "Objective",
    "Stack",
    "StackShape",
    "TiedAutoencoder",
    "build_stacks",
    "by_layer",
    "joint_update",
    "load_net",
    "save_net",
    "windows",
]
