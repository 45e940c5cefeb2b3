"""Trees of servers on several machines: the leaf is the machine, one sum of it crosses the link (R7, M14; no Ray needed)."""

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
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, Adam
from torch.utils.data import TensorDataset

import syncline as sl
from syncline.report import read_clocks
from syncline.testing import Faults, Nodes
from tests.integration.small_runs import PATIENCE, check_accounts, kinds, same, until, with_faults
from tests.integration.wires import wire

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SIZE, EPOCHS = 204, 2  # uneven: 12 batches of 16 and one of 12


def net() -> nn.Module:
    """Everything that has a state of its own: batch statistics, dropout."""
    return nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Dropout(0.4), nn.Linear(40, 2))


def plain() -> nn.Module:
    """Draws nothing: what is computed again is the same."""
    return nn.Linear(6, 2)


def begin(script: str = "", **options: Any) -> sl.Run:
    x = torch.randn(SIZE, 6, generator=torch.Generator().manual_seed(0))
    settings = {
        "loss": F.cross_entropy,
        "optimizer": partial(Adam, lr=0.01),
        "sync": "hardsync",
        "topology": "tree:2,servers=2",
        "learners": 4,
        "batch_size": 16,
        "epochs": EPOCHS,
        "seed": 5,
        "threads": 1,
    }
    data = TensorDataset(x, (x.sum(1) > 0).long())
    begin = partial(sl.train, options.pop("model", net), data, wait=False)
    return with_faults(script, begin, **{**settings, **options})


def train(**options: Any) -> sl.Result:
    return begin(**options).wait(PATIENCE)


steps = 0


def held(gate: str, model: nn.Module, batch: Any) -> Any:
    """Waits after a few steps until the gate is open."""
    global steps
    steps += 1
    while steps > 5 and not Path(gate).exists():
        time.sleep(0.005)
    return F.cross_entropy(model(batch[0]), batch[1])


def version(run: sl.Run) -> int:
    table = run.statistics().tables.get(0)
    return table.version if table else -1


def pid_of(run: sl.Run, role: str, rank: int) -> int:
    """Of the newest that runs."""
    over = ("returned", "raised", "lost", "killed")
    found = [
        p for p in run.statistics().processes if (p.role, p.rank) == (role, rank) and p.state not in over
    ]
    return found[-1].pid


# -- bits and accounts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", ["hardsync", "delayed:2", "softsync:1 until 1 then delayed:1"])
def test_lockstep_gives_the_bits_of_the_tree_on_one_machine(sync: str, tmp_path: Path) -> None:
    """Two machines of two learners, with a shard on each: as tree:2 has them on one."""
    options: dict[str, Any] = {"sync": sync, "clip_norm": 0.5}
    run = begin(engine=Nodes(2, 2), run_dir=tmp_path, **options)
    assert run._handle.machines.sites.servers == [0, 1]
    there = run.wait(PATIENCE)
    assert Counter(each.role for each in there.statistics.processes)["node"] == 2
    check_accounts(there)
    if "softsync" not in sync:
        here = train(**options)
        assert same(here.state_dict(), there.state_dict()) and here.staleness == there.staleness


def test_nodes_above_leaves_stand_on_the_first_machine_of_their_group(tmp_path: Path) -> None:
    """Three machines are more than two: the first two send to a node on the first, the third to one of its own."""
    options: dict[str, Any] = {"learners": 6, "epochs": 1}
    run = begin(engine=Nodes(3, 2), run_dir=tmp_path, **options)
    there = run.wait(PATIENCE)
    crew = run._handle._run.host.nodes
    assert crew.tree.parent == {0: 3, 1: 3, 2: 4, 3: -1, 4: -1}
    assert crew.sites == {0: 0, 1: 1, 2: 2, 3: 0, 4: 2}
    assert same(there.state_dict(), train(**options).state_dict())


def test_a_node_above_may_be_on_a_machine_without_shards() -> None:
    """The learners' machines are 1 to 3; what lies in their slots still reaches the leading shard before the sums."""
    engine = Nodes(4, 2, server_nodes=1)
    options: dict[str, Any] = {"learners": 6, "epochs": 1, "topology": "tree:2,servers=1"}
    run = begin(engine=engine, **options)
    there = run.wait(PATIENCE)
    crew = run._handle._run.host.nodes
    assert crew.sites[crew.tree.parent[2]] == 1 and crew.sites[crew.tree.parent[3]] == 3
    assert same(there.state_dict(), train(**options).state_dict())


FREE = ["softsync:1", "softsync:3", "async", "ssp:1,rate=share", "hardsync until 1 then async"]


@pytest.mark.parametrize("sync", FREE)
def test_every_gradient_counts_once_with_its_staleness(sync: str, tmp_path: Path) -> None:
    result = train(sync=sync, engine=Nodes(2, 2), run_dir=tmp_path, clocks=True)
    rows = [tuple(map(int, row)) for row in read_clocks(tmp_path)]
    assert result.gradients == len(rows) == 2 * 13 and result.dropped == 0
    assert result.statistics.tables[0].examples == EPOCHS * SIZE
    assert Counter(version - 1 - stamp for version, _, stamp in rows) == result.staleness.histogram


WIDTH = 300
BYTES = 4 * (WIDTH * WIDTH + WIDTH)


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(6, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2))


def test_one_sum_of_a_machine_crosses_in_place_of_a_gradient_of_each_learner() -> None:
    """Three learners beyond a link: a sum up and a version down for each update."""
    options: dict[str, Any] = {
        "model": wide,
        "learners": 3,
        "batch_size": 8,
        "optimizer": partial(SGD, lr=0.1),
    }
    with wire() as way:
        engine = Nodes(2, 3, server_nodes=1, through=way.through)
        tree = train(engine=engine, topology="tree:3,servers=1", **options)
        over_tree = way.passed + way.came
    with wire() as way:
        engine = Nodes(2, 3, server_nodes=1, through=way.through)
        flat = train(engine=engine, topology="servers:1", **options)
        over_servers = way.passed + way.came
    assert tree.updates == flat.updates
    assert 1.5 < over_tree / BYTES / tree.updates < 2.7 and over_servers / BYTES / flat.updates > 3.3


# -- losses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", ["hardsync", "softsync:1"])
@pytest.mark.parametrize("site", [0, 1])
def test_a_lost_leaf_is_started_anew_on_its_machine(sync: str, site: int, tmp_path: Path) -> None:
    gate = tmp_path / "open"
    objective = partial(held, str(gate))
    run = begin(sync=sync, engine=Nodes(2, 2), epochs=3, loss=None, objective=objective)
    until(lambda: version(run) >= 2)
    os.kill(pid_of(run, "node", site), signal.SIGKILL)
    until(lambda: any(p.role == "node" and p.rank == 2 for p in run.statistics().processes))
    gate.touch()
    result = run.wait(PATIENCE)
    assert kinds(result) == ["node lost"]
    assert f"node 2 takes its place on machine {site}" in result.events[0].what
    assert result.statistics.tables[0].examples == 3 * SIZE and result.dropped == 0
    if sync == "hardsync":
        options: dict[str, Any] = {"epochs": 3, "loss": None, "objective": objective}
        assert same(result.state_dict(), train(**options).state_dict())


@pytest.mark.sweep(1)
@pytest.mark.parametrize("sync", ["hardsync", "async"])
def test_a_machine_with_a_node_above_others_is_lost_and_those_send_to_the_root(
    sync: str, tmp_path: Path
) -> None:
    """Machine 2 has a leaf and the node above it and machine 3's; machine 0 has the shards and a learner."""
    gate, engine = tmp_path / "open", Nodes(4, 1, apart=True)
    run = begin(
        sync=sync,
        engine=engine,
        epochs=6,
        topology="tree:2,servers=1",
        loss=None,
        objective=partial(held, str(gate)),
        model=plain,
        replace=True,
    )
    until(lambda: version(run) >= 2)
    assert run._handle._run.host.nodes.sites == {0: 0, 1: 1, 2: 2, 3: 3, 4: 0, 5: 2}
    engine.cluster.agents[2].signal(signal.SIGKILL, all_of_it=True)
    until(lambda: "machine lost" in [event.kind for event in run._handle._run.recorder.outcome.events])
    gate.touch()
    result = run.wait(PATIENCE)
    assert kinds(result) == ["machine lost", "lost", "replaced"]
    check_accounts(result)
    assert result.statistics.tables[0].examples == 6 * SIZE


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("sync", ["hardsync", "softsync:1"])
def test_a_lost_learner_leaves_its_leaf_and_joiners_come_to_another(
    sync: str, replace: bool, tmp_path: Path
) -> None:
    gate = tmp_path / "open"
    run = begin(
        sync=sync,
        engine=Nodes(2, 3),
        epochs=4,
        loss=None,
        objective=partial(held, str(gate)),
        replace=replace,
        on_error="continue",
    )
    until(lambda: version(run) >= 2)
    os.kill(pid_of(run, "learner", 3), signal.SIGKILL)
    run.add_learners(1)
    until(lambda: any(p.role == "learner" and p.rank == 4 for p in run.statistics().processes))
    gate.touch()
    result = run.wait(PATIENCE)
    assert "lost" in kinds(result) and "joined" in kinds(result) and ("replaced" in kinds(result)) == replace
    assert result.statistics.tables[0].examples == 4 * SIZE and result.dropped == 0


@pytest.mark.parametrize("sync", ["hardsync", "async"])
def test_a_lost_shard_goes_back_and_the_tree_begins_anew(sync: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"sync": sync, "epochs": 4, "model": plain}
    script = "kill shard 1 at version 6"
    run = begin(script, **options, engine=Nodes(2, 2), run_dir=tmp_path, checkpoint_every=3)
    result = run.wait(PATIENCE)
    assert {"shard lost", "recovered"} <= set(kinds(result)) and "lost" not in kinds(result)
    assert result.statistics.tables[0].examples == 4 * SIZE
    if sync == "hardsync":
        assert same(result.state_dict(), train(**options).state_dict())


def test_a_lost_machine_with_a_shard_goes_back_without_it(tmp_path: Path) -> None:
    engine = Nodes(3, 2, apart=True)
    gate = tmp_path / "open"
    objective = partial(held, str(gate))
    run = begin(
        engine=engine, epochs=4, model=plain, learners=5, run_dir=tmp_path / "run", checkpoint_every=2,
        topology="tree:2,servers=3", loss=None, objective=objective,
    )  # fmt: skip
    until(lambda: version(run) >= 4)
    engine.cluster.agents[1].signal(signal.SIGKILL, all_of_it=True)
    until(lambda: "recovered" in [event.kind for event in run._handle._run.recorder.outcome.events])
    gate.touch()
    result = run.wait(PATIENCE)
    assert {"machine lost", "recovered", "lost"} <= set(kinds(result))
    check_accounts(result)
    assert result.statistics.tables[0].examples == 4 * SIZE


def test_a_run_goes_on_with_the_same_bits_on_one_machine_and_back(tmp_path: Path) -> None:
    whole = train(epochs=4)
    train(epochs=2, engine=Nodes(2, 2), run_dir=tmp_path)
    train(epochs=3, resume=tmp_path)
    on = train(epochs=4, engine=Nodes(2, 2), resume=tmp_path)
    assert same(whole.state_dict(), on.state_dict())


def test_the_dial_turns_while_it_runs() -> None:
    run = begin(epochs=10_000, engine=Nodes(2, 2))
    Faults("change to softsync:1 at version 10; change to delayed:1 at version 40; stop at version 80").play(
        run
    )
    result = run.wait(PATIENCE)
    assert result.version >= 80 and result.gradients > result.version
    check_accounts(result)


def seated() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 2)).double()


def doubled(model: nn.Module, batch: Any) -> Any:
    return F.cross_entropy(model(batch[0].double()), batch[1])


def test_groups_of_seats_send_to_their_machines_leaf() -> None:
    options: dict[str, Any] = {
        "model": seated,
        "loss": None,
        "objective": doubled,
        "learners": 2,
        "group": 2,
        "plan": {"0": "model", "2": "rows"},
    }
    here = train(**options).state_dict()
    there = train(engine=Nodes(2, 2), **options).state_dict()
    assert all((here[name] - there[name]).abs().max() < 1e-10 for name in here)
