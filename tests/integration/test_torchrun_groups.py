"""One group under torchrun: its processes are the seats of one learner, which updates what is cut over them (M15, M16)."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_torchrun import finish, heard, read, script, torchrun

HEAD = """
import json, os, signal, sys, time
from functools import partial
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
import syncline as sl

DRAW = torch.Generator().manual_seed(0)
X = torch.randn(50, 3, 8, 8, generator=DRAW, dtype=torch.float64)
Y = torch.randint(5, (50,), generator=DRAW)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
HYBRID = {"0": "spatial", "1": "spatial", "4": "model", "6": "rows"}
FOLDER, WORLD = sys.argv[1], int(os.environ["WORLD_SIZE"])
HERE = {"group": WORLD} if WORLD > 1 else {}

def network():
    torch.manual_seed(1)
    layers = (nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(256, 12), nn.Tanh(), nn.Linear(12, 5)).double()

def trained(**options):
    settings = {"learners": 1, "batch_size": 8, "epochs": 2, "optimizer": SGD, "loss": F.cross_entropy, **options}
    return sl.train(network(), (X, Y), **settings)

def alike(ours, theirs):
    assert ours.updates == theirs.updates and ours.gradients == theirs.gradients
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for name, tensor in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], tensor, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(ours.model(X[:2]), theirs.model(X[:2]), rtol=1e-10, atol=1e-10)

def write(name, **values):
    path = f"{FOLDER}/{name}.{os.environ['RANK']}.json"
    with open(path + ".tmp", "w") as file:
        json.dump(values, file)
    os.replace(path + ".tmp", path)

def refusal(call):
    try:
        call()
    except sl.UsageError as error:
        return f"{type(error).__name__}: {error}"
"""

LEARN = """
CASES = {
    "hybrid": {"plan": HYBRID},
    "blocking, with a limit on the norm": {"plan": HYBRID, "clip_norm": 0.1, "topology": "allreduce"},
    "cut everywhere": {"plan": {"0": "model", "1": "model", "4": "model", "6": "model"}, "optimizer": ADAM},
    "by examples": {"plan": "data", "evaluate": (X, Y), "sync": "softsync:1"},
    "regularised": {
        "plan": HYBRID,
        "regulariser": lambda model: 0.1 * model.get_submodule("4").weight.square().sum() * model.get_submodule("6").weight.norm(),
    },
    "the cheapest": {"optimizer": ADAM, "check": True, "sync": "hardsync:reference_batch=2"},
}
for name, options in CASES.items():
    ours = trained(**HERE, **options)
    plain = {key: value for key, value in options.items() if key not in ("plan", "check", "topology")}
    theirs = trained(engine="sim", **plain)
    alike(ours, theirs)
    assert ours.history[-1].loss == ours.history[-1].losses[0]
    assert abs(ours.history[-1].loss - theirs.history[-1].loss) < 1e-10
    assert ours.history[-1].metrics.keys() == theirs.history[-1].metrics.keys()

def dropping(**options):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 12), nn.Dropout(), nn.Linear(12, 5)).double()
    return sl.train(model, (X, Y), batch_size=8, epochs=3, optimizer=SGD, loss=F.cross_entropy, plan="data", **HERE, **options)

# evaluations draw none of the training's random numbers
torch.testing.assert_close(dropping(evaluate=(X, Y)).state_dict(), dropping().state_dict(), rtol=0, atol=0)

def own_loop(session, way):
    mine = sl.partition(network(), example=X[:8])
    optimizer = session.optimizer(mine, ADAM)
    assert (session.seats, session.rank, session.learners) == (WORLD, 0, 1)
    loader = session.loader(TensorDataset(X, Y), batch_size=8)
    for epoch in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(mine(x), y).backward()
            optimizer.step()
        session.log(epoch=epoch)
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        again = optimizer.state_dict()
        for number, entry in state["state"].items():
            for key, value in entry.items():
                assert torch.equal(torch.as_tensor(again["state"][number][key]), torch.as_tensor(value))
    shapes = [tuple(entry["exp_avg"].shape) for entry in state["state"].values()]
    assert shapes == [tuple(p.shape) for p in network().parameters()]
    held = sum(p.numel() for p in mine.parameters())
    return session.seat, session.mean(float(session.seat)), held < sum(p.numel() for p in network().parameters())

ours = sl.launch(own_loop, "x", **HERE, plan=HYBRID)
theirs = trained(engine="sim", optimizer=ADAM)
for name, tensor in theirs.state_dict().items():
    torch.testing.assert_close(ours.state_dict()[name], tensor, rtol=1e-10, atol=1e-10)
assert ours.returned == [(0, (WORLD - 1) / 2, True)], ours.returned
assert [metrics for _, _, metrics in ours.logs] == [{"epoch": 0}, {"epoch": 1}]

REFUSED = {
    "count": lambda: trained(group=WORLD + 1, plan="data"),
    "groups": lambda: trained(**HERE, learners=3, plan="data"),
    "servers": lambda: trained(**HERE, topology="servers:2"),
    "through": lambda: trained(**HERE, local_update=False),
    "delayed": lambda: trained(**HERE, sync="delayed:1"),
    "waiting": lambda: trained(**HERE, wait=False),
    "dial": lambda: trained(**HERE, sync="softsync:3"),
}
write("learnt", **{name: refusal(call) for name, call in REFUSED.items()})
"""


@pytest.mark.parametrize("seats", [2, pytest.param(3, marks=pytest.mark.long)])
def test_a_group_learns_what_one_process_learns(seats: int, tmp_path: Path) -> None:
    run = torchrun("--standalone", f"--nproc-per-node={seats}", script(tmp_path, HEAD, LEARN), tmp_path)
    output = finish(run)[0]
    assert run.returncode == 0, output
    assert output.count(f"the {seats} processes that torchrun started are the seats of one learner") == 1
    for rank in range(seats):
        said = read(tmp_path, "learnt", rank)
        assert f"torchrun has started {seats} processes, which are the seats of one learner" in said["count"]
        assert f"learners=3, group={seats}, but torchrun has started" in said["groups"]
        assert "with topology='servers:2': one group has no servers" in said["servers"]
        assert "with local_update=False: one group has no servers" in said["through"]
        assert "NotYetError" in said["delayed"] and "use hardsync" in said["delayed"]
        assert "wait=False cannot be under torchrun" in said["waiting"]
        assert "softsync:3 needs n <= learners" in said["dial"]


GOES_ON = """
SHORT, LONG = {"optimizer": ADAM, "epochs": 1}, {"optimizer": ADAM, "epochs": 3}
OTHER, WHOLE = {"0": "model", "4": "rows"}, trained(engine="sim", **{"optimizer": ADAM, "epochs": 3})

def goes_on(name, **options):
    again = trained(**options, **LONG, resume=f"{FOLDER}/{name}")
    assert [record.epoch for record in again.history] == [0, 1, 2]
    alike(again, WHOLE)

if WORLD == 2:
    for name in ("one", "two", "three"):
        trained(**HERE, plan=HYBRID, **SHORT, run_dir=f"{FOLDER}/{name}")
    if os.environ["RANK"] == "0":
        goes_on("one", engine=sl.Local())
        goes_on("two", engine=sl.Local(), group=2, plan=OTHER)
        trained(engine=sl.Local(), group=3, plan=HYBRID, **SHORT, run_dir=f"{FOLDER}/here")
else:
    goes_on("three", **HERE, plan=OTHER)
    goes_on("here", **HERE, plan=OTHER)
"""


@pytest.mark.long
def test_a_run_goes_on_with_another_number_of_seats_here_and_under_torchrun(tmp_path: Path) -> None:
    path = script(tmp_path, HEAD, GOES_ON)
    for seats in (2, 3):
        run = torchrun("--standalone", f"--nproc-per-node={seats}", path, tmp_path)
        output = finish(run)[0]
        assert run.returncode == 0, output


FATES = """
def objective(model, batch):
    global steps
    steps += 1
    if steps == 8 and int(os.environ["RANK"]) == 1:
        if fate == "raises": raise ValueError("no more")
        if fate == "dies": os.kill(os.getpid(), signal.SIGKILL)
    if fate == "is told" and steps == 8:
        print("going", os.getpid(), flush=True)
    if fate == "is told":
        time.sleep(0.02)
    return F.cross_entropy(model(batch[0]), batch[1])

def run(**options):
    return trained(**HERE, plan=HYBRID, loss=None, objective=objective, optimizer=ADAM, **options)

for fate in sys.argv[2:]:
    steps, began = 0, time.monotonic()
    try:
        run(epochs=9, run_dir=FOLDER + "/run-" + fate, checkpoint_every=3)
    except sl.RunError as error:
        write(fate, said=f"{type(error).__name__}: {error}", took=time.monotonic() - began)
    except SystemExit as stop:
        write(fate, version=stop.result.version)
        fate, resumed = "", run(epochs=9, resume=FOLDER + "/run-is told")
        alike(resumed, trained(engine="sim", epochs=9, optimizer=ADAM))
        write("resumed", updates=resumed.updates)
"""


def told(folder: Path, fate: str, ranks: tuple[int, ...]) -> list[dict[str, Any]]:
    """What they have written about it, when all have."""
    while not all(read(folder, fate, rank) for rank in ranks):
        time.sleep(0.02)
    return [read(folder, fate, rank) for rank in ranks]


@pytest.mark.long
def test_a_seat_that_fails_or_dies_ends_the_run_for_all_and_is_named(tmp_path: Path) -> None:
    path = script(tmp_path, HEAD, FATES)
    run = torchrun(
        "--standalone", "--nproc-per-node=3", "--monitor-interval=600", path, tmp_path, "raises", "dies"
    )
    raised, died = told(tmp_path, "raises", (0, 2)), told(tmp_path, "dies", (0, 2))
    os.killpg(run.pid, signal.SIGKILL)
    finish(run)
    for each in raised:
        assert "LearnerError: learner 0 raised" in each["said"] and "in seat 1 of learner 0" in each["said"]
        assert "no more" in each["said"]
    for each in died:
        assert "LostError: seat 1 of learner 0 is lost" in each["said"]


@pytest.mark.long
def test_sigterm_leaves_a_checkpoint_of_the_whole_model(tmp_path: Path) -> None:
    path = script(tmp_path, HEAD, FATES)
    run = torchrun("--standalone", "--nproc-per-node=2", path, tmp_path, "is told")
    os.kill(int(heard(run, "going").split("going")[1]), signal.SIGTERM)
    output = finish(run)[0]
    assert run.returncode == 0, output
    first, second = (read(tmp_path, "is told", rank) for rank in range(2))
    assert first == second and 0 < first["version"] < 63
    assert read(tmp_path, "resumed", 0)["updates"] == 63
