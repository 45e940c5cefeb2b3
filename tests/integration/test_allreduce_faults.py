"""All-reduce when a learner dies, raises, hangs or leaves early: the run ends for all, soon, and says who it was."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import syncline as sl
from syncline.errors import LostError, RunError
from syncline.table.checkpoints import Folder
from tests.integration.small_runs import alive, same

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SGD = partial(torch.optim.SGD, lr=0.01)
LIMIT = 45.0  # seconds: not for ever, on a busy machine too
TOPOLOGIES = ["allreduce", "allreduce:layerwise,bucket=1"]


def steps(session: sl.Session, fate: str, count: int = 100_000) -> int:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    if fate == "dies at once" and session.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    opt = session.optimizer(model, SGD)
    for step in range(count):
        if step == 20 and session.rank == 1:
            meet(fate, session)
        opt.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        opt.step()
    return session.rank


def meet(fate: str, session: sl.Session) -> None:
    if fate == "raises":
        raise ValueError("no more")
    if fate == "returns":
        raise EarlyReturn
    if fate == "hangs":
        time.sleep(1000)
    if fate == "means":
        session.mean(1.0)


class EarlyReturn(Exception):
    pass


def early(session: sl.Session) -> int:
    try:
        return steps(session, "returns")
    except EarlyReturn:
        return -1


def within(seconds: float, action: Callable[[], Any], error: type[Exception], words: str) -> Any:
    began = time.monotonic()
    with pytest.raises(error, match=words) as raised:
        action()
    assert time.monotonic() - began < seconds
    return raised.value


def pids(run: sl.Run) -> dict[int, int]:
    return {each.rank: each.pid for each in run.statistics().processes if each.role == "learner"}


def until(run: sl.Run, version: int) -> None:
    while not (tables := run.statistics().tables) or tables[0].version < version:
        time.sleep(0.002)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("sync", ["hardsync", "delayed:2"])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_learner_ends_the_run_by_name(topology: str, sync: str, victim: int) -> None:
    run = sl.launch(steps, "fine", learners=3, topology=topology, sync=sync, wait=False)
    until(run, 10)
    os.kill(pids(run)[victim], signal.SIGKILL)
    within(LIMIT, run.wait, LostError, rf"learner {victim} \(pid \d+\) ended with signal SIGKILL")
    assert not any(alive(pid) for pid in pids(run).values())


def test_one_that_dies_while_the_others_join() -> None:
    def launch() -> None:
        sl.launch(steps, "dies at once", learners=3, topology="allreduce")

    within(2 * LIMIT, launch, LostError, "learner 1 .* ended with signal SIGKILL")


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_one_that_raises(topology: str) -> None:
    def launch() -> None:
        sl.launch(steps, "raises", learners=3, topology=topology)

    error = within(2 * LIMIT, launch, sl.LearnerError, "learner 1 raised")
    assert "no more" in error.traceback and isinstance(error.__cause__, ValueError)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_one_that_returns_early(topology: str) -> None:
    def launch() -> None:
        sl.launch(early, learners=2, topology=topology)

    within(
        2 * LIMIT, launch, RunError, "learner 1 returned after 20 steps while learner 0 is at a further step"
    )


def test_one_that_does_something_else() -> None:
    def launch() -> None:
        sl.launch(steps, "means", learners=2, topology="allreduce", count=30)

    within(
        2 * LIMIT, launch, RunError, "learner 1 is at session.mean while learner 0 is at a further collective"
    )


def test_one_that_hangs_is_named_or_ended() -> None:
    def launch() -> None:
        sl.launch(steps, "hangs", learners=2, topology="allreduce", patience=0.5, kill_hung=True)

    within(2 * LIMIT, launch, LostError, "learner 1 .* ended with signal SIGKILL")


class FailsAt(Dataset[Any]):
    """Examples; reading number 30 for the second time raises, or ends the process."""

    def __init__(self, folder: Path | None = None, how: str = "") -> None:
        self.x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        self.folder, self.how = folder, how

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor]:
        if index == 30 and self.folder is not None:
            read = self.folder / "read"
            if read.exists() and self.how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            elif read.exists():
                raise ValueError("a bad example")
            read.touch()
        return (self.x[index],)


def raises_after_two(record: Any) -> None:
    if record.epoch == 1:
        raise ValueError("in the second epoch")


def trained(data: Dataset[Any], topology: str, **options: Any) -> sl.Result:
    torch.manual_seed(0)
    given = {"learners": 2, "batch_size": 4, "epochs": 4, "threads": 1, "objective": mean_square, **options}
    adam = partial(torch.optim.Adam, lr=0.01)
    return sl.train(nn.Linear(4, 1), data, optimizer=adam, sync="hardsync", topology=topology, **given)


def mean_square(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).square().mean()


@pytest.mark.parametrize("topology", [*TOPOLOGIES, "allreduce:layerwise,apply=reverse"])
@pytest.mark.parametrize("how", ["raises", "dies", "a callback raises"])
def test_a_run_that_fails_leaves_a_checkpoint_of_a_copy(how: str, topology: str, tmp_path: Path) -> None:
    """The copy of any learner that lives: with two learners the resumed run has the bits of one that never failed."""
    callbacks = [raises_after_two] if how == "a callback raises" else []
    data = FailsAt(tmp_path if not callbacks else None, how)
    with pytest.raises(RunError):
        trained(data, topology, run_dir=tmp_path / "run", callbacks=callbacks)
    (path,) = Folder(tmp_path / "run" / "checkpoints").all()
    assert int(path.name) >= 8
    resumed, whole = trained(FailsAt(), topology, resume=tmp_path / "run"), trained(FailsAt(), topology)
    assert resumed.statistics.tables[0].examples == 4 * 64
    assert same(resumed.state_dict(), whole.state_dict())


def test_averages_in_flight_are_not_saved_and_the_run_ends_at_once(tmp_path: Path) -> None:
    data = FailsAt(tmp_path, "raises")
    with pytest.raises(RunError, match="a bad example"):
        sl.train(
            nn.Linear(4, 1), data, objective=mean_square, optimizer=SGD, sync="delayed:2", topology="allreduce",
            learners=2, batch_size=4, epochs=4, run_dir=tmp_path / "run",
        )  # fmt: skip
    assert Folder(tmp_path / "run" / "checkpoints").all() == []


def test_nothing_stays_behind() -> None:
    def left() -> int:
        return len(os.listdir("/proc/self/fd"))

    sl.launch(steps, "fine", learners=2, topology="allreduce", count=3)
    before = left()
    sl.launch(steps, "fine", learners=2, topology="allreduce:layerwise", count=3)
    with pytest.raises(sl.LearnerError):
        sl.launch(steps, "raises", learners=2, topology="allreduce")
    assert left() == before
