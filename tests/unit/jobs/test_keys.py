"""What each key of a job may be: values that are read, and those that are refused with what was expected."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest

from syncline.errors import UsageError
from syncline.jobs import KEYS, JobError, Named
from syncline.jobs.keys import Wrong, shown

BY_NAME = {key.name: key for key in KEYS}


@pytest.mark.parametrize("key, value, read", [
    ("learners", 1, 1),
    ("learners", 2**63 - 1, 2**63 - 1),
    ("warmstart", 0, 0),
    ("clip_norm", 1e-9, 1e-9),
    ("sync", "softsync:2", "softsync:2"),
    ("sync", {"splits": 2}, {"splits": 2}),
    ("device", ["cpu", "cuda:1"], ("cpu", "cuda:1")),
    ("device", "cuda", "cuda"),
    ("checkpoint_every", "0.5 s", "0.5 s"),
    ("checkpoint_every", "end", "end"),
    ("checkpoint_every", 20, 20),
    ("plan", "auto", "auto"),
    ("plan", "cut.json", "cut.json"),
    ("plan", {"fc*": "model"}, {"fc*": "model"}),
    ("gradient", "cd:2", "cd:2"),
    ("gradient", "mine.ways:hinton", Named(name="mine.ways:hinton")),
    ("gradient", {"name": "mine:way", "k": 1}, Named(name="mine:way", arguments={"k": 1})),
    ("loss", "mse", Named(name="mse")),
    ("callbacks", ["math:sqrt", {"name": "a:b", "n": 1}], (Named(name="math:sqrt"), Named(name="a:b", arguments={"n": 1}))),
    ("stop", {"loss": 0.1}, {"loss": 0.1}),
    ("layers", [{"name": "x"}], ({"name": "x"},)),
])  # fmt: skip
def test_what_a_key_takes_is_read(key: str, value: Any, read: Any) -> None:
    found = BY_NAME[key](value)
    assert found == read and type(found) is type(read)
    assert BY_NAME[key](found) == read, "and what was read is read again"


@pytest.mark.parametrize("key, value", [
    ("learners", 0), ("learners", True), ("learners", 1.0), ("learners", 2**63), ("warmstart", -1),
    ("clip_norm", 0), ("clip_norm", math.inf), ("clip_norm", math.nan), ("clip_norm", True),
    ("sync", {}), ("sync", " "), ("sync", 3),
    ("device", []), ("device", ["cpu", 1]), ("run_dir", "a\0b"), ("run_dir", ""),
    ("checkpoint_every", "0s"), ("checkpoint_every", "soon"), ("checkpoint_every", 0), ("checkpoint_every", "5"),
    ("plan", "model"), ("plan", {}), ("plan", {"fc": "sideways"}),
    ("check", 1), ("on_error", "shrug"), ("replace", "yes"),
    ("gradient", 3), ("loss", {"lr": 1}), ("loss", {"name": 3}), ("loss", ["mse"]),
    ("callbacks", [3]), ("stop", "loss"), ("stop", {}), ("layers", []), ("layers", "fc"),
])  # fmt: skip
def test_what_a_key_does_not_take_is_refused_with_what_was_expected(key: str, value: Any) -> None:
    with pytest.raises(Wrong) as told:
        BY_NAME[key](value)
    assert str(told.value).startswith(f"expected {BY_NAME[key].kind}, got {shown(value)}")


def test_what_was_read_is_a_copy() -> None:
    layers: list[dict[str, Any]] = [{"name": "x", "sizes": [1]}]
    arguments: dict[str, Any] = {"sizes": [1]}
    read, named = BY_NAME["layers"](layers), Named(name="mlp", arguments=arguments)
    layers[0]["sizes"].append(2)
    arguments["sizes"].append(2)
    named.table()["sizes"].append(3)
    assert read == ({"name": "x", "sizes": [1]},) and named.arguments == {"sizes": [1]}


def test_values_are_shown_on_one_short_line() -> None:
    assert shown("x" * 100) == "'" + "x" * 56 + "…" and shown([1]) == "[1]"
    assert str(Named(name="mlp", arguments={"sizes": [1, 2]})) == "mlp(sizes=[1, 2])"
    for wrong in ({"name": 3}, {"name": "x", "arguments": [1]}):
        with pytest.raises(UsageError, match="Named takes a name and a dict of arguments"):
            Named(**wrong)


def test_an_error_of_several_problems_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(JobError(["a: x", "b: y"])))
    assert str(error) == "a: x\nb: y" and error.problems == ("a: x", "b: y")
