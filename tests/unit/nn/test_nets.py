"""Nets as data: every built-in layer type, sizes that follow, graphs, sharing, multipliers, initialisers, files."""

from __future__ import annotations

import copy
import json
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

import syncline as sl
from syncline.nn import Net, by_layer, load_net, save_net
from syncline.nn.registry import INITIALISERS, TYPES
from syncline.report.net_graph import net_graph

Record = dict[str, Any]

# type -> (shape that comes in, arguments, shape that goes out, parameters)
SINGLE: dict[str, tuple[tuple[int, ...], Record, tuple[int, ...], int]] = {
    "dense": ((3, 4), {"units": 5}, (5,), 65),
    "convolution": ((3, 8, 8), {"channels": 4, "kernel": 3, "padding": 1, "stride": 2}, (4, 4, 4), 112),
    "block_local": ((1, 8, 8), {"field": 3, "block": [2, 2, 4]}, (4, 12, 12), 5184),
    "batch_norm": ((3, 4, 4), {}, (3, 4, 4), 6),
    "layer_norm": ((6,), {}, (6,), 12),
    "rnn": ((5, 3), {"units": 4}, (4,), 36),
    "lstm": ((5, 3), {"units": 4, "bidirectional": True}, (8,), 288),
    "gru": ((5, 3), {"units": 4, "sequences": True}, (5, 4), 108),
    "rbm": ((2, 3), {"units": 4}, (4,), 34),
    "crbm": ((4, 3), {"units": 5}, (5,), 15 + 27 + 45 + 8),
    "rbm_down": ((4,), {"units": 6}, (6,), 30),
    "pooling": ((2, 8, 8), {"kernel": 3, "stride": 2, "ceil": True}, (2, 4, 4), 0),
    "l2_pooling": ((2, 8, 8), {"window": 3}, (2, 8, 8), 0),
    "contrast_norm": ((2, 8, 8), {}, (2, 8, 8), 0),
    "lrn": ((6, 4, 4), {}, (6, 4, 4), 0),
    "dropout": ((4,), {"p": 0.2}, (4,), 0),
    "noise": ((4,), {"kind": "gaussian"}, (4,), 0),
    "relu": ((4,), {}, (4,), 0),
    "sigmoid": ((4,), {}, (4,), 0),
    "tanh": ((4,), {}, (4,), 0),
    "gelu": ((4,), {}, (4,), 0),
    "silu": ((4,), {}, (4,), 0),
    "softplus": ((4,), {}, (4,), 0),
    "leaky_relu": ((4,), {"slope": 0.1}, (4,), 0),
    "softmax": ((4,), {}, (4,), 0),
    "split": ((4,), {}, (4,), 0),
    "flatten": ((2, 3), {}, (6,), 0),
    "reshape": ((2, 6), {"to": [3, 4]}, (3, 4), 0),
    "slice": ((6, 3), {"start": 1, "stop": 4}, (3, 3), 0),
    "concat": ((2, 3), {"sources": ["data", "data"], "dim": 1}, (2, 6), 0),
    "sum": ((2, 3), {"sources": ["data", "data"]}, (2, 3), 0),
    "product": ((2, 3), {"sources": ["data", "data"]}, (2, 3), 0),
}
ELSEWHERE = {"input", "label", "embedding", "sparsity"}


def data(*shape: int) -> Record:
    return {"name": "data", "type": "input", "shape": list(shape)}


def classifier(**changes: Any) -> list[Record]:
    return [
        data(4),
        {"name": "label", "type": "label"},
        {"name": "fc1", "type": "dense", "units": 6},
        {"name": "act", "type": "tanh"},
        {"name": "fc2", "type": "dense", "units": 3, **changes},
        {"name": "loss", "type": "cross_entropy"},
    ]


@pytest.mark.parametrize("kind", SINGLE)
def test_a_layer_of_every_type_infers_its_sizes(kind: str) -> None:
    came, arguments, goes, parameters = SINGLE[kind]
    net = Net([data(*came), {"name": "it", "type": kind, **arguments}])
    out = net(torch.rand(2, *came))
    assert tuple(out.shape) == (2, *goes)
    assert [(row.shape, row.parameters) for row in net.table()][1] == (goes, parameters)


def test_no_built_in_type_is_left_out() -> None:
    losses = {name for name, each in TYPES.items() if each.role == "loss" and each.built_in}
    built_in = {name for name, each in TYPES.items() if each.built_in}
    assert built_in == set(SINGLE) | ELSEWHERE | losses


def test_embeddings_take_whole_numbers() -> None:
    words = {"name": "words", "type": "input", "shape": [7], "dtype": "int64"}
    net = Net(
        [
            words,
            {"name": "places", "type": "embedding", "tokens": 11, "units": 3},
            {"name": "cell", "type": "gru", "units": 4},
        ]
    )
    assert net(torch.randint(11, (2, 7))).shape == (2, 4)


@pytest.mark.parametrize("loss", ["mse", "l1", "smooth_l1", "huber", "bce", "bce_with_logits"])
def test_losses_of_shapes_are_torchs(loss: str) -> None:
    target = {"name": "target", "type": "input", "shape": [4]}
    net = Net(
        [
            data(4),
            target,
            {"name": "out", "type": "sigmoid", "sources": "data"},
            {"name": "loss", "type": loss, "sources": ["out", "target"], "weight": 0.5},
        ]
    )
    x, y = torch.rand(3, 4), torch.rand(3, 4)
    functions = {"bce": F.binary_cross_entropy, "bce_with_logits": F.binary_cross_entropy_with_logits}
    function = functions.get(loss) or getattr(F, f"{loss}_loss")
    assert torch.equal(net.objective((x, y)), 0.5 * function(torch.sigmoid(x), y))


@pytest.mark.parametrize("loss", ["cross_entropy", "nll"])
def test_losses_of_classes_are_torchs(loss: str) -> None:
    net = Net([*classifier()[:-1], {"name": "loss", "type": loss}])
    x, y = torch.rand(5, 4), torch.randint(3, (5,))
    assert torch.equal(net.objective((x, y)), getattr(F, loss if loss != "nll" else "nll_loss")(net(x), y))


def test_the_net_is_what_a_script_with_that_seed_makes() -> None:
    torch.manual_seed(5)
    net = Net(classifier())
    torch.manual_seed(5)
    plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    x = torch.rand(2, 4)
    assert torch.equal(net(x), plain(x))
    assert [name for name, _ in net.named_parameters()] == [
        "fc1.weight",
        "fc1.bias",
        "fc2.weight",
        "fc2.bias",
    ]


def test_several_inputs_outputs_and_losses() -> None:
    net = Net(
        [
            {"name": "image", "type": "input", "shape": [2, 3]},
            {"name": "sound", "type": "input", "shape": [4]},
            {"name": "label", "type": "label"},
            {"name": "flat", "type": "flatten", "sources": "image"},
            {"name": "both", "type": "concat", "sources": ["flat", "sound"]},
            {"name": "classes", "type": "dense", "units": 3},
            {"name": "back", "type": "dense", "units": 6, "sources": "both"},
            {"name": "right", "type": "cross_entropy", "sources": ["classes", "label"]},
            {"name": "alike", "type": "mse", "sources": ["back", "image"], "weight": 0.1},
        ]
    )
    image, sound, label = torch.rand(5, 2, 3), torch.rand(5, 4), torch.randint(3, (5,))
    outputs = net(image, sound)
    assert set(outputs) == {"classes", "back"}
    wanted = F.cross_entropy(outputs["classes"], label) + 0.1 * F.mse_loss(outputs["back"], image.flatten(1))
    assert torch.allclose(net.objective((image, sound, label)), wanted)
    assert torch.equal(
        net.objective({"sound": sound, "image": image, "label": label}), net.objective((image, sound, label))
    )


def test_an_order_that_is_not_the_lists() -> None:
    net = Net(
        [
            {"name": "out", "type": "dense", "units": 2, "sources": "hidden", "output": True},
            {"name": "hidden", "type": "relu", "sources": "data"},
            data(3),
            {"name": "last", "type": "tanh", "sources": "out"},
        ]
    )
    assert list(net(torch.rand(4, 3))) == ["out", "last"]
    assert [row.name for row in net.table()] == ["out", "hidden", "data", "last"]


def test_layers_share_parameters_by_name() -> None:
    net = Net(
        [
            data(4),
            {"name": "up", "type": "rbm", "units": 3},
            {
                "name": "down",
                "type": "rbm_down",
                "units": 4,
                "share": {"weight": "up.weight", "visible_bias": "up.visible_bias"},
            },
            {"name": "again", "type": "rbm", "units": 3, "share": "up"},
        ]
    )
    assert net.down.weight is net.up.weight and net.again.hidden_bias is net.up.hidden_bias
    assert [name for name, _ in net.named_parameters()] == ["up.weight", "up.hidden_bias", "up.visible_bias"]
    assert [row.parameters for row in net.table()] == [0, 19, 0, 0]


def test_one_may_share_with_one_that_shares() -> None:
    net = Net(
        [
            data(4),
            {"name": "a", "type": "dense", "units": 4, "share": "b"},
            {"name": "b", "type": "dense", "units": 4, "share": "c"},
            {"name": "c", "type": "dense", "units": 4, "freeze": True},
        ]
    )
    assert net.a.weight is net.b.weight is net.c.weight and not net.a.weight.requires_grad


def test_rates_and_decays_of_layers_reach_the_optimizer() -> None:
    layers = classifier(rate={"bias": 2.0}, decay=0.0)
    net = Net(layers)
    optimizer = by_layer(net, make=partial(torch.optim.SGD, lr=0.5, weight_decay=0.25))
    found = {
        id(parameter): (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    wanted = {
        "fc1.weight": (0.5, 0.25),
        "fc1.bias": (0.5, 0.25),
        "fc2.weight": (0.5, 0.0),
        "fc2.bias": (1.0, 0.0),
    }
    assert {name: found[id(parameter)] for name, parameter in net.named_parameters()} == wanted


def test_a_decay_that_the_optimizer_does_not_know_is_refused() -> None:
    with pytest.raises(sl.UsageError, match=r"a layer has decay = 0.0, but Rprop has no weight_decay"):
        by_layer(Net(classifier(decay=0.0)), make=torch.optim.Rprop)


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


def test_plans_see_the_layers_of_a_net() -> None:
    net = Net(
        [
            data(1, 8, 8),
            {"name": "conv", "type": "convolution", "channels": 4, "kernel": 3},
            {"name": "flat", "type": "flatten"},
            {"name": "fc", "type": "dense", "units": 10},
        ]
    )
    found = str(sl.plan(net, torch.rand(4, 1, 8, 8), group=2, costs="singa"))
    assert "conv" in found and "fc" in found


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


def test_a_net_is_a_module_like_any_other() -> None:
    net = Net(classifier())
    x = torch.rand(2, 4)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(other(x), net(x)) and other.records == net.records


def test_it_prints_as_a_table() -> None:
    text = str(Net(classifier()))
    head, *_, total = text.splitlines()
    assert head.split() == ["layer", "type", "sources", "shape", "parameters"] and total.strip() == "51"
    assert "fc2    dense          act         (3,)" in text


def test_a_saved_net_loads_without_its_job(tmp_path: Path) -> None:
    net = Net([data(4), {"name": "norm", "type": "batch_norm"}, {"name": "fc", "type": "dense", "units": 2}])
    net(torch.rand(8, 4))
    save_net(net, tmp_path / "net.safetensors")
    with safe_open(tmp_path / "net.safetensors", "pt") as file:
        assert json.loads(file.metadata()["layers"]) == net.records
    again = load_net(tmp_path / "net.safetensors")
    x = torch.rand(3, 4)
    assert torch.equal(again.eval()(x), net.eval()(x))


def test_files_that_hold_no_net_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.safetensors").write_bytes(b"no")
    with pytest.raises(sl.UsageError, match="cannot be read as a net"):
        load_net(tmp_path / "bad.safetensors")
    with pytest.raises(sl.UsageError, match="cannot be read as a net"):
        load_net(tmp_path / "none.safetensors")
    with pytest.raises(sl.UsageError, match="save_net is for a Net, got Linear"):
        save_net(nn.Linear(2, 2), tmp_path / "linear.safetensors")  # type: ignore[arg-type]


def test_its_graph_has_a_box_for_every_layer_and_an_arrow_for_every_source() -> None:
    net = Net(classifier())
    picture = net_graph(net.table())
    assert picture.count("<g>") == 6 and picture.count("marker-end") == 5
    for row in net.table():
        assert f">{row.name}</text>" in picture


def test_noise_is_of_training_alone() -> None:
    net = Net([data(50), {"name": "it", "type": "noise", "amount": 0.5}])
    x = torch.ones(4, 50)
    assert torch.equal(net.eval()(x), x)
    assert set(net.train()(x).unique().tolist()) == {0.0, 1.0}


def test_the_sparsity_loss_is_kl_divergence() -> None:
    layers = [data(2), {"name": "it", "type": "sparsity", "target": 0.25, "weight": 2.0}]
    x = torch.tensor([[0.5, 0.25], [0.5, 0.25]])
    kl = 0.25 * torch.log(torch.tensor(0.5)) + 0.75 * torch.log(torch.tensor(1.5))
    assert torch.allclose(Net([*layers]).objective(x), 2 * kl)
