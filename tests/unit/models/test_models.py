"""The networks: their shapes, counts, starts, and Caffe's arithmetic against direct formulas."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from syncline.errors import UsageError
from syncline.learn.session import make_optimizer
from syncline.models import MODELS, Cifar10Full, cifar10_full_groups, cifar10_full_sgd, mlp
from syncline.models.image_networks import WithinChannelNorm


def test_mlp() -> None:
    model = mlp([64, 32, 16, 10], activation="tanh")
    assert [type(layer).__name__ for layer in model] == [
        "Flatten",
        "Linear",
        "Tanh",
        "Linear",
        "Tanh",
        "Linear",
    ]
    assert model(torch.zeros(5, 1, 8, 8)).shape == (5, 10)
    assert mlp([3, 2], bias=False)[1].bias is None
    images = ["mlp", "cifar10_full", "alexnet", "googlenet", "speech", "locally_connected", "recurrent"]
    assert list(MODELS) == [*images, "autoencoder", "rbm", "dbn", "dbm", "crbm"]


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"sizes": [3]}, r"at least two sizes"),
        ({"sizes": "64-10"}, r"at least two sizes"),
        ({"sizes": [3, 0]}, r"whole numbers of at least 1, got 0 in \[3, 0\]"),
        ({"sizes": [3, 2.0]}, r"got 2.0"),
        ({"sizes": [3, True]}, r"got True"),
        ({"sizes": [3, 2], "activation": "rellu"}, r"got 'rellu', did you mean 'relu'"),
        ({"sizes": [3, 2], "activation": ["relu"]}, r"activation must be one of"),
        ({"sizes": [3, 2], "bias": 1}, r"bias must be true or false"),
    ],
)
def test_mlp_refuses(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        mlp(**arguments)


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
