"""Layers, nets and energy models: plain `nn.Module`s and functions.

Nets as data (layers, layer_records, net); RBM, DBN and what else contrastive divergence trains (energy, rbm, dbn, …); large
locally connected networks and their unsupervised training (COTS: block_local, stack, greedy, …).
Not responsible for running on many workers; modules made here go through `syncline.train` like any other.
"""

from syncline.nn.autoencoder import FusedStack, Objective, TiedAutoencoder, joint_update
from syncline.nn.block_local import BlockLocal2d, BlockLocalDecoder2d
from syncline.nn.conditional_rbm import CRBM, windows
from syncline.nn.dbm import DBM
from syncline.nn.dbn import DBN
from syncline.nn.greedy import Greedy, GreedyRecord
from syncline.nn.layer_records import NetError
from syncline.nn.net import Net, by_layer, load_net, save_net
from syncline.nn.rbm import RBM
from syncline.nn.stack import L2Pool2d, LocalContrastNorm2d, Stack, StackShape, build_stacks

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
