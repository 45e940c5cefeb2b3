"""A simulated learner: its session's port, and the fiber that the user's loop runs on."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.data import Dataset

from syncline.dial import Sync
from syncline.engines.record import learner_error
from syncline.engines.sim.clock import Fiber, Handler
from syncline.engines.sim.memory import Releases, SimTable
from syncline.errors import InvariantError
from syncline.learn.session import Session
from syncline.ports import Kind, LearnerPort, Note, Portion, Reading, RunStopped, TableLink
from syncline.table.layout import Layout
from syncline.topology import messages as m

if TYPE_CHECKING:
    from syncline.engines.sim.world import World


class SimLearner(LearnerPort):
    """One simulated learner: the session's port, and the thread it runs on."""

    def __init__(self, world: World, learner: int, rank: int) -> None:
        self._world, self.learner, self.rank = world, learner, rank
        self.fiber = self._make_fiber()
        self._arrival = 0.0  # of its last note: notes do not overtake each other
        self.portions: dict[tuple[int, int], Portion] = {}
        self._answers: list[Any] = []
        self.waits_for: str | None = None

    def _make_fiber(self) -> Fiber | Handler:
        return Fiber(self._main)

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
        except InvariantError as error:
            world.fail(error)
        except BaseException as error:
            text = "".join(traceback.format_exception(error))
            world.fail(learner_error(self.rank, error, text))

    # -- waiting -----------------------------------------------------------------------------------------

    def until(self, ready: Callable[[], bool], what: str) -> None:
        """Give way until it is so."""
        fiber = self.fiber
        assert isinstance(fiber, Fiber)
        while not ready():
            self.waits_for = what
            fiber.block()
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
        end = self.start_computing(examples)
        self.until(lambda: clock.now >= end, "its own computation")

    def start_computing(self, examples: int) -> float:
        """When the gradient will be there; wakes the learner then."""
        end = self._world.clock.now + self._world.times.compute
        self._world.clock.at(end, self.wake)
        return end

    def post(self, note: Note, *, ring: bool = True) -> None:
        times = self._world.times
        if self._world.watch is not None:
            self._world.watch.posted(self.learner, note)
        bulk = times.transfer if note.kind in (Kind.GRADIENT, Kind.PUT) else 0.0
        self.send(lambda: self._world.roles[0].note(self.learner, note), times.latency + bulk)

    def ring(self) -> None:
        pass

    def portion(self, loader: int, index: int, *, block: bool) -> Portion | None:
        key = (loader, index)
        if block:
            self.until(lambda: key in self.portions or self.stopping(), f"data of loader {loader}")
        return self.portions.pop(key, None)

    def give(self, portion: Portion) -> None:
        self.portions[portion.loader, portion.number] = portion
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

    def reads(self, table: int, version: int, weights: list[Tensor]) -> None:
        if self._world.watch is not None:
            self._world.watch.read(self.learner, table, version, weights)

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
        self._releases = Releases(opened.lane, opened.layout.shards)

    def weights(self, version: int, sync: Sync) -> list[Tensor]:
        found = self._views
        if sync.lockstep:
            found = self._history[version % len(self._history)] if sync.delay else self._newest
        self._learner.reads(self._table, version, found)
        return found

    def released(self, number: int) -> Reading | None:
        return self._releases.reading(number)

    def wait(self, number: int) -> Reading:
        what = f"ticket {number} of table {self._table}"
        self._learner.until(lambda: self._releases.reading(number) is not None, what)
        reading = self._releases.reading(number)
        assert reading is not None
        return reading

    def wait_free(self, number: int) -> None:
        self._learner.until(lambda: self._releases.free(number), f"the slot of ticket {number}")


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
