"""A simulated run: learners, shards and coordinator as events of one queue.

Everything that a process would do happens here in virtual time; sessions, roles and protocols are the local engine's.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from syncline import messages as m
from syncline.cluster import Cluster
from syncline.dial import Sync, as_sync
from syncline.engines.event_script import Fault
from syncline.engines.recorder import Recorder
from syncline.engines.run import Evaluate, Outcome, RunSpec
from syncline.engines.simulated_times import LearnerTimes, SimulatedTimes
from syncline.engines.supervision import Crew, Supervision
from syncline.errors import LostError
from syncline.learn.train_and_evaluate import Evaluation
from syncline.ports import ServerPort
from syncline.protocols.lifecycle import Hangs, Kill, Lifecycle
from syncline.protocols.tree_shape import Tree
from syncline.roles.checkpoint_manifest import Restored
from syncline.roles.coordinator import Coordinator
from syncline.roles.server import ServerRole
from syncline.sim.batched.lazy_gradients import PromisedLane
from syncline.sim.batched.shared_model import SharedModel, Ways, make_workshop
from syncline.sim.builtin_learner import Builtin
from syncline.sim.clock import Action, Clock
from syncline.sim.coordinator_port import Moment, SimCoordinator
from syncline.sim.fault_player import Script, strike
from syncline.sim.garbage_collection import calm_collector
from syncline.sim.invariants.watch import Watch, WatchedRole
from syncline.sim.learner import SimLearner
from syncline.sim.machine_cores import Machines
from syncline.sim.network import Late, SimNetwork
from syncline.sim.owned_memory import SimLane, SimTable, poison
from syncline.sim.random_states import OUTSIDE, RandomStreams
from syncline.sim.server import SimServer
from syncline.sim.tree_nodes import SimNode, TableFlow
from syncline.table.checkpoints import Folder
from syncline.table.layout import Layout
from syncline.topologies import Trees

SAMPLES = 100  # statistics while the version doubles from here on; every version before


class Simulation(Crew):
    """One simulated run."""

    honest: ClassVar[bool] = False  # poison always; tests do
    delays: ClassVar[bool] = False  # bulk comes after its note, late, or never because its sender died

    def __init__(
        self,
        spec: RunSpec,
        cluster: Cluster,
        *,
        script: Script | None = None,
        seed: int = 0,
        check: bool = False,
        handlers: bool = True,
        ways: Ways | None = None,
        exact: bool = False,
        previous: Simulation | None = None,
    ) -> None:
        self.spec, self.cluster, self.seed, self._ways = spec, cluster, seed, ways
        self.watch = Watch(self) if check else None
        handlers &= not isinstance(spec.plan.topology, Trees)  # their sums are of real tensors
        self.poisons = check or self.honest  # what a party does not own is no number to it
        self.late: Late | None = None
        if self.delays:
            self.delay_bulk()
        self.workshop, alone = self.make_workshop(ways) if handlers else (None, None)
        self._began = moment = Moment.of(spec)
        self.exact = exact
        self.next: Restored | None = None  # the checkpoint that another world goes on from
        self.script = (script or Script(())).rest(moment.played)
        self.clock = Clock()
        self.clock.now = moment.seconds
        self.network = SimNetwork(cluster, seed)
        self.first_machine = cluster.machine_of_shard(0)
        self.machines = Machines(self.clock, cluster)
        on_gpu = any(device.startswith("cuda") for device in spec.devices)
        self.streams = RandomStreams(gpus=on_gpu and self.workshop is None)
        self.stopping = False
        self.version = 0  # of the first table
        self.tables: dict[int, SimTable] = {}
        self.lanes: dict[tuple[int, int], SimLane | PromisedLane] = {}
        self.dials: dict[int, Sync] = {}
        self._norms: dict[tuple[int, int], dict[int, Tensor]] = {}
        self._forgotten: Counter[int] = Counter()  # learner -> shards that have forgotten it
        lifecycle = Lifecycle(
            spec.faults,
            spec.plan.learners,
            recovers=spec.storage.folder is not None,
            saved=spec.storage.restored is not None,
            rejoins=self.workshop is None,  # handlers have nothing to keep
            ranks=moment.ranks,
            last_rank=moment.last_rank,
            returned=moment.returned,
            losses=dict(moment.losses),
        )
        ids = dict(lifecycle.live)
        self.folder = Folder(Path(spec.storage.folder)) if spec.storage.folder else None
        self.coordinator = Coordinator(SimCoordinator(self), spec.plan, ids, spec.storage.restored)
        self.servers = [SimServer(self, shard) for shard in range(spec.plan.topology.shards)]
        self.recorder = Recorder(
            spec,
            now=lambda: self.clock.now,
            evaluate=self._evaluate,
            stop=self.ask_stop,
            layouts=lambda: {table: self.coordinator.layout(table) for table in self.coordinator.tables},
        )
        if alone is not None:
            self.recorder.event(f"gradients are computed one at a time: {alone}", kind="alone")
        self.learners = {learner: self.make_learner(learner, rank) for learner, rank in ids.items()}
        self.live = dict(self.learners)
        topology = spec.plan.topology
        fan_in = topology.fan_in if isinstance(topology, Trees) else len(ids) + 2
        self.tree = Tree(ids, fan_in)
        self.nodes: dict[int, SimNode] = {}
        self.nodes_by_name: dict[int, SimNode] = {}  # those that are lost too
        self.flows: dict[int, TableFlow] | None = None  # by table: of versions that nobody asks for
        self.plant()
        self.supervision = Supervision(lifecycle, self, lambda: self.clock.now)
        self._cut_asked = moment.cut_asked
        self._dying: dict[int, str] = {}  # learner -> why, of those whose loss is not noticed yet
        self._played = list(moment.played)
        self._evaluation: Evaluate | None = None
        self._sampled = 0
        self.commands: deque[Callable[[Simulation], None]] = deque()  # from other threads
        self._before = SimulatedTimes()  # of the worlds that it goes on from
        self._take_up(moment, previous)

    def delay_bulk(self) -> None:
        """From the beginning on."""
        self.late = Late(self.seed, self.cluster.compute.seconds(1))

    def _take_up(self, moment: Moment, previous: Simulation | None) -> None:
        """What a run that goes on has behind it: from a checkpoint, or from the world that wrote it."""
        outcome = self.recorder.outcome
        outcome.returned.update(dict.fromkeys(moment.returned))
        outcome.began = moment.seconds
        if previous is not None:
            before = previous.recorder.outcome
            outcome.events, outcome.logs, outcome.began = before.events, before.logs, before.began
            outcome.returned = before.returned
            self.recorder.causes = previous.recorder.causes
            self.commands = previous.commands
            self._before = previous.simulated()
            if self.watch is not None and previous.watch is not None:
                self.watch.events, self.watch.most = previous.watch.events, previous.watch.most

    def make_workshop(self, ways: Ways | None) -> tuple[SharedModel | None, str | None]:
        """For built-in learners; and why gradients are not computed together, where they were to be."""
        shop, alone = make_workshop(self.spec, ways)
        if shop is not None:
            shop.computer.alarm = lambda rank, loss: self.recorder.bad_loss(rank, loss)
        return shop, alone

    def make_table(self, layout: Layout) -> SimTable:
        shop = self.workshop
        device = shop.device if shop is not None else torch.device("cpu")
        return SimTable(layout, device)

    def make_lane(self, layout: Layout) -> SimLane | PromisedLane:
        shop, slots = self.workshop, max(2, self.spec.plan.delay + 1)
        if shop is not None:
            return PromisedLane(shop.computer, slots, layout.shards, self.clock)
        lane = SimLane(layout, slots, self.clock)
        if self.poisons:
            poison(layout.parameters.views(lane.inbox))
            poison(tensor for slot in lane.sent for tensor in (*slot.gradients, *slot.buffers))
        return lane

    def make_role(self, port: ServerPort) -> ServerRole:
        return ServerRole(port) if self.watch is None else WatchedRole(port, self.watch)

    def make_learner(self, learner: int, rank: int) -> SimLearner:
        """`train`'s own loop runs as a handler, any other on a fiber."""
        if self.workshop is None:
            return SimLearner(self, learner, rank)
        return Builtin(self, learner, rank, self.workshop)

    def plant(self) -> None:
        """The nodes of a tree."""
        topology = self.spec.plan.topology
        if isinstance(topology, Trees):
            self.flows = {} if topology.broadcast else None
            self.nodes = {node: SimNode(self, node) for node in self.tree.nodes}
            self.nodes_by_name = {node.learner: node for node in self.nodes.values()}

    def replant(self) -> None:
        """With new servers, for those that live; who comes later goes where there is room."""
        for node in self.nodes.values():
            node.dead = True
        self.tree = Tree(range(self.spec.plan.learners), self.tree.fan_in)
        for nobody in range(self.spec.plan.learners):
            self.tree.leave(nobody)
        for learner in self.live:
            self.tree.join(learner)
        self.plant()

    def flow_of(self, table: int) -> TableFlow:
        assert self.flows is not None
        if table not in self.flows:
            self.flows[table] = TableFlow(self, table)
        return self.flows[table]

    def leaf_of(self, learner: int) -> SimNode:
        return self.nodes[self.tree.leaf[learner]]

    # -- moving things -----------------------------------------------------------------------------------

    def soon(self, action: Action) -> None:
        """After a message's time."""
        self.clock.after(self.cluster.card.latency, action)

    def soon_at(self, learner: SimLearner, action: Action) -> None:
        """The same, from the coordinator to a learner's machine."""
        now = self.clock.now
        arrival = now + self.cluster.card.latency
        self.clock.at(self.network.late(now, arrival, self.first_machine, learner.machine), action)

    def send(self, source: int, target: int, action: Action, nbytes: int = 0) -> None:
        """From machine to machine."""
        self.clock.at(self.network.send(self.clock.now, source, target, nbytes), action)

    def share_norms(self, shard: int, table: int, version: int, norms: Tensor) -> None:
        brought = self._norms.setdefault((table, version), {})
        brought[shard] = norms
        layout = self.tables[table].layout
        if len(brought) == layout.shards:
            del self._norms[table, version]
            event = m.Norms(table, version, [brought[index] for index in sorted(brought)])
            for server in self.servers[: layout.shards]:
                self.soon(partial(server.handle, event))

    def forget(self, learner: int) -> None:
        """A shard needs nothing more of a learner that left; the last one drops its lanes."""
        self._forgotten[learner] += 1
        if self._forgotten[learner] == len(self.servers):
            for table in self.tables:
                self.lanes.pop((table, learner), None)

    # -- the crew ----------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        self.recorder.error = self.recorder.error or error

    def start_learner(self, learner: int, rank: int) -> None:
        self.learners[learner] = self.live[learner] = self.make_learner(learner, rank)
        if self.nodes:
            self.nodes[self.tree.join(learner)].welcome(learner)
        self.soon(self.learners[learner].start)

    def end_learner(self, learner: int) -> None:
        self.live[learner].kill()

    def forget_learner(self, learner: int) -> None:
        del self.live[learner]
        if self.nodes and learner in self.tree.leaf:
            leaf = self.leaf_of(learner)
            self.soon(partial(leaf.lose, learner))
            for flow in (self.flows or {}).values():
                flow.leave(learner, leaf.node)
            self.tree.leave(learner)

    def kill_learner(self, learner: int, why: str) -> None:
        self.kill(self.live[learner], why)

    def tell_stop(self) -> None:
        self.stopping = True
        if self.watch is not None:
            self.watch.stopped()
        for learner in self.learners.values():
            self.soon(learner.wake)

    def finish(self) -> None:
        """A message later, if nobody has taken the place of the last one."""
        self.soon(lambda: self.coordinator.finish() if not self.live and not self._shard_dead() else None)

    def renew_shards(self) -> None:
        for server in self.servers:
            server.dead = True
        self._norms.clear()
        if self.watch is not None:
            self.watch.went_back()
        if self.workshop is not None:
            self.workshop, _ = self.make_workshop(self._ways)
        self.servers = [SimServer(self, index) for index in range(self.spec.plan.topology.shards)]
        self.replant()

    # -- what happens to them ----------------------------------------------------------------------------

    def returned(self, learner: SimLearner, value: Any) -> None:
        self.recorder.outcome.returned[learner.rank] = value
        self.supervision.returned(learner.learner)

    def kill(self, learner: SimLearner, why: str) -> None:
        """It ends now; the others hear of it after all that it sent."""
        self._dying[learner.learner] = why
        self.clock.at(learner.kill(), lambda: self._lost(learner))

    def _lost(self, learner: SimLearner) -> None:
        why = self._dying.pop(learner.learner, None)
        if why is not None:
            self.supervision.lost(learner.learner, why, stepped=learner.stepped)

    def _notice(self) -> None:
        """Losses that nobody has noticed yet are noticed now."""
        for learner in list(self._dying):
            self._lost(self.learners[learner])

    def ask_stop(self) -> None:
        self.supervision.ask_stop()

    def ask_add(self, count: int) -> None:
        """They join now."""
        self.supervision.add(count)

    def statistics(self) -> m.Statistics:
        return self.servers[0].role.leader.statistics(0)

    def _shard_dead(self) -> bool:
        return any(server.dead for server in self.servers)

    def lose_shard(self, shard: int) -> None:
        """It does nothing from now on; that is noticed a message later, after the losses before it."""

        def noticed() -> None:
            self._notice()
            self.supervision.shard_lost(f"shard {shard} was killed by the script", shard=shard)

        if not self._shard_dead():
            self.soon(noticed)
        self.servers[shard].dead = True

    def _node_lost(self, lost: SimNode) -> None:
        if self.nodes.get(lost.node) is not lost:
            return
        leaf, above = lost.node in self.tree.leaves, self.tree.parent[lost.node]
        moves = self.tree.lose(lost.node)
        del self.nodes[lost.node]
        for flow in (self.flows or {}).values():
            flow.lost(lost.node, above, moves, leaf=leaf)
        if above in self.nodes:
            self.nodes[above].lose(lost.node)
        self.soon(lambda: self.servers[0].handle(m.NodesMoved()))
        if not self.tree.leaves:
            self._notice()
            self.supervision.shard_lost("the last leaf of the tree was killed by the script", shard=0)
            return
        for child, target in moves.items():
            if not leaf:
                self.nodes[child].moved()
            elif target is None:
                continue
            elif child in self.live and not self.live[child].dead:
                self.nodes[target].welcome(child)
                self.live[child].publish_again()

    # -- exact checkpoints -------------------------------------------------------------------------------

    def goes_on(self) -> bool:
        """The run goes on from the checkpoint that is being written, as a resumed one would."""
        if not self.exact or self.stopping or self.recorder.error is not None or self._shard_dead():
            return False
        self._notice()  # they belong to this side of the checkpoint
        return bool(self.live) and self.recorder.error is None

    def moment(self, *, exact: bool) -> Moment:
        """Where the run stands; not `exact`: all learners are to begin again."""
        return Moment(
            learners=self.spec.plan.learners,
            seconds=self.clock.now,
            ranks=sorted(learner.rank for learner in self.live.values()) if exact else [],
            last_rank=self.supervision.lifecycle.last_rank,
            returned=sorted(self.recorder.outcome.returned),
            losses=sorted(self.supervision.lifecycle.losses.items()),
            cut_asked=self._cut_asked,
            played=list(self._played),
        )

    def states(self) -> dict[str, Tensor]:
        """Random states as they lie in a checkpoint, of all that have begun."""
        found = {f"random/{learner.rank}": learner.states() for learner in self.live.values()}
        return {
            name: torch.frombuffer(bytearray(each), dtype=torch.uint8) for name, each in found.items() if each
        }

    # -- the script --------------------------------------------------------------------------------------

    def play(self, fault: Fault) -> None:
        """One line of the script, now."""
        self._played.append(fault.text)
        if fault.action == "add":
            self.ask_add(fault.count)
        elif fault.action == "change":
            self.change(as_sync(fault.dial))
        elif fault.action == "stop":
            self.ask_stop()
        elif fault.role == "node" and fault.rank in self.nodes:
            lost = self.nodes[fault.rank]
            self.recorder.event(f"node {lost.node} of the tree was killed by the script", kind="killed")
            lost.dead = True  # it does nothing from now on; what was below it goes elsewhere, a message later
            self.soon(partial(self._node_lost, lost))
        else:
            strike(self, fault)

    def change(self, sync: Sync) -> None:
        self.recorder.event(f"dial: {sync} from the next version on", kind="dial")
        self.coordinator.change(sync)

    def pause(self, learner: SimLearner, seconds: float) -> None:
        learner.pause.begin(self.clock.now, seconds)
        patience = self.spec.faults.patience
        if patience is None or seconds <= patience:
            return

        def hangs() -> None:
            if learner.dead or learner.fiber.done:
                return
            hung = Hangs(patience, self.spec.faults.kill_hung)
            for decision in hung.decide(learner.learner, f"learner {learner.rank}", learner.rank, patience):
                if isinstance(decision, Kill):
                    self.kill(learner, decision.why)
                else:
                    self.recorder.say(decision)

        self.clock.after(patience, hangs)

    # -- the run -----------------------------------------------------------------------------------------

    def folded(self) -> None:
        """The first table has another version."""
        self.version += 1
        version = self.version
        if self.script.faults:
            self.clock.at(self.clock.now, lambda: self.script.reached(version, self.play))
        self.sample()

    def sample(self) -> None:
        if self.version >= self._sampled:
            self._sampled = self.version + max(1, self.version // SAMPLES)
            self.clock.at(self.clock.now, lambda: self.recorder.sample(self.statistics()))

    def _evaluate(self, epoch: int, state: dict[str, Tensor]) -> None:
        if self._evaluation is None:
            self._evaluation = self.spec.evaluate
            if self.workshop is not None and isinstance(self._evaluation, Evaluation):
                self._evaluation = self._evaluation.on(self.workshop.device)
        assert self._evaluation is not None
        self.recorder.test(epoch, state, self._evaluation)

    def waiting(self) -> dict[int, str | None]:
        """Rank to what it waits for."""
        return {learner.rank: learner.waits_for for learner in self.live.values()}

    def simulated(self) -> SimulatedTimes:
        """Where the time went so far."""
        before = self._before
        times = dict(before.learners)
        for learner in self.learners.values():  # those that had a rank before count too
            times[learner.rank] = times.get(learner.rank, LearnerTimes()) + learner.times()
        return SimulatedTimes(
            learners=times,
            moved=before.moved + self.network.moved,
            copied=before.copied + self.network.copied,
            events=before.events + self.clock.events,
        )

    def run(self) -> Outcome:
        try:
            with calm_collector():
                self.start()
                self._run()
        finally:
            self.end()
        outcome = self.recorder.outcome
        outcome.seconds, outcome.simulated = self.clock.now, self.simulated()
        return outcome

    def start(self) -> None:
        """Plan the first events."""
        self.coordinator.begin()
        for fault in self.script.timed:
            self.clock.at(fault.seconds or 0.0, partial(self._timed, fault))
        for learner in self.learners.values():
            self.clock.at(0.0, learner.start)

    def end(self) -> None:
        """Nobody stays behind."""
        for learner in self.learners.values():
            if not learner.fiber.done:
                learner.kill()
        self.streams.enter(OUTSIDE)

    def _run(self) -> None:
        recorder, step, commands = self.recorder, self.clock.step, self.commands
        seconds = self.spec.plan.saving.seconds
        while recorder.error is None and self.next is None and (self.live or not self._over()) and step():
            if self.watch is not None:
                self.watch.after()
            while commands:
                commands.popleft()(self)
            if seconds is not None and self.clock.now - self._cut_asked > seconds:
                self._cut_asked = self.clock.now
                self.coordinator.ask_cut()
        if recorder.error is not None:
            raise recorder.error
        if self.next is not None:
            return
        if not recorder.complete():
            raise LostError(
                f"the simulated run stands still at {self.clock.now:g} s; who waits for what: {self.waiting()}"
            )
        if self.watch is not None:
            self.watch.over()
        for what in self.script.missed(self._played[len(self._began.played) :]):
            recorder.event(what, kind="missed")

    def _timed(self, fault: Fault) -> None:
        if self.live and self.next is None:
            self.play(fault)

    def _over(self) -> bool:
        """All is done; a script's later lines, or the end of a pause, do not matter any more."""
        return not self.live and self.recorder.complete() and not self.coordinator.cutting
