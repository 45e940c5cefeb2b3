"""GoogLeNet (Szegedy et al. 2015): nine inception blocks, at any width and image size.

Few parameters, in many small tensors, and much to compute for each: the other regime that AGD measures (A7).
No batch statistics, as in Caffe's bvlc_googlenet. Legend: N images, C channels, H = W side of a map.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncline.models import sizes
from syncline.nn.file_arguments import COUNT, FLAG, SHARE, at_least, check

SMALL = 96  # images below this side get a first layer of 5×5 at step 1 instead of 7×7 at step 2
LEAST = 16  # the smallest image of which four poolings leave something to average
AUXILIARY_WEIGHT = 0.3  # of each auxiliary head in the loss
HEAD_SIDE, HEAD_CHANNELS, HEAD_HIDDEN = 4, 128, 1024  # of an auxiliary head


class Shape(NamedTuple):
    """Channels of an inception block: 1×1; 3×3 and 5×5 with the 1×1 that narrows each; 1×1 behind the pooling."""

    one: int
    three_narrow: int
    three: int
    five_narrow: int
    five: int
    pooled: int

    @property
    def total(self) -> int:
        return self.one + self.three + self.five + self.pooled

    def scaled(self, width: float) -> Shape:
        return Shape(*(sizes.scaled(count, width) for count in self))


BLOCKS: dict[str, Shape] = {
    "3a": Shape(64, 96, 128, 16, 32, 32),
    "3b": Shape(128, 128, 192, 32, 96, 64),
    "4a": Shape(192, 96, 208, 16, 48, 64),
    "4b": Shape(160, 112, 224, 24, 64, 64),
    "4c": Shape(128, 128, 256, 24, 64, 64),
    "4d": Shape(112, 144, 288, 32, 64, 64),
    "4e": Shape(256, 160, 320, 32, 128, 128),
    "5a": Shape(256, 160, 320, 32, 128, 128),
    "5b": Shape(384, 192, 384, 48, 128, 128),
}
BEFORE_POOLING = ("3b", "4e")  # blocks that a pooling follows
HEADS_BEHIND = ("4a", "4d")  # blocks whose maps the auxiliary heads read


class Inception(nn.Module):
    """Four ways through a map, side by side, joined by channels."""

    def __init__(self, channels: int, shape: Shape) -> None:
        super().__init__()
        self.one = nn.Conv2d(channels, shape.one, 1)
        self.three_narrow = nn.Conv2d(channels, shape.three_narrow, 1)
        self.three = nn.Conv2d(shape.three_narrow, shape.three, 3, padding=1)
        self.five_narrow = nn.Conv2d(channels, shape.five_narrow, 1)
        self.five = nn.Conv2d(shape.five_narrow, shape.five, 5, padding=2)
        self.pool = nn.MaxPool2d(3, stride=1, padding=1)
        self.pooled = nn.Conv2d(channels, shape.pooled, 1)

    def forward(self, x: Tensor) -> Tensor:
        ways = (
            self.one(x),
            self.three(F.relu(self.three_narrow(x))),
            self.five(F.relu(self.five_narrow(x))),
            self.pooled(self.pool(x)),
        )
        return F.relu(torch.cat(ways, 1))  # (N, total, H, H)


class AuxiliaryHead(nn.Module):
    """A classifier on the map of an inner block, for training alone."""

    def __init__(self, channels: int, classes: int, width: float) -> None:
        super().__init__()
        narrow, hidden = sizes.scaled(HEAD_CHANNELS, width), sizes.scaled(HEAD_HIDDEN, width)
        self.pool = nn.AdaptiveAvgPool2d(HEAD_SIDE)
        self.narrow = nn.Conv2d(channels, narrow, 1)
        self.hidden = nn.Linear(narrow * HEAD_SIDE**2, hidden)
        self.dropout = nn.Dropout(0.7)
        self.output = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.narrow(self.pool(x))).flatten(1)
        return self.output(self.dropout(F.relu(self.hidden(x))))


class GoogLeNet(nn.Module):
    """A stem of three convolutions, nine inception blocks with poolings between, an average, one output per class.

    As it stands: 6,998,552 parameters, 13,378,280 with the two auxiliary heads. AGD speaks of "approximately 4
    million"; no usual count gives that. `width` scales all channels.

    With `auxiliary=True` a training model returns (output, first head, second head), for `auxiliary_loss`;
    otherwise, and always in evaluation, the output alone.
    """

    def __init__(
        self,
        classes: int = 1000,
        *,
        image: int = 224,
        channels: int = 3,
        width: float = 1.0,
        auxiliary: bool = False,
        norm: bool = True,
        dropout: float = 0.4,
    ) -> None:
        super().__init__()
        check(COUNT, classes=classes, channels=channels)
        check(at_least(LEAST), image=image)
        check(sizes.WIDTH, width=width)
        check(FLAG, auxiliary=auxiliary, norm=norm)
        check(SHARE, dropout=dropout)
        self.image, self.channels = image, channels
        first, second = sizes.scaled(64, width), sizes.scaled(192, width)
        if image < SMALL:
            self.conv1 = nn.Conv2d(channels, first, 5, padding=2)
        else:
            self.conv1 = nn.Conv2d(channels, first, 7, stride=2, padding=3)
        self.narrow2 = nn.Conv2d(first, first, 1)
        self.conv2 = nn.Conv2d(first, second, 3, padding=1)
        self.pool = nn.MaxPool2d(3, stride=2, ceil_mode=True)
        self.norm = nn.LocalResponseNorm(5, alpha=1e-4, beta=0.75) if norm else nn.Identity()
        self.blocks, self.heads = nn.ModuleDict(), nn.ModuleDict()
        self._add_blocks(second, classes, width, auxiliary)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(BLOCKS["5b"].scaled(width).total, classes)
        outputs = [head.output for head in self.heads.values() if isinstance(head, AuxiliaryHead)]
        sizes.start(self, self.output, *outputs)

    def _add_blocks(self, channels: int, classes: int, width: float, auxiliary: bool) -> None:
        for name, full in BLOCKS.items():
            shape = full.scaled(width)
            self.blocks[name] = Inception(channels, shape)
            channels = shape.total
            if auxiliary and name in HEADS_BEHIND:
                self.heads[name] = AuxiliaryHead(channels, classes, width)

    def forward(self, x: Tensor) -> Any:
        sizes.check_images("GoogLeNet", x, self.channels, self.image)
        x = self.norm(self.pool(F.relu(self.conv1(x))))  # (N, 64, 56, 56) at full size
        x = F.relu(self.conv2(F.relu(self.narrow2(x))))
        x = self.pool(self.norm(x))  # (N, 192, 28, 28)
        heads = []
        for name, block in self.blocks.items():
            x = block(x)
            if self.training and name in self.heads:
                heads.append(self.heads[name](x))
            if name in BEFORE_POOLING:
                x = self.pool(x)  # (N, 480, 14, 14), then (N, 832, 7, 7)
        output = self.output(self.dropout(x.mean((2, 3))))
        return (output, *heads) if heads else output


def auxiliary_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross entropy of the output, and 0.3 times that of each auxiliary head: for `objective=`."""
    inputs, labels = batch
    found = model(inputs)
    output, *heads = found if isinstance(found, tuple) else (found,)
    loss = F.cross_entropy(output, labels)
    for head in heads:
        loss = loss + AUXILIARY_WEIGHT * F.cross_entropy(head, labels)
    return loss
