"""Partitioned models on a GPU: Gloo carries CUDA tensors through the host, NCCL takes them as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from syncline.parallel.move import Group
from tests.integration.test_parallel import check_processes
from tests.integration.test_torchrun import finish, script, torchrun
from tests.integration.test_torchrun_groups import HEAD

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_processes_that_share_a_gpu_train_a_network_as_one_does(tmp_path: Path) -> None:
    check_processes(2, tmp_path, "cuda", 1e-9)


@pytest.mark.skipif(not dist.is_nccl_available(), reason="needs NCCL")
def test_nccl_takes_tensors_of_the_gpu_as_they_are() -> None:
    """One process: several would need a GPU each."""
    store = dist.HashStore()
    group = Group(dist.ProcessGroupNCCL(store, 0, 1))
    send = torch.arange(5.0, device="cuda")
    assert group._direct and torch.equal(group.exchange(send, [5], [5])(), send)
    group._group.shutdown()


GROUPS = """
CASES = ({"optimizer": ADAM}, {"clip_norm": 0.1, "evaluate": (X, Y)}, {"optimizer": ADAM, "topology": "allreduce"})
for number, options in enumerate(CASES):
    runs = [trained(**HERE, plan=HYBRID, device=device, run_dir=f"{FOLDER}/{number}-{device}", **options) for device in ("cpu", "cuda")]
    for name, tensor in runs[0].state_dict().items():
        torch.testing.assert_close(runs[1].state_dict()[name].cpu(), tensor, rtol=1e-8, atol=1e-8)
"""


def test_seats_under_torchrun_on_a_gpu_learn_what_they_learn_on_cpus(tmp_path: Path) -> None:
    run = torchrun("--standalone", "--nproc-per-node=2", script(tmp_path, HEAD, GROUPS), tmp_path)
    output = finish(run)[0]
    assert run.returncode == 0, output
