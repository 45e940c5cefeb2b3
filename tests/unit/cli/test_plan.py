"""`syncline plan JOB`: a table of the job's layers, a file, and what cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import syncline as sl
from syncline.cli.app import app
from syncline.jobs import Job
from syncline.parallel import Group
from syncline.plan import Plan

JOB = """
learners = 4
batch_size = 16
epochs = 1
model = {name = "mlp", sizes = [64, 300, 10]}
data = "digits"
loss = "cross_entropy"
optimizer = {name = "sgd", lr = 0.1}
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(JOB)


def planned(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "200"})


def test_a_jobs_layers_are_drawn_and_kept() -> None:
    result = planned("job.toml", "--group", "2", "--cluster", "ethernet-1g", "--out", "plan.json")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0] == "2 groups of 2, 32 examples each, costs measured"
    assert lines[1].split() == ["layer", "choice", "parameters", "bytes", "seconds", "memory"]
    kept = Plan.load("plan.json")
    assert str(kept) == result.output.rstrip() and kept.group == 2 and kept.workers == 4


def test_a_job_of_layers_is_planned_with_all_its_parameters_and_losses() -> None:
    file = Path(__file__).resolve().parents[3] / "examples" / "jobs" / "layers_digits.toml"
    result = planned(str(file), "--group", "2", "--out", "plan.json")
    assert result.exit_code == 0, result.output
    kept = Plan.load("plan.json")
    assert sum(row.parameters for row in kept.rows) == 9_930 and not kept.whole
    assert list(kept.choices) == ["conv1", "pool1", "conv2", "output", "cross_entropy"]
    job = Job.load(file).build()
    seats = Group()
    seats.size = 2
    assert sl.partition(job["model"].with_losses(), kept, group=seats).choices == kept.choices


def test_a_jobs_own_group_is_planned_for() -> None:
    result = planned("job.toml", "--set", "group=2", "--learners", "3")
    assert result.output.splitlines()[0] == "3 groups of 2, 16 examples each, costs singa"


def test_without_a_group_the_best_one_is_found() -> None:
    result = planned("job.toml", "--learners", "6", "--batch-size", "8")
    totals = {
        size: planned("job.toml", "--learners", "6", "--batch-size", "8", "--group", size).output.split()[-3]
        for size in ("1", "2", "3", "6")
    }
    cheapest = min(totals, key=lambda size: int(totals[size].replace(",", "")))
    assert result.output.splitlines()[0].endswith(
        f"of {cheapest}, {8 * int(cheapest)} examples each, costs singa"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--group", "3"), "group is a whole number that divides the 4 workers, got 3"),
        (("--group", "2", "--memory", "10"), "the limit is 10: take a larger group"),
        (("--cluster", "nowhere"), "nowhere"),
    ],
)
def test_what_cannot_be_is_one_line(arguments: tuple[str, ...], words: str) -> None:
    result = planned("job.toml", *arguments)
    assert result.exit_code == 2 and len(result.output.splitlines()) == 1 and words in result.output


def test_plans_are_public() -> None:
    assert {"plan", "partition", "layer"} <= set(sl.__all__)
