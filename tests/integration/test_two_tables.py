"""Own loops over two tables, with real processes and in the twin (M8): a step of each for every batch goes on whatever happens,
other loops go on or end by name; nobody waits for ever.
"""

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
from syncline.errors import LoopError
from tests.integration.small_runs import launched

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ENGINES = ["sim", "local"]


def launch(
    function: Callable[..., Any], *arguments: Any, engine: str = "sim", script: str = "", **options: Any
) -> sl.Result:
    """With faults played in virtual time, and checked, or on the processes."""
    chosen = sl.Sim(script=script, check=True, compute=1.0, transfer=0.01) if engine == "sim" else "local"
    return launched(function, *arguments, engine=chosen, script=script, **options)


def two(session: sl.Session) -> list[tuple[nn.Module, torch.optim.Optimizer]]:
    models = [nn.Linear(4, 1) for _ in range(2)]
    return [(model, session.optimizer(model, partial(SGD, lr=0.1))) for model in models]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def numbers(size: int) -> TensorDataset:
    return TensorDataset(torch.randn(size, 4, generator=torch.Generator().manual_seed(size)))


def both(session: sl.Session, size: int) -> None:
    """A step of each for every batch."""
    tables = two(session)
    loader = session.loader(numbers(size), batch_size=3)
    while not session.ending and loader.epoch < 3:
        for (x,) in loader:
            for model, optimizer in tables:
                step(model, optimizer, x)


def seldom(session: sl.Session, size: int) -> None:
    """The second's for every third batch, of two in an accumulated gradient."""
    first, (model, optimizer) = two(session)
    loader = session.loader(numbers(size), batch_size=3)
    while not session.ending and loader.epoch < 3:
        for number, (x,) in enumerate(loader):
            with session.accumulate():
                model(x).sum().backward()
            step(*first, x)
            if number % 3 == 1:
                step(model, optimizer, x)


def after(session: sl.Session, size: int) -> None:
    """The second's after the batches, of which some learners have more than others; then they meet."""
    first, second = two(session)
    loader = session.loader(numbers(size), batch_size=3)
    while not session.ending and loader.epoch < 3:
        for (x,) in loader:
            step(*first, x)
        step(*second, torch.ones(1, 4))
        session.mean(1.0)


FAULTS = [
    ("", {}),
    ("add 1 at version 3", {}),
    ("kill learner 1 at version 3", {}),
    ("kill learner 1 at version 3", {"replace": True}),
    ("kill learner 2 at version 8; add 2 at version 4", {}),
    ("kill shard 0 at version 3", {"run_dir": "run"}),
]
NAMES = ["calm", "joined", "lost", "replaced", "lost and joined", "a shard lost"]


@pytest.mark.parametrize("sync", ["hardsync", "delayed:1", "ssp:0", "backup:1"])
@pytest.mark.parametrize("script, options", FAULTS, ids=NAMES)
def test_a_step_of_each_for_every_batch_goes_on_in_the_twin(
    script: str, options: dict[str, Any], sync: str, tmp_path: Path
) -> None:
    for size in (20, 27, 34):
        folder = {"run_dir": tmp_path / str(size)} if "run_dir" in options else {}
        result = launch(both, size, learners=3, sync=sync, script=script, **{**options, **folder})
        assert all(table.pending == 0 for table in result.statistics.tables.values())


@pytest.mark.parametrize("script, options", FAULTS[1::2], ids=NAMES[1::2])
def test_a_step_of_each_for_every_batch_goes_on_with_processes(
    script: str, options: dict[str, Any], tmp_path: Path
) -> None:
    folder = {"run_dir": tmp_path / "run"} if "run_dir" in options else {}
    result = launch(
        both, 40, learners=3, sync="hardsync", engine="local", script=script, **{**options, **folder}
    )
    assert all(table.pending == 0 for table in result.statistics.tables.values())


def goes_on_or_ends(function: Callable[..., None], *arguments: Any, **options: Any) -> str | None:
    """The words of the error, where it ends with one that says that loops differ."""
    return ends_by_name(lambda: launch(function, *arguments, **options))


def ends_by_name(run: Callable[[], sl.Result]) -> str | None:
    try:
        result = run()
    except sl.LearnerError as failed:
        if isinstance(failed.__cause__, LoopError):
            return str(failed.__cause__)
        raise
    assert all(table.pending == 0 for table in result.statistics.tables.values())
    return None


@pytest.mark.parametrize(
    "sync", ["hardsync", "delayed:1", "ssp:0", "backup:1", "ssp:1 until 1 then hardsync"]
)
@pytest.mark.parametrize("script, options", FAULTS, ids=NAMES)
@pytest.mark.parametrize("loop", [seldom, after])
def test_steps_that_unequal_numbers_of_batches_part_go_on_or_end_by_name(
    loop: Callable[..., None], script: str, options: dict[str, Any], sync: str, tmp_path: Path
) -> None:
    for size in (20, 27, 34):
        folder = {"run_dir": tmp_path / str(size)} if "run_dir" in options else {}
        given = {**options, **folder}
        problem = goes_on_or_ends(loop, size, learners=3, sync=sync, script=script, **given)
        assert problem is None or ("of table 0" in problem and "of table 1" in problem)


@pytest.mark.parametrize("engine", ENGINES)
def test_that_ends_by_name_with_processes_too(engine: str) -> None:
    """30 examples in batches of 3: one of three learners has a batch more, and steps the first table while others step the second."""
    with pytest.raises(sl.LearnerError, match=r"in a step of table 0.* in a step of table 1"):
        launch(after, 30, learners=3, sync="hardsync", engine=engine)


def fetching(session: sl.Session, size: int = 60) -> None:
    """Fetches are overdue when the dial turns."""
    tables = two(session)
    loader = session.loader(numbers(size), batch_size=3)
    while not session.ending and loader.epoch < 3:
        for (x,) in loader:
            for model, optimizer in tables if session.rank else reversed(tables):
                step(model, optimizer, x)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("then", ["hardsync", "ssp:0", "delayed:1"])
def test_a_fetch_that_is_overdue_when_the_dial_turns_keeps_nobody_waiting(then: str, engine: str) -> None:
    sync = f"downpour:push=2,fetch=3,local_lr=0.1 until 1 then {then}"
    problem = goes_on_or_ends(fetching, learners=2, sync=sync, engine=engine)
    assert problem is not None or then != "hardsync"


@pytest.mark.parametrize(
    "push, fetch, size, then, transfer, script",
    [
        (3, 3, 26, "hardsync", 3.1, ""),  # fetches again, because it has pushed since
        (2, 4, 37, "ssp:0", 3.1, ""),
        (2, 4, 61, "hardsync", 0.2, ""),  # waits for a slot whose gradient needs the other's
        (2, 4, 64, "ssp:0", 1.3, "pause learner 0 for 3.3 s at 14 s"),
        (1, 2, 48, "hardsync", 2.2, "pause learner 0 for 2 s at 27 s"),  # was to rest, and its data was there
        (1, 4, 57, "delayed:1", 1.3, "pause learner 1 for 1.5 s at 38 s"),  # two pushes before it knows
    ],
)
def test_whoever_stands_still_when_the_dial_turns_is_counted_so(
    push: int, fetch: int, size: int, then: str, transfer: float, script: str
) -> None:
    sync = f"downpour:push={push},fetch={fetch},local_lr=0.1 until 1 then {then}"
    engine = sl.Sim(script=script, check=True, compute=1.0, transfer=transfer)
    problem = ends_by_name(lambda: launched(fetching, size, learners=2, sync=sync, engine=engine))
    assert problem is not None or then != "hardsync"  # there nobody can go on


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("sync", ["hardsync", "softsync:1", "ssp:1"])
def test_a_warm_start_whose_shard_is_lost_goes_on(sync: str, engine: str, tmp_path: Path) -> None:
    result = launch(
        both,
        60,
        learners=3,
        sync=sync,
        engine=engine,
        warmstart=12,
        script="kill shard 0 at version 20; kill shard 0 at version 5",
        run_dir=tmp_path / "run",
        checkpoint_every=4,
    )
    assert [event.kind for event in result.events if event.kind == "recovered"]
    assert all(table.pending == 0 for table in result.statistics.tables.values())


def crossed(session: sl.Session, caught: bool = False) -> None:
    tables = two(session)
    if session.rank == 2:
        session.mean(1.0)
        return
    try:
        for _ in range(5):
            step(*tables[session.rank], torch.ones(1, 4))
    except LoopError:
        if not caught:
            raise
        step(*tables[session.rank], torch.ones(1, 4))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("sync", ["hardsync", "ssp:1", "delayed:1"])
@pytest.mark.parametrize("learners", [2, 3])
def test_steps_of_different_tables_end_by_name(learners: int, sync: str, engine: str) -> None:
    with pytest.raises(sl.LearnerError, match="loops differ, and all wait for each other") as failed:
        launch(crossed, learners=learners, sync=sync, engine=engine)
    assert isinstance(failed.value.__cause__, LoopError)
    problem = str(failed.value.__cause__)
    assert ("learners [2] wait in session.mean" in problem) == (learners == 3)
    for rank in (0, 1):
        assert f"learners [{rank}] wait in a step of table {rank}" in problem
    assert "Every learner must step the same tables in the same order" in problem


@pytest.mark.parametrize("engine", ENGINES)
def test_who_caught_that_cannot_go_on(engine: str) -> None:
    with pytest.raises(sl.LearnerError, match=r"cannot go on.*It was: learners' loops differ"):
        launch(crossed, True, learners=2, sync="hardsync", engine=engine)
