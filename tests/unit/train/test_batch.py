"""Batch methods in `train`: which runs are theirs, which options and models they refuse, and the run's specification."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

import syncline as sl
from syncline.errors import LayoutError, SynclineWarning, UsageError
from syncline.topologies import Servers
from syncline.train import batch
from tests.unit.train.still_engine import PLAIN, StillEngine, good


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


def train(engine: StillEngine, **changes: Any) -> sl.Run:
    given = good(**{"sync": "sandblaster", "optimizer": sl.LBFGS(), "steps": 3, **changes})
    return sl.train(given.pop("model"), given.pop("data"), engine=engine, wait=False, **given)


@pytest.mark.parametrize("sync, optimizer, expected", [
    ("sandblaster", sl.LBFGS(), True), (" sandblaster ", sl.LBFGS(), True), ("hardsync", PLAIN, False),
    (sl.Sync(splits=1), PLAIN, False), ({0: "hardsync"}, torch.optim.LBFGS, False),
])  # fmt: skip
def test_a_batch_method_trains_where_dial_and_optimizer_both_say_so(
    sync: Any, optimizer: Any, expected: bool
) -> None:
    assert batch.wants_batch(sync, optimizer) is expected


@pytest.mark.parametrize("sync, optimizer, words", [
    ("sandblaster:2", sl.LBFGS(), "sandblaster itself has no options"),
    ("sandblaster", PLAIN, "got partial; write sync="),
    ("sandblaster", sl.LBFGS, r"got the class LBFGS; give an instance, sl.LBFGS\(...\)"),
    ("sandblaster", torch.optim.LBFGS, "got the class LBFGS; write sync="),
    ("hardsync", sl.LBFGS(), "LBFGS is a batch method and folds no gradients"),
    ("hardsync", sl.LBFGS, "LBFGS is a batch method and folds no gradients"),
])  # fmt: skip
def test_one_without_the_other_is_refused(sync: Any, optimizer: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        batch.wants_batch(sync, optimizer)


@pytest.mark.parametrize("changes, words", [
    ({"epochs": 1}, "epochs=1: give steps="),
    ({"clip_norm": 1.0}, "clip_norm=1.0: the method chooses"),
    ({"warmstart": 2}, "warmstart=2"),
    ({"policy": "sample"}, "policy='sample'"),
    ({"group": 2}, "group=2: every learner holds the whole model"),
    ({"stop": {"loss": 1}}, "stop=.*tolerance="),
    ({"table_device": "cpu"}, "table_device='cpu'"),
    ({"steps": None}, "needs steps="),
    ({"topology": "allreduce"}, "keeps its vectors on servers, got topology='allreduce'"),
    ({"topology": "tree:2"}, "keeps its vectors on servers"),
    ({"data": Stream()}, "no iterable one"),
    ({"learners": 0}, "learners must be a whole number"),
    ({"batch_size": 0}, "batch_size must be a whole number"),
    ({"objective": print}, "either loss=.* or objective="),
    ({"gradient": lambda model, batch: None, "loss": None}, "evaluates an objective: gradient=.* has none"),
    ({"schedule": 3}, "schedule= is a function: iteration"),
    ({"schedule": len, "global_batch_size": 4}, "give either global_batch_size="),
    ({"schedule": lambda iteration: 0}, "sample of iteration 0 must be a whole number"),
    ({"schedule": lambda iteration: 1 / 0}, "schedule failed: ZeroDivisionError"),
    ({"global_batch_size": 0}, "global_batch_size must be a whole number"),
])  # fmt: skip
def test_what_means_nothing_for_a_batch_method_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        train(StillEngine(), **changes)


class Turned(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 1)
        self.turned = nn.Parameter(torch.zeros(2, dtype=torch.complex64))


@pytest.mark.parametrize("model, words", [
    (nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1)), r"'1' \(BatchNorm1d\) normalises by the statistics of a portion"),
    (nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1, track_running_stats=False)), "normalises by the statistics"),
    (Turned(), "'turned' is torch.complex64: a batch method moves real numbers only"),
    (nn.Linear(3, 1).requires_grad_(False), "Linear has no parameter that is trained"),
])  # fmt: skip
def test_models_whose_objective_depends_on_the_cut_or_that_do_not_move_are_refused(
    model: nn.Module, words: str
) -> None:
    with pytest.raises((UsageError, LayoutError), match=words):
        batch.check_model(model)


def test_statistics_that_are_there_stay_and_dropout_is_off_with_a_warning() -> None:
    seen = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.0))
    seen(torch.zeros(5, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch.check_model(seen)
    dropping = nn.Sequential(nn.Linear(3, 1), nn.Dropout(0.5), nn.LSTM(1, 1, num_layers=2, dropout=0.1))
    with pytest.warns(SynclineWarning, match=r"dropout is off in '1' \(Dropout\), '2' \(LSTM\)"):
        batch.check_model(dropping)


@pytest.mark.parametrize("changes, portion, first", [
    ({}, 4, 12), ({"batch_size": 50}, 12, 12), ({"global_batch_size": 8}, 4, 8),
    ({"schedule": lambda iteration: 5 + iteration}, 4, 5),
])  # fmt: skip
def test_a_run_evaluates_portions_of_all_data_or_of_a_sample(
    changes: dict[str, Any], portion: int, first: int
) -> None:
    engine = StillEngine()
    train(engine, topology="servers:3", **changes).wait()
    assert engine.spec.batch is not None
    samples = engine.spec.batch.samples
    assert (samples.portion, samples.at(0).examples) == (portion, first)
    assert engine.spec.plan.topology == Servers(3, True) and engine.spec.batch.layout.shards == 3
    assert (engine.spec.sync, engine.spec.plan.limit) == ("sandblaster", 3)


def test_small_weights_are_not_cut_unasked() -> None:
    assert batch.shards_of("servers", 1 << 20) == 1
    assert batch.shards_of("servers:5", 1 << 20) == 5
