"""The same script under torchrun: no process of our own, the same weights, and ranks that are lost are named on all others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.ready_python import ReadyPython

HEAD = """
import json, os, signal, sys, time
from functools import partial
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
import syncline as sl

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
generator = torch.Generator().manual_seed(1)
DATA = TensorDataset(torch.randn(50, 6, generator=generator), torch.randint(3, (50,), generator=generator))

def net():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))

def write(name, **values):
    path = f"{sys.argv[1]}/{name}.{os.environ.get('RANK', 'local')}.json"
    with open(path + ".tmp", "w") as file:
        json.dump(values, file)
    os.replace(path + ".tmp", path)  # torchrun may end this process at any moment

def say(error):
    return f"{type(error).__name__}: {error}"
"""

TRAIN = """
result = sl.train(net, DATA, loss=F.cross_entropy, optimizer=SGD, sync=sys.argv[2], topology="allreduce:layerwise",
                  batch_size=4, epochs=3, evaluate=DATA, run_dir=sys.argv[1] + "/run-" + os.environ.get("RANK", "local"))
write("train", version=result.version, gradients=result.gradients, accuracy=result.history[-1]["accuracy"],
      state={name: value.tolist() for name, value in result.state_dict().items()},
      sigma=result.staleness.max, model=result.model(DATA.tensors[0][:2]).sum().item())
"""

FATES = """
def steps(session, fate):
    model = net()
    opt = session.optimizer(model, SGD)
    for step in range(60):
        if step == 20 and session.rank == 1:
            if fate == "raises": raise ValueError("no more")
            if fate == "returns": return -1
            if fate == "means": session.mean(1.0)
            if fate == "dies": os.kill(os.getpid(), signal.SIGKILL)
        opt.zero_grad()
        F.cross_entropy(model(DATA.tensors[0]), DATA.tensors[1]).backward()
        opt.step()
    return session.rank

fates = {}
for fate in ("fine", "raises", "returns", "means", "dies"):
    began = time.monotonic()
    try:
        fates[fate] = sl.launch(steps, fate, topology="allreduce").returned
    except sl.RunError as error:
        fates[fate] = say(error)
    fates[fate + " took"] = time.monotonic() - began
    write("fates", **fates)
for options in ({}, {"topology": "allreduce", "learners": 5}, {"topology": "allreduce", "wait": False}):
    try:
        sl.launch(steps, "fine", **options)
    except sl.UsageError as error:
        fates.setdefault("refused", []).append(say(error))
write("fates", **fates)
"""


def script(folder: Path, *parts: str) -> Path:
    path = folder / "script.py"
    path.write_text(textwrap.dedent("".join(parts)))
    return path


def torchrun(*arguments: Any) -> subprocess.Popen[str]:
    return started("-m", "torch.distributed.run", *arguments)


def started(*arguments: Any) -> subprocess.Popen[str]:
    command = [sys.executable, *map(str, arguments)]
    source = Path(__file__).resolve().parents[2] / "src"
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    return ReadyPython(
        command,
        text=True,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def finish(*processes: subprocess.Popen[str]) -> list[str]:
    """What they print; whatever happens, nothing of them stays."""
    try:
        return [process.communicate(timeout=90)[0] for process in processes]
    finally:
        for process in processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def read(folder: Path, name: str, rank: Any) -> dict[str, Any]:
    """Nothing where it has not written yet."""
    path = folder / f"{name}.{rank}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def test_the_same_script_with_and_without_torchrun(tmp_path: Path) -> None:
    path = script(tmp_path, HEAD, TRAIN)
    run = torchrun("--standalone", "--nproc-per-node=2", path, tmp_path, "hardsync")
    local = started(path, tmp_path, "hardsync")
    output = finish(run, local)
    assert run.returncode == 0, output[0]
    assert local.returncode == 0, output[1]
    assert output[0].count("syncline: the 2 processes that torchrun started are the learners") == 1
    assert "torchrun started" not in output[1]
    mine, first, second = (read(tmp_path, "train", rank) for rank in ("local", 0, 1))
    assert first == second == mine
    assert (tmp_path / "run-0" / "events.jsonl").exists() and not (tmp_path / "run-1").exists()


VALUES = """
import sys
sys.path.insert(0, sys.argv[2])
from tests.integration.value_runs import Loop, check

for dial in ("hardsync", "delayed:1", "delayed:auto<=2", "hardsync until 1 then delayed:1"):
    for topology in ("allreduce", "allreduce:layerwise"):
        check(dial, topology, "local", Loop(size=71), learners=3)
        print("right", dial, topology)
"""


@pytest.mark.long
@pytest.mark.slow
def test_final_weights_are_those_of_a_sequential_reference(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    run = torchrun("--standalone", "--nproc-per-node=3", script(tmp_path, VALUES), tmp_path, root)
    (output,) = finish(run)
    assert run.returncode == 0 and output.count("right") == 3 * 8, output


@pytest.mark.long
def test_several_nodes(tmp_path: Path) -> None:
    path = script(tmp_path, HEAD, TRAIN)
    port = 29400 + os.getpid() % 500
    nodes = [
        torchrun(
            "--nnodes=2",
            f"--node-rank={node}",
            "--nproc-per-node=1",
            "--master-addr=127.0.0.1",
            f"--master-port={port}",
            path,
            tmp_path,
            "delayed:2",
        )
        for node in range(2)
    ]
    output = finish(*nodes)
    assert [node.returncode for node in nodes] == [0, 0], output
    first, second = (read(tmp_path, "train", rank) for rank in range(2))
    assert first == second and first["sigma"] == 2 and first["version"] == 21


def test_ranks_that_are_lost_are_named_on_all_others(tmp_path: Path) -> None:
    """The agent looks seldom: it would end the others before they have seen that one is dead."""
    path = script(tmp_path, HEAD, FATES)
    run = torchrun("--standalone", "--nproc-per-node=3", "--monitor-interval=600", path, tmp_path)
    until = time.monotonic() + 90
    while time.monotonic() < until and not all("dies" in read(tmp_path, "fates", rank) for rank in (0, 2)):
        time.sleep(0.02)
    os.killpg(run.pid, signal.SIGKILL)
    output = finish(run)[0]
    for rank in (0, 2):
        fates = read(tmp_path, "fates", rank)
        assert "LearnerError: learner 1 raised" in fates["raises"] and "no more" in fates["raises"], output
        assert "learner 1 returned after 20 steps while learner" in fates["returns"]
        assert "learner 1 is at session.mean while learner" in fates["means"]
        assert fates["fine"] == [0, 1, 2]
        assert "LostError: learner 1 is lost" in fates["dies"], output
        assert all(
            value < 5 for key, value in fates.items() if key.endswith("took") and key != "fine took"
        ), fates


APART = """
def learner(session):
    model = net()
    opt = session.optimizer(model, SGD)
    F.cross_entropy(model(DATA.tensors[0]), DATA.tensors[1]).backward()
    opt.step()
    with torch.no_grad():
        model[0].bias.fill_(session.rank)

try:
    sl.launch(learner, topology="allreduce", run_dir=sys.argv[1] + "/apart")
except sl.RunError as error:
    write("apart", said=say(error), bias=error.result.state_dict()["0.bias"].tolist(), updates=error.result.updates)
"""


@pytest.mark.long
def test_copies_that_differ_come_back_with_the_error_on_all_ranks(tmp_path: Path) -> None:
    run = torchrun("--standalone", "--nproc-per-node=2", script(tmp_path, HEAD, APART), tmp_path)
    output = finish(run)[0]
    assert run.returncode == 0, output
    for rank in range(2):
        apart = read(tmp_path, "apart", rank)
        assert "the copies of table 0 differ at the end" in apart["said"]
        assert apart["updates"] == 1 and apart["bias"] == [0.0] * 8, "learner 0's"
    assert load_file(tmp_path / "apart" / "model.safetensors")["0.bias"].tolist() == [0.0] * 8


def test_what_cannot_be_under_torchrun(tmp_path: Path) -> None:
    path = script(tmp_path, HEAD, FATES.replace('("fine", "raises", "returns", "means", "dies")', "()"))
    run = torchrun("--standalone", "--nproc-per-node=1", path, tmp_path)
    output = finish(run)[0]
    assert run.returncode == 0, output
    servers, count, waiting = read(tmp_path, "fates", 0)["refused"]
    assert "pass topology='allreduce'" in servers
    assert "learners=5, but torchrun has started 1 processes" in count
    assert "wait=False cannot be under torchrun" in waiting


GOES_ON = """
def slowly(model, batch):
    time.sleep(pause)
    if pause and int(os.environ["RANK"]) == 1:
        global seen
        seen += 1
        if seen == 8:
            print("going", os.getpid(), flush=True)
    return F.cross_entropy(model(batch[0]), batch[1])

def train(**options):
    return sl.train(net, DATA, objective=slowly, optimizer=SGD, sync="delayed:2", topology="allreduce:layerwise",
                    batch_size=4, epochs=3, seed=2, threads=1, **options)

seen, pause, run_dir = 0, float(sys.argv[2]), sys.argv[1] + "/run"
rank = os.environ.get("RANK")
if rank is None:
    result = train(learners=2)
elif pause:
    try:
        train(run_dir=run_dir, checkpoint_every=3)
    except SystemExit as stop:
        write("stopped", version=stop.result.version, interrupted=stop.result.interrupted, code=stop.code)
        raise
else:
    try:
        train(resume=run_dir if rank == "0" else "/nowhere")
    except sl.RunError as error:
        write("refused", error=say(error))
    result = train(resume=run_dir)
write("result", version=result.version, sigma=result.staleness.max, epochs=[each.version for each in result.history],
      state={name: value.tolist() for name, value in result.state_dict().items()})
"""


def heard(process: subprocess.Popen[str], word: str) -> str:
    assert process.stdout is not None
    said = [process.stdout.readline()]
    while word not in said[-1]:
        assert said[-1], "".join(said)
        said.append(process.stdout.readline())
    return said[-1]


def stopped(process: subprocess.Popen[str], signalled: int, folder: Path) -> None:
    """All ranks have agreed on a step, and left after a checkpoint of it."""
    os.kill(signalled, signal.SIGTERM)
    output = finish(process)[0]
    assert process.returncode != 0
    first, second = (read(folder, "stopped", rank) for rank in range(2))
    assert first == second, output
    assert first["interrupted"] and first["code"] == 143 and 6 <= first["version"] < 21


@pytest.mark.long
def test_sigterm_to_torchrun_leaves_a_checkpoint_and_all_ranks_go_on_from_it(tmp_path: Path) -> None:
    path = script(tmp_path, HEAD, GOES_ON)
    run = torchrun("--standalone", "--nproc-per-node=2", path, tmp_path, "0.02")
    heard(run, "going")
    stopped(run, run.pid, tmp_path)
    again = torchrun("--standalone", "--nproc-per-node=2", path, tmp_path, "0")
    local = started(path, tmp_path, "0")
    output = finish(again, local)
    assert again.returncode == 0, output[0]
    assert local.returncode == 0, output[1]
    mine, first, second = (read(tmp_path, "result", rank) for rank in ("local", 0, 1))
    assert first == second == mine
    for rank in range(2):
        error = read(tmp_path, "refused", rank)["error"]
        assert "rank 1 on" in error and "/nowhere" in error and "every rank must see the folder" in error


@pytest.mark.long
def test_sigterm_to_one_rank_is_enough(tmp_path: Path) -> None:
    path = script(tmp_path, HEAD, GOES_ON)
    run = torchrun("--standalone", "--nproc-per-node=2", path, tmp_path, "0.02")
    stopped(run, int(heard(run, "going").split("going")[1]), tmp_path)
