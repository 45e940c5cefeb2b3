"""Test that `result.state_dict()` loads strictly into the model it came from, wherever it was trained."""

from __future__ import annotations

import sys
from typing import Any

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import syncline as sl
from syncline.testing import Nodes
from tests.integration.small_runs import launched, points, train

cloudpickle.register_pickle_by_value(sys.modules[__name__])

PLACES = [
    ("local", "servers:2"),
    ("local", "tree:2"),
    ("local", "allreduce"),
    ("sim", "servers:2"),
    ("sim", "tree:2"),
    ("sim", "allreduce"),
]
places = pytest.mark.parametrize("engine, topology", PLACES)


class Varied(nn.Module):
    """A model with a buffer of each kind, tied weights, weights that are not trained, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.head.weight = self.body.weight
        self.out, self.frozen = nn.Linear(4, 2), nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("positions", torch.arange(3), persistent=False)
        self.words = "new"

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.head(torch.relu(self.norm(self.body(x)))) + self.frozen(x))

    def get_extra_state(self) -> Any:
        return {"words": self.words}

    def set_extra_state(self, state: Any) -> None:
        self.words = state["words"]


def trained_alone(model: nn.Module) -> Any:
    """Make an optimizer without the frozen weights."""
    return SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def steps(session: sl.Session) -> dict[str, Any]:
    """Train, and return the state that this learner's own model has in the end."""
    torch.manual_seed(0)
    model = Varied()
    model.words = "given"
    optimizer = session.optimizer(model, trained_alone)
    for x, y in session.loader(points(16), batch_size=4):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.state_dict()


@places
def test_a_loop_s_result_has_its_model_s_keys_and_values(engine: str, topology: str) -> None:
    result = launched(steps, learners=2, sync="hardsync", engine=engine, topology=topology)
    state, own = result.state_dict(), result.returned[0]
    fresh = Varied()
    fresh.load_state_dict(state)  # strictly
    assert state.keys() == own.keys() and fresh.words == "given"
    assert state["head.weight"] is state["body.weight"]
    for key, value in own.items():
        if "norm.running" not in key and key != "_extra_state":  # which are means over the learners
            assert torch.equal(state[key], value), key


@places
def test_a_trained_model_s_result_has_its_keys(engine: str, topology: str, tmp_path: Any) -> None:
    model = Varied()
    model.words = "given"
    options = {"engine": engine, "topology": topology, "sync": "hardsync", "learners": 2}
    result = train(model=model, data=points(16), evaluate=points(8), run_dir=tmp_path / "run", **options)
    Varied().load_state_dict(result.state_dict())
    assert result.state_dict().keys() == model.state_dict().keys()
    assert result.model is not None and result.model.words == "given"
    for key, value in result.model.state_dict().items():
        assert key == "_extra_state" or torch.equal(result.state_dict()[key], value)


class Cut(nn.Module):
    """A model of two layers for a group, with two buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)
        self.register_buffer("positions", torch.arange(3), persistent=False)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x))) * self.scale


@pytest.mark.parametrize("local", [True, False])
def test_a_group_s_result_has_its_model_s_keys(local: bool) -> None:
    cut: dict[str, Any] = {"group": 2, "plan": {"first": "model"}, "local_update": local}
    result = train(model=Cut(), data=points(16), learners=1, sync="hardsync", **cut)
    Cut().load_state_dict(result.state_dict())


@pytest.mark.parametrize("engine", ["local", "sim"])
def test_a_batch_method_s_result_has_its_model_s_keys(engine: str) -> None:
    model = Cut()
    model.first.requires_grad_(False)
    options = {"sync": "sandblaster", "optimizer": sl.GradientDescent(lr=0.1), "steps": 2, "engine": engine}
    result = train(model=model, data=points(16), learners=2, **options)
    Cut().load_state_dict(result.state_dict())
    assert torch.equal(result.state_dict()["first.weight"], model.first.weight)


def test_a_cluster_s_result_has_its_model_s_keys_and_values() -> None:
    """The leading shard is on a machine without learners: frozen weights and buffers come to it over a link."""
    cluster = Nodes(3, 1, server_nodes=1)
    result = launched(steps, learners=2, sync="hardsync", topology="servers:2", engine=cluster)
    Varied().load_state_dict(result.state_dict())
    for key in ("frozen.weight", "out.weight", "body.weight"):
        assert torch.equal(result.state_dict()[key], result.returned[0][key]), key
