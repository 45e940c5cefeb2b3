"""The supervisor of a run over servers: starts its processes, hosts the coordinator, and ends them.

It hears every process and notices every end, and carries out what the run's lifecycle decides. Decisions on updates are the
coordinator's and the shards'; the learners' fast path does not pass here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from syncline import messages as m
from syncline.dial import Sync
from syncline.engines.checkpoint_writer import Writer
from syncline.engines.local.host_interface import Host, Machines, Sites, Told, Vitals
from syncline.engines.local.learner import CALLS, GENERATION, STOP
from syncline.engines.local.local_host import LocalHost
from syncline.engines.local.processes import Process
from syncline.engines.local.shared_pickle import Parcel
from syncline.engines.local.supervisor_base import LOOK, SHARD_PATIENCE, HangDetection, RunSupervisor
from syncline.engines.recorder import Recorder, learner_error
from syncline.engines.run import RunSpec
from syncline.engines.supervision import Crew, Supervision
from syncline.errors import RunError
from syncline.ports import CoordinatorPort
from syncline.protocols.lifecycle import Faults, Grace, Lifecycle
from syncline.roles.coordinator import Coordinator
from syncline.table.checkpoints import Folder, Written

GRACE = 5.0  # seconds that learners get to finish their step after a stop
LAST_CUT = 1.0  # seconds that a stop waits for a checkpoint to begin
SILENCE = 2.0  # seconds that the leading shard gets for an answer


class Supervisor(RunSupervisor, Crew, CoordinatorPort):
    """A run over servers. `hosts[0]` is the caller's machine; one that is lost is None."""

    host: LocalHost
    supervision: Supervision
    coordinator: Coordinator

    def __init__(
        self, spec: RunSpec, crashes: Mapping[str, int] | None = None, machines: Machines | None = None
    ) -> None:
        super().__init__(spec, crashes)
        self._machines, self.shards = machines, spec.plan.topology.shards
        self.recorder = Recorder(
            spec,
            now=self.now,
            evaluate=self._evaluate,
            stop=self._stop,
            layouts=lambda: {table: self.coordinator.layout(table) for table in self.coordinator.tables},
        )
        self.folder = Folder(Path(spec.storage.folder)) if spec.storage.folder else None
        self._writer: Writer | None = None  # of what other machines' shards save
        self.hosts: list[Host | None] = []
        self._places = Sites((0,) * self.shards) if machines is None else machines.sites
        self._told: list[m.MakeTable | m.Dial] = []  # to shards, since the servers were started
        self.learners: dict[int, Process] = {}  # by learner id, while running
        self.servers: dict[int, Process] = {}  # by shard
        self.sites: dict[int, int] = {}  # learner -> its machine
        self.generation = 0  # how often the servers were started anew
        self._calls = 0
        self._open: dict[int, float] = {}  # questions to the leading shard, and when they were asked
        self._last = m.Statistics(-1)
        back = "goes back to the last checkpoint"
        self._hanging = HangDetection(self, "the others may wait for it", "ends such a learner")
        self._hanging_shards = HangDetection(self, "all learners wait for it", back, least=SHARD_PATIENCE)
        self._hanging_nodes = HangDetection(
            self, "those below it wait for it", "has them send elsewhere", least=SHARD_PATIENCE
        )
        faults = Faults(patience=SHARD_PATIENCE, kill_hung=True)
        self._hanging_relay = HangDetection(self, "nothing reaches other machines", back, faults=faults)
        self._cut_asked = self._started

    @property
    def _live(self) -> list[Host]:
        return [host for host in self.hosts if host is not None]

    # -- the run -----------------------------------------------------------------------------------------

    def _start(self, task: Parcel) -> None:
        spec, restored = self.spec, self.spec.storage.restored
        self.hosts += self._machines_of(task)
        lifecycle = Lifecycle(
            spec.faults,
            spec.plan.learners,
            recovers=self.folder is not None,
            saved=restored is not None,
            hold=spec.plan.local,
            grace=Grace(cut=LAST_CUT, step=GRACE),
        )
        ids = dict(lifecycle.live)
        self.coordinator = Coordinator(self, spec.plan, ids, restored)
        self.supervision = Supervision(lifecycle, self, time.monotonic)
        self._start_servers({learner: self._site_for(rank) for learner, rank in ids.items()}, again=False)
        self.coordinator.begin()
        for learner, rank in ids.items():
            self.start_learner(learner, rank)

    def _machines_of(self, task: Parcel) -> list[Host]:
        machines, processes, said = self._machines, self._processes, (self._said, self._lost)
        relay, seat = (machines.relay, machines.seats()) if machines is not None else (None, None)
        self.host = LocalHost(self.spec, processes, task, *said, sites=self._places, relay=relay, seat=seat)
        if machines is None:
            return [self.host]
        told = Told(
            *said,
            self._site_lost,
            self._site_joined,
            lambda count: self.supervision.add(count),
            lambda what: self.recorder.event(what, kind="refused"),
        )
        others = machines.hosts(processes, told)
        self.elsewhere = [host.processes for host in others]
        return [self.host, *others]

    def _over(self) -> bool:
        complete = not self.learners and self.recorder.complete()
        return complete and not self.coordinator.cutting

    def _look(self, now: float) -> None:
        self.supervision.tick()
        vitals = self._vitals()
        if self.learners:
            progress = {learner: count for learner, (count, _) in vitals.learners.items()}
            waiting = {learner for learner, (_, waits) in vitals.learners.items() if waits}
            self._hanging.look(now, progress, waiting | self.coordinator.meeting(), self.learners)
        self._hanging_shards.look(now, vitals.shards, set(), self.servers)
        if self.host.nodes is not None:
            found = [each for host in self._live for each in host.processes if each.role == "node"]
            nodes = {each.number: each for each in found if each.state == "running"}
            beats = {node: count for node, count in vitals.nodes.items() if node in nodes}
            self._hanging_nodes.look(now, beats, set(), nodes)
        if self.host.relay is not None:
            count = self.host.relay_beats
            self._hanging_relay.look(now, {0: count}, set() if count else {0}, {0: self.host.relay})
        for number in [number for number, asked in self._open.items() if now - asked > SILENCE]:
            self._tell_statistics(replace(self._last, number=number))  # the shard may be stopped
        seconds = self.spec.plan.saving.seconds
        if seconds is not None and now - self._cut_asked > seconds:
            self._cut_asked = now
            self.coordinator.ask_cut()

    def add_learners(self, count: int) -> None:
        self.command(lambda: self.supervision.add(count))

    def change(self, sync: Sync) -> None:
        def turn() -> None:
            self.recorder.event(f"dial: {sync} from the next version on", kind="dial")
            self.coordinator.change(sync)

        self.command(turn)

    def _stop(self) -> None:
        self.supervision.ask_stop()

    # -- the crew ----------------------------------------------------------------------------------------

    def _start_servers(self, below: Mapping[int, int], *, again: bool) -> None:
        """Shards, and a tree's nodes with these learners (and their machines) below."""
        self._told.clear()
        for host in self._live:
            for process in host.start_servers(self.generation + again, self._places, below, again=again):
                if process.role == "shard":
                    self.servers[process.rank] = process

    def renew_shards(self) -> None:
        for host in self._live:
            host.end_servers()
        if self._writer is not None:  # the checkpoint that it writes is given up
            self._writer.close()
            self._writer = None
        self._start_servers({learner: self.sites[learner] for learner in self.learners}, again=True)
        for number in self._open:  # the shards that were asked are gone
            self.servers[0].channel.post(m.AskStatistics(number))

    def start_learner(self, learner: int, rank: int) -> None:
        site = self.sites[learner] = self._site_for(rank)
        for host in self._live:
            host.introduce(learner, rank, site)
        home = self.hosts[site]
        assert home is not None
        self.learners[learner] = home.start_learner(learner, rank)

    def _site_for(self, rank: int) -> int:
        """The machine of the next learner of that rank."""
        return 0 if self._machines is None else self._machines.where(rank)

    def forget_learner(self, learner: int) -> None:
        self.learners.pop(learner)
        self.sites.pop(learner, None)
        for host in self._live:
            host.forget(learner)

    def kill_learner(self, learner: int, why: str) -> None:
        self.kill(self.learners[learner], why)

    def _kill(self, process: Process) -> None:
        self._home(process).kill(process)

    def end_learner(self, learner: int) -> None:
        self._home(self.learners[learner]).end(self.learners[learner])

    def _home(self, process: Process) -> Host:
        return next(host for host in self._live if process in host.processes)

    def finish(self) -> None:
        self.coordinator.finish()

    def tell_stop(self) -> None:
        self._show(STOP, 1)

    def _show(self, word: int, value: int) -> None:
        for host in self._live:
            host.announce(word, value)

    # -- what the coordinator says -----------------------------------------------------------------------

    def tell_shards(self, message: Any) -> None:
        if isinstance(message, m.MakeTable | m.Dial):
            self._told.append(message)
        for host in reversed(self._live):  # the leading shard's machine last
            host.tell_shards(message)

    def reply(self, learner: int, message: Any) -> None:
        if isinstance(message, m.Initialise):
            for host in self._live:
                host.initialise(learner, message)
        elif learner in self.sites and (home := self.hosts[self.sites[learner]]) is not None:
            home.reply(learner, message)

    def announce(self, what: m.Stop | m.Renewed | m.Call) -> None:
        if isinstance(what, m.Stop):
            self.supervision.stop()
        elif isinstance(what, m.Renewed):  # learners notice that the servers are new ones
            self.generation += 1
            self._show(GENERATION, self.generation)
        else:  # who waits in a step asks why
            self._calls += 1
            self._show(CALLS, self._calls)

    def tell(self, message: Any) -> None:
        self.recorder.emit(message)

    def commit(
        self, number: int, manifest: dict[str, Any] | None, files: Sequence[Written], *, prune: bool = True
    ) -> bool:
        return self.supervision.commit(number, manifest, files, prune=prune) is not None

    # -- machines ----------------------------------------------------------------------------------------

    def _site_lost(self, site: int, why: str) -> None:
        """A machine of a cluster is gone: so are its learners, and its shards."""
        self.recorder.event(f"machine {site} is lost: {why}", kind="machine lost", machine=site)
        host = self.hosts[site]
        assert host is not None
        self.hosts[site], self._places = None, self._places.without(site)
        lost = [process for process in host.processes if process.state == "running"]
        host.close()
        for other in self._live:
            other.lose_site(site)
        learners, shards = ([each for each in lost if each.role == role] for role in ("learner", "shard"))
        for process in lost:
            process.state = "lost"
        for process in (*learners, *shards[:1]):
            self._lost(process, f"its machine: {why}", own_fault=False)

    def _site_joined(self, host: Host, name: str) -> None:
        """Without shards: it hears what machines know."""
        assert self._machines is not None
        self.recorder.event(f"machine {host.site} joins: {name}", kind="machine joined", machine=host.site)
        self.elsewhere.append(host.processes)
        self._places = self._places.joined_by(host.site)
        for other in self._live[1:]:
            other.gain_site(host.site)
        self.hosts.append(host)
        host.start_servers(self.generation, self._places, {}, again=False)
        host.announce(GENERATION, self.generation)
        host.announce(CALLS, self._calls)
        for learner, process in self.learners.items():
            host.introduce(learner, process.rank, self.sites[learner])
        for said in self._told:
            host.tell_shards(replace(said, source=None) if isinstance(said, m.MakeTable) else said)
        self.host.gain_site(host.site, self._machines.address(host.site))

    def _vitals(self) -> Vitals:
        """What all machines show, of learners that run."""
        found = Vitals({}, {}, {})
        for host in self._live:
            seen = host.vitals()
            found.learners.update({each: at for each, at in seen.learners.items() if each in self.learners})
            found.shards.update(seen.shards)
            found.nodes.update(seen.nodes)
        return found

    # -- processes ---------------------------------------------------------------------------------------

    def _heard(self, process: Process, message: Any) -> None:
        self.host.hear(process, message)

    def _ended(self, process: Process, how: str) -> None:
        self.host.lose(process, how)

    def _said(self, process: Process, message: Any) -> None:
        if process.role == "shard":
            self._from_shard(*message)
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
        elif isinstance(message, m.LeftLoop):
            self.supervision.lifecycle.left_loop(process.number, again=message.again)
        else:
            self.coordinator.from_learner(process.number, message)

    def _from_shard(self, shard: int, message: Any) -> None:
        if isinstance(message, m.ShardRaised):
            self.fail(RunError(f"shard {shard} failed:\n{message.traceback}"))
        elif isinstance(message, m.Statistics):
            self._tell_statistics(message)
        elif isinstance(message, m.Save):  # for a machine that does not see the folder
            if self._writer is None:
                self._writer = self._new_writer()
            self._writer.write(message.number, message.name, message.tensors, message.notes)
        else:
            self.coordinator.from_shard(message)

    def _new_writer(self) -> Writer:
        """What it has written counts while no other shards have begun."""
        assert self.folder is not None

        def written(saved: m.Saved) -> None:
            if self._writer is writer:
                self.coordinator.from_shard(saved)

        writer = Writer(self.folder.root, lambda saved: self.command(partial(written, saved)))
        return writer

    def _lost(self, process: Process, how: str, *, own_fault: bool = True) -> None:
        """A process ended without a word."""
        process.state = "lost"
        number, rank, pid = process.number, process.rank, process.pid
        if process.role == "shard":
            lost = f"shard {rank} (pid {pid}) ended with {how}"
            self.supervision.shard_lost(lost, shard=rank, pid=pid)
        elif process.role == "node":
            moved, *_ = [host.lose_node(number) for host in self._live]  # those below it publish elsewhere
            lost = f"node {number} of the tree (pid {pid}) ended with {how}"
            if moved is None:  # the last leaf's loss is that of a shard (M14)
                self.supervision.shard_lost(f"the last leaf, {lost}", node=number, pid=pid)
            else:
                self.recorder.event(f"{lost}; {moved}", kind="node lost", node=number, pid=pid)
        elif process.role == "relay":
            self.supervision.shard_lost(f"the relay of machine {rank} (pid {pid}) ended with {how}", pid=pid)
        else:
            why = f"its process (pid {pid}) ended with {how}"
            notes, _ = self._vitals().learners.get(number, (0, False))
            stepped = not own_fault or notes > 0
            self.supervision.lost(number, why, stepped=stepped, pid=pid)

    # -- statistics and the end --------------------------------------------------------------------------

    def _questioned(self, number: int) -> None:
        self._open[number] = time.monotonic()
        self.servers[0].channel.post(m.AskStatistics(number))

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

    def _save_failed(self) -> None:
        if "supervision" not in self.__dict__ or not self._saves:
            return
        self.supervision.save_failed()
        while self._saves and self.supervision.saving_failed:
            self._processes.work(LOOK)

    @property
    def _saves(self) -> bool:
        live = all(process.state == "running" for process in self.servers.values())
        return live and not self._at_once

    def _end(self) -> None:
        self.outcome.statistics = self._complete(self.outcome.statistics)
        self._close()
        if self._writer is not None:
            self._writer.close()
        for host in self._live:
            host.close()
