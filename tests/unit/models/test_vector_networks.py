"""Perceptrons, autoencoders, recurrent networks, DistBelief's networks: shapes, counts, what makes them what they are, refusals."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from syncline.errors import UsageError
from syncline.models import MODELS, Autoencoder, Recurrent, locally_connected, mlp, reconstruction, speech


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_counts_of_distbelief() -> None:
    with torch.device("meta"):
        assert count(speech()) == 41_777_152  # "approximately 42 million"
        assert count(locally_connected()) == 78_213_000  # "80 million"
        assert count(locally_connected(depth=36)) == 298_738_200  # "330 million"


def test_small_copies_of_them_run() -> None:
    assert speech(frames=3, features=4, hidden=8, states=5)(torch.rand(2, 3, 4)).shape == (2, 5)
    small = locally_connected(5, image=24, channels=1, field=5, depth=2)
    assert small(torch.rand(2, 1, 24, 24)).shape == (2, 5)


@pytest.mark.parametrize("cell", ["rnn", "lstm", "gru"])
def test_recurrent_models(cell: str) -> None:
    assert Recurrent(3, 5, 2, cell=cell)(torch.rand(4, 7, 3)).shape == (4, 2)
    words = Recurrent(3, 5, 2, cell=cell, tokens=11, sequences=True, depth=2)
    assert words(torch.randint(11, (4, 7))).shape == (4, 2, 7)


def test_a_denoising_autoencoder_damages_its_input_in_training_alone() -> None:
    torch.manual_seed(0)
    model = Autoencoder([20, 5], noise=0.5)
    x = torch.rand(3, 20)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


def test_a_sparse_autoencoder_pays_for_units_that_are_on_too_often() -> None:
    torch.manual_seed(0)
    data = torch.rand(64, 12).round()
    means = []
    for weight in (0.0, 1.0):
        torch.manual_seed(1)
        model = Autoencoder([12, 8], sparsity=0.05, sparsity_weight=weight)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        for _ in range(100):
            optimizer.zero_grad()
            reconstruction(model, (data, None), loss="bce_with_logits").backward()
            optimizer.step()
        means.append(float(model.encoder(data).detach().mean()))
    assert means[1] < 0.12 < means[0]


def test_tied_weights_are_one_tensor() -> None:
    model = Autoencoder([6, 4, 2], tied=True)
    assert count(model) == 6 * 4 + 4 * 2 + 4 + 2 + 4 + 6
    x = torch.rand(3, 6)
    code = model.encoder(x)
    hidden = torch.sigmoid(F.linear(code, model.encoder[3].weight.t(), model.decoder[1].bias))
    assert torch.allclose(model(x), F.linear(hidden, model.encoder[1].weight.t(), model.decoder[3].bias))


def test_reconstruction_is_an_objective_of_any_model() -> None:
    model, x = nn.Sequential(nn.Flatten(), nn.Linear(4, 4)), torch.rand(3, 2, 2)
    assert torch.equal(reconstruction(model, x), F.mse_loss(model(x), x.flatten(1)))


@pytest.mark.parametrize(
    "make, words",
    [
        (partial(Autoencoder, [4, 2], noise=1.0), "noise must be a number from 0 to below 1"),
        (partial(Autoencoder, [4, 2], "relu", sparsity=0.1), "sparsity is a number between 0 and 1, of sigmoid units"),
        (partial(Recurrent, 3, 5, 2, cell="lstn"), "cell must be one of rnn, lstm, gru, got 'lstn'"),
        (partial(Recurrent, 0, 5, 2), "inputs must be a whole number of at least 1, got 0"),
        (partial(locally_connected, image=4), "image must be a whole number of at least 10, got 4"),
        (partial(reconstruction, nn.Identity(), {"x": 1}), "reconstruction takes batches that are a tensor or begin with one, got dict"),
    ],
)  # fmt: skip
def test_refusals(make: object, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make()  # type: ignore[operator]


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
