"""Broken layer files by the hundred: each ends with clear lines that name a layer or key, none with another exception."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from typing import Any

from syncline.jobs import Job, JobError, dumps

Table = dict[str, Any]
COUNT = 300
VALUES = [
    None,
    -1,
    0,
    2.5,
    10**30,
    float("nan"),
    "",
    "x",
    [],
    [1, "a"],
    [0],
    {},
    {"name": 3},
    True,
    [[1]],
    "\n",
]


def whole() -> Table:
    """A net with a bit of everything."""
    layers: list[Table] = [
        {"name": "data", "type": "input", "shape": [1, 8, 8]},
        {"name": "label", "type": "label"},
        {"name": "conv", "type": "convolution", "channels": 4, "kernel": 3, "sources": "data"},
        {"name": "norm", "type": "batch_norm"},
        {"name": "act", "type": "relu"},
        {"name": "pool", "type": "pooling", "kernel": 2},
        {"name": "part", "type": "slice", "stop": 2, "sources": "pool"},
        {"name": "rest", "type": "slice", "start": 2, "stop": 4, "sources": "pool"},
        {"name": "both", "type": "concat", "sources": ["part", "rest"]},
        {"name": "rows", "type": "reshape", "to": [6, 6]},
        {"name": "cell", "type": "gru", "units": 5},
        {"name": "fc1", "type": "dense", "units": 6, "init": {"name": "gaussian", "std": 0.1}, "rate": 2.0},
        {"name": "fc2", "type": "dense", "units": 6, "share": {"bias": "fc1.bias"}},
        {"name": "added", "type": "sum", "sources": ["fc1", "fc2"]},
        {"name": "drop", "type": "dropout", "p": 0.1},
        {"name": "code", "type": "rbm", "units": 7, "decay": 0.5},
        {"name": "out", "type": "dense", "units": 10, "output": True},
        {"name": "loss", "type": "cross_entropy", "sources": ["out", "label"]},
        {"name": "few", "type": "sparsity", "sources": "code", "target": 0.1},
    ]
    return {
        "steps": 1,
        "data": {"name": "digits"},
        "optimizer": {"name": "sgd", "lr": 0.1},
        "layers": layers,
    }


def typo(word: str, chance: random.Random) -> str:
    at = chance.randrange(len(word))
    return word[:at] + chance.choice(["", "q", word[at] * 2]) + word[at + 1 :]


def rename_key(layer: Table, layers: list[Table], chance: random.Random) -> None:
    key = chance.choice(list(layer))
    layer[typo(key, chance) or "q"] = layer.pop(key)


def drop_key(layer: Table, layers: list[Table], chance: random.Random) -> None:
    del layer[chance.choice(list(layer))]


def wrong_value(layer: Table, layers: list[Table], chance: random.Random) -> None:
    layer[chance.choice(list(layer))] = chance.choice(VALUES)


def wrong_type(layer: Table, layers: list[Table], chance: random.Random) -> None:
    layer["type"] = chance.choice(
        [typo(layer["type"], chance), layers[chance.randrange(len(layers))]["type"]]
    )


def wrong_source(layer: Table, layers: list[Table], chance: random.Random) -> None:
    names = [each["name"] for each in layers]
    layer["sources"] = chance.choice(
        [typo(layer["name"], chance), chance.choice(names), chance.sample(names, 2), layer["name"], 7, [3]]
    )


def same_name(layer: Table, layers: list[Table], chance: random.Random) -> None:
    layer["name"] = chance.choice([layers[0]["name"], "training", "a b", "1st", "forward"])


def left_out(layer: Table, layers: list[Table], chance: random.Random) -> None:
    layers.remove(layer)


def added(layer: Table, layers: list[Table], chance: random.Random) -> None:
    key = chance.choice(["rate", "decay", "init", "share", "freeze", "output", "bogus"])
    layer[key] = chance.choice([*VALUES, "gaussian", "xavier_normal", "fc1", {"weight": "fc1.weight"}])


def reshaped(layer: Table, layers: list[Table], chance: random.Random) -> None:
    for each in layers:
        for key in ("units", "channels", "kernel", "stop", "to", "shape"):
            if key in each and chance.random() < 0.3:
                each[key] = chance.choice([1, 3, 7, 99, [3], [2, 2], [1, 9, 9]])


DAMAGE: list[Callable[[Table, list[Table], random.Random], None]] = [
    rename_key,
    drop_key,
    wrong_value,
    wrong_type,
    wrong_source,
    same_name,
    left_out,
    added,
    reshaped,
]


def broken(seed: int) -> Table:
    chance = random.Random(seed)
    job = copy.deepcopy(whole())
    damage = DAMAGE[seed % len(DAMAGE)]
    damage(chance.choice(job["layers"]), job["layers"], chance)
    return job


def written(job: Table) -> str:
    """As a file, where TOML can say it."""
    job["layers"] = [
        {key: value for key, value in each.items() if value is not None} for each in job["layers"]
    ]
    head = dumps({key: value for key, value in job.items() if key != "layers"})
    return head + "".join(f"\n[[layers]]\n{''.join(map(line, each.items()))}" for each in job["layers"])


def line(item: tuple[str, Any]) -> str:
    key, _, value = dumps({item[0]: [[item[1]]]}).strip().partition(" = ")
    return f"{key} = {value[2:-2]}\n"


def test_what_they_are_made_of_is_right() -> None:
    Job.parse(written(whole())).build()


def test_every_broken_file_ends_with_clear_lines() -> None:
    refused = 0
    for seed in range(COUNT * 8 // 7):
        try:
            Job.parse(written(broken(seed))).build()
        except JobError as error:
            refused += 1
            for line in error.problems:
                assert "\n" not in line and len(line) < 600, line
                assert (
                    re.match(r"job:\d+: (layer ('[^']*'|\d+): \w|layers: )", line) or "loss: missing" in line
                ), (
                    seed,
                    line,
                )
    assert refused >= COUNT  # the rest happens to be right
