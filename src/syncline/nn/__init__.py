"""Layers and unsupervised training of large locally connected networks (COTS): plain `nn.Module`s and functions.

Not responsible for running on many workers; modules made here go through `syncline.train` like any other.
"""

from syncline.nn.autoencoder import Objective, TiedAutoencoder
from syncline.nn.block_local import BlockLocal2d, BlockLocalDecoder2d
from syncline.nn.contrast import LocalContrastNorm2d
from syncline.nn.cots import cots_network
from syncline.nn.fused import FusedStack, Step, joint_update
from syncline.nn.greedy import Greedy, GreedyRecord
from syncline.nn.images import Whitening, contrast_normalise
from syncline.nn.pooling import L2Pool2d
from syncline.nn.selectivity import Selectivity, selectivity
from syncline.nn.stack import Stack, StackShape, build_stacks
from syncline.nn.stimulus import best_stimulus

__all__ = [
    "BlockLocal2d",
    "BlockLocalDecoder2d",
    "FusedStack",
    "Greedy",
    "GreedyRecord",
    "L2Pool2d",
    "LocalContrastNorm2d",
    "Objective",
    "Selectivity",
    "Stack",
    "StackShape",
    "Step",
    "TiedAutoencoder",
    "Whitening",
    "best_stimulus",
    "build_stacks",
    "contrast_normalise",
    "cots_network",
    "joint_update",
    "selectivity",
]
