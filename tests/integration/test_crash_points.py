"""A process dies in its n-th write to the exchange, a record half written, for every n (M11).

Two shards, every preset. Every fourth write of two learners is tried here, both dying in one run, and every 37th of a shard;
`make test-long` tries every write (about half an hour).
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
SIZE, EPOCHS, BATCH = 16, 2, 4


def run(sync: str, crashes: dict[str, int], folder: Path | None = None, *, learners: int = 2) -> sl.Result:
    data = TensorDataset(torch.ones(SIZE, 4), torch.zeros(SIZE, dtype=torch.long))
    options: dict[str, Any] = {"run_dir": folder, "checkpoint_every": 2} if folder else {}
    handle = sl.train(
        nn.Linear(4, 2),
        data,
        loss=F.cross_entropy,
        optimizer=partial(SGD, lr=0.1, momentum=0.9),
        sync=sync,
        engine=Local(crashes=crashes),
        learners=learners,
        topology="servers:2",
        batch_size=BATCH,
        epochs=EPOCHS,
        threads=1,
        wait=False,
        **options,
    )
    return handle.wait(timeout=60)


def check(result: sl.Result, sync: str, *kinds: list[str]) -> bool:
    """Everything adds up; False if all processes lived to the end."""
    table = result.statistics.tables[0]
    unread = unread_by_anybody(result, sync)
    assert [record.epoch for record in result.history] == list(range(EPOCHS - (unread > 0)))
    assert table.pending == 0 and result.staleness.gradients == result.gradients
    assert table.examples + BATCH * result.dropped + unread == SIZE * EPOCHS
    found = [event.kind for event in result.events if event.kind != "checkpoint"]
    if found[-1:] == ["begun anew"]:  # it died when the learners had already made their last step
        found = found[:-1]
    assert found in (*kinds, [])
    return bool(found)


def unread_by_anybody(result: sl.Result, sync: str) -> int:
    """What the last of several learners had not pushed when it died and the others had pushed their rests and returned (M9)."""
    lost = [event for event in result.events if event.kind == "lost"]
    if "downpour" not in sync or not lost or table_is_whole(result):
        return 0
    return int(lost[-1].details["handed_out_again"])


def table_is_whole(result: sl.Result) -> bool:
    return result.statistics.tables[0].examples + BATCH * result.dropped == SIZE * EPOCHS


@pytest.mark.sweep(2)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.long), 4])
@pytest.mark.parametrize("sync", PRESETS)
def test_two_of_three_learners_die_at_any_operation(sync: str, stride: int) -> None:
    """The same one, until both have come to their end before it; presets begin at different ones."""
    point, died = 1 + PRESETS.index(sync) % stride, True
    while died:
        crashes = {"learner 0": point, "learner 1": point}
        died = check(run(sync, crashes, learners=3), sync, ["lost"], ["lost", "lost"])
        point += stride
    assert point > 20


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("learner", [0, 1])
@pytest.mark.parametrize("sync", PRESETS)
def test_a_learner_dies_at_any_operation(sync: str, learner: int) -> None:
    point, died = 0, True
    while died:
        point += 1
        died = check(run(sync, {f"learner {learner}": point}), sync, ["lost"])
    assert point > 20


@pytest.mark.sweep(2)
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.long), 37])
@pytest.mark.parametrize("sync", PRESETS)
def test_a_shard_dies_at_any_operation(sync: str, stride: int, tmp_path: Path) -> None:
    for shard in (0, 1):
        point, alive = 1 + PRESETS.index(sync) % stride, True
        while alive:
            folder = tmp_path / f"{shard}-{point}"
            alive = check(run(sync, {f"shard {shard}": point}, folder), sync, ["shard lost", "recovered"])
            point += stride
        assert point > 40
