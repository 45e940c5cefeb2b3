"""The package from outside: names, types, the logger, and commands that answer without importing torch."""

from __future__ import annotations

import inspect
import logging
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest

import syncline as sl
from syncline.train.api import TrainOptions
from tests.integration.small_runs import points, start

SOURCE = Path(sl.__file__).parent

COMMAND = """
import sys, time
began = time.perf_counter()
from syncline.cli import main
sys.argv = ["syncline", *sys.argv[1:]]
try:
    main()
finally:
    print(f"{time.perf_counter() - began:.2f} s", "torch" in sys.modules, file=sys.stderr)
"""


@pytest.mark.parametrize(
    "words",
    ["--version", "--help", "presets", "train --help", "show --help", "simulate --help", "tradeoff --help"],
)
def test_help_version_and_presets_do_not_import_torch(words: str) -> None:
    command = [sys.executable, "-c", COMMAND, *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    seconds, torch_is_imported = done.stderr.splitlines()[-1].rsplit(" ", 1)
    print(f"syncline {words}: {seconds}")
    assert torch_is_imported == "False"


def test_dir_shows_the_public_names_only() -> None:
    assert dir(sl) == sorted(sl.__all__)


def test_public_names_are_found_in_any_order_of_imports() -> None:
    code = """
import syncline.train.api, syncline.plan.graph
import syncline as sl
from syncline import plan, train
assert train is sl.train and callable(train) and callable(plan) and plan is sl.plan
assert [name for name in sl.__all__ if getattr(sl, name) is None] == []
assert sl.nn.__name__ == "syncline.nn"
try:
    sl.trian
except AttributeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "module 'syncline' has no attribute 'trian'\n"


SNIPPET = """
from functools import partial
from typing import assert_type

import torch
import syncline as sl

x = torch.randn(8, 2)
def run(model: torch.nn.Module, flag: bool) -> None:
    sgd = partial(torch.optim.SGD, lr=0.1)
    assert_type(sl.train(model, (x, x), optimizer=sgd), sl.Result)
    assert_type(sl.train(model, (x, x), optimizer=sgd, wait=True), sl.Result)
    assert_type(sl.train(model, (x, x), optimizer=sgd, wait=False, epochs=2), sl.Run)
    assert_type(sl.train(model, (x, x), optimizer=sgd, wait=flag), sl.Result | sl.Run)
    assert_type(sl.launch(print, 3, learners=2, width=4), sl.Result)
    assert_type(sl.launch(print, 3, wait=False), sl.Run)
    assert_type(sl.launch(print, wait=flag), sl.Result | sl.Run)
    sl.train(model, (x, x), optimizer=sgd, lerners=2)  # E: call-overload
    sl.train(model, (x, x))  # E: call-overload
    sl.launch(print, learners="2")  # E: call-overload
    sl.Trian  # E: attr-defined
"""


def test_type_checkers_know_results_runs_and_wrong_options(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    assert (SOURCE / "py.typed").exists()
    (tmp_path / "snippet.py").write_text(SNIPPET)
    (tmp_path / "mypy.ini").write_text("[mypy]\n[mypy-torch.*,numpy.*]\nfollow_imports = skip\n")
    command = [sys.executable, "-m", "mypy", "snippet.py", "--python-executable", sys.executable]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110)
    found = [
        line for line in done.stdout.splitlines() if line.startswith("snippet.py") and ": error:" in line
    ]
    expected = [n for n, line in enumerate(SNIPPET.splitlines(), 1) if "# E:" in line]
    assert sorted({int(line.split(":")[1]) for line in found}) == expected, done.stdout


def test_options_for_type_checkers_are_those_of_train_and_launch() -> None:
    options = dict(inspect.signature(sl.train).parameters)
    for name in ("model", "data", "wait"):
        del options[name]
    assert {name: option.annotation for name, option in options.items()} == {
        name: hint.__forward_arg__.removeprefix("Required[").removesuffix("]")
        if name == "optimizer"
        else hint.__forward_arg__
        for name, hint in TrainOptions.__annotations__.items()
    }
    listed = inspect.signature(typing.get_overloads(sl.launch)[0]).parameters
    actual = inspect.signature(sl.launch).parameters
    assert [each for name, each in listed.items() if name != "wait"] == [
        each for name, each in actual.items() if name != "wait"
    ]


def test_the_logger_reports_epochs_checkpoints_losses_and_resumes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert any(isinstance(each, logging.NullHandler) for each in logging.getLogger("syncline").handlers)
    caplog.set_level(logging.INFO, logger="syncline")
    options: dict[str, Any] = {"replace": True, "epochs": 12, "run_dir": tmp_path / "first"}
    version = start(points(64), "kill learner 1 at version 4", **options).wait().version
    start(points(64), resume=tmp_path / "first", epochs=13).wait()
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert {name for record in caplog.records if (name := record.name) != "syncline"} == set()

    def logged(level: str, words: str) -> bool:
        return any(found == level and text.startswith(f"first: {words}") for found, text in lines)

    assert logged("WARNING", "learner 1: lost: its process")
    assert logged("INFO", "learner 1: replaced")
    assert logged("INFO", "epoch 2: version ")
    assert logged("INFO", f"checkpoint of version {version}: ")
    assert logged("INFO", f"continues from version {version} of ")
