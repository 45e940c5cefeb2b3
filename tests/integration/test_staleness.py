"""Staleness, accounts, rates and records of real runs (R2, R3, R6; M3, M4, M10; DESIGN.md 1-3)."""

from __future__ import annotations

import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, lr_scheduler

import syncline as sl
from tests.integration import small_runs
from tests.integration.small_runs import Constant, points, rising

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SYNCS = ["hardsync", "softsync:1", "softsync:2", "async", "delayed:2"]


def train(**changes: Any) -> sl.Result:
    result: sl.Result = small_runs.train(**{"data": points(400), "learners": 4, **changes})
    return result


def check_accounts(result: sl.Result) -> None:
    small_runs.check_accounts(result)
    mean = sum(sigma * count for sigma, count in result.staleness.histogram.items()) / result.gradients
    assert result.staleness.mean == pytest.approx(mean)
    assert result.staleness.max == max(result.staleness.histogram)


@pytest.mark.parametrize("sync, quorum", [("softsync:1", 4), ("softsync:2", 2), ("async", 1)])
@pytest.mark.parametrize("engine, near", [("sim", 0.1), ("local", 0.5)])
def test_mean_staleness_on_equal_learners(sync: str, quorum: int, engine: str, near: float) -> None:
    """DESIGN.md 3: (λ−1)/c, but for the start, where all gradients are fresh.

    Processes sleep most of the time: four that compute on two cores would not be equal machines. On a busy
    machine they are not equal even so; simulated ones are.
    """

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if engine == "local":
            time.sleep(0.003)
        return F.cross_entropy(output, target)

    result = train(sync=sync, steps=800 // quorum, loss=loss, engine=engine)
    check_accounts(result)
    assert result.gradients == 800
    assert result.staleness.mean == pytest.approx(3 / quorum, rel=near)


@pytest.mark.parametrize("sync", SYNCS)
def test_steps_end_at_exactly_that_version(sync: str) -> None:
    """M10: also with learners that run ahead; what comes later is counted as dropped."""
    result = train(sync=sync, steps=23, topology="servers:2")
    check_accounts(result)
    assert result.version == 23
    quorum = {"hardsync": 4, "softsync:1": 4, "softsync:2": 2, "async": 1, "delayed:2": 4}[sync]
    assert result.gradients == 23 * quorum
    if sync == "hardsync":
        assert (result.staleness.max, result.dropped) == (0, 0)


@pytest.mark.parametrize("sync", SYNCS)
def test_epochs_fold_every_example(sync: str) -> None:
    """M3, M7: an incomplete quorum at the end is one last smaller update."""
    result = train(data=points(90), sync=sync, epochs=3)  # 22 batches of 4 and one of 2
    check_accounts(result)
    assert result.dropped == 0
    assert result.gradients == 3 * 23
    assert result.statistics.tables[0].examples == 3 * 90
    assert result.throughput == pytest.approx(270 / result.seconds)
    if sync.startswith("softsync"):
        quorum = 4 // int(sync[-1])
        assert result.version >= -(-3 * 23 // quorum)
    if sync == "async":
        assert result.version == 69


# -- rates -------------------------------------------------------------------------------------------------------


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    "sync, factor",
    [
        ("hardsync", 1.0),
        ("hardsync:reference_batch=64", 0.5),
        ("softsync:1", 1.0),
        ("softsync:2", 1 / 2),
        ("softsync:3", 1 / 4),  # c/λ: the quorum is ⌊4/3⌋ = 1
        ("async", 1 / 4),
        ("async:rate=given", 1.0),
        ("delayed:1", 1.0),
    ],
)
def test_the_rate_factor_multiplies_each_update(sync: str, factor: float) -> None:
    """M4, R3: with 4 learners and μ = 4; √(λμ/B) = √(16/64) with a reference batch."""
    result = train(
        model=Constant(), loss=None, objective=rising, sync=sync, steps=20, optimizer=partial(SGD, lr=1.0)
    )
    assert result.version == 20
    assert result.state_dict()["weight"].item() == pytest.approx(20 * factor)


@pytest.mark.parametrize("sync", ["hardsync", "async"])
def test_a_schedule_lowers_the_rate(sync: str) -> None:
    """M4: options travel with each gradient. At rate 0 the weight stands still, so it counts the gradients of two epochs."""
    result = train(
        model=Constant(),
        loss=None,
        objective=rising,
        data=points(64),
        sync=sync,
        epochs=5,
        schedule=partial(lr_scheduler.MultiStepLR, milestones=[2], gamma=0.0),
        evaluate=lambda model: {"weight": model.weight.item()},
    )
    assert (result.gradients, result.dropped) == (5 * 16, 0)
    assert result.state_dict()["weight"].item() == pytest.approx(0.8)  # 32 gradients, at 0.1 / 4 each
    weights = [record["weight"] for record in result.history]
    assert len(weights) == 5 and max(weights) == pytest.approx(0.8)
    if sync == "hardsync":
        assert weights == pytest.approx([0.4, 0.8, 0.8, 0.8, 0.8])


# -- the start -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", ["hardsync", "softsync:1", "async", "delayed:1"])
def test_the_first_fold_waits_for_all_initial_learners(sync: str) -> None:
    """M3: nobody's first step ends before the late one has begun; what the lowest rank put there is version 0 (M6)."""

    def learner(session: sl.Session) -> tuple[int, float, float, float]:
        if session.rank == 2:
            time.sleep(0.4)
        began, stepped = time.monotonic(), []
        model = nn.Linear(1, 1)
        opt = session.optimizer(model, partial(SGD, lr=0.1))
        first = opt.version, model.weight.item()
        for _ in range(3):
            opt.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            opt.step()
            stepped.append(time.monotonic())
        return (*first, began, stepped[0])

    result = sl.launch(learner, learners=3, sync=sync, threads=1)
    late = result.returned[2][2]
    if sync != "delayed:1":  # there the first step needs no fold
        assert min(stepped for _, _, _, stepped in result.returned) > late
    first = result.returned[: 2 if sync == "async" else 3]  # free, a late one may find the others' updates
    assert {version for version, *_ in first} == {0}
    assert len({weight for _, weight, *_ in first}) == 1
    assert result.gradients == 9


# -- records and callbacks -----------------------------------------------------------------------------------------


def test_history_holds_an_evaluation_of_one_version() -> None:
    """R6, M10: of the version that folded the epoch's last example; the last is the result itself."""
    test_set = points(100)
    result = train(sync="hardsync", epochs=4, evaluate=test_set)
    assert [record.epoch for record in result.history] == [0, 1, 2, 3]
    assert [record.version for record in result.history] == [25, 50, 75, 100]
    assert [record.examples for record in result.history] == [400, 800, 1200, 1600]
    assert result.history[-1]["accuracy"] > 0.8 > result.history[0].losses[0] > result.history[-1].losses[0]
    x, y = test_set.tensors
    with torch.no_grad():
        output = result.model(x)
    last = result.history[-1].metrics
    assert last["loss"] == pytest.approx(F.cross_entropy(output, y).item(), rel=1e-5)
    assert last["accuracy"] == pytest.approx((output.argmax(1) == y).float().mean().item())


@pytest.mark.parametrize("sync", ["softsync:1", "async"])
def test_evaluation_beside_free_learners(sync: str) -> None:
    result = train(sync=sync, epochs=3, evaluate=points(100))
    assert [record.epoch for record in result.history] == [0, 1, 2]  # whichever was done first
    assert all(0 < record.version <= result.version for record in result.history)
    assert max(record.examples for record in result.history) == 1200
    assert all({"loss", "accuracy"} <= record.metrics.keys() for record in result.history)


@pytest.mark.parametrize("sync", ["hardsync", "softsync:1", "async"])
def test_a_callback_stops_early(sync: str) -> None:
    seen: list[int] = []

    def stop_when_good(record: sl.EpochRecord) -> bool:
        seen.append(record.epoch)
        return record["accuracy"] > 0.6 and record.epoch >= 1

    result = train(
        sync=sync,
        epochs=10_000,
        evaluate=points(100),
        callbacks=[stop_when_good],
    )
    assert sorted(seen) == [record.epoch for record in result.history]
    assert 2 <= len(seen) < 10_000
    assert not result.interrupted
    check_accounts(result)


def far_ahead(session: sl.Session, folder: Path, steps: int, ahead: int) -> float:
    """Step; learner 0 reports that it is that far ahead, learner 1 begins when the test creates `go`."""
    model = nn.Linear(1, 1, bias=False)
    first = float(model.weight.detach())
    optimizer = session.optimizer(model, partial(SGD, lr=0.5))
    for step in range(steps):
        if session.rank == 0 and step == ahead:
            (folder / "ahead").touch()
        while session.rank == 1 and not (folder / "go").exists():
            time.sleep(0.005)
        model.weight.grad = torch.ones(1, 1)
        optimizer.step()
    return first


@pytest.mark.parametrize("topology", ["servers:1", "servers:2"])
def test_a_learner_may_be_hundreds_of_gradients_ahead(topology: str, tmp_path: Path) -> None:
    """M2: `delayed:k` allows it, for every k."""
    delay, steps, ahead = 300, 310, 290
    options: dict[str, Any] = {"learners": 2, "threads": 1, "topology": topology, "wait": False}
    run = sl.launch(far_ahead, tmp_path, steps, ahead, sync=f"delayed:{delay}", **options)
    began = time.monotonic()
    while not (tmp_path / "ahead").exists() and time.monotonic() - began < small_runs.PATIENCE:
        time.sleep(0.005)
    (tmp_path / "go").touch()
    result = run.wait(small_runs.PATIENCE)
    assert (result.version, result.gradients) == (steps, 2 * steps)
    assert result.staleness.histogram == Counter(min(step, delay) for step in range(steps) for _ in range(2))
    (weight,) = result.state_dict().values()
    assert float(weight) == pytest.approx(result.returned[0] - 0.5 * steps)
