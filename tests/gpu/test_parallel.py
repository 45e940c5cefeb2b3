"""Partitioned models on a GPU: Gloo carries CUDA tensors through the host, NCCL takes them as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from syncline.parallel.move import Group
from tests.integration.test_parallel import check_processes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_processes_that_share_a_gpu_train_a_network_as_one_does(tmp_path: Path) -> None:
    check_processes(2, tmp_path, "cuda", 1e-9)


@pytest.mark.skipif(not dist.is_nccl_available(), reason="needs NCCL")
def test_nccl_takes_tensors_of_the_gpu_as_they_are() -> None:
    """One process: several would need a GPU each."""
    store = dist.HashStore()
    group = Group(dist.ProcessGroupNCCL(store, 0, 1))
    send = torch.arange(5.0, device="cuda")
    assert group._direct and torch.equal(group.exchange(send, [5], [5]).wait(), send)
    group._group.shutdown()
