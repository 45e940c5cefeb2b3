"""A process dies in its n-th write to the exchange, a record half written, for every n (M11).

Two learners, two shards, every preset. All points of a learner are tried here, every eleventh of a shard;
`--all-crash-points` tries them all (about twenty minutes).
"""

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
from syncline.testing import Local

cloudpickle.register_pickle_by_value(sys.modules[__name__])

PRESETS = [
    "hardsync",
    "softsync:1",
    "async",
    "ssp:1",
    "backup:1",
    "delayed:2",
    "downpour:push=2,fetch=3,local_lr=0.1",
    "hardsync until 1 then softsync:1",
]
SIZE, EPOCHS = 16, 2


def run(sync: str, crashes: dict[str, int], folder: Path | None) -> sl.Result:
    data = TensorDataset(torch.ones(SIZE, 4), torch.zeros(SIZE, dtype=torch.long))
    options: dict[str, Any] = {"run_dir": folder, "checkpoint_every": 2} if folder else {}
    handle = sl.train(
        nn.Linear(4, 2),
        data,
        loss=F.cross_entropy,
        optimizer=partial(SGD, lr=0.1, momentum=0.9),
        sync=sync,
        engine=Local(crashes=crashes),
        learners=2,
        topology="servers:2",
        batch_size=4,
        epochs=EPOCHS,
        threads=1,
        wait=False,
        **options,
    )
    return handle.wait(timeout=60)


def check(result: sl.Result, kinds: list[str]) -> bool:
    """Everything adds up; False if the process lived to the end."""
    table = result.statistics.tables[0]
    assert [record.epoch for record in result.history] == list(range(EPOCHS))
    assert table.pending == 0 and result.staleness.gradients == result.gradients
    if result.dropped:
        assert table.examples < SIZE * EPOCHS
    else:
        assert table.examples == SIZE * EPOCHS
    found = [event.kind for event in result.events if event.kind != "checkpoint"]
    if found[-1:] == ["begun anew"]:  # it died when the learners had already made their last step
        found = found[:-1]
    assert found in (kinds, [])
    return bool(found)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("sync", PRESETS)
def test_a_learner_dies_at_any_operation(sync: str) -> None:
    point = 0
    alive = True
    while alive:
        point += 1
        alive = check(run(sync, {f"learner {point % 2}": point}, None), ["lost"])
    assert point > 20


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("sync", PRESETS)
def test_a_shard_dies_at_any_operation(sync: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    stride = 1 if request.config.getoption("--all-crash-points") else 11
    for shard in (0, 1):
        point, alive = 1 + PRESETS.index(sync) % stride, True
        while alive:
            folder = tmp_path / f"{shard}-{point}"
            alive = check(run(sync, {f"shard {shard}": point}, folder), ["shard lost", "recovered"])
            point += stride
        assert point > 40
