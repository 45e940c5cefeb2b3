"""This machine's part of a run over servers: its learners, its shards, and the shared memory between them.

Not responsible for when: the supervisor says so.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from syncline import messages as m
from syncline.engines.local.exchange import LINE, Ring
from syncline.engines.local.host_interface import (
    Begun,
    Ended,
    Forget,
    Heard,
    Host,
    LaneHere,
    LearnerKnown,
    RelayParts,
    Seats,
    SendOut,
    SentOut,
    SiteGone,
    SiteJoined,
    Sites,
    TableHere,
    Vitals,
)
from syncline.engines.local.learner import LearnerSpec, run_learner
from syncline.engines.local.processes import Process, Processes
from syncline.engines.local.seat_processes import run_group
from syncline.engines.local.server import LOG_ENTRIES, Call, LocalServer, ServerSpec, run_server
from syncline.engines.local.shared_memory import YIELDS, Region, WakeUp
from syncline.engines.local.shared_pickle import Parcel, pack
from syncline.engines.local.table_memory import Geometry, Lane, Mailbox, TableMemory
from syncline.engines.local.tree_launcher import SERVERS, NodeCrew
from syncline.engines.run import RunSpec
from syncline.table.layout import Layout
from syncline.table.store import places_for
from syncline.topologies import Trees

SHARED = 0  # owns memory that goes with the run; learners own theirs
ROOMY = 10  # times as many for a shard, where every process has a core of its own


def geometry_of(spec: RunSpec, sites: Sites) -> Geometry:
    """How many slots and places for versions the dials need (M11, M13); two slots, so that any dial may follow.

    Between machines versions take long to read: one more place, or two, is left alone meanwhile. It is the same on all of them.
    """
    slots = max(2, spec.plan.delay + 1)
    sums = slots * spec.plan.learners  # a learner that comes late to a round may be alone in its sum
    places = places_for(spec.plan.delay) + (2 if sites.grows else min(2, len(sites.live) - 1))
    return Geometry(slots, places, spec.card, sums)


class LocalHost(Host):
    """This machine."""

    def __init__(
        self,
        spec: RunSpec,
        processes: Processes,
        task: Parcel,
        heard: Heard,
        ended: Ended,
        *,
        sites: Sites | None = None,
        site: int = 0,
        relay: Callable[[RelayParts], Any] | None = None,
        seat: Seats | None = None,
    ) -> None:
        self._spec, self._forks, self._task = spec, processes, task
        self._heard, self._ended, self.relay_of, self._seats = heard, ended, relay, seat or Seats()
        self.site = site
        self.sites = sites or Sites((0,) * spec.plan.topology.shards)
        self.geometry = geometry_of(spec, self.sites)  # whatever becomes of them
        self.learners: dict[int, Process] = {}  # by learner, while they run
        self.shards: dict[int, Process] = {}
        self.relay: Process | None = None
        self.nodes: NodeCrew | None = None
        self.generation = 0
        self._who: dict[int, tuple[int, int]] = {}  # learner -> its rank, and where it is
        self._bells: dict[int, WakeUp] = {}  # of learners here
        self._desks: dict[int, Region] = {}
        self._known: set[int] = set()  # learners that the present shards were told of
        self._tables: dict[int, tuple[Layout, Region]] = {}
        self._lanes: dict[tuple[int, int], Region] = {}  # by table and learner, until the learner has it
        self._held: dict[int, list[tuple[Process, Any]]] = defaultdict(list)  # words that wait for the relay
        self._begun: set[int] = set()  # tables whose first values are here
        self._opening: list[tuple[int, m.Opened]] = []  # answers that wait for them
        self._regions: dict[int, list[Region]] = defaultdict(list)  # by learner; SHARED, and SERVERS' own
        self._hub = self.region(8 * LINE)
        self._words = self._hub.words
        self._shard_bells = {shard: WakeUp() for shard in self.sites.of(site)}
        self.relay_bell = WakeUp()
        shards = spec.plan.topology.shards
        self._beats = self.region(8 * LINE * shards)
        self._relay_beats = self.region(8 * LINE)
        self._casts = isinstance(spec.plan.topology, Trees) and spec.plan.topology.broadcast
        if isinstance(spec.plan.topology, Trees):
            self.nodes = NodeCrew(spec, processes, self)

    @property
    def processes(self) -> list[Process]:  # type: ignore[override]
        return list(self._forks.by_pid.values())

    # -- memory ------------------------------------------------------------------------------------------

    def region(self, nbytes: int, owner: int = SHARED) -> Region:
        """Shared memory that goes with the run, or with its owner."""
        self._regions[owner].append(Region(nbytes))
        return self._regions[owner][-1]

    def _release(self, owner: int) -> None:
        """Whoever got it has mapped it; here it is needed no more."""
        for region in self._regions.pop(owner, ()):
            region.release()

    def _table(self, table: int, layout: Layout) -> Region:
        if table not in self._tables:
            region = self.region(TableMemory.nbytes(layout, places=self.geometry.places))
            self._tables[table] = (layout, region)
        return self._tables[table][1]

    def _make_lane(self, table: int, learner: int, layout: Layout) -> Region:
        lane = self.region(Lane.nbytes(layout, slots=self.geometry.slots), learner)
        self._lanes[table, learner] = lane
        self.tell_relay(LaneHere(table, learner, layout, lane))
        return lane

    def _concerns(self, learner: int) -> bool:
        """It is here, or shards are."""
        return bool(self._shard_bells) or self._who.get(learner, (-1, -1))[1] == self.site

    # -- servers -----------------------------------------------------------------------------------------

    def start_servers(
        self, generation: int, sites: Sites, learners: Mapping[int, int], *, again: bool
    ) -> list[Process]:
        self.generation, self.sites = generation, sites
        bells = self._shard_bells
        self._shard_bells = {shard: bells.get(shard) or WakeUp() for shard in sites.of(self.site)}
        self.shards.clear()
        self._release(SERVERS)
        self._known.clear()
        self._lanes.clear()
        self._begun.clear()
        opening, self._opening = self._opening, []
        for learner, _ in opening:
            self.reply(learner, m.Stale())
        if self.nodes is not None:
            self.nodes.plant(sites, learners, again=again)
        here, leads = len(self._shard_bells), 0 in self._shard_bells
        others = len(self.sites.shards) - here
        readers = (here - 1 + (others > 0)) if leads else here
        log = self.region(8 * Ring.words(LOG_ENTRIES, max(1, readers)), SERVERS)
        if self.relay_of is not None:
            reader = readers - 1 if leads and others else None
            self._start_relay(generation, log, readers, reader)
        for index, shard in enumerate(self._shard_bells):
            self._start_shard(shard, log, readers, index - leads)
        if self.nodes is None:
            return list(self.shards.values())
        self.nodes.start(self._shard_bells.get(0, self.relay_bell))
        return [*self.shards.values(), *self.nodes.processes.values()]

    def _start_shard(self, shard: int, log: Region, readers: int, reader: int) -> None:
        others = [bell for each, bell in self._shard_bells.items() if each != shard]
        if self.relay_of is not None:
            others.append(self.relay_bell)
        roomy = len(os.sched_getaffinity(0)) > self._computing() + len(self._shard_bells)
        spec = ServerSpec(
            shard,
            len(self.sites.shards),
            log,
            readers,
            reader,
            self._shard_bells[shard],
            others,
            self.relay_bell if self.relay_of is not None and (shard or self._casts) else None,
            self.geometry,
            YIELDS["shard"] * (ROOMY if roomy else 1),
            self._beats,
            self._spec.storage.folder,
        )
        self.shards[shard] = self._forks.fork("shard", shard, shard, partial(run_server, spec=spec))

    def _start_relay(self, generation: int, log: Region, readers: int, reader: int | None) -> None:
        assert self.relay_of is not None
        parts = RelayParts(
            self.site,
            self.sites,
            generation,
            self.geometry,
            log,
            readers,
            reader,
            self.relay_bell,
            self._shard_bells,
            self._relay_beats,
            self.nodes.near if self.nodes is not None else frozenset(),
            self._casts,
        )
        self._relay_beats.words[0] = 0  # it has not begun
        self.relay = self._forks.fork("relay", self.site, self.site, self.relay_of(parts))
        for learner, held in self._held.items():
            for _ in held:  # nothing of theirs is under way any more
                self.tell_relay(SendOut(learner))

    def end_servers(self) -> None:
        relay = [self.relay] if self.relay is not None else []
        nodes = list(self.nodes.processes.values()) if self.nodes is not None else []
        self._forks.kill_and_reap([*self.shards.values(), *nodes, *relay])

    def tell_shards(self, message: Any) -> None:
        """With the memory that belongs to it."""
        if isinstance(message, m.MakeTable):
            region = self._table(message.table, message.layout)
            # in a mapping of its own: the run's could not be closed while tensors look at it
            own = Region(region.nbytes, os.dup(region.fd))
            TableMemory(own, message.layout, places=self.geometry.places).clear()
            self.tell_relay(TableHere(message.table, message.layout, region, made=True))
            message = replace(message, handle=region)
        elif isinstance(message, m.JoinTable) and self._concerns(message.learner):
            self._know(message.learner)
            key = message.table, message.learner
            if not message.first:  # else it has published there already
                self._make_lane(*key, self._tables[message.table][0])
            message = replace(message, lane=self._lanes[key])
        elif isinstance(message, m.JoinLoader):
            for learner in message.learners:
                self._know(learner)
        self.post_all(message)
        if isinstance(message, m.Dial):
            self.tell_relay(message)
        elif isinstance(message, m.MakeTable) and self.nodes is not None:
            self.nodes.make_table(message.table, message.layout)
        elif isinstance(message, m.JoinTable) and self.nodes is not None:
            layout = self._tables[message.table][0]
            self.nodes.join_table(message.learner, message.table, layout, message.lane)

    def post_all(self, message: Any) -> None:
        """Once for all: a table's state is as large as the model."""
        if not self.shards:
            return
        parcel = pack(message)
        for process in reversed(list(self.shards.values())):  # whose log the others replay hears of it last
            process.channel.post(parcel)
        parcel.close()

    def tell_relay(self, message: Any) -> None:
        """If there are several machines."""
        if self.relay is not None:
            self.relay.channel.post(message)

    # -- learners ----------------------------------------------------------------------------------------

    def introduce(self, learner: int, rank: int, site: int) -> None:
        self._who[learner] = (rank, site)
        if site == self.site:
            self._bells[learner] = WakeUp()
        if self.nodes is not None:
            self.nodes.join(learner, site)
        self._introduce(learner)

    def _introduce(self, learner: int) -> None:
        """A desk between a learner and the present shards; its bell and rank stay the same."""
        if not self._concerns(learner):
            return
        self._release(learner)  # what it had with servers that are gone
        desk = self._desks[learner] = self.region(Mailbox.nbytes(), learner)
        self._known.add(learner)
        rank, site = self._who[learner]
        bell = self._bells.get(learner, self.relay_bell)
        for shard in self.shards.values():
            shard.channel.post(Call(LocalServer.add_learner, (learner, desk, bell)))
        self.tell_relay(LearnerKnown(learner, site, desk, bell))
        if self.nodes is not None and site == self.site:
            self.nodes.add(learner, rank, desk, bell)

    def _know(self, learner: int) -> None:
        if learner not in self._known:
            self._introduce(learner)

    def start_learner(self, learner: int, rank: int) -> Process:
        spec = LearnerSpec(
            learner,
            self._hub,
            self._desks[learner],
            self._bells[learner],
            self._shard_bells.get(0, self.relay_bell),
            self.geometry,
            self.generation,
            self._seats(self._spec, learner, rank),
            self.nodes.bells if self.nodes is not None else (),
        )
        threads = self._spec.threads
        if threads is None:  # the leading shard works while learners compute
            threads = max(1, (len(os.sched_getaffinity(0)) - 1) // self._computing())
        run = partial(run_group if spec.seat.seats > 1 else run_learner, spec=spec)
        process = self._forks.fork("learner", learner, rank, run, spec.bell, threads)
        self.learners[learner] = process
        process.channel.post(self._task)
        return process

    def _computing(self) -> int:
        """Processes of learners here."""
        return -(-self._spec.plan.learners // len(self.sites.live)) * self._spec.group

    def forget(self, learner: int) -> None:
        process = self.learners.pop(learner, None)
        if self.nodes is not None:
            self.nodes.leave(learner)
        self.tell_relay(Forget(learner))
        self._release(learner)
        self._known.discard(learner)
        for kept in (self._who, self._bells, self._desks):
            kept.pop(learner, None)
        if not self._held.get(learner):
            self._held.pop(learner, None)
        for key in [key for key in self._lanes if key[1] == learner]:
            del self._lanes[key]
        self._seats.forget(learner)
        if process is not None and process.bell is not None:
            process.bell.close()
            process.bell = None

    def initialise(self, learner: int, message: m.Initialise) -> None:
        region = self._table(message.table, message.layout)
        self.tell_relay(TableHere(message.table, message.layout, region))
        if not self._concerns(learner):
            return
        lane = self._make_lane(message.table, learner, message.layout)
        if learner in self.learners:
            self.learners[learner].channel.post(replace(message, handle=region, lane=lane))

    def reply(self, learner: int, message: Any) -> None:
        process = self.learners.get(learner)
        if process is None:
            return
        if isinstance(message, m.Opened):
            if self.relay is not None and 0 not in self._shard_bells and message.table not in self._begun:
                self._opening.append((learner, message))
                return
            message = self._opened(learner, message)
        elif isinstance(message, m.Rejoined):
            tables = [self._opened(learner, opened) for opened in message.tables]
            self._know(learner)
            message = replace(message, tables=tables, desk=(self.generation, self._desks[learner]))
        process.channel.post(message)

    def _opened(self, learner: int, opened: m.Opened) -> m.Opened:
        lane = self._lanes.pop((opened.table, learner))
        return replace(opened, handle=self._tables[opened.table][1], lane=lane)

    def announce(self, word: int, value: int) -> None:
        self._words[word] = value
        for process in self.learners.values():
            if process.bell is not None:
                process.bell.ring()

    # -- what processes say, and their ends --------------------------------------------------------------

    def hear(self, process: Process, message: Any) -> None:
        """Whatever a learner has said on other ways reaches the others before what is told of it."""
        if process.role == "relay":
            self._from_relay(process, message)
        elif self.relay is None or process.role != "learner":
            self._heard(process, message)
        elif isinstance(message, m.Initialised):
            self._hold(process, message, message.table)
        elif isinstance(message, m.Returned | m.Raised):
            process.state = "returned" if isinstance(message, m.Returned) else "raised"
            self._hold(process, message)
        else:
            self._heard(process, message)

    def _hold(self, process: Process, message: Any, table: int | None = None) -> None:
        self._held[process.number].append((process, message))
        self.tell_relay(SendOut(process.number, table))

    def _from_relay(self, relay: Process, message: Any) -> None:
        if isinstance(message, Begun):
            self._begun.add(message.table)
            opening, self._opening = self._opening, []
            for learner, opened in opening:
                self.reply(learner, opened)
        elif not isinstance(message, SentOut):
            self._heard(relay, message)
        elif held := self._held.get(message.learner):
            process, words = held.pop(0)
            if isinstance(words, str):
                self._ended(process, words)
            else:
                self._heard(process, words)

    def lose(self, process: Process, how: str) -> None:
        """It ended without a word."""
        if self.relay is not None and process.role == "learner":
            self._hold(process, how)
        else:
            self._ended(process, how)

    def kill(self, process: Process) -> None:
        self._forks.kill(process)

    def end(self, process: Process) -> None:
        self._forks.kill_and_reap([process])

    def vitals(self) -> Vitals:
        nodes = self.nodes.beats if self.nodes is not None else {}
        return Vitals(
            {learner: Mailbox.heard(self._desks[learner]) for learner in self.learners},
            {shard: self._beats.words[LINE * shard] for shard in self.shards},
            {node: region.words[0] for node, region in nodes.items()},
        )

    def lose_site(self, site: int) -> None:
        self.sites = self.sites.without(site)
        self.tell_relay(SiteGone(site))
        if self.nodes is not None:
            self.nodes.lose_site(site)

    def lose_node(self, node: int) -> str | None:
        assert self.nodes is not None
        return self.nodes.lose(node)

    def gain_site(self, site: int, address: Any = None) -> None:
        self.sites = self.sites.joined_by(site)
        if address is not None:
            self.tell_relay(SiteJoined(site, address))

    @property
    def relay_beats(self) -> int:
        return self._relay_beats.words[0]

    def close(self) -> None:
        for bell in (*self._shard_bells.values(), self.relay_bell):
            bell.close()
        if self.nodes is not None:
            self.nodes.close()
        del self._words
        for owner in list(self._regions):
            self._release(owner)
