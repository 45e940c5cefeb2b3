"""What `sl.Ray` refuses before anything starts, in one line each."""

import sys
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import syncline as sl
from syncline.errors import UsageError


def train(**options: Any) -> Any:
    data = torch.randn(64, 4), torch.zeros(64, dtype=torch.long)
    return sl.train(
        nn.Linear(4, 2),
        data,
        **{
            "loss": F.cross_entropy,
            "optimizer": partial(torch.optim.SGD, lr=0.1),
            "engine": "ray",
            **options,
        },
    )


@pytest.mark.parametrize(
    "options, words",
    [
        ({"nodes": 0}, "nodes"),
        ({"learners_per_node": -1}, "learners_per_node"),
        ({"server_nodes": 0}, "server_nodes"),
        ({"address": ""}, "host:port"),
        ({"resources": {"CPU": -1}}, "such as"),
        ({"resources": 4}, "such as"),
        ({"grow": 1}, "grow is True or False"),
    ],
)
def test_options_that_cannot_be_are_one_line(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words) as error:
        sl.Ray(**options)
    assert "\n" not in str(error.value)


def test_without_ray_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match="pip install ray"):
        train()


def test_all_reduce_is_refused_with_the_way_that_works() -> None:
    with pytest.raises(UsageError, match="torchrun"):
        train(sync="hardsync", topology="allreduce")


@pytest.mark.parametrize("address, words", [("127.0.0.1:1", "Connection refused"), ("nowhere", "host:port")])
def test_a_cluster_that_is_not_there_is_one_line_at_once(address: str, words: str) -> None:
    pytest.importorskip("ray")
    with pytest.raises(UsageError, match=words) as error:
        train(engine=sl.Ray(address))
    assert "\n" not in str(error.value)


def test_a_driver_outside_of_the_cluster_is_refused() -> None:
    pytest.importorskip("ray")
    with pytest.raises(UsageError, match="ray job submit"):
        train(engine=sl.Ray("ray://10.0.0.1:10001"))


def test_what_does_not_travel_is_named_before_a_cluster_is_asked() -> None:
    pytest.importorskip("ray")
    lock = __import__("threading").Lock()

    def objective(model: nn.Module, batch: Any) -> Any:
        assert lock
        return model(batch[0]).sum()

    with pytest.raises(UsageError, match="objective cannot travel"):
        train(loss=None, objective=objective, engine=sl.Ray("127.0.0.1:1"))


def test_tables_on_a_card_are_refused() -> None:
    with pytest.raises(UsageError, match="memory of the caller's node"):
        train(device="cuda", table_device="cuda:0")
