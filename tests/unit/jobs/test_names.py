"""Names of job files to callables: the built-in ones, and those of modules beside the job or in the current folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from syncline.errors import UsageError
from syncline.jobs import NAMES, Job, JobError
from syncline.jobs.names import one_line, resolve, takes_model


@pytest.mark.parametrize("error, words", [
    (ValueError("a\n  b"), "ValueError: a b"),
    (KeyError(), "KeyError"),
    (UsageError("said\nby us"), "said by us"),
    (SystemExit(3), "SystemExit: 3"),
])  # fmt: skip
def test_an_exception_is_one_line_and_ours_need_no_kind(error: BaseException, words: str) -> None:
    assert one_line(error) == words


@pytest.mark.parametrize("key, name, words", [
    ("optimizer", "sgdd", "no optimizer is called 'sgdd', did you mean 'sgd'?; there are: sgd, adam, "),
    ("model", "torch.nn.Linear", "'torch.nn.Linear' is no model; write 'package.module:callable' with a colon"),
    ("callbacks", "print", "no callback is called 'print'; there are: only 'package.module:callable'"),
    ("loss", "a-b:c", "'a-b:c' is no 'package.module:callable'"),
    ("loss", "math:", "'math:' is no 'package.module:callable'"),
    ("loss", "math:pow.er", "'math:pow.er': math has no 'pow.er'"),
    ("loss", "nowhere.at_all:x", "no module 'nowhere'; it is looked for on Python's path"),
])  # fmt: skip
def test_names_that_stand_for_nothing_are_refused_with_what_there_is(key: str, name: str, words: str) -> None:
    with pytest.raises(UsageError) as told:
        resolve(name, NAMES[key])
    assert words in str(told.value)


def test_a_name_is_built_in_or_an_attribute_of_a_module() -> None:
    assert resolve("sgd", NAMES["optimizer"]) is torch.optim.SGD
    assert resolve("torch:nn.Linear", NAMES["model"]) is torch.nn.Linear


def test_modules_are_found_beside_the_job_and_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    here, beside = tmp_path / "here", tmp_path / "beside"
    for folder in (here, beside):
        folder.mkdir()
        (folder / f"names_{folder.name}.py").write_text("found = print\n")
    monkeypatch.chdir(here)
    for name in ("names_here", "names_beside"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        assert resolve(f"{name}:found", NAMES["callbacks"], str(beside)) is print
    assert {str(here), str(beside)} <= set(sys.path), "the learners' processes get a copy"


def of_model(model: Any, more: int = 0) -> None: ...


def of_params(params: Any, model: Any) -> None: ...


@pytest.mark.parametrize("function, expected", [
    (of_model, True), (of_params, False), (lambda: None, False), (dict.fromkeys, False), (3, False),
])  # fmt: skip
def test_a_function_of_the_model_calls_its_first_argument_so(function: Any, expected: bool) -> None:
    assert takes_model(function) is expected


def test_a_module_that_does_not_import(own: Path) -> None:
    for content, words in (
        ("1 / 0", "ZeroDivisionError"),
        ("import no_such_thing", "ModuleNotFoundError: No module named 'no_such_thing'"),
        ("x = (", "SyntaxError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
    ):
        (own.parent / "own_broken.py").write_text(content + "\n")
        with pytest.raises(JobError, match=f"model: importing 'own_broken' failed: {words}"):
            Job.load(own, ["model={name='own_broken:x'}"])
