"""Contrastive divergence on a GPU: it learns there as on the CPU, chains lie there, resumed runs keep their bits."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.utils.data import TensorDataset

import syncline as sl
from syncline.nn import CRBM, DBM, DBN, RBM, windows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def bars() -> TensorDataset:
    kind = torch.arange(96) % 6
    image = torch.zeros(96, 3, 3)
    for number, which in enumerate(kind.tolist()):
        image[number, which % 3 if which < 3 else slice(None), slice(None) if which < 3 else which % 3] = 1.0
    return TensorDataset(image)


def train(model: Any, gradient: str, **options: Any) -> sl.Result:
    settings: dict[str, Any] = {
        "optimizer": partial(SGD, lr=0.2),
        "sync": "hardsync",
        "batch_size": 8,
        "epochs": 15,
        "device": "cuda",
        "threads": 1,
    }
    return sl.train(model, bars(), gradient=gradient, **{**settings, **options})


@pytest.mark.parametrize("model, gradient", [(RBM(9, 6), "cd:1"), (RBM(9, 6), "pcd:1"), (DBN([9, 6, 3]), "cd:1"), (DBM([9, 6, 3]), "pcd:2")])  # fmt: skip
def test_energy_models_learn_there(model: Any, gradient: str) -> None:
    history = train(model, gradient, evaluate=bars()).history
    assert history[-1].metrics["loss"] < history[0].metrics["loss"]


def test_the_gradient_is_the_cpus_in_the_mean() -> None:
    torch.manual_seed(0)
    rbm, data = RBM(9, 4, std=0.5), bars().tensors[0].repeat(500, 1, 1)
    found = []
    for device in ("cpu", "cuda"):
        rbm = rbm.to(device)
        rbm.zero_grad()
        rbm.contrastive_divergence(data.to(device), 2)
        found.append(rbm.weight.grad.cpu().clone())  # type: ignore[union-attr]
    assert torch.allclose(*found, atol=0.01)


def test_a_crbm_runs_there() -> None:
    crbm = CRBM(2, 4, order=3).cuda()
    assert crbm.contrastive_divergence(windows(torch.rand(50, 2), 3).cuda()).is_cuda
    assert crbm.generate(torch.rand(3, 2).cuda(), 5).shape == (5, 2)


@pytest.mark.parametrize("gradient", ["cd:1", "pcd:1"])
def test_a_resumed_run_keeps_the_bits(gradient: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = RBM(9, 6)
    whole = train(model, gradient, epochs=4).state_dict()
    train(model, gradient, epochs=2, run_dir=tmp_path / "run")
    resumed = train(model, gradient, epochs=4, resume=tmp_path / "run").state_dict()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
