"""The supervisor: a thread of the caller's that starts a run's processes, hosts the coordinator, and ends them.

It watches every channel and every process's end, passes prints through, and gathers the outcome. Decisions are the coordinator's;
the learners' fast path does not pass here.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import selectors
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from syncline.engines.local import forkserver
from syncline.engines.local.cargo import pack
from syncline.engines.local.channel import Channel, Closed
from syncline.engines.local.child import Setup
from syncline.engines.local.exchange import Ring
from syncline.engines.local.learner import STOP, LearnerSpec, Task
from syncline.engines.local.memory import Bell, Region
from syncline.engines.local.server import LOG_ENTRIES, AddLearner, Desk, Geometry, Lane, ServerSpec, Shelf
from syncline.engines.record import Recorder, learner_error
from syncline.engines.run import Outcome, RunSpec
from syncline.errors import LostError, RunError
from syncline.ports import CoordinatorPort
from syncline.table.layout import Layout
from syncline.topology import messages as m
from syncline.topology.coordinator import Coordinator

GRACE = 5.0  # seconds that learners get to finish their step after a stop


@dataclass(slots=True)
class Process:
    """One child."""

    role: str  # "learner", "shard", "evaluator"
    number: int  # learner id or shard
    rank: int
    pid: int
    channel: Channel
    bell: Bell | None = None
    state: str = "running"
    reaped: bool = False


@dataclass(slots=True)
class _Shared:
    """What all processes of a run share."""

    hub: Region
    log: Region
    shard_bells: list[Bell]


def geometry_of(spec: RunSpec) -> Geometry:
    """How many slots, kept versions and inboxes the dial needs (M11)."""
    delay = spec.sync.delay
    return Geometry(slots=delay + 1, kept=delay + 1 if delay else 0, inbox=not spec.sync.lockstep)


class _Port(CoordinatorPort):
    """The coordinator's effects."""

    def __init__(self, run: Supervisor) -> None:
        self._run = run
        self.shards = run.spec.shards

    def make_table(self, table: int, layout: Layout) -> Region:
        return self._run.region(Shelf.nbytes(layout, kept=self._run.geometry.kept))

    def make_lane(self, table: int, learner: int, layout: Layout) -> Region:
        geometry = self._run.geometry
        return self._run.region(Lane.nbytes(layout, slots=geometry.slots, inbox=geometry.inbox))

    def reply(self, learner: int, message: Any) -> None:
        process = self._run.learners.get(learner)
        if process is not None:
            process.channel.try_send(message)

    def tell_shards(self, message: Any) -> None:
        for process in reversed(self._run.shards):
            process.channel.try_send(message)

    def stop_learners(self) -> None:
        self._run.stop_learners()

    def emit(self, record: Any) -> None:
        self._run.recorder.emit(record)


class Supervisor:
    """One run, from its first process to its last; `main` runs on a thread of the caller's."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec
        self.geometry = geometry_of(spec)
        self.done = threading.Event()
        self.recorder = Recorder(
            now=lambda: time.monotonic() - self._started,
            evaluate=self._evaluate,
            stop=self.stop_learners,
            layouts=lambda: {table: self._coordinator.layout(table) for table in self._coordinator.tables},
            callbacks=spec.callbacks,
        )
        self.learners: dict[int, Process] = {}  # by learner id, while running
        self.shards: list[Process] = []
        self.processes: dict[int, Process] = {}  # by pid
        self._evaluator: Process | None = None
        self._selector = selectors.DefaultSelector()
        self._commands: list[Any] = []
        self._wake = Bell()
        self._answers: dict[int, Any] = {}
        self._answered = threading.Condition()  # reentrant
        self._asked = 0
        self._deadline: float | None = None
        self._finishing = self._stopping = False
        self._started = time.monotonic()
        self._coordinator: Coordinator
        self._server: Channel
        self._regions: list[Region] = []
        decoder = codecs.getincrementaldecoder("utf-8")
        self._decoders = {"stdout": decoder("replace"), "stderr": decoder("replace")}

    def region(self, nbytes: int) -> Region:
        """Shared memory that goes with the run."""
        self._regions.append(Region(nbytes))
        return self._regions[-1]

    @property
    def outcome(self) -> Outcome:
        return self.recorder.outcome

    @property
    def error(self) -> BaseException | None:
        return self.recorder.error

    def _fail(self, error: BaseException) -> None:
        """The first failure is the one that is told."""
        self.recorder.error = self.recorder.error or error

    # -- the thread --------------------------------------------------------------------------------------

    def main(self) -> None:
        for part in (self._begin, self._loop, self._end):
            if self.error is None or part == self._end:
                try:
                    part()
                except BaseException as error:
                    self._fail(error)
        self.outcome.seconds = time.monotonic() - self._started
        self.done.set()
        with self._answered:
            self._answered.notify_all()

    def command(self, command: Any) -> None:
        with self._answered:
            self._commands.append(command)
            if self._wake.fd >= 0:  # the run has not ended
                self._wake.ring()

    def ask_statistics(self) -> m.Statistics:
        with self._answered:
            self._asked += 1
            number = self._asked
            self.command(m.AskStatistics(number))
            self._answered.wait_for(lambda: number in self._answers or self.done.is_set(), timeout=10)
            return self._answers.pop(number, self.outcome.statistics)

    # -- start -------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        spec = self.spec
        task = pack(Task(spec.function, spec.arguments, spec.keywords))
        evaluate = pack(spec.evaluate) if spec.evaluate is not None else None
        self._server = forkserver.connect()
        self._out = [os.pipe(), os.pipe()]
        self._life = os.pipe()
        self._shared = _Shared(
            hub=self.region(8),
            log=self.region(8 * Ring.words(LOG_ENTRIES, max(1, spec.shards - 1))),
            shard_bells=[Bell() for _ in range(spec.shards)],
        )
        self._watch(self._server.fileno(), self._from_forkserver)
        self._watch(self._wake.fd, self._from_caller)
        for (end, _), stream in zip(self._out, ("stdout", "stderr"), strict=True):
            self._watch(end, partial(self._print, end, stream))
        ids = {rank + 1: rank for rank in range(spec.learners)}
        self._coordinator = Coordinator(
            _Port(self),
            spec.plan(),
            ids,
        )
        for shard in range(spec.shards):
            self._start_shard(shard)
        for learner, rank in ids.items():
            self._start_learner(learner, rank, task)
        task.close()
        if evaluate is not None:
            self._evaluator = self._fork("evaluator", 0, 0, None, None)
            self._evaluator.channel.send(evaluate)
            evaluate.close()

    def _watch(self, fd: int, action: Callable[[], object]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, action)

    def _fork(self, role: str, number: int, rank: int, spec: Any, bell: Bell | None) -> Process:
        channel, theirs = Channel.pair()
        fds = [theirs.fileno(), self._out[0][1], self._out[1][1], self._life[0]]
        pid = self._start_child(fds)
        theirs.close()
        process = Process(role, number, rank, pid, channel, bell)
        self.processes[pid] = process
        threads = self._threads(role)
        environment = dict(os.environ)
        channel.send(Setup(role, threads, list(sys.path), os.getcwd(), environment, spec))
        self._watch(channel.fileno(), partial(self._from_process, process))
        return process

    def _start_child(self, fds: list[int]) -> int:
        forkserver.send_fork(self._server, fds)
        while True:
            answer = self._server.receive()
            if isinstance(answer, forkserver.Started):
                return answer.pid
            self._ended(answer)

    def _threads(self, role: str) -> int:
        if role != "learner":
            return 1
        if self.spec.threads is not None:
            return self.spec.threads
        spare = len(os.sched_getaffinity(0)) - 1  # the leading shard works while learners compute
        return max(1, spare // self.spec.learners)

    def _yields(self, role: str) -> int:
        """A learner yields for the length of a small fold, a shard for the time between two learners' gradients:
        waking a sleeping core costs more than either."""
        return 1000 if role == "learner" else 200

    def _start_shard(self, shard: int) -> None:
        spec = ServerSpec(
            shard,
            self.spec.shards,
            self._shared.log,
            self._shared.shard_bells,
            self.geometry,
            self._yields("shard"),
        )
        self.shards.append(self._fork("shard", shard, shard, spec, None))

    def _start_learner(self, learner: int, rank: int, task: Any) -> None:
        desk, bell = self.region(Desk.nbytes()), Bell()
        for shard in self.shards:
            shard.channel.send(AddLearner(learner, desk, bell))
        spec = LearnerSpec(
            learner,
            self._shared.hub,
            desk,
            bell,
            self._shared.shard_bells[0],
            self.geometry,
            self._yields("learner"),
            self.spec.session(rank),
        )
        process = self.learners[learner] = self._fork("learner", learner, rank, spec, bell)
        process.channel.send(task)
        desk.close()

    # -- the loop ----------------------------------------------------------------------------------------

    def _loop(self) -> None:
        while not self._over():
            for key, _ in self._selector.select(timeout=0.5):
                key.data()
            self._check_deadline()
            if self.error is not None:
                return

    def _over(self) -> bool:
        if self.error is not None:
            return True
        if self.learners:
            return False
        if not self._finishing:
            self._finishing = True
            _Port(self).tell_shards(m.Finish())
        return self.recorder.complete()

    def _check_deadline(self) -> None:
        if self._deadline is not None and time.monotonic() > self._deadline and self.learners:
            self._deadline = None
            for process in list(self.learners.values()):
                self.recorder.event(
                    f"killed: did not finish its step within {GRACE:.0f} s of the stop", process.rank
                )
                os.kill(process.pid, 9)

    def _from_caller(self) -> None:
        self._wake.quiet()
        commands, self._commands = self._commands, []
        for command in commands:
            if isinstance(command, m.AskStatistics):
                self.shards[0].channel.try_send(command)
            elif command == "kill":
                self._fail(KeyboardInterrupt())
            else:
                self.outcome.interrupted |= command == "interrupt"
                self.stop_learners()

    def stop_learners(self) -> None:
        self._stopping = True
        self._shared.hub.words[STOP] = 1
        for process in self.learners.values():
            if process.bell is not None:
                process.bell.ring()
        if self._deadline is None:
            self._deadline = time.monotonic() + GRACE

    def _print(self, end: int, stream: str) -> None:
        data = os.read(end, 65536)
        target = getattr(sys, stream)
        target.write(self._decoders[stream].decode(data))
        target.flush()

    # -- processes ---------------------------------------------------------------------------------------

    def _from_forkserver(self) -> None:
        try:
            self._ended(self._server.receive())
        except Closed:
            self._fail(LostError("the fork server was lost; the run cannot go on"))

    def _ended(self, ended: forkserver.Ended) -> None:
        process = self.processes[ended.pid]
        process.reaped = True
        while process.state == "running" and process.channel.ready():
            if not self._from_process(process):
                break
        if process.state != "running":
            return
        process.state = "lost"
        how = forkserver.describe(ended.code)
        if process.role != "learner":
            self._fail(LostError(f"{process.role} {process.rank} (pid {ended.pid}) ended with {how}"))
            return
        self.recorder.event(f"lost: its process (pid {ended.pid}) ended with {how}", process.rank)
        self._gone(process, lost=True)
        if not self.learners and not self.outcome.returned and not self._stopping:
            self._fail(LostError(f"all learners are lost, the last was rank {process.rank}: {how}"))

    def _gone(self, process: Process, *, lost: bool) -> None:
        self.learners.pop(process.number, None)
        self._coordinator.leave(process.number, lost=lost)

    def _from_process(self, process: Process) -> bool:
        """One message; False if the channel is closed."""
        if process.channel.fileno() < 0:  # closed in the same round of the loop
            return False
        try:
            message = process.channel.receive()
        except Closed:
            self._selector.unregister(process.channel.fileno())
            process.channel.close()
            return False
        if process.role == "shard":
            self._from_shard(message)
        elif process.role == "evaluator":
            self._from_evaluator(message)
        else:
            self._from_learner(process, message)
        return True

    def _from_learner(self, process: Process, message: Any) -> None:
        if isinstance(message, m.Returned):
            process.state = "returned"
            self.outcome.returned[process.rank] = message.value
            self._gone(process, lost=False)
        elif isinstance(message, m.Raised):
            process.state = "raised"
            self._fail(learner_error(process.rank, message.error, message.traceback))
        else:
            self._coordinator.from_learner(process.number, message)

    def _from_shard(self, envelope: tuple[int, Any]) -> None:
        shard, message = envelope
        if isinstance(message, m.ShardRaised):
            self._fail(RunError(f"shard {shard} failed:\n{message.traceback}"))
        elif isinstance(message, m.Statistics):
            with self._answered:
                self._answers[message.number] = message
                self._answered.notify_all()
        else:
            self._coordinator.from_shard(message)

    # -- evaluation --------------------------------------------------------------------------------------

    def _evaluate(self, epoch: int, state: dict[str, Tensor]) -> None:
        assert self._evaluator is not None
        self._evaluator.channel.try_send((epoch, state))

    def _from_evaluator(self, message: Any) -> None:
        if isinstance(message, m.Raised):
            self._fail(RunError(f"evaluation failed:\n{message.traceback}"))
        else:
            self.recorder.evaluated(*message)

    # -- end ---------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """Nothing stays behind, however it ended."""
        with self._answered:
            self._wake.close()
        self._selector.close()
        if "_server" not in self.__dict__:  # not even begun
            return
        if self.error is not None:
            for process in self.processes.values():
                if process.state == "running":
                    _kill(process.pid)
        for process in self.processes.values():
            if process.channel.fileno() >= 0:
                process.channel.close()
        self._reap_all()
        self._drain_prints()
        for pair in (*self._out, self._life):
            for end in pair:
                os.close(end)
        self._server.close()
        for bell in (*self._shared.shard_bells, *(p.bell for p in self.processes.values() if p.bell)):
            bell.close()
        for region in self._regions:
            region.release()

    def _reap_all(self) -> None:
        deadline = time.monotonic() + 5
        alive = {pid for pid, process in self.processes.items() if not process.reaped}
        while alive and time.monotonic() < deadline:
            try:
                if not self._server.ready():
                    time.sleep(0.002)
                    continue
                ended = self._server.receive()
            except Closed:
                return
            alive.discard(ended.pid)

    def _drain_prints(self) -> None:
        for (end, _), stream in zip(self._out, ("stdout", "stderr"), strict=True):
            os.set_blocking(end, False)
            try:
                while True:
                    self._print(end, stream)
            except BlockingIOError:
                pass


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 9)
