"""Groups of seats on this machine: several processes that are one learner (M15)."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import TensorDataset

import syncline as sl
from syncline.cluster import Cluster, Compute, Link
from syncline.errors import LearnerError, NotYetError, UsageError
from syncline.learn.gradient_ways import Backprop
from syncline.testing.leftovers import children
from syncline.train import groups

cloudpickle.register_pickle_by_value(sys.modules[__name__])

DRAW = torch.Generator().manual_seed(0)
X = torch.randn(48, 3, 8, 8, generator=DRAW, dtype=torch.float64)
Y = torch.randint(5, (48,), generator=DRAW)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
BY_HAND = {"0": "spatial", "1": "spatial", "4": "model", "6": "rows"}


def network() -> nn.Module:
    """A convolution, statistics, dense layers."""
    torch.manual_seed(1)
    layers = (nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(256, 12), nn.Tanh(), nn.Linear(12, 5)).double()


class Recurrent(nn.Module):
    """Weights whose slices are several boxes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.cells, self.out = nn.LSTM(24, 6, batch_first=True), nn.Linear(6, 5)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cells(x.flatten(2).transpose(1, 2).flatten(1).view(-1, 8, 24))[0][:, -1])


def trained(make: Callable[[], nn.Module] = network, **options: Any) -> Any:
    settings = {"learners": 1, "batch_size": 8, "epochs": 2, "sync": "hardsync", "optimizer": SGD}
    return sl.train(make(), (X, Y), loss=F.cross_entropy, **{**settings, **options})


def alike(a: Any, b: Any) -> None:
    ours, theirs = a.state_dict(), b.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-10, atol=1e-10)


CASES: dict[str, tuple[Callable[[], nn.Module], int, Any, dict[str, Any]]] = {
    "by examples": (network, 2, "data", {}),
    "by the cheapest plan": (network, 4, "auto", {"check": True}),
    "by hand": (network, 4, BY_HAND, {}),
    "recurrent": (Recurrent, 2, {"cells": "model", "out": "model"}, {"learners": 2, "topology": "servers:3"}),
    "two groups": (network, 2, BY_HAND, {"learners": 2}),
    "two groups, shards for their windows": (network, 4, BY_HAND, {"learners": 2, "topology": "servers:4"}),
    "two shards, with a limit on the norm": (
        network, 2, {"4": "model"}, {"learners": 2, "topology": "servers:2", "clip_norm": 0.5}
    ),
    "with a state to begin with": (
        network, 2, {"4": "model"}, {"optimizer": partial(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.3)}
    ),
    "steps of its own": (network, 2, {"4": "model"}, {"sync": "downpour:push=2,fetch=2,local_lr=0.05"}),
    "delayed": (network, 2, {"4": "model"}, {"learners": 2, "sync": "delayed:1"}),
}  # fmt: skip


@pytest.mark.sweep(4)
@pytest.mark.parametrize("case", CASES)
def test_a_group_learns_what_one_process_learns(case: str) -> None:
    make, group, plan, options = CASES[case]
    ours = trained(make, group=group, plan=plan, **options)
    theirs = trained(make, engine="sim", **{key: value for key, value in options.items() if key != "check"})
    assert ours.updates == theirs.updates and ours.gradients == theirs.gradients
    assert ours.history[-1].loss == pytest.approx(theirs.history[-1].loss, rel=1e-10)
    alike(ours, theirs)


@pytest.mark.parametrize("sync", ["softsync:1", "async", "downpour:push=2,fetch=2,local_lr=0.05", "ssp:1"])
def test_groups_are_the_learners_of_any_dial(sync: str) -> None:
    result = trained(group=2, plan={"4": "model"}, learners=2, sync=sync)
    assert (
        max(record.examples for record in result.history) == 96
    )  # one epoch may end before the one before it
    assert result.history[-1].loss < result.history[0].loss * 1.5


# -- launch --------------------------------------------------------------------------------------------------


def looked(session: Any) -> Any:
    model = network()
    mine = sl.partition(model, {"4": "model"}, X[:8])
    with torch.inference_mode():
        same = torch.allclose(mine.eval()(X[:8]), model.eval()(X[:8]), rtol=1e-10)
    held = sum(p.numel() for p in mine.parameters())
    return session.seat, session.seats, session.rank, session.learners, same, held


def test_a_partitioned_model_is_only_looked_at() -> None:
    returned = sl.launch(looked, learners=2, group=3).returned
    assert [found[:4] for found in returned] == [(0, 3, 0, 2), (0, 3, 1, 2)]
    whole = sum(p.numel() for p in network().parameters())
    assert all(found[4] and found[5] < whole for found in returned)


# -- step hooks ----------------------------------------------------------------------------------------------

Hook = Callable[..., None]
HOOKS: dict[str, Callable[[torch.optim.Optimizer, Hook], Any]] = {
    "a hook before": torch.optim.Optimizer.register_step_pre_hook,
    "a hook after": torch.optim.Optimizer.register_step_post_hook,
    "a global hook before": lambda _, hook: register_optimizer_step_pre_hook(hook),
    "a global hook after": lambda _, hook: register_optimizer_step_post_hook(hook),
}


def hooked_loop(session: Any, hook: str | None, halved: bool, rate: float = 0.1) -> Any:
    """Train with a hook or under a profiler; return the class of the optimizer for each call of the hook."""
    called: list[str] = []

    def note(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        called.append(type(optimizer).__name__)
        for parameter in mine.parameters() if halved else ():
            parameter.grad *= 0.5

    mine = sl.partition(network(), example=X[:8]) if session.seats > 1 else network()
    optimizer = session.optimizer(mine, partial(SGD, lr=rate))
    under = torch.profiler.profile() if hook == "a profiler" else contextlib.nullcontext()
    handle = HOOKS[hook](optimizer, note) if hook in HOOKS else None
    with under:
        for x, y in session.loader(TensorDataset(X, Y), batch_size=8):
            optimizer.zero_grad()
            F.cross_entropy(mine(x), y).backward()
            optimizer.step()
    if handle is not None:
        handle.remove()
    return called


RUNS: dict[str, tuple[dict[str, Any], str]] = {
    "groups": ({"group": 2, "plan": {"4": "model"}}, "SeatOptimizer"),
    "groups over a tree": ({"group": 2, "plan": {"4": "model"}, "topology": "tree:2"}, "SeatOptimizer"),
    "tables": ({}, "SharedOptimizer"),
    "all-reduce": ({"topology": "allreduce"}, "AllReduceOptimizer"),
    "all-reduce, layer by layer": ({"topology": "allreduce:layerwise"}, "AllReduceOptimizer"),
}


@pytest.mark.parametrize("run", RUNS)
def test_steps_with_hooks_and_under_a_profiler_are_the_same_steps(run: str) -> None:
    options, kind = RUNS[run]
    launched = partial(sl.launch, hooked_loop, learners=2, sync="hardsync", **options)
    plain = launched(None, False).state_dict()
    for hook in (*HOOKS, "a profiler"):
        result = launched(hook, False)
        torch.testing.assert_close(result.state_dict(), plain, rtol=0, atol=0)
        assert set(result.returned[0]) <= {kind}
        assert len(result.returned[0]) == (0 if hook == "a profiler" else 3)


@pytest.mark.parametrize("run", RUNS)
def test_a_hook_before_each_step_changes_gradients_once(run: str) -> None:
    launched = partial(sl.launch, hooked_loop, learners=2, sync="hardsync", **RUNS[run][0])
    half = launched(None, False, 0.05)
    for hook in ("a hook before", "a global hook before"):
        alike(launched(hook, True), half)


def hooked_schedule(optimizer: torch.optim.Optimizer) -> Any:
    optimizer.register_step_post_hook(lambda *_: None)
    return unhooked_schedule(optimizer)


def unhooked_schedule(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)


@pytest.mark.parametrize("learners", [1, 2])
def test_seats_that_update_their_slices_do_so_with_a_hook(learners: int) -> None:
    results = [
        trained(group=2, plan={"4": "model"}, learners=learners, schedule=schedule)
        for schedule in (hooked_schedule, unhooked_schedule)
    ]
    hooked, plain = (result.state_dict() for result in results)
    torch.testing.assert_close(hooked, plain, rtol=0, atol=0)


def own_loop(session: Any) -> Any:
    mine = sl.partition(network(), example=X[:8])  # the plan that launch was given
    optimizer = session.optimizer(mine, SGD)
    for x, y in session.loader(TensorDataset(X, Y), batch_size=8):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(mine(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
    mean = session.mean(float(session.rank))
    return mean, {name: tuple(t.shape) for name, t in mine.named_parameters()}, optimizer.state_dict()


def test_loops_of_ones_own_run_in_every_seat() -> None:
    result = sl.launch(own_loop, learners=2, group=2, plan={"4": "model"}, sync="hardsync")
    alike(result, trained(learners=2, epochs=1, engine="sim"))
    mean, shapes, state = result.returned[0]
    assert mean == 0.5 and shapes["4.weight"] == (6, 256)
    assert state["state"][4]["momentum_buffer"].shape == (12, 256)


def test_a_model_that_is_not_cut_is_refused() -> None:
    def whole(session: Any) -> None:
        session.optimizer(network(), SGD)

    words = (
        r"in a group of 2 seats takes a partitioned model: sl.partition\(Sequential\(...\), plan, example\)"
    )
    with pytest.raises(LearnerError, match=words):
        sl.launch(whole, learners=1, group=2)


# -- faults --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seat", [0, 1])
def test_an_error_of_one_seat_is_its_learners(seat: int) -> None:
    def fails(session: Any) -> None:
        mine = sl.partition(network(), {}, X[:8])
        optimizer = session.optimizer(mine, SGD)
        for x, _ in session.loader(TensorDataset(X, Y), batch_size=8):
            if session.seat == seat:
                raise ValueError("of this seat")
            mine(x).sum().backward()
            optimizer.step()

    with pytest.raises(LearnerError, match="of this seat"):
        sl.launch(fails, learners=1, group=2)


def test_a_loop_that_is_left_gives_its_batches_back() -> None:
    def leaves(session: Any) -> int:
        mine = sl.partition(network(), {}, X[:8])
        optimizer = session.optimizer(mine, SGD)
        loader, count = session.loader(TensorDataset(X, Y), batch_size=8), 0
        for epoch in range(3):
            for number, (x, _) in enumerate(loader):
                mine(x).sum().backward()
                optimizer.step()
                count += 1
                if epoch == 0 and number == 1:
                    break
        assert len(loader) == 6 and loader.epoch == 3
        return count

    result = sl.launch(leaves, learners=1, group=2)
    assert result.returned == [2 + 6 + 6] and result.updates == 14


def test_seats_that_go_different_ways_are_told_so() -> None:
    def parts(session: Any) -> None:
        session.mean(1.0) if session.seat == 0 else session.loader(TensorDataset(X, Y), batch_size=8)

    with pytest.raises(LearnerError, match="all seats of a group run the same loop"):
        sl.launch(parts, learners=1, group=2)


def begun(**options: Any) -> sl.Run:
    """A run of two groups, of which an epoch is done."""
    one = threading.Event()
    run = trained(
        group=2, plan={"4": "model"}, learners=2, wait=False, callbacks=lambda _: one.set(), **options
    )
    assert one.wait(60)
    return run


def second_seat(pid: int) -> int:
    """Wait until a group's first process has started the other one: under a free dial an epoch may end before that."""
    while not (found := children(pid)):
        time.sleep(0.01)
    (other,) = found
    return other


@pytest.mark.filterwarnings("ignore::syncline.errors.LostWarning")
@pytest.mark.parametrize("victim", ["the first", "another"])
def test_a_seats_death_is_its_groups_leave(victim: str) -> None:
    with begun(sync="softsync:1", epochs=20) as run:
        pid = run._handle.pids()["learner 1"]
        other = second_seat(pid)
        os.kill(pid if victim == "the first" else other, signal.SIGKILL)
        result = run.wait()
    assert result.statistics.tables[0].examples == 20 * 48
    assert [event.rank for event in result.events if event.kind == "lost"] == [1]
    assert not children(os.getpid()) & {pid, other}


@pytest.mark.filterwarnings("ignore::syncline.errors.LostWarning")
def test_a_group_is_replaced_whole() -> None:
    with begun(epochs=20, replace=True) as run:
        other = second_seat(run._handle.pids()["learner 1"])
        os.kill(other, signal.SIGKILL)
        result = run.wait()
    assert [event.kind for event in result.events if event.rank == 1] == ["lost", "replaced"]
    assert result.statistics.tables[0].examples == 20 * 48


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::syncline.errors.LostWarning")
@pytest.mark.parametrize("seed", range(12))
def test_groups_whose_seats_die_at_any_moment_are_replaced_and_every_example_counts_once(seed: int) -> None:
    draw = random.Random(seed)
    sync = draw.choice(["hardsync", "softsync:1", "async", "delayed:1"])
    shards = draw.choice(["servers:1", "servers:3"])
    with begun(sync=sync, topology=shards, epochs=30, replace=True, patience=None) as run:
        for _ in range(3):
            threading.Event().wait(draw.uniform(0.0, 0.6))  # any moment
            pids = run._handle.pids()
            pid = pids.get(f"learner {draw.randrange(2)}")
            seats = [*children(pid), pid] if pid is not None else []
            if seats:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(draw.choice(seats), signal.SIGKILL)
        result = run.wait(100)
    assert result.statistics.tables[0].examples == 30 * 48


def test_all_seats_hear_of_new_shards(tmp_path: Path) -> None:
    with begun(epochs=12, run_dir=tmp_path / "run", checkpoint_every=3) as run:
        os.kill(run._handle.pids()["shard 0"], signal.SIGKILL)
        result = run.wait()
    assert "recovered" in {event.kind for event in result.events}
    alike(result, trained(learners=2, epochs=12, engine="sim"))


def test_groups_publish_through_a_tree_of_processes() -> None:
    alike(
        trained(learners=2, group=2, plan={"4": "model"}, topology="tree:2"),
        trained(learners=2, engine="sim"),
    )


@pytest.mark.parametrize("group", [1, 4])
def test_a_run_goes_on_with_another_number_of_seats_and_shards(group: int, tmp_path: Path) -> None:
    two: dict[str, Any] = {"learners": 2, "topology": "servers:2"}
    trained(group=2, plan={"4": "model"}, epochs=1, run_dir=tmp_path / "run", **two)
    plan = {"0": "model", "4": "rows"} if group > 1 else None
    again = trained(group=group, plan=plan, resume=tmp_path / "run", **{**two, "topology": "servers:3"})
    alike(again, trained(engine="sim", learners=2))


# -- simulated -----------------------------------------------------------------------------------------------

FREE = Cluster(compute=Compute(base=0.0, per_example=0.1))
CARDS = Cluster(compute=Compute(base=0.2, per_example=0.01), card=Link(latency=1e-3, bandwidth=1e5))


@pytest.mark.parametrize("topology", ["servers:1", "tree:2"])
def test_a_simulated_group_is_one_learner_that_takes_a_part_of_the_time(topology: str) -> None:
    options: dict[str, Any] = {"learners": 2, "topology": topology}
    alone = trained(engine=sl.Sim(FREE), **options)
    group = trained(engine=sl.Sim(FREE), group=4, plan={"0": "spatial", "4": "model"}, **options)
    assert alone.seconds == pytest.approx(96 / 2 * 0.1)
    assert group.seconds == pytest.approx(alone.seconds / 4, rel=0.05)  # 5 classes are cut unevenly
    assert group.updates == alone.updates and group.gradients == alone.gradients
    for name, tensor in alone.state_dict().items():
        assert torch.equal(group.state_dict()[name], tensor)


@pytest.mark.parametrize("plan", ["data", {"4": "model"}, "auto"])
def test_a_simulated_groups_step_takes_what_its_plan_says(plan: Any) -> None:
    """But for what replicas send to the table, half of it each, which the simulator sends itself."""
    grouped = groups.Grouped(
        network(), Backprop(lambda model, batch: model(batch[0]).sum()), TensorDataset(X, Y), None, 8, 1
    )
    cluster = groups.simulated(sl.Sim(CARDS), 2, plan, grouped).cluster
    found = groups.cut_over(2, plan, grouped, cluster=CARDS)
    assert found is not None
    rest = {name: "data" for name in ("0", "1", "4", "6") if name not in found.choices}
    priced = sl.plan(network(), X[:8], CARDS, 2, given={**found.choices, **rest})
    copies = [row.parameters for row in priced.rows if row.choice == "data" and row.parameters]
    table = sum(1e-3 + count * 8 / 1e5 for count in copies)
    assert cluster.compute.seconds(8) == pytest.approx(priced.seconds - table)
    run = trained(engine=sl.Sim(CARDS), group=2, plan=plan, epochs=1)
    assert run.seconds == trained(engine=sl.Sim(cluster), epochs=1).seconds > 6 * cluster.compute.seconds(8)


def test_a_dense_layer_cut_by_its_inputs_is_simulated() -> None:
    rows = trained(engine=sl.Sim(CARDS), group=2, plan={"4": "rows"}, epochs=1)
    assert rows.seconds < trained(engine=sl.Sim(CARDS), group=2, plan="data", epochs=1).seconds


def test_functions_do_not_run_in_simulated_seats() -> None:
    with pytest.raises(NotYetError, match=r"group=2 in launch: the simulator has no seats"):
        sl.launch(looked, learners=1, group=2, engine="sim")


# -- refusals ------------------------------------------------------------------------------------------------

FOREIGN = sl.plan(nn.Sequential(nn.Linear(6, 5)), torch.zeros(8, 6), group=2)
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no group": ({"group": 0}, UsageError, r"group must be a whole number of at least 1, got 0"),
    "a plan for one": ({"plan": "data"}, UsageError, r"give group= of at least 2"),
    "all-reduce": ({"group": 2, "topology": "allreduce"}, UsageError, r"group=2 over all-reduce: groups publish to servers"),
    "a table on a card": ({"group": 2, "table_device": "cuda:0"}, UsageError, r"table_device='cuda:0': seats share a table in the host's memory"),
    "all-reduce, simulated": ({"group": 2, "engine": "sim", "topology": "allreduce"}, UsageError, r"group=2 over all-reduce: groups publish to servers"),
    "a layer that is none": ({"group": 2, "plan": {"fc": "model"}}, UsageError, r"no layer is called 'fc'"),
    "a layer that cannot": ({"group": 2, "plan": {"4": "spatial"}}, UsageError, r"'4' \(Linear\) cannot be cut as 'spatial'"),
    "more seats than places": ({"group": 8, "plan": {"0": "model"}}, UsageError, r"has 4 places in dimension 1, fewer than the 8 processes"),
    "more seats than examples": ({"group": 3, "batch_size": 2, "plan": "data"}, UsageError, r"2 of them are less than a group of 3"),
    "a plan for another model": ({"group": 2, "plan": FOREIGN}, UsageError, r"the plan is for another model: its layer '0' has 35 parameters, here it has 112"),
    "a plan for another group": ({"group": 3, "plan": FOREIGN}, UsageError, r"the plan is for a group of 2, this one has 3"),
    "a plan that is not there": ({"group": 2, "plan": "no/plan.json"}, UsageError, r"no/plan.json is no plan: .*No such file"),
    "a gradient of one's own": ({"group": 2, "loss": None, "gradient": lambda model, batch: model(batch[0]).sum()}, UsageError, r"group=2: a gradient= of your own does not know"),
    "no whole model": (
        {"group": 2, "loss": None, "objective": lambda model, batch: model[0](batch[0]).sum()}, UsageError, r"the objective has to call model\(...\) as a whole"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_before_the_start(case: str) -> None:
    options, kind, words = REFUSED[case]
    settings: dict[str, Any] = {
        "loss": F.cross_entropy,
        "optimizer": SGD,
        "learners": 1,
        "batch_size": 8,
        **options,
    }
    with pytest.raises(kind, match=words):
        sl.train(network(), (X, Y), **settings)


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_what_does_not_fit_into_the_memory_is_refused_before_the_start(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a seat: 16 of 32 places of a layer's weights and as many gradients, and what is read of a batch of 8."""
    free = {"cpu": 10**9, "cuda:0": 10**9, "cuda:1": 10**9, device: 100_000}
    monkeypatch.setattr(groups, "free_memory", free.get)
    model, data = nn.Sequential(nn.Linear(1000, 32)), TensorDataset(torch.zeros(16, 1000))
    way = Backprop(lambda model, batch: model(batch[0]).sum())
    grouped = groups.Grouped(model, way, data, None, 8, 2)
    cards = ("cuda:0", "cuda:1") if device != "cpu" else ("cpu",)
    seat, table = 2 * 16 * 1001 * 4 + 8 * 1000 * 4, 5 * 32 * 1001 * 4
    needed = 2 * seat if device != "cpu" else 4 * seat + table
    words = (
        rf"group=2: a seat needs at least {seat / 1e3:.1f} kB \(.*\), the table {table / 1e3:.1f} kB, together "
        rf"{needed / 1e3 if needed < 10**6 else needed / 1e6:.1f} .B on {device}, and 100.0 kB are free there"
    )
    with pytest.raises(UsageError, match=words):
        groups.cut_over(2, {"0": "model"}, grouped, devices=cards)
    free[device] = needed
    assert groups.cut_over(2, {"0": "model"}, grouped, devices=cards)
