"""`engine="ray"` on a real Ray cluster: three raylets on this machine, one cluster for all tests of this file.

What learners on other nodes do is in test_nodes.py, without Ray; here is what Ray does: places, agents, their loss.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
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
from syncline.testing.leftovers import children
from tests.integration.small_runs import alive, check_accounts, kinds, same
from tests.integration.value_runs import DIALS, check, loop

ray = pytest.importorskip("ray")
cloudpickle.register_pickle_by_value(sys.modules[__name__])

LONGEST = 100.0  # seconds
HELPER = Path(__file__).with_name("ray_cluster.py")
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.timeout(300),  # Ray takes its time on a busy machine
]


Cluster = subprocess.Popen[str]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Three nodes, of 2, 2 and 1 cores; the caller is on the first."""
    command = [sys.executable, str(HELPER), "2", "2", "1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None and starter.stdin is not None
        found = starter.stdout.readline().strip()
        assert found, "no Ray cluster came up"
        ray.init(address=found, logging_level="ERROR", log_to_driver=True)
        starter.address = found  # type: ignore[attr-defined]
        yield starter
        ray.shutdown()


@pytest.fixture(scope="module")
def address(cluster: Cluster) -> str:
    found: str = cluster.address  # type: ignore[attr-defined]
    return found


def points() -> TensorDataset:
    x = torch.randn(120, 6, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.sum(1) > 0).long())


def train(**options: Any) -> Any:
    settings = {
        "loss": F.cross_entropy,
        "optimizer": partial(SGD, lr=0.1, momentum=0.9),
        "sync": "hardsync",
        "learners": 4,
        "batch_size": 8,
        "epochs": 2,
        "threads": 1,
    }
    torch.manual_seed(0)
    return sl.train(nn.Linear(6, 2), points(), **{**settings, **options})


@pytest.mark.slow
def test_hardsync_on_three_nodes_gives_the_bits_of_local(address: str) -> None:
    assert same(train(engine="ray", evaluate=points()).state_dict(), train().state_dict())


@pytest.mark.long
@pytest.mark.slow
def test_a_tree_on_two_nodes_gives_the_bits_of_local_and_counts_every_gradient(address: str) -> None:
    """The leaf is the node, of two learners as on one machine."""
    options: dict[str, Any] = {"topology": "tree:2", "engine": sl.Ray(nodes=2)}
    there = train(**options)
    assert sum(each.role == "node" for each in there.statistics.processes) == 2
    assert same(there.state_dict(), train(topology="tree:2").state_dict())
    free = train(**options, sync="softsync:1")
    check_accounts(free)
    assert free.gradients == 2 * 15 and free.dropped == 0
    assert free.statistics.tables[0].examples == 2 * 120


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("topology", ["servers:2", "tree:2,servers=2", "tree:2,broadcast,servers=2"])
@pytest.mark.parametrize("dial", [*DIALS, "backup:1"])
def test_final_weights_are_those_of_a_sequential_reference(dial: str, topology: str, address: str) -> None:
    if dial == "backup:1" and "tree" in topology:
        pytest.skip("refused")
    check(dial, topology, sl.Ray(nodes=2), loop(dial), learners=4)


def where(session: sl.Session) -> int:
    """A function of this very file, and what it holds on to, travel. Gives the process that its fork server belongs to."""
    assert len(points()) == 120
    session.mean(1.0)
    words = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
    return int(words[1])


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::syncline.errors.LostWarning")
def test_groups_are_on_one_node_each_and_replaced_whole(address: str) -> None:
    options: dict[str, Any] = {"learners": 2, "group": 2, "plan": "data", "engine": sl.Ray(nodes=2)}
    assert same(train(**options).state_dict(), train(**{**options, "engine": "local"}).state_dict())
    run = train(**options, sync="async", epochs=100_000, replace=True, wait=False)
    while not {0, 1} <= set(run.statistics().steps):
        time.sleep(0.05)
    (seat,) = children(run._handle.pids()["learner 1"])
    os.kill(seat, signal.SIGKILL)
    while len([each for each in run.statistics().processes if each.role == "learner"]) < 3:
        time.sleep(0.05)
    run.stop()
    assert kinds(run.wait(LONGEST)) == ["lost", "replaced"]


@pytest.mark.long
@pytest.mark.slow
def test_learners_are_on_the_nodes_they_are_dealt_to(address: str) -> None:
    run = sl.launch(where, learners=3, engine=sl.Ray(nodes=3, learners_per_node=1), wait=False)
    agents = [about.pid for about in run._handle.machines.cluster.about.values()]
    assert run.wait(LONGEST).returned == [os.getpid(), *agents]
    while ray.available_resources()["CPU"] < 5.0:  # all that was reserved will be free again
        time.sleep(0.05)


def test_what_the_cluster_has_no_room_for_is_refused_in_one_line(address: str) -> None:
    for engine, words in [
        (sl.Ray(nodes=4), "nodes=4, but the Ray cluster has 3"),
        (sl.Ray(nodes=2, server_nodes=1), "learners=4 need as many cores, the Ray cluster has room for 2"),
    ]:
        with pytest.raises(sl.UsageError, match=words) as error:
            train(engine=engine)
        assert "\n" not in str(error.value)


@pytest.mark.long
@pytest.mark.slow
def test_the_cluster_is_measured_for_the_simulator(address: str) -> None:
    found = sl.Ray(nodes=2, learners_per_node=1).measure()
    assert (found.cores, found.learners_per_machine, found.beside) == (2, 1, True)
    assert found.card.bandwidth is not None and found.card.latency > 0
    simulated = train(engine=sl.Sim(found), learners=2)
    assert simulated.updates == 16 and simulated.simulated.moved > 0
    while ray.util.list_named_actors():  # what answered on the other node is ended
        time.sleep(0.05)


def slowly(model: nn.Module, batch: Any) -> Any:
    time.sleep(0.01)
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.long
@pytest.mark.slow
def test_the_loss_of_an_agent_is_the_loss_of_its_learners(address: str) -> None:
    run = train(
        engine=sl.Ray(nodes=2), sync="async", epochs=12, loss=None, objective=slowly, replace=True, wait=False
    )
    while (table := run.statistics().tables.get(0)) is None or table.version < 10:
        time.sleep(0.01)
    (agent,) = run._handle.machines.cluster.about.values()
    os.kill(agent.pid, signal.SIGKILL)
    result = run.wait(LONGEST)
    assert kinds(result).count("lost") >= 2 and "replaced" in kinds(result)
    assert result.statistics.tables[0].examples == 12 * 120


@pytest.mark.long
@pytest.mark.slow
def test_the_command_line_trains_on_the_cluster(address: str, tmp_path: Path) -> None:
    words = f"train --engine ray --learners 2 --epochs 1 --run-dir {tmp_path / 'run'} --set engine.nodes=2"
    done = subprocess.run(
        [sys.executable, "-m", "syncline", *words.split(), "--set", "engine.learners_per_node=1"],
        env={**os.environ, "RAY_ADDRESS": address},
        capture_output=True,
        text=True,
        timeout=LONGEST,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert (tmp_path / "run" / "checkpoints").is_dir()


ENDLESS = """
import os, pathlib, sys, torch, syncline as sl
def learner(session):
    optimizer = session.optimizer(torch.nn.Linear(2, 1), lambda p: torch.optim.SGD(p, lr=0.1))
    (pathlib.Path(sys.argv[1]) / f"learner {session.rank}").write_text(f"{os.getpid()} ")
    while True:
        session.mean(1.0)
folder = sys.argv[1]
sl.launch(learner, learners=2, engine=sl.Ray(nodes=2, learners_per_node=1))
"""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_remains_of_a_run_whose_driver_is_ended(number: int, address: str, tmp_path: Path) -> None:
    """By Ctrl-C, or by kill -9."""
    command = [sys.executable, "-c", ENDLESS.replace("sys.argv[1]", repr(str(tmp_path)))]
    with subprocess.Popen(command, env={**os.environ, "RAY_ADDRESS": address}) as driver:
        marks = [tmp_path / f"learner {rank}" for rank in range(2)]
        while not all(mark.exists() and mark.read_text().endswith(" ") for mark in marks):
            assert driver.poll() is None
            time.sleep(0.05)
        driver.send_signal(number)
    pids = [int(mark.read_text()) for mark in marks]
    while any(map(alive, pids)) or ray.available_resources()["CPU"] < 5.0:  # else the test's time is over
        time.sleep(0.05)


SCRIPT = """
import ray, torch, syncline as sl
scale = 3.0
def learner(session):
    model = torch.nn.Linear(2, 1)
    optimizer = session.optimizer(model, lambda p: torch.optim.SGD(p, lr=0.1))
    for (x,) in session.loader(torch.utils.data.TensorDataset(torch.ones(8, 2)), batch_size=2):
        optimizer.zero_grad(); (scale * model(x)).mean().backward(); optimizer.step()
    return session.rank
result = sl.launch(learner, learners=2, engine=sl.Ray("local"), sync="hardsync")
print(result.returned, result.updates, ray.is_initialized())
"""


@pytest.mark.long
@pytest.mark.slow
def test_without_a_cluster_a_ray_is_started_and_ended_with_the_run(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    environment |= {"RAY_TMPDIR": f"/tmp/{tmp_path.name[-8:]}"}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=LONGEST
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[0, 1] 2 False"


def raylet_of(node: str) -> int:
    (name,) = (each["RayletSocketName"] for each in ray.nodes() if each["NodeID"] == node)
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_text().split("\0")
        except OSError:
            continue
        if words[0].endswith("/raylet") and any(name in word for word in words):
            return int(path.parent.name)
    raise AssertionError(f"no raylet at {name}")


@pytest.mark.long
@pytest.mark.slow
def test_a_node_that_joins_the_ray_cluster_gets_a_learner(cluster: Cluster) -> None:
    """The cluster has a node more afterwards."""
    run = train(
        engine=sl.Ray(nodes=2, learners_per_node=1, grow=True),
        sync="async",
        learners=2,
        epochs=100_000,
        loss=None,
        objective=slowly,
        wait=False,
    )
    while not {0, 1} <= set(run.statistics().steps):
        time.sleep(0.05)
    assert cluster.stdin is not None
    cluster.stdin.write("1\n")
    cluster.stdin.flush()
    while 2 not in run.statistics().steps:
        time.sleep(0.05)
    agents = run._handle.machines.cluster
    assert set(agents.about) == {1, 2} and len(ray.util.list_named_actors()) == 2
    run.stop()
    result = run.wait(LONGEST)
    assert kinds(result) == ["machine joined", "joined"]
    check_accounts(result)
    while ray.available_resources()["CPU"] < 6.0:  # its room, too, is given back
        time.sleep(0.05)


@pytest.mark.slow
def test_a_lost_node_is_the_loss_of_its_learners_and_others_take_their_place(address: str) -> None:
    """The last test of this cluster: it has a node less afterwards."""
    run = train(
        engine="ray", sync="async", epochs=100_000, loss=None, objective=slowly, replace=True, wait=False
    )
    while (table := run.statistics().tables.get(0)) is None or table.version < 10:
        time.sleep(0.01)
    agents = run._handle.machines.cluster
    os.kill(raylet_of(agents._nodes[max(agents.about)].id), signal.SIGKILL)
    while len([each for each in run.statistics().processes if each.role == "learner"]) < 6:
        time.sleep(0.01)
    run.stop()
    result = run.wait(LONGEST)
    assert sorted(kinds(result)) == ["lost", "lost", "machine lost", "replaced", "replaced"]
    check_accounts(result)
