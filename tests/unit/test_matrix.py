"""The matrix of docs/exact/matrix.md against the code: each combination makes the weights it must or is refused as it says."""

import json
import os
import socket
from functools import partial
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
from tests.integration.value_runs import Weight, check
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


def run(dial: str, topology: str, engine: str) -> None:
    """Every cell that works makes the weight it must: `check` compares it with a sequential reference."""
    chosen = Nodes(2, 1) if engine == "ray" else engine  # with Ray itself: tests/integration/test_ray.py
    if dial != SANDBLASTER:
        check(dial, topology, chosen)
        return
    x = (torch.arange(30) % 7 + 1.0) / 8
    method, options = sl.GradientDescent(lr=0.5, momentum=0.0), {"learners": 2, "batch_size": 4, "steps": 2}
    result = sl.train(
        Weight,
        TensorDataset(x),
        objective=slope,
        optimizer=method,
        sync=dial,
        topology=topology,
        engine=chosen,
        **options,
    )
    assert result.version == 2 and result.statistics.tables[0].examples == 3 * len(x)  # evaluations
    assert result.state_dict()["weight"].item() == pytest.approx(2 * 0.5 * x.mean().item())


def slope(model: nn.Module, batch: tuple[torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(batch[0])
    return loss


def test_the_page_covers_all_presets() -> None:
    assert len(cells()) == 10 * 12


@pytest.mark.parametrize("dial, topology, engine, says", [each for each in cells() if each[2] != "torchrun"])
def test_combination(dial: str, topology: str, engine: str, says: str) -> None:
    if says == "works":
        run(dial, topology, engine)
    elif says == "later":
        with pytest.raises(NotYetError, match="not built yet"):
            run(dial, topology, engine)
    else:
        assert says == "refused"
        with pytest.raises(sl.UsageError):
            run(dial, topology, engine)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.squeeze(1) - target).square().mean()


def run_groups(dial: str, topology: str, engine: str) -> sl.Result:
    """Train two groups of two seats for two epochs of four batches."""
    method: dict[str, Any] = {"optimizer": partial(torch.optim.SGD, lr=0.01), "epochs": 2}
    if dial == SANDBLASTER:
        method = {"optimizer": sl.GradientDescent(lr=0.01), "steps": 2}
    return sl.train(
        nn.Sequential(nn.Linear(2, 1)),
        TensorDataset(torch.ones(8, 2), torch.ones(8)),
        loss=loss,
        sync=dial,
        topology=topology,
        engine=Nodes(2, 2) if engine == "ray" else engine,
        learners=2,
        batch_size=2,
        group=2,
        plan="data",
        **method,
    )


def check_counts(result: sl.Result, course: Course) -> None:
    """Each batch is in one gradient, which is folded or, where the dial says so, dropped."""
    if course.first.local:
        assert result.gradients <= 8 and result.dropped == 0
    else:
        assert result.gradients + result.dropped == 8
    assert result.dropped == 0 or course.first.late == "drop"
    assert result.statistics.tables[0].examples + 2 * result.dropped == 16
    assert result.updates == result.version <= result.gradients


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
        check_counts(run_groups(dial, topology, engine), Course.of(dial))
        return
    with pytest.raises(sl.UsageError) as refused:
        run_groups(dial, topology, engine)
    assert isinstance(refused.value, NotYetError) == (says == "later")


UNDER_TORCHRUN = """
import json, sys
import syncline as sl
from tests.integration.value_runs import check

said = {}
for dial in json.loads(sys.argv[1]):
    for topology in ("allreduce", "servers"):
        try:
            check(dial, topology, "local", learners=1)
            said[dial + topology] = "works"
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
