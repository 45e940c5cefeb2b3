"""A batch method's processes: a shard holds named vectors and carries out the commands on them, a learner computes its tasks' portions.

Not responsible for which commands and portions (`batch.coordinator`, `batch.portions`), nor for how a portion is computed
(`learn.portion_worker`).
"""

from __future__ import annotations

import sys
import traceback
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from syncline import messages as m
from syncline.batch import messages as b
from syncline.batch.portions import Batch, Cancel
from syncline.engines.checkpoint_writer import write_part
from syncline.engines.local.control_channel import NOTHING, Channel, Closed
from syncline.engines.local.learner import say
from syncline.engines.local.shared_memory import Region, crash_point, whole_pages
from syncline.engines.run import Task
from syncline.learn.model_factories import seed_random
from syncline.learn.portion_worker import BatchPlan, PortionWorker
from syncline.table.checkpoint_content import table_file
from syncline.table.checkpoints import Folder
from syncline.table.layout import Layout
from syncline.table.vectors import Vectors, read_vectors, vector_tensors


@dataclass(frozen=True, slots=True)
class BatchShardSpec:
    """A shard's own part of its setup."""

    shard: int
    layout: Layout
    names: tuple[str, ...]  # of vectors
    point: Region
    pools: list[Region]
    beat: Region  # its first word counts messages
    folder: str | None = None  # of checkpoints
    restored: tuple[str, list[str]] | None = None  # a checkpoint to go on from, and its files


@dataclass(frozen=True, slots=True)
class BatchLearnerSpec:
    """A learner's own part of its setup."""

    device: str
    point: Region
    pools: list[Region]
    beat: Region  # its first word counts portions


def _slots_in(layout: Layout, region: Region) -> list[list[Tensor]]:
    """Segments of each slot, in their order."""
    memory, size = region.tensor(), whole_pages(layout.parameters.nbytes)
    region.close()
    lows = range(0, len(memory) - size + 1, size)
    return [layout.parameters.segments(memory[low : low + size]) for low in lows]


class _Shard:
    def __init__(self, channel: Channel, spec: BatchShardSpec) -> None:
        self._channel, self._spec = channel, spec
        self._part = spec.layout.parts[spec.shard]
        x = self._part.segments(spec.layout.parameters.segments(spec.point.tensor()))
        self._vectors = Vectors(spec.names, x)
        self._slots = [slot for region in spec.pools for slot in _slots_in(spec.layout, region)]
        if spec.restored is not None:
            folder, files = spec.restored
            read_vectors(Path(folder), files, spec.layout, spec.shard, self._vectors)
        channel.send(b.Ready())

    def hear(self, message: Any) -> None:
        spec = self._spec
        spec.beat.words[0] += 1
        if isinstance(message, b.Run):
            measured = self._vectors.run(message.commands, crash_point)
            self._channel.send(b.Ran(spec.shard, message.number, measured))
        elif isinstance(message, b.Add):
            crash_point()
            values = self._part.segments(self._slots[message.slot])
            self._vectors.add(message.to, values, first=message.first)
            self._channel.send(b.Added(spec.shard, message.slot))
        elif isinstance(message, b.Save):  # at once: the vectors of the next iteration are others
            crash_point()
            assert spec.folder is not None
            tensors = vector_tensors(spec.layout, spec.shard, self._vectors)
            job = message.number, table_file(0, spec.shard), tensors, dict[str, Any]()
            self._channel.send(write_part(Folder(Path(spec.folder)), job))
        elif isinstance(message, Region):  # more slots
            self._slots += _slots_in(spec.layout, message)


def run_batch_shard(channel: Channel, spec: BatchShardSpec) -> None:
    """Until the supervisor closes the channel."""
    try:
        shard = _Shard(channel, spec)
        while True:
            shard.hear(channel.receive())
    except Closed:
        return
    except Exception as error:
        channel.try_send(m.ShardRaised(spec.shard, None, traceback.format_exc()))
        raise SystemExit(1) from error


class _Learner:
    """Computes one portion after the other; between two it looks whether a task was cancelled."""

    def __init__(self, channel: Channel, spec: BatchLearnerSpec, plan: BatchPlan) -> None:
        self._channel, self._spec, self._layout = channel, spec, plan.layout
        self._worker = PortionWorker(plan, torch.device(spec.device))
        self._point = plan.layout.parameters.segments(spec.point.tensor())
        self._slots = [slot for region in spec.pools for slot in _slots_in(plan.layout, region)]
        self._tasks: deque[b.Give] = deque()  # the first is being computed
        self._next: int | None = None  # portion of it; None: it was not begun
        self._loss, self._examples = 0.0, 0
        self._at = -1  # the evaluation whose point was read

    def run(self) -> None:
        """Until the supervisor closes the channel."""
        self._channel.send(b.Ready())
        while True:
            message = self._channel.take() if self._tasks else self._channel.receive()
            if message is NOTHING:
                self._portion(self._tasks[0])
            elif isinstance(message, b.Give):
                self._tasks.append(message)
            elif isinstance(message, Cancel):
                self._drop(message)
            elif isinstance(message, Region):  # more slots
                self._slots += _slots_in(self._layout, message)

    def _drop(self, cancel: Cancel) -> None:
        """Said back, unless it was answered already."""
        for place, task in enumerate(self._tasks):
            if task.task == cancel.task:
                del self._tasks[place]
                if place == 0:
                    self._next = None
                self._channel.send(b.Dropped(task.evaluation, task.task))
                return

    def _portion(self, task: b.Give) -> None:
        crash_point()
        if self._next is None:
            self._next = task.start
            if self._at != task.evaluation:
                self._worker.move(self._point)
                self._at = task.evaluation
            self._worker.begin(self._slots[task.slot])
            self._loss, self._examples = 0.0, 0
        following: tuple[Batch, int] | None = None  # whose data are read while this one is computed
        if self._next + 1 < task.stop:
            following = task.batch, self._next + 1
        elif len(self._tasks) > 1:
            following = self._tasks[1].batch, self._tasks[1].start
        loss, examples = self._worker.add(task.batch, self._next, following)
        self._loss, self._examples = self._loss + loss, self._examples + examples
        self._spec.beat.words[0] += 1
        self._next += 1
        if self._next == task.stop:
            self._worker.end(self._slots[task.slot])
            crash_point()
            self._channel.send(b.Answered(task.evaluation, task.task, self._loss, self._examples))
            crash_point()
            self._tasks.popleft()
            self._next = None


def run_batch_learner(channel: Channel, spec: BatchLearnerSpec) -> int:
    """Compute until the supervisor has enough; say what went wrong."""
    try:
        task: Task = channel.receive()
        plan: BatchPlan = task.arguments[0]
        seed_random(plan.seed)
        _Learner(channel, spec, plan).run()
    except Closed:
        sys.stdout.flush()
        return 0
    except BaseException as error:
        say(channel, error)
        return 1
    return 0
