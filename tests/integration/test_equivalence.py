"""The same numbers as plain PyTorch, with real processes (M1-M5, M7; DESIGN.md "What always holds" 2, 3).

Every case is one function of `make(model, factory)`: the plain run gives it the factory's own optimizer, a learner
gives it `session.optimizer`. The code between is the same, so the bits must be.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, lr_scheduler
from torch.utils.data import TensorDataset

import syncline as sl

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SEED = 5
State = dict[str, Tensor]
Make = Callable[[nn.Module, Callable[..., Optimizer]], Optimizer]
ALONE = [("hardsync", 1), ("hardsync", 3), ("softsync:1", 1), ("softsync:1", 2), ("async", 1), ("async", 3)]


def plain(model: nn.Module, factory: Callable[..., Optimizer]) -> Optimizer:
    return factory(model if "model" in getattr(factory, "__annotations__", {}) else model.parameters())


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(20, 33), nn.ReLU(), nn.Linear(33, 5))


def batches(steps: int, size: int = 8) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield (
            torch.randn(size, 20, generator=generator),
            torch.randint(5, (size,), generator=generator),
        )


def fit(
    model: nn.Module, opt: Optimizer, steps: int = 12, each: Callable[[], Any] | None = None
) -> nn.Module:
    for x, y in batches(steps):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
        if each is not None:
            each()
    return model


def assert_same(got: State, wanted: State) -> None:
    assert got.keys() == wanted.keys()
    different = [name for name in wanted if not torch.equal(got[name], wanted[name])]
    assert not different, f"{different} differ"
    assert all(got[name].dtype == wanted[name].dtype for name in wanted)


def assert_close(got: State, wanted: State, tolerance: float = 1e-9) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, rtol=tolerance, atol=tolerance, msg=name)


# -- the cases ---------------------------------------------------------------------------------------------


def sgd_momentum(make: Make) -> nn.Module:
    model = net()
    return fit(model, make(model, partial(SGD, lr=0.1, momentum=0.9, weight_decay=1e-3, nesterov=True)))


def adam(make: Make) -> nn.Module:
    model = net()
    return fit(model, make(model, partial(Adam, lr=0.01, amsgrad=True)))


def adamw(make: Make) -> nn.Module:
    model = net()
    return fit(model, make(model, partial(AdamW, lr=0.01, weight_decay=0.1)))


def adagrad(make: Make) -> nn.Module:
    model = net()
    return fit(model, make(model, partial(Adagrad, lr=0.05, lr_decay=0.01, initial_accumulator_value=0.1)))


def clipping_in_the_loop(make: Make) -> nn.Module:
    model = net()
    opt = make(model, partial(SGD, lr=0.5, momentum=0.9))
    for x, y in batches(10):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        assert nn.utils.clip_grad_norm_(model.parameters(), 0.1) > 0.1
        opt.step()
    return model


def accumulation(make: Make) -> nn.Module:
    model = net()
    opt = make(model, partial(Adam, lr=0.01))
    for step, (x, y) in enumerate(batches(12)):
        (F.cross_entropy(model(x), y) / 3).backward()
        if step % 3 == 2:
            opt.step()
            opt.zero_grad(set_to_none=step > 6)  # gradients that are zero, and gradients that are not there
    return model


def groups(make: Make) -> nn.Module:
    def factory(model: Any) -> Optimizer:
        first, _, last = model
        return SGD(
            [
                {"params": last.parameters(), "lr": 0.3, "momentum": 0.0},  # not in the model's order
                {"params": [first.bias], "weight_decay": 0.1},
                {"params": [first.weight]},
            ],
            lr=0.05,
            momentum=0.9,
        )

    model = net()
    opt = make(model, factory)

    def each() -> None:
        opt.param_groups[1]["lr"] *= 0.9

    return fit(model, opt, each=each)


def schedulers(make: Make) -> nn.Module:
    model = net()
    opt = make(model, partial(SGD, lr=0.1, momentum=0.9))
    cycle = lr_scheduler.OneCycleLR(opt, max_lr=0.5, total_steps=12)  # changes lr and momentum
    return fit(model, opt, each=cycle.step)


def schedulers_chained(make: Make) -> nn.Module:
    model = net()
    opt = make(model, partial(Adam, lr=0.1))
    warm = lr_scheduler.LinearLR(opt, 0.1, total_iters=4)
    chain = lr_scheduler.SequentialLR(opt, [warm, lr_scheduler.ExponentialLR(opt, 0.7)], milestones=[4])
    return fit(model, opt, each=chain.step)


class Partly(nn.Module):
    """One layer is used only now and then, one never, one is frozen, one is empty, two share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(20, 20), nn.Linear(20, 20)
        self.decode.weight = self.encode.weight
        self.sometimes, self.never, self.frozen = nn.Linear(20, 20), nn.Linear(3, 3), nn.Linear(20, 20)
        self.frozen.requires_grad_(False)
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.head = nn.Linear(20, 5)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.frozen(torch.tanh(self.encode(x)))
        if self.calls % 3 == 2:
            x = self.sometimes(x)
        return self.head(self.decode(x)) + self.empty.sum()


def partly(make: Make) -> nn.Module:
    model = Partly()
    return fit(model, make(model, partial(Adam, lr=0.01, weight_decay=0.1)))


def partly_momentum(make: Make) -> nn.Module:
    model = Partly()
    return fit(model, make(model, partial(SGD, lr=0.05, momentum=0.9)))


def frozen_left_out(make: Make) -> nn.Module:
    def factory(model: Any) -> Optimizer:
        return Adagrad([p for p in model.parameters() if p.requires_grad], lr=0.05)

    model = Partly()
    return fit(model, make(model, factory))


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(20, 30).bfloat16()
        self.middle = nn.Linear(30, 20)
        self.high = nn.Linear(20, 5).double()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.low(x.bfloat16()) * self.scale)
        return self.high(self.middle(x.float()).double())


def mixed_dtypes(make: Make) -> nn.Module:
    model = Mixed()
    return fit(model, make(model, partial(SGD, lr=0.1, momentum=0.9)))


def mixed_dtypes_adam(make: Make) -> nn.Module:
    model = Mixed()
    return fit(model, make(model, partial(Adam, lr=0.01)))


def closures(make: Make) -> nn.Module:
    model = net()
    opt = make(model, partial(SGD, lr=0.1, momentum=0.9))
    for x, y in batches(8):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        with torch.no_grad():
            before = F.cross_entropy(model(x), y)
        assert torch.equal(opt.step(closure).detach(), before)
    return model


def edited_gradients(make: Make) -> nn.Module:
    model = net()
    opt = make(model, partial(SGD, lr=0.1))
    for x, y in batches(6):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        model[0].weight.grad.mul_(0.5)
        model[0].bias.grad = torch.ones(33)
        model[2].bias.grad = None
        opt.step()
    return model


def random_numbers(make: Make) -> nn.Module:
    """Dropout and the initial weights draw from the generator that the run's seed set."""
    model = nn.Sequential(nn.Linear(20, 64), nn.Dropout(), nn.Linear(64, 5))
    return fit(model, make(model, partial(SGD, lr=0.1)))


def fused(make: Make) -> nn.Module:
    model = net()
    return fit(model, make(model, partial(SGD, lr=0.1, momentum=0.9, fused=True)))


def tensor_options(
    make: Make, *, kind: type[Optimizer], dtype: torch.dtype, options: dict[str, float]
) -> nn.Module:
    """Step with options that are tensors, which a scheduler changes in place; they keep their type."""
    model = nn.Sequential(nn.Linear(20, 33, bias=False), nn.ReLU(), nn.Linear(33, 5, bias=False))
    tensors: dict[str, Any] = {key: torch.tensor(value, dtype=dtype) for key, value in options.items()}
    opt = make(model, partial(kind, **tensors))
    fit(model, opt, each=lr_scheduler.ExponentialLR(opt, gamma=0.9).step)
    (group,) = opt.state_dict()["param_groups"]
    for key in tensors:
        assert isinstance(group[key], Tensor) and group[key].dtype == dtype
    return model


TENSOR_OPTIONS = [
    partial(tensor_options, kind=kind, dtype=dtype, options={"lr": 0.01, **more})
    for kind, more in [
        (torch.optim.Muon, {"weight_decay": 0.1}),
        (SGD, {"momentum": 0.9, "weight_decay": 0.01}),
        (Adam, {"weight_decay": 0.01}),
        (torch.optim.Adamax, {}),
        (torch.optim.ASGD, {}),
        (torch.optim.Adafactor, {}),
    ]
    for dtype in (torch.float32, torch.float64)
]


CASES = [
    *(sgd_momentum, adam, adamw, adagrad, clipping_in_the_loop, accumulation, groups, schedulers),
    *(schedulers_chained, partly, partly_momentum, frozen_left_out, mixed_dtypes, mixed_dtypes_adam),
    *(closures, edited_gradients, random_numbers, fused, *TENSOR_OPTIONS),
]


def run_plain(case: Callable[[Make], nn.Module]) -> State:
    torch.manual_seed(SEED)
    return case(plain).state_dict()


def through_session(session: sl.Session, cases: list[Callable[[Make], nn.Module]]) -> list[State]:
    states = []
    for case in cases:
        torch.manual_seed(SEED)
        states.append(case(session.optimizer).state_dict())
    return states


@pytest.mark.sweep(4)
@pytest.mark.parametrize("sync, shards", ALONE)
def test_one_learner_gives_the_bits_of_plain_pytorch(sync: str, shards: int) -> None:
    """M2, M5: all cases in one session, each with a table of its own (M6)."""
    result = sl.launch(through_session, CASES, learners=1, sync=sync, topology=f"servers:{shards}", threads=1)
    for table, (case, got) in enumerate(zip(CASES, result.returned[0], strict=True)):
        wanted = run_plain(case)
        assert_same(got, wanted)
        last = result.state_dict(table)
        assert_same(last, {name: wanted[name] for name in last})
        assert len(last) >= len(wanted) - 2 * (case is frozen_left_out)  # what the optimizer holds, and ties


def one_case(session: sl.Session, case: Callable[[Make], nn.Module]) -> State:
    return case(session.optimizer).state_dict()


@pytest.mark.parametrize("sync", ["hardsync", "softsync:1", "async"])
def test_rank_0_draws_what_a_plain_script_draws(sync: str) -> None:
    """The run's seed is `torch.manual_seed(seed)` for the lowest rank."""
    result = sl.launch(one_case, random_numbers, learners=1, sync=sync, seed=SEED, threads=1)
    assert_same(result.returned[0], run_plain(random_numbers))


@pytest.mark.parametrize("sync", ["hardsync", "softsync:1", "async"])
@pytest.mark.parametrize("shards", [1, 3])
def test_clip_norm_clips_the_folded_gradient(sync: str, shards: int) -> None:
    """M5: by its norm over all shards; the bits of `clip_grad_norm_` where one shard has all of it."""
    result = sl.launch(
        one_case,
        sgd_momentum,
        learners=1,
        sync=sync,
        seed=SEED,
        threads=1,
        clip_norm=0.2,
        topology=f"servers:{shards}",
    )
    torch.manual_seed(SEED)
    model = net()
    opt = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3, nesterov=True)
    for x, y in batches(12):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        assert nn.utils.clip_grad_norm_(model.parameters(), 0.2) > 0.2
        opt.step()
    if shards == 1:
        assert_same(result.state_dict(), model.state_dict())
    else:
        assert_close(result.state_dict(), model.state_dict(), 1e-5)


# -- several learners ----------------------------------------------------------------------------------------


def smooth() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 4)).double()


def examples(size: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(size, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(4, (size,), generator=generator))


def joint_batches(data: TensorDataset, joint: int, epochs: int, seed: int) -> Iterator[list[Tensor]]:
    """The published order (M7): joint batch t is the t-th slice of λμ."""
    for epoch in range(epochs):
        order = sl.epoch_order(len(data), seed=seed, epoch=epoch)
        for start in range(0, len(data), joint):
            yield [tensor[order[start : start + joint]] for tensor in data.tensors]


def one_process(
    model: nn.Module,
    factory: Callable[..., Optimizer],
    joint: Iterator[list[Tensor]],
    clip_norm: float | None = None,
) -> int:
    opt = factory(model.parameters())
    steps = 0
    for x, y in joint:
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        opt.step()
        steps += 1
    return steps


FACTORIES = {
    "sgd": partial(SGD, lr=0.2, momentum=0.9),
    "adam": partial(Adam, lr=0.01),
    "adagrad": partial(Adagrad, lr=0.05),
}


@pytest.mark.sweep(5)
@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize("learners, size", [(2, 240), (3, 240), (2, 234), (3, 223)])
def test_hardsync_equals_one_process_with_the_joint_batch(name: str, learners: int, size: int) -> None:
    """M3, M7: also where the last joint batch gives some learners less (8 and 2) or nothing (7, 0, 0)."""
    data, model = examples(size), smooth()
    reference = copy.deepcopy(model)
    joint = 8 * learners
    epochs = -(-50 // -(-size // joint))
    result = sl.train(
        model,
        data,
        loss=F.cross_entropy,
        optimizer=FACTORIES[name],
        sync="hardsync",
        topology="servers:2",
        learners=learners,
        batch_size=8,
        epochs=epochs,
        seed=SEED,
        threads=1,
    )
    steps = one_process(reference, FACTORIES[name], joint_batches(data, joint, epochs, SEED))
    assert result.version == steps >= 50
    assert result.staleness.histogram == {0: result.gradients}
    assert_close(result.model.state_dict(), reference.state_dict())
    assert [record.examples for record in result.history] == [size * (e + 1) for e in range(epochs)]


@pytest.mark.parametrize("sync", ["hardsync", "softsync:1", "async"])
def test_train_with_one_learner_gives_the_bits_of_a_plain_loop(sync: str) -> None:
    """M2, M7: the published order, a schedule stepped each epoch, a short last batch."""
    data, model = examples(90), smooth()
    reference = copy.deepcopy(model)
    schedule = partial(lr_scheduler.StepLR, step_size=2, gamma=0.1)
    result = sl.train(
        model,
        data,
        loss=F.cross_entropy,
        optimizer=FACTORIES["sgd"],
        schedule=schedule,
        sync=sync,
        learners=1,
        batch_size=8,
        epochs=4,
        seed=SEED,
        threads=1,
    )
    opt = FACTORIES["sgd"](reference.parameters())
    scheduler = schedule(opt)
    for step, (x, y) in enumerate(joint_batches(data, 8, 4, SEED), start=1):
        opt.zero_grad()
        F.cross_entropy(reference(x), y).backward()
        opt.step()
        if step % 12 == 0:
            scheduler.step()
    assert_same(result.model.state_dict(), reference.state_dict())


def test_clip_norm_clips_the_joint_gradient() -> None:
    """M5: the fold is clipped, not each learner's part; over two shards."""
    data, model = examples(96), smooth()
    reference = copy.deepcopy(model)
    result = sl.train(
        model,
        data,
        loss=F.cross_entropy,
        optimizer=FACTORIES["sgd"],
        sync="hardsync",
        topology="servers:2",
        learners=2,
        batch_size=8,
        epochs=3,
        clip_norm=0.1,
    )
    one_process(reference, FACTORIES["sgd"], joint_batches(data, 16, 3, 0), clip_norm=0.1)
    assert_close(result.model.state_dict(), reference.state_dict(), 1e-6)


def test_a_parameter_missing_in_some_gradients_counts_as_zero_there() -> None:
    """M3: learner 1 does not use the second layer; missing in all, it is skipped (momentum stays)."""

    def learner(session: sl.Session) -> None:
        model = nn.ModuleList([nn.Linear(3, 1, bias=False).double() for _ in range(2)])
        opt = session.optimizer(model, partial(SGD, lr=0.1, momentum=0.9))
        for step in range(4):
            opt.zero_grad()
            used = model if session.rank == 0 and step != 2 else model[:1]
            sum(layer(torch.full((1, 3), 1.0 + step, dtype=torch.float64)).sum() for layer in used).backward()
            opt.step()

    result = sl.launch(learner, learners=2, seed=SEED)
    torch.manual_seed(SEED)
    model = nn.ModuleList([nn.Linear(3, 1, bias=False).double() for _ in range(2)])
    opt = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        model[0].weight.grad = torch.full((1, 3), 1.0 + step, dtype=torch.float64)
        half = torch.full((1, 3), (1.0 + step) / 2, dtype=torch.float64)
        model[1].weight.grad = half if step != 2 else None
        opt.step()
    assert_close(result.state_dict(), model.state_dict())


def test_hardsync_twice_gives_the_same_bits() -> None:
    """M3: sums in rank order; the number of shards does not matter."""

    def once(shards: int) -> State:
        torch.manual_seed(0)
        return sl.train(
            nn.Sequential(nn.Linear(6, 50), nn.ReLU(), nn.Linear(50, 4)),
            TensorDataset(*(t.float() if t.is_floating_point() else t for t in examples(130).tensors)),
            loss=F.cross_entropy,
            optimizer=partial(Adam, lr=0.01),
            sync="hardsync",
            topology=f"servers:{shards}",
            learners=3,
            batch_size=8,
            epochs=4,
        ).state_dict()

    first = once(1)
    assert_same(once(1), first)
    assert_same(once(3), first)


# -- delayed -------------------------------------------------------------------------------------------------


def delayed_by_hand(
    model: nn.Module, factory: Callable[..., Optimizer], joint: Iterator[list[Tensor]], delay: int
) -> int:
    """Gradient t is computed on version max(0, t−k) and makes version t+1."""
    opt = factory(model.parameters())
    versions = [copy.deepcopy(model)]
    for t, (x, y) in enumerate(joint):
        at = versions[max(0, t - delay)]
        gradients = torch.autograd.grad(F.cross_entropy(at(x), y), list(at.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        opt.step()
        versions.append(copy.deepcopy(model))
    return len(versions) - 1


@pytest.mark.parametrize(
    "learners, delay, size", [(1, 1, 96), (1, 3, 90), (2, 1, 96), (2, 2, 89), (3, 4, 100)]
)
def test_delayed_folds_exactly_k_versions_late(learners: int, delay: int, size: int) -> None:
    """M2, DESIGN.md 3: σ = min(t, k), and the weights of plain delayed application; over epochs, uneven too."""
    data, model = examples(size), smooth()
    reference = copy.deepcopy(model)
    joint, epochs = 8 * learners, 4
    result = sl.train(
        model,
        data,
        loss=F.cross_entropy,
        optimizer=FACTORIES["sgd"],
        sync=f"delayed:{delay}",
        topology="servers:2",
        learners=learners,
        batch_size=8,
        epochs=epochs,
        seed=SEED,
        threads=1,
    )
    steps = delayed_by_hand(reference, FACTORIES["sgd"], joint_batches(data, joint, epochs, SEED), delay)
    assert result.version == steps
    expected: Counter[int] = Counter()
    for t, (x, _) in enumerate(joint_batches(data, joint, epochs, SEED)):
        expected[min(t, delay)] += -(-len(x) // 8)  # learners that have a part of it
    assert result.staleness.histogram == dict(expected)
    assert_close(result.model.state_dict(), reference.state_dict())
    if learners == 1:
        assert_same(result.model.state_dict(), reference.state_dict())
