"""AlexNet in one tower (Krizhevsky, Sutskever, Hinton 2012), as Caffe has it, at any width and image size.

Nearly all parameters are in two fully connected layers: much to communicate for what there is to compute, which
is why AGD measures it (A7). Legend: N images, C channels, H = W side of a map.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from syncline.errors import UsageError
from syncline.models import sizes
from syncline.nn.file_arguments import COUNT, FLAG, SHARE, at_least, check

CAFFE = (96, 256, 384, 384, 256)  # channels of the five convolutions
SMALL = 64  # images below this side get a first layer of 5×5 at step 1 instead of 11×11 at step 4
LEAST = 8  # the smallest image of which the pooling leaves something


class AlexNet(nn.Module):
    """Five convolutions with three poolings, two hidden layers, one output per class; ReLU throughout.

    As it stands it is Caffe's bvlc_alexnet: 60,965,224 parameters, the second, fourth and fifth convolution in two
    groups, local response normalisation after the first two. `groups=1` joins the groups (62,378,344);
    `convolutions=(64, 192, 384, 256, 256), groups=1, norm=False` is the other usual one-tower net (61,100,840).
    `width` scales the convolutions, `hidden` is the size of the two hidden layers.
    """

    def __init__(
        self,
        classes: int = 1000,
        *,
        image: int = 224,
        channels: int = 3,
        width: float = 1.0,
        hidden: int = 4096,
        convolutions: Sequence[int] = CAFFE,
        groups: int = 2,
        norm: bool = True,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        check(COUNT, classes=classes, channels=channels, hidden=hidden)
        check(at_least(LEAST), image=image)
        check(COUNT, groups=groups)
        check(sizes.WIDTH, width=width)
        check(FLAG, norm=norm)
        check(SHARE, dropout=dropout)
        one, two, three, four, five = (sizes.scaled(count, width, groups) for count in _five(convolutions))
        self.image, self.channels = image, channels
        if image < SMALL:
            self.conv1 = nn.Conv2d(channels, one, 5, padding=2)
        else:
            self.conv1 = nn.Conv2d(channels, one, 11, stride=4, padding=2)
        self.conv2 = nn.Conv2d(one, two, 5, padding=2, groups=groups)
        self.conv3 = nn.Conv2d(two, three, 3, padding=1)
        self.conv4 = nn.Conv2d(three, four, 3, padding=1, groups=groups)
        self.conv5 = nn.Conv2d(four, five, 3, padding=1, groups=groups)
        self.pool = nn.MaxPool2d(3, stride=2, ceil_mode=True)
        self.norm = nn.LocalResponseNorm(5, alpha=1e-4, beta=0.75) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.fc6 = nn.Linear(five * _last_side(image) ** 2, hidden)
        self.fc7 = nn.Linear(hidden, hidden)
        self.fc8 = nn.Linear(hidden, classes)
        sizes.start(self, self.fc8)

    def forward(self, x: Tensor) -> Tensor:
        sizes.check_images("AlexNet", x, self.channels, self.image)
        x = self.pool(self.norm(F.relu(self.conv1(x))))  # (N, 96, 27, 27) at full size
        x = self.pool(self.norm(F.relu(self.conv2(x))))  # (N, 256, 13, 13)
        x = F.relu(self.conv4(F.relu(self.conv3(x))))  # (N, 384, 13, 13)
        x = self.pool(F.relu(self.conv5(x)))  # (N, 256, 6, 6)
        x = self.dropout(F.relu(self.fc6(x.flatten(1))))
        x = self.dropout(F.relu(self.fc7(x)))
        return self.fc8(x)


def _five(convolutions: Sequence[int]) -> Sequence[int]:
    if not isinstance(convolutions, list | tuple) or len(convolutions) != len(CAFFE):
        raise UsageError(
            f"convolutions must be the channels of five layers, as {list(CAFFE)}, got {convolutions!r}"
        )
    for count in convolutions:
        check(COUNT, **{"each of convolutions": count})
    return convolutions


def _last_side(image: int) -> int:
    """H after the convolutions: three poolings, the first layer at step 4 for large images."""
    side = image if image < SMALL else (image + 4 - 11) // 4 + 1
    for _ in range(3):
        side = sizes.pooled(side)
    return side
