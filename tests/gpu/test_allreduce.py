"""All-reduce on GPUs: NCCL with communication on its own stream, and two ranks through Gloo on one GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import syncline as sl

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a GPU"),
]
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
WAYS = [
    "allreduce",
    "allreduce:layerwise,bucket=4KiB",
    "allreduce:layerwise,bucket=4KiB,apply=reverse",
    "allreduce:layerwise,bucket=4KiB,apply=arrival",
]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)
    ).double()


def points(count: int = 120) -> TensorDataset:
    x = torch.randn(count, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(x, (x[:, 0] > 0).long())


def joint(batch: int, epochs: int) -> dict[str, Tensor]:
    model, data = net().cuda(), points()
    opt = MOMENTUM(model.parameters())
    for epoch in range(epochs):
        for part in sl.epoch_order(len(data), seed=0, epoch=epoch).split(batch):
            x, y = data[part]
            opt.zero_grad()
            F.cross_entropy(model(x.cuda()), y.cuda()).backward()
            opt.step()
    return {name: value.cpu() for name, value in model.state_dict().items()}


def train(topology: str, learners: int, **options: Any) -> sl.Result:
    given: dict[str, Any] = {"sync": "hardsync", "epochs": 3, "optimizer": MOMENTUM, **options}
    return sl.train(
        net(),
        points(),
        loss=F.cross_entropy,
        topology=topology,
        learners=learners,
        batch_size=16,
        device="cuda:0",
        evaluate=points(),
        **given,
    )


def close(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, value in wanted.items():
        assert torch.allclose(got[name], value, rtol=1e-8, atol=1e-8), name


@pytest.mark.parametrize("topology", WAYS)
@pytest.mark.parametrize("learners", [1, 2])
def test_as_one_process_with_the_joint_batch(topology: str, learners: int) -> None:
    """One learner has NCCL; two share the GPU, so that their tensors go through Gloo."""
    got = train(topology, learners)
    close(got.state_dict(), joint(16 * learners, 3))
    assert got.version == 3 * -(-120 // (16 * learners)) and got.staleness.max == 0
    assert got.history[-1]["accuracy"] > 0.8


@pytest.mark.parametrize("learners", [1, 2])
@pytest.mark.parametrize("topology", WAYS[:2])
def test_delayed(topology: str, learners: int) -> None:
    got = train(topology, learners, sync="delayed:2")
    rounds = 3 * -(-120 // (16 * learners))
    assert got.version == rounds and got.staleness.max == 2
    other = train("allreduce", learners, sync="delayed:2")
    close(got.state_dict(), other.state_dict())


@pytest.mark.parametrize("learners", [1, 2])
@pytest.mark.parametrize("optimizer", [MOMENTUM, partial(torch.optim.Adam, lr=0.01, fused=True)])
def test_goes_on_from_a_checkpoint_with_averages_in_flight(
    learners: int, optimizer: Any, tmp_path: Path
) -> None:
    way: dict[str, Any] = {"sync": "delayed:2", "optimizer": optimizer}
    whole = train(WAYS[1], learners, **way)
    train(WAYS[1], learners, **way, run_dir=tmp_path / "a", checkpoint_every=4, keep_checkpoints=99)
    for folder in sorted((tmp_path / "a" / "checkpoints").iterdir()):
        got = train(WAYS[1], learners, **way, resume=folder, run_dir=tmp_path / folder.name)
        close(got.state_dict(), whole.state_dict())
        assert (got.version, got.staleness) == (whole.version, whole.staleness)


def backend(session: sl.Session) -> tuple[str, bool, bool]:
    """The kind of group behind the port; was the computation's stream busy, and was it still after a reduction on another?"""
    group = session.port._group._group  # type: ignore[attr-defined]
    buffer = torch.ones(1 << 24, device=session.device)
    mine, other = torch.cuda.current_stream(), torch.cuda.Stream()

    def reduce() -> None:
        with torch.cuda.stream(other):
            session.port.reduce(buffer).wait()  # type: ignore[attr-defined]
            other.synchronize()

    torch.cuda.synchronize()
    reduce()  # joins the learners; a first use of streams, events and kernels may wait for the whole device
    reduce()
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # this stream is busy from here on, for a second or so
    before = not mine.query()
    reduce()
    after = not mine.query()
    torch.cuda.synchronize()
    return type(group).__name__, before, after


@pytest.mark.skipif(not dist.is_nccl_available(), reason="needs NCCL")
def test_nccl_communicates_on_its_own_stream() -> None:
    assert sl.launch(backend, learners=1, topology="allreduce", device="cuda:0").returned == [
        ("ProcessGroupNCCL", True, True)
    ]


def autocast(session: sl.Session) -> float:
    model = net().float().to(session.device)
    opt = session.optimizer(model, MOMENTUM)
    x, y = points().tensors
    for _ in range(20):
        opt.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(model(x.float().to(session.device)), y.to(session.device))
        loss.backward()
        opt.step()
    return loss.item()


@pytest.mark.parametrize("learners", [1, 2])
def test_bfloat16_autocast(learners: int) -> None:
    losses = sl.launch(autocast, learners=learners, topology="allreduce:layerwise", device="cuda:0").returned
    assert all(loss < 0.5 for loss in losses)


LEAVES = """
import sys
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

import syncline as sl

def learner(session):
    model = nn.Linear(4, 2).to(session.device)
    opt = session.optimizer(model, partial(torch.optim.SGD, lr=0.1))
    for _ in range(5):
        opt.zero_grad()
        model(torch.ones(3, 4, device=session.device)).sum().backward()
        opt.step()
    return type(session.port._group._group).__name__

for topology in ("allreduce", "allreduce:layerwise"):
    result = sl.launch(learner, learners=1, topology=topology, device="cuda:0")
    assert result.returned == ["ProcessGroupNCCL"], result.returned
print("done")
"""


@pytest.mark.skipif(not dist.is_nccl_available(), reason="needs NCCL")
@pytest.mark.parametrize("torchrun", [False, True])
def test_nccl_has_nothing_to_complain_about_at_the_end(torchrun: bool, tmp_path: Path) -> None:
    """Two runs after another, each in a group that is left: by a learner's process, and by torchrun's."""
    script = tmp_path / "leaves.py"
    script.write_text(LEAVES)
    source = str(Path(sl.__file__).parents[1])
    starter = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"] if torchrun else []
    done = subprocess.run(
        [sys.executable, *starter, str(script)],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "PYTHONPATH": source},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 1
    assert "destroy_process_group" not in done.stderr and "leak" not in done.stderr, done.stderr
