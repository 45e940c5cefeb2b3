"""A simulated run: the ports of learners, shards and coordinator as events of one queue.

Everything that a process would do happens here in virtual time; sessions, roles and protocols are the local engine's.
"""

from __future__ import annotations

import copy
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from syncline.dial import Sync
from syncline.engines.files import commit, write_part
from syncline.engines.record import Recorder, learner_error
from syncline.engines.run import Outcome, RunSpec
from syncline.engines.sim.clock import Clock, Fiber, Times
from syncline.errors import LostError
from syncline.learn.session import Session
from syncline.ports import (
    CoordinatorPort,
    Entry,
    Kind,
    LearnerPort,
    Note,
    Portion,
    Reading,
    RunStopped,
    ServerPort,
    TableLink,
)
from syncline.table.checkpoints import Folder, Written
from syncline.table.layout import Layout
from syncline.table.slot import Slot, private_slot
from syncline.topology import messages as m
from syncline.topology.coordinator import Coordinator
from syncline.topology.servers import ServerRole


class SimTable:
    """One table's memory."""

    def __init__(self, layout: Layout, kept: int) -> None:
        self.layout = layout
        self.weights = self._segments()
        self.history = [self._segments() for _ in range(kept)]
        flats = (layout.buffers, layout.others)
        self.buffers, self.others = (
            flat.views(flat.segments(torch.zeros(flat.nbytes, dtype=torch.uint8))) for flat in flats
        )

    def _segments(self) -> list[Tensor]:
        flat = self.layout.parameters
        return flat.segments(torch.zeros(flat.nbytes, dtype=torch.uint8))


class SimLane:
    """One learner's slots and inbox of one table."""

    def __init__(self, layout: Layout, slots: int) -> None:
        self.slots = [private_slot(layout) for _ in range(slots)]
        flat = layout.parameters
        self.inbox = flat.segments(torch.zeros(flat.nbytes, dtype=torch.uint8))
        self.released: dict[int, tuple[int, Reading]] = {}  # by shard, with its ticket
        self.freed: dict[int, int] = {}  # by shard


class SimLearner(LearnerPort):
    """One simulated learner: the session's port, and the thread it runs on."""

    def __init__(self, world: World, learner: int, rank: int) -> None:
        self._world, self.learner, self.rank = world, learner, rank
        self.fiber = Fiber(self._main)
        self._arrival = 0.0  # of its last note: notes do not overtake each other
        self._portions: dict[tuple[int, int], Portion] = {}
        self._answers: list[Any] = []
        self.waits_for: str | None = None

    def _main(self) -> None:
        world, spec = self._world, self._world.spec
        try:
            session = Session(self, spec.session(self.rank))
            session.seed()
            arguments, keywords = copy_arguments((spec.arguments, spec.keywords))
            try:
                value = spec.function(session, *arguments, **keywords)
            except RunStopped:
                value = None
            finally:
                session.close()
            self.send(lambda: world.returned(self, value))
        except BaseException as error:
            text = "".join(traceback.format_exception(error))
            world.fail(learner_error(self.rank, error, text))

    # -- waiting -----------------------------------------------------------------------------------------

    def until(self, ready: Callable[[], bool], what: str) -> None:
        """Give way until it is so."""
        while not ready():
            self.waits_for = what
            self.fiber.block()
        self.waits_for = None

    def wake(self) -> None:
        if self.waits_for is not None and not self.fiber.done:
            self.fiber.resume()

    def send(self, action: Callable[[], None], seconds: float | None = None) -> None:
        clock = self._world.clock
        self._arrival = max(
            self._arrival, clock.now + (self._world.times.latency if seconds is None else seconds)
        )
        clock.at(self._arrival, action)

    # -- the port ----------------------------------------------------------------------------------------

    def now(self) -> float:
        return self._world.clock.now

    def spend(self, examples: int) -> None:
        clock = self._world.clock
        end = clock.now + self._world.times.compute
        clock.at(end, self.wake)
        self.until(lambda: clock.now >= end, "its own computation")

    def post(self, note: Note, *, ring: bool = True) -> None:
        times = self._world.times
        bulk = times.transfer if note.kind in (Kind.GRADIENT, Kind.PUT) else 0.0
        self.send(lambda: self._world.roles[0].note(self.learner, note), times.latency + bulk)

    def ring(self) -> None:
        pass

    def portion(self, loader: int, index: int, *, block: bool) -> Portion | None:
        key = (loader, index)
        if block:
            self.until(lambda: key in self._portions or self.stopping(), f"data of loader {loader}")
        return self._portions.pop(key, None)

    def give(self, portion: Portion) -> None:
        self._portions[portion.loader, portion.number] = portion
        self.wake()

    def request(self, message: Any) -> Any:
        self.send(lambda: self._world.coordinator.from_learner(self.learner, message))
        self.until(lambda: bool(self._answers), f"an answer to {type(message).__name__}")
        answer = self._answers.pop()
        if isinstance(answer, m.Refused):
            raise answer.error
        return answer

    def answer(self, message: Any) -> None:
        self._answers.append(message)
        self.wake()

    def tell(self, message: Any) -> None:
        self.send(lambda: self._world.coordinator.from_learner(self.learner, message))

    def first_values(
        self, handle: SimTable, layout: Layout
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        return layout.parameters.views(handle.weights), handle.buffers, handle.others

    def pin(self, link: TableLink) -> None:
        pass

    def attach(self, opened: m.Opened) -> SimLink:
        return SimLink(self, opened)

    def rejoin(self, tables: int, loaders: int) -> list[Any]:
        raise AssertionError("simulated servers are never started anew")

    def dial(self, number: int) -> Sync:
        return self._world.dials[number]

    def stopping(self) -> bool:
        return self._world.stopping


class SimLink(TableLink):
    """A simulated learner's end of one table."""

    def __init__(self, learner: SimLearner, opened: m.Opened) -> None:
        self._learner, self._lane = learner, opened.lane
        self.layout, self.slots = opened.layout, opened.lane.slots
        self.buffers, self.others = opened.handle.buffers, opened.handle.others
        flat, memory = opened.layout.parameters, opened.handle
        self._views = flat.views(opened.lane.inbox)
        self._newest = flat.views(memory.weights)
        self._history = [flat.views(segments) for segments in memory.history]
        self._table = opened.table

    def weights(self, version: int, sync: Sync) -> list[Tensor]:
        if not sync.lockstep:
            return self._views
        return self._history[version % len(self._history)] if sync.delay else self._newest

    def released(self, number: int) -> Reading | None:
        readings = self._lane.released
        if len(readings) < self.layout.shards or any(done < number for done, _ in readings.values()):
            return None
        versions = {reading.version for _, reading in readings.values()}
        if len(versions) != 1:
            raise AssertionError(f"shards released ticket {number} with versions {sorted(versions)}")
        return readings[0][1]

    def wait(self, number: int) -> Reading:
        what = f"ticket {number} of table {self._table}"
        self._learner.until(lambda: self.released(number) is not None, what)
        reading = self.released(number)
        assert reading is not None
        return reading

    def wait_free(self, number: int) -> None:
        lane, shards = self._lane, range(self.layout.shards)

        def free(shard: int) -> bool:
            last = lane.released[shard][0] if shard in lane.released else -1
            return max(last, lane.freed.get(shard, -1)) >= number

        self._learner.until(lambda: all(map(free, shards)), f"the slot of ticket {number}")


class SimServer(ServerPort):
    """One simulated shard's effects."""

    def __init__(self, world: World, shard: int) -> None:
        self._world, self.shard, self.shards = world, shard, world.spec.shards

    def append(self, entry: Entry) -> None:
        for role in self._world.roles[1:]:
            self._world.soon(lambda role=role: role.entry(entry))  # type: ignore[misc]

    def weights(self, table: int) -> tuple[list[Tensor], list[list[Tensor]]]:
        memory = self._world.tables[table]
        return memory.weights, memory.history

    def slot(self, table: int, learner: int, index: int) -> Slot:
        return self._world.lanes[table, learner].slots[index]

    def inbox(self, table: int, learner: int) -> list[Tensor] | None:
        lane = self._world.lanes.get((table, learner))
        return lane.inbox if lane else None

    def release(self, table: int, learner: int, number: int, reading: Reading | None) -> None:
        lane = self._world.lanes.get((table, learner))
        if lane is not None:
            times = self._world.times

            def arrive() -> None:
                if reading is None:
                    lane.freed[self.shard] = number
                else:
                    lane.released[self.shard] = (number, reading)
                self._world.learners[learner].wake()

            self._world.clock.after(times.latency + times.transfer, arrive)

    def grant(self, learner: int, portion: Portion) -> None:
        self._world.soon(lambda: self._world.learners[learner].give(portion))

    def share_norms(self, table: int, version: int, norms: Tensor) -> None:
        self._world.share_norms(self.shard, table, version, norms)

    def forget(self, learner: int) -> None:
        if self.shard == self.shards - 1:  # the lanes are shared: the last to forget drops them
            for key in [key for key in self._world.lanes if key[1] == learner]:
                del self._world.lanes[key]

    def save(self, number: int, name: str, tensors: dict[str, Tensor], notes: dict[str, Any]) -> None:
        assert self._world.folder is not None
        self.report(write_part(self._world.folder, (number, name, tensors, notes)))

    def report(self, message: Any) -> None:
        self._world.soon(lambda: self._world.coordinator.from_shard(message))


class SimCoordinator(CoordinatorPort):
    """The simulated coordinator's effects."""

    def __init__(self, world: World) -> None:
        self._world, self.shards = world, world.spec.shards

    def make_table(self, table: int, layout: Layout) -> SimTable:
        delay = self._world.spec.delay
        memory = self._world.tables[table] = SimTable(layout, delay + 1 if delay else 0)
        return memory

    def make_lane(self, table: int, learner: int, layout: Layout) -> SimLane:
        lane = self._world.lanes[table, learner] = SimLane(layout, max(2, self._world.spec.delay + 1))
        return lane

    def reply(self, learner: int, message: Any) -> None:
        self._world.soon(lambda: self._world.learners[learner].answer(message))

    def tell_shards(self, message: Any) -> None:
        for role in reversed(self._world.roles):
            self._world.soon(lambda role=role: role.handle(message))  # type: ignore[misc]

    def fill_table(self, handle: SimTable, layout: Layout, values: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for view, value in zip(layout.parameters.views(handle.weights), values, strict=True):
                view.copy_(value)

    def read_table(self, handle: SimTable, layout: Layout) -> list[Tensor]:
        return [view.clone() for view in layout.parameters.views(handle.weights)]

    def reset_learners(self) -> None:
        raise AssertionError("simulated servers are never started anew")

    def new_desk(self, learner: int) -> Any:
        raise AssertionError("simulated servers are never started anew")

    def commit(self, number: int, manifest: dict[str, Any], files: Sequence[Written]) -> bool:
        assert self._world.folder is not None
        done = commit(self._world.folder, number, manifest, files, self._world.spec.keep)
        self.emit(done)
        return not done.problem

    def abandon(self, number: int) -> None:
        assert self._world.folder is not None
        self._world.folder.abandon(number)

    def history(self) -> list[dict[str, Any]]:
        return self._world.recorder.history()

    def add_dial(self, number: int, sync: Sync) -> None:
        self._world.dials[number] = sync

    def stop_learners(self) -> None:
        self._world.stop()

    def emit(self, record: Any) -> None:
        self._world.recorder.emit(record)


class World:
    """One simulated run."""

    def __init__(self, spec: RunSpec, times: Times) -> None:
        self.spec, self.times = spec, times
        self.clock = Clock()
        self.stopping = False
        self.tables: dict[int, SimTable] = {}
        self.lanes: dict[tuple[int, int], SimLane] = {}
        self.dials: dict[int, Sync] = {}
        self._norms: dict[tuple[int, int], dict[int, Tensor]] = {}
        ids = {rank + 1: rank for rank in range(spec.learners)}
        self.folder = Folder(Path(spec.folder)) if spec.folder else None
        self.coordinator = Coordinator(SimCoordinator(self), spec.plan(), ids, spec.restored)
        self.roles = [ServerRole(SimServer(self, shard)) for shard in range(spec.shards)]
        self.recorder = Recorder(
            now=lambda: self.clock.now,
            evaluate=self._evaluate,
            stop=self.coordinator.stop,
            layouts=lambda: {table: self.coordinator.layout(table) for table in self.coordinator.tables},
            callbacks=spec.callbacks,
            listeners=spec.listeners,
            restored=spec.restored,
        )
        self.learners = {learner: SimLearner(self, learner, rank) for learner, rank in ids.items()}
        self._left = 0
        self._cut_asked = 0.0
        self.commands: deque[Callable[[World], None]] = deque()  # from other threads

    def soon(self, action: Callable[[], None]) -> None:
        self.clock.after(self.times.latency, action)

    def fail(self, error: BaseException) -> None:
        self.recorder.error = self.recorder.error or error

    def stop(self) -> None:
        if not self.stopping:
            self.stopping = True
            for learner in self.learners.values():
                self.soon(learner.wake)

    def returned(self, learner: SimLearner, value: Any) -> None:
        self.recorder.outcome.returned[learner.rank] = value
        self._left += 1
        self.coordinator.leave(learner.learner, lost=False)
        if self._left == len(self.learners):
            self.soon(self.coordinator.finish)

    def add_learner(self) -> None:
        """One more joins, now."""
        if self.stopping or self._left == len(self.learners):
            self.recorder.event("a learner not added: the run is ending", kind="refused")
            return
        learner, rank = 1 + max(self.learners), 1 + max(each.rank for each in self.learners.values())
        self.recorder.event("joined", rank, kind="joined")
        self.coordinator.join(learner, rank)
        self.learners[learner] = SimLearner(self, learner, rank)
        self.soon(self.learners[learner].fiber.resume)

    def share_norms(self, shard: int, table: int, version: int, norms: Tensor) -> None:
        brought = self._norms.setdefault((table, version), {})
        brought[shard] = norms
        layout = self.tables[table].layout
        if len(brought) == layout.shards:
            del self._norms[table, version]
            event = m.Norms(table, version, [brought[index] for index in sorted(brought)])
            for role in self.roles[: layout.shards]:
                self.soon(lambda role=role: role.handle(event))  # type: ignore[misc]

    def _evaluate(self, epoch: int, state: dict[str, Tensor]) -> None:
        assert self.spec.evaluate is not None
        self.recorder.evaluated(epoch, self.spec.evaluate(state))

    def run(self) -> Outcome:
        self.coordinator.begin()
        for learner in self.learners.values():
            self.clock.at(0.0, learner.fiber.resume)
        while self.recorder.error is None and self.clock.step():
            while self.commands:
                self.commands.popleft()(self)
            seconds = self.spec.cut_seconds
            if seconds is not None and self.clock.now - self._cut_asked > seconds:
                self._cut_asked = self.clock.now
                self.coordinator.ask_cut()
        if self.recorder.error is not None:
            raise self.recorder.error
        if not self.recorder.complete():
            waiting = {learner.rank: learner.waits_for for learner in self.learners.values()}
            raise LostError(
                f"the simulated run stands still at {self.clock.now:g} s; who waits for what: {waiting}"
            )
        self.recorder.outcome.seconds = self.clock.now
        return self.recorder.outcome


def copy_arguments(arguments: Any) -> Any:
    """What a process would get: its own copy of everything but the data sets, which are only read."""
    shared: dict[int, Any] = {}
    _find_data(arguments, shared)
    return copy.deepcopy(arguments, memo=dict(shared))


def _find_data(value: Any, found: dict[int, Any]) -> None:
    if isinstance(value, Dataset):
        found[id(value)] = value
    elif isinstance(value, dict):
        for each in value.values():
            _find_data(each, found)
    elif isinstance(value, (list, tuple)):
        for each in value:
            _find_data(each, found)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            _find_data(getattr(value, name), found)
