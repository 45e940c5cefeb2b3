"""Runs of the local engine that take turns: each works only when it is told to, for one short window.

A machine's speed drifts by a third within seconds; what is to be compared is measured in turns, without starting processes in
between. Not responsible for what the figures mean (`calibrate`).
"""

from __future__ import annotations

import json
import mmap
import os
import random
import select
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol, Self

import torch
from torch import Tensor, nn

from syncline.dial import Course
from syncline.engines.local.engine import Local
from syncline.engines.run import Event, Handle, RunSpec, Task
from syncline.errors import LostError, RunError, UsageError
from syncline.learn.optimizer import SharedOptimizer
from syncline.learn.session import Session
from syncline.ports import Reading
from syncline.protocols.lifecycle import Faults
from syncline.roles.run_plan import RunPlan
from syncline.topologies import Servers

SETTLE = 0.02  # seconds until burners are at it
LOOK = 0.25  # seconds between looks at whether the run has failed
LEAST = 3  # steps of a window
FLAG = "flag"
FEW = 4  # cores: of fewer, processes are not dealt


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a learner does again and again: a model, a batch of a given size, a loss."""

    model: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    objective: Callable[[nn.Module, Any], Tensor]
    optimizer: Callable[..., torch.optim.Optimizer]
    batch_size: int

    def compute(self, model: nn.Module, batch: Any) -> None:
        """One gradient, into the parameters'."""
        model.zero_grad()
        self.objective(model, batch).backward()


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What one process did in a window: steps, and the seconds of each of their parts."""

    steps: int
    step: float  # all of it
    compute: float = 0.0
    publish: float = 0.0  # until the shard was told
    wait: float = 0.0
    read: float = 0.0
    inequality: float = 0.0  # of single computations: their Gini coefficient

    @property
    def rate(self) -> float:
        return 1 / self.step


_deck: list[int] = []


def deal(count: int) -> list[int]:
    """A core to begin on for each of so many processes, at random; -1 where there are too few for all to have one.

    Virtual cores are not equal: two of them may be one to the host, which somebody else uses too. Who stays on one core measures that core.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < max(count, FEW):
        return [-1] * count
    if len(_deck) < count:
        _deck[:] = random.sample(cores, len(cores))
    return [_deck.pop() for _ in range(count)]


class Player(Protocol):
    """A process's part: what it does when it is told to, and an answer of plain numbers."""

    def obey(self, order: str, values: Sequence[float]) -> Any: ...


class Stage:
    """Processes of one run, which stand still between orders."""

    def __init__(
        self,
        player: Callable[[Session, Path], Player],
        *,
        processes: int,
        sync: str | None = None,
        shards: int = 1,
        fixed_shards: bool = False,
        batch_size: int | None = None,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="syncline-turns-")
        self._place = folder = Path(self._folder.name)
        for rank in range(processes):
            os.mkfifo(folder / f"to-{rank}")
            os.mkfifo(folder / f"from-{rank}")
        self._lost: list[str] = []
        self._run: Handle = Local().start(
            RunSpec(
                task=Task(_obey, (player, str(folder))),
                plan=RunPlan(
                    course=Course.of(sync or "async"),
                    learners=processes,
                    topology=Servers(shards if sync is not None else 1, fixed_shards),
                    batch_size=batch_size,
                ),
                threads=1,
                faults=Faults(patience=None),
                listeners=(self._hear,),
            )
        )
        self._to = [_pipe(folder / f"to-{rank}", "w") for rank in range(processes)]
        self._from = [_pipe(folder / f"from-{rank}", "r") for rank in range(processes)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._tell("end")
        if raised and raised[0] is not None:
            self._run.stop()  # who waits for somebody who is gone does not hear the order
        try:
            self._run.wait()
        finally:
            for end in (*self._to, *self._from):
                end.close()
            self._folder.cleanup()

    def _hear(self, record: Any) -> None:
        if isinstance(record, Event) and record.kind == "lost":
            self._lost.append(f"process {record.rank} of a run that takes turns is {record.what}")

    def _tell(self, text: str) -> None:
        for end, core in zip(self._to, deal(len(self._to)), strict=True):
            end.write(f"{core} {text}\n")

    def _answers(self) -> list[dict[str, Any]]:
        return [json.loads(self._line(end)) for end in self._from]

    def _line(self, end: IO[str]) -> str:
        """Nobody answers once the run has failed: then its error comes; and who is lost never does."""
        while not select.select([end], [], [], LOOK)[0]:
            if self._run.done:
                self._run.wait()
                raise RunError("a run that takes turns has ended before it was told to")
            if self._lost:
                raise LostError(self._lost[0])
        return end.readline()


class Turns(Stage):
    """Learners of one run, or plain loops."""

    def __init__(
        self,
        work: Workload,
        *,
        learners: int = 1,
        sync: str | None = None,
        shards: int = 1,
        fixed_shards: bool = False,
    ) -> None:
        """Without a dial: plain loops, which say nothing to anybody."""
        dial = Course.of(sync or "async").first
        if dial.backup and learners > 1:
            raise UsageError(
                f"{dial} leaves out who is slow, so that {learners} learners cannot all end a window: take one learner"
            )
        self._waits = dial.waits
        self._step = 0.0  # seconds, in the last window
        super().__init__(
            partial(_player, work, sync is not None),
            processes=learners,
            sync=sync,
            shards=shards,
            fixed_shards=fixed_shards,
            batch_size=work.batch_size,
        )
        (self._place / FLAG).write_bytes(bytes(mmap.PAGESIZE))
        self._flag = _mapped(self._place / FLAG)

    def window(self, seconds: float) -> list[Window]:
        """What each did in about so many seconds."""
        self._tell(f"work {seconds} {self._steps(seconds) if self._waits else 0}")
        found = self._windows()
        self._step = found[0].step
        return found

    def _steps(self, seconds: float) -> int:
        """Where learners wait for each other all must take as many."""
        return max(LEAST, round(seconds / self._step)) if self._step else LEAST

    def burn(self) -> None:
        """All work until `rest`."""
        self._flag[0] = 0
        self._tell("burn")
        time.sleep(SETTLE)

    def rest(self) -> list[Window]:
        self._flag[0] = 1
        return self._windows()

    def __exit__(self, *raised: object) -> None:
        self._flag[0] = 1
        super().__exit__(*raised)
        self._flag.close()

    def _windows(self) -> list[Window]:
        return [Window(**answer) for answer in self._answers()]


def _pipe(path: Path, mode: str) -> IO[str]:
    """Both ways, so that opening waits for nobody: the process may fail before it opens its end."""
    return os.fdopen(os.open(path, os.O_RDWR), mode, buffering=1)


def _mapped(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


# -- in the process --------------------------------------------------------------------------------------------


def _obey(session: Session, player: Callable[[Session, Path], Player], folder: str) -> None:
    place = Path(folder)
    mine = player(session, place)
    with open(place / f"to-{session.rank}") as orders, open(place / f"from-{session.rank}", "w") as answers:
        for line in orders:
            core, order, *values = line.split()
            if order == "end":
                return
            move_to(int(core))
            answer = mine.obey(order, [float(value) for value in values])
            answers.write(json.dumps(asdict(answer)) + "\n")
            answers.flush()


def move_to(core: int) -> None:
    """It may leave again, as the system likes."""
    if core >= 0:
        allowed = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {core})
        os.sched_setaffinity(0, allowed)


def _player(work: Workload, shared: bool, session: Session, place: Path) -> Player:
    return _Shared(session, work, place) if shared else _Plain(work, place)


def inequality(values: Sequence[float]) -> float:
    """The Gini coefficient: half the mean difference of two of them, over their mean."""
    count, total = len(values), sum(values)
    if count < 2 or not total:
        return 0.0
    ranked = sum((2 * rank - count + 1) * value for rank, value in enumerate(sorted(values)))
    return ranked / ((count - 1) * total)


class _Plain:
    """Forward and backward, without an optimizer."""

    def __init__(self, work: Workload, place: Path) -> None:
        self.model, self._batch = work.model(), work.batch(work.batch_size)
        self._work, self._place = work, place

    def obey(self, order: str, values: Sequence[float]) -> Window:
        if order == "burn":
            flag = _mapped(self._place / FLAG)
            return self.until(lambda: flag[0] != 0)
        return self.work(*values)

    def compute(self) -> None:
        self._work.compute(self.model, self._batch)

    def step(self) -> None:
        self.compute()

    def begin(self) -> None:
        """A window begins."""

    def window(self, steps: int, seconds: float) -> Window:
        return Window(steps=steps, step=seconds / steps, compute=seconds / steps)

    def work(self, seconds: float, count: float) -> Window:
        if count:
            return self._counted(int(count))
        end = time.perf_counter() + seconds
        return self.until(lambda: time.perf_counter() >= end)

    def _counted(self, count: int) -> Window:
        for _ in range(1 + count // 20):  # caches are cold after others' turns
            self.step()
        self.begin()
        start = time.perf_counter()
        for _ in range(count):
            self.step()
        return self.window(count, time.perf_counter() - start)

    def until(self, over: Callable[[], bool]) -> Window:
        self.step()
        self.begin()
        steps, start = 0, time.perf_counter()
        while not over() or not steps:
            self.step()
            steps += 1
        return self.window(steps, time.perf_counter() - start)


class _Shared(_Plain):
    """A learner's step, with a watch on its parts."""

    def __init__(self, session: Session, work: Workload, place: Path) -> None:
        super().__init__(work, place)
        optimizer = session.optimizer(self.model, work.optimizer)
        assert isinstance(optimizer, SharedOptimizer)
        self._optimizer, table = optimizer, optimizer._table
        self._wait = table.wait
        table.wait = self._timed_wait  # type: ignore[method-assign]
        self._posted = self._released = 0.0
        self._parts = [0.0] * 3
        self._computed: list[float] = []

    def _timed_wait(self, number: int, *, block: bool = True) -> Reading | None:
        self._posted = time.perf_counter()
        found = self._wait(number, block=block)
        self._released = time.perf_counter()
        return found

    def begin(self) -> None:
        self._parts, self._computed = [0.0] * 3, []

    def step(self) -> None:
        now, parts = time.perf_counter, self._parts
        began = now()
        self.compute()
        computed = now()
        self._optimizer.step()
        self._computed.append(computed - began)
        parts[0] += self._posted - computed
        parts[1] += self._released - self._posted
        parts[2] += now() - self._released

    def window(self, steps: int, seconds: float) -> Window:
        publish, wait, read = (part / steps for part in self._parts)
        return Window(
            steps=steps,
            step=seconds / steps,
            compute=sum(self._computed) / steps,
            publish=publish,
            wait=wait,
            read=read,
            inequality=inequality(self._computed),
        )
