"""A version of a large table crosses to a node once, and all its learners read it there (no Ray needed)."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

import syncline as sl
from syncline.engines.ray.node_versions import SHARED
from syncline.testing import Faults, Nodes
from tests.integration.small_runs import PATIENCE, check_accounts, kinds, same
from tests.integration.wires import wire

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SIZE, EPOCHS, WIDTH = 204, 3, 300
VERSION = 4 * (6 * WIDTH + WIDTH + WIDTH * WIDTH + WIDTH + WIDTH * 2 + 2)  # bytes
assert VERSION > 4 * SHARED
pytestmark = pytest.mark.usefixtures("one_thread")


def net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2)
    )


def begin(**options: Any) -> sl.Run:
    x = torch.randn(SIZE, 6, generator=torch.Generator().manual_seed(0))
    settings = {
        "loss": F.cross_entropy,
        "optimizer": partial(SGD, lr=0.1, momentum=0.9),
        "sync": "hardsync",
        "topology": "servers:2",
        "learners": 3,
        "batch_size": 8,
        "epochs": EPOCHS,
        "seed": 5,
        "threads": 1,
    }
    data = TensorDataset(x, (x.sum(1) > 0).long())
    return sl.train(net, data, wait=False, **{**settings, **options})


def train(**options: Any) -> sl.Result:
    return begin(**options).wait(PATIENCE)


def until(ready: Callable[[], Any]) -> None:
    while not ready():  # else the test's time is over
        time.sleep(0.01)


def version(run: sl.Run) -> int:
    table = run.statistics().tables.get(0)
    return table.version if table else -1


def slowly(model: nn.Module, batch: Any) -> Any:
    time.sleep(0.005)
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize("sync", ["hardsync", "delayed:2", "softsync:1 until 1 then delayed:1"])
def test_lockstep_reads_the_very_version_and_each_crosses_once_for_three_learners(sync: str) -> None:
    with wire() as way:
        result = train(sync=sync, engine=Nodes(2, 3, server_nodes=1, through=way.through))
    assert 0.5 * result.updates < way.passed / VERSION < 1.5 * result.updates
    if "softsync" not in sync:
        assert same(result.state_dict(), train(sync=sync).state_dict())


@pytest.mark.parametrize("sync", ["async", "softsync:1", "ssp:2"])
def test_free_learners_read_no_older_version_than_they_were_released_to(sync: str) -> None:
    result = train(sync=sync, engine=Nodes(2, 3, server_nodes=1))
    check_accounts(result)
    assert result.statistics.tables[0].examples == EPOCHS * SIZE


def test_one_learner_elsewhere_gives_the_bits_of_one_here() -> None:
    there = train(sync="async", learners=1, engine=Nodes(2, server_nodes=1))
    assert same(there.state_dict(), train(sync="async", learners=1).state_dict())


def test_a_lost_learner_is_replaced_and_reads_what_the_others_of_its_node_read() -> None:
    options: dict[str, Any] = {"loss": None, "objective": slowly}
    run = begin(engine=Nodes(2, 3, server_nodes=1), replace=True, **options)
    Faults("kill learner 1 at version 8").play(run)
    result = run.wait(PATIENCE)
    assert kinds(result)[:2] == ["lost", "replaced"]
    check_accounts(result)
    assert result.statistics.tables[0].examples == EPOCHS * SIZE


@pytest.mark.parametrize("sync", ["hardsync", "async"])
def test_after_a_lost_shard_nobody_reads_versions_of_servers_that_are_gone(sync: str, tmp_path: Path) -> None:
    """Their numbers come again, with other values."""
    options: dict[str, Any] = {"sync": sync, "loss": None, "objective": slowly}
    engine = Nodes(2, 3, server_nodes=1)
    run = begin(**options, engine=engine, run_dir=tmp_path, checkpoint_every=5)
    Faults("kill shard 1 at version 13").play(run)
    result = run.wait(PATIENCE)
    assert "recovered" in kinds(result) and "lost" not in kinds(result)
    assert result.statistics.tables[0].examples == EPOCHS * SIZE
    if sync == "hardsync":
        assert same(result.state_dict(), train(**options).state_dict())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_node_that_loses_its_courier_is_lost(number: int) -> None:
    run = begin(engine=Nodes(3, 1), sync="async", epochs=100_000, replace=True)
    until(lambda: version(run) >= 10)
    os.kill(run._handle._pulse.couriers[1].pid, number)
    until(lambda: len([each for each in run.statistics().processes if each.role == "learner"]) > 3)
    run.stop()
    result = run.wait(PATIENCE)
    assert set(kinds(result)) == {
        "lost",
        "replaced",
    }  # another may have begun there before the node was given up
    check_accounts(result)
