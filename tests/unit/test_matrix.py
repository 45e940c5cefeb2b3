"""The matrix of docs/exact/matrix.md against the code: each combination works or is refused as it says."""

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import syncline as sl
from syncline.dial import SANDBLASTER, Course
from syncline.errors import NotYetError
from syncline.testing import Nodes
from tests.ready_python import run_ready

PAGE = Path(__file__).resolve().parents[2] / "docs" / "exact" / "matrix.md"
COLUMNS = [
    ("servers", "local"),
    ("servers", "sim"),
    ("allreduce", "local"),
    ("allreduce", "sim"),
    ("allreduce", "torchrun"),
    ("tree:2", "local"),
    ("tree:2,broadcast", "local"),
    ("tree:2", "ray"),
    ("tree:2,broadcast", "ray"),
    ("servers", "ray"),
]


def cells() -> list[tuple[str, str, str, str]]:
    """(dial, topology, engine, what the page says)"""
    found = []
    for line in PAGE.read_text().splitlines():
        if line.startswith("| `"):
            dial, *says = [cell.strip() for cell in line.strip("|").split("|")]
            found += [(dial.strip("`"), *column, say) for column, say in zip(COLUMNS, says, strict=True)]
    return found


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.squeeze(1) - target).square().mean()


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01)


def run(dial: str, topology: str, engine: str, **more: Any) -> sl.Result:
    data = TensorDataset(torch.ones(8, 2), torch.ones(8))
    chosen = (
        Nodes(2, more.get("group", 1)) if engine == "ray" else engine
    )  # with Ray itself: tests/integration/test_ray.py
    options = {"topology": topology, "engine": chosen, "learners": 2, "batch_size": 2, **more}
    if dial == SANDBLASTER:
        method = sl.GradientDescent(lr=0.01)
        return sl.train(nn.Linear(2, 1), data, loss=loss, optimizer=method, sync=dial, steps=2, **options)
    options["epochs"] = 2
    return sl.train(nn.Sequential(nn.Linear(2, 1)), data, loss=loss, optimizer=sgd, sync=dial, **options)


def check(result: sl.Result, course: Course) -> None:
    """Two epochs of four batches: each is in one gradient, which is folded or, where the dial says so, dropped."""
    if course.first.local:
        assert result.gradients <= 8 and result.dropped == 0
    else:
        assert result.gradients + result.dropped == 8
    assert result.dropped == 0 or course.first.late == "drop"
    assert result.statistics.tables[0].examples + 2 * result.dropped == 16
    assert result.updates == result.version <= result.gradients


def test_the_page_covers_all_presets() -> None:
    assert len(cells()) == 10 * 12


@pytest.mark.parametrize("dial, topology, engine, says", [each for each in cells() if each[2] != "torchrun"])
def test_combination(dial: str, topology: str, engine: str, says: str) -> None:
    if says == "works" and dial == SANDBLASTER:
        result = run(dial, topology, engine)
        assert result.version == 2 and result.statistics.tables[0].examples == 3 * 8  # evaluations
    elif says == "works":
        check(run(dial, topology, engine), Course.of(dial))
    elif says == "later":
        with pytest.raises(NotYetError, match="not built yet"):
            run(dial, topology, engine)
    else:
        assert says == "refused"
        with pytest.raises(sl.UsageError):
            run(dial, topology, engine)


def with_groups(dial: str, topology: str, engine: str, says: str) -> str:
    """Return the cell of a combination with groups, by the rule below the page's table."""
    if dial == SANDBLASTER or topology == "allreduce":
        return "refused"
    return "later" if says == "works" and "broadcast" in topology and engine != "sim" else says


GROUPED = [(*each, with_groups(*each)) for each in cells() if each[2] != "torchrun"]


@pytest.mark.sweep(24)
@pytest.mark.parametrize("dial, topology, engine, without, says", GROUPED)
def test_combination_with_groups(dial: str, topology: str, engine: str, without: str, says: str) -> None:
    if says == "works":
        check(run(dial, topology, engine, group=2, plan="data"), Course.of(dial))
        return
    with pytest.raises(sl.UsageError) as refused:
        run(dial, topology, engine, group=2, plan="data")
    assert isinstance(refused.value, NotYetError) == (says == "later")


UNDER_TORCHRUN = """
import json, sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
import syncline as sl

data = TensorDataset(torch.ones(8, 2), torch.ones(8))
said = {}
for dial in json.loads(sys.argv[1]):
    for topology in ("allreduce", "servers"):
        try:
            result = sl.train(nn.Linear(2, 1), data, loss=lambda x, y: (x.squeeze(1) - y).square().mean(),
                              optimizer=lambda params: torch.optim.SGD(params, lr=0.01), sync=dial, topology=topology,
                              batch_size=2, epochs=2)
            said[dial + topology] = "works" if (result.gradients, result.version) == (8, 8) else repr(result)
        except sl.UsageError as error:
            said[dial + topology] = "later" if "not built yet" in str(error) else "refused"
print(json.dumps(said))
"""


def test_combinations_under_torchrun() -> None:
    """One process of its own, started as torchrun would start it."""
    says = {dial: say for dial, _, engine, say in cells() if engine == "torchrun"}
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    names = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = ["-c", UNDER_TORCHRUN, json.dumps(list(says))]
    done = run_ready(command, env=os.environ | names, timeout=100)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert {dial: found[dial + "allreduce"] for dial in says} == says
    assert {found[dial + "servers"] for dial in says} == {"refused"}
