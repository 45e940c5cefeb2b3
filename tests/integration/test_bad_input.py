"""Bad input: one clear error that says what to do, before any process starts where that is possible."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

import syncline as sl
from syncline.engines.local import forkserver
from syncline.errors import DialError, LayoutError, NotYetError, UsageError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

DATA = TensorDataset(torch.randn(40, 3), torch.randn(40, 1))
GOOD: dict[str, Any] = {
    "model": nn.Linear(3, 1),
    "data": DATA,
    "loss": F.mse_loss,
    "optimizer": partial(SGD, lr=0.1),
    "learners": 4,
    "batch_size": 4,
    "epochs": 1,
    "threads": 1,
}


def train(**changes: Any) -> Any:
    arguments = {**GOOD, **changes}
    return sl.train(arguments.pop("model"), arguments.pop("data"), **arguments)


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise AssertionError("a process was to be started")

    monkeypatch.setattr(forkserver, "connect", refuse)


@pytest.mark.parametrize(
    "changes, kind, words",
    [
        ({"sync": "hardsink"}, DialError, "did you mean 'hardsync'"),
        (
            {"sync": "softsync:5"},
            DialError,
            r"n <= learners, got n = 5 with 4 learners.*⌊4/5⌋ = 0.*softsync:4",
        ),
        ({"sync": "softsync:0"}, DialError, "n >= 1, got 0"),
        ({"sync": "softsync:x"}, DialError, "'x' is not a whole number"),
        ({"sync": "delayed"}, DialError, "lacks its number: write delayed:k"),
        ({"sync": 3}, DialError, "sync must be a text .* or a Sync record, got int"),
        ({"learners": 0}, UsageError, "learners must be a whole number of at least 1, got 0"),
        ({"learners": 2.5}, UsageError, "learners must be a whole number"),
        ({"batch_size": 41}, UsageError, "41 is larger than the data set of 40 examples; use at most 40"),
        ({"batch_size": 0}, UsageError, "batch_size must be a whole number of at least 1"),
        ({"batch_size": 2.5}, UsageError, "batch_size must be a whole number of at least 1"),
        ({"data": TensorDataset(torch.zeros(0, 3))}, UsageError, "the data set is empty"),
        ({"data": None}, UsageError, "data must be a torch Dataset, got NoneType"),
        ({"model": nn.ReLU()}, LayoutError, "ReLU has no parameters.*Register layers as attributes"),
        ({"model": None}, UsageError, "model must be an nn.Module or a callable that makes one"),
        ({"model": dict}, UsageError, "model must be an nn.Module or a callable that makes one, got dict"),
        ({"objective": lambda model, batch: 0}, UsageError, "give either loss=.* or objective="),
        ({"loss": None}, UsageError, "give either loss=.* or objective="),
        ({"steps": 5}, UsageError, "either epochs= or steps=, got epochs=1 and steps=5"),
        ({"epochs": 0}, UsageError, "epochs must be a whole number of at least 1, got 0"),
        ({"epochs": 1.5}, UsageError, "epochs must be a whole number of at least 1, got 1.5"),
        ({"epochs": None, "steps": 0}, UsageError, "steps must be a whole number of at least 1, got 0"),
        (
            {"optimizer": SGD(nn.Linear(1, 1).parameters())},
            UsageError,
            r"got SGD; give .*partial\(torch.optim.SGD",
        ),
        ({"optimizer": torch.optim.LBFGS}, LayoutError, "LBFGS .* use a first-order optimizer"),
        ({"optimizer": lambda params: params}, UsageError, "factory returned .* not a torch.optim.Optimizer"),
        ({"policy": "random"}, UsageError, "policy 'random' is none of ledger, partition, sample"),
        ({"threads": 0}, UsageError, "threads must be a whole number of at least 1"),
        ({"clip_norm": -1.0}, UsageError, "clip_norm must be a number > 0, got -1.0; leave it out"),
        ({"evaluate": 3}, UsageError, "evaluate must be a data set or a function of the model, got int"),
        ({"engine": "cloud"}, UsageError, "unknown engine 'cloud': use one of local, sim"),
        ({"topology": "ring"}, UsageError, "unknown topology 'ring': use servers"),
        ({"topology": "servers:0"}, UsageError, "shards must be a whole number of at least 1"),
        ({"device": "abacus"}, UsageError, "device 'abacus' is none that torch knows"),
    ],
)
@pytest.mark.usefixtures("no_process")
def test_train_refuses_before_a_process_starts(changes: dict[str, Any], kind: type, words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        train(**changes)
    assert isinstance(caught.value, UsageError) and isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"sync": "groups:2"}, "not built yet; working now: hardsync, softsync:n, async, downpour"),
        ({"sync": "diloco:4"}, "not built yet; working now: hardsync, softsync:n, async, downpour"),
        ({"engine": "ray"}, "not built yet; working now: local, sim"),
        ({"topology": "tree:4"}, "not built yet; working now: servers"),
    ],
)
@pytest.mark.usefixtures("no_process")
def test_what_is_not_built_yet_says_so(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(NotYetError, match=words):
        train(**changes)


@pytest.mark.parametrize("device", ["cuda", "cuda:0", ["cpu", "cuda:1"]])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.usefixtures("no_process")
def test_a_gpu_that_is_not_there(device: Any) -> None:
    with pytest.raises(UsageError, match=r"torch sees .* GPU"):
        train(device=device)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"sync": "softsync:3"}, "n <= learners, got n = 3 with 2"),
        ({"sync": "hardsync:reference_batch=8"}, "batch_size is not known here"),
        ({"learners": -1}, "learners must be a whole number"),
        ({"topology": "servers:many"}, "the number of shards must be a whole number"),
    ],
)
@pytest.mark.usefixtures("no_process")
def test_launch_refuses_before_a_process_starts(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        sl.launch(print, **{"learners": 2, **changes})
    with pytest.raises(UsageError, match="launch takes a function"):
        sl.launch("not a function")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            {"loss": lambda a, b: (a - b) ** 2},
            r"loss must be a scalar tensor, got a tensor of shape \(4, 1\)",
        ),
        ({"loss": lambda a, b: 1.0}, "loss must be a scalar tensor, got float"),
        ({"data": TensorDataset(torch.randn(40, 3))}, r"batches of \(input, target\).*use objective="),
    ],
)
def test_what_only_a_learner_can_find(changes: dict[str, Any], words: str) -> None:
    """One error, from the first learner that meets it; its cause is the usage error."""
    with pytest.raises(sl.LearnerError, match=words) as caught:
        train(learners=2, **changes)
    assert isinstance(caught.value.__cause__, UsageError)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"evaluate": lambda model: 1 / 0}, "(?s)evaluation failed.*ZeroDivisionError"),
        ({"callbacks": [lambda record: 1 / 0]}, "(?s)callback failed.*ZeroDivisionError"),
    ],
)
def test_failures_beside_the_learners(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(sl.RunError, match=words):
        train(learners=2, **changes)


def test_loaders_that_differ_between_learners() -> None:
    def learner(session: sl.Session) -> None:
        session.loader(DATA, batch_size=4 + session.rank)

    with pytest.raises(sl.LearnerError, match=r"batches of 4.*batches of 5|batches of 5.*batches of 4"):
        sl.launch(learner, learners=2)


def test_learners_are_added_by_a_whole_number() -> None:
    run = train(learners=1, wait=False)
    for count in (0, -1, 1.5, "2"):
        with pytest.raises(UsageError, match="count must be a whole number of at least 1"):
            run.add_learners(count)
    assert run.wait(timeout=30).version == 10


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"warmstart": -1}, "warmstart is a number of updates"),
        ({"warmstart": 1.5}, "warmstart is a number of updates"),
        ({"on_error": "ignore"}, 'on_error is "raise" or "continue"'),
        ({"patience": 0}, "patience is a number of seconds > 0"),
        ({"patience": None, "kill_hung": True}, "kill_hung=True needs patience="),
        ({"checkpoint_every": 5}, "checkpoint_every=5 needs run_dir="),
        ({"checkpoint_every": "5 minutes", "run_dir": "x"}, "seconds such as \"30s\", .* got '5 minutes'"),
        ({"checkpoint_every": "0s", "run_dir": "x"}, 'seconds such as "30s"'),
        ({"checkpoint_every": 0, "run_dir": "x"}, "checkpoint_every must be a whole number"),
        ({"keep_checkpoints": 0}, "keep_checkpoints must be a whole number"),
    ],
)
@pytest.mark.usefixtures("no_process")
def test_options_of_faults_and_checkpoints(
    changes: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=words):
        train(**changes)
    assert not list(tmp_path.iterdir())
