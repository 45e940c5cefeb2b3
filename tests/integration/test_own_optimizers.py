"""Optimizers of users' own (M4, M5): state in parameter groups. With one learner the bits of plain PyTorch."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR

import syncline as sl
from tests.integration.small_runs import launched, points, same

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ALONE = [
    ("local", "servers", "hardsync"),
    ("local", "servers", "async"),
    ("sim", "servers", "hardsync"),
    ("sim", "servers", "softsync:1"),
    ("sim", "allreduce", "hardsync"),
    ("local", "allreduce", "hardsync"),
]
alone = pytest.mark.parametrize("engine, topology, sync", ALONE)


class Averaging(Optimizer):
    """Schedule-free in small: counts in its groups, and steps by what it has counted."""

    def __init__(
        self, params: Iterable[Any], lr: float = 0.1, betas: tuple[float, float] = (0.9, 0.8)
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "warmup": 4, "k": 0, "total": 0.0, "largest": 0.0}
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            rate = group["lr"] * min(1.0, (group["k"] + 1) / group["warmup"])
            group["largest"] = max(group["largest"], rate)
            group["total"] += group["largest"] ** 2
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["z"] = parameter.clone()
                state["z"].sub_(parameter.grad, alpha=rate * group["betas"][0])
                parameter.lerp_(state["z"], rate**2 / group["total"])
            group["k"] += 1


Make = Callable[[nn.Module, Callable[..., Optimizer]], Optimizer]
Seen = tuple[dict[str, Tensor], dict[str, Any]]


def plain(model: nn.Module, factory: Callable[..., Optimizer]) -> Optimizer:
    return factory(model.parameters())


def fit(make: Make, factory: Any, start: int = 0, stop: int = 12, before: Any = None) -> Seen:
    """Steps with a rate that changes in each; the weights and the optimizer's state after them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    inputs = torch.randn(20, 4, 6)
    if before is not None:
        model.load_state_dict(before[0])
    optimizer = make(model, factory)
    if before is not None:
        optimizer.load_state_dict(before[1])
    schedule = ExponentialLR(optimizer, 0.9)
    for index in range(start, stop):
        optimizer.zero_grad()
        model(inputs[index]).square().mean().backward()
        optimizer.step()
        if index % 3:
            schedule.step()
        if index == 7 and "betas" in optimizer.param_groups[0]:
            optimizer.param_groups[0]["betas"] = (0.7, 0.6)
    return copy.deepcopy(model.state_dict()), optimizer.state_dict()


def fit_in_session(session: sl.Session, *arguments: Any) -> Seen:
    return fit(session.optimizer, *arguments)


def check(got: Seen, wanted: Seen) -> None:
    assert same(got[0], wanted[0])
    assert got[1]["param_groups"] == wanted[1]["param_groups"]
    assert got[1]["state"].keys() == wanted[1]["state"].keys()
    for number, entry in wanted[1]["state"].items():
        assert got[1]["state"][number].keys() == entry.keys()
        for key, value in entry.items():
            found = got[1]["state"][number][key]
            assert torch.equal(found, value) if isinstance(value, Tensor) else found == value, (number, key)


# -- state in groups -----------------------------------------------------------------------------------------


@alone
def test_what_an_optimizer_counts_in_its_groups_goes_on(engine: str, topology: str, sync: str) -> None:
    wanted = fit(plain, Averaging)
    assert wanted[1]["param_groups"][0]["k"] == 12
    result = launched(fit_in_session, Averaging, learners=1, engine=engine, topology=topology, sync=sync)
    check(result.returned[0], wanted)


def real(name: str) -> Callable[..., Optimizer]:
    """Of a package that is an extra."""
    package, kind = name.split(".")
    module = pytest.importorskip(package, reason="comes with the extra 'optimizers'")

    def factory(params: Iterable[Any]) -> Optimizer:
        optimizer = getattr(module, kind)(params, lr=0.1)
        if "ScheduleFree" in kind:
            optimizer.train()
        return optimizer

    return factory


@pytest.mark.parametrize("engine, topology, sync", ALONE[:3])
@pytest.mark.parametrize(
    "name", ["schedulefree.SGDScheduleFree", "schedulefree.AdamWScheduleFree", "prodigyopt.Prodigy"]
)
def test_real_ones_train_as_in_plain_pytorch(name: str, engine: str, topology: str, sync: str) -> None:
    factory = real(name)
    wanted = fit(plain, factory)
    result = launched(fit_in_session, factory, learners=1, engine=engine, topology=topology, sync=sync)
    check(result.returned[0], wanted)
    assert wanted[1]["param_groups"][0]["k"] == 12


@pytest.mark.parametrize("topology", ["servers:1", "servers:2", "allreduce"])
def test_such_a_state_is_loaded_and_goes_on(topology: str) -> None:
    """From plain to session and back; what the loop has not touched since is the optimizer's own."""
    middle, wanted = fit(plain, Averaging, 0, 6), fit(plain, Averaging, 0, 6)
    wanted = fit(plain, Averaging, 6, 12, copy.deepcopy(wanted))
    options = {"learners": 1, "topology": topology, "engine": "sim"}
    saved = launched(fit_in_session, Averaging, 0, 6, **options).returned[0]
    check(saved, middle)
    for source in (middle, saved):
        check(launched(fit_in_session, Averaging, 6, 12, source, **options).returned[0], wanted)
    check(fit(plain, Averaging, 6, 12, saved), wanted)


def delayed(factory: Any, delay: int, steps: int) -> dict[str, Tensor]:
    """What delayed:k does, written plainly: each gradient is applied k steps later, with the rate that it had."""
    torch.manual_seed(0)
    model = nn.Linear(6, 2)
    inputs = torch.randn(20, 4, 6)
    optimizer = plain(model, factory)
    flying: list[tuple[list[Tensor], float]] = []

    def apply() -> None:
        gradients, rate = flying.pop(0)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()

    for index in range(steps):
        optimizer.zero_grad()
        model(inputs[index]).square().mean().backward()
        flying.append(([p.grad.clone() for p in model.parameters()], 0.1 * 0.9**index))  # type: ignore[union-attr]
        if len(flying) > delay:
            apply()
    while flying:
        apply()
    return model.state_dict()


def delayed_in_session(session: sl.Session, steps: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 2)
    inputs = torch.randn(20, 4, 6)
    optimizer = session.optimizer(model, Averaging)
    schedule = ExponentialLR(optimizer, 0.9)
    for index in range(steps):
        optimizer.zero_grad()
        model(inputs[index]).square().mean().backward()
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize("topology", ["servers", "allreduce"])
@pytest.mark.parametrize("delay", [1, 3])
def test_counts_go_on_where_gradients_are_applied_later_with_the_rate_they_had(
    topology: str, delay: int
) -> None:
    options = {"learners": 1, "topology": topology, "sync": f"delayed:{delay}", "engine": "sim"}
    result = launched(delayed_in_session, 12, **options)
    assert same(result.state_dict(), delayed(Averaging, delay, 12))


@pytest.mark.parametrize("topology", ["servers", "allreduce"])
def test_a_factor_of_the_rate_is_in_no_state(topology: str) -> None:
    """hardsync:reference_batch=1 with one learner and batches of 4 doubles the rate, of the step alone."""
    options = {"learners": 1, "topology": topology, "engine": "sim", "batch_size": 4}
    result = launched(fit_in_session, Averaging, sync="hardsync:reference_batch=1", **options)
    wanted = fit(plain, partial(Averaging, lr=0.2))
    assert same(result.returned[0][0], wanted[0])
    told = result.returned[0][1]["param_groups"][0]
    assert told["lr"] == pytest.approx(wanted[1]["param_groups"][0]["lr"] / 2) and told["k"] == 12


def train(**options: Any) -> sl.Result:
    settings = {
        "loss": F.cross_entropy,
        "optimizer": partial(Averaging, lr=0.5),
        "schedule": partial(ExponentialLR, gamma=0.7),
        "sync": "hardsync",
        "topology": "servers:2",
        "learners": 2,
        "batch_size": 8,
        "epochs": 4,
        "threads": 1,
        "engine": "sim",
    }
    torch.manual_seed(0)
    return sl.train(
        nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), points(80), **{**settings, **options}
    )


@pytest.mark.parametrize("engine", ["sim", "local"])
def test_a_resumed_run_counts_on(engine: str, tmp_path: Path) -> None:
    whole = train(engine=engine, run_dir=tmp_path / "a", checkpoint_every=3, keep_checkpoints=99)
    first = min((tmp_path / "a" / "checkpoints").iterdir())
    assert int(first.name) < whole.version
    resumed = train(engine=engine, resume=first, run_dir=tmp_path / "b")
    assert same(resumed.state_dict(), whole.state_dict())


def test_a_resumed_run_takes_the_rate_of_its_own_factory(tmp_path: Path) -> None:
    """Only what the optimizer itself has changed comes from the checkpoint."""
    settings = {"optimizer": partial(Averaging, lr=0.5), "schedule": None}
    train(run_dir=tmp_path, checkpoint_every=3, epochs=2, **settings)
    frozen = train(resume=tmp_path, optimizer=partial(Averaging, lr=0.0), schedule=None)
    assert frozen.version == 20
    assert same(frozen.state_dict(), train(resume=tmp_path, epochs=2, **settings).state_dict())
