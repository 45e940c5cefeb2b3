"""Versions that flow down a tree over several machines unasked (R8, M13, M14; no Ray needed)."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn
from torch.optim import SGD

import syncline as sl
from syncline.report import read_clocks
from syncline.testing import Faults, Nodes
from tests.integration import test_node_trees as trees
from tests.integration.small_runs import PATIENCE, check_accounts, kinds, same
from tests.integration.test_node_trees import SIZE, held, pid_of, plain, until, version
from tests.integration.wires import wire

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def begin(script: str = "", **options: Any) -> sl.Run:
    settings = {"topology": "tree:2,broadcast,servers=2", "sync": "async", "model": plain, "learners": 3}
    return trees.begin(script, **{**settings, **options})


def train(**options: Any) -> sl.Result:
    return begin(**options).wait(PATIENCE)


# -- bits and accounts ---------------------------------------------------------------------------------------


def test_lockstep_gives_the_bits_of_the_tree_on_one_machine(tmp_path: Path) -> None:
    options: dict[str, Any] = {"sync": "hardsync", "model": trees.net, "learners": 4}
    there = train(engine=Nodes(2, 2), run_dir=tmp_path, **options)
    here = train(topology="tree:2,servers=2", **options)
    assert same(here.state_dict(), there.state_dict()) and here.staleness == there.staleness


FREE = [
    "async",
    "softsync:1",
    "ssp:1,rate=share",
    "downpour:push=1,fetch=2,local_lr=0.02",
    "hardsync until 1 then async",
    "async until 1 then delayed:1",
]


@pytest.mark.parametrize("sync", FREE)
def test_every_gradient_counts_once_with_its_staleness(sync: str, tmp_path: Path) -> None:
    """A shard on each machine."""
    result = train(sync=sync, engine=Nodes(2, 2), run_dir=tmp_path, clocks=True)
    rows = [tuple(map(int, row)) for row in read_clocks(tmp_path)]
    assert result.gradients == len(rows) == 2 * 13 and result.dropped == 0
    assert result.statistics.tables[0].examples == 2 * SIZE
    assert Counter(version - 1 - stamp for version, _, stamp in rows) == result.staleness.histogram


# -- versions ------------------------------------------------------------------------------------------------


def one_by_one(session: sl.Session, gate: str) -> list[int]:
    """Which version it has after each step; learner 1 is in its second until the gate is open."""
    model = nn.Linear(300, 300, bias=False)
    nn.init.zeros_(model.weight)
    optimizer, seen = session.optimizer(model, partial(SGD, lr=1.0)), []
    while len(seen) < 3 if session.rank else not Path(gate).exists():
        while session.rank and len(seen) == 1 and not Path(gate).exists():
            time.sleep(0.005)
        model.weight.grad = -torch.ones_like(model.weight)
        optimizer.step()
        seen.append(round(model.weight[0, 0].item()))
    return seen


def test_versions_cross_while_a_learner_computes_and_it_goes_on_with_the_newest(tmp_path: Path) -> None:
    """It says nothing meanwhile; each version crosses once."""
    gate, size = tmp_path / "open", 4 * 300 * 300
    with wire() as way:
        run = sl.launch(
            one_by_one, str(gate), learners=2, sync="async,rate=given", topology="tree:2,broadcast,servers=1", threads=1,
            engine=Nodes(2, 1, through=way.through), wait=False,
        )  # fmt: skip
        until(lambda: run.statistics().steps.get(1) == 1)
        before, at = way.passed, version(run)
        until(lambda: way.passed > before + 8 * size)
        gate.touch()
        result = run.wait(PATIENCE)
        assert way.passed < (result.version + 4) * size
    first, second, _ = result.returned[1]
    assert first <= at + 1 and second >= first + 6


def counting(session: sl.Session, width: int) -> bool:
    """All entries of a version are equal; none is older than the one before; newer ones come."""
    model = nn.Linear(width, 1000, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = session.optimizer(model, partial(SGD, lr=1.0))
    whole, before = True, 0.0
    for _ in range(20):
        model.weight.grad = -torch.ones_like(model.weight)
        optimizer.step()
        now = model.weight[0, 0].item()
        whole &= bool((model.weight == now).all()) and now >= before
        before = now
    return whole and before > 1


@pytest.mark.parametrize("width", [200, 1100])  # copied in the step, and swapped
def test_every_version_is_whole_whose_parts_come_of_several_machines(width: int, tmp_path: Path) -> None:
    result = sl.launch(
        counting, width, learners=3, sync="async", topology="tree:2,broadcast,servers=2", threads=1,
        engine=Nodes(3, 1), run_dir=tmp_path,
    )  # fmt: skip
    assert all(result.returned)


# -- losses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role, rank", [("learner", 2), ("node", 1)])
def test_a_lost_learner_or_leaf_leaves_the_others_going(role: str, rank: int, tmp_path: Path) -> None:
    gate = tmp_path / "open"
    objective = partial(held, str(gate))
    run = begin(engine=Nodes(2, 2), epochs=4, loss=None, objective=objective, on_error="continue")
    until(lambda: version(run) >= 2)
    os.kill(pid_of(run, role, rank), signal.SIGKILL)
    lost = "lost" if role == "learner" else "node lost"
    until(lambda: lost in [event.kind for event in run._handle._run.recorder.outcome.events])
    gate.touch()
    result = run.wait(PATIENCE)
    assert kinds(result) == [lost] and result.dropped == 0
    assert result.statistics.tables[0].examples == 4 * SIZE


def test_a_lost_machine_leaves_the_others_going(tmp_path: Path) -> None:
    gate, engine = tmp_path / "open", Nodes(3, 1, apart=True)
    objective = partial(held, str(gate))
    run = begin(engine=engine, epochs=4, topology="tree:2,broadcast", loss=None, objective=objective)
    until(lambda: version(run) >= 2)
    engine.cluster.agents[1].signal(signal.SIGKILL, all_of_it=True)
    until(lambda: "machine lost" in [event.kind for event in run._handle._run.recorder.outcome.events])
    gate.touch()
    result = run.wait(PATIENCE)
    assert kinds(result) == ["machine lost", "lost"]
    check_accounts(result)
    assert result.statistics.tables[0].examples == 4 * SIZE


def test_a_lost_shard_goes_back_and_a_run_goes_on_from_its_folder(tmp_path: Path) -> None:
    """Numbers of versions come again, with other values."""
    run = begin("kill shard 1 at version 6", engine=Nodes(2, 2), run_dir=tmp_path, checkpoint_every=3)
    result = run.wait(PATIENCE)
    assert {"shard lost", "recovered"} <= set(kinds(result)) and "lost" not in kinds(result)
    assert result.statistics.tables[0].examples == 2 * SIZE
    on = train(epochs=3, engine=Nodes(2, 2), resume=tmp_path)
    check_accounts(on)
    assert on.version > result.version and on.statistics.tables[0].examples == 3 * SIZE


def test_the_dial_turns_while_it_runs() -> None:
    run = begin(epochs=10_000, engine=Nodes(2, 2))
    Faults("change to hardsync at version 20; change to softsync:1 at version 30; stop at version 40").play(
        run
    )
    result = run.wait(PATIENCE)
    assert result.version >= 40
    check_accounts(result)
