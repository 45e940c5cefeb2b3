"""Every built-in layer type: sizes that follow, counts of parameters, losses that are torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from syncline.nn import Net
from syncline.nn.registry import TYPES
from tests.unit.nn.layer_lists import Record, classifier, data

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
