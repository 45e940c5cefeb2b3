"""A batch method's shards and learners in virtual time: when commands are carried out, portions computed, sums sent (D6, D7).

The coordinator is the real one. What is computed is another's (`Numbers`), so that a run can be timed without any
(reproductions/distbelief/batch_times.py). Not responsible for records, scripts and checkpoints.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial

from syncline.batch import commands as c
from syncline.batch import messages as b
from syncline.batch.coordinator import Coordinator
from syncline.batch.portions import Cancel
from syncline.cluster import Cluster
from syncline.engines.simulated_times import LearnerTimes
from syncline.sim.clock import Clock
from syncline.sim.machine_cores import Machines
from syncline.sim.network import SimNetwork


class Numbers(ABC):
    """The arithmetic of a run."""

    @abstractmethod
    def run(self, shard: int, commands: c.Program) -> tuple[float, ...]: ...

    @abstractmethod
    def add(self, shard: int, message: b.Add) -> None: ...

    @abstractmethod
    def sum(self, task: b.Give) -> tuple[float, int]:
        """Of a task's portions, into its slot: loss over examples, and their number."""

    @abstractmethod
    def examples(self, task: b.Give, portion: int) -> int: ...


@dataclass(slots=True, eq=False)
class SimBatchLearner:
    """One learner: what it has to do, and what it did with its time."""

    number: int
    rank: int
    machine: int
    tasks: deque[b.Give] = field(default_factory=deque)  # the first is being computed
    portion: int = 0
    at: int = -1  # the evaluation whose point it has
    working: bool = False
    dead: bool = False
    steps: int = 0  # portions; those of `times` are sums
    since: float = 0.0  # when it last fell idle
    times: LearnerTimes = field(default_factory=LearnerTimes)


class Play:
    """`done` gets iterations and the end; `parts` are the bytes of each shard's part of a vector."""

    def __init__(
        self,
        clock: Clock,
        cluster: Cluster,
        coordinator: Coordinator,
        numbers: Numbers,
        parts: list[int],
        *,
        seed: int,
        learners: int,
        done: Callable[[b.Reached | b.Over], None],
    ) -> None:
        self._clock, self._cluster, self._coordinator, self._numbers = clock, cluster, coordinator, numbers
        self._parts, self._seed, self._count, self._done = parts, seed, learners, done
        self.network, self._machines = SimNetwork(cluster), Machines(clock, cluster)
        self._homes = [cluster.machine_of_shard(shard) for shard in range(len(parts))]
        self._copied = cluster.copy.seconds(sum(parts))  # after so many seconds, by a learner
        self._free = [0.0] * len(parts)  # when each shard has done what it has
        self._generation = 0
        self.learners: dict[int, SimBatchLearner] = {}
        self.gone: list[SimBatchLearner] = []

    # -- the coordinator's wishes --------------------------------------------------------------------------

    def do(self, actions: Iterable[b.Action]) -> None:
        for action in actions:
            if isinstance(action, b.Run | b.Add):
                for shard in range(len(self._parts)):
                    self._send(self._homes[shard], partial(self._arrived, shard, action, self._generation))
            elif isinstance(action, b.Give):
                learner = self.learners[action.learner]
                self._send(learner.machine, partial(self._given, learner, action))
            elif isinstance(action, Cancel):
                if (found := self.learners.get(action.learner)) is not None:
                    self._send(found.machine, partial(self._cancelled, found, action))
            else:
                self._done(action)

    def _send(self, machine: int, then: Callable[[], None]) -> None:
        """A message of the coordinator's, who is beside the first shard."""
        self._clock.at(self.network.send(self._clock.now, self._homes[0], machine), then)

    def _reply(self, machine: int, then: Callable[[], Iterable[b.Action]]) -> None:
        arrival = self.network.send(self._clock.now, machine, self._homes[0])
        self._clock.at(arrival, lambda: self.do(then()))

    # -- shards ----------------------------------------------------------------------------------------------

    def _arrived(self, shard: int, message: b.Run | b.Add, generation: int) -> None:
        """It does one thing after the other. Dots read each vector once, whatever their number; every other command is a pass."""
        nbytes, seconds = self._parts[shard], self._cluster.message
        if isinstance(message, b.Add):
            seconds += self._cluster.take.seconds(nbytes)
        else:
            dots = [command for command in message.commands if isinstance(command, c.Dot)]
            passes = (
                len({name for dot in dots for name in (dot.a, dot.b)}) + len(message.commands) - len(dots)
            )
            passes += sum(len(each.terms) - 1 for each in message.commands if isinstance(each, c.Combine))
            seconds += passes * self._cluster.fold.seconds(nbytes)
        self._free[shard] = max(self._free[shard], self._clock.now) + seconds
        self._clock.at(self._free[shard], partial(self._worked, shard, message, generation))

    def _worked(self, shard: int, message: b.Run | b.Add, generation: int) -> None:
        if generation != self._generation:
            return
        home, coordinator = self._homes[shard], self._coordinator
        if isinstance(message, b.Run):
            ran = b.Ran(shard, message.number, self._numbers.run(shard, message.commands))
            self._reply(home, partial(coordinator.ran, ran))
        else:
            self._numbers.add(shard, message)
            self._reply(home, partial(coordinator.added, b.Added(shard, message.slot)))

    def lose_shards(self) -> None:
        """What they were doing is lost; others are there at once."""
        self._generation += 1
        self._free = [self._clock.now] * len(self._parts)

    # -- learners --------------------------------------------------------------------------------------------

    def join(self, number: int, rank: int) -> None:
        machine = self._cluster.machine_of_learner(rank)
        self.learners[number] = SimBatchLearner(number, rank, machine, since=self._clock.now)
        self._reply(machine, lambda: self._coordinator.join(number) if number in self.learners else ())

    def leave(self, number: int) -> None:
        learner = self.learners.pop(number)
        learner.dead = True
        self.gone.append(learner)

    def _given(self, learner: SimBatchLearner, task: b.Give) -> None:
        learner.tasks.append(task)
        self._go_on(learner)

    def _cancelled(self, learner: SimBatchLearner, cancel: Cancel) -> None:
        """Before it begins, or before its next portion."""
        for place, task in enumerate(learner.tasks):
            if task.task == cancel.task and (place > 0 or not learner.working):
                del learner.tasks[place]
                self._reply(learner.machine, partial(self._drop, learner, task))
                return
            if task.task == cancel.task:
                learner.tasks[0] = replace(task, slot=-1)  # in the middle of a portion

    def _drop(self, learner: SimBatchLearner, task: b.Give) -> Iterable[b.Action]:
        return self._coordinator.dropped(learner.number, b.Dropped(task.evaluation, task.task))

    def _go_on(self, learner: SimBatchLearner) -> None:
        if learner.working or learner.dead or not learner.tasks:
            return
        task, now = learner.tasks[0], self._clock.now
        learner.working = True
        learner.portion = task.start
        learner.times += LearnerTimes(waiting=now - learner.since)
        if learner.at == task.evaluation:
            self._compute(learner)
            return
        learner.at = task.evaluation
        ways = zip(self._homes, self._parts, strict=True)
        arrival = max(self.network.send(now, home, learner.machine, nbytes) for home, nbytes in ways)
        arrival += self._copied
        learner.times += LearnerTimes(communication=arrival - now)
        self._clock.at(arrival, partial(self._compute, learner))

    def _compute(self, learner: SimBatchLearner) -> None:
        """The next portion; a task that was cancelled meanwhile is dropped."""
        if learner.dead:
            return
        task = learner.tasks[0]
        if task.slot < 0:
            learner.tasks.popleft()
            self._reply(learner.machine, partial(self._drop, learner, task))
            self._rest(learner)
            return
        if learner.portion == task.stop:
            self._hand_over(learner, task)
            return
        seconds = self._cluster.step_seconds(
            self._numbers.examples(task, learner.portion),
            rank=learner.rank,
            step=learner.steps,
            seed=self._seed,
            learners=self._count,
        )
        learner.steps += 1
        learner.portion += 1
        learner.times += LearnerTimes(compute=seconds)
        self._machines.run(learner.machine, seconds, partial(self._compute, learner), learner.number)

    def _hand_over(self, learner: SimBatchLearner, task: b.Give) -> None:
        """The sum leaves; the next task begins."""
        learner.tasks.popleft()
        loss, examples = self._numbers.sum(task)
        learner.times += LearnerTimes(steps=1)
        now, ways = self._clock.now, zip(self._homes, self._parts, strict=True)
        arrival = max(self.network.send(now, learner.machine, home, nbytes) for home, nbytes in ways)
        answer = b.Answered(task.evaluation, task.task, loss, examples)

        def arrived() -> None:
            if not learner.dead:  # what was under way when its sender died has not arrived whole
                self.do(self._coordinator.answered(learner.number, answer))

        self._clock.at(arrival, arrived)
        learner.times += LearnerTimes(communication=self._copied)
        self._clock.after(self._copied, partial(self._rest, learner))

    def _rest(self, learner: SimBatchLearner) -> None:
        learner.working, learner.since = False, self._clock.now
        self._go_on(learner)
