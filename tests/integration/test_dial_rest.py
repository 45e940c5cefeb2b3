"""The rest of the dial with real processes and in the twin (M2, M4, M8, M9): ssp, backup, downpour, damping, warm start,
and dials that change during a run.
"""

from __future__ import annotations

import copy
import os
import sys
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam
from torch.utils.data import TensorDataset

import syncline as sl
from tests.integration import small_runs
from tests.integration.small_runs import Constant, check_accounts, points, rising

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ENGINES = ["local", "sim"]
LOCAL_STEPS = "downpour:push=2,fetch=3,local_lr=0.05"
PRESETS = [
    "hardsync",
    "softsync:1",
    "softsync:2",
    "async",
    "ssp:0",
    "ssp:2",
    "backup:1",
    "delayed:2",
    LOCAL_STEPS,
]
PATIENCE = 60.0  # seconds until a run counts as hung: a failure, not a measurement


def launch(function: Callable[..., Any], *arguments: Any, **options: Any) -> sl.Result:
    """As `sl.launch`, but a run that hangs is ended and fails."""
    return finished(sl.launch(function, *arguments, threads=1, wait=False, **options))


def finished(run: sl.Run) -> sl.Result:
    try:
        return run.wait(PATIENCE)
    except TimeoutError:
        where = run.statistics()
        run.stop()
        raise AssertionError(f"the run hangs: {where}") from None


def start(**changes: Any) -> sl.Run:
    run: sl.Run = small_runs.train(wait=False, **{"data": points(200), "learners": 3, **changes})
    return run


def train(**changes: Any) -> sl.Result:
    return finished(start(**changes))


# -- one learner: plain PyTorch ------------------------------------------------------------------------------


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))


def batches(steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield torch.randn(5, 6, generator=generator), torch.randint(3, (5,), generator=generator)


def fit(model: nn.Module, opt: torch.optim.Optimizer, steps: int = 12) -> dict[str, Tensor]:
    for x, y in batches(steps):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


def alone(session: sl.Session, factory: Callable[..., torch.optim.Optimizer]) -> dict[str, Tensor]:
    model = net()
    return fit(model, session.optimizer(model, factory))


@pytest.mark.sweep(4)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("sync", ["ssp:0", "ssp:3", "downpour:push=1,fetch=1,local_lr=0.5"])
@pytest.mark.parametrize("factory", [partial(SGD, lr=0.1, momentum=0.9), partial(Adam, lr=0.01)])
def test_one_learner_gives_the_bits_of_plain_pytorch(
    engine: str, sync: str, factory: Callable[..., torch.optim.Optimizer]
) -> None:
    result = launch(alone, factory, learners=1, sync=sync, engine=engine, seed=5)
    torch.manual_seed(5)
    model = net()
    plain = fit(model, factory(model.parameters()))
    assert all(torch.equal(result.state_dict()[name], plain[name]) for name in plain)
    assert all(torch.equal(result.returned[0][name], plain[name]) for name in plain)
    assert (result.version, result.gradients, result.staleness.max) == (12, 12, 0)


def test_backup_is_refused_for_one_learner() -> None:
    with pytest.raises(sl.UsageError, match="use hardsync, or at least 2 learners"):
        launch(alone, partial(SGD, lr=0.1), learners=1, sync="backup:1")


# -- downpour ------------------------------------------------------------------------------------------------


def stepping(session: sl.Session, steps: int, lr: float) -> list[tuple[int, list[Tensor]]]:
    """The version it has and its weights, after every step."""
    model = net()
    opt = session.optimizer(model, partial(SGD, lr=lr))
    seen = [(opt.version, [p.detach().clone() for p in model.parameters()])]
    for x, y in batches(steps):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
        seen.append((opt.version, [p.detach().clone() for p in model.parameters()]))
    return seen


class Downpour:
    """M9 in one process: a server's versions, and what a learner that steps by itself may hold."""

    def __init__(self, push: int, fetch: int, local_lr: float, lr: float) -> None:
        torch.manual_seed(5)
        self.model = net()
        self.push, self.fetch, self.local_lr = push, fetch, local_lr
        self.server = copy.deepcopy(self.model)
        self.optimizer = SGD(self.server.parameters(), lr=lr)
        self.versions = [self.weights(self.server)]
        self.sum: list[Tensor] | None = None
        self.steps = 0

    @staticmethod
    def weights(model: nn.Module) -> list[Tensor]:
        return [p.detach().clone() for p in model.parameters()]

    def step(self, x: Tensor, y: Tensor) -> list[Tensor]:
        """The gradient at the present weights goes into the sum and, with its turn, to the server; the local step."""
        gradients = list(
            torch.autograd.grad(F.cross_entropy(self.model(x), y), list(self.model.parameters()))
        )
        self.sum = (
            gradients if self.sum is None else [a + b for a, b in zip(self.sum, gradients, strict=True)]
        )
        self.steps += 1
        if self.steps % self.push == 0:
            self.flush()
        return [
            p.detach() - self.local_lr * g for p, g in zip(self.model.parameters(), gradients, strict=True)
        ]

    def flush(self) -> None:
        if self.sum is not None:
            for parameter, gradient in zip(self.server.parameters(), self.sum, strict=True):
                parameter.grad = gradient
            self.optimizer.step()
            self.versions.append(self.weights(self.server))
            self.sum = None

    def hold(self, weights: list[Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.model.parameters(), weights, strict=True):
                parameter.copy_(value)


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("push, fetch", [(2, 1), (3, 1), (1, 2), (1, 5), (3, 2), (2, 4), (4, 4), (7, 3)])
def test_downpour_is_what_m9_says(engine: str, push: int, fetch: int) -> None:
    """Bit for bit: after each step the weights are the local step's or, where a fetch came in, a version's.

    When it comes in is not repeatable with real processes; that it does, and with which version at least, is.
    """
    steps, local_lr, lr = 26, 0.0625, 0.125
    sync = f"downpour:push={push},fetch={fetch},local_lr={local_lr}"
    result = launch(stepping, steps, lr, learners=1, sync=sync, engine=engine, seed=5)
    seen = result.returned[0]
    plain = Downpour(push, fetch, local_lr, lr)
    assert seen[0][0] == 0 and same(seen[0][1], plain.versions[0])
    fetched, pushed = (
        [0],
        [0],
    )  # steps after which a fetch came in; versions that the server had after each step
    for step, (x, y) in enumerate(batches(steps), 1):
        moved = plain.step(x, y)
        pushed.append(len(plain.versions) - 1)
        version, weights = seen[step]
        if fetch > 1 and same(weights, moved):
            assert version == seen[step - 1][0]
        else:
            assert same(weights, plain.versions[version])
            asked = step if fetch == 1 else max(s for s in range(0, step + 1, fetch))
            assert version >= pushed[asked - fetch if fetch > 1 and asked == step else asked]
            fetched.append(step)
        plain.hold(weights)
    plain.flush()
    assert max(b - a for a, b in zip(fetched, [*fetched[1:], steps], strict=True)) < 2 * fetch
    assert result.version == len(plain.versions) - 1 == -(-steps // push)
    assert same(list(result.state_dict().values()), plain.versions[-1])
    if fetch == 1:
        assert [version for version, _ in seen] == pushed  # read your own push


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "sync", ["downpour:push=3,fetch=1,local_lr=0.1", "downpour:push=4,fetch=3,local_lr=0.1"]
)
def test_downpour_pushes_sums_and_leaves_nothing_out(engine: str, sync: str) -> None:
    """The weight of a constant gradient counts what arrived: every step of everybody, once."""
    result = train(
        model=Constant(),
        loss=None,
        objective=rising,
        optimizer=partial(SGD, lr=1.0),
        data=points(202),  # 51 batches, in sums of 3 or 4
        sync=sync,
        epochs=2,
        engine=engine,
    )
    check_accounts(result)
    assert result.state_dict()["weight"].item() == pytest.approx(2 * 51)
    assert result.statistics.tables[0].examples == 2 * 202
    assert 2 * 51 / 4 <= result.gradients < 2 * 51 and result.dropped == 0


@pytest.mark.parametrize("engine", ENGINES)
def test_downpour_with_adagrad_learns(engine: str) -> None:
    """D3."""
    result = train(
        sync="downpour:push=2,fetch=2,local_lr=0.05",
        optimizer=partial(Adagrad, lr=0.1),
        epochs=4,
        evaluate=points(200),
        engine=engine,
    )
    assert result.history[-1]["accuracy"] > 0.9
    assert result.history[-1].metrics["loss"] < result.history[0].losses[0]


# -- ssp -----------------------------------------------------------------------------------------------------


def paced(session: sl.Session, pauses: list[float], steps: int) -> list[tuple[float, float, float]]:
    """Of every step: when it began, when it published, when it could go on."""
    model = nn.Linear(2, 1)
    opt = session.optimizer(model, partial(SGD, lr=0.1))
    times = []
    for _ in range(steps):
        began = time.monotonic()
        time.sleep(pauses[session.rank])
        model(torch.ones(1, 2)).sum().backward()
        published = time.monotonic()
        opt.step()
        times.append((began, published, time.monotonic()))
    return times


@pytest.mark.parametrize("slack", [0, 2])
def test_ssp_holds_fast_learners_to_the_pace_of_the_slowest(slack: int) -> None:
    """DESIGN.md 3: nobody begins a step while more than s steps ahead of the slowest."""
    steps = 25
    result = launch(paced, [0.0, 0.006, 0.0], steps, learners=3, sync=f"ssp:{slack}")
    check_accounts(result)
    slow = result.returned[1]
    ended = [end for _, _, end in slow]
    for rank in (0, 2):
        begins = [begin for begin, _, _ in result.returned[rank]]
        for step in range(slack + 1, steps):  # so many steps are behind it
            assert begins[step] >= slow[step - slack - 1][1], f"learner {rank} began step {step} too early"
        assert max(step - bisect_right(ended, begin) for step, begin in enumerate(begins)) >= slack  # it may
    assert result.gradients == 3 * steps


def test_ssp_does_not_wait_for_one_that_is_gone() -> None:
    """M8: who returns, with data for the others left, holds nobody."""

    def learner(session: sl.Session, data: TensorDataset) -> int:
        model = nn.Linear(4, 2)
        opt = session.optimizer(model, partial(SGD, lr=0.1))
        steps = 0
        for x, y in session.loader(data, batch_size=4):
            F.cross_entropy(model(x), y).backward()
            opt.step()
            steps += 1
            if session.rank == 1 and steps == 3:
                return steps
        return steps

    result = launch(learner, points(200), learners=3, sync="ssp:1")
    assert sum(result.returned) == 50 and result.returned[1] == 3


# -- backup --------------------------------------------------------------------------------------------------


def test_backup_drops_the_gradients_of_a_straggler_and_lets_it_end() -> None:
    steps = 15
    result = launch(paced, [0.001, 0.001, 0.03], steps, learners=3, sync="backup:1")
    check_accounts(result)
    assert [len(times) for times in result.returned] == [steps] * 3
    assert result.dropped > 0
    assert result.gradients + result.dropped == 3 * steps
    assert result.staleness.max == 0  # who was late is not folded
    last = result.returned[2]
    assert max(times[-1][2] for times in result.returned[:2]) < last[-1][0]  # nobody waited for it


@pytest.mark.parametrize("engine", ENGINES)
def test_what_backup_drops_is_done_and_the_epochs_end(engine: str) -> None:
    result = train(sync="backup:1", epochs=3, engine=engine, evaluate=points(50))
    check_accounts(result)
    assert result.gradients + result.dropped == 3 * 50
    assert result.statistics.tables[0].examples == 4 * result.gradients
    assert [record.epoch for record in result.history] == [0, 1, 2]
    assert result.staleness.max == 0


# -- rates ---------------------------------------------------------------------------------------------------


counting: dict[str, Any] = {
    "model": Constant(),
    "loss": None,
    "objective": rising,
    "optimizer": partial(SGD, lr=1.0),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "sync", ["async:rate=staleness", "softsync:2,rate=staleness", "ssp:2,rate=staleness"]
)
def test_damping_divides_each_gradient_by_its_staleness(engine: str, sync: str) -> None:
    """M4: with a gradient of 1, the weight is the sum of 1/max(1, σ) over the run's own histogram, by updates."""
    result = train(**counting, sync=sync, learners=4, steps=40, engine=engine)
    quorum = 2 if sync.startswith("softsync") else 1
    damped = sum(n / max(1, sigma) for sigma, n in result.staleness.histogram.items()) / quorum
    assert result.gradients == 40 * quorum
    assert result.state_dict()["weight"].item() == pytest.approx(damped)
    assert result.staleness.max > 1 or engine == "local"


def test_damping_in_the_mean_is_refused_for_optimizers_that_undo_it() -> None:
    adam = partial(Adam, lr=0.01)
    with pytest.raises(sl.UsageError, match="Adam divides a gradient's scale out again"):
        train(sync="softsync:2,rate=staleness", optimizer=adam)
    with pytest.raises(sl.LearnerError, match="Adam divides a gradient's scale out again"):
        launch(alone, adam, sync="softsync:2,rate=staleness", learners=2, engine="sim")
    assert train(sync="async:rate=staleness", optimizer=adam, epochs=1).gradients == 50


# -- warm start ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_a_warm_start_is_one_learner_alone(engine: str, tmp_path: Path) -> None:
    """M8, D4: λ = 1, so async's rate is 1 until then, 1/3 after it."""
    calls: list[bool] = []

    def together(model: nn.Module, batch: Any) -> Tensor:
        """Whoever is alone at first waits after that until all compute, the others from their first batch on."""
        if engine == "local":
            here = {int(each.name) for each in tmp_path.iterdir()}
            calls.append(not here - {os.getpid()} and len(calls) < 20)
            (tmp_path / str(os.getpid())).touch()
            while not calls[-1] and len(list(tmp_path.iterdir())) < 3:
                time.sleep(0.001)
        return rising(model, batch)

    result = train(
        **(counting | {"objective": together}), sync="async", warmstart=20, steps=80, engine=engine
    )
    check_accounts(result)
    assert result.state_dict()["weight"].item() == pytest.approx(20 + 60 / 3)
    assert result.staleness.histogram[0] >= 20 and result.staleness.max > 0
    assert result.statistics.steps[0] > 20 and len(result.statistics.steps) > 1


@pytest.mark.parametrize("warm", [7, 25, 1000])
@pytest.mark.parametrize(
    "engine, sync", [*(("sim", sync) for sync in PRESETS), ("local", "hardsync"), ("local", LOCAL_STEPS)]
)
def test_a_warm_start_may_last_beyond_an_epoch_or_the_run(engine: str, sync: str, warm: int) -> None:
    """An epoch has 20 batches; if the first learner makes them all, the others find nothing to do."""
    result = train(data=points(80), sync=sync, warmstart=warm, epochs=2, engine=engine)
    check_accounts(result)
    assert result.statistics.tables[0].examples + 4 * result.dropped == 2 * 80
    if warm == 1000 and "downpour" not in sync:
        delay = sl.Sync.parse(sync).delay
        expected = [min(t, delay) for t in range(40)]
        assert result.staleness.histogram == dict(Counter(expected))


# -- dials that change ---------------------------------------------------------------------------------------


def stamping(session: sl.Session, data: TensorDataset, epochs: int, mean: bool = False) -> list[list[int]]:
    """The version of each step's gradient, by epoch."""
    model = nn.Linear(4, 2)
    opt = session.optimizer(model, partial(SGD, lr=0.1))
    loader = session.loader(data, batch_size=4)
    stamps: list[list[int]] = []
    for _ in range(epochs):
        stamps.append([])
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            stamps[-1].append(opt.version)
            opt.step()
        if mean:
            assert session.mean(1.0) == 1.0
    return stamps


@pytest.mark.parametrize("engine", ENGINES)
def test_hardsync_for_an_epoch_then_softsync(engine: str) -> None:
    """Rudra's Table 4."""
    sync = "hardsync until 1 then softsync:1"
    result = launch(
        stamping, points(198), 3, learners=3, sync=sync, engine=engine
    )  # 49 batches of 4 and one of 2
    check_accounts(result)
    assert result.gradients == 3 * 50
    rounds = -(-50 // 3)
    for rank, stamps in enumerate(result.returned):
        assert stamps[0] == list(range(rounds if rank < 2 else rounds - 1))  # in lockstep: σ = 0
        assert not stamps[1] or stamps[1][0] >= rounds
    late = sum(n for sigma, n in result.staleness.histogram.items() if sigma > 0)
    assert 0 < late <= 100


@pytest.mark.sweep(5)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "sync",
    [
        "softsync:1 until 1 then hardsync",
        "async until 1 then ssp:1 until 2 then backup:1",
        f"{LOCAL_STEPS} until 1 then hardsync",
        f"hardsync until 1 then {LOCAL_STEPS} until 2 then async",
        "hardsync until 1 then delayed:2 until 2 then softsync:3",
        "delayed:1 until 1 then delayed:3 until 2 then hardsync",
        "backup:1 until 1 then hardsync until 2 then ssp:0",
    ],
)
def test_every_example_is_seen_under_changing_dials(engine: str, sync: str) -> None:
    result = train(data=points(86), sync=sync, epochs=3, engine=engine, evaluate=points(20))
    check_accounts(result)
    seen = result.statistics.tables[0].examples
    assert 3 * 86 - 4 * result.dropped <= seen <= 3 * 86
    assert result.dropped == 0 or "backup" in sync
    assert [record.epoch for record in result.history] == [0, 1, 2]


def test_a_course_repeats_to_the_bit_in_the_twin() -> None:
    sync = f"hardsync until 1 then {LOCAL_STEPS} until 2 then ssp:1"
    first, second = (train(sync=sync, epochs=3, engine="sim") for _ in range(2))
    assert all(torch.equal(first.state_dict()[name], value) for name, value in second.state_dict().items())
    assert first.staleness == second.staleness


TURNS = [
    (before, after)
    for before in ("hardsync", "softsync:1", LOCAL_STEPS)
    for after in ("hardsync", "async", "ssp:0", "backup:1", LOCAL_STEPS)
    if before != after
]


@pytest.mark.parametrize(
    "engine, before, after",
    [("sim", *turn) for turn in TURNS] + [("local", *turn) for turn in TURNS if "hardsync" in turn],
)
def test_the_dial_may_be_turned_during_a_run(engine: str, before: str, after: str) -> None:
    """There and back."""
    holder: list[sl.Run] = []

    def turn(record: sl.EpochRecord) -> None:
        while not holder:
            time.sleep(0.001)
        if record.epoch in (0, 2):
            holder[0].change(after if record.epoch == 0 else before)

    holder.append(start(sync=before, epochs=5, engine=engine, callbacks=[turn], data=points(66)))
    result = finished(holder[0])
    check_accounts(result)
    seen = result.statistics.tables[0].examples
    assert 5 * 66 - 2 * 4 * result.dropped <= seen <= 5 * 66  # a dropped push is of two batches at most
    assert result.dropped == 0 or "backup:1" in (before, after)


@pytest.mark.parametrize("meet", [False, True])
@pytest.mark.parametrize("before", ["async", "softsync:1", "ssp:1", LOCAL_STEPS])
@pytest.mark.parametrize("after", ["hardsync", "ssp:0", "backup:1"])
def test_a_turn_while_somebody_has_no_data_holds_nobody(before: str, after: str, meet: bool) -> None:
    """Learner 1 has ended its epoch under a dial that waits for nobody, and hears of the other one too late."""
    holder: list[sl.Run] = []

    def learner(session: sl.Session, data: TensorDataset) -> int:
        model = nn.Linear(4, 2)
        opt = session.optimizer(model, partial(SGD, lr=0.1))
        loader = session.loader(data, batch_size=4)
        steps = 0
        for _ in range(2):
            for x, y in loader:
                steps += 1
                F.cross_entropy(model(x), y).backward()
                if session.rank == 0 and steps == 3:  # the last of five batches
                    while not holder:
                        time.sleep(0.001)
                    holder[0].change(after)
                opt.step()
            if meet:
                session.mean(1.0)
        return steps

    holder.append(sl.launch(learner, points(20), learners=2, sync=before, engine="sim", wait=False))
    result = finished(holder[0])
    check_accounts(result)
    assert sum(result.returned) == 10


def test_hardsync_after_a_turn_is_hardsync() -> None:
    """From the change on no gradient is late: the account grows by σ = 0 only."""
    run = start(sync="async", steps=100_000, data=points(400), model=nn.Linear(4, 2))

    def at(least: int) -> Any:
        while (table := run.statistics().tables.get(0)) is None or table.version < least:
            time.sleep(0.01)
        return table

    at(50)
    run.change("hardsync")
    turned = at(0)
    early = at(turned.version + 30)  # what was published before is folded
    late = at(early.version + 30)
    run.stop()
    result = run.wait(PATIENCE)
    changed = {s: late.staleness.histogram.get(s, 0) - n for s, n in early.staleness.histogram.items()}
    assert all(n == 0 for sigma, n in changed.items() if sigma > 0) and changed[0] > 0
    check_accounts(result)


def test_a_turn_to_what_cannot_work_is_refused_and_the_run_goes_on() -> None:
    run = start(sync="async", epochs=2, engine="sim")
    for text, message in (
        ("backup:3", "needs b < learners"),
        ("softsync:4", "needs n <= learners"),
        ("downpour:push=2,fetch=2", "needs local_lr"),
        ("delayed:1", "this run was started to keep 1"),
        ("hardsnyc", "did you mean"),
    ):
        with pytest.raises(sl.UsageError, match=message):
            run.change(text)
    assert finished(run).gradients == 100


@pytest.mark.parametrize("sync", ["hardsync until 1 then backup:3", {0: "async", 1: "softsync:9"}])
def test_every_dial_of_a_course_is_checked_before_anything_starts(sync: Any) -> None:
    with pytest.raises(sl.UsageError, match=r"backup:3|softsync:9"):
        start(sync=sync)


# -- waiting for each other outside the dial -------------------------------------------------------------------


@pytest.mark.sweep(6)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("sync", [*PRESETS, "hardsync until 1 then softsync:1", "async until 1 then ssp:0"])
def test_learners_that_meet_after_each_epoch_do_not_wait_for_ever(engine: str, sync: str) -> None:
    """A number of batches that the learners do not divide: somebody is at the meeting first."""
    result = launch(stamping, points(54), 3, True, learners=3, sync=sync, engine=engine)
    check_accounts(result)
    assert sum(len(epoch) for stamps in result.returned for epoch in stamps) == 3 * 14
