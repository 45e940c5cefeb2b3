"""What is hardly meant is said, once: as a Python warning, in the run folder, by every engine."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, DistributedSampler, Subset, random_split

import syncline as sl
from syncline.errors import LostWarning, SynclineWarning
from syncline.report import read_run
from syncline.report.html_page import page
from tests.integration import small_runs
from tests.integration.small_runs import launched, points, step

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ENGINES = ["local", "sim"]
engines = pytest.mark.parametrize("engine", ENGINES)
WAYS = [("local", "servers"), ("sim", "servers"), ("local", "allreduce"), ("sim", "allreduce")]
ways = pytest.mark.parametrize("engine, topology", WAYS)


class Said(list[str]):
    """Texts of the warnings of a run."""

    def about(self, words: str) -> list[str]:
        return [text for text in self if words in text]


@contextmanager
def hearing() -> Any:
    said = Said()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    assert all(issubclass(each.category, SynclineWarning) for each in caught), [
        str(e.message) for e in caught
    ]
    said += [str(each.message) for each in caught]


def lines(folder: Path) -> list[str]:
    """Warnings as the run folder has them."""
    return [each["what"] for each in read_run(folder).warnings]


# -- session.mean --------------------------------------------------------------------------------------------


def meets(session: sl.Session, calls: dict[int, int], steps: int) -> None:
    """Each rank calls session.mean in so many of its steps."""
    model = nn.Linear(4, 1)
    optimizer = session.optimizer(model, partial(SGD, lr=0.01))
    for number in range(steps):
        step(model, optimizer, torch.ones(2, 4))
        if number < calls.get(session.rank, 0):
            session.mean(1.0)


@engines
def test_a_mean_that_one_learner_alone_calls_is_said(engine: str) -> None:
    with hearing() as said:
        result = launched(meets, {0: 10}, 10, learners=2, sync="hardsync", engine=engine)
    assert result.updates == 19  # the first together, then each alone
    (text,) = said
    assert re.search(r"learner 1 has returned after [89] steps while learners \[0\] wait in it", text)
    assert "Every learner must call it equally often" in text


@engines
def test_in_lockstep_it_is_said_while_the_other_still_goes_on(engine: str) -> None:
    with hearing() as said:
        launched(meets, {0: 1}, 30, learners=2, sync="hardsync", engine=engine)
    (text,) = said
    assert "learner 1 has made 10 steps while learners [0] wait in it" in text


@engines
@pytest.mark.parametrize("sync", ["hardsync", "async"])
def test_equal_loops_that_meet_say_nothing(engine: str, sync: str) -> None:
    with hearing() as said:
        launched(meets, {0: 9, 1: 9, 2: 9}, 12, learners=3, sync=sync, engine=engine)
    assert said == []


def meets_until_stopped(session: sl.Session) -> None:
    model = nn.Linear(4, 1)
    optimizer = session.optimizer(model, partial(SGD, lr=0.01))
    for x, _ in iter(lambda: (torch.ones(2, 4), 0), None):
        step(model, optimizer, x)
        session.mean(1.0)


@engines
@pytest.mark.parametrize("sync", ["hardsync", "async"])
def test_a_run_that_is_stopped_says_nothing(engine: str, sync: str) -> None:
    script = "stop at version 12"
    with hearing() as said:
        if engine == "sim":
            launched(meets_until_stopped, learners=3, sync=sync, engine=sl.Sim(script=script))
        else:
            launched(meets_until_stopped, learners=3, sync=sync, engine=engine, script=script)
    assert said == []


# -- plain optimizers ----------------------------------------------------------------------------------------


def plainly(session: sl.Session) -> None:
    model = nn.Linear(4, 1)
    optimizer = SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        step(model, optimizer, torch.ones(2, 4))


@ways
def test_a_plain_optimizer_in_place_of_a_table_is_said(engine: str, topology: str) -> None:
    with hearing() as said:
        result = launched(plainly, learners=2, engine=engine, topology=topology)
    assert result.updates == 0
    (text,) = said
    assert "stepped a plain SGD and opened no table" in text and "session.optimizer(model, factory)" in text


def beside(session: sl.Session, same: bool) -> None:
    model, other = nn.Linear(4, 1), nn.Linear(4, 1)
    optimizer = session.optimizer(model, partial(SGD, lr=0.01))
    plain = SGD((model if same else other).parameters(), lr=0.01)
    for _ in range(3):
        step(model, optimizer, torch.ones(2, 4))
        step(model if same else other, plain, torch.ones(2, 4))


@ways
def test_one_beside_a_table_is_said_once(engine: str, topology: str) -> None:
    for same, words in ((False, "is this learner's own copy"), (True, "which the next read overwrites")):
        with hearing() as said:
            launched(beside, same, learners=2, engine=engine, topology=topology)
        (text,) = said.about("steps a plain SGD beside session.optimizer's")
        assert words in text


class Around(Optimizer):
    """Steps a table, and leaves the weights alone."""

    def __init__(self, table: Optimizer) -> None:
        super().__init__(table.param_groups, {})
        self.table = table

    def step(self, closure: Any = None) -> None:
        self.table.step()


def first_alone(session: sl.Session) -> None:
    """A plain optimizer before there is a table, and one around a table, are as they should be."""
    plainly(session)
    model = nn.Linear(4, 1)
    optimizer = Around(session.optimizer(model, partial(SGD, lr=0.01)))
    for _ in range(3):
        step(model, optimizer, torch.ones(2, 4))


@ways
def test_steps_before_a_table_and_around_one_are_nothing_to_say(engine: str, topology: str) -> None:
    with hearing() as said:
        assert launched(first_alone, learners=2, engine=engine, topology=topology).updates > 0
    assert said == []


# -- data ----------------------------------------------------------------------------------------------------


def reads(session: sl.Session, kind: str) -> None:
    """Train on batches of a DataLoader, or use one for something else."""
    data, rank, learners = points(32), session.rank, session.learners
    model = nn.Linear(4, 2)
    optimizer = session.optimizer(model, partial(SGD, lr=0.01))
    sampler = DistributedSampler(data, learners, rank) if kind == "distributed sampler" else None
    if kind == "own subset":
        batches = DataLoader(Subset(data, range(rank, 32, learners)), batch_size=4)
    elif kind == "same subset":
        batches = DataLoader(random_split(data, [16, 16], torch.Generator().manual_seed(0))[0], batch_size=4)
    else:
        batches = DataLoader(data, batch_size=4, sampler=sampler)
    feed = session.loader(data, batch_size=4) if kind == "beside" else batches
    made = [(torch.ones(4, 4), torch.zeros(4).long())] * 6
    for _ in range(3):
        for x, y in made if "validation" in kind else feed:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        with torch.set_grad_enabled(kind == "validation with gradients"):
            for x, _ in batches if kind == "beside" or "validation" in kind else ():
                model(x)


READERS = [
    ("all", 2, 1),
    ("all", 1, 0),
    ("same subset", 3, 1),
    ("own subset", 2, 0),
    ("distributed sampler", 2, 0),
    ("beside", 2, 0),
    ("validation", 2, 0),
    ("validation with gradients", 2, 0),
]


@pytest.mark.parametrize(
    "engine, topology, kind, learners, count",
    [(*way, *case) for way in WAYS for case in (READERS if way[0] == "sim" else READERS[:1])],
)
def test_warning_of_data_that_every_learner_reads(
    engine: str, topology: str, kind: str, learners: int, count: int
) -> None:
    with hearing() as said:
        launched(reads, kind, learners=learners, sync="hardsync", engine=engine, topology=topology)
    assert len(said) == len(said.about("session.loader(dataset, batch_size=4)")) == count


# -- writes --------------------------------------------------------------------------------------------------


def clamped(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.01, 0.01)


def clamped_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.01, 0.01)


def loaded(model: nn.Module) -> None:
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})


def normed(model: nn.Module) -> None:
    model.weight.data /= model.weight.data.norm()  # type: ignore[operator, union-attr]


def writes(session: sl.Session, write: Callable[[nn.Module], None], *, put: bool, steps: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = session.optimizer(model, partial(SGD, lr=0.1))
    for _ in range(steps):
        step(model, optimizer, torch.ones(2, 4))
        write(model)
        if put:
            session.put(model)


@engines
@pytest.mark.parametrize("write", [clamped, clamped_data, loaded, normed])
def test_weights_that_are_changed_in_place_are_said_over_servers(
    engine: str, write: Callable[[nn.Module], None]
) -> None:
    with hearing() as said:
        launched(writes, write, put=False, steps=4, learners=2, engine=engine, sync="hardsync")
    (text,) = said
    assert "'weight' was changed in place between two steps" in text and "session.put(model)" in text


@engines
@pytest.mark.parametrize("write", [clamped, clamped_data, loaded, normed])
def test_with_put_they_are_global_and_nothing_is_said(
    engine: str, write: Callable[[nn.Module], None]
) -> None:
    with hearing() as said:
        launched(writes, write, put=True, steps=4, learners=1, engine=engine)
    assert said == []


@pytest.mark.parametrize("sync", small_runs.PRESETS)
def test_nobody_is_blamed_for_what_reads_and_local_steps_change(sync: str) -> None:
    with hearing() as said:
        launched(reads_only, learners=3, engine="local", sync=sync, topology="servers:2")
    assert said == []


def reads_only(session: sl.Session) -> None:
    """Loaders that wait, meetings, states that are looked at, batch statistics, parameters that are none of the loss."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    model.spare = nn.Parameter(torch.zeros(0))
    optimizer = session.optimizer(model, partial(SGD, lr=0.05, momentum=0.9))
    loader = session.loader(points(90), batch_size=4)
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        session.mean(1.0)
        optimizer.state_dict()


# -- losses --------------------------------------------------------------------------------------------------


def bad(model: nn.Module, batch: Any, *, value: float) -> Tensor:
    return model(batch[0]).mean() * value


def trained(value: float, **options: Any) -> sl.Result:
    return small_runs.train(
        data=points(48),
        loss=None,
        objective=partial(bad, value=value),
        learners=2,
        epochs=3,
        sync="hardsync",
        **options,
    )


@ways
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_losses_that_are_not_finite_are_said_once(
    engine: str, topology: str, value: float, tmp_path: Path
) -> None:
    with hearing() as said:
        result = trained(value, engine=engine, topology=topology, run_dir=tmp_path / "run")
    assert len(result.history) == 3
    (text,) = said
    assert "epoch 1" in text and ("is nan" in text or "inf" in text) and "said once" in text
    assert lines(tmp_path / "run") == [text]


def reports(session: sl.Session, losses: list[float]) -> None:
    model = nn.Linear(4, 1)
    optimizer = session.optimizer(model, partial(SGD, lr=0.01))
    for loss in losses:
        if session.rank == 1:
            session.loss = loss
        step(model, optimizer, torch.ones(2, 4))


@ways
def test_an_own_loop_that_reports_one_is_told_where(engine: str, topology: str) -> None:
    with hearing() as said:
        launched(
            reports, [1.0, 2.0, float("nan"), float("inf")], learners=2, engine=engine, topology=topology
        )
    (text,) = said
    assert text.startswith("learner 1: the loss of its step 3 is nan")


@ways
def test_an_own_loop_that_reports_none_is_told_nothing(engine: str, topology: str) -> None:
    with hearing() as said:
        launched(reports, [1.0, 2.0], learners=1, engine=engine, topology=topology)
    assert said == []


# -- lost learners -------------------------------------------------------------------------------------------


def killed(engine: str, **options: Any) -> sl.Result:
    script = "kill learner 1 at version 6"
    if engine == "sim":
        return small_runs.train(
            data=points(480), learners=3, epochs=2, engine=sl.Sim(script=script), **options
        )
    return small_runs.start(points(960), script, **options).wait(small_runs.PATIENCE)


@engines
def test_a_lost_learner_is_a_warning_that_says_what_goes_on(engine: str, tmp_path: Path) -> None:
    with pytest.warns(LostWarning) as caught:
        result = killed(engine, run_dir=tmp_path / "run")
    (text,) = [str(each.message) for each in caught]
    assert text.startswith("learner 1 lost: ") and text.endswith("; 2 other learners go on")
    assert ("SIGKILL" if engine == "local" else "killed by the script") in text
    assert [event.kind for event in result.events if event.rank == 1] == ["lost"]
    assert [each["event"] for each in read_run(tmp_path / "run").faults] == [
        "lost"
    ]  # said by an event already


@engines
def test_a_replaced_learner_is_a_warning_too(engine: str) -> None:
    with pytest.warns(LostWarning, match=r"learner 1 lost: .*; another takes its place"):
        killed(engine, replace=True)


def raising(session: sl.Session) -> None:
    model = nn.Linear(4, 1)
    optimizer = session.optimizer(model, partial(SGD, lr=0.01))
    for number in range(5):
        if session.rank == 2 and number == 3:
            raise ValueError("no such thing")
        step(model, optimizer, torch.ones(2, 4))


@engines
def test_a_learner_that_raised_where_the_others_go_on_is_a_warning(engine: str) -> None:
    with pytest.warns(
        LostWarning, match="learner 2 raised ValueError: no such thing; 2 other learners go on"
    ):
        launched(raising, learners=3, engine=engine, on_error="continue", sync="hardsync")


# -- shards that differ --------------------------------------------------------------------------------------


class Norming(Optimizer):
    """Goes by the largest gradient of all its parameters, which it keeps in its group."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "largest": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        group = self.param_groups[0]
        group["largest"] = max([group["largest"], *(float(p.grad.abs().max()) for p in group["params"])])
        for parameter in group["params"]:
            parameter.sub_(parameter.grad, alpha=group["lr"] / (1.0 + group["largest"]))


@engines
def test_shards_whose_optimizers_need_each_others_parameters_are_said(engine: str) -> None:
    def function(session: sl.Session) -> None:
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
        optimizer = session.optimizer(model, Norming)
        for _ in range(3):
            step(model, optimizer, torch.ones(2, 4))

    for topology, count in (("servers:2", 1), ("servers:1", 0), ("servers", 0)):
        with hearing() as said:
            launched(function, learners=1, engine=engine, topology=topology)
        assert len(said) == len(said.about("has other values of 'largest' on shard")) == count


# -- where it is seen ----------------------------------------------------------------------------------------


@engines
def test_the_run_folder_and_its_report_have_the_warnings(engine: str, tmp_path: Path) -> None:
    with hearing() as said:
        launched(plainly, learners=2, engine=engine, run_dir=tmp_path / "run")
    assert lines(tmp_path / "run") == list(said)
    assert "stepped a plain SGD and opened no table" in page(read_run(tmp_path / "run"))
