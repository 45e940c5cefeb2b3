"""The learners and shards of a run over servers, on all its machines: who is where, and what all are told.

Not responsible for when: the supervision and the coordinator say so; nor for how: each machine's `Host` does it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncline import messages as m
from syncline.engines.checkpoint_writer import commit
from syncline.engines.local.host_interface import Host, Sites
from syncline.engines.local.learner import CALLS, GENERATION, STOP
from syncline.engines.local.processes import Process
from syncline.engines.supervision import Crew
from syncline.ports import CoordinatorPort
from syncline.roles.checkpoint_manifest import upto
from syncline.table.checkpoints import Written

if TYPE_CHECKING:
    from syncline.engines.local.supervisor import Supervisor

Where = Callable[[int], int]  # rank -> the machine of its next learner


class ProcessLauncher(Crew, CoordinatorPort):
    """Those that run. `hosts[0]` is the caller's machine; one that is lost is None."""

    def __init__(
        self, run: Supervisor, hosts: Sequence[Host], sites: Sites, where: Where = lambda rank: 0
    ) -> None:
        self._run, self.shards = run, run.spec.plan.topology.shards
        self.hosts: list[Host | None] = list(hosts)
        self._where, self._places = where, sites
        self._said: list[m.MakeTable | m.Dial] = []  # since the servers were started
        self.learners: dict[int, Process] = {}  # by learner id, while running
        self.servers: dict[int, Process] = {}  # by shard
        self.sites: dict[int, int] = {}  # learner -> its machine
        self.generation = 0  # how often the servers were started anew
        self._calls = 0

    @property
    def _live(self) -> list[Host]:
        return [host for host in self.hosts if host is not None]

    # -- starting ----------------------------------------------------------------------------------------

    def start_servers(self, learners: Mapping[int, int] | None = None) -> None:
        """Shards, and a tree's nodes with these learners below; without any, those that live come to them."""
        again = learners is None
        self._said.clear()
        below = {each: self._where(rank) for each, rank in (learners or {}).items()}
        if again:
            below = {each: self.sites[each] for each in self.learners}
        for host in self._live:
            for process in host.start_servers(self.generation + again, self._places, below, again=again):
                if process.role == "shard":
                    self.servers[process.rank] = process

    def renew_shards(self) -> None:
        for host in self._live:
            host.end_servers()
        self.start_servers()
        self._run.ask_again()

    def start_learner(self, learner: int, rank: int) -> None:
        site = self.sites[learner] = self._where(rank)
        for host in self._live:
            host.introduce(learner, rank, site)
        home = self.hosts[site]
        assert home is not None
        self.learners[learner] = home.start_learner(learner, rank)

    def forget_learner(self, learner: int) -> None:
        self.learners.pop(learner)
        for host in self._live:
            host.forget(learner)

    # -- telling -----------------------------------------------------------------------------------------

    def tell_shards(self, message: Any) -> None:
        if isinstance(message, m.MakeTable | m.Dial):
            self._said.append(message)
        for host in reversed(self._live):  # the leading shard's machine last
            host.tell_shards(message)

    def tell_leader(self, message: Any) -> None:
        assert self.hosts[0] is not None
        self.hosts[0].tell_shard(0, message)

    def reply(self, learner: int, message: Any) -> None:
        if isinstance(message, m.Initialise):
            for host in self._live:
                host.initialise(learner, message)
        elif learner in self.sites and (home := self.hosts[self.sites[learner]]) is not None:
            home.reply(learner, message)

    def announce(self, what: m.Stop | m.Renewed | m.Call) -> None:
        if isinstance(what, m.Stop):
            self._run.supervision.stop()
        elif isinstance(what, m.Renewed):  # learners notice that the servers are new ones
            self.generation += 1
            self._show(GENERATION, self.generation)
        else:  # who waits in a step asks why
            self._calls += 1
            self._show(CALLS, self._calls)

    def tell_stop(self) -> None:
        self._show(STOP, 1)

    def _show(self, word: int, value: int) -> None:
        for host in self._live:
            host.announce(word, value)

    def tell(self, message: Any) -> None:
        self._run.recorder.emit(message)

    def commit(
        self, number: int, manifest: dict[str, Any] | None, files: Sequence[Written], *, prune: bool = True
    ) -> bool:
        run = self._run
        assert run.folder is not None
        if manifest is None:
            run.folder.abandon(number)
            return False
        manifest["history"] = upto(number, run.recorder.history())
        done = commit(run.folder, number, manifest, files, run.spec.storage.keep if prune else None)
        self.tell(done)
        if not done.problem:
            run.supervision.checkpointed(Path(done.path))
        return not done.problem

    # -- ending ------------------------------------------------------------------------------------------

    def kill(self, process: Process) -> None:
        """Its end will be noticed."""
        self._of(process).kill(process)

    def kill_learner(self, learner: int, why: str) -> None:
        self._run.kill(self.learners[learner], why)

    def end_learner(self, learner: int) -> None:
        process = self.learners[learner]
        self._of(process).end(process)

    def _of(self, process: Process) -> Host:
        return next(host for host in self._live if process in host.processes)

    def finish(self) -> None:
        self._run.coordinator.finish()

    def fail(self, error: BaseException) -> None:
        self._run.fail(error)

    # -- machines ----------------------------------------------------------------------------------------

    def lose(self, site: int) -> list[Process]:
        """A machine is gone; what ran there."""
        host = self.hosts[site]
        assert host is not None
        self.hosts[site], self._places = None, self._places.without(site)
        running = [process for process in host.processes if process.state == "running"]
        host.close()
        for other in self._live:
            other.lose_site(site)
        return running

    def gain(self, host: Host) -> None:
        """A machine joins, without shards: it hears what machines know."""
        self._places = self._places.joined_by(host.site)
        for other in self._live[1:]:
            other.gain_site(host.site)
        self.hosts.append(host)
        host.start_servers(self.generation, self._places, {}, again=False)
        host.announce(GENERATION, self.generation)
        host.announce(CALLS, self._calls)
        for learner, process in self.learners.items():
            host.introduce(learner, process.rank, self.sites[learner])
        for said in self._said:
            host.tell_shards(replace(said, source=None) if isinstance(said, m.MakeTable) else said)

    def lose_node(self, node: int) -> str | None:
        """Of the tree; what becomes of those below it, in words."""
        said = [host.lose_node(node) for host in self._live]
        return said[0]

    @property
    def nodes(self) -> dict[int, Process]:
        """Of the tree, those that run."""
        found = [each for host in self._live for each in host.processes if each.role == "node"]
        return {each.number: each for each in found if each.state == "running"}

    # -- what they show ----------------------------------------------------------------------------------

    def heard(self) -> tuple[dict[int, int], set[int]]:
        """How far each learner is, and who waits."""
        seen = {learner: each for host in self._live for learner, each in host.vitals().learners.items()}
        seen = {learner: each for learner, each in seen.items() if learner in self.learners}
        progress = {learner: count for learner, (count, _) in seen.items()}
        return progress, {learner for learner, (_, waits) in seen.items() if waits}

    def beats(self) -> dict[int, int]:
        """How often each shard has looked for something to do."""
        return {shard: beats for host in self._live for shard, beats in host.vitals().shards.items()}

    def node_beats(self) -> dict[int, int]:
        """The same of a tree's nodes."""
        return {node: beats for host in self._live for node, beats in host.vitals().nodes.items()}

    def close(self) -> None:
        """Nothing stays behind; the processes have ended."""
        for host in self._live:
            host.close()
