"""The two networks of DistBelief (D8): speech, fully connected, 42 M parameters; images, locally connected.

The paper gives fields, stages and outputs of the image network but not its pooling: windows of 5 at steps of 2 here, with
which 15 and 36 nodes to a field make 78 and 299 million where it has 80 and 330.
"""

from __future__ import annotations

from torch import nn

from syncline.models.mlp import mlp
from syncline.nn.block_local import BlockLocal2d
from syncline.nn.file_arguments import COUNT, at_least, check
from syncline.nn.stack import L2Pool2d, LocalContrastNorm2d

STAGES, WINDOW, POOL_STEP = 3, 5, 2


def speech(
    *, frames: int = 11, features: int = 40, hidden: int = 2560, depth: int = 4, states: int = 8192
) -> nn.Sequential:
    """Acoustic states of the middle one of some frames: (N, frames, features) → (N, states)."""
    check(COUNT, frames=frames, features=features, depth=depth)
    return mlp([frames * features, *[hidden] * depth, states], "sigmoid")


def locally_connected(
    classes: int = 21_000, *, image: int = 100, channels: int = 3, field: int = 10, depth: int = 15
) -> nn.Sequential:
    """Three stages of filters that are not shared between places, L2 pooling and contrast normalisation; one logit per class."""
    check(COUNT, classes=classes, channels=channels, field=field, depth=depth)
    check(at_least(field), image=image)
    layers: list[nn.Module] = []
    side = image
    for _ in range(STAGES):
        filters = BlockLocal2d(channels, side, field=min(field, side), step=1, block=(1, 1, depth))
        pool = L2Pool2d(WINDOW, stride=POOL_STEP)
        side, _ = pool.output_size(*filters.geometry.output_size)
        layers += [filters, pool, LocalContrastNorm2d(WINDOW)]
        channels = depth
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(depth * side * side, classes))
