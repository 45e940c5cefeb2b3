"""Groups of seats that train nets of layers: losses, regularisers and random numbers equal those of one process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import syncline as sl
from syncline.errors import UsageError
from syncline.jobs import Job
from syncline.learn.gradient_ways import elastic, group_lasso, l1, l2
from syncline.nn import Net
from syncline.nn.net import by_layer
from syncline.testing.leftovers import children

cloudpickle.register_pickle_by_value(sys.modules[__name__])

JOBS = Path(__file__).resolve().parents[2] / "examples" / "jobs"
DRAW = torch.Generator().manual_seed(0)
X = torch.randn(32, 2, 6, 6, generator=DRAW, dtype=torch.float64)
Y = torch.randint(5, (32,), generator=DRAW)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
BY_HAND = {"conv": "spatial", "hidden": "model", "output": "rows"}


def net(*more: dict[str, Any], losses: bool = True) -> Net:
    """Make a net with two losses, dropout, noise, and multipliers of rate and decay."""
    torch.manual_seed(1)
    records = [
        {"name": "image", "type": "input", "shape": [2, 6, 6]},
        {"name": "label", "type": "label"},
        {"name": "noisy", "type": "noise", "amount": 0.2, "sources": "image"},
        {"name": "conv", "type": "convolution", "channels": 4, "kernel": 3, "padding": 1, "rate": 0.5},
        {"name": "norm", "type": "batch_norm"},
        {"name": "dropped", "type": "dropout", "p": 0.3},
        {"name": "hidden", "type": "dense", "units": 12, "decay": {"bias": 0.0}},
        {"name": "code", "type": "sigmoid"},
        {"name": "output", "type": "dense", "units": 5, "rate": {"bias": 2.0}},
        {"name": "loss", "type": "cross_entropy"},
        {"name": "sparse", "type": "sparsity", "sources": "code", "target": 0.1, "weight": 0.1},
    ]
    kept = records if losses else [each for each in records[:-2] if each["name"] != "label"]
    return Net([*kept, *more]).double()


def crossed(model: nn.Module) -> Tensor:
    """Penalise a product over two layers, which no slice can compute alone."""
    first, second = model.get_submodule("conv"), model.get_submodule("hidden")
    return 0.01 * first.weight.square().sum() * second.weight.square().sum().sqrt()  # type: ignore[operator, union-attr]


class Named(Dataset[Any]):
    """Examples by name, with a text that no net reads."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, at: int) -> Any:
        return {"image": X[at], "label": Y[at], "name": f"example {at}"}


def trained(group: int, **options: Any) -> Any:
    settings = {"learners": 1, "batch_size": 8, "epochs": 2, "sync": "hardsync", "optimizer": SGD}
    settings |= {"model": net(), "data": (X, Y), "threads": 1}
    return sl.train(group=group, **{**settings, **options})


def alike(ours: Any, theirs: Any, tolerance: float = 1e-10) -> None:
    assert ours.updates == theirs.updates
    assert [epoch.loss for epoch in ours.history] == pytest.approx(
        [epoch.loss for epoch in theirs.history], rel=tolerance
    )
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=tolerance, atol=tolerance)


REGULARISERS: dict[str, Callable[[nn.Module], Tensor]] = {
    "l1": partial(l1, weight=1e-3),
    "l2": partial(l2, weight=1e-2),
    "elastic": partial(elastic, l1=1e-3, l2=1e-2),
    "group lasso": partial(group_lasso, weight=1e-2),
    "a function": crossed,
}
CASES: dict[str, tuple[int, Any, dict[str, Any]]] = {
    "the cheapest plan": (2, "auto", {"check": True}),
    "by examples": (2, "data", {}),
    "by hand": (3, BY_HAND, {"check": True}),
    "two groups": (2, BY_HAND, {"learners": 2}),
    "layers' multipliers": (2, BY_HAND, {"optimizer": partial(by_layer, make=SGD)}),
    "through the table": (2, BY_HAND, {"optimizer": partial(by_layer, make=SGD), "local_update": False}),
    "examples by name": (2, BY_HAND, {"data": Named(), "evaluate": (X, Y)}),
    "a loss beside the net": (2, BY_HAND, {"model": net(losses=False), "loss": F.cross_entropy}),
    **{f"regularised by {name}": (2, BY_HAND, {"regulariser": each}) for name, each in REGULARISERS.items()},
    "regularised, by examples": (2, "data", {"regulariser": crossed, "learners": 2}),
}  # fmt: skip


@pytest.mark.sweep(6)
@pytest.mark.parametrize("case", CASES)
def test_a_group_trains_a_net_as_one_process_does(case: str) -> None:
    group, plan, options = CASES[case]
    plain = {name: value for name, value in options.items() if name not in ("check", "local_update")}
    alike(trained(group, plan=plan, **options), trained(1, **plain))


@pytest.mark.parametrize(
    "sync", ["softsync:1", "async", "ssp:1", "delayed:1", "downpour:push=2,fetch=2,local_lr=0.05"]
)
def test_groups_train_nets_under_other_dials(sync: str) -> None:
    result = trained(2, plan=BY_HAND, learners=2, sync=sync, regulariser=REGULARISERS["l2"])
    assert max(epoch.examples for epoch in result.history) == 64


# -- the jobs that are there ---------------------------------------------------------------------------------


def arguments(job: str, **more: Any) -> dict[str, Any]:
    return {**Job.load(JOBS / f"{job}.toml").build(), "learners": 1, "epochs": 2, "sync": "hardsync", **more}


@pytest.mark.parametrize(
    "job", ["layers_digits", "lstm_digits", "autoencoder_layers_digits", "unrolled_digits"]
)
def test_jobs_of_layers_give_the_numbers_of_one_process(job: str) -> None:
    ours, theirs = sl.train(**arguments(job, group=2, plan="auto")), sl.train(**arguments(job))
    alike(ours, theirs, 1e-4)
    for one, other in zip(ours.history, theirs.history, strict=True):
        assert one.metrics == pytest.approx(other.metrics, rel=1e-4)


@pytest.mark.parametrize(
    "job, words",
    [
        ("rbm_digits", r"group=2: gradient='cd:1' samples from whole layers"),
        ("rbm_layers_digits", r"group=2: gradient='pcd:1' samples from whole layers"),
        ("crbm_digits", r"group=2: gradient='cd:1' samples from whole layers"),
        ("dbm_digits", r"group=2: gradient='pcd:5' samples from whole layers"),
        ("autoencoder_digits", r"group=2: the objective is .* looks at the model's type or attributes"),
    ],
)
def test_jobs_that_seats_cannot_do_are_refused_before_anything_starts(job: str, words: str) -> None:
    before = children(os.getpid())
    with pytest.raises(UsageError, match=words) as refused:
        sl.train(**arguments(job, group=2))
    assert children(os.getpid()) == before and "\n" not in str(refused.value)
