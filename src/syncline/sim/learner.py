"""A simulated learner: its session's port, and the fiber that the user's loop runs on."""

from __future__ import annotations

import copy
import dataclasses
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from syncline import messages as m
from syncline.engines.recorder import learner_error
from syncline.engines.run import Task
from syncline.engines.simulated_times import LearnerTimes
from syncline.errors import InvariantError, UsageError
from syncline.learn.allreduce_session import AllReduceSession
from syncline.learn.model_factories import pack_random, without_graph
from syncline.learn.server_session import ServerSession
from syncline.messages.to_leader import Gradient, Put, ToLeader
from syncline.ports import (
    FIRST_VALUES,
    OUTSIDE,
    Computing,
    Draft,
    LearnerPort,
    Portion,
    Reading,
    Reset,
    Serving,
    TablePort,
)
from syncline.sim.clock import Action, ClockPause
from syncline.sim.fibers import Fiber, Killed, make_fiber
from syncline.sim.machine_cores import InTurn
from syncline.sim.network import Line
from syncline.sim.owned_memory import DRAFT, SimLane, SimTable, poison

if TYPE_CHECKING:
    from syncline.sim.simulation import Simulation

BULK = (Gradient, Put)
COMPUTING, TICKET, WAITING = 0, 1, 2  # what a learner does while it gives way, and where its time is kept


class SimLearner(LearnerPort):
    """One simulated learner: the session's port, and the fiber it runs on."""

    __slots__ = (  # thousands of them: objects with many attributes are large and slow without
        "_answers",
        "_arrival",
        "_called",
        "_incoming",
        "_leader",
        "_line",
        "_outgoing",
        "_pace",
        "_steps",
        "_times",
        "_world",
        "dead",
        "decided",
        "fiber",
        "handled",
        "learner",
        "machine",
        "pause",
        "portions",
        "rank",
        "step",
        "stepped",
        "waits_for",
    )

    def __init__(self, world: Simulation, learner: int, rank: int) -> None:
        self._world, self.learner, self.rank = world, learner, rank
        self.machine = world.cluster.machine_of_learner(rank)
        self._pace = world.cluster.pace(rank, seed=world.seed, learners=world.spec.plan.learners)
        self.fiber = self._make_fiber()
        self.dead = self.started = False
        self._leader = world.servers[0]  # the one that it knows
        self.pause = ClockPause()
        self.stepped = False  # it has said something to the leading shard
        self._outgoing = InTurn(world.machines, self.machine, self)  # what it says, behind copies
        self._incoming: dict[int, InTurn] = {}  # by shard: what it is copying
        self._arrival = 0.0  # of the last thing it sent: nothing overtakes
        self.portions: dict[tuple[int, int], Portion] = {}
        self._answers: list[Any] = []
        self._called = False  # it is to ask why it waits
        self.waits_for: str | None = None
        self._line: Line | None = None  # where bulk comes late
        self.step = 0  # computations so far, those before a checkpoint included
        self._times, self._steps = [0.0, 0.0, 0.0], 0
        self.handled = self.decided = 0.0  # when the leader had its last gradient, and released it

    def _make_fiber(self) -> Fiber:
        return make_fiber(self._main)

    def _main(self) -> None:
        world, spec = self._world, self._world.spec
        try:
            session = ServerSession(self, dataclasses.replace(spec.seat(self.rank), reader=False))
            try:
                value = call(spec.task, session)
            finally:
                session.close()
            self.leave(lambda: world.returned(self, value))
        except Killed:
            return
        except InvariantError as error:
            world.fail(error)
        except BaseException as error:
            self._raised(error)

    def _raised(self, error: BaseException) -> None:
        failure = learner_error(self.rank, error, "".join(traceback.format_exception(error)))
        self.leave(lambda: self._world.supervision.raised(self.learner, failure))

    def start(self) -> None:
        """Begin (from the scheduler)."""
        if not self.dead:
            self.started = True
            self._resume()

    def _resume(self) -> None:
        self._world.streams.enter(self.learner)
        self.fiber.resume()

    def states(self) -> bytes:
        """Its random states as they are now (from the scheduler); nothing, if it has not begun."""
        if not self.started or self.dead:
            return b""
        self._world.streams.enter(self.learner)
        return pack_random(torch.device(self._world.spec.seat(self.rank).device))

    def kill(self) -> float:
        """It ends where it is (from the scheduler); when everything that has left it will have arrived."""
        self.dead = True
        if self._line is not None:
            self._arrival = max(self._arrival, self._line.end())
        self._world.machines.cancel(self.machine, self._computed)
        if not self.fiber.done:
            self._world.streams.enter(self.learner)
            self.fiber.end()
        self._world.streams.forget(self.learner)
        return max(self._arrival, self.now() + self._world.cluster.card.latency)

    def times(self) -> LearnerTimes:
        compute, communication, waiting = self._times
        return LearnerTimes(compute=compute, communication=communication, waiting=waiting, steps=self._steps)

    # -- waiting -----------------------------------------------------------------------------------------

    def until(self, ready: Callable[[], bool], what: str, time: int = WAITING) -> None:
        """Give way until it is so."""
        if self.dead:
            raise Killed
        began = self.now()
        while not ready():
            self.waits_for = what
            self.fiber.block()
        self.waits_for = None
        self.passed(began, time)

    def until_served(self, ready: Callable[[], bool], what: str, time: int = WAITING) -> None:
        """The same; nobody waits for servers that are gone."""
        self.until(lambda: ready() or self.stale, what, time)
        if not ready():
            raise Reset

    @property
    def stale(self) -> bool:
        """It knows only servers that are gone."""
        return self._leader is not self._world.servers[0]

    def until_released(self, ready: Callable[[], bool], what: str) -> None:
        """The same, in a step: there it may be called, and asks why."""
        while not ready():
            self.until_served(lambda: ready() or self._called, what, TICKET)
            if not ready():
                self._called = False
                self.ask(m.Called())

    def call(self) -> None:
        self._called = True
        self.wake()

    def wake(self) -> None:
        if self.waits_for is None or self.fiber.done:
            return
        if self._world.clock.now < self.pause.until:
            self._world.clock.at(self.pause.until, self.wake)
        else:
            self._resume()

    def passed(self, began: float, time: int) -> None:
        """The account of time; a wait for a ticket is communication, but for the time that others took."""
        seconds = self._world.clock.now - began
        if time == TICKET:
            others = min(seconds, max(0.0, self.decided - max(self.handled, began)))
            self._times[WAITING] += others
            seconds -= others
        self._times[time] += seconds

    # -- sending -----------------------------------------------------------------------------------------

    def send(self, action: Action, target: int | None = None, nbytes: int = 0) -> None:
        """To a machine, or to the coordinator; after all that it sent before."""
        if self.dead:
            return
        if self._outgoing.busy:
            self._outgoing.add(0.0, partial(self._send, action, target, nbytes))
        else:
            self._send(action, target, nbytes)

    def _send(self, action: Action, target: int | None, nbytes: int) -> None:
        world = self._world
        clock = world.clock
        if target is None:
            arrival = clock.now + world.cluster.card.latency
            arrival = world.network.late(clock.now, arrival, self.machine, world.first_machine)
        else:
            arrival = world.network.send(clock.now, self.machine, target, nbytes)
        if arrival > self._arrival:
            self._arrival = arrival
        clock.at(self._arrival, action)

    def _send_bulk(self, message: Gradient | Put, parts: list[int], action: Action) -> None:
        """Each shard's part goes to its machine; the message is there with the leading shard's."""
        world = self._world
        lane = world.lanes.get((message.table, self.learner)) if len(parts) > 1 else None
        for shard in range(1, len(parts)):
            if lane is not None:
                arrival = world.network.send(
                    world.clock.now, self.machine, world.cluster.machine_of_shard(shard), parts[shard]
                )
                lane.under_way[shard, message.number] = arrival
        self._send(action, world.first_machine, parts[0])

    def leave(self, last: Action) -> None:
        """Its last word to the coordinator, after all that it sent."""
        self.send(partial(self._line.arrived, last) if self._line is not None else last)

    def _arrive_late(self, message: ToLeader, hand_on: Action) -> None:
        """The note is there; the shards get it when what comes with it is, too."""
        assert self._line is not None
        if not isinstance(message, BULK):
            self._line.arrived(hand_on)
            return
        lane, number = self._world.lanes.get((message.table, self.learner)), message.number
        ways = lane.under_way if lane is not None else {}
        parts_there = max((time for (_, each), time in ways.items() if each == number), default=0.0)
        self._line.arrived(hand_on, partial(self._put_bulk, message), parts_there)

    def _put_bulk(self, message: Gradient | Put) -> None:
        lane = self._world.lanes.get((message.table, self.learner))
        if isinstance(lane, SimLane) and (sent := lane.coming.pop(message.number, None)) is not None:
            lane.sent[lane.numbers.index(message.number)].memory.copy_(sent)

    def _send_to_leaf(self, message: Gradient) -> None:
        if self.stale:
            return
        leaf = self._world.leaf_of(self.learner)
        self._world.lanes[message.table, self.learner].sending.add(message.number)
        nbytes = sum(self._world.tables[message.table].part_bytes)
        self._send(partial(leaf.gradient, self, message), leaf.machine, nbytes)

    def publish_again(self) -> None:
        """Its leaf is another: what the root may not have goes there."""
        for (_, learner), lane in sorted(self._world.lanes.items(), key=lambda item: item[0]):
            if learner == self.learner:
                for number in sorted(set(lane.numbers) & lane.said.keys()):
                    if (0, number) not in lane.freed:
                        self._send_to_leaf(lane.said[number])

    def take_in(self, shard: int, seconds: float, arrive: Action) -> None:
        """What a shard sent is here: it is copied, after all that this shard sent before."""
        if shard not in self._incoming:
            self._incoming[shard] = InTurn(self._world.machines, self.machine, self)
        self._incoming[shard].add(seconds, arrive)

    # -- the port ----------------------------------------------------------------------------------------

    def now(self) -> float:
        return self._world.clock.now

    def spend(self, work: Computing | Serving) -> None:
        assert isinstance(work, Computing)
        self._begin_computing(work.examples)
        self.until(lambda: not self.pause.working, "its own computation", COMPUTING)

    def _begin_computing(self, examples: int) -> None:
        world = self._world
        seconds = self._pace * world.cluster.one_step(
            examples, rank=self.rank, step=self.step, seed=world.seed
        )
        self.step += 1
        self._steps += 1
        self.pause.working = True
        world.machines.run(self.machine, seconds, self._computed, self)

    def _computed(self) -> None:
        pause = self.pause
        if pause.debt:
            self._world.clock.after(pause.owed(), self._computed)
            return
        pause.working = False
        if not self.dead:
            self.wake()

    def post(self, message: ToLeader, *, later: bool = False) -> None:
        if self.dead:
            return
        self.stepped = True
        world = self._world
        if world.watch is not None and not self.stale:
            world.watch.posted(self.learner, message)
        server = self._leader
        arrive: Action = partial(server.note, self, message)
        if world.late is not None and not world.nodes:
            self._line = self._line or Line(world.clock, world.late)
            arrive = partial(self._arrive_late, message, arrive)
        if not isinstance(message, BULK):
            self.send(arrive, server.machine)
            return
        parts = world.tables[message.table].part_bytes
        leave = partial(self._send_bulk, message, parts, arrive)
        if world.nodes and isinstance(message, Gradient):
            world.lanes[message.table, self.learner].said[message.number] = message
            leave = partial(self._send_to_leaf, message)
        self._outgoing.add(world.cluster.copy.seconds(sum(parts)), leave)

    def portion(self, loader: int, index: int, *, block: bool) -> Portion | None:
        key = (loader, index)
        if block:
            try:
                self.until_served(lambda: key in self.portions or self.stopping(), f"data of loader {loader}")
            except Killed:
                # a loop that is being left, where nothing may be raised, ends with the next wait
                if index != OUTSIDE:
                    raise
        return self.portions.pop(key, None)

    def give(self, portion: Portion) -> None:
        self.portions[portion.loader, portion.number] = portion
        self.wake()

    def ask(self, message: Any) -> Any:
        if isinstance(message, m.Rejoin):
            self.portions.clear()  # before the new servers' come in
        self.send(lambda: self._world.coordinator.from_learner(self.learner, message))
        self.until(lambda: bool(self._answers), f"an answer to {type(message).__name__}")
        answer = self._answers.pop()
        if isinstance(answer, m.Refused):
            raise answer.error
        if isinstance(answer, m.Stale):
            raise Reset
        if isinstance(answer, m.Rejoined):
            self._leader = answer.desk
        return answer

    def answer(self, message: Any) -> None:
        self._answers.append(message)
        self.wake()

    @property
    def watched(self) -> bool:
        """Somebody looks on at what it reads."""
        return self._world.watch is not None

    def reads(self, table: int, version: int, weights: list[Tensor]) -> None:
        if self._world.watch is not None and not self.stale:  # what it does before it rejoins is void
            self._world.watch.read(self.learner, table, version, weights)

    def tell(self, message: Any) -> None:
        self.send(lambda: self._world.coordinator.from_learner(self.learner, message))

    def open(self, opened: m.Opened | m.Initialise) -> TwinTable:
        if isinstance(opened, m.Opened) and opened.personal is not None:
            self.step = max(self.step, opened.personal.steps)
        return TwinTable(self, opened, self._world)

    def stopping(self) -> bool:
        world = self._world  # unwinding asks for nothing more
        return world.stopping or self.dead or world.recorder.error is not None


class TwinTable(TablePort):
    """A simulated learner's end of one table."""

    def __init__(self, learner: SimLearner, opened: m.Opened | m.Initialise, world: Simulation) -> None:
        self._learner, self._lane, self._world = learner, opened.lane, world
        self._first: SimTable | None = opened.handle if isinstance(opened, m.Initialise) else None
        self.layout = opened.layout
        self.buffers, self.others = opened.handle.buffers, opened.handle.others
        self._views = opened.layout.parameters.views(opened.lane.inbox)
        self._table = opened.table
        flows = world.flows is not None and isinstance(opened, m.Opened)
        self._end = world.flow_of(opened.table).join(learner) if flows else None

    def draft(self, *, block: bool = True) -> Draft | None:
        lane = self._lane
        if (place := lane.free_slot()) is None:
            if not block:
                return None
            lane.plan(self._learner.wake)
            self._learner.until_released(lambda: lane.free_slot() is not None, DRAFT)
            place = lane.free_slot()
            assert place is not None
        lane.hold(place)
        slot = lane.slots[place]
        others = [torch.empty_like(each) for each in self.others] if self._first is not None else ()
        return Draft(slot.gradients, slot.buffers, place, others)

    def publish(
        self,
        draft: Draft,
        message: Gradient | Put | m.Initialised,
        options: bytes = b"",
        present: Sequence[bool] = (),
    ) -> None:
        slot, sent = self._lane.slots[draft.place], self._lane.sent[draft.place]
        if isinstance(message, m.Initialised):  # its shards take them when they hear of it
            assert self._first is not None
            self._first.begin(draft)
            self._lane.numbers[draft.place] = FIRST_VALUES
            sent.memory.copy_(slot.memory)
        else:
            self._lane.numbers[draft.place] = message.number
            if isinstance(message, Gradient):
                slot.write_options(options)
                if not message.full:
                    slot.mask.copy_(torch.tensor(present, dtype=torch.uint8))
            if self._world.late is not None and not self._world.nodes:
                self._lane.coming[message.number] = slot.memory.clone()
                poison([*sent.gradients, *sent.buffers])
            else:
                sent.memory.copy_(slot.memory)
            self._learner.post(message)
        if self._world.poisons:
            poison([*slot.gradients, *slot.buffers])

    def _delivered(self) -> bool:
        self._lane.plan(self._learner.wake)
        return self._lane.delivered()

    def wait(self, number: int | None, *, block: bool = True) -> Reading | None:
        if number is None:
            self._learner.until_released(self._delivered, DRAFT)
            return None
        if block:
            what = f"ticket {number} of table {self._table}"
            self._learner.until_released(lambda: self._lane.reading(number) is not None, what)
        return self._lane.reading(number)

    def read(self, reading: Reading | None, into: list[Tensor]) -> int | None:
        if reading is None:
            assert self._end is not None
            if (found := self._end.swap()) is None:
                return None
            self._learner.reads(self._table, found.version, found.weights)
            torch._foreach_copy_(into, found.weights)
            self._lane.served = dict.fromkeys(range(self.layout.shards), found.version)
            return found.version
        if into:
            self._learner.reads(self._table, reading.version, self._views)
            torch._foreach_copy_(into, self._views)
        if self._end is not None:
            self._end.has(reading.version)
        return reading.version


def call(task: Task, session: ServerSession | AllReduceSession) -> Any:
    """What the user's function gives back, called with a copy of what it is given."""
    session.seed()
    arguments, keywords = copy_arguments((task.arguments, task.keywords))
    with session.until_stopped():
        return task.function(session, *arguments, **keywords)


def copy_arguments(arguments: Any) -> Any:
    """What a process would get: its own copy of everything but the data sets, which are only read."""
    shared: dict[int, Any] = {}
    _find_data(arguments, shared)
    try:
        return copy.deepcopy(arguments, memo=dict(shared))
    except Exception as error:  # whatever the user's objects raise when they are copied
        raise UsageError(
            f"every simulated learner has its own copy of what it is given, and that cannot be copied: {error}; make it "
            "inside the function that learners run, or in a function that makes it (model=)"
        ) from error


def _find_data(value: Any, found: dict[int, Any]) -> None:
    parts: Iterable[Any] = ()
    if isinstance(value, Dataset):
        found[id(value)] = value
    elif isinstance(value, nn.Module):
        found.update(without_graph(value))
    elif isinstance(value, dict):
        parts = value.values()
    elif isinstance(value, (list, tuple)):
        parts = value
    elif hasattr(value, "__dataclass_fields__"):
        parts = [getattr(value, name) for name in value.__dataclass_fields__]
    for each in parts:
        _find_data(each, found)
