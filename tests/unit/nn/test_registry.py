"""What files call by name: layer types of one's own and of packages, initialisers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import syncline as sl
from syncline.nn import Net
from syncline.nn.registry import INITIALISERS, TYPES, find_type, initialise, layer, wrong_initialiser
from tests.unit.nn.layer_lists import classifier, data


def test_own_layer_types() -> None:
    @sl.layer("test_scale")
    class Scale(nn.Module):
        def __init__(self, shape: tuple[int, ...], factor: float = 1.0) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.full(shape, factor))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.factor

    @sl.layer("test_mean", loss=True)
    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean()

    try:
        net = Net(
            [
                data(2, 3),
                {"name": "scale", "type": "test_scale", "factor": 3.0},
                {"name": "plain", "type": "test_mean"},
            ]
        )
        assert net.scale.factor.shape == (2, 3)
        assert net.objective(torch.ones(2, 2, 3)).item() == 3.0
    finally:
        del TYPES["test_scale"], TYPES["test_mean"]


def test_own_types_of_installed_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "entry_layer.py").write_text("from torch import nn\n\nclass Same(nn.Identity):\n    pass\n")
    info = tmp_path / "entry_layer-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: entry-layer\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[syncline.layers]\nentry_same = entry_layer:Same\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        net = Net([data(3), {"name": "same", "type": "entry_same"}])
        assert type(net.same).__name__ == "Same"
    finally:
        TYPES.pop("entry_same", None)


def test_built_in_names_are_taken() -> None:
    with pytest.raises(sl.UsageError, match="'dense' is a built-in layer type"):
        sl.layer("dense")


@pytest.mark.parametrize("name", INITIALISERS)
def test_initialisers_by_name(name: str) -> None:
    given: Any = {"name": name, "value": 0.25} if name == "constant" else name
    net = Net(classifier(init=given))
    before = Net(classifier())
    assert not torch.equal(net.fc2.weight, before.fc2.weight)
    if name == "constant":
        assert net.fc2.weight.unique().tolist() == [0.25] and net.fc2.bias.abs().sum() > 0  # weights alone


def test_initialisers_of_single_parameters() -> None:
    net = Net(classifier(init={"bias": {"name": "constant", "value": 1.0}, "weight": "orthogonal"}))
    assert net.fc2.bias.tolist() == [1.0, 1.0, 1.0]
    assert torch.allclose(net.fc2.weight @ net.fc2.weight.t(), torch.eye(3), atol=1e-5)


@pytest.mark.parametrize(
    "given, words",
    [
        ("gaussian", []),
        ({"name": "gaussian", "std": 0.1}, []),
        ({"name": "gaussian", "std": 0.0}, ["gaussian: std: expected a finite number above 0, got 0.0"]),
        ("constant", ["constant: lacks its argument 'value'"]),
        ({"std": 1.0}, ["expected the name of an initialiser, or a table with it, got {'std': 1.0}"]),
    ],
)
def test_an_initialiser_is_checked_before_anything_is_made(given: Any, words: list[str]) -> None:
    assert [*wrong_initialiser(given)] == words


def test_an_initialiser_gets_its_arguments() -> None:
    values = nn.Parameter(torch.zeros(1000))
    initialise(values, {"name": "uniform", "low": 2.0, "high": 3.0})
    assert 2.0 <= values.min() < 2.1 and 2.9 < values.max() < 3.0 and values.requires_grad


@pytest.mark.parametrize(
    "name, words",
    [
        ("dens", "no layer type is called 'dens', did you mean 'dense'"),
        (
            "own:Layer",
            r"'own:Layer' is not registered here; import it and give it to sl.layer\('own:Layer'\)",
        ),
        (3, "no layer type is called 3; there are: "),
    ],
)
def test_a_type_that_is_not_there_is_refused_with_what_there_is(name: Any, words: str) -> None:
    with pytest.raises(sl.UsageError, match=words):
        find_type(name)


def test_what_a_type_wants_first_is_said_by_its_signature() -> None:
    assert [find_type(name).wants for name in ("dense", "concat", "relu")] == ["shape", "shapes", ""]
    with pytest.raises(sl.UsageError, match="a function that gives a module"):
        layer("test_made")(nn.ReLU())  # type: ignore[type-var]
