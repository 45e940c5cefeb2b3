"""What is wrong with a job whose single values are right: by the key that has to change."""

from __future__ import annotations

from typing import Any

import pytest

from syncline.jobs import KEYS, Named
from syncline.jobs.checks import problems

LAYERS = (
    {"name": "data", "type": "input"},
    {"name": "label", "type": "label"},
    {"name": "fc", "type": "dense", "units": 10},
    {"name": "loss", "type": "cross_entropy", "sources": ["fc", "label"]},
)


def job(**changes: Any) -> dict[str, Any]:
    """A right one, but for these."""
    plain = {key.name: None if key.required else key.default for key in KEYS}
    named = {"model": "mlp:", "data": "digits", "loss": "mse", "optimizer": "sgd"}
    made = {**plain, **{key: Named(name=name) for key, name in named.items()}}
    return {**made, "model": Named(name="mlp", arguments={"sizes": [64, 10]}), **changes}


SGD, LBFGS = Named(name="sgd"), Named(name="lbfgs")


@pytest.mark.parametrize("changes", [
    {}, {"sync": {"splits": 2}}, {"loss": None, "objective": Named(name="operator:add")},
    {"model": None, "layers": LAYERS, "loss": None}, {"gradient": "cd:1", "loss": None},
    {"sync": "sandblaster", "optimizer": LBFGS, "steps": 5}, {"run_dir": "x", "clocks": True, "checkpoint_every": 3},
    {"model": Named(name="torch:nn.Linear", arguments={"in_features": 1, "out_features": 1})},
    {"device": ("cpu", "cuda:3"), "policy": "sample", "topology": "allreduce"},
])  # fmt: skip
def test_nothing_is_wrong_with(changes: dict[str, Any]) -> None:
    assert [*problems(job(**changes), None)] == []


@pytest.mark.parametrize("changes, path, words", [
    ({"epochs": 1, "steps": 2}, "steps", "give either epochs or steps, got epochs = 1 and steps = 2"),
    ({"layers": LAYERS}, "layers", "give either model or layers, not both"),
    ({"model": None, "layers": LAYERS}, "loss", "the layers have their own losses"),
    ({"gradient": "cd:1"}, "loss", "gradient = 'cd:1' needs none"),
    ({"gradient": "cd:no", "loss": None}, "gradient", "cd:no"),
    ({"loss": None}, "loss", "missing; give a loss of (output, target)"),
    ({"objective": Named(name="operator:add")}, "objective", "give either loss or objective, not both"),
    ({"clocks": True}, "clocks", "needs run_dir, the folder to write to"),
    ({"checkpoint_every": 5}, "checkpoint_every", "needs run_dir"),
    ({"sync": "sandblaster", "optimizer": LBFGS}, "steps", "missing; sandblaster ends after so many iterations"),
    ({"sync": "sandblaster", "steps": 1}, "optimizer.name", "'sgd' is no batch method; sandblaster takes lbfgs"),
    ({"optimizer": LBFGS}, "sync", "'lbfgs' is a batch method: give sync = 'sandblaster' with it"),
    ({"sync": {"split": 1}}, "sync.split", "unknown field, did you mean 'splits'?"),
    ({"sync": {"one_from_each": 1}}, "sync.one_from_each", "expected true or false, got 1"),
    ({"sync": {"splits": 1, "backup": 1}}, "sync", "splits and backup both set the quorum"),
    ({"sync": "softsync:3"}, "sync", "n <= learners, got n = 3 with 2 learners"),
    ({"topology": "ring"}, "topology", "unknown topology 'ring'"),
    ({"policy": "sampel"}, "policy", "did you mean 'sample'?"),
    ({"table_device": "abacus"}, "table_device", "'abacus' is no device that torch knows"),
    ({"device": ("cpu", "abacus")}, "device", "'abacus' is no device"),
    ({"optimizer": Named(name="sdg")}, "optimizer.name", "did you mean 'sgd'?"),
    ({"optimizer": Named(name="sgd", arguments={"lrr": 1})}, "optimizer.lrr", "sgd: unknown argument, did you mean 'lr'?"),
    ({"model": Named(name="mlp")}, "model", "mlp: lacks its argument 'sizes'"),
    ({"data": Named(name="math:pi")}, "data.name", "'math:pi' is a float, not a callable"),
    ({"callbacks": (Named(name="math:sqrt"), Named(name="print"))}, "callbacks.name", "no callback is called 'print'"),
    ({"model": None, "loss": None, "layers": (*LAYERS[:3], {"name": "out", "type": "losss"})}, "loss", "missing"),
])  # fmt: skip
def test_what_does_not_go_together_is_named_by_the_key_to_change(
    changes: dict[str, Any], path: str, words: str
) -> None:
    where, said = next(problems(job(**changes), None))
    assert ".".join(where) == path and words in said


def test_all_problems_are_found_and_the_same_mistake_is_told_once() -> None:
    wrong = Named(name="digit")
    paths = [path[0] for path, _ in problems(job(data=wrong, evaluate=wrong, epochs=1, steps=1), None)]
    assert paths == ["steps", "data"]
    other = [path[0] for path, _ in problems(job(data=wrong, evaluate=Named(name="mnits")), None)]
    assert other == ["data", "evaluate"]


def test_own_layer_types_are_imported_before_the_layers_are_read() -> None:
    unknown = (*LAYERS[:2], {"name": "fc", "type": "nowhere:Layer"})
    ((path, words),) = problems(job(model=None, layers=unknown), None)
    assert path == ("layers", "2", "type") and words.startswith("layer 'fc': type: no module 'nowhere'")
