"""Nodes that join a cluster while a run goes on get learners (no Ray needed)."""

from __future__ import annotations

import signal
import sys
import threading
import time
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
from syncline.engines.ray import machine_membership
from syncline.testing import Faults, Nodes
from tests.integration.small_runs import PATIENCE, check_accounts, kinds, until

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def slowly(model: Any, batch: Any) -> Any:
    time.sleep(0.005)
    if model[1].num_batches_tracked == 0:
        assert (model[1].running_var == 1).all(), "it did not begin with the first buffers"
    return F.cross_entropy(model(batch[0]), batch[1])


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 2))


def begin(engine: Nodes, **options: Any) -> sl.Run:
    x = torch.randn(204, 6, generator=torch.Generator().manual_seed(0))
    settings = {
        "objective": slowly,
        "optimizer": partial(SGD, lr=0.1),
        "sync": "async",
        "learners": 2,
        "batch_size": 16,
        "epochs": 100_000,
        "threads": 1,
    }
    data = TensorDataset(x, (x.sum(1) > 0).long())
    return sl.train(net, data, wait=False, engine=engine, **{**settings, **options})


def ranks(run: sl.Run) -> set[int]:
    """Of learners whose gradients are in."""
    return {rank for rank, steps in run.statistics().steps.items() if steps > 2}


@pytest.mark.parametrize(
    ("count", "sync", "topology"),
    [(1, "async", "servers:1"), (2, "hardsync", "servers:2"), (2, "softsync:1", "servers:2")],
)
def test_a_node_that_joins_gets_learners(count: int, sync: str, topology: str, tmp_path: Path) -> None:
    engine = Nodes(count, 2, grow=True, learners_per_node=2)
    run = begin(engine, sync=sync, topology=topology, run_dir=tmp_path)
    until(lambda: ranks(run) == {0, 1})
    engine.cluster.add_node(3)
    until(lambda: ranks(run) == {0, 1, 2, 3})
    assert len(engine.cluster.agents[count].host.learners) == 2
    run.stop()
    result = run.wait(PATIENCE)
    assert [kind for kind in kinds(result) if kind != "checkpoint"] == ["machine joined", "joined", "joined"]
    check_accounts(result)


def test_what_joined_is_a_machine_like_the_others(tmp_path: Path) -> None:
    """It outlives a lost shard, it may be lost itself, and another may follow."""
    engine = Nodes(2, 1, apart=True, grow=True)
    run = begin(engine, topology="servers:2", run_dir=tmp_path, checkpoint_every=20, replace=True)
    until(lambda: ranks(run) == {0, 1})
    engine.cluster.add_node(1)
    until(lambda: 2 in ranks(run))
    Faults("kill shard 1 at version 1").play(run)
    until(lambda: "recovered" in [event.kind for event in run._handle._run.recorder.outcome.events])
    seen = run.statistics().steps.get(2, 0)
    until(lambda: run.statistics().steps.get(2, 0) > seen + 5)
    engine.cluster.agents[2].signal(signal.SIGKILL, all_of_it=True)
    until(lambda: "replaced" in [event.kind for event in run._handle._run.recorder.outcome.events])
    engine.cluster.add_node(1)
    until(lambda: 3 in ranks(run))
    run.stop()
    result = run.wait(PATIENCE)
    assert [kind for kind in kinds(result) if kind != "checkpoint"] == [
        *("machine joined", "joined", "shard lost", "recovered"),
        *("machine lost", "lost", "replaced", "machine joined", "joined"),
    ]
    check_accounts(result)


def test_a_node_that_cannot_be_used_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Nodes(2, 1, grow=True)
    run = begin(engine)
    until(lambda: ranks(run) == {0, 1})
    monkeypatch.setattr(machine_membership, "versions", lambda: ("3.11.0", "1.0", "0.0"))
    engine.cluster.add_node(1)
    engine.cluster.add_node(0)
    events = run._handle._run.recorder.outcome.events
    until(lambda: len([event for event in events if event.kind == "refused"]) == 2)
    seen = run.statistics().tables[0].version
    until(lambda: run.statistics().tables[0].version > seen + 20)
    run.stop()
    result = run.wait(PATIENCE)
    first, second = [event.what for event in result.events if event.kind == "refused"]
    assert "(node 2) joined the cluster and is not used: node" in first and "other versions" in first
    assert "(node 3) joined the cluster and is not used: it has no core" in second
    assert set(engine.cluster.agents) == {1}


def test_without_grow_nobody_is_looked_for() -> None:
    engine = Nodes(2, 1)
    run = begin(engine, learners=2)
    until(lambda: ranks(run) == {0, 1})
    assert not any(thread.name == "syncline-growth" for thread in threading.enumerate())
    run.stop()
    run.wait(PATIENCE)
