"""What is measured becomes a cluster; the measuring itself on a model that takes no time."""

from __future__ import annotations

import pytest
import torch

from syncline.engines.sim import calibrate
from syncline.engines.sim.calibrate import Measured, measure, perceptron
from syncline.engines.sim.cluster import Compute

SEEN = Measured(
    compute=Compute(base=10.0),
    nbytes=100,
    copy=0.5,
    take=0.25,
    fold=1.0,
    serve=0.125,
    handle=0.5,
    step=14.5,
    full_compute=11.0,
    jitter=0.1,
)


def test_what_is_left_of_a_step_is_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "cores", lambda: 3)
    cluster = SEEN.cluster()
    assert cluster.memory.latency == pytest.approx((14.5 - 10 - 1 - 0.5 - 1) / 2)
    assert cluster.crowding == pytest.approx(0.05)  # two loops beside it cost a tenth
    assert cluster.cores == 3
    assert cluster.fold.seconds(50) == pytest.approx(0.5)
    assert {cluster.machine_of_learner(5), cluster.machine_of_shard(2)} == {0}


def test_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "SECONDS", 0.002)
    monkeypatch.setattr(calibrate, "ROUNDS", 3)
    threads = torch.get_num_threads()
    measured = measure(perceptron((8, 4, 2), 4))
    assert torch.get_num_threads() == threads
    assert measured.nbytes == 4 * 4 * 64
    assert 0 < measured.compute.base < measured.step
    assert min(measured.copy, measured.fold, measured.serve, measured.full_compute) > 0
    assert measured.cluster().name == "this-machine"
