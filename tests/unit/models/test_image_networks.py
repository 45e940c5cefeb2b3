"""AlexNet, GoogLeNet and Caffe's network of CIFAR-10: counts of the literature, shapes at every size, gradients everywhere, refusals."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncline.errors import UsageError
from syncline.learn.session import make_optimizer
from syncline.models import (
    MODELS,
    AlexNet,
    Cifar10Full,
    GoogLeNet,
    auxiliary_loss,
    cifar10_full_groups,
    cifar10_full_sgd,
)
from syncline.models.image_networks import WithinChannelNorm, pooled, scaled

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


# -- Caffe's, against direct formulas ------------------------------------------------------------------------


def window_sum(x: Tensor, row: int, column: int) -> Tensor:
    """Sum over the 3×3 window around a pixel, zeros outside."""
    return x[..., max(0, row - 1) : row + 2, max(0, column - 1) : column + 2].sum((-2, -1))


def test_within_channel_norm_against_its_formula() -> None:
    torch.manual_seed(0)
    x = 100 * torch.randn(2, 3, 5, 4, dtype=torch.float64)
    expected = torch.empty_like(x)
    for row in range(5):
        for column in range(4):
            total = window_sum(x.square(), row, column)
            expected[..., row, column] = x[..., row, column] / (1 + 5e-5 / 9 * total) ** 0.75
    torch.testing.assert_close(WithinChannelNorm()(x), expected)
    with pytest.raises(UsageError, match="must be odd, got 4"):
        WithinChannelNorm(4)


def caffe_pool(x: Tensor, *, highest: bool) -> Tensor:
    """Windows of 3 at steps of 2, as many as ⌈(n − 3)/2⌉ + 1, cut at the border."""
    size = x.shape[-1]
    count = -(-(size - 3) // 2) + 1
    out = x.new_empty(*x.shape[:-2], count, count)
    for row in range(count):
        for column in range(count):
            window = x[..., 2 * row : 2 * row + 3, 2 * column : 2 * column + 3]
            out[..., row, column] = window.amax((-2, -1)) if highest else window.mean((-2, -1))
    return out


@pytest.mark.parametrize("size, expected", [(32, 16), (16, 8), (8, 4)])
def test_pooling_rounds_up_as_in_caffe(size: int, expected: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, size, size, dtype=torch.float64)
    model = Cifar10Full()
    for layer, highest in ((model.highest, True), (model.average, False)):
        out = layer(x)
        assert out.shape[-2:] == (expected, expected)
        torch.testing.assert_close(out, caffe_pool(x, highest=highest))


def test_cifar10_full_counts_and_starts() -> None:
    torch.manual_seed(0)
    model = Cifar10Full()
    assert sum(parameter.numel() for parameter in model.parameters()) == 89_578
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    for name, deviation in (("conv1", 1e-4), ("conv2", 0.01), ("conv3", 0.01), ("ip1", 0.01)):
        layer = model.get_submodule(name)
        assert layer.weight.std().item() == pytest.approx(deviation, rel=0.1)
        assert layer.bias.count_nonzero() == 0
    assert Cifar10Full(classes=100)(torch.zeros(1, 3, 32, 32)).shape == (1, 100)


def test_cifar10_full_is_the_network_of_the_paper() -> None:
    """The whole forward pass, written out."""
    torch.manual_seed(1)
    model = Cifar10Full().double()
    x = 60 * torch.randn(2, 3, 32, 32, dtype=torch.float64)
    norm = WithinChannelNorm()
    h = norm(caffe_pool(model.conv1(x), highest=True).clamp(min=0))
    h = norm(caffe_pool(model.conv2(h).clamp(min=0), highest=False))
    h = caffe_pool(model.conv3(h).clamp(min=0), highest=False)
    torch.testing.assert_close(model(x), model.ip1(h.flatten(1)))


def test_groups_have_caffes_multipliers() -> None:
    model = Cifar10Full()
    names = {id(value): name for name, value in model.named_parameters()}
    groups = cifar10_full_groups(model, lr=0.001)
    found = {
        names[id(value)]: (group["lr"], pytest.approx(group["weight_decay"]))
        for group in groups
        for value in group["params"]
    }
    convolutions = [f"conv{number}" for number in (1, 2, 3)]
    assert found == {
        **{f"{name}.weight": (0.001, 0.004) for name in convolutions},
        **{f"{name}.bias": (0.002, 0.004) for name in convolutions},
        "ip1.weight": (0.001, 1.0),
        "ip1.bias": (0.002, 0.0),
    }
    with pytest.raises(UsageError, match="needs a model with a layer ip1, Linear has none"):
        cifar10_full_groups(nn.Linear(1, 1))


def test_the_optimizer_gets_the_model() -> None:
    made = make_optimizer(Cifar10Full(), partial(cifar10_full_sgd, lr=0.01))
    assert [group["lr"] for group in made.param_groups] == [0.01, 0.02, 0.01, 0.02]
    assert all(group["momentum"] == 0.9 for group in made.param_groups)
