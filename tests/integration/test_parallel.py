"""Partitioned models in real processes, joined as users join theirs: training and inference equal one process."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from syncline.models import AlexNet
from syncline.parallel import partition
from syncline.plan import plan


def network() -> nn.Module:
    torch.manual_seed(0)
    return AlexNet(7, image=32, width=0.05, hidden=24, dropout=0.0).double()


def batches(device: str) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    made = []
    for count in (6, 6, 5):  # the last batch is smaller
        x = torch.randn(count, 3, 32, 32, generator=draw, dtype=torch.float64)
        made.append((x.to(device), torch.randint(7, (count,), generator=draw).to(device)))
    return made


def trained(model: Any, device: str, reduce: Any = lambda: None) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), []
    for x, y in batches(device):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        reduce()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def seat(rank: int, size: int, folder: str, device: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    model, (x, _) = network().to(device), batches(device)[0]
    found = plan(model, x, group=size, costs="singa")
    mine = partition(model, found, x, dist.group.WORLD, check=True)
    losses = trained(mine, device, mine.reduce_gradients)
    state = mine.gather()
    with torch.inference_mode():
        result = mine.eval()(x)
    if rank == size - 1:
        held = sum(p.numel() for p in mine.parameters())
        torch.save((losses, state, result, held, found.choices), f"{folder}/result")
    dist.barrier()
    os._exit(0)  # Gloo's threads can abort a program that ends while the other's connections close


def check_processes(size: int, folder: Path, device: str, tolerance: float) -> None:
    """The whole run, in processes and in one."""
    from tests.ready_python import ReadyPython  # not where this file is a script

    command = [sys.executable, __file__]
    seats = [ReadyPython([*command, str(rank), str(size), str(folder), device]) for rank in range(size)]
    try:
        assert [each.wait(100) for each in seats] == [0] * size
    finally:
        for each in seats:
            each.kill()
            each.wait()
    losses, state, result, held, choices = torch.load(folder / "result")
    model = network().to(device)
    assert losses == pytest.approx(trained(model, device), rel=tolerance)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=tolerance, atol=tolerance)
    expected = model.eval()(batches(device)[0][0]).detach()
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)
    assert choices["fc6"] == "model" and held < sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_a_planned_network_is_trained_in_processes_as_in_one(size: int, tmp_path: Path) -> None:
    check_processes(size, tmp_path, "cpu", 1e-10)


if __name__ == "__main__":
    seat(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
