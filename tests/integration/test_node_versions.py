"""A version of a large table crosses to a node once, and all its learners read it there (no Ray needed)."""

from __future__ import annotations

import os
import signal
import sys
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
from syncline.testing import Nodes
from tests.integration.small_runs import PATIENCE, check_accounts, kinds, same, until, with_faults
from tests.integration.wires import wire

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SIZE, EPOCHS, WIDTH = 204, 3, 300
VERSION = 4 * (6 * WIDTH + WIDTH + WIDTH * WIDTH + WIDTH + WIDTH * 2 + 2)  # bytes


def net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2)
    )


def begin(script: str = "", **options: Any) -> sl.Run:
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
    begin = partial(sl.train, net, data, wait=False)
    return with_faults(script, begin, **{**settings, **options})


def train(**options: Any) -> sl.Result:
    return begin(**options).wait(PATIENCE)


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
    run = begin("kill learner 1 at version 8", engine=Nodes(2, 3, server_nodes=1), replace=True)
    result = run.wait(PATIENCE)
    assert kinds(result)[:2] == ["lost", "replaced"]
    check_accounts(result)
    assert result.statistics.tables[0].examples == EPOCHS * SIZE


@pytest.mark.parametrize("sync", ["hardsync", "async"])
def test_after_a_lost_shard_nobody_reads_versions_of_servers_that_are_gone(sync: str, tmp_path: Path) -> None:
    """Their numbers come again, with other values."""
    script, engine = "kill shard 1 at version 13", Nodes(2, 3, server_nodes=1)
    run = begin(script, sync=sync, engine=engine, run_dir=tmp_path, checkpoint_every=5)
    result = run.wait(PATIENCE)
    assert "recovered" in kinds(result) and "lost" not in kinds(result)
    assert result.statistics.tables[0].examples == EPOCHS * SIZE
    if sync == "hardsync":
        assert same(result.state_dict(), train(sync=sync).state_dict())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_node_that_loses_its_relay_is_lost(number: int) -> None:
    run = begin(engine=Nodes(3, 1), topology="servers:1", sync="async", epochs=100_000, replace=True)
    until(lambda: version(run) >= 10)
    (relay,) = [each.pid for each in run.statistics().processes if (each.role, each.rank) == ("relay", 1)]
    os.kill(relay, number)
    until(lambda: len([each for each in run.statistics().processes if each.role == "learner"]) > 3)
    run.stop()
    result = run.wait(PATIENCE)
    assert kinds(result).count("lost") == kinds(result).count("replaced") == 1
    check_accounts(result)


def test_the_callers_relay_comes_back_with_the_shards(tmp_path: Path) -> None:
    options: dict[str, Any] = {"loss": None, "objective": slowly}
    run = begin(**options, engine=Nodes(2, 2), run_dir=tmp_path, checkpoint_every=5)
    until(lambda: version(run) >= 8)
    (relay,) = [each.pid for each in run.statistics().processes if (each.role, each.rank) == ("relay", 0)]
    os.kill(relay, signal.SIGKILL)
    result = run.wait(PATIENCE)
    assert "recovered" in kinds(result)
    assert same(result.state_dict(), train(**options).state_dict())


# -- shards on several machines ------------------------------------------------------------------------------

FREE = ["async", "softsync:1", "ssp:2", "downpour:push=2,fetch=2,local_lr=0.1"]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("sync", ["hardsync", "delayed:2"])
@pytest.mark.parametrize("servers", [None, 2])
def test_lockstep_with_shards_on_several_machines_gives_the_bits_of_local(
    sync: str, servers: int | None, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"sync": sync, "topology": "servers:3", "clip_norm": 0.5, "learners": 2}
    run = begin(engine=Nodes(4, 1, server_nodes=servers), run_dir=tmp_path, **options)
    assert len(run._handle.machines.sites.servers) == 2
    assert same(run.wait(PATIENCE).state_dict(), train(**options).state_dict())


@pytest.mark.sweep(2)
@pytest.mark.parametrize("sync", FREE)
def test_free_learners_read_one_version_of_all_machines(sync: str, tmp_path: Path) -> None:
    """All entries of a version are equal."""
    result = sl.launch(
        counts,
        learners=3,
        sync=sync,
        topology="servers:3",
        threads=1,
        engine=Nodes(3, 1),
        run_dir=tmp_path,
    )
    assert all(result.returned)


def counts(session: sl.Session) -> bool:
    model = nn.Linear(700, 300, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = session.optimizer(model, partial(SGD, lr=1.0))
    whole = True
    for _ in range(60):
        model.weight.grad = -torch.ones_like(model.weight)
        optimizer.step()
        whole &= bool((model.weight == model.weight[0, 0]).all())
    return whole


@pytest.mark.sweep(1)
@pytest.mark.parametrize("sync", ["hardsync", "async"])
def test_a_lost_machine_with_a_shard_goes_back_to_the_checkpoint_without_it(
    sync: str, tmp_path: Path
) -> None:
    engine = Nodes(3, 1, apart=True)
    options: dict[str, Any] = {"sync": sync, "topology": "servers:3", "loss": None, "objective": slowly}
    run = begin(**options, engine=engine, run_dir=tmp_path, checkpoint_every=3, epochs=6)
    until(lambda: version(run) >= 8)
    engine.cluster.agents[1].signal(signal.SIGKILL, all_of_it=True)
    result = run.wait(PATIENCE)
    assert {"machine lost", "recovered", "lost"} <= set(kinds(result))
    check_accounts(result)
    assert result.statistics.tables[0].examples == 6 * SIZE


def test_a_lost_machine_with_a_shard_ends_a_run_without_a_folder() -> None:
    engine = Nodes(3, 3, apart=True, server_nodes=2)
    run = begin(engine=engine, sync="async", epochs=100_000)
    until(lambda: version(run) >= 5)
    engine.cluster.agents[1].signal(signal.SIGKILL, all_of_it=True)
    with pytest.raises(sl.RunError, match="shard 1"):
        run.wait(PATIENCE)


@pytest.mark.parametrize("sync", ["hardsync", "async"])
def test_checkpoints_come_to_the_callers_machine_where_others_do_not_see_the_folder(
    sync: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"sync": sync, "topology": "servers:2"}
    script, engine = "kill shard 1 at version 10", Nodes(2, 2, blind=True)
    run = begin(script, **options, engine=engine, run_dir=tmp_path, checkpoint_every=4)
    result = run.wait(PATIENCE)
    assert "recovered" in kinds(result)
    assert result.statistics.tables[0].examples == EPOCHS * SIZE
    if sync == "hardsync":
        assert same(result.state_dict(), train(**options).state_dict())
