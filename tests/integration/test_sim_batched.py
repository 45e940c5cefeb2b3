"""Whole simulated runs with gradients computed together against those computed one at a time: equal to rounding."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import syncline as sl
from syncline.sim.batched.batched_gradients import BatchedGradients
from syncline.sim.batched.shared_model import Ways
from syncline.sim.engine import Sim

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-3)
ALONE = "gradients are computed one at a time"


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Not held as tensors, as far as anybody can see."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(size, 6, generator=generator)
        self.y = (self.x[:, 0] > self.x[:, 1]).long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


def points(size: int = 103) -> TensorDataset:
    made = Points(size)
    return TensorDataset(made.x, made.y)


def network(*more: nn.Module) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), *more, nn.Linear(8, 2))


def run(batched: bool | Ways, model: nn.Module | None = None, **options: Any) -> sl.Result:
    settings: dict[str, Any] = {
        "loss": F.cross_entropy,
        "optimizer": SGD,
        "sync": "softsync:1",
        "learners": 5,
        "batch_size": 4,
        "epochs": 3,
        **options,
    }
    data = settings.pop("data", None) or points()
    return sl.train(model or network(), data, engine=Sim(batched=batched), **settings)


def agree(**options: Any) -> tuple[sl.Result, sl.Result]:
    plain, together = run(False, **options), run(True, **options)
    assert together.updates == plain.updates and together.updates > 10
    assert together.gradients == plain.gradients and together.staleness == plain.staleness
    assert together.seconds == plain.seconds
    assert not [event for event in together.events if ALONE in event.what]
    torch.testing.assert_close(together.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(together.history, plain.history, strict=True):
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-4)
        assert mine.losses == pytest.approx(theirs.losses, rel=1e-4)
    return plain, together


@pytest.mark.parametrize(
    "sync",
    [
        "hardsync",
        "softsync:1",
        "softsync:2",
        "async",
        "async:rate=staleness",
        "softsync:2,rate=staleness",
        "ssp:2",
        "backup:1",
        "delayed:2",
        "downpour:push=1,fetch=1",
        "downpour:push=3,fetch=2,local_lr=0.01",
        "hardsync until 1 then async",
    ],
)
def test_every_dial(sync: str) -> None:
    agree(sync=sync)


@pytest.mark.parametrize("sync", ["hardsync", "softsync:2", "async"])
def test_several_shards_and_clipping(sync: str) -> None:
    agree(sync=sync, topology="servers:2", clip_norm=0.5)
    agree(sync=sync, clip_norm=0.5)


@pytest.mark.parametrize("sync", ["softsync:1", "async"])
def test_data_that_must_be_collated(sync: str) -> None:
    agree(sync=sync, data=Points(103))
    agree(sync=sync, collate=lambda rows: [torch.stack(column) for column in zip(*rows, strict=True)])


def groups(model: nn.Module) -> torch.optim.Optimizer:
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    return torch.optim.SGD(
        [{"params": weights, "weight_decay": 0.01}, {"params": biases, "lr": 0.1}], lr=0.05, momentum=0.9
    )


@pytest.mark.parametrize("sync", ["hardsync", "softsync:2", "async"])
def test_groups_and_a_schedule(sync: str) -> None:
    halve = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    agree(sync=sync, optimizer=groups, schedule=halve)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adagrad])
def test_other_optimizers(kind: Any) -> None:
    agree(sync="softsync:2", optimizer=partial(kind, lr=0.01))


class Partly(nn.Module):
    """Frozen and unused parameters, a tied one, and a buffer that stays."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.tied, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.tied.weight = self.first.weight
        self.last.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("shift", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.tied(torch.tanh(self.first(x) + self.shift))))


@pytest.mark.parametrize("sync", ["hardsync", "async"])
def test_models_as_users_have_them(sync: str) -> None:
    agree(sync=sync, model=Partly())
    agree(
        sync=sync,
        model=network().double(),
        data=TensorDataset(points().tensors[0].double(), points().tensors[1]),
    )


@pytest.mark.parametrize("sync", ["hardsync", "softsync:1", "softsync:2", "async"])
def test_the_same_bits_twice(sync: str) -> None:
    first, second = (run(True, network(nn.Dropout(0.2)), sync=sync) for _ in range(2))
    assert all(torch.equal(second.state_dict()[key], value) for key, value in first.state_dict().items())
    assert [record.loss for record in first.history] == [record.loss for record in second.history]
    assert first.history[-1].loss < first.history[0].loss


@pytest.mark.parametrize(
    "sync",
    [
        "async",
        "softsync:5",
        "ssp:1",
        "downpour:push=1,fetch=1",
        "async until 1 then hardsync",
        "hardsync until 1 then async",
    ],
)
def test_steps_that_wait_have_the_same_bits(
    sync: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    halve = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    settings: dict[str, Any] = {"sync": sync, "optimizer": groups, "schedule": halve, "evaluate": points(40)}
    later = run(True, run_dir=tmp_path / "later", **settings)
    monkeypatch.setattr(BatchedGradients, "waits", False)
    at_once = run(True, run_dir=tmp_path / "at_once", **settings)
    assert all(torch.equal(later.state_dict()[key], value) for key, value in at_once.state_dict().items())
    for mine, theirs in zip(later.history, at_once.history, strict=True):
        assert (mine.loss, mine.metrics) == (theirs.loss, theirs.metrics)


@pytest.mark.parametrize("sync", ["hardsync", "softsync:1", "async"])
def test_invariants_hold(sync: str) -> None:
    plain = run(True, sync=sync)
    checked = sl.train(
        network(),
        points(),
        loss=F.cross_entropy,
        optimizer=SGD,
        sync=sync,
        learners=5,
        batch_size=4,
        epochs=3,
        engine=Sim(batched=True, check=True),
    )
    torch.testing.assert_close(checked.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-5)


def test_what_cannot_is_computed_one_at_a_time_and_says_so() -> None:
    model = network(nn.BatchNorm1d(8))
    plain, together = run(False, model, batch_size=8), run(True, model, batch_size=8)
    said = [event.what for event in together.events if ALONE in event.what]
    assert said == [f"{ALONE}: computing a gradient changes the buffer 2.running_mean"]
    assert all(torch.equal(together.state_dict()[key], value) for key, value in plain.state_dict().items())


def test_an_own_loop_says_so_too() -> None:
    def learner(session: sl.Session, data: TensorDataset) -> int:
        model = network()
        optimizer = session.optimizer(model, SGD)
        for x, y in session.loader(data, batch_size=16):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        return session.rank

    result = sl.launch(learner, points(), learners=2, engine=Sim(batched=True))
    assert result.returned == [0, 1]
    assert [event.what for event in result.events if ALONE in event.what]


def test_a_mistake_in_the_loss_is_the_users() -> None:
    with pytest.raises(sl.SynclineError, match="must be a scalar"):
        run(True, loss=partial(F.cross_entropy, reduction="none"))


@pytest.mark.parametrize("sync", ["hardsync", "async"])
def test_evaluation_and_checkpoints(sync: str, tmp_path: Path) -> None:
    whole = run(True, sync=sync, evaluate=points(40), epochs=4)
    run(True, sync=sync, evaluate=points(40), epochs=2, run_dir=tmp_path / "run")
    rest = run(True, sync=sync, evaluate=points(40), epochs=4, resume=tmp_path / "run")
    assert rest.updates == whole.updates
    if sync == "hardsync":
        torch.testing.assert_close(rest.state_dict(), whole.state_dict(), rtol=1e-4, atol=1e-5)
    assert rest.history[-1].metrics["accuracy"] > 0.5


def test_ways_are_the_same() -> None:
    data = TensorDataset(torch.randn(60, 2, 6, 6), torch.randint(2, (60,)))

    def convolving() -> nn.Module:
        torch.manual_seed(4)
        return nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 2))

    results = [
        run(ways, convolving(), data=data, sync="async", epochs=2)
        for ways in (False, Ways(convolutions="unfolded"), Ways(convolutions="grouped", graphs=False))
    ]
    for result in results[1:]:
        torch.testing.assert_close(result.state_dict(), results[0].state_dict(), rtol=1e-4, atol=1e-5)
