"""Broken jobs by the hundred: each ends with one line of the right class, none with another exception."""

from __future__ import annotations

import copy
import random
import re
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.jobs import KEYS, Job, JobError, dumps
from syncline.jobs.job import BY_NAME

WHOLE: dict[str, Any] = {
    "sync": "softsync:2",
    "topology": "servers:2",
    "learners": 4,
    "batch_size": 8,
    "epochs": 1,
    "seed": 3,
    "policy": "ledger",
    "clip_norm": 1.0,
    "device": "cpu",
    "threads": 1,
    "model": {"name": "mlp", "sizes": [64, 10], "activation": "relu"},
    "data": {"name": "digits", "split": "train"},
    "evaluate": {"name": "digits", "split": "test"},
    "loss": {"name": "cross_entropy", "label_smoothing": 0.1},
    "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
    "schedule": {"name": "step", "step_size": 2},
    "engine": {"name": "sim", "compute": 1.0},
    "callbacks": [{"name": "math:sqrt"}],
}
NAMED = ("model", "data", "evaluate", "loss", "optimizer", "schedule", "engine")
Broken = tuple[str, dict[str, Any], str]  # what was done, the job, the key that the message must name


def changed(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    job = copy.deepcopy(WHOLE)
    table = job
    for key in path[:-1]:
        table = table[key]
    table[path[-1]] = value
    return job


def renamed(path: tuple[str, ...], name: str) -> dict[str, Any]:
    job = copy.deepcopy(WHOLE)
    table = job
    for key in path[:-1]:
        table = table[key]
    table[name] = table.pop(path[-1])
    return job


def typos(word: str) -> set[str]:
    """A letter left out, doubled, or swapped with the next."""
    at = range(len(word))
    left = {word[:i] + word[i + 1 :] for i in at}
    doubled = {word[: i + 1] + word[i:] for i in at}
    swapped = {word[:i] + word[i + 1] + word[i] + word[i + 2 :] for i in at[:-1]}
    return (left | doubled | swapped) - {word, ""}


def wrong_values(kind: str) -> list[Any]:
    tables: list[Any] = [{}, {"x": 1}]
    if kind.startswith("a whole number"):
        least = int(kind.split()[-1])
        return [least - 1, -5, 1.5, True, "4", "", [], [4], *tables, float("nan"), 2**63]
    if kind.startswith("a finite number"):
        return [0, -1.0, True, "1", [], *tables, float("nan"), float("inf")]
    if "a table with a name" in kind:
        return [3, 1.5, True, "", [], ["mlp"], {"name": 3}, {"name": ""}]
    if kind.startswith("a list of names"):
        return [
            3,
            True,
            "math:sqrt",
            {"name": "math:sqrt"},
            [3],
            [{}],
            [[]],
            ["nope"],
            [{"name": "math:nope"}],
        ]
    if kind == "true or false":
        return [3, 1.5, "", "true", [], [True], {"x": 1}]
    return [3, 1.5, True, "", "  ", [], [3], {"x": 1}, "no such word"]


def broken_values() -> Iterator[Broken]:
    for key in KEYS:
        for value in wrong_values(key.kind):
            if key.name not in ("run_dir", "resume") or not isinstance(value, str) or not value.strip():
                yield f"{key.name} = {value!r}", changed((key.name,), value), key.name


def broken_keys() -> Iterator[Broken]:
    for key in WHOLE:
        for word in sorted(typos(key) - set(BY_NAME)):
            yield f"{key} as {word}", renamed((key,), word), word
    for outer in NAMED:
        for argument in WHOLE[outer]:
            for word in sorted(typos(argument))[::2]:
                if argument != "name":
                    yield f"{outer}.{argument} as {word}", renamed((outer, argument), word), outer
    for key in ("model", "data", "optimizer", "loss"):
        yield f"without {key}", {name: value for name, value in WHOLE.items() if name != key}, key


def broken_names() -> Iterator[Broken]:
    for key in NAMED:
        for word in sorted(typos(WHOLE[key]["name"]))[::3]:
            yield f"{key} called {word}", changed((key, "name"), word), key
        for word in (
            "math:",
            ":sqrt",
            "math:sqrt:x",
            "no_such_module_:x",
            "math:no_such",
            "math.sqrt",
            "math:pi",
            "a-b:c",
        ):
            yield f"{key} called {word}", changed((key, "name"), word), key
    for key in ("sync", "topology", "policy", "device"):
        for word in sorted(typos(re.split(":", WHOLE[key])[0]))[::2]:
            yield f"{key} = {word}", changed((key,), word), key


def broken_arguments() -> Iterator[Broken]:
    for path, values in {
        ("model", "sizes"): [[], [64], [63, 10], [64, 0], [64, -1], "64", 64, [64, "x"], [64, 1.5], {"x": 1}],
        ("model", "activation"): ["rel", 3, [], True],
        ("data", "split"): ["tran", 3, [], ""],
        ("evaluate", "split"): ["tst", 3, [], ""],
        ("loss", "label_smoothing"): [2.0, "x", [1]],
        ("optimizer", "lr"): [-1.0, "x", [0.1], {"x": 1}],
        ("optimizer", "momentum"): [-1.0, "x", [0.1]],
        ("schedule", "step_size"): [0, "x", [1]],
        ("engine", "compute"): [-1.0, "x", [1]],
    }.items():
        for value in values:
            yield f"{'.'.join(path)} = {value!r}", changed(path, value), path[0]


def contradictions() -> Iterator[Broken]:
    for changes, key in (
        ({"steps": 3}, "steps"),
        ({"objective": {"name": "operator:add"}}, "objective"),
        ({"learners": 1}, "sync"),
        ({"sync": "softsync:5"}, "sync"),
        ({"sync": "hardsync:4"}, "sync"),
        ({"sync": "softsync:rate=x"}, "sync"),
        ({"sync": "backup:4"}, "sync"),
        ({"sync": {"splits": 5}}, "sync"),
        ({"sync": {"splits": 0}}, "sync"),
        ({"sync": {"one_from_each": True, "splits": 2}}, "sync"),
        ({"sync": {"late": []}}, "sync"),
        ({"sync": {"push": "x"}}, "sync"),
        ({"topology": "servers:0"}, "topology"),
        ({"topology": "servers:-1"}, "topology"),
        ({"topology": "servers:²"}, "topology"),
        ({"batch_size": 1443}, "batch_size"),
        ({"layer": [{"type": "linear"}]}, "layer"),
        ({"layers": []}, "layers"),
        ({"data": {"name": "mnist"}}, "data"),
        ({"data": {"name": "mnist", "folder": "/no/such/place"}}, "data"),
        ({"data": {"name": "arrays", "folder": 3}}, "data"),
        ({"data": {"name": "builtins:list"}}, "data"),
        ({"model": {"name": "cifar10_full"}}, "model"),
        ({"model": {"name": "builtins:dict"}}, "model"),
        ({"optimizer": "cifar10_full_sgd"}, "optimizer"),
        ({"optimizer": {"name": "torch.optim:LBFGS"}}, "optimizer"),
        ({"loss": {"name": "cross_entropy", "reduction": "none"}}, "loss"),
        ({"loss": "mse"}, "loss"),
        ({"device": ["cpu", "abacus"]}, "device"),
    ):
        yield str(changes), {**copy.deepcopy(WHOLE), **changes}, key


ALL = [
    *broken_values(),
    *broken_keys(),
    *broken_names(),
    *broken_arguments(),
    *contradictions(),
]


def run(text: str) -> str | None:
    """The message of a job that is refused; None: it would start."""
    error = refusal(text)
    return None if error is None else str(error)


def refusal(text: str, overrides: tuple[str, ...] = ()) -> JobError | None:
    try:
        Job.parse(text, overrides, name="job.toml").build()
    except JobError as error:
        found = error
    else:
        return None
    assert found.problems and all(problem and "\n" not in problem for problem in found.problems), found
    return found


def test_the_whole_job_is_right() -> None:
    assert run(dumps(WHOLE)) is None


def test_there_are_some_hundred() -> None:
    assert len(ALL) > 500


def test_every_broken_job_ends_with_one_line() -> None:
    wrong = []
    for what, job, key in ALL:
        message = run(dumps(job))
        place = rf"job\.toml(:\d+)?: {re.escape(key)}(\.\S+)?: .+"
        if message is None or re.fullmatch(place, message) is None:
            wrong.append(f"{what}: {message}")
    assert not wrong, "\n".join(wrong)


def test_damaged_texts() -> None:
    """Cut off, with a letter changed, with lines lost or swapped: refused in one line each, or still a job."""
    chance = random.Random(0)
    text = dumps(WHOLE)
    refused = 0
    for _ in range(300):
        at = chance.randrange(len(text))
        lines = text.split("\n")
        lines.pop(chance.randrange(len(lines)))
        chance.shuffle(lines)
        letter = chance.choice('"=[]{}#\\\n.\0\u00e9x0')
        damaged = chance.choice([text[:at], text[:at] + letter + text[at + 1 :], text[at:], "\n".join(lines)])
        refused += run(damaged) is not None
    assert refused > 200


VALUES = st.recursive(
    st.one_of(st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.dates()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(
    st.dictionaries(st.sampled_from([*BY_NAME, "x", "layer"]), VALUES, min_size=1, max_size=4), st.booleans()
)
@settings(max_examples=150, deadline=None)
def test_arbitrary_values(values: dict[str, Any], over: bool) -> None:
    try:
        text = dumps({**WHOLE, **values} if over else values)
    except ValueError:
        return  # texts that TOML cannot hold
    tomllib.loads(text)
    run(text)


@pytest.mark.parametrize("key", [key.name for key in KEYS])
def test_overrides_are_as_safe(key: str) -> None:
    for value in ("x", "-1", "[", "{}", "'", "nan", "[[1]]", "\0", "1\n2"):
        error = refusal(dumps(WHOLE), (f"{key}={value}",))
        fine = key in ("run_dir", "resume") or (key, value) == ("evaluate", "{}")
        assert fine or error is not None, f"{key}={value}"
