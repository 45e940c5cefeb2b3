"""What the networks of convolutions share: sizes by a width and after a pooling, a check of images, and a start.

Not responsible for any one network.
"""

from __future__ import annotations

from torch import Tensor, nn

from syncline.errors import UsageError
from syncline.nn.file_arguments import Kind

OUTPUT_DEVIATION = 0.01
WIDTH = Kind("a number above 0 and at most 16", lambda value: type(value) in (int, float) and 0 < value <= 16)


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
