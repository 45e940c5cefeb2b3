"""A microbenchmark of what a run's processes do to each other through the memory: they compute, copy and fold in fixed turns.

A fold of gradients that other cores have just written, into weights that other cores have just read, takes two or three times
as long as in one process. No protocol, no messages, no queues: what these do is left to the simulator. For machines with a core for
each process; where they share cores `shard_work` measures instead.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from syncline.dial import Course, Sync
from syncline.engines.local.shared_memory import PAGE, Region, SharedWords
from syncline.errors import RunError
from syncline.learn.session import Session
from syncline.table.gradient_slot import Slot, slot_bytes
from syncline.table.layout import LINE
from syncline.table.shard import Shard
from syncline.table.store import OnePlace
from tools.calibration.shard_benchmark import Draft, Work, hand_over, part_bytes, seconds_of
from tools.calibration.window_benchmark import Player, Stage, Workload, inequality

YIELDS, NAP = 500, 0.00005  # how a process waits for its turn
PATIENCE = 60.0  # seconds
CELL = LINE // 8  # a word for each that is written: a cache line of its own


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Who takes part, and where the memory lies."""

    work: Workload
    learners: int
    shards: int
    sync: Sync
    path: str = ""


@dataclass(slots=True)
class Seen:
    """Seconds of each operation in a window; of a shard's, for its part of the table."""

    compute: list[float] = field(default_factory=list)
    publish: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)
    take: list[float] = field(default_factory=list)
    fold: list[float] = field(default_factory=list)
    serve: list[float] = field(default_factory=list)


class Contention(Stage):
    """So many learners and shards, each with a core; a window is for the first, or for all of the learners."""

    def __init__(self, work: Workload, *, learners: int, shards: int, sync: str) -> None:
        plan = Plan(work=work, learners=learners, shards=shards, sync=Course.of(sync).first)
        board = _Board(plan)
        self._learners = learners
        sizes = part_bytes(board.layout)
        self._shares = [size / sum(sizes) for size in sizes]
        self._region = Region(board.nbytes)
        path = f"/proc/{os.getpid()}/fd/{self._region.fd}"
        self._windows, self._round = 0, 0.0
        super().__init__(partial(_take_part, replace(plan, path=path)), processes=learners + shards)

    def __exit__(self, *raised: object) -> None:
        try:
            super().__exit__(*raised)
        finally:
            self._region.release()

    def window(self, active: int, seconds: float) -> Work:
        """Means over whoever is active; the other learners compute meanwhile."""
        self._windows += 1
        count = max(3, round(seconds / self._round)) if self._round else 3
        start = time.perf_counter()
        self._tell(f"work {self._windows} {active} {count}")
        answers = [Seen(**answer) for answer in self._answers()]
        self._round = (time.perf_counter() - start) / count
        learners, shards = answers[:active], answers[self._learners :]
        computed = [seconds for learner in learners for seconds in learner.compute]
        copied = [seconds for learner in learners for seconds in (*learner.publish, *learner.read)]
        return Work(
            compute=_mean(computed),
            uneven=inequality(computed),
            copy=_mean(copied),
            take=self._whole([each.take for each in shards]),
            fold=self._whole([each.fold for each in shards]),
            serve=self._whole([each.serve for each in shards]),
        )

    def _whole(self, parts: list[list[float]]) -> float:
        """For the whole table on one shard."""
        return _mean([_mean(part) / share for part, share in zip(parts, self._shares, strict=True) if share])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


# -- in the processes ------------------------------------------------------------------------------------------


class _Board(Draft):
    """A table's memory as in a run: weights, and for each learner a slot and an inbox; and whose turn it is."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan.work, shards=plan.shards)
        self._plan = plan
        words = CELL * (1 + plan.learners * (1 + plan.shards))
        self._start = -(-8 * words // PAGE) * PAGE
        self._weights = self.layout.parameters.nbytes
        self._slot = -(-slot_bytes(self.layout) // PAGE) * PAGE
        self.nbytes = self._start + self._weights + plan.learners * (self._slot + self._weights)

    def map(self) -> None:
        plan, layout = self._plan, self.layout
        region = Region(self.nbytes, os.open(plan.path, os.O_RDWR))
        self._cells, memory = SharedWords(region), region.tensor()
        self.weights = layout.parameters.segments(memory[self._start :])
        slots = self._start + self._weights
        inboxes = slots + plan.learners * self._slot
        ranks = range(plan.learners)
        self.slots = [Slot(layout, memory[slots + rank * self._slot :]) for rank in ranks]
        self.inboxes = [
            layout.parameters.segments(memory[inboxes + rank * self._weights :]) for rank in ranks
        ]
        region.close()

    # -- turns -------------------------------------------------------------------------------------------

    def tell_over(self, window: int) -> None:
        self._cells.store(0, window)

    def over(self) -> int:
        """The last window that the first learner has ended."""
        return self._cells.load(0)

    def post(self, rank: int, count: int) -> None:
        self._cells.store(CELL * (1 + rank), count)

    def posted(self, rank: int) -> int:
        return self._cells.load(CELL * (1 + rank))

    def answer(self, shard: int, rank: int, count: int) -> None:
        self._cells.store(self._reply(shard, rank), count)

    def answered(self, rank: int) -> int:
        """By all shards."""
        return min(self._cells.load(self._reply(shard, rank)) for shard in range(self._plan.shards))

    def _reply(self, shard: int, rank: int) -> int:
        return CELL * (1 + self._plan.learners * (1 + shard) + rank)


def _take_part(plan: Plan, session: Session, place: Path) -> Player:
    board = _Board(plan)
    board.map()
    rank = session.rank
    session.watch.close()  # shards' steps, here, are no plain optimizer's
    return _Learner(plan, board, rank) if rank < plan.learners else _Folder(plan, board, rank - plan.learners)


class _Learner:
    """Computes; hands its gradient over and takes weights over when it is active."""

    def __init__(self, plan: Plan, board: _Board, rank: int) -> None:
        self._board, self._rank = board, rank
        self._work, self._batch = plan.work, plan.work.batch(plan.work.batch_size)
        self._gradients = board.slots[rank].gradients
        weights = board.weights if plan.sync.lockstep else board.inboxes[rank]
        self._weights = board.layout.parameters.views(weights)
        self._posted = 0
        values = [parameter.detach() for parameter in board.parameters]
        torch._foreach_copy_(board.layout.parameters.views(board.inboxes[rank]), values)
        if rank == 0:
            torch._foreach_copy_(board.layout.parameters.views(board.weights), values)

    def obey(self, order: str, values: Sequence[float]) -> Seen:
        window, active, count = map(int, values)
        seen = Seen()
        if self._rank >= active:
            while self._board.over() < window:
                seen.compute.append(seconds_of(self._compute))
            return seen
        for _ in range(count):
            seen.compute.append(seconds_of(self._compute))
            self._exchange(seen)
        if self._rank == 0:
            self._board.tell_over(window)
        return seen

    def _exchange(self, seen: Seen) -> None:
        seen.publish.append(seconds_of(self._publish))
        self._posted += 1
        self._board.post(self._rank, self._posted)
        _until(lambda: self._board.answered(self._rank) >= self._posted)
        seen.read.append(seconds_of(self._read))

    def _compute(self) -> None:
        self._work.compute(self._board.model, self._batch)

    def _publish(self) -> None:
        hand_over(self._board.parameters, self._gradients)

    @torch.no_grad()
    def _read(self) -> None:
        torch._foreach_copy_(self._board.parameters, self._weights)


class _Folder:
    """One shard's part: takes the active learners' gradients in the order of their ranks."""

    def __init__(self, plan: Plan, board: _Board, shard: int) -> None:
        self._board, self._index, self._sync = board, shard, plan.sync
        self._shard = Shard(
            board.layout,
            shard,
            board.template,
            OnePlace(board.layout, shard, board.weights),
            sync=plan.sync,
        )
        self._parts = [slot.part(self._shard.part) for slot in board.slots]
        self._counts = [0] * plan.learners

    def obey(self, order: str, values: Sequence[float]) -> Seen:
        _, active, count = map(int, values)
        seen = Seen()
        for _ in range(count):
            if self._sync.lockstep:
                self._in_lockstep(active, seen)
            else:
                self._one_by_one(active, seen)
        return seen

    def _in_lockstep(self, active: int, seen: Seen) -> None:
        for rank in range(active):
            self._await(rank)
        for rank in range(active):
            self._take(rank, alone=active == 1)
        gather = seconds_of(lambda: self._shard.gather(0))
        apply = seconds_of(self._apply)
        if active > 1:
            seen.take.append(gather / active)
        seen.fold.append(apply if active > 1 else gather + apply)
        for rank in range(active):
            self._board.answer(self._index, rank, self._counts[rank])

    def _one_by_one(self, active: int, seen: Seen) -> None:
        quorum = self._sync.quorum(active)
        for rank in range(active):
            self._await(rank)
            take = seconds_of(partial(self._take, rank, alone=quorum == 1))
            if quorum > 1:
                seen.take.append(take)
            if (rank + 1) % quorum == 0 or rank + 1 == active:
                seen.fold.append(seconds_of(self._fold) + (take if quorum == 1 else 0.0))
            inbox = self._board.inboxes[rank]
            seen.serve.append(seconds_of(partial(self._shard.read, self._shard.version, inbox)))
            self._board.answer(self._index, rank, self._counts[rank])

    def _await(self, rank: int) -> None:
        self._counts[rank] += 1
        _until(lambda: self._board.posted(rank) >= self._counts[rank])

    def _take(self, rank: int, *, alone: bool) -> None:
        part = self._parts[rank]
        self._shard.take(part, full=True, count=1, rank=rank, iteration=0, alone=alone)

    def _fold(self) -> None:
        self._shard.gather(0)
        self._apply()

    def _apply(self) -> None:
        self._shard.apply(self._board.template.options, 1.0)


def _until(ready: Callable[[], bool]) -> None:
    tries, start = 0, time.monotonic()
    while not ready():
        tries += 1
        if tries < YIELDS:
            os.sched_yield()
        else:
            time.sleep(NAP)
            if time.monotonic() - start > PATIENCE:
                raise RunError(f"a microbenchmark's process waited {PATIENCE:.0f} s for its turn")
