"""All-reduce with real processes: the numbers of one process with the joint batch, the same bits on all learners (A1-A6, A8)."""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, lr_scheduler
from torch.utils.data import IterableDataset, TensorDataset

import syncline as sl
from syncline.cluster import Cluster, Compute, Link
from syncline.errors import LayoutError, RunError, UsageError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

State = dict[str, Tensor]
MOMENTUM = partial(SGD, lr=0.1, momentum=0.9)
SMALL = "allreduce:layerwise,bucket=60b"
WAYS = ["allreduce", SMALL, SMALL + ",apply=reverse", SMALL + ",apply=arrival"]


def net(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 4)).to(dtype)


def points(count: int = 50, dtype: torch.dtype = torch.float64) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 12, generator=generator, dtype=dtype)
    return TensorDataset(x, torch.randint(4, (count,), generator=generator))


def joint(
    model: nn.Module,
    data: TensorDataset,
    factory: Callable[..., torch.optim.Optimizer],
    *,
    batch: int,
    epochs: int,
    clip: float | None = None,
    schedule: Callable[..., Any] | None = None,
) -> State:
    """One process with the joint batch."""
    opt = factory(model.parameters())
    scheduler = schedule(opt) if schedule else None
    for epoch in range(epochs):
        order = sl.epoch_order(len(data), seed=0, epoch=epoch)
        for part in order.split(batch):
            opt.zero_grad()
            x, y = data[part]
            F.cross_entropy(model(x), y).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            opt.step()
        if scheduler is not None:
            scheduler.step()
    return model.state_dict()


def train(topology: str, *, learners: int = 2, **options: Any) -> sl.Result:
    given: dict[str, Any] = {
        "sync": "hardsync",
        "batch_size": 4,
        "epochs": 3,
        "optimizer": MOMENTUM,
        **options,
    }
    model, data = given.pop("model", None) or net(), given.pop("data", None) or points()
    if "global_batch_size" in given:
        del given["batch_size"]
    loss = given.pop("loss", F.cross_entropy)
    return sl.train(model, data, loss=loss, topology=topology, learners=learners, **given)


def close(got: State, wanted: State, tolerance: float = 1e-9) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.allclose(got[name], value, rtol=tolerance, atol=tolerance), name


def same(got: State, wanted: State) -> None:
    assert got.keys() == wanted.keys()
    assert not [name for name in wanted if not torch.equal(got[name], wanted[name])]


# -- synchronous and layer-wise ------------------------------------------------------------------------------


@pytest.mark.sweep(6)
@pytest.mark.parametrize("factory", [MOMENTUM, partial(Adam, lr=0.01)], ids=["momentum", "Adam"])
@pytest.mark.parametrize("learners", [2, 3])
@pytest.mark.parametrize("topology", WAYS)
def test_as_one_process_with_the_joint_batch(topology: str, learners: int, factory: Any) -> None:
    """50 examples: with three learners of four the last round has examples for one of them."""
    got = train(topology, learners=learners, optimizer=factory)
    close(got.state_dict(), joint(net(), points(), factory, batch=4 * learners, epochs=3))
    rounds = -(-50 // (4 * learners))
    assert got.version == got.updates == 3 * rounds and got.gradients == 3 * 13
    assert got.staleness.histogram == {0: 39} and got.statistics.tables[0].examples == 150
    assert [record.version for record in got.history] == [rounds, 2 * rounds, 3 * rounds]


def test_as_servers_in_lockstep() -> None:
    servers, allreduce = train("servers", learners=3), train("allreduce", learners=3)
    close(allreduce.state_dict(), servers.state_dict())
    for a, b in zip(servers.history, allreduce.history, strict=True):
        assert (a.epoch, a.version, a.examples) == (b.epoch, b.version, b.examples)
        assert a.loss == pytest.approx(b.loss) and a.losses == pytest.approx(b.losses)


def test_two_learners_give_the_same_bits_in_every_way() -> None:
    states = [
        train(topology, model=net(torch.float32), data=points(dtype=torch.float32)) for topology in WAYS
    ]
    for other in states[1:]:
        same(other.state_dict(), states[0].state_dict())


def loop(session: sl.Session, topology: str, after: bool) -> State:
    model = net(torch.float32)
    opt = session.optimizer(model, MOMENTUM)
    for x, y in session.loader(points(70, torch.float32), batch_size=4):
        opt.zero_grad()
        if after:
            with session.accumulate():
                F.cross_entropy(model(x), y).backward()
        else:
            F.cross_entropy(model(x), y).backward()
        opt.step()
    return model.state_dict()


@pytest.mark.parametrize("topology", WAYS[1:])
def test_layers_reduced_in_backward_are_the_same_bits_as_after_it(topology: str) -> None:
    during, after = (
        sl.launch(loop, topology, after, learners=3, topology=topology) for after in (False, True)
    )
    same(during.returned[0], after.returned[0])
    for other in (*during.returned, *after.returned):
        same(other, during.returned[0])


@pytest.mark.parametrize("topology", WAYS)
def test_one_learner_is_plain_pytorch_to_the_bit(topology: str) -> None:
    got = train(topology, learners=1, model=net(torch.float32), data=points(dtype=torch.float32))
    wanted = joint(net(torch.float32), points(dtype=torch.float32), MOMENTUM, batch=4, epochs=3)
    same(got.state_dict(), wanted)


@pytest.mark.parametrize("topology", WAYS[:2])
def test_clipping_and_schedule(topology: str) -> None:
    schedule = partial(lr_scheduler.StepLR, step_size=1, gamma=0.5)
    got = train(topology, clip_norm=0.05, schedule=schedule)
    wanted = joint(net(), points(), MOMENTUM, batch=8, epochs=3, clip=0.05, schedule=schedule)
    close(got.state_dict(), wanted)


def test_a_reference_batch_scales_the_rate() -> None:
    got = train("allreduce", sync="hardsync:reference_batch=2", optimizer=partial(SGD, lr=0.1))
    close(got.state_dict(), joint(net(), points(), partial(SGD, lr=0.1 * 2.0), batch=8, epochs=3))


@pytest.mark.parametrize("topology", WAYS[:2])
def test_global_batches_that_do_not_divide(topology: str) -> None:
    got = train(topology, learners=3, global_batch_size=10)
    close(got.state_dict(), joint(net(), points(), MOMENTUM, batch=10, epochs=3))
    assert got.version == 15


def test_fixed_parts_are_disjoint() -> None:
    seen = sl.launch(parts, learners=3, topology="allreduce").returned
    for epoch in range(2):
        assert sorted(each for own in seen for each in own[epoch]) == list(range(20))
    assert [sorted(own[0]) for own in seen] == [sorted(own[1]) for own in seen]


def parts(session: sl.Session) -> list[list[int]]:
    model = nn.Linear(1, 1)
    opt = session.optimizer(model, MOMENTUM)
    loader = session.loader(TensorDataset(torch.arange(20.0)), batch_size=3, policy="partition")
    epochs: list[list[int]] = []
    for _ in range(2):
        epochs.append([])
        for (x,) in loader:
            if not session.repeating:  # type: ignore[attr-defined]
                epochs[-1] += [int(value) for value in x]
            opt.zero_grad()
            model(x.unsqueeze(1)).mean().backward()
            opt.step()
    return epochs


class Stream(IterableDataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        x, y = points(self.count).tensors
        yield from zip(x, y, strict=True)


@pytest.mark.parametrize("sync", ["hardsync", "delayed:2"])
def test_streams_are_split_by_rank(sync: str) -> None:
    """22 items over three learners in batches of two: 8, 7 and 7 items, so four batches each, the last ones shorter."""
    got = train("allreduce", learners=3, data=Stream(22), batch_size=2, epochs=2, sync=sync)
    assert got.statistics.tables[0].examples == 44 and got.version == 8
    assert len(got.history) == 2


# -- delayed -------------------------------------------------------------------------------------------------


def delayed(model: nn.Module, data: TensorDataset, delay: int, epochs: int) -> State:
    """One process with two learners' gradients, applied k steps later."""
    opt = MOMENTUM(model.parameters())
    waiting: list[list[Tensor]] = []

    def apply() -> None:
        for parameter, gradient in zip(model.parameters(), waiting.pop(0), strict=True):
            parameter.grad = gradient
        opt.step()

    for epoch in range(epochs):
        order = sl.epoch_order(len(data), seed=0, epoch=epoch)
        for both in order.split(8):
            sums = [torch.zeros_like(parameter) for parameter in model.parameters()]
            for part in both.split(4):
                x, y = data[part]
                loss = F.cross_entropy(model(x), y)
                for total, gradient in zip(
                    sums, torch.autograd.grad(loss, list(model.parameters())), strict=True
                ):
                    total += gradient / 2
            waiting.append(sums)
            if len(waiting) > delay:
                apply()
    while waiting:
        apply()
    return model.state_dict()


@pytest.mark.parametrize("topology", WAYS[:2])
@pytest.mark.parametrize("delay", [1, 2, 3])
def test_delayed_by_k(topology: str, delay: int) -> None:
    data = points(48, torch.float32)
    got = train(topology, model=net(torch.float32), data=data, sync=f"delayed:{delay}")
    same(got.state_dict(), delayed(net(torch.float32), data, delay, 3))
    assert got.version == 18
    sigmas = [min(t, delay) for t in range(18)]
    assert got.staleness.histogram == {s: 2 * sigmas.count(s) for s in set(sigmas)}
    assert [record.version for record in got.history] == [6, 12, 18]


def test_delayed_as_servers_with_a_schedule() -> None:
    options = {"sync": "delayed:2", "schedule": partial(lr_scheduler.StepLR, step_size=1, gamma=0.5)}
    close(train("allreduce", **options).state_dict(), train("servers", **options).state_dict())


@pytest.mark.parametrize("topology", WAYS[:2])
def test_a_delay_that_adapts(topology: str, tmp_path: Path) -> None:
    """One learner sleeps in every step, so that the other waits: the delay grows to its limit, and stays there."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        first = tmp_path / "first"
        with contextlib.suppress(FileExistsError), first.open("x") as file:
            file.write(str(os.getpid()))
        if first.read_text() == str(os.getpid()):
            time.sleep(0.01)
        return F.cross_entropy(output, target)

    got = train(topology, sync="delayed:auto<=3", epochs=12, loss=loss)
    assert got.version == 12 * 7 and got.gradients == 12 * 13
    assert got.staleness.max == 3
    assert [event.details["delay"] for event in got.events if event.kind == "delay"] == [2, 3]


def test_steps_end_exactly() -> None:
    for sync in ("hardsync", "delayed:2"):
        got = train("allreduce", sync=sync, data=points(48), epochs=None, steps=9)
        assert got.version == got.updates == 9 and got.gradients == 18


def test_a_course_of_dials() -> None:
    got = train("allreduce", sync="hardsync until 1 then delayed:1", data=points(48))
    assert got.version == 18 and set(got.staleness.histogram) == {0, 1}
    assert got.staleness.histogram[1] == 2 * 11, "the first of the second epoch reads all of the first"


# -- models and loops as users have them ---------------------------------------------------------------------


class Odd(nn.Module):
    """Tied, frozen and unused parameters, one that only learner 0 uses, two dtypes, batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first = nn.Linear(12, 12)
        self.tied = self.first
        self.norm = nn.BatchNorm1d(12)
        self.short = nn.Linear(12, 12).to(torch.bfloat16)
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.sometimes = nn.Parameter(torch.ones(12))
        self.last = nn.Linear(12, 4)

    def forward(self, x: Tensor, use: bool) -> Tensor:
        x = self.frozen(self.norm(self.tied(torch.tanh(self.first(x)))))
        x = self.short(x.to(torch.bfloat16)).float()
        return self.last(x * self.sometimes if use else x)


def odd(session: sl.Session) -> tuple[State, list[bool], dict[str, Any]]:
    model = Odd()
    opt = session.optimizer(model, partial(SGD, lr=0.05, momentum=0.9))
    for x, y in session.loader(points(30, torch.float32), batch_size=5):
        opt.zero_grad()
        F.cross_entropy(model(x, session.rank == 0), y).backward()
        opt.step()
    shown = [parameter.grad is None for parameter in model.unused.parameters()]
    return model.state_dict(), shown, opt.state_dict()


@pytest.mark.parametrize("topology", WAYS)
def test_odd_models(topology: str) -> None:
    got = sl.launch(odd, learners=2, topology=topology)
    (first, unused, state), (second, _, _) = got.returned
    parameters = dict(Odd().named_parameters())
    for name in parameters:
        assert torch.equal(first[name], second[name]), name
    start = Odd().state_dict()
    assert all(unused) and torch.equal(first["unused.weight"], start["unused.weight"])
    assert torch.equal(first["frozen.weight"], start["frozen.weight"])
    assert not torch.equal(first["sometimes"], start["sometimes"])
    assert len(state["state"]) == len(parameters) - 4, "unused and frozen ones have no state"
    mean = (first["norm.running_mean"] + second["norm.running_mean"]) / 2
    assert torch.equal(got.state_dict()["norm.running_mean"], mean)
    assert torch.equal(got.state_dict()["tied.weight"], first["first.weight"])


def accumulating(session: sl.Session) -> State:
    model = net()
    opt = session.optimizer(model, MOMENTUM)
    for number, (x, y) in enumerate(session.loader(points(48), batch_size=4)):
        loss = F.cross_entropy(model(x), y) / 2
        if number % 2 == 0:
            with session.accumulate():
                loss.backward()
        else:
            loss.backward()
            opt.step()
            opt.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("topology", ["servers", *WAYS, "allreduce:layerwise"])
def test_accumulation(topology: str) -> None:
    got = sl.launch(accumulating, learners=2, topology=topology).state_dict()
    model, opt = net(), None
    opt = MOMENTUM(model.parameters())
    for part in sl.epoch_order(48, seed=0, epoch=0).split(16):
        opt.zero_grad()
        x, y = points(48)[part]
        F.cross_entropy(model(x), y).backward()
        opt.step()
    close(got, model.state_dict())


def two_backwards(session: sl.Session) -> State:
    model = net()
    opt = session.optimizer(model, MOMENTUM)
    for x, y in session.loader(points(48), batch_size=4):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        model[0](x).square().mean().backward()
        opt.step()
    return model.state_dict()


@pytest.mark.parametrize("topology", WAYS)
def test_two_backwards_for_one_step(topology: str) -> None:
    got = sl.launch(two_backwards, learners=2, topology=topology).state_dict()
    close(got, sl.launch(two_backwards, learners=2, topology="servers").state_dict())


def two_optimizers(session: sl.Session) -> tuple[State, State]:
    one, two = net(), net()
    opts = [session.optimizer(model, MOMENTUM) for model in (one, two)]
    for x, y in session.loader(points(30), batch_size=4):
        for model, opt in zip((one, two), opts, strict=True):
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
    return one.state_dict(), two.state_dict()


def test_several_optimizers_with_an_uneven_end() -> None:
    got = sl.launch(two_optimizers, learners=3, topology="allreduce")
    wanted = joint(net(), points(30), MOMENTUM, batch=12, epochs=1)
    for table in (0, 1):
        close(got.state_dict(table), wanted)


def autocast(session: sl.Session) -> State:
    model = net(torch.float32)
    opt = session.optimizer(model, MOMENTUM)
    for x, y in session.loader(points(32, torch.float32), batch_size=4):
        opt.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
    return model.state_dict()


def test_bfloat16_autocast() -> None:
    blocking, layerwise = (sl.launch(autocast, learners=2, topology=topology) for topology in WAYS[:2])
    same(blocking.returned[0], layerwise.returned[1])
    assert blocking.returned[0]["0.weight"].isfinite().all()


def states(session: sl.Session) -> tuple[float, float, float]:
    model = net()
    opt = session.optimizer(model, partial(Adam, lr=0.01))
    for x, y in session.loader(points(16), batch_size=4):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    kept = copy.deepcopy(opt.state_dict())
    opt.load_state_dict(kept)
    opt.param_groups[0]["lr"] = 0.5
    with torch.no_grad():
        model[0].bias.fill_(float(session.rank + 7))
    session.put(model)
    session.log(bias=model[0].bias[0])
    return opt.inner.param_groups[0]["lr"], float(model[0].bias[0]), session.mean(float(session.rank))  # type: ignore[attr-defined]


def test_states_put_mean_and_log() -> None:
    got = sl.launch(states, learners=3, topology="allreduce")
    assert got.returned == [(0.5, 7.0, 1.0)] * 3
    assert sorted((rank, metrics["bias"]) for rank, _, metrics in got.logs) == [(0, 7.0), (1, 7.0), (2, 7.0)]


def hooked(session: sl.Session) -> list[str]:
    model, seen = net(), []
    opt: Any = session.optimizer(model, MOMENTUM)
    opt.hooks.before_forward(lambda _: seen.append("forward"))
    made = opt.hooks.after_gradient(lambda name, _: seen.append(f"made {name}"))
    opt.hooks.before_applying(lambda _: seen.append("applying"))
    opt.hooks.before_parameter(lambda name, _: seen.append(f"apply {name}"))
    for number, (x, y) in enumerate(session.loader(points(16), batch_size=4)):
        if number == 1:
            made.remove()
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    return seen


@pytest.mark.parametrize("topology", WAYS)
def test_hooks(topology: str) -> None:
    (seen, other) = sl.launch(hooked, learners=2, topology=topology).returned
    names = [name for name, _ in net().named_parameters()]
    assert seen[0] == "forward" and sorted(seen[1:7]) == sorted(f"made {name}" for name in names)
    assert seen[7] == "applying" and sorted(seen[8:14]) == sorted(f"apply {name}" for name in names)
    assert seen[14:16] == ["forward", "applying"] and len(other) == 14 + 8


def queued(session: sl.Session) -> tuple[State, list[int]]:
    model, left = net(), []
    opt: Any = session.optimizer(model, MOMENTUM)
    for x, y in session.loader(points(48), batch_size=4):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with opt.applications() as queue:
            queue.take("0.weight").apply()
            left.append(len(queue))
            for part in queue:
                if "4.bias" in part.names:
                    break  # what is left is applied at the end of the block
                part.apply()
    return model.state_dict(), left


@pytest.mark.parametrize("topology", WAYS)
def test_a_queue_hands_out_applications_in_any_order(topology: str) -> None:
    got = sl.launch(queued, learners=2, topology=topology)
    close(got.state_dict(), joint(net(), points(48), MOMENTUM, batch=8, epochs=1))
    assert got.version == 6
    assert set(got.returned[0][1]) == {0 if topology == "allreduce" else 3}


# -- stopping, records, bad input ----------------------------------------------------------------------------


def test_stop_and_statistics() -> None:
    run = train("allreduce", epochs=100_000, wait=False)
    while not (shown := run.statistics()).tables or shown.tables[0].version < 20:
        pass
    assert {process.role for process in shown.processes} == {"learner"} and set(shown.steps) == {0, 1}
    run.stop()
    got = run.wait(30)
    assert got.version >= 20 and got.gradients <= 2 * got.version


def test_a_callback_ends_the_run_and_evaluation_runs_beside() -> None:
    got = train(
        "allreduce:layerwise", epochs=1000, evaluate=points(), callbacks=[lambda record: record.epoch == 2]
    )
    assert len(got.history) >= 3
    assert all(set(record.metrics) == {"loss", "accuracy"} for record in got.history)


def test_a_run_folder(tmp_path: Any) -> None:
    got = train("allreduce", run_dir=tmp_path / "run", evaluate=points())
    assert (tmp_path / "run" / "events.jsonl").exists() and (tmp_path / "run" / "report.html").exists()
    assert got.version == 21


def edits(session: sl.Session) -> None:
    model = net()
    opt = session.optimizer(model, MOMENTUM)
    F.cross_entropy(model(points()[:4][0]), points()[:4][1]).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    opt.step()


def test_gradients_that_are_on_their_way_cannot_be_changed() -> None:
    with pytest.raises(sl.LearnerError, match="was changed between backward and step"):
        sl.launch(edits, learners=2, topology=SMALL + ",apply=reverse")
    assert sl.launch(edits, learners=2, topology=SMALL).version == 1


class Coupled(SGD):
    """Not known to work on some parameters at a time."""


@pytest.mark.parametrize(
    "topology, options, words",
    [
        ("allreduce", {"sync": "softsync:1"}, "a collective waits for everybody"),
        ("allreduce", {"sync": "async"}, "use hardsync, delayed:k"),
        ("allreduce", {"sync": "hardsync until 1 then async"}, "a collective waits for everybody"),
        ("servers", {"sync": "delayed:auto<=2"}, "over all-reduce only"),
        ("allreduce", {"warmstart": 3}, "fixed membership"),
        ("allreduce", {"replace": True}, "fixed membership"),
        ("allreduce", {"on_error": "continue"}, "fixed membership"),
        ("allreduce:layerwise,apply=reverse", {"clip_norm": 1.0}, "use apply=end"),
        ("allreduce:layerwise,apply=arrival", {"sync": "delayed:1"}, "leave apply= out"),
        ("allreduce", {"global_batch_size": 1}, "each needs at least one example"),
        ("servers", {"global_batch_size": 9}, "same batch_size"),
        ("allreduce:fast", {}, "none of blocking, layerwise"),
        ("allreduce:apply=end", {}, "of allreduce:layerwise"),
        ("allreduce:layerwise,bucket=big", {}, "bucket is a size"),
    ],
)
def test_refused_before_any_process_starts(topology: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        train(topology, **options)


def test_refused_in_a_run() -> None:
    with pytest.raises(sl.LearnerError, match="Coupled may not survive") as raised:
        train(SMALL + ",apply=reverse", optimizer=partial(Coupled, lr=0.1))
    assert isinstance(raised.value.__cause__, LayoutError)
    run = train("allreduce", epochs=100_000, wait=False)
    with pytest.raises(UsageError, match="fixed membership"):
        run.add_learners()
    with pytest.raises(UsageError, match="give a course"):
        run.change("hardsync")
    run.stop()
    run.wait()


def apart(session: sl.Session) -> None:
    model = net()
    opt = session.optimizer(model, MOMENTUM)
    F.cross_entropy(model(points()[:4][0]), points()[:4][1]).backward()
    opt.step()
    with torch.no_grad():
        model[0].bias += session.rank


def test_copies_that_differ_at_the_end_are_an_error() -> None:
    with pytest.raises(RunError, match=r"copies of table 0 differ at the end: learner 1"):
        sl.launch(apart, learners=2, topology="allreduce")


def other_model(session: sl.Session) -> None:
    session.optimizer(nn.Linear(2, 2 + session.rank), MOMENTUM)


def test_layouts_that_differ() -> None:
    with pytest.raises(sl.LearnerError, match="learner 0 and learner 1 opened table 0 with different models"):
        sl.launch(other_model, learners=2, topology="allreduce")


# -- the twin ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", ["hardsync", "delayed:2", "hardsync until 1 then delayed:1"])
@pytest.mark.parametrize("topology", WAYS[:2])
def test_the_twin_has_the_same_bits(topology: str, sync: str) -> None:
    options: dict[str, Any] = {"model": net(torch.float32), "data": points(dtype=torch.float32), "sync": sync}
    local, twin = (
        train(topology, engine=engine, evaluate=points(dtype=torch.float32), **options)
        for engine in ("local", "sim")
    )
    same(twin.state_dict(), local.state_dict())
    assert twin.staleness == local.staleness and twin.gradients == local.gradients
    for a, b in zip(local.history, twin.history, strict=True):
        assert (a.version, a.examples, a.loss, a.metrics) == (b.version, b.examples, b.loss, b.metrics)


def test_the_twin_hides_communication_behind_computation() -> None:
    """24 gradients of one second, reductions of half a second: visible, behind backward's later layers, or not at all."""

    def seconds(topology: str, sync: str = "hardsync") -> float:
        link = Link(bandwidth=7200.0)
        engine = sl.Sim(Cluster(compute=Compute(base=1.0), card=link, memory=link))
        return train(topology, engine=engine, sync=sync, data=points(96), epochs=2, learners=2).seconds

    blocking, layerwise = seconds("allreduce"), seconds("allreduce:layerwise,bucket=60b")
    delayed = seconds("allreduce", "delayed:1")
    assert delayed < layerwise < blocking
    assert delayed == pytest.approx(24, abs=1.5) and blocking == pytest.approx(36, abs=1.5)


def test_a_simulated_delay_adapts_to_a_slow_network() -> None:
    slow = sl.Sim(compute=1.0, transfer=2.5, latency=0.0)
    got = train("allreduce", engine=slow, sync="delayed:auto<=4", epochs=10)
    assert [event.details["delay"] for event in got.events if event.kind == "delay"][:1] == [2]
    assert 2 <= got.staleness.max <= 4
    fast = train("allreduce", engine=sl.Sim(compute=1.0, transfer=0.01), sync="delayed:auto<=4", epochs=10)
    assert fast.staleness.max == 1


def test_a_simulated_learner_that_is_lost_or_leaves_early() -> None:
    with pytest.raises(RunError, match="learner 1 is lost: killed by the script"):
        train("allreduce", engine=sl.Sim(script="kill learner 1 at version 5"))
    with pytest.raises(
        RunError, match="learner 1 returned after 3 steps while learner 0 is at a further step"
    ):
        sl.launch(unequal, topology="allreduce", engine="sim")


def unequal(session: sl.Session) -> None:
    model = net()
    opt = session.optimizer(model, MOMENTUM)
    for _ in range(5 - 2 * session.rank):
        opt.zero_grad()
        model(points()[:4][0]).sum().backward()
        opt.step()
