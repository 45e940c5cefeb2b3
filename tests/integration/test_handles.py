"""A run's handle: who holds it ends it, and asking it disturbs nobody."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from torch import nn

import syncline as sl
from syncline.engines import live_runs as live
from syncline.engines.local import supervisor
from syncline.engines.local.supervisor_base import RunSupervisor
from syncline.sim.simulation import Simulation
from tests.integration.small_runs import PATIENCE, kinds, points, start, until

cloudpickle.register_pickle_by_value(sys.modules[__name__])

LONG = 100_000  # epochs: ends only when somebody ends it


def version(run: sl.Run) -> int:
    table = run.statistics().tables.get(0)
    return table.version if table else 0


@pytest.mark.parametrize("options", [{}, {"topology": "allreduce", "sync": "hardsync"}, {"engine": "sim"}])
def test_a_block_ends_what_was_not_waited_for(options: dict[str, Any]) -> None:
    with start(points(64), epochs=LONG, **options) as run:
        until(lambda: version(run) > 2)
    assert run.done and not live.live()
    assert run.wait().updates > 2


def test_a_block_that_raises_ends_its_run_and_says_what_it_raised() -> None:
    with pytest.raises(KeyError, match="of the block"), start(points(64), epochs=LONG):
        raise KeyError("of the block")
    assert not live.live()


def test_a_block_says_what_went_wrong_in_its_run() -> None:
    def fails(model: nn.Module, batch: Any) -> Any:
        raise ValueError("on purpose")

    with pytest.raises(sl.LearnerError, match="on purpose"), start(points(64), objective=fails) as run:
        until(lambda: run.done)


def test_a_run_that_was_waited_for_leaves_the_block_as_it_is() -> None:
    with start(points(64)) as run:
        assert run.wait(PATIENCE).history[-1].epoch == 1


@pytest.mark.parametrize("folder", [False, True])
def test_a_run_whose_handle_is_gone_ends(folder: bool, tmp_path: Path) -> None:
    run: sl.Run | None = start(points(64), epochs=LONG, run_dir=tmp_path / "run" if folder else None)
    while version(run) < 3:
        pass
    forgotten, run = [run], None
    with pytest.warns(RuntimeWarning, match="handle is gone: it is stopped"):
        _ = forgotten.clear() or gc.collect()
    until(lambda: not live.live())


SCRIPT = """
import sys, torch, syncline as sl
from functools import partial
from torch.optim import SGD
from torch.utils.data import TensorDataset

def talking(model, batch):
    print("a learner talks", flush=True)
    return model(batch[0]).square().mean()

run = sl.train(torch.nn.Linear(4, 2), TensorDataset(torch.randn(64, 4)), objective=talking,
               optimizer=partial(SGD, lr=0.1), epochs=100000, batch_size=4, wait=False, **{OPTIONS})
while not run.statistics().tables or run.statistics().tables[0].version < 3:
    pass
HOW
"""


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("options", "how", "code"),
    [
        ("{}", "", 0),
        ("{}", "raise ValueError('of the script')", 1),
        ("{'topology': 'allreduce', 'sync': 'hardsync'}", "", 0),
        ("{'engine': 'sim'}", "sys.exit(7)", 7),
    ],
)
def test_a_script_that_ends_with_a_live_run_ends_well(options: str, how: str, code: int) -> None:
    script = SCRIPT.replace("{OPTIONS}", options).replace("HOW", how)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == code, done.stderr[-2000:]
    assert "a run was still going on at the end of the script" in done.stderr


@pytest.mark.parametrize("options", [{}, {"topology": "allreduce", "sync": "hardsync"}])
def test_what_statistics_are_made_of_is_read_by_the_run_itself(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by the caller, who would see dictionaries change while it goes through them."""
    seen: list[str] = []
    inner = RunSupervisor._with_processes

    def spy(*arguments: Any) -> Any:
        seen.append(threading.current_thread().name)
        return inner(*arguments)

    monkeypatch.setattr(RunSupervisor, "_with_processes", spy)
    with start(points(64), epochs=LONG, **options) as run:
        until(lambda: version(run) > 2)
    assert set(seen) == {"syncline-supervisor"}


def test_what_a_simulated_run_says_of_itself_is_read_between_two_of_its_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []
    inner = Simulation.statistics

    def spy(world: Simulation) -> Any:
        seen.append(threading.current_thread().name)
        return inner(world)

    monkeypatch.setattr(Simulation, "statistics", spy)
    with start(points(64), epochs=LONG, engine="sim") as run:
        until(lambda: version(run) > 2)
    assert set(seen) == {"syncline-sim"}


def pid_of(run: sl.Run, role: str, rank: int) -> int:
    found = [p for p in run.statistics().processes if (p.role, p.rank) == (role, rank)]
    return found[-1].pid


def events(run: sl.Run) -> list[str]:
    return [event.kind for event in run._handle._run.recorder.outcome.events]  # type: ignore[attr-defined]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("shard", [0, 1])
def test_a_stopped_shard_is_named_and_the_run_still_answers(
    shard: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "SHARD_PATIENCE", 3.0)
    with start(points(64), epochs=LONG, patience=0.5) as run:
        until(lambda: version(run) > 2)
        pid = pid_of(run, "shard", shard)
        os.kill(pid, signal.SIGSTOP)
        with pytest.warns(
            RuntimeWarning, match=rf"shard {shard} hangs: .*pid {pid}.*kill_hung=True goes back"
        ) as warned:
            until(lambda: "hangs" in events(run) and len(warned) > 0)  # the event comes before its warning
        assert {p.role for p in run.statistics().processes} == {"learner", "shard"}
        os.kill(pid, signal.SIGCONT)
        before = version(run)
        until(lambda: version(run) > before)


def test_a_stopped_shard_is_brought_back_where_that_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "SHARD_PATIENCE", 3.0)
    options: dict[str, Any] = {"run_dir": tmp_path / "run", "checkpoint_every": 5}
    with start(points(64), epochs=LONG, patience=0.5, kill_hung=True, **options) as run:
        until(lambda: version(run) > 12)
        os.kill(pid_of(run, "shard", 1), signal.SIGSTOP)
        until(lambda: "recovered" in events(run))
        before = version(run)
        until(lambda: version(run) > before)
        run.stop()
        result = run.wait(PATIENCE)
    found = [kind for kind in kinds(result) if kind != "left"]
    assert found[:4] == ["hangs", "killed", "shard lost", "recovered"]


def test_a_follower_that_is_stopped_for_a_while_misses_nothing() -> None:
    """The log fills up meanwhile; nothing further is taken, and all of it is folded afterwards."""
    with start(points(64), epochs=40, sync="async", batch_size=2, objective=quick) as run:
        until(lambda: version(run) > 2)
        pid = pid_of(run, "shard", 1)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.5)
        os.kill(pid, signal.SIGCONT)
        result = run.wait(PATIENCE)
    assert result.gradients == result.updates == 40 * 32


def quick(model: nn.Module, batch: Any) -> Any:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
