"""An epoch's record is made at the version that folded its own last example, whoever is slow (M10): processes and simulated."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from torch import Tensor, nn
from torch.optim import SGD

import syncline as sl
from syncline.report import read_clocks, read_run
from syncline.roles.checkpoint_manifest import restored
from syncline.table.checkpoints import find
from tests.integration import small_runs
from tests.integration.small_runs import Constant, points, rising

cloudpickle.register_pickle_by_value(sys.modules[__name__])

BATCHES = 10  # of an epoch
PAUSE = "pause learner 0 for 1000 s at 0.5 s"  # in the middle of its first batch


def train(**changes: Any) -> sl.Result:
    """Each update adds one to the weight, so that the weight is the version; the loss is minus the weight."""
    given = {
        "model": Constant(),
        "data": points(4 * BATCHES),
        "loss": None,
        "objective": rising,
        "optimizer": partial(SGD, lr=1.0),
        "sync": "async:rate=given",
        "learners": 2,
        "epochs": 3,
        "evaluate": lambda model: {"weight": model.weight.item()},
    }
    result: sl.Result = small_runs.train(**given | changes)
    return result


def slow_once(folder: Path, go: Path) -> Callable[[nn.Module, Any], Tensor]:
    """The first batch of all takes until `go` is there."""

    def objective(model: nn.Module, batch: Any) -> Tensor:
        try:
            os.close(os.open(folder / "slow", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return rising(model, batch)
        until = time.monotonic() + 60
        while not go.exists() and time.monotonic() < until:
            time.sleep(0.001)
        return rising(model, batch)

    return objective


def on_processes(tmp_path: Path) -> tuple[sl.Result, list[int]]:
    order: list[int] = []
    go = tmp_path / "go"

    def callback(record: sl.EpochRecord) -> None:
        order.append(record.epoch)
        if {1, 2} <= set(order):
            go.touch()

    return train(objective=slow_once(tmp_path, go), callbacks=[callback]), order


def simulated(tmp_path: Path) -> tuple[sl.Result, list[int]]:
    order: list[int] = []
    engine = sl.Sim(script=PAUSE, check=True)
    return train(engine=engine, patience=None, callbacks=[lambda record: order.append(record.epoch)]), order


@pytest.mark.parametrize("how", [on_processes, simulated])
def test_a_slow_learner_holds_back_only_the_epoch_of_its_batches(how: Any, tmp_path: Path) -> None:
    """Three epochs, three versions, three evaluations; losses are of the epoch's own batches."""
    result, order = how(tmp_path)
    first, second, third = result.history
    assert [record.epoch for record in result.history] == [0, 1, 2] and order == [1, 2, 0]
    held = 2 * BATCHES - second.version  # batches that the slow one had, of epoch 0
    assert 1 <= held <= 4
    assert (third.version, first.version) == (
        3 * BATCHES - held,
        3 * BATCHES,
    ) and result.version == first.version
    assert [record["weight"] for record in result.history] == [record.version for record in result.history]
    assert [record.examples for record in (second, third, first)] == [
        4 * record.version for record in (second, third, first)
    ]
    for record in (second, third):  # all were computed by the fast one, on the newest version
        assert record.loss == pytest.approx(-(record.version - BATCHES / 2 - 0.5))
    fast = sum(range(BATCHES - held))
    slow = sum(range(3 * BATCHES - held, 3 * BATCHES)) - (
        3 * BATCHES - held
    )  # its first one was on version 0
    assert first.loss == pytest.approx(-(fast + slow) / BATCHES)


def test_a_run_goes_on_from_a_checkpoint_with_an_epoch_that_was_done_before_an_earlier_one(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "whole"
    options: dict[str, Any] = {"patience": None, "keep_checkpoints": 100, "checkpoint_every": 23}
    whole = train(engine=sl.Sim(script=PAUSE, check=True), run_dir=folder, **options)
    place = folder / "checkpoints" / f"{23:09}"
    found = restored(find(place))
    assert [found.has_done(epoch) for epoch in range(4)] == [False, True, False, False] and found.epoch == 0
    again = train(engine=sl.Sim(script=PAUSE, check=True), resume=place, run_dir=folder, **options)
    assert repr(again.history) == repr(whole.history)
    versions = [record.version for record in whole.history]
    assert versions[1] < 23 < versions[0] < versions[2] == 3 * BATCHES == whole.version
    record = read_run(folder)
    assert record.starts[-1]["resumed"] == {"version": 23, "epoch": 0, "early": [1]}
    assert [(each["epoch"], each["version"]) for each in record.epochs] == list(enumerate(versions))


def test_what_was_done_early_stays_so_when_a_shard_is_lost(tmp_path: Path) -> None:
    """The records of epochs that are done in the checkpoint are kept, the others are made again."""
    seen: list[tuple[int, int]] = []
    result = train(
        engine=sl.Sim(script=f"{PAUSE}; kill shard 0 at version 25", check=True),
        callbacks=[lambda record: seen.append((record.epoch, record.version))],
        checkpoint_every=23,
        run_dir=tmp_path,
        patience=None,
    )
    assert "recovered" in small_runs.kinds(result)
    versions = [record.version for record in result.history]
    assert versions[1] < 23 < versions[0] and result.version == 3 * BATCHES
    assert seen.count((1, versions[1])) == 1
    assert [record["weight"] for record in result.history] == versions


def test_a_dial_begins_with_its_epoch_when_all_before_it_are_done(tmp_path: Path) -> None:
    """Epoch 1 is done early; the dial of epoch 2 waits for epoch 0 too."""
    result = train(
        engine=sl.Sim(script="pause learner 0 for 24 s at 0.5 s", check=True),
        sync="async:rate=given until 2 then hardsync",
        epochs=6,
        run_dir=tmp_path,
        clocks=True,
    )
    first, second = (record.version for record in result.history[:2])
    assert second + 5 < first and len(result.history) == 6  # meanwhile the fast one goes on alone
    gradients = np.bincount(read_clocks(tmp_path)["version"])[1:]
    assert gradients[:first].tolist() == [1] * first
    assert set(gradients[first + 2 : -1].tolist()) == {2}  # what was under way is folded in between


def over_two_loaders(session: sl.Session) -> None:
    """The second is over in the middle of the first one's epoch."""
    model = nn.Linear(4, 2)
    optimizer = session.optimizer(model, partial(SGD, lr=0.1))
    first, second = (session.loader(points(size), batch_size=4) for size in (16, 8))
    others = iter(second)
    for index, (x, _) in enumerate(first):
        next(others, None)
        optimizer.zero_grad()
        model(x).sum().backward()
        session.loss = float(index)
        optimizer.step()


def test_losses_are_of_the_whole_epoch_also_where_another_loader_is_over_in_between() -> None:
    result = sl.launch(over_two_loaders, learners=1, sync="async", engine="sim")
    (record,) = result.history
    assert record.loss == pytest.approx((0 * 8 + 1 * 8 + 2 * 4 + 3 * 4) / 24)  # by the gradients' examples
