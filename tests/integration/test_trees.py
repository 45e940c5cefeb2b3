"""Runs over trees of servers (R7, M14), simulated and in processes: as over flat servers, through losses of anybody."""

import os
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import cloudpickle
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import syncline as sl
from syncline.errors import LostError, NotYetError
from syncline.report.clock_file import read_clocks
from syncline.testing import Faults, Local, Nodes
from syncline.testing.hunt import case_player as playing
from syncline.testing.hunt.case import random_case

cloudpickle.register_pickle_by_value(sys.modules[__name__])

PATIENCE = 100.0  # seconds until a run counts as hung: a failure, not a measurement


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.squeeze(1) - target).square().mean()


class Gated:
    """An objective that waits after some batches, until the faults have been played."""

    def __init__(self, gate: Path) -> None:
        self.gate, self._calls = gate, 0

    def __call__(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        self._calls += 1
        while self._calls > 15 and not self.gate.exists():
            time.sleep(0.005)
        return loss(model(batch[0]), batch[1])


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.02, momentum=0.9)


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))


def run(topology: str, sync: str = "hardsync", **given: object) -> sl.Result:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(190, 4), torch.randn(190))
    options: dict = {
        "learners": 7,
        "batch_size": 4,
        "epochs": 2,
        "seed": 3,
        "engine": sl.Sim(check=True),
    } | given
    options |= {"loss": loss} if "objective" not in options else {}
    return sl.train(make_model(), data, optimizer=sgd, sync=sync, topology=topology, **options)


def difference(a: sl.Result, b: sl.Result) -> float:
    mine, other = a.state_dict(), b.state_dict()
    return max(float((mine[name].double() - other[name].double()).abs().max()) for name in mine)


TREES = ["tree:2", "tree:3,servers=2", "tree:4,servers=3", "tree:9"]
CASTS = ["tree:2,broadcast", "tree:3,broadcast,servers=2"]  # tree:2 has a level above the leaves
DOWNPOUR = "downpour:push=1,fetch=2,local_lr=0.02"


@pytest.mark.sweep(6)
@pytest.mark.parametrize("topology", TREES)
@pytest.mark.parametrize("sync", ["hardsync", "delayed:1", "delayed:2", "hardsync until 1 then delayed:1"])
def test_lockstep_equals_flat_servers_to_rounding(topology: str, sync: str) -> None:
    flat, tree = run("servers:2", sync), run(topology, sync)
    assert (tree.version, tree.gradients) == (flat.version, flat.gradients)
    assert tree.staleness.histogram == flat.staleness.histogram
    assert difference(flat, tree) < 1e-5
    assert difference(tree, run(topology, sync)) == 0.0, "bits repeat"


@pytest.mark.sweep(12)
@pytest.mark.parametrize("topology", [*TREES, *CASTS])
@pytest.mark.parametrize(
    "sync",
    ["softsync:1", "softsync:3", "async", "ssp:1,rate=share", "hardsync until 1 then async", DOWNPOUR],
)
def test_every_gradient_counts_once_with_its_staleness(topology: str, sync: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        result = run(topology, sync, run_dir=folder, clocks=True)
        rows = clocks(Path(folder))
    assert result.gradients == len(rows) == 2 * 48 and result.dropped == 0
    assert result.statistics.tables[0].examples == 2 * 190
    assert Counter(version - 1 - stamp for version, _, stamp in rows) == result.staleness.histogram


def clocks(folder: Path) -> list[tuple[int, int, int]]:
    return [tuple(map(int, row)) for row in read_clocks(folder)]  # type: ignore[misc]


SCRIPTS = [
    "kill learner 2 at version 3",
    "kill learner 0 at version 2; kill learner 6 at version 2",
    "kill node 0 at version 3",
    "kill node 1 at version 2; kill node 2 at version 5",
    "kill node 4 at version 3",  # above leaves, in tree:2
    "kill node 0 at version 2; kill learner 5 at version 2; add 2 at version 4",
    "add 3 at version 4",
]


@pytest.mark.sweep(18)
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("sync", ["hardsync", "delayed:1", "softsync:1", "async"])
@pytest.mark.parametrize("topology", ["tree:2,servers=2", "tree:3", "tree:2,broadcast,servers=2"])
def test_nobody_is_missed_for_ever_and_every_example_counts_once(
    topology: str, sync: str, script: str
) -> None:
    result = run(topology, sync, engine=sl.Sim(script=script, check=True), on_error="continue")
    assert result.statistics.tables[0].examples == 2 * 190
    assert result.dropped == 0


@pytest.mark.sweep(2)
@pytest.mark.parametrize("topology", ["tree:2,servers=2", "tree:9"])
@pytest.mark.parametrize("sync", ["hardsync", "softsync:1"])
def test_a_lost_shard_and_a_resumed_run_go_on_over_the_tree(topology: str, sync: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        lost = run(
            topology,
            sync,
            engine=sl.Sim(script="kill shard 0 at version 8", check=True),
            run_dir=folder,
            checkpoint_every=3,
        )
        assert lost.statistics.tables[0].examples == 2 * 190
    with tempfile.TemporaryDirectory() as folder:
        run(topology, sync, run_dir=folder, checkpoint_every=3)
        again = run(topology, sync, resume=folder, epochs=3)
        assert again.statistics.tables[0].examples == 3 * 190


@pytest.mark.parametrize("given, words", [
    ({"topology": "tree:2", "engine": Nodes(2, 2, grow=True)}, "a machine that joins would have no leaf"),
    ({"topology": "tree:2,broadcast", "engine": "local", "group": 2}, "with group=2, whose seats must read one"),
])  # fmt: skip
def test_what_is_not_built_yet_says_so(given: dict, words: str) -> None:
    with pytest.raises(NotYetError, match=words):
        run(**given)


def test_nodes_of_trees_are_killed_by_scripts_and_no_more() -> None:
    with pytest.raises(
        sl.UsageError, match="nodes are those of the tree, and can be killed; this run is over tree:2"
    ):
        run("tree:2", engine=sl.Sim(script="pause node 0 for 1 s at version 1"))
    with pytest.raises(sl.UsageError, match="a leaf's sum is taken whole"):
        run("tree:2", engine=sl.Sim(script="change to backup:1 at version 1"))


HUNTED = (
    "hardsync",
    "delayed:1",
    "delayed:3",
    "softsync:1",
    "async",
    "ssp:0",
    "hardsync until 1 then softsync:1",
)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("sync", HUNTED)
def test_random_jobs_with_faults_keep_every_account(sync: str, seed: int) -> None:
    """The hunt's own cases, over a tree, with a node that dies."""
    case = random_case(seed, sync, learners=3 + seed % 3)
    unknown = ("change", "node", "link")  # to trees, or with another meaning there
    faults = [line for line in case.script.split("; ") if line and not any(word in line for word in unknown)]
    script = "; ".join([*faults, f"kill node {seed % 3} at {1 + seed} s"])
    for broadcast in (False, True):
        playing.run(replace(case, fan_in=2, script=script, broadcast=broadcast))


# -- in processes ------------------------------------------------------------------------------------------------


def in_processes(topology: str, sync: str, script: str = "", **given: object) -> sl.Result:
    """Four learners; a run that hangs is stopped and fails."""
    options: dict = {"learners": 4, "engine": "local", "threads": 1, "wait": False} | given
    if not script:
        return run(topology, sync, **options).wait(PATIENCE)
    with tempfile.TemporaryDirectory() as folder:
        gated = Gated(Path(folder) / "gate")
        handle = run(topology, sync, objective=gated, epochs=3, **options)
        faults, began = Faults(script).play(handle), time.monotonic()
        while len(faults.played) < len(faults.faults) and time.monotonic() - began < PATIENCE:
            time.sleep(0.005)
        gated.gate.touch()
        return handle.wait(PATIENCE)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("topology, learners, nodes", [
    ("tree:2,servers=2", 4, 2),
    ("tree:3,servers=1", 4, 2),
    ("tree:2,servers=2", 7, 6),  # with two nodes above the leaves
])  # fmt: skip
@pytest.mark.parametrize("sync", ["hardsync", "delayed:2"])
def test_nodes_that_are_processes_give_the_simulators_bits(
    topology: str, learners: int, nodes: int, sync: str
) -> None:
    local, twin = in_processes(topology, sync, learners=learners), run(topology, sync, learners=learners)
    assert (local.version, local.gradients) == (twin.version, twin.gradients)
    assert local.gradients == 96 and local.staleness.histogram == twin.staleness.histogram
    assert difference(local, twin) == 0.0
    roles = Counter(process.role for process in local.statistics.processes)
    assert roles["node"] == nodes


@pytest.mark.sweep(6)
@pytest.mark.parametrize(
    "sync",
    [
        "softsync:1",
        "async",
        "ssp:1,rate=share",
        "hardsync until 1 then async",
        "async until 1 then delayed:1",
        DOWNPOUR,
    ],
)
@pytest.mark.parametrize("topology", ["tree:2,servers=2", "tree:2,broadcast,servers=2"])
def test_in_processes_too_every_gradient_counts_once_with_its_staleness(
    topology: str, sync: str, tmp_path: Path
) -> None:
    result = in_processes(topology, sync, run_dir=tmp_path, clocks=True)
    rows = clocks(tmp_path)
    assert result.gradients == len(rows) == 2 * 48 and result.dropped == 0
    assert result.statistics.tables[0].examples == 2 * 190
    assert Counter(version - 1 - stamp for version, _, stamp in rows) == result.staleness.histogram


@pytest.mark.sweep(3)
@pytest.mark.parametrize("script", [
    "kill learner 2 at version 3",
    "kill node 0 at version 3",
    "kill node 1 at version 2; kill learner 0 at version 3; add 2 at version 4",
    "kill node 5 at version 2; kill node 0 at version 4",  # one above the leaves
])  # fmt: skip
@pytest.mark.parametrize(
    "topology, sync",
    [
        ("tree:2", "hardsync"),
        ("tree:2", "softsync:1"),
        ("tree:2,broadcast", "softsync:1"),
        ("tree:2,broadcast", "async"),
    ],
)
def test_learners_and_nodes_are_killed_and_every_example_counts_once(
    topology: str, sync: str, script: str
) -> None:
    learners, topology = 7 if "node 5" in script else 4, f"{topology},servers=2"
    result = in_processes(topology, sync, script, learners=learners, on_error="continue")
    assert result.statistics.tables[0].examples == 3 * 190
    assert result.dropped == 0 and result.staleness.gradients == result.gradients
    moved = [event.what for event in result.events if event.kind == "node lost"]
    assert len(moved) == script.count("kill node")
    assert all("ended with signal SIGKILL; " in what and " send " in what for what in moved)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("sync", ["hardsync", "async"])
@pytest.mark.parametrize("node, learners", [(0, 3), (3, 5)])  # a leaf, and one above two leaves
def test_a_node_dies_at_any_operation(sync: str, node: int, learners: int) -> None:
    point, died = 2 + node, True
    while died:
        engine = Local(crashes={f"node {node}": point})
        result = in_processes("tree:2", sync, engine=engine, learners=learners, epochs=1)
        assert result.statistics.tables[0].examples == 190 and result.dropped == 0
        died = [event.kind for event in result.events] == ["node lost"]
        point += 53
    assert point > 100


WIDTH = 1100  # its table is large enough for a copy that is filled beside the computation


def wide() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)
    )


@pytest.mark.parametrize(
    "sync, lr", [("softsync:1", 0.006), ("async", 0.002)]
)  # what comes unasked is staler
def test_a_second_copy_is_filled_beside_the_computation_and_swapped(
    sync: str, lr: float, tmp_path: Path
) -> None:
    """Every gradient is of one version that it had (else its staleness would be wrong, and the loss would not fall)."""
    torch.manual_seed(0)
    x = torch.randn(400, 4)
    result = sl.train(
        wide, TensorDataset(x, x.sum(1)), loss=loss, optimizer=partial(torch.optim.SGD, lr=lr), sync=sync, topology="tree:2,broadcast",
        learners=4, batch_size=8, epochs=4, seed=3, threads=1, run_dir=tmp_path, clocks=True,
    )  # fmt: skip
    rows = clocks(tmp_path)
    assert result.gradients == len(rows) == 4 * 50 and result.dropped == 0
    assert Counter(version - 1 - stamp for version, _, stamp in rows) == result.staleness.histogram
    for rank in {rank for _, rank, _ in rows}:
        stamps = [stamp for _, each, stamp in rows if each == rank]
        assert stamps == sorted(stamps) and stamps[-1] > stamps[0], "versions come, and none comes back"
    model = wide()
    before = loss(model(x), x.sum(1)).item()
    model.load_state_dict(result.state_dict())
    assert loss(model(x), x.sum(1)).item() < 0.6 * before


def test_a_dial_that_a_tree_cannot_follow_is_refused_while_it_runs() -> None:
    with run("tree:2", "async", learners=2, engine="local", threads=1, wait=False, epochs=50) as handle:
        with pytest.raises(sl.UsageError, match="a leaf's sum is taken whole"):
            handle.change("backup:1")
        handle.change("downpour:push=2,fetch=2,local_lr=0.1")


@pytest.mark.parametrize(
    "script", ["kill shard 0 at version 8", "kill node 0 at version 1; kill node 1 at version 2"]
)
def test_a_lost_shard_and_the_loss_of_all_leaves_go_back_to_a_checkpoint(script: str, tmp_path: Path) -> None:
    result = in_processes("tree:2,servers=2", "hardsync", script, run_dir=tmp_path, checkpoint_every=3)
    assert result.statistics.tables[0].examples == 3 * 190
    assert [event.kind for event in result.events if event.kind != "checkpoint"][-2:] == [
        "shard lost",
        "recovered",
    ]


def test_the_last_leaf_without_a_checkpoint_ends_the_run() -> None:
    script = "kill node 0 at version 2; kill node 1 at version 4"
    with pytest.raises(LostError, match=r"the last leaf, node [01] .* give run_dir= and checkpoint_every="):
        in_processes("tree:2", "async", script)


def test_a_run_over_processes_resumes_to_the_bits_of_one_that_went_on(tmp_path: Path) -> None:
    in_processes("tree:2,servers=2", "hardsync", run_dir=tmp_path, checkpoint_every=5)
    resumed = in_processes("tree:2,servers=2", "hardsync", resume=tmp_path, epochs=3)
    assert difference(resumed, in_processes("tree:2,servers=2", "hardsync", epochs=3)) == 0.0


def steps_of_own_data(session: sl.Session, begun: Path, places: tuple[int, ...]) -> None:
    """Start in the order of the ranks' places, each when the one before is about to publish. A loader would begin for all together."""
    while len(list(begun.iterdir())) < places[session.rank]:
        time.sleep(0.002)
    model = make_model()
    optimizer = session.optimizer(model, sgd)
    generator = torch.Generator().manual_seed(session.rank)
    for _ in range(6):
        x = torch.randn(5 + session.rank, 4, generator=generator)
        optimizer.zero_grad()
        loss(model(x), x.sum(1)).backward()
        (begun / str(session.rank)).touch()
        optimizer.step()


@pytest.mark.sweep(4)
@pytest.mark.parametrize("places", [(0, 1, 2, 3), (0, 3, 2, 1), (0, 2, 1, 3)])  # rank 0 initialises the table
@pytest.mark.parametrize("sync", ["hardsync", "delayed:1"])
def test_lockstep_repeats_its_bits_in_whatever_order_learners_start(
    sync: str, places: tuple[int, ...], tmp_path: Path
) -> None:
    """The first iteration's sums are those of whole leaves, too, as in the simulator."""
    options: dict = {"learners": 4, "sync": sync, "topology": "tree:2,servers=2", "threads": 1}
    found = sl.launch(steps_of_own_data, tmp_path, places, **options).state_dict()
    twin = sl.launch(steps_of_own_data, tmp_path, (0, 0, 0, 0), engine="sim", **options).state_dict()
    assert all(torch.equal(found[name], twin[name]) for name in twin)


@pytest.mark.parametrize("topology", ["tree:2,servers=1", "tree:4,servers=1"])
def test_a_learner_that_dies_before_it_starts_is_not_waited_for(topology: str, tmp_path: Path) -> None:
    """Its leaf forms sums without it, and the others' first update is made."""

    def steps(session: sl.Session) -> None:
        if session.rank == 1:
            while len(list(tmp_path.iterdir())) < 3:
                time.sleep(0.002)
            os.kill(os.getpid(), signal.SIGKILL)
        (tmp_path / str(session.rank)).touch()
        model = make_model()
        optimizer = session.optimizer(model, sgd)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()

    result = sl.launch(steps, learners=4, topology=topology, threads=1, on_error="continue", wait=False).wait(
        PATIENCE
    )
    assert (result.version, result.gradients) == (3, 9)
