"""A learner's process under a batch method: computes the tasks it is given, one portion after the other.

Between two portions it looks whether a task was cancelled. Not responsible for which portions (`batch.portions`), nor for how one is
computed (`learn.evaluating`).
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from syncline.batch import messages as b
from syncline.batch.portions import Batch, Cancel
from syncline.engines.local.batch_shard import BatchMemory, Pool
from syncline.engines.local.control_channel import NOTHING, Channel, Closed
from syncline.engines.local.learner import say
from syncline.engines.local.shared_memory import Region, crash_point
from syncline.engines.run import Task
from syncline.learn.model_factories import seed_random
from syncline.learn.portion_worker import BatchPlan, PortionWorker


@dataclass(frozen=True, slots=True)
class BatchLearnerSpec:
    """A learner's own part of its setup."""

    device: str
    point: Region
    pools: list[Region]
    beat: Region  # its first word counts portions


class _Learner:
    def __init__(self, channel: Channel, spec: BatchLearnerSpec, plan: BatchPlan) -> None:
        self._channel, self._spec = channel, spec
        self._worker = PortionWorker(plan, torch.device(spec.device))
        self._point = plan.layout.parameters.segments(spec.point.tensor())
        self._slots = BatchMemory(plan.layout, spec.pools)
        self._tasks: deque[b.Give] = deque()  # the first is being computed
        self._next = 0  # portion of it
        self._loss, self._examples = 0.0, 0
        self._at = -1  # the evaluation whose point was read

    def run(self) -> None:
        """Until the supervisor closes the channel."""
        self._channel.send(b.Ready())
        while True:
            message = self._channel.take() if self._tasks else self._channel.receive()
            if message is not NOTHING:
                self._hear(message)
            else:
                self._portion(self._tasks[0])

    def _hear(self, message: Any) -> None:
        if isinstance(message, b.Give):
            self._tasks.append(message)
            if len(self._tasks) == 1:
                self._next = message.start
        elif isinstance(message, Cancel):
            self._drop(message)
        elif isinstance(message, Pool):
            self._slots.extend(message.region)

    def _drop(self, cancel: Cancel) -> None:
        """Said back, unless it was answered already."""
        for place, task in enumerate(self._tasks):
            if task.task == cancel.task:
                del self._tasks[place]
                if place == 0:
                    self._next = self._tasks[0].start if self._tasks else 0
                self._channel.send(b.Dropped(task.evaluation, task.task))
                return

    def _portion(self, task: b.Give) -> None:
        crash_point()
        if self._next == task.start:
            self._begin(task)
        loss, examples = self._worker.add(task.batch, self._next, self._following(task))
        self._loss, self._examples = self._loss + loss, self._examples + examples
        self._spec.beat.words[0] += 1
        self._next += 1
        if self._next == task.stop:
            self._answer(task)

    def _begin(self, task: b.Give) -> None:
        if self._at != task.evaluation:
            self._worker.move(self._point)
            self._at = task.evaluation
        self._worker.begin(self._slots[task.slot])
        self._loss, self._examples = 0.0, 0

    def _following(self, task: b.Give) -> tuple[Batch, int] | None:
        """The portion whose data are read while this one is computed."""
        if self._next + 1 < task.stop:
            return task.batch, self._next + 1
        return (self._tasks[1].batch, self._tasks[1].start) if len(self._tasks) > 1 else None

    def _answer(self, task: b.Give) -> None:
        self._worker.end(self._slots[task.slot])
        crash_point()
        self._channel.send(b.Answered(task.evaluation, task.task, self._loss, self._examples))
        crash_point()
        self._tasks.popleft()
        self._next = self._tasks[0].start if self._tasks else 0


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
