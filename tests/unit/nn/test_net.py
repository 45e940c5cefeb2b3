"""Nets as data: graphs, sharing, multipliers, files."""

from __future__ import annotations

import copy
import json
import pickle
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import nn

import syncline as sl
from syncline.nn import Net, by_layer, load_net, save_net
from syncline.report.net_graph import net_graph
from tests.unit.nn.layer_lists import classifier, data


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


def test_a_net_as_the_sum_of_its_losses_shares_its_layers() -> None:
    net = Net(classifier())
    x, y = torch.rand(2, 4), torch.tensor([0, 2])
    inputs = net.inputs_of((x, y))
    summed = net.with_losses()
    assert torch.equal(summed(**inputs), net.objective((x, y))) and torch.equal(summed(x, y), summed((x, y)))
    assert [id(p) for p in summed.parameters()] == [id(p) for p in net.parameters()]
    first, second = inputs
    assert torch.equal(net(**{first: x}), net(x))
    with pytest.raises(sl.UsageError, match=rf"the net needs its input '{second}' too, got {first}"):
        summed(**{first: x})
    with pytest.raises(sl.UsageError, match=r"the net has no input 'colour'; it has "):
        net(**{first: x, "colour": y})
    with pytest.raises(sl.UsageError, match=r"this net has no loss layers"):
        Net([data(4), {"name": "fc", "type": "dense", "units": 3}]).with_losses()


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
