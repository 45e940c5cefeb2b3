"""Groups of seats on several nodes: each group is on one, and one learner to the run (M15; no Ray needed)."""

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
from syncline.testing.leftovers import children
from tests.integration.small_runs import PATIENCE, alive, check_accounts, kinds, same, until

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.filterwarnings("ignore::syncline.errors.LostWarning")

SIZE = 96
X = torch.randn(SIZE, 6, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, (X.sum(1) > 0).long())
PLAN = {"0": "model", "2": "rows"}


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 2))


def slowly(model: nn.Module, batch: Any) -> Any:
    time.sleep(0.005)
    return F.cross_entropy(model(batch[0]), batch[1])


def begin(**options: Any) -> sl.Run:
    settings: dict[str, Any] = {
        "objective": slowly,
        "optimizer": partial(SGD, lr=0.1, momentum=0.9),
        "sync": "hardsync",
        "learners": 2,
        "group": 2,
        "plan": PLAN,
        "batch_size": 8,
        "epochs": 2,
        "threads": 1,
    }
    return sl.train(net(), DATA, wait=False, **{**settings, **options})


@pytest.mark.parametrize(
    ("topology", "plan", "sync"),
    [("servers:1", PLAN, "hardsync"), ("servers:3", PLAN, "delayed:1"), ("servers:2", "data", "hardsync")],
)
def test_groups_give_the_bits_of_groups_on_one_machine(
    topology: str, plan: Any, sync: str, tmp_path: Path
) -> None:
    """One on each node, with shards on both, and evaluation."""
    options = {"topology": topology, "plan": plan, "sync": sync, "evaluate": DATA}
    here = begin(**options).wait(PATIENCE)
    there = begin(**options, engine=Nodes(2, 2), run_dir=tmp_path).wait(PATIENCE)
    assert same(here.state_dict(), there.state_dict())
    assert [record.metrics for record in here.history] == [record.metrics for record in there.history]


def test_a_run_of_groups_goes_on_with_the_same_bits_on_another_number_of_nodes(tmp_path: Path) -> None:
    begin(epochs=1, engine=Nodes(2, 2), run_dir=tmp_path).wait(PATIENCE)
    on = begin(engine=Nodes(1, 4), resume=tmp_path).wait(PATIENCE)
    assert same(on.state_dict(), begin().wait(PATIENCE).state_dict())


def looks(session: sl.Session) -> tuple[int, int, int]:
    mine = sl.partition(net(), example=X[:8])
    optimizer = session.optimizer(mine, partial(SGD, lr=0.1))
    for (x,) in session.loader(TensorDataset(X), batch_size=8):
        optimizer.zero_grad()
        mine(x).square().mean().backward()
        optimizer.step()
    return session.rank, session.seats, sum(each.numel() for each in mine.parameters())


def test_functions_run_in_every_seat() -> None:
    options: dict[str, Any] = {"learners": 2, "group": 2, "plan": PLAN, "sync": "hardsync", "threads": 1}
    here, there = sl.launch(looks, **options), sl.launch(looks, engine=Nodes(2, 2), **options)
    assert there.returned == here.returned and there.returned[1][:2] == (1, 2)
    assert same(here.state_dict(), there.state_dict())


@pytest.mark.parametrize(
    ("victim", "sync", "replace"),
    [("the first", "hardsync", True), ("another", "async", True), ("another", "hardsync", False)],
)
def test_a_seat_lost_elsewhere_takes_its_group_along(victim: str, sync: str, replace: bool) -> None:
    run = begin(sync=sync, epochs=20, replace=replace, engine=Nodes(2, 2))
    until(lambda: {0, 1} <= set(run.statistics().steps))
    pid = run._handle.pids()["learner 1"]
    (other,) = children(pid)
    os.kill(pid if victim == "the first" else other, signal.SIGKILL)
    result = run.wait(PATIENCE)
    assert kinds(result) == ["lost", *["replaced"] * replace]
    until(lambda: not any(map(alive, (pid, other))))  # the other ends with the one that started it
    assert result.statistics.tables[0].examples == 20 * SIZE


def test_groups_of_a_lost_node_are_replaced_whole_and_others_join_whole() -> None:
    engine = Nodes(3, 2, apart=True)
    run = begin(sync="async", epochs=100_000, learners=2, replace=True, engine=engine)
    run.add_learners(1)
    until(lambda: {0, 1, 2} <= set(run.statistics().steps))
    lost = run._handle.pids()["learner 1"]
    engine.cluster.agents[1].signal(signal.SIGKILL, all_of_it=True)
    until(lambda: run._handle.pids().get("learner 1", lost) not in (lost, 0))
    seen = run.statistics().steps[1]
    until(lambda: run.statistics().steps[1] > seen + 3)
    assert len(children(run._handle.pids()["learner 1"])) == 1
    run.stop()
    result = run.wait(PATIENCE)
    assert kinds(result).count("lost") == kinds(result).count("replaced") >= 1
    check_accounts(result)


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        (Nodes(2, 1), r"group=2: the seats of a group share the memory of one node, .* \(1 on .*, 1 on .*\)"),
        (Nodes(2, 2, nodes=1), r"learners=2 need 2 cores each on one node, .* has room for 1: 1 on"),
    ],
)
def test_groups_that_no_node_has_room_for_are_refused_in_one_line(nodes: Nodes, words: str) -> None:
    with pytest.raises(sl.UsageError, match=words) as error:
        begin(engine=nodes)
    assert "\n" not in str(error.value)
