"""AlexNet and GoogLeNet: counts of the literature, shapes at every size, gradients everywhere, refusals."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from syncline.errors import UsageError
from syncline.models import MODELS, AlexNet, GoogLeNet, auxiliary_loss
from syncline.models.image_networks import pooled, scaled

SMALL_ALEX = {"classes": 10, "width": 0.125, "hidden": 64, "image": 32}
SMALL_GOOGLE = {"classes": 10, "width": 0.125, "image": 32}


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def counted(make: Callable[..., nn.Module], **arguments: object) -> int:
    with torch.device("meta"):
        return count(make(**arguments))


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ({}, 60_965_224),  # Caffe's bvlc_alexnet
        ({"groups": 1}, 62_378_344),
        ({"groups": 1, "convolutions": (64, 192, 384, 256, 256), "norm": False}, 61_100_840),
    ],
)
def test_alexnet_counts(arguments: dict[str, object], expected: int) -> None:
    assert counted(AlexNet, **arguments) == expected


@pytest.mark.parametrize("auxiliary, expected", [(False, 6_998_552), (True, 13_378_280)])
def test_googlenet_counts(auxiliary: bool, expected: int) -> None:
    assert counted(GoogLeNet, auxiliary=auxiliary) == expected


def test_two_regimes() -> None:
    """AlexNet: most parameters in fully connected layers. GoogLeNet: few, in many tensors."""
    alex, google = AlexNet(**SMALL_ALEX | {"hidden": 512}), GoogLeNet(**SMALL_GOOGLE)
    assert sum(count(layer) for layer in (alex.fc6, alex.fc7, alex.fc8)) > 0.9 * count(alex)
    assert count(google) < count(alex) / 3
    assert len(list(google.parameters())) == 116 and len(list(alex.parameters())) == 16


@pytest.mark.parametrize("image", [8, 9, 11, 28, 32, 63, 64, 65, 100])
def test_alexnet_at_many_sizes(image: int) -> None:
    model = AlexNet(**SMALL_ALEX | {"image": image})
    assert model(torch.zeros(2, 3, image, image)).shape == (2, 10)


@pytest.mark.parametrize("image", [16, 17, 28, 32, 95, 96, 97])
def test_googlenet_at_many_sizes(image: int) -> None:
    model = GoogLeNet(**SMALL_GOOGLE | {"image": image, "channels": 1})
    assert model(torch.zeros(2, 1, image, image)).shape == (2, 10)


def test_maps_at_full_size() -> None:
    """Sides 27, 13, 6 and 28, 14, 7, as in the papers."""
    with torch.device("meta"):
        alex, google = AlexNet(), GoogLeNet()
        x = torch.zeros(1, 3, 224, 224)
        assert alex.pool(alex.conv1(x)).shape == (1, 96, 27, 27)
        assert alex.fc6.in_features == 256 * 6 * 6
        seen: dict[str, tuple[int, ...]] = {}
        for name, block in google.blocks.items():
            block.register_forward_hook(
                lambda _module, _inputs, out, name=name: seen.update({name: out.shape})
            )
        assert google(x).shape == (1, 1000)
    assert (seen["3b"], seen["4e"], seen["5b"]) == (
        (1, 480, 28, 28),
        (1, 832, 14, 14),
        (1, 1024, 7, 7),
    )


@pytest.mark.parametrize(
    "make",
    [
        partial(AlexNet, **SMALL_ALEX),
        partial(AlexNet, **SMALL_ALEX | {"groups": 1, "norm": False}),
        partial(GoogLeNet, **SMALL_GOOGLE),
    ],
)
def test_gradients_reach_every_parameter(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)  # before the model: a branch of few units may be dead from the start
    model = make()
    F.cross_entropy(model(torch.randn(8, 3, 32, 32)), torch.arange(8)).backward()
    without = [name for name, value in model.named_parameters() if not value.grad.abs().sum() > 0]
    assert not without


def test_auxiliary_heads_learn_and_are_gone_in_evaluation() -> None:
    torch.manual_seed(0)
    model = GoogLeNet(**SMALL_GOOGLE, auxiliary=True)
    batch = torch.randn(8, 3, 32, 32), torch.arange(8)
    assert [tuple(out.shape) for out in model(batch[0])] == [(8, 10)] * 3
    loss = auxiliary_loss(model, batch)
    loss.backward()
    assert all(value.grad.abs().sum() > 0 for value in model.heads.parameters())
    model.eval()
    assert model(batch[0]).shape == (8, 10)
    assert torch.equal(auxiliary_loss(model, batch), F.cross_entropy(model(batch[0]), batch[1]))


@pytest.mark.parametrize("name, arguments", [("alexnet", SMALL_ALEX), ("googlenet", SMALL_GOOGLE)])
def test_they_learn(name: str, arguments: dict[str, object]) -> None:
    """One batch by heart: the start lets the signal through at a small width."""
    torch.manual_seed(0)
    model = MODELS[name](**arguments, dropout=0.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    images, labels = torch.randn(16, 3, 32, 32), torch.arange(16) % 10
    for _ in range(40):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.5


@pytest.mark.parametrize(
    "make, arguments, words",
    [
        (AlexNet, {"image": 7}, r"image must be a whole number of at least 8, got 7"),
        (AlexNet, {"convolutions": (1, 2)}, r"channels of five layers, as \[96, .*got \(1, 2\)"),
        (AlexNet, {"convolutions": (1, 2, 3, 4, 0)}, r"each of convolutions must .* got 0"),
        (AlexNet, {"hidden": True}, r"hidden must be a whole number of at least 1, got True"),
        (AlexNet, {"groups": 0}, r"groups must be .* got 0"),
        (AlexNet, {"dropout": 1.0}, r"dropout must be a number from 0 to below 1, got 1.0"),
        (AlexNet, {"norm": 1}, r"norm must be true or false, got 1"),
        (GoogLeNet, {"image": 15}, r"image must be a whole number of at least 16, got 15"),
        (GoogLeNet, {"width": 0}, r"width must be a number above 0 and at most 16, got 0"),
        (GoogLeNet, {"classes": 0}, r"classes must be .* got 0"),
        (GoogLeNet, {"auxiliary": None}, r"auxiliary must be true or false, got None"),
    ],
)
def test_refusals(make: Callable[..., nn.Module], arguments: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make(**arguments)


@pytest.mark.parametrize("shape", [(2, 3, 33, 33), (2, 1, 32, 32), (3, 32, 32), (2, 3, 32, 31)])
@pytest.mark.parametrize("make, arguments", [(AlexNet, SMALL_ALEX), (GoogLeNet, SMALL_GOOGLE)])
def test_images_of_another_size_are_refused(
    make: Callable[..., nn.Module], arguments: dict[str, object], shape: tuple[int, ...]
) -> None:
    model = make(**arguments)
    with pytest.raises(
        UsageError, match=r"made for images of \(3, 32, 32\) .* got \(.*give image= and channels="
    ):
        model(torch.zeros(shape))


def test_sizes() -> None:
    for side in range(2, 40):
        assert pooled(side) == F.max_pool2d(torch.zeros(1, 1, side, side), 3, 2, ceil_mode=True).shape[-1]
    assert pooled(1) < 1
    assert [scaled(count, 0.1) for count in (4, 16, 96)] == [1, 2, 10]
    assert scaled(96, 0.1, 2) == 10 and scaled(10, 0.1, 2) == 2
