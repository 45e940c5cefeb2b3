"""Doubles for the parts of a simulated run: a world of one table with real clock, cores and network, and nobody else in it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from syncline.cluster import Cluster, Compute, Link
from syncline.dial import Course
from syncline.engines.run import RunSpec, Task
from syncline.messages.to_leader import Gradient
from syncline.roles.run_plan import RunPlan
from syncline.sim.clock import Clock
from syncline.sim.machine_cores import Machines
from syncline.sim.network import SimNetwork
from syncline.sim.owned_memory import SimLane, SimTable
from syncline.sim.random_states import RandomStreams
from syncline.table.layout import Layout, lay_out
from syncline.topologies import Servers

LATENCY, SETUP = 0.25, 0.5  # of a message; of bulk data beyond that
EQUAL = Cluster(card=Link(latency=LATENCY, setup=SETUP), memory=Link(), compute=Compute(base=1.0))


def layout_of(shards: int = 1) -> Layout:
    model = nn.Sequential(nn.Linear(20, 9), nn.Linear(9, 5))
    return lay_out(model, [model.parameters()], cuttable=True, shards=shards)[0]


def gradient(
    number: int, *, stamp: int = 0, step: int = 0, examples: int = 4, full: bool = True, **more: Any
) -> Gradient:
    """Of table 0, with no batches of a loader."""
    given = {"loader": -1, "upto": 0, "options": 0, "silent": False, "states": b"", "loss": 0.5} | more
    return Gradient(table=0, number=number, stamp=stamp, step=step, examples=examples, full=full, **given)


class Desk:
    """In a shard's place: what reached it, and when."""

    def __init__(self, world: SmallWorld, shard: int) -> None:
        self._world, self.shard, self.dead = world, shard, False
        self.machine = world.cluster.machine_of_shard(shard)

    def note(self, who: Any, message: Any) -> None:
        self._world.hear("note", message)

    def handle(self, event: Any) -> None:
        self._world.hear(f"shard {self.shard}", event)

    def entry(self, entry: Any) -> None:
        self._world.hear(f"entry {self.shard}", entry)


class SmallWorld:
    """What learners, shards and nodes ask of a simulation; `heard` is what reached the others, by whom and when."""

    def __init__(
        self,
        cluster: Cluster = EQUAL,
        *,
        task: Callable[[Any], Any] = lambda session: None,
        shards: int = 1,
        learners: int = 2,
        sync: str = "softsync:1",
        **plan: Any,
    ) -> None:
        self.cluster, self.seed, self.clock = cluster, 0, Clock()
        self.network, self.machines = SimNetwork(cluster), Machines(self.clock, cluster)
        self.streams = RandomStreams()
        given = {"topology": Servers(shards, True), "course": Course.of(sync), "learners": learners} | plan
        self.spec = RunSpec(task=Task(task), plan=RunPlan(**given))
        self.dials = {0: self.spec.plan.course.first}
        self.first_machine = cluster.machine_of_shard(0)
        self.heard: list[tuple[float, str, Any]] = []
        self.tables: dict[int, Any] = {}
        self.lanes: dict[tuple[int, int], Any] = {}
        self.learners: dict[int, Any] = {}
        self.nodes: dict[int, Any] = {}
        self.nodes_by_name: dict[int, Any] = {}
        self.flows: Any = None
        self.watch: Any = None
        self.late: Any = None
        self.workshop: Any = None
        self.folder: Any = None
        self.next: Any = None
        self.version = 0
        self.poisons = self.stopping = self.exact = False
        self.recorder = SimpleNamespace(error=None, emit=lambda what: self.hear("caller", what))
        self.supervision = SimpleNamespace(
            raised=lambda learner, error: self.hear("raised", error), stop=lambda: self.hear("stop", None)
        )
        self.coordinator = SimpleNamespace(
            from_learner=lambda learner, message: self.hear("coordinator", message),
            from_shard=lambda message: self.hear("coordinator", message),
        )
        self.servers: list[Any] = [Desk(self, shard) for shard in range(shards)]
        self.counts: dict[str, int] = defaultdict(int)

    def hear(self, who: str, what: Any) -> None:
        self.heard.append((self.clock.now, who, what))

    def open_table(self, shards: int = 1, *learners: int, layout: Layout | None = None) -> SimTable:
        """Table 0, with lanes for these."""
        layout = layout or layout_of(shards)
        table = self.tables[0] = SimTable(layout, torch.device("cpu"))
        for learner in learners:
            self.lanes[0, learner] = SimLane(layout, 2, self.clock)
        return table

    def run(self, until: float = float("inf")) -> None:
        """All that happens before."""
        while self.clock._queue and self.clock._queue[0][0] < until:
            self.clock.step()
        self.clock.now = max(self.clock.now, until) if until != float("inf") else self.clock.now

    # -- what a simulation is asked --------------------------------------------------------------------------

    def soon(self, action: Callable[[], None]) -> None:
        self.clock.after(self.cluster.card.latency, action)

    def send(self, source: int, target: int, action: Callable[[], None], nbytes: int = 0) -> None:
        self.clock.at(self.network.send(self.clock.now, source, target, nbytes), action)

    def make_role(self, port: Any) -> Any:
        return None

    def make_lane(self, layout: Layout) -> SimLane:
        return SimLane(layout, 2, self.clock)

    def make_table(self, layout: Layout) -> SimTable:
        return SimTable(layout, torch.device("cpu"))

    def fail(self, error: BaseException) -> None:
        self.recorder.error = error

    def returned(self, learner: Any, value: Any) -> None:
        self.hear("returned", value)

    def folded(self) -> None:
        self.counts["folded"] += 1

    def forget(self, learner: int) -> None:
        self.hear("forget", learner)
