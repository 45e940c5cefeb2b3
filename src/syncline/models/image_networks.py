"""Networks of images: AlexNet, GoogLeNet, Caffe's cifar10_full, and DistBelief's of filters that are not shared.

AlexNet has nearly all parameters in two fully connected layers: much to communicate for what there is to compute. GoogLeNet
has few, in many small tensors, and much to compute for each. AGD measures both regimes (A7). Legend: N images, C channels,
H = W side of a map.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncline.errors import UsageError
from syncline.nn.argument_checks import COUNT, FLAG, SHARE, Kind, at_least, check
from syncline.nn.block_local import BlockLocal2d, L2Pool2d, LocalContrastNorm2d

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
        nn.init.normal_(layer.weight, std=0.01)


CAFFE = (96, 256, 384, 384, 256)  # channels of the five convolutions


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
        check(COUNT, classes=classes, channels=channels, hidden=hidden, groups=groups)
        check(at_least(8), image=image)  # the smallest of which the pooling leaves something
        check(WIDTH, width=width)
        check(FLAG, norm=norm)
        check(SHARE, dropout=dropout)
        one, two, three, four, five = (scaled(count, width, groups) for count in _five(convolutions))
        self.image, self.channels = image, channels
        kernel, step = (5, 1) if image < 64 else (11, 4)  # of the first layer
        self.conv1 = nn.Conv2d(channels, one, kernel, stride=step, padding=2)
        self.conv2 = nn.Conv2d(one, two, 5, padding=2, groups=groups)
        self.conv3 = nn.Conv2d(two, three, 3, padding=1)
        self.conv4 = nn.Conv2d(three, four, 3, padding=1, groups=groups)
        self.conv5 = nn.Conv2d(four, five, 3, padding=1, groups=groups)
        self.pool = nn.MaxPool2d(3, stride=2, ceil_mode=True)
        self.norm = nn.LocalResponseNorm(5, alpha=1e-4, beta=0.75) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        side = (image + 4 - kernel) // step + 1
        for _ in range(3):
            side = pooled(side)
        self.fc6 = nn.Linear(five * side**2, hidden)
        self.fc7 = nn.Linear(hidden, hidden)
        self.fc8 = nn.Linear(hidden, classes)
        start(self, self.fc8)

    def forward(self, x: Tensor) -> Tensor:
        check_images("AlexNet", x, self.channels, self.image)
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
        return Shape(*(scaled(count, width) for count in self))


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
        narrow, hidden = scaled(128, width), scaled(1024, width)
        self.pool = nn.AdaptiveAvgPool2d(4)
        self.narrow = nn.Conv2d(channels, narrow, 1)
        self.hidden = nn.Linear(narrow * 4 * 4, hidden)
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
        check(at_least(16), image=image)  # the smallest of which four poolings leave something to average
        check(WIDTH, width=width)
        check(FLAG, auxiliary=auxiliary, norm=norm)
        check(SHARE, dropout=dropout)
        self.image, self.channels = image, channels
        first, second = scaled(64, width), scaled(192, width)
        kernel, step = (5, 1) if image < 96 else (7, 2)  # of the first layer
        self.conv1 = nn.Conv2d(channels, first, kernel, stride=step, padding=kernel // 2)
        self.narrow2 = nn.Conv2d(first, first, 1)
        self.conv2 = nn.Conv2d(first, second, 3, padding=1)
        self.pool = nn.MaxPool2d(3, stride=2, ceil_mode=True)
        self.norm = nn.LocalResponseNorm(5, alpha=1e-4, beta=0.75) if norm else nn.Identity()
        self.blocks, self.heads = nn.ModuleDict(), nn.ModuleDict()
        last = second
        for name, full in BLOCKS.items():
            shape = full.scaled(width)
            self.blocks[name] = Inception(last, shape)
            last = shape.total
            if auxiliary and name in HEADS_BEHIND:
                self.heads[name] = AuxiliaryHead(last, classes, width)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(last, classes)
        outputs = [head.output for head in self.heads.values() if isinstance(head, AuxiliaryHead)]
        start(self, self.output, *outputs)

    def forward(self, x: Tensor) -> Any:
        check_images("GoogLeNet", x, self.channels, self.image)
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
        loss = loss + 0.3 * F.cross_entropy(head, labels)
    return loss


class WithinChannelNorm(nn.Module):
    """Local response normalisation within a channel: x / (1 + α/n² Σ x²)^β over a window of n×n.

    As Caffe counts: the border is padded with zeros, and the sum is always divided by n².
    """

    def __init__(self, size: int = 3, alpha: float = 5e-5, beta: float = 0.75) -> None:
        super().__init__()
        if size < 1 or size % 2 == 0:
            raise UsageError(f"the window of WithinChannelNorm must be odd, got {size}")
        self.size, self.alpha, self.beta = size, alpha, beta

    def forward(self, x: Tensor) -> Tensor:
        mean = F.avg_pool2d(x.square(), self.size, stride=1, padding=self.size // 2)
        return x * (1 + self.alpha * mean).pow(-self.beta)

    def extra_repr(self) -> str:
        return f"size={self.size}, alpha={self.alpha}, beta={self.beta}"


class Cifar10Full(nn.Module):
    """Caffe's cifar10_full, the network of Rudra's CIFAR-10 experiments (R10): 89,578 parameters.

    Three 5×5 convolutions of 32, 32, 64 with pooling 3/2 (max, average, average), then one linear layer. It wants pixels of
    0…255 minus the per-pixel mean of the training set, not scaled: `syncline.data.cifar10(folder, pixels="centred")`. Pooling
    rounds up as Caffe does: windows hang over the border, and an average counts only what is inside.
    """

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        check(COUNT, classes=classes)
        self.conv1 = nn.Conv2d(3, 32, 5, padding=2)
        self.conv2 = nn.Conv2d(32, 32, 5, padding=2)
        self.conv3 = nn.Conv2d(32, 64, 5, padding=2)
        self.ip1 = nn.Linear(64 * 4 * 4, classes)
        self.highest = nn.MaxPool2d(3, stride=2, ceil_mode=True)
        self.average = nn.AvgPool2d(3, stride=2, ceil_mode=True)
        self.norm = WithinChannelNorm(3, 5e-5, 0.75)
        for layer in (self.conv1, self.conv2, self.conv3, self.ip1):
            nn.init.normal_(layer.weight, std=1e-4 if layer is self.conv1 else 0.01)
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(F.relu(self.highest(self.conv1(x))))  # (N, 32, 16, 16)
        x = self.norm(self.average(F.relu(self.conv2(x))))  # (N, 32, 8, 8)
        x = self.average(F.relu(self.conv3(x)))  # (N, 64, 4, 4)
        return self.ip1(x.flatten(1))


def cifar10_full_groups(
    model: nn.Module, *, lr: float = 0.001, weight_decay: float = 0.004
) -> list[dict[str, Any]]:
    """Parameter groups with Caffe's multipliers: biases at twice the rate; the last weights decay 250 times as much, their bias not.

    The biases of the convolutions decay like weights, since Caffe's `decay_mult` is 1 unless set.
    """
    named = dict(model.named_parameters())
    if not named.keys() >= {"ip1.weight", "ip1.bias"}:
        raise UsageError(
            f"cifar10_full_groups needs a model with a layer ip1, {type(model).__name__} has none; use cifar10_full"
        )
    last_weight, last_bias = named.pop("ip1.weight"), named.pop("ip1.bias")
    weights = [value for name, value in named.items() if not name.endswith("bias")]
    biases = [value for name, value in named.items() if name.endswith("bias")]
    return [
        {"params": weights, "lr": lr, "weight_decay": weight_decay},
        {"params": biases, "lr": lr * 2.0, "weight_decay": weight_decay},
        {"params": [last_weight], "lr": lr, "weight_decay": weight_decay * 250.0},
        {"params": [last_bias], "lr": lr * 2.0, "weight_decay": 0.0},
    ]


def cifar10_full_sgd(
    model: nn.Module, *, lr: float = 0.001, momentum: float = 0.9, weight_decay: float = 0.004
) -> torch.optim.SGD:
    """SGD over `cifar10_full_groups`, for `optimizer=`."""
    groups = cifar10_full_groups(model, lr=lr, weight_decay=weight_decay)
    return torch.optim.SGD(groups, lr=lr, momentum=momentum)


def locally_connected(
    classes: int = 21_000, *, image: int = 100, channels: int = 3, field: int = 10, depth: int = 15
) -> nn.Sequential:
    """DistBelief's network of images (D8): three stages of filters that are not shared between places, L2 pooling and contrast
    normalisation; one logit per class.

    The paper gives fields, stages and outputs but not the pooling: windows of 5 at steps of 2 here, with which 15 and 36 nodes
    to a field make 78 and 299 million where it has 80 and 330.
    """
    check(COUNT, classes=classes, channels=channels, field=field, depth=depth)
    check(at_least(field), image=image)
    layers: list[nn.Module] = []
    side = image
    for _ in range(3):
        filters = BlockLocal2d(channels, side, field=min(field, side), step=1, block=(1, 1, depth))
        pool = L2Pool2d(5, stride=2)
        side, _ = pool.output_size(*filters.geometry.output_size)
        layers += [filters, pool, LocalContrastNorm2d(5)]
        channels = depth
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(depth * side * side, classes))
