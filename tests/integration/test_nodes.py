"""Learners on other nodes than the shards: real processes and connections, the nodes' agents on this machine (no Ray needed)."""

from __future__ import annotations

import contextlib
import os
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
from torch.optim import SGD, Adam
from torch.utils.data import TensorDataset

import syncline as sl
from syncline.dial import Course
from syncline.testing import Faults, Nodes
from tests.integration.small_runs import PATIENCE, alive, check_accounts, kinds, same, until, with_faults
from tests.integration.wires import Late

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SIZE = 204  # uneven: 12 batches of 16 and one of 12


def points(size: int = SIZE) -> TensorDataset:
    x = torch.randn(size, 6, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.sum(1) > 0).long())


def net() -> nn.Module:
    """Everything that has a state of its own: batch statistics, dropout."""
    return nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Dropout(0.4), nn.Linear(40, 2))


def plain() -> nn.Module:
    """Draws nothing: what is computed again is the same."""
    return nn.Linear(6, 2)


def begin(script: str = "", **options: Any) -> sl.Run:
    settings = {
        "loss": F.cross_entropy,
        "optimizer": partial(Adam, lr=0.01),
        "sync": "hardsync",
        "topology": "servers:2",
        "learners": 3,
        "batch_size": 16,
        "epochs": 2,
        "seed": 5,
        "threads": 1,
    }
    begin = partial(sl.train, options.pop("model", net), points(), wait=False)
    return with_faults(script, begin, **{**settings, **options})


def train(**options: Any) -> sl.Result:
    return begin(**options).wait(PATIENCE)


@pytest.mark.parametrize("sync", ["hardsync", "delayed:2", "hardsync until 1 then delayed:1"])
def test_lockstep_gives_the_bits_of_local(sync: str) -> None:
    options: dict[str, Any] = {"sync": sync, "clip_norm": 0.5, "evaluate": points(50)}
    here, there = train(**options), train(engine=Nodes(3, 1), **options)
    assert same(here.state_dict(), there.state_dict())
    assert [record.metrics for record in here.history] == [record.metrics for record in there.history]
    assert here.staleness == there.staleness


def test_all_begin_with_the_same_buffers_where_no_learner_is_beside_the_shards() -> None:
    """What the first learner publishes reaches a machine that its own does not speak to."""
    there = train(engine=Nodes(3, 2, server_nodes=1), epochs=1)
    assert same(there.state_dict(), train(epochs=1).state_dict())


@pytest.mark.parametrize("sync", ["softsync:1", "async", "ssp:2"])
def test_one_learner_elsewhere_gives_the_bits_of_one_here(sync: str) -> None:
    """Which is what plain PyTorch gives (M2)."""
    there = train(sync=sync, learners=1, engine=Nodes(2, server_nodes=1))
    assert same(there.state_dict(), train(sync=sync, learners=1).state_dict())
    assert there.staleness.max == 0


def test_first_values_reach_machines_that_have_no_way_to_where_they_come_from() -> None:
    """Batch statistics among them: the shards are on a machine of their own, the first learner on another."""
    there = train(learners=2, epochs=1, topology="servers:1", engine=Nodes(3, 1, server_nodes=1))
    assert same(there.state_dict(), train(learners=2, epochs=1, topology="servers:1").state_dict())


@pytest.mark.parametrize("topology", ["servers:1", "tree:3,servers=1"])
def test_first_values_wait_until_relays_have_met(topology: str) -> None:
    """The machine of the shards connects late; until then the other's relay has nobody to send to."""
    options: dict[str, Any] = {"topology": topology, "epochs": 1}
    with contextlib.closing(Late()) as way:
        engine = Nodes(2, 3, server_nodes=1, through=way.through)
        run = begin(engine=engine, **options)
        machine = engine.cluster.agents[1]
        until(lambda: machine.host and any(list(machine.host._held.values())))  # the relay is told to send
        looked = machine.host.relay_beats
        until(lambda: machine.host.relay_beats > looked)
        way.let()
        there = run.wait(PATIENCE)
    assert same(there.state_dict(), train(**options).state_dict())


@pytest.mark.parametrize(
    "sync", ["softsync:1", "ssp:2", "backup:1"]
)  # two learners under each dial: test_matrix.py
def test_every_gradient_is_folded_once_or_counted_as_dropped(sync: str) -> None:
    result = train(sync=sync, engine=Nodes(2, 2))
    check_accounts(result)
    dial = Course.of(sync).first
    assert result.statistics.tables[0].examples == 2 * SIZE or dial.late == "drop"
    if sync == "softsync:1":
        assert result.updates < result.gradients
    if sync == "ssp:2":
        assert result.staleness.max <= 2 * (3 - 1) * 3


# -- joining and leaving -------------------------------------------------------------------------------------


def slowly(model: nn.Module, batch: Any) -> Any:
    time.sleep(0.005)
    return F.cross_entropy(model(batch[0]), batch[1])


def test_learners_join_on_the_node_with_the_fewest() -> None:
    engine = Nodes(3, 4)
    run = begin(sync="async", learners=2, epochs=100_000, loss=None, objective=slowly, engine=engine)
    run.add_learners(2)
    while not {2, 3} <= set(run.statistics().steps):
        time.sleep(0.01)
    (agent,) = engine.cluster.agents.values()  # dealt over two nodes
    assert len(agent.host.learners) == 2
    run.stop()
    result = run.wait(PATIENCE)
    assert kinds(result).count("joined") == 2
    check_accounts(result)


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("sync", ["hardsync", "async"])
def test_a_learner_lost_elsewhere_has_its_batches_handed_out_again(sync: str, replace: bool) -> None:
    script = "kill learner 2 at version 10"
    run = begin(script, sync=sync, epochs=6, engine=Nodes(2, 2), replace=replace)
    result = run.wait(PATIENCE)
    assert kinds(result)[0] == "lost" and ("replaced" in kinds(result)) == replace
    assert result.statistics.tables[0].examples == 6 * SIZE


LARGE = 5000  # squared: 100 MB


def dies_while_it_sends(session: sl.Session, folder: str, after: float) -> int:
    model = nn.Linear(LARGE, LARGE, bias=False)
    optimizer = session.optimizer(model, partial(SGD, lr=0.1))
    steps = 0
    for (x,) in session.loader(TensorDataset(torch.ones(10, LARGE)), batch_size=2):
        optimizer.zero_grad()
        model(x).mean().backward()
        mark = Path(folder) / "dead"
        if session.rank == 1 and steps == 1 and not mark.exists():
            mark.touch()
            kill = partial(os.kill, os.getpid(), signal.SIGKILL)
            threading.Timer(after, kill).start()
        optimizer.step()
        steps += 1
    return steps


@pytest.mark.slow
@pytest.mark.parametrize("after", [0.03])
def test_a_learner_killed_in_the_middle_of_a_large_transfer_leaves_no_trace(
    after: float, tmp_path: Path
) -> None:
    run = sl.launch(
        dies_while_it_sends,
        str(tmp_path),
        after,
        learners=2,
        sync="async",
        threads=1,
        engine=Nodes(2, 1),
        replace=True,
        wait=False,
    )
    result = run.wait(PATIENCE)
    assert kinds(result)[:2] == ["lost", "replaced"]
    check_accounts(result)
    assert result.statistics.tables[0].examples == 10


def test_a_lost_agent_takes_its_learners_along_and_others_take_their_place() -> None:
    engine = Nodes(3, 2)
    run = begin(
        sync="async",
        topology="servers:1",
        learners=4,
        epochs=10,
        loss=None,
        objective=slowly,
        engine=engine,
        replace=True,
    )
    while run.statistics().tables.get(0) is None or run.statistics().tables[0].version < 20:
        time.sleep(0.01)
    engine.cluster.agents[1].close()
    result = run.wait(PATIENCE)
    assert "lost" in kinds(result) and "replaced" in kinds(result)
    assert result.statistics.tables[0].examples == 10 * SIZE


# -- checkpoints ---------------------------------------------------------------------------------------------


def test_a_run_goes_on_with_the_same_bits_on_another_number_of_nodes(tmp_path: Path) -> None:
    whole = train(epochs=4)
    train(epochs=2, engine=Nodes(3, 1), run_dir=tmp_path)
    on = train(epochs=4, engine=Nodes(2, 2), resume=tmp_path)
    assert same(whole.state_dict(), on.state_dict())


@pytest.mark.parametrize("sync", ["hardsync", "async"])
def test_a_lost_shard_goes_back_and_learners_elsewhere_rejoin(sync: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"sync": sync, "epochs": 6, "model": plain}
    script = "kill shard 1 at version 12"
    run = begin(script, **options, engine=Nodes(2, 2), run_dir=tmp_path, checkpoint_every=5)
    result = run.wait(PATIENCE)
    assert "recovered" in kinds(result) and "lost" not in kinds(result)
    assert result.statistics.tables[0].examples == 6 * SIZE
    if sync == "hardsync":
        assert same(result.state_dict(), train(**options).state_dict())


# -- the rest of a session -----------------------------------------------------------------------------------


def everything(session: sl.Session) -> tuple[float, float, int]:
    models = [nn.Linear(6, 2), nn.Linear(6, 2)]
    first, second = (session.optimizer(model, partial(SGD, lr=0.1, momentum=0.9)) for model in models)
    for x, y in session.loader(points(), batch_size=16):
        for model, optimizer in zip(models, (first, second), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        session.log(rank=session.rank)
    mean = session.mean(float(session.rank))
    with torch.no_grad():
        models[0].weight.fill_(7.0)
    if session.rank == 0:
        session.put(models[0])
    state = first.state_dict()
    second.load_state_dict(state)
    print(f"learner {session.rank} was here")
    return mean, float(models[1].weight.sum()), len(state["state"])


def test_tables_means_logs_puts_states_and_prints(capfd: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"learners": 3, "threads": 1, "sync": "hardsync"}
    here = sl.launch(everything, **options)
    there = sl.launch(everything, engine=Nodes(3, 1), **options)
    assert there.returned == here.returned and there.returned[0][0] == 1.0
    assert same(there.state_dict(1), here.state_dict(1))
    assert sorted({metrics["rank"] for _, _, metrics in there.logs}) == [0, 1, 2]
    assert capfd.readouterr().out.count("learner 2 was here") == 2


def inode_of(session: sl.Session, data: torch.Tensor) -> tuple[int, str]:
    """The file that the data lie in, and who has forked this learner."""
    assert session.rank >= 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, inode, *_ = line.split()
        low, high = (int(each, 16) for each in span.split("-"))
        if low <= data.data_ptr() < high:
            return int(inode), line.rpartition("/")[2]
    raise AssertionError("the data lie nowhere")


def test_data_lie_on_each_node_once() -> None:
    found = sl.launch(inode_of, torch.zeros(1 << 20), learners=4, engine=Nodes(2, 2)).returned
    assert all("syncline-cargo" in name for _, name in found)
    assert found[0] == found[1] != found[2] == found[3]


def test_the_dial_is_changed_and_the_run_stopped_from_outside() -> None:
    run = begin(sync="hardsync", epochs=10_000, engine=Nodes(2, 2))
    Faults("change to softsync:1 at version 10; stop at version 60").play(run)
    result = run.wait(PATIENCE)
    assert result.version >= 60 and result.gradients > result.version
    states = {
        process.rank: process.state for process in result.statistics.processes if process.role == "learner"
    }
    assert states == {0: "returned", 1: "returned", 2: "returned"}


def fails(session: sl.Session) -> None:
    if session.rank == 1:
        raise KeyError("of its own")
    time.sleep(60)


def test_what_a_learner_raises_elsewhere_is_raised_here() -> None:
    with pytest.raises(sl.LearnerError, match=r"learner 1 .*(\n.*)*KeyError: 'of its own'") as error:
        sl.launch(fails, learners=2, engine=Nodes(2, 1))
    assert isinstance(error.value.__cause__, KeyError)


def hangs(session: sl.Session, folder: str) -> None:
    optimizer = session.optimizer(nn.Linear(2, 2), partial(SGD, lr=0.1))
    assert optimizer is not None
    if session.rank == 1:
        (Path(folder) / "pid").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)


def test_a_learner_that_hangs_elsewhere_is_ended_there(tmp_path: Path) -> None:
    run = sl.launch(
        hangs, str(tmp_path), learners=2, engine=Nodes(2, 1), patience=5.0, kill_hung=True, wait=False
    )
    result = run.wait(PATIENCE)
    assert kinds(result)[:2] == ["hangs", "killed"]
    pid = int((tmp_path / "pid").read_text())
    assert not alive(pid)  # the run's end waits for its agents


def test_warm_start_is_one_learners_alone() -> None:
    result = train(sync="softsync:1", warmstart=5, engine=Nodes(2, 2))
    check_accounts(result)
    assert result.statistics.tables[0].examples == 2 * SIZE
