"""What a plan costs: SINGA's counts of floats, seconds on a cluster, and layers that are measured."""

from __future__ import annotations

import pytest
import torch

from syncline.cluster import Cluster, Compute, Link
from syncline.models import AlexNet
from syncline.plan import best_group, data_parallel, grouped, measure, model_parallel, plan
from tests.unit.plan.planned_networks import BATCH, ETHERNET, mlp


@pytest.fixture(scope="module")
def alexnet() -> AlexNet:
    with torch.device("meta"):
        return AlexNet(dropout=0.0)


def test_floats_are_counted_as_singa_counts_them(alexnet: AlexNet) -> None:
    """2·P·M data-parallel, 2·P or nothing model-parallel, 2·D·M·b for each pair not both data-parallel; times groups."""
    group, workers, batch = 4, 16, 256
    share = batch * group // workers
    found = {row.layer: row for row in plan(alexnet, BATCH, group=group, workers=workers).rows}
    assert found["conv2"].bytes == 4 * (2 * 307_456 * group) * (workers // group)
    assert found["fc6"].bytes == 4 * (2 * 37_752_832 + 2 * 256 * 6 * 6 * group * share) * (workers // group)
    alone = {row.layer: row for row in plan(alexnet, BATCH, group=4).rows}
    assert alone["fc7"].bytes == 4 * 2 * 4096 * 4 * 256  # its own parameters are updated where they are
    through = {row.layer: row for row in plan(alexnet, BATCH, group=4, local_update=False).rows}
    assert through["fc7"].bytes - alone["fc7"].bytes == 4 * 2 * 16_781_312


def test_the_best_size_of_simple_groups_is_a_square_root() -> None:
    P, N, D, B = 62e6, 64, 1.2e6, 256
    M = best_group(P, N, D, B)
    assert pytest.approx((P * N / (D * B)) ** 0.5) == M
    assert grouped(P, N, D, B, M) == pytest.approx(4 * (P * N * D * B) ** 0.5)
    assert all(grouped(P, N, D, B, M) <= grouped(P, N, D, B, other) for other in (1, 2, 4, 8, 16, 32, 64))
    assert grouped(P, N, D, B, N) == 2 * P + model_parallel(D, N, B)
    assert data_parallel(P, N) == grouped(P, N, 0.0, B, 1)
    assert best_group(1e3, 4, 1e6, 256) == 1.0 and best_group(1e12, 4, 1.0, 1) == 4.0


def test_slow_links_and_large_layers_change_the_choice() -> None:
    model, x = mlp(64, 2048, 2048), torch.empty(32, 64)
    fast = Cluster(compute=Compute(base=1.0), card=Link(latency=1e-6, bandwidth=1e12))
    slow = Cluster(compute=Compute(base=1.0), card=Link(latency=1e-6, bandwidth=1e6))
    assert plan(model, x, slow, 4).choices["2"] == "model"
    assert plan(model, x, fast, 4).seconds < plan(model, x, slow, 4).seconds
    given_seconds = plan(model, x, fast, 4, compute={"0": 8.0, "2": 4.0})
    assert [round(row.seconds, 2) for row in given_seconds.rows] == [2.0, 1.0]


def test_what_goes_to_servers_on_other_machines_takes_time_in_groups_of_one_too() -> None:
    model, x = mlp(64, 2048, 2048), torch.empty(32, 64)
    slow = Cluster(compute=Compute(base=0.0), card=Link(bandwidth=1e6), memory=Link(bandwidth=1e6))
    count = sum(p.numel() for p in model.parameters())
    assert plan(model, x, slow, 1, workers=4).seconds == pytest.approx(2 * 4 * count / 1e6)
    assert plan(model, x, slow, 1).seconds == 0.0


def test_layers_are_measured_by_running_them() -> None:
    model = mlp(30, 400, 20)
    found = measure(model, torch.zeros(64, 30))
    assert set(found) == {"0", "2"} and all(seconds > 0 for seconds in found.values())
    assert all(p.grad is None for p in model.parameters())
    assert plan(model, torch.zeros(64, 30), ETHERNET, 2, compute=found).seconds > 0
