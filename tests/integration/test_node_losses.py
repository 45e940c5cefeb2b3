"""Nodes that are killed, freeze or cannot be reached: survivors go on, what comes back is fenced (no Ray needed)."""

from __future__ import annotations

import os
import signal
import subprocess
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
from syncline.testing import Nodes
from tests.integration.small_runs import PATIENCE, alive, check_accounts, kinds, until
from tests.integration.wires import ControlConnection, Stalling, wire

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SIZE, EPOCHS = 204, 3


def slowly(model: nn.Module, batch: Any) -> Any:
    time.sleep(0.005)
    return F.cross_entropy(model(batch[0]), batch[1])


steps = 0


def held(gate: str, model: nn.Module, batch: Any) -> Any:
    """Waits after a few steps until the gate is open."""
    global steps
    steps += 1
    while steps > 5 and not Path(gate).exists():
        time.sleep(0.005)
    return slowly(model, batch)


def begin(engine: Nodes, **options: Any) -> sl.Run:
    x = torch.randn(SIZE, 6, generator=torch.Generator().manual_seed(0))
    settings = {
        "objective": slowly,
        "optimizer": partial(SGD, lr=0.1),
        "sync": "async",
        "learners": 3,
        "batch_size": 16,
        "epochs": EPOCHS,
        "threads": 1,
    }
    data = TensorDataset(x, (x.sum(1) > 0).long())
    return sl.train(nn.Linear(6, 2), data, wait=False, engine=engine, **{**settings, **options})


def version(run: sl.Run) -> int:
    table = run.statistics().tables.get(0)
    return table.version if table else -1


def states(run: sl.Run, rank: int) -> list[str]:
    """Of all learners that this rank had."""
    return [each.state for each in run.statistics().processes if (each.role, each.rank) == ("learner", rank)]


FAULTS = {
    "agent killed": (signal.SIGKILL, False),
    "node killed": (signal.SIGKILL, True),
    "node frozen": (signal.SIGSTOP, True),
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("fault", "sync", "replace"),
    [
        ("agent killed", "hardsync", True),
        ("node killed", "async", False),
        ("node frozen", "hardsync", False),
        ("node frozen", "async", True),
    ],
)
def test_learners_of_a_lost_node_are_lost_and_others_compute_their_batches(
    fault: str, sync: str, replace: bool, tmp_path: Path
) -> None:
    engine = Nodes(3, 1, apart=True)
    gate = tmp_path / "open"
    run = begin(engine, sync=sync, replace=replace, objective=partial(held, str(gate)))
    until(lambda: version(run) >= 3)
    number, all_of_it = FAULTS[fault]
    engine.cluster.agents[1].signal(number, all_of_it=all_of_it)
    until(lambda: states(run, 1)[0] == "lost")
    gate.touch()
    result = run.wait(PATIENCE)
    assert kinds(result).count("lost") == 1 and ("replaced" in kinds(result)) == replace
    assert result.statistics.tables[0].examples == EPOCHS * SIZE
    check_accounts(result)


def test_a_frozen_agent_is_declared_dead_and_whatever_comes_back_ends_itself() -> None:
    """Its learner would go on: it is of a node that is not there any more."""
    engine = Nodes(3, 1, apart=True)
    run = begin(engine, epochs=100_000, replace=True)
    until(lambda: version(run) >= 10)
    agent = engine.cluster.agents[1]
    pids = agent.pids
    assert len(pids) == 4  # the agent, its fork server, its relay, a learner
    agent.signal(signal.SIGSTOP, all_of_it=False)
    until(lambda: len(states(run, 1)) > 1)
    agent.signal(signal.SIGCONT, all_of_it=False)
    until(lambda: not alive(pids[3]))
    seen = version(run)
    until(lambda: version(run) > seen + 10)
    run.stop()
    result = run.wait(PATIENCE)
    assert kinds(result).count("lost") == kinds(result).count("replaced") == 1
    check_accounts(result)


def silent_there(way: ControlConnection) -> None:
    way.silence("there")


def silent_back(way: ControlConnection) -> None:
    way.silence("back")


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "fault", [ControlConnection.cut, ControlConnection.silence, silent_there, silent_back]
)
def test_a_node_behind_a_broken_wire_is_lost_and_finds_that_out_when_it_is_mended(
    fault: Callable[[ControlConnection], None],
) -> None:
    with wire() as way:
        engine = Nodes(2, 2, through=way.through)
        run = begin(engine, learners=4, epochs=100_000, replace=True)
        until(lambda: version(run) >= 10)
        fault(way)
        until(lambda: len(states(run, 2)) > 1 and len(states(run, 3)) > 1)
        way.speak()
        until(lambda: not engine.cluster.agents[1]._thread.is_alive())
        seen = version(run)
        until(lambda: version(run) > seen + 10)
        run.stop()
        result = run.wait(PATIENCE)
    assert kinds(result).count("lost") == kinds(result).count("replaced") == 2
    check_accounts(result)


def test_a_silence_that_ends_soon_is_no_loss() -> None:
    """TCP sends again what was under way."""
    with wire() as way:
        run = begin(Nodes(2, 2, through=way.through), learners=4, epochs=100_000)
        until(lambda: len(run.statistics().steps) == 4)  # on a busy machine one of them may begin late
        way.silence()
        time.sleep(1.0)
        way.speak()
        seen = run.statistics().steps
        until(lambda: all(run.statistics().steps[rank] > seen[rank] + 5 for rank in range(4)))
        run.stop()
        result = run.wait(PATIENCE)
    assert kinds(result) == []
    check_accounts(result)


def test_a_caller_that_stood_still_itself_declares_nobody_dead() -> None:
    """As after Ctrl-Z and fg."""
    run = begin(Nodes(2, 1), learners=2, epochs=100_000)
    until(lambda: version(run) >= 10)
    pulse = run._handle.machines.pulse
    looks: list[None] = []

    def stand_still() -> None:
        looks.append(None)
        if len(looks) == 1:
            time.sleep(6.0)

    pulse.look = stand_still
    until(lambda: len(looks) > 12)
    run.stop()
    assert kinds(run.wait(PATIENCE)) == []


def test_the_end_of_all_learners_names_the_last_checkpoint(tmp_path: Path) -> None:
    engine = Nodes(2, 2, apart=True, server_nodes=1)
    run = begin(engine, learners=2, epochs=100_000, run_dir=tmp_path, checkpoint_every=5)
    until(lambda: version(run) >= 12)
    engine.cluster.agents[1].signal(signal.SIGKILL, all_of_it=True)
    words = r"all learners are lost, .*its machine: .*; the last checkpoint is .*/checkpoints/0+\d+: resume="
    with pytest.raises(sl.RunError, match=words) as error:
        run.wait(PATIENCE)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("who", ["relay 0", "shard 1"])
def test_a_frozen_relay_or_shard_is_ended_and_all_goes_back(who: str, tmp_path: Path) -> None:
    """The caller's relay by itself, a shard elsewhere with `kill_hung`."""
    run = begin(
        Nodes(2, 2),
        topology="servers:2",
        learners=4,
        epochs=100_000,
        run_dir=tmp_path,
        checkpoint_every=20,
        patience=5.0,
        kill_hung=True,
    )
    until(lambda: version(run) >= 30)
    os.kill(run._handle.pids()[who], signal.SIGSTOP)
    events = run._handle._run.recorder.outcome.events
    until(lambda: "recovered" in [event.kind for event in events])
    seen = version(run)
    until(lambda: version(run) > seen + 10)
    run.stop()
    result = run.wait(PATIENCE)
    found = [kind for kind in kinds(result) if kind != "checkpoint"]
    assert found == ["hangs", "killed", "shard lost", "recovered"]
    check_accounts(result)


LARGE = 3000  # squared: 36 MB, more than lies on its way


def pauses(session: sl.Session, folder: str, seconds: float) -> int:
    """Does not read for so long what is on its way to it."""
    model = nn.Linear(LARGE, LARGE, bias=False)
    optimizer = session.optimizer(model, partial(SGD, lr=0.1))
    for (x,) in session.loader(TensorDataset(torch.ones(6, LARGE)), batch_size=1):
        optimizer.zero_grad()
        model(x).mean().backward()
        if session.rank == 1 and not (Path(folder) / "mark").exists():
            (Path(folder) / "mark").touch()
            command = f"kill -STOP {os.getpid()}; sleep {seconds}; kill -CONT {os.getpid()}"
            subprocess.Popen(["sh", "-c", command], start_new_session=True)
        optimizer.step()
    return session.rank


@pytest.mark.slow
def test_a_learner_that_does_not_read_for_a_while_is_not_lost(tmp_path: Path) -> None:
    """Whether it hangs is for `patience` to say, not for the network."""
    result = sl.launch(pauses, str(tmp_path), 8.0, learners=2, sync="hardsync", threads=1, engine=Nodes(2, 1))
    assert kinds(result) == [] and result.returned == [0, 1]


def test_a_node_that_falls_silent_while_it_gets_what_its_learners_run_is_refused_in_one_line() -> None:
    with (
        wire(Stalling) as way,
        pytest.raises(
            sl.RunError, match=r"cannot reach .*\(node 1\).*: it does not answer any more"
        ) as error,
    ):
        sl.launch(pauses, torch.zeros(16 << 20), 0.0, learners=2, engine=Nodes(2, 1, through=way.through))
    assert "\n" not in str(error.value)
