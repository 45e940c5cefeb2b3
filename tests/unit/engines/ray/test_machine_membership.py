"""Who is where, who is lost and who joins, by the supervisor's record of a run's machines; their agents are doubles."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest

from syncline.dial import Course
from syncline.engines.local.host_interface import Linked, Sites, Told
from syncline.engines.local.processes import Process
from syncline.engines.local.shared_memory import WakeUp
from syncline.engines.ray import machine_membership
from syncline.engines.ray.agent import About, versions
from syncline.engines.ray.cluster import READY
from syncline.engines.ray.machine_membership import MOMENT, ClusterMachines
from syncline.engines.ray.placement import Node
from syncline.engines.ray.relay import LinkLost, RefusedFrames
from syncline.engines.run import RunSpec, Storage, Task
from syncline.errors import UsageError
from syncline.roles.run_plan import RunPlan
from syncline.topologies import Servers
from tests.unit.engines.ray.doubles import SECRET


class Pulse:
    """Who lives, as the test says."""

    refused = 5

    def __init__(self, ways: Any) -> None:
        self.lost, self.dead = WakeUp(), machine_membership.queue.SimpleQueue[tuple[int, str]]()
        self.declared: list[tuple[int, str]] = []
        self.gone: set[int] = set()

    def alive(self, node: int) -> bool:
        return node != 0 and node not in self.gone  # of the caller's own it knows nothing

    def declare(self, node: int, why: str) -> None:
        self.declared.append((node, why))

    def add(self, node: int, way: Any) -> None:
        pass

    def close(self) -> None:
        pass


class Agent:
    """In place of a `RemoteHost`."""

    made: list[Agent]
    fails = 0

    def __init__(self, way: Any, task: Any, begin: Any) -> None:
        self.site, self.begin, self.fd, self.closed = begin.site, begin, -begin.site, False
        Agent.made.append(self)

    def wait_ready(self, alive: Any, *about: Any) -> None:
        if self.site == Agent.fails or not alive():
            raise OSError("not ready")

    def listen(self, *told: Any) -> None:
        pass

    def receive(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


class Closing:
    """The cluster's: a thread that looks now and then looks so often."""

    looks = 1

    def wait(self, seconds: float) -> bool:
        self.looks -= 1
        return self.looks < 0

    def is_set(self) -> bool:
        return False

    def set(self) -> None:
        pass


class Cluster:
    def __init__(self, count: int) -> None:
        self.found = [Node(f"node {index}", f"10.0.0.{index}", 2, home=index == 0) for index in range(count)]
        self.about = {index: About((f"10.0.0.{index}", 1), versions(), 1) for index in range(1, count)}
        self.secret, self.closing, self.dropped = SECRET, Closing(), list[int]()

    def nodes(self) -> list[Node]:
        return self.found

    def waits_for_room(self) -> None:
        pass

    def add(self, site: int, node: Node, load: int) -> None:
        self.waits_for_room()
        self.about[site] = About((node.host, 1), versions(), load)

    def drop(self, site: int) -> None:
        self.dropped.append(site)


class Watched:
    """The supervisor's selector."""

    def __init__(self) -> None:
        self.actions: dict[int, Any] = {}

    def watch(self, fd: int, action: Any) -> None:
        self.actions[fd] = action

    def unwatch(self, fd: int) -> None:
        del self.actions[fd]


@dataclass
class Run:
    machines: ClusterMachines
    cluster: Cluster
    pulse: Any
    watched: Watched
    told: list[Any]
    clock: SimpleNamespace

    def loses(self, site: int) -> None:
        self.pulse.dead.put((site, "why"))
        self.watched.actions[self.pulse.lost.fd]()

    def welcomes(self) -> None:
        """Who has come, once the thread has looked."""
        (bell,) = [fd for fd in self.watched.actions if fd >= 0 and fd != self.pulse.lost.fd]
        self.watched.actions[bell]()

    def hears(self, site: int, word: Any, state: str = "running") -> Process:
        relay = Process("relay", site, site, 1, cast(Any, None), state=state)
        self.machines.hear(relay, word)
        return relay

    def looks(self, seconds: float) -> list[tuple[int, str]]:
        self.clock.now += seconds
        self.pulse.look()
        assert not self.pulse.declared, "on the pulse's thread nothing is judged"
        self.watched.actions[self.pulse.lost.fd]()
        found, self.pulse.declared = self.pulse.declared, []
        return found


class Runs:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, undo: contextlib.ExitStack) -> None:
        self.undo, self.clock = undo, SimpleNamespace(now=50.0)
        Agent.made, Agent.fails = [], 0
        monkeypatch.setattr(machine_membership, "RemoteHost", Agent)
        monkeypatch.setattr(machine_membership, "Heartbeat", Pulse)
        clock = SimpleNamespace(monotonic=lambda: self.clock.now)
        monkeypatch.setattr(machine_membership, "time", clock)

    def __call__(
        self, shards: tuple[int, ...], dealt: list[int], *, join: Node | None = None, **storage: Any
    ) -> Run:
        cluster = Cluster(1 + max(*shards, *dealt, 1))
        sites = Sites(shards, tuple(range(len(cluster.found))), join is not None)
        plan = RunPlan(
            course=Course.of("async"), learners=len(dealt), topology=Servers(len(shards), fixed=True)
        )
        spec = RunSpec(task=Task(print), plan=plan, storage=Storage(**storage))
        machines = ClusterMachines(spec, cast(Any, None), cast(Any, cluster), cluster.found[:], dealt, sites)
        if join is not None:
            known = cluster.found
            cluster.nodes = deque([known, [*known, join]]).popleft  # type: ignore[method-assign]
        machines.begin(self.undo, (lambda node: node.cores) if join is not None else None)
        told: list[Any] = []
        watched = Watched()
        say = {name: lambda *words, name=name: told.append((name, *words)) for name in Told.__slots__}
        machines.hosts(cast(Any, watched), Told(**say))
        return Run(machines, cluster, machines.pulse, watched, told, self.clock)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runs]:
    with contextlib.ExitStack() as undo:
        yield Runs(monkeypatch, undo)


def test_each_machine_connects_to_those_that_are_told_after_it(runs: Runs) -> None:
    runs((0, 0), [0, 1, 2, 3])
    assert [(each.site, sorted(each.begin.addresses)) for each in Agent.made] == [
        (1, [2, 3]),
        (2, [3]),
        (3, []),
    ]
    assert not any(each.closed for each in Agent.made)
    runs.undo.close()
    assert all(each.closed for each in Agent.made), "whether or not the run began"


def test_where_one_is_not_ready_all_are_let_go(runs: Runs) -> None:
    Agent.fails = 2
    with pytest.raises(OSError, match="not ready"):
        runs((0, 0), [0, 1, 2])
    assert [each.closed for each in Agent.made] == [True, True]


def test_a_folder_is_shown_by_a_file_that_goes_again(runs: Runs, tmp_path: Any) -> None:
    runs((0,), [0, 1], folder=str(tmp_path / "kept"))
    token = Agent.made[0].begin.token
    assert token.startswith(str(tmp_path / "kept" / ".seen-")) and list((tmp_path / "kept").iterdir()) == []


def test_other_versions_are_refused(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_membership, "versions", lambda: ("2.7", "0.1", "0.0"))
    with pytest.raises(
        UsageError, match=r"node 10\.0\.0\.1 \(node 1\) has other versions: Python .* \(here 2\.7\)"
    ):
        runs((0,), [0, 1])


def test_learners_are_where_they_were_dealt_and_those_of_a_lost_machine_where_the_fewest_are(
    runs: Runs,
) -> None:
    run = runs((0, 0), [0, 1, 1, 2])
    assert [run.machines.where(rank) for rank in range(4)] == [0, 1, 1, 2]
    run.loses(1)
    assert run.told == [("lost", 1, "why")] and run.machines.sites.live == (0, 2)
    assert [run.machines.where(rank) for rank in range(4)] == [0, 0, 2, 2]
    assert -1 not in run.watched.actions, "its connection is closed"


def test_machines_of_the_shards_alone_get_no_learners_unless_no_other_is_left(runs: Runs) -> None:
    run = runs((0, 1), [2, 3])
    run.loses(3)
    assert run.machines.where(1) == 2
    run.loses(2)
    assert [run.machines.where(rank) for rank in (0, 1)] == [0, 0]


def test_frames_that_relays_turn_away_add_up_over_machines_and_servers_that_are_started_anew(
    runs: Runs,
) -> None:
    run = runs((0,), [0, 1])
    assert run.machines.refused == 5
    for site, count in ((0, 2), (1, 1), (1, 4)):
        run.hears(site, RefusedFrames(count))
    assert run.machines.refused == 12


@pytest.mark.parametrize("ends, lost", [((0, 2), 2), ((2, 0), 2), ((2, 3), 2), ((3, 2), 2), ((1, 3), 3)])
def test_where_a_way_is_cut_an_end_is_lost_after_a_moment_rather_one_without_shards_never_the_callers(
    runs: Runs, ends: tuple[int, int], lost: int
) -> None:
    run = runs((0, 1, 3), [0, 1, 2, 3])
    (left,) = {*ends} - {lost}
    run.hears(ends[0], LinkLost(ends[1], "cut"))
    assert run.looks(MOMENT / 2) == []
    assert run.looks(MOMENT) == [(lost, f"no way between it and 10.0.0.{left} (node {left}): cut")]
    assert run.looks(MOMENT) == []


def test_a_way_is_not_judged_when_its_relay_has_ended_or_an_end_is_gone(runs: Runs) -> None:
    run = runs((0, 1), [0, 1, 2, 3])
    run.hears(2, LinkLost(3, "cut")).state = "killed"
    run.hears(1, LinkLost(3, "cut"))
    run.pulse.gone.add(3)
    assert run.looks(2 * MOMENT) == []


def test_ways_that_are_cut_while_the_supervisor_ends_all_relays_are_not_judged(runs: Runs) -> None:
    run = runs((0, 1), [0, 1])
    relay = run.hears(1, LinkLost(0, "the caller's relay was killed"))
    run.clock.now += 2 * MOMENT
    run.pulse.look()
    relay.state = "killed"  # all of them are, one after the other, which takes its time
    assert run.looks(MOMENT) == []


def test_a_node_that_joins_gets_learners_when_its_relay_has_all_its_ways(runs: Runs) -> None:
    run = runs((0,), [0, 1], join=Node("new", "10.0.0.9", 2))
    runs.undo.pop_all().close()  # the thread has looked
    run.welcomes()
    ((name, host, words),) = run.told
    assert (name, host.site, words) == ("joined", 2, "10.0.0.9 (new), 2 learners")
    assert run.machines.sites.live == (0, 1, 2) and run.machines.address(2) == ("10.0.0.9", 1)
    run.hears(1, Linked())
    assert run.told[1:] == []
    run.hears(2, Linked())
    run.hears(2, Linked())
    assert run.told[1:] == [("add", 2)]
    assert [run.machines.where(rank) for rank in (2, 3, 4)] == [2, 2, 0]


@pytest.mark.parametrize("cores, fails, why", [(0, 0, "it has no core"), (1, 2, "not ready")])
def test_a_node_that_cannot_be_used_is_said_and_nothing_stays_there(
    runs: Runs, cores: int, fails: int, why: str
) -> None:
    Agent.fails = fails
    run = runs((0,), [0, 1], join=Node("new", "10.0.0.9", cores))
    runs.undo.pop_all().close()
    run.welcomes()
    assert run.told == [("refused", f"node 10.0.0.9 (new) joined the cluster and is not used: {why}")]
    assert run.cluster.dropped == ([2] if fails else []) and run.machines.sites.live == (0, 1)


def test_how_long_a_joined_node_may_take_is_counted_from_when_there_was_room(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def waits_for_room(cluster: Cluster) -> None:
        runs.clock.now += 2 * READY

    monkeypatch.setattr(Cluster, "waits_for_room", waits_for_room)
    run = runs((0,), [0, 1], join=Node("new", "10.0.0.9", 2))
    runs.undo.pop_all().close()
    run.welcomes()
    assert [words[0] for words in run.told] == ["joined"]
