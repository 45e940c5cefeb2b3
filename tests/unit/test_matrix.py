"""The matrix of docs/matrix.md against the code: each combination works or is refused as it says."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import syncline as sl
from syncline.dial import Course
from syncline.errors import NotYetError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "matrix.md"
COLUMNS = [
    ("servers", "local"),
    ("servers", "sim"),
    ("allreduce", "local"),
    ("allreduce", "sim"),
    ("tree:2", "local"),
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


def run(dial: str, topology: str, engine: str) -> sl.Result:
    data = TensorDataset(torch.ones(8, 2), torch.ones(8))
    options = {"topology": topology, "engine": engine, "learners": 2, "batch_size": 2, "epochs": 2}
    return sl.train(nn.Linear(2, 1), data, loss=loss, optimizer=sgd, sync=dial, **options)


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
    assert len(cells()) == 6 * 13


@pytest.mark.parametrize("dial, topology, engine, says", cells())
def test_combination(dial: str, topology: str, engine: str, says: str) -> None:
    if says == "works":
        check(run(dial, topology, engine), Course.of(dial))
    elif says == "later":
        with pytest.raises(NotYetError, match="not built yet"):
            run(dial, topology, engine)
    else:
        assert says == "refused"
        with pytest.raises(sl.UsageError):
            run(dial, topology, engine)
