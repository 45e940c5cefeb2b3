"""The learners and shards of a run over servers: how they are started, and the shared memory between them.

Not responsible for when: the supervisor says so.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from syncline.engines.local.exchange import LINE, Ring
from syncline.engines.local.learner import CALLS, GENERATION, STOP, ControlBlock, LearnerSpec
from syncline.engines.local.packing import Parcel, pack
from syncline.engines.local.processes import Process, Processes
from syncline.engines.local.server import LOG_ENTRIES, AddLearner, ServerSpec
from syncline.engines.local.shared_memory import Region, WakeUp
from syncline.engines.local.table_memory import Geometry, Mailbox
from syncline.engines.local.tree_launcher import NodeCrew
from syncline.engines.run import RunSpec
from syncline.table.store import places_for
from syncline.topologies import Trees

Away = Callable[[int, int], Any]
"""For a learner and its rank: what its process here runs in place of the task, standing in for it; None: it is here itself."""
SHARED, SERVERS = 0, -1  # owners of memory that are no learners
YIELDS = {"learner": 1000, "shard": 200}
"""A learner yields for the length of a small fold, a shard for the time between two learners' gradients: waking a sleeping
core costs more than either."""


def geometry_of(spec: RunSpec) -> Geometry:
    """How many slots and places for versions the dials need (M11, M13); two slots, so that any dial may follow."""
    slots = max(2, spec.plan.delay + 1)
    sums = slots * spec.plan.learners  # a learner that comes late to a round may be alone in its sum
    return Geometry(slots, places_for(spec.plan.delay), spec.card, sums)


class ProcessLauncher:
    """Those that run, and what they share."""

    def __init__(
        self,
        spec: RunSpec,
        processes: Processes,
        task: Parcel,
        crashes: Mapping[str, int],
        away: Away | None = None,
    ) -> None:
        self._spec, self._processes, self._task, self._away = spec, processes, task, away
        self._crashes = dict(crashes)  # for tests: process name -> the operation it dies in, once
        self.geometry = geometry_of(spec)
        self.learners: dict[int, Process] = {}  # by learner id, while running
        self.shards: list[Process] = []
        self.generation = 0  # how often the servers were started anew
        self._desks: dict[int, Region] = {}
        self._known: set[int] = set()  # learners that the present shards were told of
        self._regions: dict[int, list[Region]] = defaultdict(list)  # by learner; SHARED, and SERVERS' own
        self._shared = self.region(ControlBlock.nbytes())
        self._shard_bells = [WakeUp() for _ in range(spec.plan.topology.shards)]
        shards = spec.plan.topology.shards
        self._beats = self.region(8 * LINE * (shards + 2 * spec.plan.learners))  # no tree has more nodes
        self.hub = ControlBlock(self._shared)
        self.nodes: NodeCrew | None = None
        if isinstance(spec.plan.topology, Trees):
            own = partial(self.region, owner=SERVERS)
            self.nodes = NodeCrew(
                spec, processes, self.geometry, own, self.tell_shards, self._node_beats, self._crashes
            )

    # -- memory ------------------------------------------------------------------------------------------

    def region(self, nbytes: int, owner: int = SHARED) -> Region:
        """Shared memory that goes with the run, or with its owner."""
        self._regions[owner].append(Region(nbytes))
        return self._regions[owner][-1]

    def release(self, owner: int) -> None:
        """Whoever got it has mapped it; here it is needed no more."""
        for region in self._regions.pop(owner, ()):
            region.release()

    # -- starting ----------------------------------------------------------------------------------------

    def start_servers(self, initial: Iterable[int] | None = None) -> None:
        """Shards, and a tree's nodes with these learners below; without any, those that live come to them."""
        self._start_shards()
        if self.nodes is not None:
            learners = self.learners if initial is None else initial
            self.nodes.start(self._shard_bells[0], learners, again=initial is None)

    def servers(self) -> list[Process]:
        """Shards, and nodes of a tree."""
        return [*self.shards, *(self.nodes.processes.values() if self.nodes is not None else ())]

    def tell_shards(self, message: Any) -> None:
        """Once for all: a table's state is as large as the model."""
        parcel = pack(message)
        for process in reversed(self.shards):  # whose log the others replay hears of it last
            process.channel.post(parcel)
        parcel.close()

    def _start_shards(self) -> None:
        count = self._spec.plan.topology.shards
        self.release(SERVERS)
        self._known.clear()
        log = self.region(8 * Ring.words(LOG_ENTRIES, max(1, count - 1)), SERVERS)
        self.shards = []
        for shard in range(count):
            spec = ServerSpec(
                shard,
                count,
                log,
                self._shard_bells,
                self.geometry,
                YIELDS["shard"],
                self._beats,
                self._spec.storage.folder,
                self._crashes.pop(f"shard {shard}", None),
            )
            self.shards.append(self._processes.fork("shard", shard, shard, spec, None, 1))

    def introduce(self, learner: int, bell: WakeUp | None = None, rank: int | None = None) -> Region:
        """A desk between a learner and the shards; its bell and rank stay the same."""
        self.release(learner)  # what it had with servers that are gone
        desk = self._desks[learner] = self.region(Mailbox.nbytes(), learner)
        self._known.add(learner)
        bell = bell or self.learners[learner].bell
        assert bell is not None
        for shard in self.shards:
            shard.channel.post(AddLearner(learner, desk, bell))
        if self.nodes is not None:
            self.nodes.add(learner, self.learners[learner].rank if rank is None else rank, desk, bell)
        return desk

    def know(self, learner: int) -> Region:
        """Its desk with the present shards."""
        return self._desks[learner] if learner in self._known else self.introduce(learner)

    def start_learner(self, learner: int, rank: int) -> None:
        bell = WakeUp()
        desk = self.introduce(learner, bell, rank)
        spec = LearnerSpec(
            learner,
            self._shared,
            desk,
            bell,
            self._shard_bells[0],
            self.geometry,
            YIELDS["learner"],
            self.generation,
            self._spec.seat(rank),
            self._crashes.pop(f"learner {rank}", None),
            self.nodes.bells if self.nodes is not None else (),
        )
        process = self._processes.fork("learner", learner, rank, spec, bell, self._threads())
        self.learners[learner] = process
        elsewhere = self._away(learner, rank) if self._away is not None else None
        process.channel.post(elsewhere or self._task)

    def _threads(self) -> int:
        """Of a learner."""
        if self._spec.threads is not None:
            return self._spec.threads
        spare = len(os.sched_getaffinity(0)) - 1  # the leading shard works while learners compute
        return max(1, spare // (self._spec.plan.learners * self._spec.group))

    # -- telling learners --------------------------------------------------------------------------------

    def stop_learners(self) -> None:
        """They leave after their step."""
        self.hub.words[STOP] = 1
        self._ring_learners()

    def next_generation(self) -> None:
        """Learners notice that the servers are new ones."""
        self.generation += 1
        self.hub.words[GENERATION] = self.generation
        self._ring_learners()

    def call_learners(self) -> None:
        """Who waits in a step asks why."""
        self.hub.words[CALLS] += 1
        self._ring_learners()

    def _ring_learners(self) -> None:
        for process in self.learners.values():
            if process.bell is not None:
                process.bell.ring()

    # -- what desks show ---------------------------------------------------------------------------------

    def stepped(self, learner: int) -> bool:
        """It has sent a note."""
        return Mailbox.heard(self._desks[learner])[0] > 0

    def heard(self) -> tuple[dict[int, int], set[int]]:
        """How far each learner is, and who waits."""
        seen = {number: Mailbox.heard(self._desks[number]) for number in self.learners}
        progress = {number: count for number, (count, _) in seen.items()}
        return progress, {number for number, (_, waits) in seen.items() if waits}

    def beats(self) -> dict[int, int]:
        """How often each shard has looked for something to do."""
        return {shard: self._beats.words[LINE * shard] for shard in range(len(self.shards))}

    def node_beats(self) -> dict[int, int]:
        """The same of a tree's nodes."""
        found = {node: self._node_beats(node) for node in (self.nodes.processes if self.nodes else ())}
        return {node: region.words[word] for node, (region, word) in found.items()}

    def _node_beats(self, node: int) -> tuple[Region, int]:
        return self._beats, LINE * (self._spec.plan.topology.shards + node)

    def close(self) -> None:
        """Nothing stays behind; the processes have ended."""
        for bell in self._shard_bells:
            bell.close()
        if self.nodes is not None:
            self.nodes.close()
        del self.hub
        for owner in list(self._regions):
            self.release(owner)
