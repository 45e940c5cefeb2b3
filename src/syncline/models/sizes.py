"""What the networks of convolutions share: sizes by a width and after a pooling, checks, and a start.

Not responsible for any one network.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from syncline.errors import UsageError

OUTPUT_DEVIATION = 0.01


def check_whole(name: str, value: Any, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name} must be a whole number of at least {least}, got {value!r}")


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise UsageError(f"{name} must be true or false, got {value!r}")


def check_share(name: str, value: Any) -> None:
    """A dropout: the part of the activations that is left out."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise UsageError(f"{name} must be a number from 0 to below 1, got {value!r}")


def check_width(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 16:
        raise UsageError(f"width must be a number above 0 and at most 16, got {value!r}")


def scaled(count: int, width: float, multiple: int = 1) -> int:
    """`count` channels times `width`, to the nearest multiple, at least one of it."""
    return multiple * max(1, round(count * width / multiple))


def pooled(side: int) -> int:
    """The side of a map after pooling by 3×3 at steps of 2, rounded up as Caffe does; below 1 nothing is left."""
    return -(-(side - 3) // 2) + 1


def check_images(network: str, x: Tensor, channels: int, side: int) -> None:
    """A batch of square images of this size, or an error that shows both."""
    expected = (channels, side, side)
    if x.dim() != 4 or tuple(x.shape[1:]) != expected:
        raise UsageError(
            f"{network} was made for images of {expected} and takes a batch (N, {', '.join(map(str, expected))}), "
            f"got {tuple(x.shape)}; give image= and channels= as the data has them"
        )


def start(network: nn.Module, *outputs: nn.Linear) -> None:
    """He et al.'s normal start for layers that ReLUs follow, Caffe's for `outputs`; biases begin at zero.

    The other Gaussians of Caffe's files fit the full size alone: narrow copies would not learn with them.
    """
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    for layer in outputs:
        nn.init.normal_(layer.weight, std=OUTPUT_DEVIATION)
