"""The supervisor of a run over servers: starts its processes, hosts the coordinator, and ends them.

It hears every process and notices every end, and carries out what the run's lifecycle decides. Decisions on updates are the
coordinator's and the shards'; the learners' fast path does not pass here.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from syncline import messages as m
from syncline.dial import Sync
from syncline.engines.checkpoint_writer import Writer, write_part
from syncline.engines.local.host_interface import Host, Machines, Told
from syncline.engines.local.local_host import LocalHost
from syncline.engines.local.packing import Parcel
from syncline.engines.local.process_launcher import ProcessLauncher
from syncline.engines.local.processes import Process
from syncline.engines.local.supervisor_base import HangDetection, RunSupervisor
from syncline.engines.recorder import Recorder, learner_error
from syncline.engines.run import RunSpec
from syncline.engines.supervision import Supervision
from syncline.errors import LostError, RunError
from syncline.protocols.lifecycle import Faults, Grace, Lifecycle
from syncline.roles.coordinator import Coordinator
from syncline.table.checkpoints import FIRST, Folder

GRACE = 5.0  # seconds that learners get to finish their step after a stop
LAST_CUT = 1.0  # seconds that a stop waits for a checkpoint to begin
SHARD_PATIENCE = 5.0  # seconds at least: an idle shard shows once a second that it lives
SILENCE = 2.0  # seconds that the leading shard gets for an answer


class Supervisor(RunSupervisor):
    """A run over servers."""

    host: LocalHost
    staff: ProcessLauncher
    supervision: Supervision
    coordinator: Coordinator

    def __init__(
        self, spec: RunSpec, crashes: Mapping[str, int] | None = None, machines: Machines | None = None
    ) -> None:
        super().__init__(spec, crashes)
        self._machines = machines
        self.recorder = Recorder(
            spec,
            now=self.now,
            evaluate=self._evaluate,
            stop=self._stop,
            layouts=lambda: {table: self.coordinator.layout(table) for table in self.coordinator.tables},
        )
        self.folder = Folder(Path(spec.storage.folder)) if spec.storage.folder else None
        self._writer: Writer | None = None  # of what other machines' shards save
        self._open: dict[int, float] = {}  # questions to the leading shard, and when they were asked
        self._last = m.Statistics(-1)
        back = "goes back to the last checkpoint"
        self._hanging = HangDetection(self, "the others may wait for it", "ends such a learner")
        self._hanging_shards = HangDetection(self, "all learners wait for it", back, least=SHARD_PATIENCE)
        self._hanging_nodes = HangDetection(
            self, "those below it wait for it", "has them send elsewhere", least=SHARD_PATIENCE
        )
        self._hanging_relay = HangDetection(
            self,
            "nothing reaches other machines",
            back,
            faults=Faults(patience=SHARD_PATIENCE, kill_hung=True),
        )
        self._cut_asked = self._started

    # -- the run -----------------------------------------------------------------------------------------

    def _start(self, task: Parcel) -> None:
        spec = self.spec
        self.staff = self._launcher(task)
        lifecycle = Lifecycle(
            spec.faults,
            spec.plan.learners,
            recovers=self.folder is not None,
            saved=spec.storage.restored is not None,
            hold=spec.plan.local,
            grace=Grace(cut=LAST_CUT, step=GRACE),
        )
        ids = dict(lifecycle.live)
        self.coordinator = Coordinator(self.staff, spec.plan, ids, spec.storage.restored)
        self.supervision = Supervision(
            lifecycle,
            self.staff,
            self.coordinator,
            self.recorder,
            now=time.monotonic,
            folder=self.folder,
            start=spec.storage.restored,
        )
        self.staff.start_servers(ids)
        self.coordinator.begin()
        for learner, rank in ids.items():
            self.staff.start_learner(learner, rank)

    def _launcher(self, task: Parcel) -> ProcessLauncher:
        machines, processes, said = self._machines, self._processes, (self._said, self._lost)
        if machines is None:
            self.host = LocalHost(self.spec, processes, task, *said)
            return ProcessLauncher(self, [self.host], self.host.sites)
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
        self.elsewhere = [host.processes for host in others]
        return ProcessLauncher(self, [self.host, *others], machines.sites, machines.where)

    def _over(self) -> bool:
        complete = not self.staff.learners and self.recorder.complete()
        return complete and not self.coordinator.cutting

    def _look(self, now: float) -> None:
        self.supervision.tick()
        if self.staff.learners:
            progress, waiting = self.staff.heard()
            self._hanging.look(now, progress, waiting | self.coordinator.meeting(), self.staff.learners)
        self._hanging_shards.look(now, self.staff.beats(), set(), self.staff.servers)
        if self.host.nodes is not None:
            nodes = self.staff.nodes
            beats = {node: count for node, count in self.staff.node_beats().items() if node in nodes}
            self._hanging_nodes.look(now, beats, set(), nodes)
        if self.host.relay is not None:
            count = self.host.relay_beats
            self._hanging_relay.look(now, {0: count}, set() if count else {0}, {0: self.host.relay})
        for number in [number for number, asked in self._open.items() if now - asked > SILENCE]:
            self._tell_statistics(dataclasses.replace(self._last, number=number))  # the shard may be stopped
        seconds = self.spec.plan.saving.seconds
        if seconds is not None and now - self._cut_asked > seconds:
            self._cut_asked = now
            self.coordinator.ask_cut()

    def _asked(self, command: Any) -> None:
        if isinstance(command, m.Saved):
            self.coordinator.from_shard(command)
        elif isinstance(command, Sync):
            self.recorder.event(f"dial: {command} from the next version on", kind="dial")
            self.coordinator.change(command)
        elif isinstance(command, int):
            self.supervision.add(command)
        else:
            super()._asked(command)

    def _stop(self) -> None:
        self.supervision.ask_stop()

    def _kill(self, process: Process) -> None:
        self.staff.kill(process)

    # -- processes ---------------------------------------------------------------------------------------

    def _heard(self, process: Process, message: Any) -> None:
        self.host.hear(process, message)

    def _ended(self, process: Process, how: str) -> None:
        self.host.lose(process, how)

    def _site_lost(self, site: int, why: str) -> None:
        """A machine of a cluster is gone: so are its learners, and its shards."""
        self.recorder.event(f"machine {site} is lost: {why}", kind="machine lost", machine=site)
        lost = self.staff.lose(site)
        learners, shards = ([each for each in lost if each.role == role] for role in ("learner", "shard"))
        for process in lost:
            process.state = "lost"
        for process in (*learners, *shards[:1]):
            self._lost(process, f"its machine: {why}", own_fault=False)

    def _site_joined(self, host: Host, name: str) -> None:
        assert self._machines is not None
        self.recorder.event(f"machine {host.site} joins: {name}", kind="machine joined", machine=host.site)
        self.elsewhere.append(host.processes)
        self.staff.gain(host)
        self.host.gain_site(host.site, self._machines.address(host.site))

    def _refused(self, what: str) -> None:
        self.recorder.event(what, kind="refused")

    def _said(self, process: Process, message: Any) -> None:
        if process.role == "shard":
            self._from_shard(message)
        elif process.role == "node":
            self.fail(RunError(f"node {process.rank} of the tree failed:\n{message.traceback}"))
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
            self.coordinator.from_learner(process.number, message)

    def _from_shard(self, envelope: tuple[int, Any]) -> None:
        shard, message = envelope
        if isinstance(message, m.ShardRaised):
            self.fail(RunError(f"shard {shard} failed:\n{message.traceback}"))
        elif isinstance(message, m.Statistics):
            self._tell_statistics(message)
        elif isinstance(message, m.Save):
            self._save(message)
        else:
            self.coordinator.from_shard(message)

    def _save(self, part: m.Save) -> None:
        """For a machine that does not see the folder."""
        assert self.folder is not None
        if part.number == FIRST:
            job = (part.number, part.name, part.tensors, part.notes)
            self.coordinator.from_shard(write_part(self.folder, job))
            return
        if self._writer is None:
            self._writer = Writer(self.folder.root, self.command)
        self._writer.write(part.number, part.name, part.tensors, part.notes)

    def _lost(self, process: Process, how: str, *, own_fault: bool = True) -> None:
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
            stepped = not own_fault or self.staff.heard()[0].get(number, 0) > 0  # it has sent a note
            self.supervision.lost(number, why, stepped=stepped, pid=pid)
        else:
            self.fail(LostError(f"{process.role} {rank} (pid {pid}) ended with {how}"))

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

    def _questioned(self, number: int) -> None:
        self._open[number] = time.monotonic()
        self.staff.tell_leader(m.AskStatistics(number))

    def ask_again(self) -> None:
        """The shards that were asked are gone."""
        for number in self._open:
            self.staff.tell_leader(m.AskStatistics(number))

    def _tell_statistics(self, statistics: m.Statistics) -> None:
        self._open.pop(statistics.number, None)
        self._last = self._complete(statistics)
        self._answer(self._last)

    def _complete(self, statistics: m.Statistics) -> m.Statistics:
        waits: dict[int, int] = {}
        for table in statistics.tables.values():
            waits.update(table.waiting)
        meeting = self.coordinator.meeting() if "coordinator" in self.__dict__ else set()

        def state(process: Process) -> str:
            if process.number in meeting:
                return "waits for the others"
            version = waits.get(process.rank)
            if version is None:
                return "computing"
            return f"waits for version {version}" if version >= 0 else "has no data"

        return self._with_processes(statistics, state)

    def _end(self) -> None:
        self._name_checkpoint()
        self.outcome.statistics = self._complete(self.outcome.statistics)
        self._close()
        if self._writer is not None:
            self._writer.close()
        if "staff" in self.__dict__:
            self.staff.close()

    def _name_checkpoint(self) -> None:
        """Whoever hears of a loss hears what is left, unless that cannot be read."""
        error, last = self.error, self.supervision.last if "supervision" in self.__dict__ else None
        if isinstance(error, LostError) and last is not None and error.__cause__ is None:
            error.args = (f"{error}; the last checkpoint is {last}: resume= goes on from it",)
