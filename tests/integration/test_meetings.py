"""`session.mean` with real processes and in the twin (M8): nobody waits for a learner in a meeting, nor a meeting for ever."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

import syncline as sl
from tests.integration.small_runs import launched, step

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ENGINES = ["sim", "local"]
PRESETS = [
    "hardsync",
    "softsync:1",
    "ssp:0",
    "backup:1",
    "delayed:1",
    "downpour:push=2,fetch=3,local_lr=0.1",
    "hardsync until 1 then softsync:1",
]


def launch(
    function: Callable[..., Any], *arguments: Any, engine: str = "sim", script: str = "", **options: Any
) -> sl.Result:
    """With faults played in virtual time, and checked, or on the processes."""
    servers = options.get("topology") != "allreduce"
    chosen = sl.Sim(script=script, check=servers) if engine == "sim" else "local"
    return launched(function, *arguments, engine=chosen, script=script, **options)


def numbers(size: int) -> TensorDataset:
    return TensorDataset(torch.randn(size, 4, generator=torch.Generator().manual_seed(size)))


def odd(session: sl.Session, epochs: int, size: int = 28) -> list[float]:
    """Unequal numbers of batches, some of them in no gradient yet, a loop left early, two loaders; then they meet."""
    model = nn.Linear(4, 2)
    optimizer = session.optimizer(model, partial(SGD, lr=0.1))
    loader, other = (session.loader(numbers(count), batch_size=each) for count, each in ((size, 3), (3, 1)))
    means: list[float] = []
    while not session.ending and loader.epoch < epochs:
        for number, (x,) in enumerate(loader):
            if number % 3 == 1:
                model(x).sum().backward()  # it belongs to the next gradient
                continue
            step(model, optimizer, x)
            if number == 2 and session.rank == 2:
                break
        for (x,) in other:
            step(model, optimizer, x)
        means.append(session.mean(1.0))
    return means


def accounted(result: sl.Result) -> None:
    table = result.statistics.tables[0]
    assert table.pending == 0 and result.staleness.gradients == result.gradients
    assert all(mean == 1.0 for means in result.returned if means for mean in means)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("sync", PRESETS)
def test_nobody_waits_for_who_is_in_a_meeting(sync: str, engine: str) -> None:
    result = launch(odd, 2, learners=4, sync=sync, engine=engine)
    accounted(result)
    assert [len(means) for means in result.returned] == [2, 2, 2, 2]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("sync", ["hardsync", "delayed:1", "ssp:0"])
def test_a_run_that_is_stopped_ends_though_somebody_meets(sync: str, engine: str) -> None:
    result = launch(odd, 100_000, learners=3, sync=sync, engine=engine, script="stop at version 9")
    accounted(result)
    assert result.version >= 9 and "killed" not in [event.kind for event in result.events]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("sync", ["hardsync", "ssp:0"])
def test_who_a_warm_start_held_back_meets_with_the_others_afterwards(sync: str, engine: str) -> None:
    result = launch(odd, 4, learners=3, sync=sync, engine=engine, warmstart=12)
    accounted(result)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("sync", ["hardsync", "delayed:1", "async"])
@pytest.mark.parametrize(
    "script, options",
    [
        ("add 1 at version 3; add 1 at version 9", {}),
        ("kill learner 1 at version 4", {}),
        ("kill learner 1 at version 4; kill learner 0 at version 8", {"replace": True}),
    ],
    ids=["joined", "lost", "replaced"],
)
def test_learners_may_come_and_go(sync: str, script: str, options: dict[str, Any], engine: str) -> None:
    result = launch(odd, 4, 60, learners=3, sync=sync, engine=engine, script=script, **options)
    accounted(result)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("sync", ["hardsync", "delayed:1"])
@pytest.mark.parametrize("version", [5, 11])
def test_lockstep_loops_that_went_back_to_a_checkpoint_meet_again(
    sync: str, version: int, engine: str, tmp_path: Path
) -> None:
    script = f"kill shard 0 at version {version}"
    result = launch(
        odd, 3, learners=3, sync=sync, engine=engine, script=script, run_dir=tmp_path, checkpoint_every=4
    )
    accounted(result)
    assert "shard lost" in [event.kind for event in result.events]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("sync", ["hardsync", "delayed:1"])
def test_meetings_change_nothing_in_lockstep(sync: str, engine: str) -> None:
    """All that met count again before one of them publishes: the rounds are whole, the bits those without meetings."""
    plain, met = (
        launch(often, every, learners=3, sync=sync, engine=engine).state_dict()["weight"] for every in (0, 1)
    )
    assert torch.equal(plain, met)


def often(session: sl.Session, every: int) -> None:
    model = nn.Linear(4, 2)
    optimizer = session.optimizer(model, partial(SGD, lr=0.1))
    loader = session.loader(numbers(36), batch_size=2)
    for _ in range(2):
        for index, (x,) in enumerate(loader):
            step(model, optimizer, x)
            if every and index % every == 0:
                session.mean(x)


def between(session: sl.Session) -> list[int]:
    """Meets with a gradient in its hands; the version that each was computed on."""
    model = nn.Linear(4, 2)
    optimizer = session.optimizer(model, partial(SGD, lr=0.1))
    versions = []
    for (x,) in session.loader(numbers(36), batch_size=2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        versions.append(optimizer.version)
        session.mean(1.0)
        optimizer.step()
    return versions


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("sync", ["ssp:1", "async"])
def test_a_meeting_makes_no_gradient_fresher(sync: str, engine: str) -> None:
    """Weights that are read in a meeting are not those of the gradient that is there already (M1)."""
    result = launch(between, learners=3, sync=sync, engine=engine)
    made_on = [version for versions in result.returned for version in versions]
    assert result.updates == len(made_on) == 18
    assert result.staleness.mean * 18 == pytest.approx(sum(range(18)) - sum(made_on))


# -- loops that cannot work ------------------------------------------------------------------------------------


def uneven(session: sl.Session) -> None:
    """Five batches for two learners: one meets three times in an epoch, the other twice."""
    model = nn.Linear(4, 2)
    optimizer = session.optimizer(model, partial(SGD, lr=0.1))
    loader = session.loader(numbers(10), batch_size=2)
    for _ in range(2):
        for (x,) in loader:
            step(model, optimizer, x)
            session.mean(1.0)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("sync", ["hardsync", "delayed:1"])
def test_learners_that_meet_unequally_often_are_told(sync: str, engine: str) -> None:
    said = r"learners \[0\] wait in session.mean, learners \[1\] wait at loader 0 for its next epoch.*equally often"
    with pytest.raises(sl.LearnerError, match=said) as caught:
        launch(uneven, learners=2, sync=sync, engine=engine)
    assert isinstance(caught.value.__cause__, sl.UsageError)


def other_order(session: sl.Session) -> None:
    if session.rank == 2:
        return
    if session.rank == 0:
        session.mean(1.0)
    session.loader(numbers(8), batch_size=2)
    if session.rank == 1:
        session.mean(1.0)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("learners", [2, 3], ids=["all", "one has left"])
def test_learners_that_open_and_meet_in_another_order_are_told(learners: int, engine: str) -> None:
    said = r"learners \[0\] wait in session.mean, learners \[1\] open loader 0.*in the same order and call session.mean"
    with pytest.raises(sl.LearnerError, match=said):
        launch(other_order, learners=learners, engine=engine)


def differing(session: sl.Session, places: list[str]) -> None:
    """After an epoch, each somewhere else."""
    model = nn.Linear(4, 2)
    optimizer = session.optimizer(model, partial(SGD, lr=0.1))
    loader = session.loader(numbers(12), batch_size=2)
    for (x,) in loader:
        step(model, optimizer, x)
    mine = places[session.rank]
    for place in (mine, *(each for each in ("mean", "table", "loader", "epoch") if each != mine)):
        if place == "mean":
            session.mean(1.0)
        elif place == "table":
            session.optimizer(nn.Linear(1, 1), partial(SGD, lr=0.1))
        elif place == "loader":
            session.loader(numbers(8), batch_size=2)
        else:
            for (x,) in loader:
                step(model, optimizer, x)


WAITS = {
    "mean": "wait in session.mean",
    "table": "open table 1",
    "loader": "open loader 1",
    "epoch": "wait at loader 0 for its next epoch",
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "places",
    [
        ["epoch", "mean", "table"],
        ["loader", "epoch", "mean"],
        ["mean", "loader", "table", "epoch"],
        ["epoch", "loader"],
        ["loader", "table"],
        ["epoch", "epoch", "table"],
    ],
    ids="-".join,
)
def test_learners_that_wait_in_several_places_are_told_who_waits_where(
    places: list[str], engine: str
) -> None:
    with pytest.raises(sl.LearnerError, match="loops differ") as caught:
        launch(differing, places, learners=len(places), engine=engine)
    for place in places:
        ranks = [rank for rank, each in enumerate(places) if each == place]
        assert f"learners {ranks} {WAITS[place]}" in str(caught.value)


def steps_on(session: sl.Session, first: str) -> None:
    """No loader says that there is nothing to compute: the others wait for its gradient."""
    model = nn.Linear(4, 2)
    if session.rank == 1 and first == "loader":
        session.loader(numbers(8), batch_size=2)
    optimizer = session.optimizer(model, partial(SGD, lr=0.1))
    if session.rank == 1 and first == "table":
        session.optimizer(nn.Linear(1, 1), partial(SGD, lr=0.1))
    step(model, optimizer, torch.ones(2, 4))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("sync", ["hardsync", "async"])
def test_learners_that_wait_in_a_step_for_one_that_opens_something_are_told(sync: str, engine: str) -> None:
    """Under async only the first fold waits for others."""
    said = r"learners \[0\] wait in a step of table 0, learners \[1\] open (table 1|loader 0)"
    for first in ("table", "loader") if sync == "hardsync" else ("loader",):
        with pytest.raises(sl.LearnerError, match=said):
            launch(steps_on, first, learners=2, sync=sync, engine=engine)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("places", [["mean", "mean", "table"], ["epoch", "epoch", "table"]], ids="-".join)
def test_a_joiner_may_wait_elsewhere_than_the_others(places: list[str], engine: str) -> None:
    """Its loop may be at another place for no fault of its own."""
    launch(differing, places, learners=2, engine=engine, script="add 1 at version 1")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("places", [["mean", "loader", "mean"], ["epoch", "mean", "mean"]], ids="-".join)
def test_learners_that_began_together_are_told_also_with_a_joiner(places: list[str], engine: str) -> None:
    """No mean over a part of them, silently."""
    with pytest.raises(sl.LearnerError, match="loops differ"):
        launch(differing, places, learners=2, engine=engine, script="add 1 at version 1")


@pytest.mark.parametrize("engine", ENGINES)
def test_who_meets_more_often_in_the_end_meets_without_those_that_left(engine: str) -> None:
    def learner(session: sl.Session) -> list[float]:
        return [session.mean(float(session.rank)) for _ in range(1 + session.rank)]

    assert launch(learner, learners=3, engine=engine).returned == [[1.0], [1.0, 1.5], [1.0, 1.5, 2.0]]


# -- what they bring -------------------------------------------------------------------------------------------


def brings(session: sl.Session, kind: str) -> Any:
    values: dict[str, Any] = {
        "shapes": torch.zeros(2 + session.rank),
        "words": "3",
        "complex": torch.zeros(2, dtype=torch.complex64),
        "counts": torch.tensor([session.rank, 3]),
        "half": torch.tensor(1.5, dtype=torch.bfloat16),
        "list": [1, session.rank],
    }
    return session.mean(values[kind])


MEETS = [("servers", "sim"), ("servers", "local"), ("allreduce", "sim"), ("allreduce", "local")]


@pytest.mark.parametrize(("topology", "engine"), MEETS)
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("shapes", r"same shape, got learner 0: \(2,\), learner 1: \(3,\)"),
        ("words", r"takes a number or a tensor of real numbers, got str"),
        ("complex", r"takes a number or a tensor of real numbers, got a tensor of torch.complex64"),
    ],
)
def test_what_has_no_mean_is_refused(kind: str, said: str, topology: str, engine: str) -> None:
    with pytest.raises(sl.LearnerError, match=said) as caught:
        launch(brings, kind, learners=2, topology=topology, engine=engine)
    assert isinstance(caught.value.__cause__, sl.UsageError)


@pytest.mark.parametrize(("topology", "engine"), MEETS)
def test_means_are_of_the_kind_that_was_brought(topology: str, engine: str) -> None:
    """Those of whole numbers are fractions."""
    for kind, mean in (
        ("counts", torch.tensor([0.5, 3.0])),
        ("half", torch.tensor(1.5, dtype=torch.bfloat16)),
        ("list", torch.tensor([1.0, 0.5], dtype=torch.float64)),
    ):
        found = launch(brings, kind, learners=2, topology=topology, engine=engine).returned
        for each in found:
            torch.testing.assert_close(each, mean)
