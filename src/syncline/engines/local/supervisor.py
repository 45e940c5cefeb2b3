"""The supervisor: a thread of the caller's that starts a run's processes, hosts the coordinator, and ends them.

It hears every process and notices every end, and carries out what the run's lifecycle decides. Decisions on updates are the
coordinator's and the shards'; the learners' fast path does not pass here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from syncline import messages as m
from syncline.dial import Sync
from syncline.engines.checkpoint_files import write_part
from syncline.engines.checkpoint_writer import Writer
from syncline.engines.local.coordinator_port import LocalCoordinatorPort
from syncline.engines.local.evaluator import Evaluator
from syncline.engines.local.hang_detection import HangDetection
from syncline.engines.local.host import Host, Machines, Told
from syncline.engines.local.local_host import LocalHost
from syncline.engines.local.packing import Parcel
from syncline.engines.local.process_launcher import ProcessLauncher
from syncline.engines.local.processes import Process
from syncline.engines.local.statistics_requests import Questions, with_processes
from syncline.engines.local.supervisor_base import RunThread
from syncline.engines.local.task_packing import pack_task
from syncline.engines.recorder import Recorder, learner_error
from syncline.engines.run import RunSpec
from syncline.engines.supervision import Crew, Supervision
from syncline.errors import LostError, RunError
from syncline.protocols.lifecycle import Faults, Grace, Lifecycle
from syncline.roles.coordinator import Coordinator
from syncline.table.checkpoints import FIRST, Folder

GRACE = 5.0  # seconds that learners get to finish their step after a stop
LAST_CUT = 1.0  # seconds that a stop waits for a checkpoint to begin
LOOK = 0.25  # seconds between looks at timers
SHARD_PATIENCE = 5.0  # seconds at least: an idle shard shows once a second that it lives


class Supervisor(Crew):
    """One run, from its first process to its last; `thread.main` runs on a thread of the caller's."""

    def __init__(
        self, spec: RunSpec, crashes: Mapping[str, int] | None = None, machines: Machines | None = None
    ) -> None:
        self.spec = spec
        self._crashes, self._machines = crashes or {}, machines
        self._started = time.monotonic()
        self.recorder = Recorder(
            now=lambda: time.monotonic() - self._started,
            evaluate=lambda epoch, state: self._evaluator.give(epoch, state),  # type: ignore[union-attr]
            stop=lambda: self.supervision.ask_stop(),
            layouts=lambda: {table: self._coordinator.layout(table) for table in self._coordinator.tables},
            callbacks=spec.callbacks,
            listeners=spec.listeners,
            restored=spec.storage.restored,
        )
        self.thread = RunThread(
            self.recorder, self._started, begin=self._begin, loop=self._loop, end=self._end
        )
        self.folder = Folder(Path(spec.storage.folder)) if spec.storage.folder else None
        self._task: Parcel | None = None
        self._writer: Writer | None = None  # of what other machines' shards save
        self._evaluator: Evaluator | None = None
        self._questions = Questions(self.thread)
        self._hanging = HangDetection(
            spec.faults, self.recorder, others="the others may wait for it", end="ends such a learner"
        )
        self._hanging_shards = HangDetection(
            spec.faults,
            self.recorder,
            others="all learners wait for it",
            end="goes back to the last checkpoint",
            least=SHARD_PATIENCE,
        )
        self._hanging_nodes = HangDetection(
            spec.faults,
            self.recorder,
            others="those below it wait for it",
            end="has them send elsewhere",
            least=SHARD_PATIENCE,
        )
        self._hanging_relay = HangDetection(
            Faults(patience=SHARD_PATIENCE, kill_hung=True),
            self.recorder,
            others="nothing reaches other machines",
            end="goes back to the last checkpoint",
        )
        self._looked = self._cut_asked = self._started
        self.host: LocalHost
        self.staff: ProcessLauncher
        self.supervision: Supervision
        self._coordinator: Coordinator

    def command(self, command: Any) -> None:
        """What the caller asks for."""
        self.thread.command(command)

    def ask_statistics(self) -> m.Statistics:
        return self._questions.ask()

    # -- the run -----------------------------------------------------------------------------------------

    def _begin(self) -> None:
        spec = self.spec
        self._task, evaluate = pack_task(spec)
        self._processes = self.thread.open(self._from_child, self._child_ended, self._asked)
        self.staff = self._launcher(self._task)
        lifecycle = Lifecycle(
            spec.faults,
            spec.plan.learners,
            recovers=self.folder is not None,
            saved=spec.storage.restored is not None,
            hold=spec.plan.local,
            grace=Grace(cut=LAST_CUT, step=GRACE),
        )
        ids = dict(lifecycle.live)
        self._coordinator = Coordinator(LocalCoordinatorPort(self), spec.plan, ids, spec.storage.restored)
        self.supervision = Supervision(
            lifecycle,
            self,
            self._coordinator,
            self.recorder,
            now=time.monotonic,
            folder=self.folder,
            start=spec.storage.restored,
        )
        self.staff.start_servers(ids)
        self._coordinator.begin()
        for learner, rank in ids.items():
            self.staff.start_learner(learner, rank)
        if evaluate is not None:
            self._evaluator = Evaluator(self._processes, evaluate, self.recorder)

    def _launcher(self, task: Parcel) -> ProcessLauncher:
        machines, processes, said = self._machines, self._processes, (self._heard, self._ended)
        if machines is None:
            self.host = LocalHost(self.spec, processes, task, *said, crashes=self._crashes)
            return ProcessLauncher([self.host], self.host.sites)
        self.host = LocalHost(
            self.spec,
            processes,
            task,
            *said,
            sites=machines.sites,
            relay=machines.relay,
            seat=machines.seats(),
        )
        told = Told(
            *said,
            self._site_lost,
            self._site_joined,
            lambda count: self.supervision.add(count),
            self._refused,
        )
        others = machines.hosts(processes, told)
        self.thread.elsewhere = [host.processes for host in others]
        return ProcessLauncher([self.host, *others], machines.sites, machines.where)

    def _loop(self) -> None:
        while not self._over():
            self._processes.work(LOOK)
            now = time.monotonic()
            if now - self._looked > LOOK:
                self._looked = now
                self._check_timers(now)

    def _over(self) -> bool:
        if self.thread.error is not None:
            return True
        complete = not self.staff.learners and self.recorder.complete()
        return complete and not self._coordinator.cutting

    def _check_timers(self, now: float) -> None:
        self.supervision.tick()
        if self.staff.learners:
            progress, waiting = self.staff.heard()
            idle = waiting | self._coordinator.meeting()
            self._hanging.look(now, progress, idle, self.staff.learners, self._kill)
        self._hanging_shards.look(now, self.staff.beats(), set(), self.staff.shards, self._kill)
        if self.host.nodes is not None:
            nodes = self.staff.nodes
            beats = {node: count for node, count in self.staff.node_beats().items() if node in nodes}
            self._hanging_nodes.look(now, beats, set(), nodes, self._kill)
        if self.host.relay is not None:
            count = self.host.relay_beats
            relay = {0: self.host.relay}
            self._hanging_relay.look(now, {0: count}, set() if count else {0}, relay, self._kill)
        for last in self._questions.overdue(now):
            self._questions.answer(self._with_processes(last))
        seconds = self.spec.plan.saving.seconds
        if seconds is not None and now - self._cut_asked > seconds:
            self._cut_asked = now
            self._coordinator.ask_cut()

    def _asked(self, command: Any) -> None:
        if isinstance(command, m.AskStatistics):
            self._questions.open[command.number] = time.monotonic()
            self.staff.tell_leader(command)
        elif isinstance(command, m.Saved):
            self._coordinator.from_shard(command)
        elif isinstance(command, Sync):
            self.recorder.event(f"dial: {command} from the next version on", kind="dial")
            self._coordinator.change(command)
        elif isinstance(command, int):
            self.supervision.add(command)
        elif command == "kill":
            self.thread.fail(KeyboardInterrupt())
        else:
            self.thread.outcome.interrupted |= command == "interrupt"
            self.supervision.ask_stop()

    # -- what the coordinator wants ----------------------------------------------------------------------

    def stop_learners(self) -> None:
        self.supervision.stop()

    def checkpointed(self, path: Path) -> None:
        self.supervision.checkpointed(path)

    # -- the crew ----------------------------------------------------------------------------------------

    def start_learner(self, learner: int, rank: int) -> None:
        self.staff.start_learner(learner, rank)

    def end_learner(self, learner: int) -> None:
        self.staff.end_learner(learner)

    def forget_learner(self, learner: int) -> None:
        self.staff.forget(learner)

    def kill_learner(self, learner: int, why: str) -> None:
        self._kill(self.staff.learners[learner], why)

    def _kill(self, process: Process, why: str) -> None:
        self.recorder.event(
            f"killed: {why}", process.rank, kind="killed", learner=process.number, pid=process.pid
        )
        self.staff.kill(process)

    def tell_stop(self) -> None:
        self.staff.stop_learners()

    def renew_shards(self) -> None:
        self.staff.renew_servers()
        for number in self._questions.open:  # the old ones did not answer
            self.staff.tell_leader(m.AskStatistics(number))

    def finish(self) -> None:
        self._coordinator.finish()

    def fail(self, error: BaseException) -> None:
        self.thread.fail(error)

    # -- processes ---------------------------------------------------------------------------------------

    def _from_child(self, process: Process, message: Any) -> None:
        if process.role == "evaluator":
            assert self._evaluator is not None
            self._evaluator.hear(message)
        else:
            self.host.hear(process, message)

    def _child_ended(self, process: Process, how: str) -> None:
        self.host.lose(process, how)

    def _site_lost(self, site: int, why: str) -> None:
        """A machine of a cluster is gone: so are its learners, and its shards."""
        self.recorder.event(f"machine {site} is lost: {why}", kind="machine lost", machine=site)
        lost = self.staff.lose(site)
        learners, shards = ([each for each in lost if each.role == role] for role in ("learner", "shard"))
        for process in lost:
            process.state = "lost"
        for process in (*learners, *shards[:1]):
            self._ended(process, f"its machine: {why}", own_fault=False)

    def _site_joined(self, host: Host, name: str) -> None:
        assert self._machines is not None
        self.recorder.event(f"machine {host.site} joins: {name}", kind="machine joined", machine=host.site)
        self.thread.elsewhere.append(host.processes)
        self.staff.gain(host)
        self.host.gain_site(host.site, self._machines.address(host.site))

    def _refused(self, what: str) -> None:
        self.recorder.event(what, kind="refused")

    def _heard(self, process: Process, message: Any) -> None:
        if process.role == "shard":
            self._from_shard(message)
        elif process.role == "node":
            self.thread.fail(RunError(f"node {process.rank} of the tree failed:\n{message.traceback}"))
        elif process.role == "relay":
            assert self._machines is not None
            self._machines.hear(process, message)
        elif isinstance(message, m.Returned):
            process.state = "returned"
            self.recorder.returned(process.rank, message)
            self.supervision.returned(process.number)
        elif isinstance(message, m.Raised):
            process.state = "raised"
            error = learner_error(process.rank, message.error, message.traceback)
            self.supervision.raised(process.number, error)
        else:
            self._coordinator.from_learner(process.number, message)

    def _from_shard(self, envelope: tuple[int, Any]) -> None:
        shard, message = envelope
        if isinstance(message, m.ShardRaised):
            self.thread.fail(RunError(f"shard {shard} failed:\n{message.traceback}"))
        elif isinstance(message, m.Statistics):
            self._questions.answer(self._with_processes(message))
        elif isinstance(message, m.Save):
            self._save(message)
        else:
            self._coordinator.from_shard(message)

    def _save(self, part: m.Save) -> None:
        """For a machine that does not see the folder."""
        assert self.folder is not None
        if part.number == FIRST:
            job = (part.number, part.name, part.tensors, part.notes)
            self._coordinator.from_shard(write_part(self.folder, job))
            return
        if self._writer is None:
            self._writer = Writer(self.folder.root, self.command)
        self._writer.write(part.number, part.name, part.tensors, part.notes)

    def _ended(self, process: Process, how: str, *, own_fault: bool = True) -> None:
        """A process ended without a word."""
        process.state = "lost"
        number, rank, pid = process.number, process.rank, process.pid
        if process.role == "shard":
            lost = f"shard {rank} (pid {pid}) ended with {how}"
            self.supervision.shard_lost(lost, shard=rank, pid=pid)
        elif process.role == "node":
            self._node_lost(process, how)
        elif process.role == "relay":
            self.supervision.shard_lost(f"the relay of machine {rank} (pid {pid}) ended with {how}", pid=pid)
        elif process.role == "learner":
            why = f"its process (pid {pid}) ended with {how}"
            stepped = not own_fault or self.staff.stepped(number)
            self.supervision.lost(number, why, stepped=stepped, pid=pid)
        else:
            self.thread.fail(LostError(f"{process.role} {rank} (pid {pid}) ended with {how}"))

    def _node_lost(self, process: Process, how: str) -> None:
        """Those below it publish through another; the last leaf's loss is that of a shard (M14)."""
        node, pid = process.number, process.pid
        lost = f"node {node} of the tree (pid {pid}) ended with {how}"
        moved = self.staff.lose_node(node)
        if moved is None:
            self.supervision.shard_lost(f"the last leaf, {lost}", node=node, pid=pid)
        else:
            self.recorder.event(f"{lost}; {moved}", kind="node lost", node=node, pid=pid)

    # -- statistics and the end --------------------------------------------------------------------------

    def _with_processes(self, statistics: m.Statistics) -> m.Statistics:
        waits: dict[int, int] = {}
        for table in statistics.tables.values():
            waits.update(table.waiting)
        meeting = self._coordinator.meeting() if "_coordinator" in self.__dict__ else set()

        def state(process: Process) -> str:
            if process.number in meeting:
                return "waits for the others"
            version = waits.get(process.rank)
            if version is None:
                return "computing"
            return f"waits for version {version}" if version >= 0 else "has no data"

        return with_processes(statistics, self.thread.processes, state)

    def _end(self) -> None:
        """Nothing stays behind, however it ended."""
        self._name_checkpoint()
        outcome = self.thread.outcome
        outcome.statistics = self._with_processes(outcome.statistics)
        self.thread.close()
        if self._writer is not None:
            self._writer.close()
        if self._task is not None:
            self._task.close()
        if "staff" in self.__dict__:
            self.staff.close()

    def _name_checkpoint(self) -> None:
        """Whoever hears of a loss hears what is left, unless that cannot be read."""
        error, last = self.thread.error, self.supervision.last if "supervision" in self.__dict__ else None
        if isinstance(error, LostError) and last is not None and error.__cause__ is None:
            error.args = (f"{error}; the last checkpoint is {last}: resume= goes on from it",)
