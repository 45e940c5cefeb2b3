"""A simulated shard: its role's port, and the queue of what comes in while it works.

What the role decides happens at once in memory; its effects go out when the work before them is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from syncline.engines.checkpoint_writer import with_content, write_part
from syncline.messages import MakeTable
from syncline.messages.log import Entry, Fold, Leave, PutValues, Take
from syncline.messages.to_leader import ToLeader
from syncline.ports import FIRST_VALUES, Computing, Portion, Reading, ServerPort, Serving, VersionMemory
from syncline.roles.checkpoint_manifest import LEARNERS
from syncline.sim.batched.lazy_gradients import PromisedLane, PromisedSlot
from syncline.sim.clock import Action, ClockPause
from syncline.sim.owned_memory import DRAFT, ShardMemory, SimLane, Traffic, poison
from syncline.table.gradient_slot import Slot
from syncline.table.store import copy_segments, places_for

if TYPE_CHECKING:
    from syncline.messages.to_tree_nodes import ToNodes
    from syncline.sim.learner import SimLearner
    from syncline.sim.simulation import Simulation
    from syncline.sim.tree_nodes import SimNode, TableFlow

Kind = type[Take | Fold]


class SimServer(ServerPort):
    """One simulated shard."""

    def __init__(self, world: Simulation, shard: int) -> None:
        self._world, self.shard, self.shards = world, shard, world.spec.plan.topology.shards
        self.machine = world.cluster.machine_of_shard(shard)
        self.role = world.make_role(self)
        self.pause = ClockPause()
        self.dead = False  # nothing reaches it, and what it sent is lost
        self._inputs: deque[tuple[Entry | None, SimLearner | SimNode | None, Any]] = deque()
        self._work: deque[tuple[float, Action | None]] = deque()  # what the input in hand costs and causes
        self._busy = False
        self._leaving: list[int] = []  # learners whose leaving is in the log
        cluster = world.cluster
        self._clock, self._message, self._reply = world.clock, cluster.message, cluster.reply
        self._shared = world.machines.shared
        self._memories: dict[int, ShardMemory] = {}
        self._known_costs: dict[tuple[Kind, int], float] = {}  # by kind and table

    # -- what comes in -----------------------------------------------------------------------------------

    def note(self, learner: SimLearner | SimNode, message: ToLeader) -> None:
        """What a learner says has arrived (leading shard only)."""
        if not self.dead:
            self._inputs.append((None, learner, message))
            if not self._busy:
                self._next()

    def handle(self, event: Any) -> None:
        """An event from the coordinator or another shard has arrived."""
        if isinstance(event, MakeTable):
            event = with_content(event, self._world.folder, self.shard)
        if not self.dead:
            self._inputs.append((None, None, lambda: self.role.handle(event)))
            self._next()

    def entry(self, entry: Entry) -> None:
        """A decision of the leading shard has arrived."""
        if not self.dead:
            self._inputs.append((entry, None, None))
            self._next()

    def _next(self) -> None:
        """One thing after another, in the order they came; what an entry speaks of must have arrived here."""
        clock, inputs = self._clock, self._inputs
        while inputs and not self._busy and not self.dead:
            entry, learner, what = inputs[0]
            ready = self.pause.until
            if entry is not None and isinstance(entry, Take | PutValues):
                lane = self._world.lanes.get((entry.table, entry.learner))
                if lane is not None:
                    ready = max(ready, lane.under_way.get((self.shard, entry.number), 0.0))
            if ready > clock.now:
                clock.at(ready, self._next)
                return
            inputs.popleft()
            if self._message:
                self._work.append((self._message, None))
            if learner is not None:
                learner.handled = clock.now
                self.role.note(learner.learner, what)
            elif entry is None:
                what()
            else:
                self.role.entry(entry)
                if isinstance(entry, Leave):
                    self._leaving.append(entry.learner)
            while self._leaving and self.role.replay.settled:  # nothing more is needed of them
                self._world.forget(self._leaving.pop())
            if self._work:
                self._go_on()

    # -- work --------------------------------------------------------------------------------------------

    def spend(self, work: Computing | Serving) -> None:
        assert isinstance(work, Serving)
        kind, table, times = work
        if kind is Fold and table == 0 and self.shard == 0:
            self._effect(self._world.folded)
        seconds = self._known_costs.get((kind, table))
        if seconds is None:
            nbytes = self._world.tables[table].part_bytes[self.shard]
            cluster = self._world.cluster
            cost = cluster.take if kind is Take else cluster.fold
            seconds = self._known_costs[kind, table] = cost.seconds(nbytes)
        self._add_work(times * seconds)

    def _add_work(self, seconds: float) -> None:
        if seconds:
            self._work.append((seconds, None))

    def _effect(self, action: Action) -> None:
        """After the work that came before it."""
        if self._work:
            self._work.append((0.0, action))
        else:
            action()

    def _go_on(self) -> None:
        self._busy, work = False, self._work
        while work and not self.dead:
            seconds, action = work.popleft()
            if action is not None:
                action()
            else:
                self._busy = self.pause.working = True
                if self._shared:
                    self._world.machines.run(self.machine, seconds, self._worked, self)
                else:
                    self._clock.after(seconds, self._worked)
                return

    def _worked(self) -> None:
        pause = self.pause
        if pause.debt:
            self._clock.after(pause.owed(), self._worked)
            return
        pause.working = False
        if self._work:
            self._go_on()
        else:
            self._busy = False
        if self._inputs and not self._busy:
            self._next()

    # -- the port ----------------------------------------------------------------------------------------

    def append(self, entry: Entry) -> None:
        if isinstance(entry, Leave):
            self._leaving.append(entry.learner)
        for server in self._world.servers[1:]:
            self._effect(
                partial(self._world.send, self.machine, server.machine, partial(server.entry, entry))
            )

    def memory(self, table: int) -> VersionMemory:
        delay = self._world.spec.plan.delay
        places = places_for(delay) if delay else 1  # what others read is sent: nobody is reading here
        memory = self._memories[table] = ShardMemory(self._world.tables[table], self.shard, places)
        if self._world.flows is not None:
            memory.made = partial(self._made, memory, self._world.flow_of(table))
        return memory

    def _made(self, memory: ShardMemory, flow: TableFlow, version: int) -> None:
        """As it is now, once the work before it is done."""
        part = [segment.clone() for segment in memory.of(version)]
        self._effect(partial(flow.made, self.shard, version, part))

    def receive(self, table: int, learner: int, number: int) -> Slot | PromisedSlot:
        lane = self._world.lanes[table, learner]
        if isinstance(lane, PromisedLane) and number == FIRST_VALUES:
            assert lane.first is not None
            return lane.first
        slots = lane.sent if isinstance(lane, SimLane) else lane.slots
        return slots[lane.numbers.index(number)]

    def release(self, table: int, learner: int, number: int, reading: Reading | None) -> None:
        world = self._world
        lane = world.lanes.get((table, learner))
        if lane is None:
            return
        if learner < 0:  # a node of a tree
            self._effect(partial(self._free_sum, lane, world.nodes_by_name[learner], table, number))
            return
        target = world.learners[learner]
        if reading is None:
            self._forget_part(lane, table, number)
            self._effect(partial(self._free, lane, target, number))
            return
        if world.flows is not None:
            self._effect(partial(world.flow_of(table).said, reading.dial))
        nbytes, bulk = 0, None
        if lane.served.get(self.shard, -1) < reading.version:  # R4: not what it has
            lane.served[self.shard] = reading.version
            nbytes, bulk = (
                world.tables[table].part_bytes[self.shard],
                self._sent(table, lane, reading.version),
            )
            if self.machine != target.machine:  # else it copies for itself
                self._add_work(world.cluster.serve.seconds(nbytes))
        if self.shard == 0:
            target.decided = self._clock.now
            self._add_work(self._reply)
        arrive = partial(self._arrive, lane, target, number, reading, bulk)
        if world.late is not None:
            arrive = partial(self._arrive_late, lane, world.late.delay() if nbytes else 0.0, arrive)
        seconds = world.cluster.copy.seconds(nbytes) if nbytes else 0.0
        take_in = partial(target.take_in, self.shard, seconds, arrive)
        self._effect(partial(world.send, self.machine, target.machine, take_in, nbytes))

    def _forget_part(self, lane: Traffic, table: int, number: int) -> None:
        """Of what was published: this shard needs it no more."""
        lane.under_way.pop((self.shard, number), None)
        if self._world.poisons and isinstance(lane, SimLane) and number in lane.numbers:
            sent = lane.sent[lane.numbers.index(number)]
            poison(self._memories[table].views(sent.segments))
            poison(sent.buffers if self.shard == 0 else ())

    def _free(self, lane: Traffic, target: SimLearner, number: int) -> None:
        """No event of its own, where nobody waits for it: it goes with what is sent next."""
        link = self._world.cluster.memory if self.machine == target.machine else self._world.cluster.card
        now = self._clock.now
        arrival = self._world.network.late(now, now + link.latency, self.machine, target.machine)
        lane.freed[self.shard, number] = arrival
        if target.waits_for == DRAFT:
            self._clock.at(arrival, target.wake)

    def _free_sum(self, lane: Traffic, node: SimNode, table: int, number: int) -> None:
        self._forget_part(lane, table, number)
        lane.freed[self.shard, number] = self._clock.now
        self._world.send(self.machine, node.machine, partial(node.freed, table, number))

    def tell_nodes(self, message: ToNodes, node: int | None = None) -> None:
        world = self._world
        for each in world.nodes_by_name.values():
            if node is None or each.learner == node:
                self._effect(partial(world.send, self.machine, each.machine, partial(each.hear, message)))

    def _arrive_late(self, lane: Traffic, delay: float, arrive: Action) -> None:
        """The note is there; the version comes later, and nothing overtakes it."""
        due = lane.due[self.shard] = max(self._clock.now + delay, lane.due.get(self.shard, 0.0))
        if due > self._clock.now:
            self._clock.at(due, arrive)
        else:
            arrive()

    def _arrive(
        self, lane: Traffic, target: SimLearner, number: int, reading: Reading, bulk: Action | None
    ) -> None:
        if not self.dead:
            if bulk is not None:
                bulk()
            lane.released[self.shard] = (number, reading)
            target.wake()

    def _sent(self, table: int, lane: Traffic, version: int) -> Action | None:
        """This shard's part of a version, as it is now; what is to happen where it arrives."""
        if isinstance(lane, PromisedLane):
            shop = self._world.workshop
            assert shop is not None
            if (into := lane.inbox(shop.computer.versions.get(version), self.shard)) is not None:
                shop.computer.settle()
                memory = self._memories[table]
                copy_segments(memory.part.segments(into), memory.of(version))
        elif isinstance(lane, SimLane):
            memory = self._memories[table]
            values = [segment.clone() for segment in memory.of(version)]
            return partial(copy_segments, memory.part.segments(lane.inbox), values)
        return None

    def grant(self, learner: int, portion: Portion) -> None:
        target = self._world.learners[learner]
        arrive = partial(self._if_alive, target.give, portion)
        self._effect(partial(self._world.send, self.machine, target.machine, arrive))

    def _if_alive(self, action: Callable[[Any], None], what: Any) -> None:
        if not self.dead:
            action(what)

    def share(self, table: int, version: int, norms: Tensor) -> None:
        self._effect(lambda: self._world.share_norms(self.shard, table, version, norms))

    def save(self, number: int, name: str, tensors: dict[str, Tensor], notes: dict[str, Any]) -> None:
        assert self._world.folder is not None
        if name == LEARNERS and self._world.exact:
            tensors = tensors | self._world.states()  # who has left keeps its last ones
        self.tell(write_part(self._world.folder, (number, name, tensors, notes)))

    def tell(self, message: Any) -> None:
        arrive = partial(self._if_alive, self._world.coordinator.from_shard, message)
        self._effect(partial(self._world.soon, arrive))
