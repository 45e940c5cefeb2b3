"""A learner's process: the port of its session on shared memory, and the call of the user's function.

Also the evaluator's process, which tests snapshots beside the learners (R6).
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from syncline.dial import Sync
from syncline.engines.local.cargo import Parcel, pack, unpack
from syncline.engines.local.channel import Channel, Closed
from syncline.engines.local.exchange import Replies
from syncline.engines.local.memory import Bell, Region, Sleeper, crash_at
from syncline.engines.local.server import Desk, Geometry, Lane, Shelf
from syncline.engines.run import Task
from syncline.errors import UsageError
from syncline.learn.session import ServerSession
from syncline.ports import LearnerPort, Note, Portion, Reading, Reset, RunStopped, TableLink
from syncline.table.layout import Layout
from syncline.topology import messages as m
from syncline.topology.plan import Seat

# words of the hub: the run is to end; how often the servers were started; how often learners were called
STOP, GENERATION, CALLS = 0, 1, 2
DIALS, DIAL_ROOM = 64, 1024  # dials that a run may have, and bytes for each


class Hub:
    """What the supervisor tells all learners: that the run ends, and the dials by number."""

    def __init__(self, region: Region) -> None:
        self.words, self._bytes = region.words, region.bytes

    @staticmethod
    def nbytes() -> int:
        return DIAL_ROOM * (1 + DIALS)

    def add_dial(self, number: int, sync: Sync) -> None:
        """Written before anybody can name it."""
        if number >= DIALS:
            raise UsageError(f"the dial was changed {number} times in one run; {DIALS - 1} is the most")
        text = json.dumps(sync.record()).encode()
        start = DIAL_ROOM * (1 + number)
        self._bytes[start : start + DIAL_ROOM] = text.ljust(DIAL_ROOM)

    def dial(self, number: int) -> Sync:
        start = DIAL_ROOM * (1 + number)
        return Sync(**json.loads(bytes(self._bytes[start : start + DIAL_ROOM])))


@dataclass(frozen=True, slots=True)
class LearnerSpec:
    """A learner's own part of its setup."""

    learner: int
    hub: Region
    desk: Region
    bell: Bell
    shard_bell: Bell  # of the leading shard
    geometry: Geometry
    yields: int
    generation: int
    seat: Seat
    crash: int | None = None  # for tests


class LocalLink(TableLink):
    """One table, seen from its learner."""

    def __init__(self, opened: m.Opened, geometry: Geometry, port: LocalLearnerPort) -> None:
        self.layout = opened.layout
        self._shelf = Shelf(opened.handle, opened.layout, kept=geometry.kept)
        self._lane = Lane(opened.lane, opened.layout, slots=geometry.slots)
        self.slots = self._lane.slots
        self._replies: Replies = self._lane.replies
        self._port, self._sleeper = port, port.sleeper
        flat = opened.layout.parameters
        self._inbox = flat.views(self._lane.inbox)
        self._newest = flat.views(self._shelf.weights)
        self._history = [flat.views(segments) for segments in self._shelf.history]
        self.buffers, self.others = self._shelf.buffers, self._shelf.others
        opened.handle.close()
        opened.lane.close()

    def weights(self, version: int, sync: Sync) -> list[Tensor]:
        if not sync.lockstep:
            return self._inbox
        return self._history[version % len(self._history)] if sync.delay else self._newest

    def memory(self) -> list[Tensor]:
        """The blocks that a GPU copies to and from."""
        return [self._lane.memory, self._shelf.memory]

    def released(self, number: int) -> Reading | None:
        found = self._replies.released(number)
        return None if found is None else Reading._make(found)

    def wait(self, number: int) -> Reading:
        if (found := self._replies.released(number)) is None:
            desk = self._port.desk  # not `waiting()`: this is on every step's path
            desk.wait(True)
            try:
                while (found := self._replies.released(number)) is None:
                    self._port.check()
                    self._port.answer_call()
                    self._sleeper.wait()
            finally:
                desk.wait(False)
        self._sleeper.busy()
        return Reading._make(found)

    def free(self, number: int) -> bool:
        return self._replies.freed(number)

    def wait_free(self, number: int) -> None:
        with self._port.waiting():
            while not self._replies.freed(number):
                self._port.check()
                self._port.answer_call()
                self._sleeper.wait()
        self._sleeper.busy()


class LocalLearnerPort(LearnerPort):
    """All that a session asks, on shared memory and one control channel."""

    def __init__(self, channel: Channel, spec: LearnerSpec) -> None:
        self.learner, self.rank = spec.learner, spec.seat.rank
        self._channel, self._spec = channel, spec
        self.desk = Desk(spec.desk)
        self._hub = Hub(spec.hub)
        self.sleeper = Sleeper(spec.bell, yields=spec.yields)
        self._generation, self._calls = spec.generation, self._hub.words[CALLS]
        self._portions: dict[int, dict[int, Portion]] = {}

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """It waits for others meanwhile: it does not hang."""
        desk = self.desk
        desk.wait(True)
        try:
            yield
        finally:
            desk.wait(False)

    def check(self) -> None:
        """Nobody waits for servers that are gone."""
        if self._hub.words[GENERATION] != self._generation:
            raise Reset

    def answer_call(self) -> None:
        """Ask, where it was called while it waits in a step; raises what it is refused with."""
        if self._hub.words[CALLS] != self._calls:
            self._calls = self._hub.words[CALLS]
            self.request(m.Called())

    def now(self) -> float:
        return time.monotonic()

    def spend(self, examples: int) -> None:
        pass

    def post(self, note: Note, *, ring: bool = True) -> None:
        while not self.desk.notes.push(note):
            self.check()
            self._spec.shard_bell.ring()
            self.sleeper.wait(0.01)
        if ring:
            self._spec.shard_bell.ring()

    def ring(self) -> None:
        self._spec.shard_bell.ring()

    def portion(self, loader: int, index: int, *, block: bool) -> Portion | None:
        if not block:
            return self._portion(loader, index, block=False)
        with self.waiting():
            return self._portion(loader, index, block=True)

    def _portion(self, loader: int, index: int, *, block: bool) -> Portion | None:
        mine = self._portions.setdefault(loader, {})
        while True:
            while (record := self.desk.portions.pop()) is not None:
                portion = Portion._make(record)  # type: ignore[arg-type]
                self._portions.setdefault(portion.loader, {})[portion.number] = portion
            if index in mine or not block:
                return mine.pop(index, None)
            if self.stopping():
                return None
            self.check()
            self.sleeper.wait()

    def request(self, message: Any) -> Any:
        self._channel.send(message)
        answer = self._channel.receive()
        if isinstance(answer, m.Refused):
            raise answer.error
        if isinstance(answer, m.Stale):
            raise Reset
        return answer

    def rejoin(self, tables: int, loaders: int) -> list[m.Opened]:
        answer: m.Rejoined = self.request(m.Rejoin(tables, loaders))
        self._generation, desk = answer.desk
        self.desk = Desk(desk)
        desk.close()
        self._portions.clear()
        return answer.tables

    def tell(self, message: Any) -> None:
        self._channel.send(message)

    def first_values(self, handle: Any, layout: Layout) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        shelf = Shelf(handle, layout, kept=self._spec.geometry.kept)
        handle.close()
        return layout.parameters.views(shelf.weights), shelf.buffers, shelf.others

    def pin(self, link: TableLink) -> None:
        assert isinstance(link, LocalLink)
        for block in link.memory():
            if block.numel():
                error = torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.nbytes, 0)
                if int(error) != 0:
                    return  # unpinned memory works too, only slower

    def attach(self, opened: m.Opened) -> LocalLink:
        return LocalLink(opened, self._spec.geometry, self)

    def dial(self, number: int) -> Sync:
        return self._hub.dial(number)

    def stopping(self) -> bool:
        return self._hub.words[STOP] != 0


def run_learner(channel: Channel, spec: LearnerSpec) -> int:
    """Call the user's function; say how it ended."""
    try:
        if spec.crash is not None:
            crash_at(spec.crash)
        task: Task = channel.receive()
        session = ServerSession(LocalLearnerPort(channel, spec), spec.seat)
        session.seed()
        try:
            value = task.function(session, *task.arguments, **task.keywords)
        except RunStopped:
            value = None
        finally:
            session.close()
        channel.send(returned(value))
    except Closed:
        return 1
    except BaseException as error:
        say(channel, error)
        return 1
    return 0


def returned(value: Any) -> Parcel:
    """What its function gave back; where that cannot travel, why: nothing else of the run may be lost with it."""
    try:
        return pack(m.Returned(value))
    except Exception as error:
        return pack(m.Returned(None, f"{type(value).__name__}: {' '.join(str(error).split())}"))


def say(channel: Channel, error: BaseException) -> None:
    """How a learner's function ended."""
    text = "".join(traceback.format_exception(error))
    sys.stdout.flush()
    told: BaseException | None = error
    try:
        unpack(pack(error))
    except Exception:  # the exception itself does not travel, or does not arrive
        told = None
    channel.try_send(m.Raised(told, text))


def run_evaluator(channel: Channel) -> None:
    """Test snapshots until the supervisor closes the channel."""
    try:
        evaluate = channel.receive()
        os.nice(1)
        while True:
            tag, state = channel.receive()
            with torch.no_grad():
                channel.send((tag, evaluate(state)))
    except Closed:
        return
    except Exception as error:
        say(channel, error)
