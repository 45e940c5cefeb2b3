"""Many gradients in one computation against the plain gradient of each: joined, stacked."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from syncline.learn.gradient_ways import Supervised
from syncline.models import Cifar10Full
from syncline.sim.batched.objective import Rows, SimTask, rows_of
from syncline.sim.batched.vmap_gradients import Joined, Stacked, padded, plain, trial
from syncline.table.layout import lay_out


class Shapes(nn.Module):
    """Convolutions in every form that a model may write."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Conv2d(2, 4, 3, padding=1)
        self.same = nn.Conv2d(4, 4, 3, padding="same")
        self.grouped = nn.Conv2d(4, 4, 3, groups=2)
        self.bare = nn.Conv2d(4, 3, (2, 1), stride=(2, 1), bias=False)
        self.fixed = nn.Conv2d(3, 3, 1).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.grouped(torch.tanh(self.same(torch.tanh(self.plain(x)))))
        y = F.conv2d(y, self.bare.weight, stride=2)
        return self.fixed(y).flatten(1).sum(1, keepdim=True) * torch.ones(2, dtype=x.dtype)


# -- joined and stacked --------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Tied, frozen, unused, scalar and empty parameters, and a buffer that stays."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(6, 4).requires_grad_(False)
        self.held = nn.Parameter(torch.ones(4), requires_grad=False)  # in the optimizer, without a gradient
        self.unused = nn.Parameter(torch.ones(3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.ones(0, 2))
        self.register_buffer("shift", torch.full((4,), 0.25))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return (self.frozen(x) * self.scale + self.shift) * self.held  # type: ignore[operator]


class Records(Dataset[dict[str, Tensor]]):
    """Examples as dicts, one by one."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.x, self.y = torch.randn(40, 6, dtype=dtype), torch.randn(40, 4, dtype=dtype)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "y": self.y[index]}


def images(dtype: torch.dtype, channels: int = 2, size: int = 8, classes: int = 2) -> TensorDataset:
    return TensorDataset(torch.randn(40, channels, size, size, dtype=dtype), torch.randint(classes, (40,)))


def unlike(model: nn.Module, batch: Any) -> Tensor:
    """Not a mean over examples: of all of them at once."""
    error = model(batch["x"]) - batch["y"]
    return error.square().sum().sqrt() + error.amax()


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.dtype], Any], Any]] = {
    "odd": (Odd, lambda dtype: Records(dtype), unlike),
    "shapes": (Shapes, lambda dtype: images(dtype), Supervised(F.cross_entropy)),
    "cifar10_full": (
        Cifar10Full,
        lambda dtype: images(dtype, 3, 32, 10),
        Supervised(nn.CrossEntropyLoss(label_smoothing=0.1)),
    ),
    "norms": (
        lambda: nn.Sequential(
            nn.Flatten(),
            nn.Linear(128, 6),
            nn.LayerNorm(6),
            nn.BatchNorm1d(6, track_running_stats=False),
            nn.GELU(),
            nn.Linear(6, 2),
        ),
        lambda dtype: images(dtype),
        Supervised(F.cross_entropy),
    ),
}


def task_of(name: str, dtype: torch.dtype) -> SimTask:
    make, data, objective = CASES[name]
    torch.manual_seed(0)
    model = make().to(dtype)
    chosen = [p for key, p in model.named_parameters() if not key.startswith("frozen")]
    layout, _ = lay_out(model, [chosen[:1], chosen[1:]], cuttable=True, shards=1)
    return SimTask(model, objective, layout, data(dtype))


def versions_of(task: SimTask, count: int) -> list[list[Tensor]]:
    named = dict(task.model.named_parameters())
    made = []
    for version in range(count):
        segments = task.segments()
        for view, entry in zip(task.views(segments), task.layout.parameters.entries, strict=True):
            view.copy_(named[entry.name].detach() * (1 + 0.1 * version))
        made.append(segments)
    return made


def close(mine: list[Tensor], theirs: list[Tensor], dtype: torch.dtype) -> None:
    torch.testing.assert_close(
        mine, theirs, **({"rtol": 1e-3, "atol": 1e-5} if dtype == torch.float32 else {})
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [1, 5])
def test_joined_is_the_weighted_sum(name: str, dtype: torch.dtype, size: int) -> None:
    task = task_of(name, dtype)
    losses = torch.zeros(6, dtype=torch.float64)
    (weights,) = versions_of(task, 1)
    joined = Joined(task, losses, rows_of(task, [weights]))
    batches = [torch.randperm(40)[: size + 1] for _ in range(3)]  # batch norm wants more than one
    shares = [0.5, 0.125, 2.0]
    joined.add(0, batches, [1.0] * 3, [5] * 3)
    joined.zero()
    joined.add(0, batches[:2], shares[:2], [4, 1])
    joined.add(0, batches[2:], shares[2:], [0])
    found = [plain(task, weights, batch) for batch in batches]
    wanted = [
        sum(share * gradient[index] for share, (_, gradient) in zip(shares, found, strict=True))
        for index in range(len(joined.total))
    ]
    close(joined.total, wanted, dtype)  # type: ignore[arg-type]
    torch.testing.assert_close(losses[[4, 1, 0]].to(dtype), torch.stack([loss for loss, _ in found]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("convolutions", ["unfolded", "grouped"])
@pytest.mark.parametrize("name", CASES)
def test_stacked_is_each_by_itself(name: str, dtype: torch.dtype, convolutions: str) -> None:
    task = task_of(name, dtype)
    losses = torch.zeros(4, dtype=torch.float64)
    weights, batches = versions_of(task, 3), [torch.randperm(40)[:4] for _ in range(3)]
    rows = Rows(task, 3)
    stacked = Stacked(task, losses, rows_of(task, weights), rows, convolutions=convolutions)
    stacked.fill([0, 1, 2], batches, [2, 0, 1], [0, 1, 2])
    for index, row in enumerate([2, 0, 1]):
        loss, gradient = plain(task, weights[index], batches[index])
        close(stacked.row(row)[0], gradient, dtype)
        torch.testing.assert_close(losses[index].to(dtype), loss)
    kept = [row.clone() for row in stacked.row(0)[0]]
    held = [rows.take() for _ in range(4)]  # one more than there are
    assert [row.number for row in held] == [0, 1, 2, 3]
    torch.testing.assert_close(stacked.row(0)[0], kept, rtol=0, atol=0)
    stacked.fill([0, 1, 2], batches, [3, 4, 5], [0, 1, 2])
    torch.testing.assert_close(stacked.row(4)[0], kept)


def test_parameters_without_a_gradient_are_said() -> None:
    task = task_of("odd", torch.float32)
    joined = Joined(task, torch.zeros(2, dtype=torch.float64), rows_of(task, versions_of(task, 1)))
    joined.add(0, [torch.arange(3)], [1.0], [0])
    names = [entry.name for entry in task.layout.parameters.entries]
    without = {name for name, present in zip(names, joined.present, strict=True) if not present}
    assert without == {"held", "unused", "empty"}


def test_sizes_that_are_captured() -> None:
    assert [padded(count) for count in (1, 5, 30, 33, 256, 300)] == [1, 6, 32, 48, 256, 300]


# -- the trial -----------------------------------------------------------------------------------------------


def tried(model: nn.Module, loss: Any = F.cross_entropy) -> Any:
    layout, tensors = lay_out(model, [model.parameters()], cuttable=True, shards=1)
    task = SimTask(model, Supervised(loss), layout, images(torch.float32))
    return trial(task, tensors.parameters, 40, convolutions="grouped")[0]


def flat(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(128, 6), *layers, nn.Linear(6, 2))


def test_a_trial_finds_what_cannot_be_computed_together() -> None:
    assert tried(flat(nn.Tanh())) is None
    assert "changes the buffer 2.running_mean" in tried(flat(nn.BatchNorm1d(6)))
    assert "mapped" in tried(flat(), lambda x, y: x.square().mean() * float(x.detach().sum().item()))


def test_a_trial_finds_what_remembers() -> None:
    class Growing(nn.Module):
        """A state that no buffer holds."""

        times = 0

        def forward(self, x: Tensor) -> Tensor:
            self.times += 1
            return x * self.times

    assert "differ by" in tried(flat(Growing()))


def test_a_trial_finds_who_draws_and_leaves_the_generators_alone() -> None:
    model = nn.Sequential(flat(), nn.Dropout())
    layout, tensors = lay_out(model, [model.parameters()], cuttable=True, shards=1)
    task = SimTask(model, Supervised(F.cross_entropy), layout, images(torch.float32))
    before = torch.get_rng_state()
    reason, draws = trial(task, tensors.parameters, 40, convolutions="grouped")
    assert draws and reason is None
    assert torch.equal(torch.get_rng_state(), before)
