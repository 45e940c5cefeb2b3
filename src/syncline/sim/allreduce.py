"""A simulated all-reduce run: learners among equals in virtual time, their collectives, and the keeper of their record.

Each learner is a thread that takes turns with the others (not a greenlet: it gives way inside backward, whose state is the
thread's). Sessions, optimizers and protocols are the local engine's. All learners' buffers are summed in rank order, after the time
of a ring over the slowest link; one ring at a time: reductions that start while another is under way wait for the network.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from syncline import messages as m
from syncline.cluster import Cluster
from syncline.dial import Sync
from syncline.engines.checkpoint_writer import write_part
from syncline.engines.event_script import Fault
from syncline.engines.recorder import learner_error, peer_record
from syncline.engines.run import Outcome, RunSpec
from syncline.engines.simulated_times import LearnerTimes, SimulatedTimes
from syncline.errors import LostError, UsageError
from syncline.learn.allreduce_session import AllReduceSession
from syncline.ports import CollectivePort, Computing, Progress, Reduction, Serving
from syncline.protocols.lifecycle import alone
from syncline.protocols.staleness import StalenessClock
from syncline.roles.allreduce_coordinator import Meet, early
from syncline.sim.clock import Clock
from syncline.sim.fault_player import Script
from syncline.sim.fibers import Killed, Thread
from syncline.sim.learner import call
from syncline.sim.random_states import OUTSIDE, RandomStreams
from syncline.table.checkpoints import Folder

BROADCAST, SUM = "broadcast", "sum"


@dataclass(slots=True)
class Ring:
    """One collective: who has come, when all had, whether it is over."""

    kind: str
    buffers: dict[int, Tensor] = field(default_factory=dict)  # by rank
    met: float = 0.0
    done: bool = False


class Rings:
    """The collectives of one run, in the order in which all learners start them."""

    def __init__(self, clock: Clock, cluster: Cluster, learners: int, wake: Callable[[], None]) -> None:
        self._clock, self._cluster, self._learners, self._wake = clock, cluster, learners, wake
        self._rings: list[Ring] = []
        self.started = [0] * learners  # by rank
        self._free = 0.0  # when the network is
        self.moved = 0  # bytes

    def start(self, rank: int, buffer: Tensor, kind: str = SUM) -> Ring:
        """This learner comes to its next collective."""
        number = self.started[rank]
        self.started[rank] += 1
        if number == len(self._rings):
            self._rings.append(Ring(kind))
        ring = self._rings[number]
        if ring.kind != kind or any(each.shape != buffer.shape for each in ring.buffers.values()):
            raise AssertionError(
                f"learner {rank} comes to collective {number} with something else than the others"
            )
        ring.buffers[rank] = buffer
        if len(ring.buffers) == self._learners:  # all have come
            ring.met = self._clock.now
            self._free = max(self._free, ring.met) + self.seconds(buffer.numel() * buffer.element_size())
            self._clock.at(self._free, lambda: self._end(ring))
        return ring

    def seconds(self, nbytes: int) -> float:
        """Of a ring: each learner passes 2(λ−1) parts of 1/λ on."""
        hops = 2 * (self._learners - 1)
        if not hops:
            return 0.0
        part = -(-nbytes // self._learners)
        self.moved += hops * part * self._learners
        machines = {self._cluster.machine_of_learner(rank) for rank in range(self._learners)}
        link = self._cluster.card if len(machines) > 1 else self._cluster.memory
        return link.setup + hops * (link.latency + link.seconds(part))

    @torch.no_grad()
    def _end(self, ring: Ring) -> None:
        first = ring.buffers[0]
        result = first.clone()
        if ring.kind == SUM:
            for rank in range(1, self._learners):
                result += ring.buffers[rank]
        for buffer in ring.buffers.values():
            buffer.copy_(result)
        ring.buffers.clear()
        ring.done = True
        self._wake()


class SimReduction(Reduction):
    """A ring, seen from one learner."""

    def __init__(self, peer: SimPeer, ring: Ring) -> None:
        self._peer, self._ring = peer, ring

    def wait(self, *, block: bool = True) -> bool:
        if block:
            self._peer.wait_for(self._ring)
        return self._ring.done


class SimPeer(CollectivePort):
    """One simulated learner: its session's port, and the thread it runs on."""

    def __init__(self, world: AllReduceSimulation, rank: int) -> None:
        self._world, self.rank, self.learners = world, rank, world.spec.plan.learners
        self.fiber = Thread(self._main)
        self.dead = False
        self.waits_for: str | None = None
        self._answers: list[Any] = []
        restored = world.spec.storage.restored
        self._step = restored.pipelines[0].started if restored and restored.pipelines else 0
        self.times = LearnerTimes()
        self.progress: Progress | None = None

    def _main(self) -> None:
        world, spec = self._world, self._world.spec
        torch.set_num_threads(spec.threads or 1)  # each thread has its own, another in its first operation
        try:
            seat = replace(spec.seat(self.rank), reader=False)
            session = AllReduceSession(self, seat, spec.storage.restored)
            value = call(spec.task, session)
            session.close()
            world.later(lambda: world.returned(self.rank, value))
        except Killed:
            return
        except BaseException as error:
            world.fail(learner_error(self.rank, error, "".join(traceback.format_exception(error))))

    def go(self) -> None:
        """From the scheduler."""
        if not self.fiber.done and not self.dead:
            self._world.streams.enter(self.rank)
            self.fiber.resume()

    def wake(self) -> None:
        if self.waits_for is not None:
            self.go()

    def kill(self) -> None:
        self.dead = True
        if not self.fiber.done:
            self.fiber.end()

    def _until(self, ready: Callable[[], bool], what: str) -> None:
        while not ready():
            self.waits_for = what
            self.fiber.block()
        self.waits_for = None

    # -- the port ----------------------------------------------------------------------------------------

    def now(self) -> float:
        return self._world.clock.now

    def spend(self, work: Computing | Serving) -> None:
        assert isinstance(work, Computing)
        world, (examples, share) = self._world, work
        seconds = share * world.cluster.step_seconds(
            examples, rank=self.rank, step=self._step, seed=world.seed, learners=self.learners
        )
        end = world.clock.now + seconds
        world.clock.at(end, self.wake)
        self._until(lambda: world.clock.now >= end, "its own computation")
        self.times += LearnerTimes(compute=seconds)

    def reduce(self, buffer: Tensor) -> SimReduction:
        return SimReduction(self, self._world.rings.start(self.rank, buffer))

    def broadcast(self, buffer: Tensor) -> None:
        self.wait_for(self._world.rings.start(self.rank, buffer, BROADCAST))

    def wait_for(self, ring: Ring) -> None:
        began = self.now()
        self._until(lambda: ring.done, "a reduction")
        others = max(0.0, ring.met - began)
        visible = self.now() - began - others
        self.times += LearnerTimes(waiting=others, communication=visible)

    def meet(self, what: str, value: Any) -> list[Any]:
        began = self.now()
        self.tell(Meet(what, value))
        self._until(lambda: bool(self._answers), what)
        self.times += LearnerTimes(waiting=self.now() - began)
        values: list[Any] = self._answers.pop()
        return values

    def answer(self, values: list[Any]) -> None:
        self._answers.append(values)
        self.wake()

    def tell(self, message: Any) -> None:
        world = self._world
        if not isinstance(message, Progress):
            world.later(lambda: world.keeper.hear(self.rank, message))
            return
        self.progress = message._replace(histogram=dict(message.histogram))
        self._step += 1
        self.times += LearnerTimes(steps=1)
        if self.rank == 0:
            world.stepped(message.version)

    def save(self, number: int, name: str, tensors: dict[str, Tensor], notes: dict[str, Any]) -> None:
        assert self._world.spec.storage.folder is not None
        folder = Folder(Path(self._world.spec.storage.folder))
        self.tell(write_part(folder, (number, name, tensors, notes)))

    def stopping(self) -> bool:
        return self._world.stopping


class AllReduceSimulation:
    """One simulated all-reduce run."""

    def __init__(self, spec: RunSpec, cluster: Cluster, *, script: Script, seed: int) -> None:
        self.spec, self.cluster, self.seed, self._script = spec, cluster, seed, script
        self.clock = Clock()
        if spec.storage.restored is not None:
            self.clock.now = spec.storage.restored.virtual
            self._script = script.after(spec.storage.restored.version, spec.storage.restored.virtual)
        self.streams = RandomStreams(gpus=any(device.startswith("cuda") for device in spec.devices))
        self.rings = Rings(self.clock, cluster, spec.plan.learners, self._wake)
        self.stopping = False
        self.recorder, self.keeper = peer_record(
            spec,
            now=lambda: self.clock.now,
            evaluate=self._evaluate,
            stop=self.ask_stop,
            reply=lambda rank, values: self.later(lambda: self.peers[rank].answer(values)),
            fail=self.fail,
            virtual=True,
        )
        self.recorder.outcome.began = self.clock.now
        self._played: list[str] = []
        self.peers = [SimPeer(self, rank) for rank in range(spec.plan.learners)]
        self._returned: set[int] = set()
        self.commands: deque[Callable[[AllReduceSimulation], None]] = deque()  # from other threads

    def later(self, action: Callable[[], None]) -> None:
        """After a message's time."""
        self.clock.after(self.cluster.card.latency, action)

    def fail(self, error: BaseException) -> None:
        self.recorder.error = self.recorder.error or error

    def _wake(self) -> None:
        for peer in self.peers:
            self.clock.at(self.clock.now, peer.wake)

    def returned(self, rank: int, value: Any) -> None:
        self.recorder.outcome.returned[rank] = value
        self._returned.add(rank)

    def _evaluate(self, epoch: int, state: dict[str, Tensor]) -> None:
        assert self.spec.evaluate is not None
        self.streams.enter(OUTSIDE)
        self.recorder.test(epoch, state, self.spec.evaluate)

    # -- what others ask ---------------------------------------------------------------------------------

    def ask_stop(self) -> None:
        """Learners agree on the step after which they leave."""
        self.stopping = True

    def ask_add(self, count: int) -> None:
        raise UsageError("all-reduce has fixed membership: no learners can be added")

    def change(self, sync: Sync) -> None:
        raise UsageError("all-reduce cannot change its dial in the middle; give a course")

    def statistics(self) -> m.Statistics:
        first = self.peers[0].progress
        if first is None:
            return m.Statistics(0)
        clock = StalenessClock()
        clock.histogram.update(first.histogram)
        table = m.TableStatistics(
            first.version, first.gradients, 0, first.examples, clock.account(), {}, [], 0
        )
        shown = [(peer.rank, peer.progress) for peer in self.peers if peer.progress is not None]
        steps, losses = (
            {rank: each.started for rank, each in shown},
            {rank: each.loss for rank, each in shown},
        )
        return m.Statistics(0, {0: table}, steps, losses)

    # -- the script --------------------------------------------------------------------------------------

    def stepped(self, version: int) -> None:
        self._script.reached(version, lambda fault: self.clock.at(self.clock.now, partial(self._play, fault)))

    def _play(self, fault: Fault) -> None:
        self._played.append(fault.text)
        if fault.action == "stop":
            self.ask_stop()
        elif fault.rank >= len(self.peers):
            self.recorder.event(f"not played, nobody is there: {fault.text}", kind="missed")
        else:
            self.peers[fault.rank].kill()
            self.recorder.event("lost: killed by the script", fault.rank, kind="lost")
            self.fail(alone(f"learner {fault.rank} is lost: killed by the script"))

    # -- the run -----------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        try:
            self._run()
        finally:
            for peer in self.peers:  # nobody stays behind
                if not peer.fiber.done:
                    peer.kill()
            self.streams.enter(OUTSIDE)
        outcome = self.recorder.outcome
        outcome.seconds = self.clock.now
        times = {peer.rank: peer.times for peer in self.peers}
        outcome.simulated = SimulatedTimes(learners=times, moved=self.rings.moved, events=self.clock.events)
        return outcome

    def _run(self) -> None:
        for fault in self._script.timed:
            self.clock.at(fault.seconds or 0.0, partial(self._play, fault))
        for peer in self.peers:
            self.clock.at(0.0, peer.go)
        while self.recorder.error is None and not self._over() and self.clock.step():
            while self.commands:
                self.commands.popleft()(self)
        if self.recorder.error is not None:
            raise self.recorder.error
        if not self._over():  # nothing happens any more
            what = {peer.rank: peer.waits_for for peer in self.peers}
            waiting = [rank for rank, waits in what.items() if waits is not None]
            for rank in self._returned if waiting else ():
                raise early(rank, self.keeper.closed[rank].steps, waiting[0], "a further step")
            raise LostError(
                f"the simulated run stands still at {self.clock.now:g} s; who waits for what: {what}"
            )
        for text in self._script.missed(self._played):
            self.recorder.event(text, kind="missed")

    def _over(self) -> bool:
        complete = self.recorder.complete() and not self.keeper.cutting
        return len(self._returned) == len(self.peers) and complete
