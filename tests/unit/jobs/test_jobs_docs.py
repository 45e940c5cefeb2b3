"""docs/howto/job_file.md and examples/jobs against the code."""

from __future__ import annotations

import inspect
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import syncline as sl
from syncline.data import DATASETS
from syncline.jobs import KEYS, NAMES, Job, Named
from syncline.jobs.keys import Key
from syncline.models.vector_networks import ACTIVATIONS

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "howto" / "job_file.md").read_text(encoding="utf-8")
JOBS = sorted((ROOT / "examples" / "jobs").glob("*.toml"))


def rows(head: str) -> list[list[str]]:
    """The cells of the table with this head."""
    lines = PAGE[PAGE.index(head) :].splitlines()[2:]
    end = next(number for number, line in enumerate(lines) if not line.startswith("|"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:end]]


def default_of(key: Key) -> str:
    if key.required:
        return "required"
    value: Any = key.default.name if isinstance(key.default, Named) else key.default
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return "–" if value in (None, ()) else f"`{value!r}`".replace("'", '"')


def test_the_table_of_keys() -> None:
    expected = [[f"`{key.name}`", key.kind, default_of(key), key.meaning] for key in KEYS]
    assert rows("| key | expects |") == expected


def test_the_table_of_names() -> None:
    expected = [
        [f"`{key}`", ", ".join(f"`{name}`" for name in role.names) or "none"] for key, role in NAMES.items()
    ]
    assert rows("| key | built-in names |") == expected


def test_the_table_of_data_sets() -> None:
    found = {}
    for names, arguments, _ in rows("| name | arguments | gives |"):
        for name in re.findall(r"`(\w+)`", names):
            found[name] = re.findall(r"`(\w+)`", arguments)
    assert found == {name: list(inspect.signature(reader).parameters) for name, reader in DATASETS.items()}


def test_the_activations() -> None:
    assert f"({', '.join(ACTIVATIONS)})" in PAGE


def test_the_first_example_is_the_built_in_job() -> None:
    first, *others = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert Job.parse(first, ["threads=1"]) == Job.builtin()
    for block in others:
        assert set(tomllib.loads(block)) <= {key.name for key in KEYS}


def test_overrides_of_the_page_work() -> None:
    for text in ("learners=8", "sync=softsync:2", "optimizer.lr=0.1", "model.sizes=[64, 256, 10]"):
        assert f"`{text}`" in PAGE
        assert Job.builtin([text]) != Job.builtin()
    assert Job.builtin(["epochs=", "steps=500"]).steps == 500


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Small archives of every image set."""
    for name, shape in (("mnist", (28, 28)), ("fashion-mnist", (28, 28)), ("cifar10", (32, 32, 3))):
        x, y = np.ones((80, *shape), np.uint8), np.zeros(80, np.uint8)
        np.savez(tmp_path / f"{name}.npz", x_train=x, y_train=y, x_test=x[:9], y_test=y[:9])
    return tmp_path


@pytest.mark.parametrize("file", JOBS, ids=lambda file: file.stem)
def test_example_jobs_build(file: Path, folder: Path) -> None:
    job = Job.load(file)
    assert Job.parse(job.dumps()) == job
    if "folder" in job.data.arguments:
        job = Job.load(file, [f"data.folder={folder}"])
    made = job.build()
    assert made["evaluate"] is not None and made["model"] is not None


def test_there_is_a_job_for_every_set() -> None:
    named = {Job.load(file).data.name for file in JOBS}
    assert {"digits", "mnist", "fashion_mnist", "cifar10"} <= named


WAYS = {
    "layers_digits": "backprop",
    "lstm_digits": "backprop",
    "autoencoder_digits": "backprop",
    "autoencoder_layers_digits": "backprop",
    "unrolled_digits": "backprop",
    "rbm_digits": "cd:1",
    "crbm_digits": "cd:1",
    "rbm_layers_digits": "pcd:1",
    "dbm_digits": "pcd:5",
}


@pytest.mark.parametrize("name, gradient", WAYS.items())
def test_there_is_a_job_for_every_way_that_trains(name: str, gradient: str) -> None:
    few = ["engine=sim", "sync=hardsync", "epochs=2", "batch_size=60"]
    job = Job.load(ROOT / "examples" / "jobs" / f"{name}.toml", few)
    assert job.gradient == gradient
    losses = [record.metrics["loss"] for record in sl.train(**job.build()).history]
    assert losses[-1] < losses[0]
