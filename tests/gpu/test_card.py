"""Tables on the GPU: the same bits, dials and losses as beside it, and nothing stays on the card."""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import syncline as sl
from syncline.testing import Faults

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a GPU"),
]
DIALS = ["hardsync", "softsync:1", "async", "ssp:1", "delayed:2", "downpour:push=2,fetch=3,local_lr=0.03"]


def model_of(device: Any = "cpu", dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300, 2))
    return model.to(device, dtype)


def batches(rank: int, learners: int, step: int, device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(64, 20, generator=generator)[rank::learners]
    return x.to(device), (x[:, 0] > 0).long().to(device)


def loop(
    session: sl.Session, steps: int = 30, optimizer: Any = None, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    model = nn.Sequential(*[m for m in model_of(session.device, dtype) if not isinstance(m, nn.BatchNorm1d)])
    shared = session.optimizer(model, optimizer or partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    for step in range(steps):
        if session.ending:
            break
        x, y = batches(session.rank, session.learners, step, session.device)
        shared.zero_grad()
        F.cross_entropy(model(x.to(dtype)).float(), y).backward()
        shared.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def plain(steps: int, factory: Any, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    model = nn.Sequential(*[m for m in model_of("cuda", dtype) if not isinstance(m, nn.BatchNorm1d)])
    optimizer = factory(model.parameters())
    for step in range(steps):
        x, y = batches(0, 1, step, "cuda")
        optimizer.zero_grad()
        F.cross_entropy(model(x.to(dtype)).float(), y).backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("topology", ["servers:1", "servers:2"])
@pytest.mark.parametrize(
    "factory",
    [partial(torch.optim.SGD, lr=0.1, momentum=0.9), partial(torch.optim.Adam, lr=0.01)],
    ids=["SGD", "Adam"],
)
def test_one_learner_has_the_bits_of_plain_pytorch(factory: Any, topology: str) -> None:
    result = sl.launch(loop, 30, factory, learners=1, device="cuda", topology=topology)
    for mine, theirs in zip(result.returned[0], plain(30, factory), strict=True):
        assert torch.equal(mine, theirs)


def test_half_precision_travels_too() -> None:
    factory = partial(torch.optim.SGD, lr=0.1)
    result = sl.launch(loop, 20, factory, torch.bfloat16, learners=1, device="cuda")
    for mine, theirs in zip(result.returned[0], plain(20, factory, torch.bfloat16), strict=True):
        assert mine.dtype == torch.bfloat16 and torch.equal(mine, theirs)


def test_two_learners_in_lockstep_have_the_joint_batch() -> None:
    factory = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    result = sl.launch(loop, 30, factory, learners=2, device="cuda", sync="hardsync")
    assert all(torch.equal(a, b) for a, b in zip(*result.returned, strict=True))
    for mine, theirs in zip(result.returned[0], plain(30, factory), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def data() -> TensorDataset:
    inputs = torch.randn(512, 20, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, (inputs[:, 0] > 0).long())


def train(**options: Any) -> Any:
    given: dict[str, Any] = {
        "loss": F.cross_entropy,
        "optimizer": partial(torch.optim.SGD, lr=0.03, momentum=0.5),
        "device": "cuda",
        "learners": 3,
        "batch_size": 16,
        "epochs": 3,
        **options,
    }
    return sl.train(model_of(), data(), **given)


@pytest.mark.parametrize("table_device", [None, "cpu"])
@pytest.mark.parametrize("sync", DIALS)
def test_every_dial_learns(sync: str, table_device: str | None) -> None:
    result = train(sync=sync, table_device=table_device, evaluate=data(), epochs=6)
    assert result.history[-1].metrics["accuracy"] > 0.8
    assert result.statistics.tables[0].pending == 0
    assert all(tensor.isfinite().all() for tensor in result.state_dict().values())


def used() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def settles(before: int) -> bool:
    for _ in range(100):
        if used() <= before:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("sync", ["hardsync", "async", "delayed:1"])
def test_a_killed_learner_takes_nothing_with_it(sync: str) -> None:
    torch.zeros(1, device="cuda")
    before = used()
    run = train(sync=sync, batch_size=2, epochs=30, wait=False)
    Faults("kill learner 1 at version 20").play(run)
    result = run.wait(100)
    assert [event.kind for event in result.events].count("lost") == 1
    assert result.statistics.tables[0].pending == 0
    assert settles(before)


@pytest.mark.parametrize("sync", ["hardsync", "softsync:1"])
def test_a_killed_shard_comes_back_from_the_checkpoint(sync: str, tmp_path: Path) -> None:
    before = used()
    run = train(sync=sync, epochs=8, wait=False, run_dir=tmp_path, checkpoint_every=5)
    Faults("kill shard 0 at version 25").play(run)
    result = run.wait(100)
    assert "recovered" in [event.kind for event in result.events]
    assert all(tensor.isfinite().all() for tensor in result.state_dict().values())
    assert settles(before)


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    whole = train(sync="hardsync", epochs=4, learners=2)
    train(sync="hardsync", epochs=2, learners=2, run_dir=tmp_path)
    rest = train(sync="hardsync", epochs=4, learners=2, resume=tmp_path)
    for name, tensor in whole.state_dict().items():
        torch.testing.assert_close(rest.state_dict()[name], tensor, rtol=1e-4, atol=1e-5)


def test_no_room_is_said_with_the_numbers() -> None:
    from syncline.engines.local.shared_cuda_memory import CardMemory
    from syncline.errors import RunError

    with pytest.raises(RunError, match=r"no room for .* MiB of too much.*table_device"):
        CardMemory("cuda:0", 1 << 44, "too much")


def test_a_table_elsewhere_is_refused() -> None:
    with pytest.raises(sl.UsageError, match="table_device='cuda:7'"):
        train(table_device="cuda:7")


# -- nobody waits for the card -------------------------------------------------------------------------------


def test_losses_that_come_late_are_those_of_a_table_beside_the_card() -> None:
    late, said = (
        train(sync="hardsync", learners=2, table_device=table_device) for table_device in (None, "cpu")
    )
    assert [record.loss for record in late.history] == pytest.approx(
        [record.loss for record in said.history], 1e-4
    )


def test_data_that_lie_on_the_card_give_the_same_bits() -> None:
    there, here = (train(sync="hardsync", learners=1, data_device=where) for where in ("cuda", None))
    for name, tensor in here.state_dict().items():
        assert torch.equal(there.state_dict()[name], tensor)


def test_data_that_do_not_fit_are_refused_with_the_numbers() -> None:
    huge = torch.zeros(1).expand(1 << 40, 1)
    with pytest.raises(sl.LearnerError, match=r"the data take 8,192.00 GiB, the card has"):
        sl.train(
            nn.Linear(1, 1),
            (huge, huge),
            loss=F.mse_loss,
            optimizer=partial(torch.optim.SGD, lr=0.1),
            device="cuda",
            data_device="cuda",
            steps=1,
        )


# -- what loops do on GPUs -----------------------------------------------------------------------------------


def amp_loop(session: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    model = model_of(session.device)
    optimizer = session.optimizer(model, partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16, init_scale=2.0**40)
    losses = []
    for step in range(200):
        x, y = batches(session.rank, session.learners, step, session.device)
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)  # the first ones overflow, and are left out
        scaler.update()
        losses.append(loss.detach())
    return [
        losses[0].cpu(),
        torch.stack(losses[-20:]).mean().cpu(),
        *(parameter.detach().cpu() for parameter in model.parameters()),
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sync", ["hardsync", "async"])
def test_mixed_precision_with_a_scaler(dtype: torch.dtype, sync: str) -> None:
    result = sl.launch(amp_loop, dtype, learners=2, device="cuda", sync=sync)
    for first, last, *weights in result.returned:
        assert last < first and all(weight.isfinite().all() for weight in weights)
    assert (result.gradients < 400) == (dtype == torch.float16)  # steps that were left out published nothing


def graphed_loop(session: Any) -> list[torch.Tensor]:
    """The user's own graph holds forward and backward, the step is outside."""
    model = nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 2)).to(session.device)
    optimizer = session.optimizer(model, partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    graphed = torch.cuda.make_graphed_callables(
        model, (torch.zeros(64 // session.learners, 20, device=session.device),)
    )
    for step in range(30):
        x, y = batches(session.rank, session.learners, step, session.device)
        optimizer.zero_grad()
        F.cross_entropy(graphed(x), y).backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def compiled_loop(session: Any) -> list[torch.Tensor]:
    model = nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 2)).to(session.device)
    optimizer = session.optimizer(model, partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    compiled = torch.compile(model)
    for step in range(30):
        x, y = batches(session.rank, session.learners, step, session.device)
        optimizer.zero_grad()
        F.cross_entropy(compiled(x), y).backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def plain_loop(session: Any) -> list[torch.Tensor]:
    model = nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 2)).to(session.device)
    optimizer = session.optimizer(model, partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    for step in range(30):
        x, y = batches(session.rank, session.learners, step, session.device)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("loop", [graphed_loop, compiled_loop])
def test_captured_and_compiled_models_learn_what_plain_ones_learn(loop: Any) -> None:
    found, wanted = (
        sl.launch(each, learners=2, device="cuda", sync="hardsync") for each in (loop, plain_loop)
    )
    for mine, theirs in zip(found.returned[0], wanted.returned[0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def captured_step(session: Any) -> None:
    model = nn.Linear(20, 2).to(session.device)
    optimizer = session.optimizer(model, partial(torch.optim.SGD, lr=0.1))
    model(torch.zeros(4, 20, device=session.device)).sum().backward()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()


def test_a_step_inside_a_captured_graph_is_refused_by_name() -> None:
    with pytest.raises(sl.LearnerError, match=r"step cannot be in a CUDA graph"):
        sl.launch(captured_step, learners=1, device="cuda")


def odd_loop(session: Any) -> list[torch.Tensor]:
    """Two tables; frozen and unused parameters."""
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 2)).to(session.device)
    head = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(5, 5)}).to(session.device)
    model[0].bias.requires_grad_(False)
    first = session.optimizer(model, partial(torch.optim.Adam, lr=0.01))
    second = session.optimizer(head, partial(torch.optim.SGD, lr=0.1))
    for step in range(20):
        x, y = batches(session.rank, session.learners, step, session.device)
        for each in (first, second):
            each.zero_grad()
        F.cross_entropy(head["used"](model(x)), y).backward()
        first.step()
        second.step()
    return [parameter.detach().cpu() for each in (model, head) for parameter in each.parameters()]


def test_two_tables_with_frozen_and_unused_parameters() -> None:
    one, host = (
        sl.launch(odd_loop, learners=2, device="cuda", sync="hardsync", table_device=where)
        for where in (None, "cpu")
    )
    for mine, theirs in zip(one.returned[0], host.returned[0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
