"""Optimizers of users' own (M4, M5): state in parameter groups, optimizers around others. With one learner the bits of plain PyTorch."""

from __future__ import annotations

import copy
import sys
import threading
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
from syncline.errors import LearnerError
from tests.integration.small_runs import kinds, launched, points, same

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


# -- optimizers that hold parameters or optimizers -----------------------------------------------------------


class Lookahead(Optimizer):
    """As most write it: around an optimizer that is there, with its groups; counts in them."""

    def __init__(self, base: Optimizer, k: int = 3, alpha: float = 0.5) -> None:
        super().__init__(base.param_groups, base.defaults)
        self.base, self.k, self.alpha = base, k, alpha
        self.param_groups, self.fast_state = base.param_groups, base.state
        for group in self.param_groups:
            group["counter"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.base.step()
        for group in self.param_groups:
            for parameter in group["params"]:
                slow = self.state[parameter].setdefault("slow", parameter.clone())
                if group["counter"] % self.k == self.k - 1:
                    slow.lerp_(parameter, self.alpha)
                    parameter.copy_(slow)
            group["counter"] += 1

    def state_dict(self) -> dict[str, Any]:
        fast, slow = self.base.state_dict(), super().state_dict()
        return {"fast": fast["state"], "slow": slow["state"], "param_groups": fast["param_groups"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups = state_dict["param_groups"]
        self.base.load_state_dict({"state": state_dict["fast"], "param_groups": groups})
        self.param_groups, self.fast_state = self.base.param_groups, self.base.state
        super().load_state_dict({"state": state_dict["slow"], "param_groups": groups})
        self.param_groups = self.base.param_groups


class Around(Optimizer):
    """Makes its own optimizer, with groups of its own; counts in an attribute; keeps copies in a list."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        params = list(params)
        super().__init__(params, {"lr": lr})
        self.inner = torch.optim.Adam(params, lr=lr)
        self.slow = [parameter.detach().clone() for parameter in params]
        self.calls, self.sizes = 0, ({"half": 0.5}, [])

    def step(self, closure: Any = None) -> None:
        self.calls += 1
        self.inner.param_groups[0]["lr"] = self.param_groups[0]["lr"]
        self.inner.step()
        self.inner.zero_grad()
        with torch.no_grad():
            for parameter, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
                if self.calls % 4 == 0:
                    slow.lerp_(parameter, self.sizes[0]["half"])
                    parameter.copy_(slow)
        self.sizes[1].append(self.calls)


class Listed(Optimizer):
    """Goes by a list of its own, which a closure holds."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        params = list(params)
        super().__init__(params, {"lr": lr, "before": 0.0})
        self.each = lambda: iter(params)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        norm = float(sum(parameter.grad.square().sum() for parameter in self.each())) ** 0.5
        for parameter in self.each():
            parameter.sub_(parameter.grad, alpha=self.param_groups[0]["lr"] / (1.0 + norm))
            parameter.grad = None
        self.param_groups[0]["before"] = norm


class Counting(Optimizer):
    """Keeps a state of no parameter, and clears gradients in its step."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        self.state["calls"] = self.state.get("calls", 0) + 1
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(parameter.grad, alpha=self.param_groups[0]["lr"] / self.state["calls"])
        self.zero_grad()


def lookahead(params: Iterable[Any], lr: float = 0.1) -> Lookahead:
    return Lookahead(torch.optim.SGD(params, lr=lr, momentum=0.9))


def lookahead_of_two_groups(model: nn.Module) -> Lookahead:
    groups = [{"params": [p]} for p in model.parameters()]
    return Lookahead(torch.optim.AdamW(groups, lr=0.05), k=2)


WRAPPERS = [lookahead, Around, Listed]


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """The leaves of a state, by their paths."""
    if isinstance(value, dict):
        return {k: v for key, each in value.items() for k, v in flat(each, f"{path}/{key}").items()}
    if isinstance(value, list):
        return {k: v for key, each in enumerate(value) for k, v in flat(each, f"{path}/{key}").items()}
    return {path: value}


def check_whole(got: Seen, wanted: Seen) -> None:
    assert same(got[0], wanted[0])
    mine, theirs = flat(got[1]), flat(wanted[1])
    assert mine.keys() == theirs.keys()
    for path, value in theirs.items():
        assert torch.equal(mine[path], value) if isinstance(value, Tensor) else mine[path] == value, path


@alone
@pytest.mark.parametrize("factory", [*WRAPPERS, Counting])
def test_optimizers_around_others_train_as_in_plain_pytorch(
    factory: Any, engine: str, topology: str, sync: str
) -> None:
    wanted = fit(plain, factory)
    start = fit(plain, factory, 0, 0)
    assert not same(start[0], wanted[0])
    result = launched(fit_in_session, factory, learners=1, engine=engine, topology=topology, sync=sync)
    check_whole(result.returned[0], wanted)


@pytest.mark.parametrize("factory", [*WRAPPERS, Counting])
def test_their_states_go_both_ways(factory: Any) -> None:
    """What their own `state_dict` says is loaded by their own `load_state_dict`, as in plain PyTorch."""
    middle = fit(plain, factory, 0, 6)
    wanted = fit(plain, factory, 6, 12, copy.deepcopy(middle))
    topology = "servers" if factory is Counting else "servers:2"
    options = {"learners": 1, "topology": topology, "engine": "sim"}
    saved = launched(fit_in_session, factory, 0, 6, **options).returned[0]
    check_whole(saved, middle)
    for source in (middle, saved):
        check_whole(launched(fit_in_session, factory, 6, 12, source, **options).returned[0], wanted)
    check_whole(fit(plain, factory, 6, 12, saved), wanted)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("engine", ["sim", "local"])
@pytest.mark.parametrize("factory", [*WRAPPERS, lookahead_of_two_groups])
def test_they_go_on_from_a_checkpoint_to_the_same_bits(factory: Any, engine: str, tmp_path: Path) -> None:
    settings = {"optimizer": factory, "engine": engine, "topology": "servers:3", "checkpoint_every": 3}
    whole = train(run_dir=tmp_path / "a", keep_checkpoints=99, **settings)
    folders = sorted((tmp_path / "a" / "checkpoints").iterdir())
    assert int(folders[0].name) < whole.version and whole.history[-1].loss < whole.history[0].loss
    for folder in folders[:2]:
        resumed = train(resume=folder, run_dir=tmp_path / f"b{folder.name}", **settings)
        assert same(resumed.state_dict(), whole.state_dict())


def test_a_lost_shard_of_such_a_table_comes_back(tmp_path: Path) -> None:
    engine = sl.Sim(script="kill shard 0 at version 8")
    disturbed = train(optimizer=lookahead, engine=engine, run_dir=tmp_path, checkpoint_every=3)
    assert kinds(disturbed) == ["shard lost", "recovered"]
    assert disturbed.history[-1].loss < disturbed.history[0].loss
    assert same(disturbed.state_dict(), train(optimizer=lookahead).state_dict())


@pytest.mark.parametrize("topology", ["servers", "allreduce"])
def test_a_factor_of_the_rate_reaches_the_optimizer_inside(topology: str) -> None:
    class Twice(Around):
        def step(self, closure: Any = None) -> None:
            self.inner.step()

    def factory(params: Iterable[Any]) -> Optimizer:
        return Twice(params, lr=0.01)

    options = {"learners": 1, "topology": topology, "engine": "sim", "batch_size": 4}
    result = launched(fit_in_session, factory, sync="hardsync:reference_batch=1", **options)
    wanted = fit(plain, lambda params: Twice(params, lr=0.02))
    assert same(result.returned[0][0], wanted[0])


@pytest.mark.parametrize("sync", ["hardsync", "async"])
def test_several_learners_train_through_a_wrapper(sync: str) -> None:
    losses = [r.loss for r in train(optimizer=lookahead, sync=sync, learners=3, epochs=6).history]
    assert losses[-1] < 0.7 * losses[0]


class Odd(Optimizer):
    """Holds something in `held`."""

    def __init__(self, model: nn.Module, held: Any) -> None:
        super().__init__(model.parameters(), {"lr": 0.1})
        self.held = held

    def step(self, closure: Any = None) -> None:
        pass


def hooked(model: nn.Module) -> Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


REFUSED = {
    "holds a module in 'held' (Linear)": lambda model: Odd(model, {"net": [model]}),
    "holds a parameter in 'held' that is in none of its groups": lambda model: Odd(
        model, nn.Parameter(torch.zeros(1))
    ),
    "holds a view of a parameter's memory in 'held'": lambda model: Odd(
        model, [p.data for p in model.parameters()]
    ),
    "holds in 'held' something that cannot be sent": lambda model: Odd(model, threading.Lock()),
    "has step hooks": hooked,
    "LBFGS calls its closure": lambda model: Odd(model, torch.optim.LBFGS(model.parameters())),
}


def opens(session: sl.Session, problem: str) -> None:
    session.optimizer(nn.Linear(2, 2), REFUSED[problem])


@pytest.mark.parametrize("engine", ["sim", "local"])
@pytest.mark.parametrize("problem", REFUSED)
def test_what_a_shard_cannot_have_is_refused_by_name(problem: str, engine: str) -> None:
    with pytest.raises(LearnerError) as caught:
        launched(opens, problem, learners=2, engine=engine)
    line = str(caught.value).splitlines()[-1]
    assert "LayoutError: " in line
    assert problem in line
    assert "LBFGS" in problem or "or use topology='allreduce'" in line


class Strange(Around):
    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params)
        self.seen = {1, 2}


@pytest.mark.parametrize(
    "factory, problem",
    [(Strange, "Strange.seen is a set"), (Counting, "optimizer state under 'calls' belongs to no parameter")],
)
def test_a_state_that_cannot_be_kept_is_in_no_checkpoint_and_that_is_said(
    factory: Any, problem: str, tmp_path: Path
) -> None:
    with pytest.warns(RuntimeWarning, match=f"checkpoint .* failed: {problem}"):
        result = train(optimizer=factory, topology="servers", run_dir=tmp_path)
    assert result.version == 20
