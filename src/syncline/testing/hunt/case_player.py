"""Plays one case of the hunt: a tiny model, gradients that tell which examples they are of, everything checked.

A failure is a broken invariant, a run that stands still or never ends, or an error nobody asked for. Checkpoints lie in memory where
there is such a place, and none stays behind: a folder is locked while its process lives, and what a process that was killed has left
the next that makes one removes.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from syncline.cluster import Cluster
from syncline.dial import Course
from syncline.engines.event_script import parse_script
from syncline.engines.run import Outcome, RunSpec, Storage, Task
from syncline.errors import InvariantError, LostError
from syncline.learn.gradient_ways import Supervised
from syncline.learn.session import Session
from syncline.learn.train_and_evaluate import Training, run_training
from syncline.protocols.lifecycle import Faults
from syncline.roles.run_plan import RunPlan, Saving
from syncline.sim.engine import Sim, World
from syncline.sim.simulation import Simulation
from syncline.testing.hunt.case import Case

MOST_EVENTS, MOST_OF_STEP = (
    60_000,
    200,
)  # a run of the hunt has a few thousand, or some tens for each of its updates
WIDTH = 70  # parameters of a layer: two shards' worth of the smallest cut
SHARED = "/dev/shm"  # checkpoints need not survive the machine here
PREFIX = "syncline-hunt-"
BOUNDED = (
    "all learners are lost",
    "times without a checkpoint in between",
    "the last leaf of the tree was killed",
)  # ends that scripts may bring about


_swept: set[str] = set()  # places of folders that this process has looked at


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong."""

    kind: str  # the first words, which a shortened case must share
    text: str

    def __str__(self) -> str:
        return self.text


class Tiny(nn.Module):
    """Two tensors of different shape."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.linspace(-1, 1, WIDTH))
        self.b = nn.Parameter(torch.ones(2, 3))
        self.register_buffer("seen", torch.zeros(1))


def play(case: Case) -> Failure | None:
    """Run it; None if all is well."""
    try:
        run(case)
    except InvariantError as error:
        return Failure(_kind(str(error).partition(": ")[2]), str(error))
    except LostError as error:
        return None if _asked_for(case, str(error)) else Failure(_kind(str(error)), str(error))
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        return Failure(_kind(f"{type(error).__name__} {text.rstrip().splitlines()[-1]}"), text)
    return None


def _kind(text: str) -> str:
    """Without numbers, which differ from case to case."""
    first = text.split("\n")[0]
    return " ".join(word for word in first.split() if word.isalpha())[:60]


def _asked_for(case: Case, text: str) -> bool:
    """The script kills everybody, the same shard again and again, or all leaves where there is no checkpoint."""
    kills = [fault for fault in parse_script(case.script) if fault.action == "kill"]
    crowd = 0 if case.fan_in else Cluster.parse(case.cluster).learners_per_machine or case.learners
    learners = sum({"learner": 1, "node": crowd}.get(fault.role, 0) for fault in kills)
    shards = sum(fault.role != "learner" for fault in kills)
    return (
        (BOUNDED[0] in text and learners >= case.learners)
        or (BOUNDED[1] in text and shards > 3)
        or (BOUNDED[2] in text and case.fan_in > 0 and case.checkpoint_every is None)
    )


def run(case: Case, *, check: bool = True) -> Outcome:
    """The outcome; raises what went wrong."""
    engine = Sim(case.cluster, script=case.script, seed=case.seed, check=check)

    def prepare(world: World) -> None:
        assert isinstance(world, Simulation)
        if world.watch is not None:
            world.watch.most = MOST_EVENTS + MOST_OF_STEP * (case.steps or 0)
        if case.late:
            world.delay_bulk()

    saved = contextlib.nullcontext() if case.checkpoint_every is None else scratch()
    with warnings.catch_warnings(), saved as folder:
        warnings.simplefilter("ignore")
        return engine.run(_spec(case, folder), prepare)


def digest(outcome: Outcome) -> str:
    """Of everything that must be the same when a case is played again."""
    found = hashlib.sha256(repr((outcome.seconds, outcome.staleness, outcome.statistics.tables)).encode())
    for table, (version, state) in sorted(outcome.tables.items()):
        found.update(f"{table} {version}".encode())
        for name, value in sorted(state.items()):
            found.update(name.encode() + value.numpy().tobytes())
    return found.hexdigest()


def _spec(case: Case, folder: str | None) -> RunSpec:
    return RunSpec(
        task=Task(run_training, (_training(case),))
        if case.loop == "train"
        else Task(OWN_LOOPS[case.loop], (case,)),
        plan=RunPlan(
            course=Course.of(case.sync),
            learners=case.learners,
            topology=case.topology(),
            seed=case.seed,
            warm=case.warmstart,
            batch_size=case.batch_size,
            limit=case.steps,
            epochs=case.epochs if case.loop in ("train", "own") and case.steps is None else None,
            clip_norm=0.5 if case.clip else None,
            saving=Saving(cuts=folder is not None, every=case.checkpoint_every),
        ),
        threads=1,
        faults=Faults(replace=case.replace, patience=None),
        storage=Storage(folder),
    )


# -- folders for checkpoints -------------------------------------------------------------------------------


def scratch_place() -> str:
    return SHARED if os.path.isdir(SHARED) else tempfile.gettempdir()


@contextlib.contextmanager
def scratch(place: str | None = None) -> Iterator[str]:
    """A folder of this process's own, gone afterwards."""
    place = place or scratch_place()
    if place not in _swept:
        _swept.add(place)
        sweep(place)
    lock = None
    while lock is None:  # another may take it for one that was left, between its making and its lock
        folder = tempfile.mkdtemp(prefix=PREFIX, dir=place)
        lock = _lock(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _lock(folder: str) -> int | None:
    """An open descriptor that holds it; None if another process does, or it is gone."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.isdir(folder):
            return lock
    except BlockingIOError:
        pass
    os.close(lock)
    return None


def sweep(place: str) -> list[str]:
    """Remove the folders whose processes are gone; their names."""
    removed = []
    for folder in sorted(Path(place).glob(f"{PREFIX}*")):
        with contextlib.suppress(PermissionError):  # another user's
            if (lock := _lock(str(folder))) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)
                removed.append(folder.name)
    return removed


# -- the loops ---------------------------------------------------------------------------------------------


def _own(session: Session, case: Case) -> None:
    """A plain loop; the gradients need no backward pass."""
    model = Tiny()
    optimizer = session.optimizer(model, partial(torch.optim.SGD, lr=0.1))
    loader = session.loader(
        TensorDataset(torch.arange(case.examples)), batch_size=case.batch_size, policy=case.policy
    )
    while not session.ending and (case.steps is not None or loader.epoch < case.epochs):
        for (batch,) in loader:
            _gradient(model, batch)
            optimizer.step()
        if case.seed % 3 == 1:
            session.mean(float(session.rank))


def _odd(session: Session, case: Case) -> None:
    """One that meets the others, leaves loops early, puts several batches into a gradient, and has a second loader."""
    model = Tiny()
    optimizer = session.optimizer(model, partial(torch.optim.SGD, lr=0.1))
    loader = session.loader(
        TensorDataset(torch.arange(case.examples)), batch_size=case.batch_size, policy=case.policy
    )
    other = session.loader(TensorDataset(torch.arange(3)), batch_size=1)
    while not session.ending and loader.epoch < case.epochs:
        for number, (batch,) in enumerate(loader):
            _gradient(model, batch)
            if number % 3 == 1 and case.seed % 2:
                continue  # its examples belong to the next gradient
            optimizer.step()
            if number == 2 and session.rank == case.seed % 5:
                break
        for (batch,) in other:
            _gradient(model, batch)
            optimizer.step()
        if case.seed % 3 == 0:
            session.mean(float(session.rank))


def _bare(session: Session, case: Case) -> None:
    """One without a loader of the session's."""
    model = Tiny()
    optimizer = session.optimizer(model, partial(torch.optim.SGD, lr=0.1))
    steps = case.examples * case.epochs // (case.batch_size * case.learners) + 1
    for step in range(steps if case.steps is None else case.steps):
        _gradient(model, torch.tensor([step, session.rank]))
        if case.seed % 3 == 2 and step % 4 == 1:
            session.mean(float(session.rank))
        optimizer.step()


OWN_LOOPS: dict[str, Callable[[Session, Case], None]] = {"own": _own, "odd": _odd, "bare": _bare}


@torch.no_grad()
def _gradient(model: Tiny, batch: Tensor) -> None:
    """Set a gradient that depends on the examples, and so little on the weights that hundreds of stale steps stay finite."""
    where = (batch * 13) % WIDTH
    model.a.grad = torch.zeros(WIDTH).index_add_(0, where, torch.ones(len(batch))) + 0.01 * model.a
    model.b.grad = torch.full((2, 3), float(batch.sum() % 7)) + 0.01 * model.b
    assert isinstance(model.seen, Tensor)
    model.seen += 1


def _training(case: Case) -> Training:
    """For `train`'s own loop."""
    generator = torch.Generator().manual_seed(case.seed)
    inputs = torch.randn(case.examples, 3, generator=generator)
    model = nn.Linear(3, WIDTH)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return Training(
        model=model,
        data=TensorDataset(inputs, inputs.sum(1, keepdim=True).expand(-1, WIDTH)),
        objective=Supervised(F.mse_loss),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        schedule=None,
        batch_size=case.batch_size,
        epochs=case.epochs if case.steps is None else None,
        policy=case.policy,
        collate=None,
    )
