"""Learners among equals without an engine: fibers of this process that take turns, and sums that are made at once when all have come."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from syncline.dial import Course
from syncline.learn.allreduce_session import AllReduceSession
from syncline.ports import CollectivePort, Computing, Reduction, Serving
from syncline.roles.checkpoint_manifest import Restored
from syncline.roles.run_plan import RunPlan, Seat
from syncline.sim.fibers import Fiber, Killed, Thread
from syncline.topologies import parse_topology

Loop = Callable[[AllReduceSession], Any]


class Sum(Reduction):
    """Of one call of every learner."""

    def __init__(self, crowd: Crowd, call: int, fiber: Fiber | None) -> None:
        self._crowd, self._call, self._fiber = crowd, call, fiber

    def wait(self, *, block: bool = True) -> bool:
        while block and not self._crowd.complete(self._call):
            assert self._fiber is not None, "the others never come"
            self._fiber.block()
        return self._crowd.complete(self._call)


class Port(CollectivePort):
    """What one learner says and brings; `clock` goes on by hand."""

    def __init__(self, crowd: Crowd, rank: int) -> None:
        self._crowd, self.rank, self.learners = crowd, rank, crowd.learners
        self.fiber: Fiber | None = None
        self._calls = 0
        self.clock, self.stop = 0.0, False
        self.told: list[Any] = []
        self.spent: list[Computing] = []
        self.reduced: list[int] = []  # elements of each reduction
        self.saved: dict[tuple[int, str], tuple[dict[str, Tensor], dict[str, Any]]] = {}

    def now(self) -> float:
        return self.clock

    def _bring(self, kind: str, value: Any) -> Sum:
        self._calls += 1
        self._crowd.bring(self._calls - 1, self.rank, kind, value)
        return Sum(self._crowd, self._calls - 1, self.fiber)

    def reduce(self, buffer: Tensor) -> Reduction:
        self.reduced.append(buffer.numel())
        return self._bring("sum", buffer)

    def broadcast(self, buffer: Tensor) -> None:
        self._bring("copy", buffer).wait()

    def meet(self, what: str, value: Any) -> list[Any]:
        self._bring(what, value).wait()
        return self._crowd.brought(self._calls - 1)

    def tell(self, message: Any) -> None:
        self.told.append(message)

    def heard(self, kind: type) -> list[Any]:
        return [message for message in self.told if isinstance(message, kind)]

    def spend(self, work: Computing | Serving) -> None:
        assert isinstance(work, Computing)
        self.spent.append(work)

    def save(self, number: int, name: str, tensors: dict[str, Tensor], notes: dict[str, Any]) -> None:
        self.saved[number, name] = tensors, notes

    def stopping(self) -> bool:
        return self.stop


class Crowd:
    """All learners of one run."""

    def __init__(
        self,
        learners: int = 1,
        topology: str = "allreduce:blocking",
        sync: str | Mapping[int, str] = "hardsync",
        **plan: Any,
    ) -> None:
        self.learners = learners
        self.plan = RunPlan(
            course=Course.of(sync), learners=learners, topology=parse_topology(topology), **plan
        )
        self.ports = [Port(self, rank) for rank in range(learners)]
        self._calls: dict[int, dict[int, tuple[str, Any]]] = {}

    def bring(self, call: int, rank: int, kind: str, value: Any) -> None:
        there = self._calls.setdefault(call, {})
        there[rank] = kind, value
        assert len({kind for kind, _ in there.values()}) == 1, f"not the same call: {there}"
        if len(there) < self.learners or kind not in ("sum", "copy"):
            return
        values = self.brought(call)
        with torch.no_grad():
            found = torch.stack(values).sum(0) if kind == "sum" else values[0].clone()
            for each in values:
                each.copy_(found)

    def complete(self, call: int) -> bool:
        return len(self._calls[call]) == self.learners

    def brought(self, call: int) -> list[Any]:
        return [self._calls[call][rank][1] for rank in range(self.learners)]

    def session(self, rank: int = 0, restored: Restored | None = None) -> AllReduceSession:
        seat = Seat(plan=self.plan, rank=rank, reader=False)
        return AllReduceSession(self.ports[rank], seat, restored)

    def run(self, *loops: Loop, restored: Restored | None = None) -> list[Any]:
        """One loop for all, or one for each: what they return, or the first error, when all are over or stand still."""
        found: list[Any] = [None] * self.learners
        errors: list[BaseException] = []

        def main(rank: int) -> None:
            session = None
            try:
                session = self.session(rank, restored)
                found[rank] = (loops * self.learners)[rank](session)
                session.close()
            except Killed:
                pass
            except BaseException as error:
                errors.append(error)
            finally:
                if session is not None:
                    session.watch.close()

        # threads, of which one runs at a time: backward gives way inside torch, whose state is the thread's
        fibers = [Thread(lambda rank=rank: main(rank)) for rank in range(self.learners)]
        for port, fiber in zip(self.ports, fibers, strict=True):
            port.fiber = fiber
        before = None
        while before != (before := self._done(fibers)) and not errors:
            for fiber in fibers:
                if not fiber.done:
                    fiber.resume()
        over = all(fiber.done for fiber in fibers)
        for fiber in fibers:
            fiber.end()
        if errors:
            raise errors[0]
        assert over, "the learners stand still"
        return found

    def _done(self, fibers: Sequence[Fiber]) -> tuple[int, int]:
        return sum(map(len, self._calls.values())), sum(fiber.done for fiber in fibers)
