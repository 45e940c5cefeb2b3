"""The examples, as a user runs them: each in a process of its own, with small sizes."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ready_python import run_ready

FOLDER = Path(__file__).resolve().parents[2] / "examples"
SCRIPTS = sorted(FOLDER.glob("*.py"))


def run(script: str, *arguments: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(FOLDER / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def number(pattern: str, text: str) -> float:
    found = re.search(pattern + r" (-?[\d.]+)", text)
    assert found is not None, text
    return float(found[1])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_is_short_and_run_here(script: Path) -> None:
    assert len(script.read_text(encoding="utf-8").splitlines()) < 100
    assert f'"{script.name}"' in Path(__file__).read_text(encoding="utf-8")


def test_own_loop() -> None:
    output = run("own_loop.py", "--epochs", "6", "--learners", "2", "--sync", "hardsync")
    assert number("mean staleness", output) == 0
    assert number("test accuracy by learner:", output) > 0.85


@pytest.mark.long
def test_own_messages() -> None:
    output = run("own_messages.py", "--seats", "3", "--steps", "20")
    assert number("loss in 3 seats", output) == pytest.approx(number("loss in one process", output), abs=2e-6)


@pytest.mark.long
def test_all_reduce() -> None:
    output = run("torchrun.py", "--epochs", "6", "--sync", "delayed:1")
    assert number("test accuracy by learner:", output) > 0.85 and number("mean staleness", output) == 0.99


@pytest.mark.long
def test_the_plain_script_and_its_twin() -> None:
    for script in ("plain_pytorch.py", "with_syncline.py"):
        assert number("test accuracy", run(script, "4")) > 0.8


def test_the_twin_differs_in_a_few_lines() -> None:
    plain, twin = (
        (FOLDER / name).read_text(encoding="utf-8").split("\n", 1)[1].splitlines()
        for name in ("plain_pytorch.py", "with_syncline.py")
    )
    delta = [line for line in difflib.ndiff(plain, twin) if line.startswith("+ ")]
    assert len(delta) <= 6, delta


@pytest.mark.long
def test_dict_batches() -> None:
    output = run("dict_batches.py", "--sentences", "1500", "--epochs", "2")
    assert number("epoch 1: loss .*, test accuracy", output) > 0.8


@pytest.mark.long
def test_gan() -> None:
    output = run("gan.py", "--epochs", "5")
    assert "2 tables" in output
    assert number("distance", output) < 1.0


@pytest.mark.long
def test_dbn() -> None:
    output = run("dbn.py", "--epochs", "3")
    assert number("RBM 2: reconstruction error", output) < 30
    assert number("fine-tuned: test accuracy", output) > 0.4  # a tenth by chance


@pytest.mark.long
def test_compare_presets(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "presets.png"
    output = run("compare_presets.py", "--epochs", "2", "--engine", "sim", "--out", str(picture))
    assert [line.split()[0] for line in output.splitlines()] == [
        "hardsync",
        "delayed:1",
        "softsync:1",
        "async",
        "see",
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_job_with_a_module_beside_it(tmp_path: Path) -> None:
    """Learners' processes find what the job names."""
    (tmp_path / "beside.py").write_text(
        "from torch import nn\n\nclass Net(nn.Sequential):\n"
        "    def __init__(self):\n        super().__init__(nn.Flatten(), nn.Linear(64, 10))\n"
    )
    job = (FOLDER / "jobs" / "digits.toml").read_text().replace('"mlp"', '"beside:Net"')
    (tmp_path / "job.toml").write_text(re.sub("sizes = .*\n", "", job))
    command = (
        "import sys, syncline as sl; from syncline.jobs import Job; "
        "print('updates', sl.train(**Job.load(sys.argv[1], ['epochs=', 'steps=5', 'learners=2']).build()).updates)"
    )
    done = run_ready(["-c", command, tmp_path / "job.toml"], timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "updates 5\n"
