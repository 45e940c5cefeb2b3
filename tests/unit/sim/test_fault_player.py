"""Scripts in a simulated run: which lines are due, left and missed, which are refused, and whom a line strikes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.cluster import Cluster
from syncline.dial import Course
from syncline.engines.event_script import Fault
from syncline.engines.run import RunSpec, Task
from syncline.errors import DialError, NotYetError, UsageError
from syncline.roles.run_plan import RunPlan
from syncline.sim.clock import Clock, ClockPause
from syncline.sim.fault_player import Script, check_script, strike
from syncline.topologies import Servers, parse_topology

# -- what is still to happen ---------------------------------------------------------------------------------


def test_a_script_by_version_and_by_time() -> None:
    text = "kill learner 1 at version 3; stop at 9 s; add 1 at version 2; pause shard 0 for 1 s at version 8"
    script, played = Script.of(text), []
    assert [fault.action for fault in script.timed] == ["stop"]
    for version in (1, 2, 5):
        script.reached(version, lambda fault, version=version: played.append((version, fault.action)))  # type: ignore[misc]
    assert played == [(2, "add"), (5, "kill")]
    left = script.rest(["kill learner 1 at version 3", "add 1 at version 2"])
    assert [fault.action for fault in left.faults] == ["stop", "pause"]
    assert Script.of(None).timed == []


lines = st.lists(
    st.tuples(st.sampled_from(["add 1", "kill learner 1", "stop"]), st.integers(1, 4), st.booleans()),
    max_size=8,
)


@given(lines, st.lists(st.integers(0, 5), max_size=8))
def test_every_line_happens_once_and_the_others_are_missed(
    chosen: list[tuple[str, int, bool]], versions: list[int]
) -> None:
    texts = [f"{what} at {f'version {at}' if by else f'{at} s'}" for what, at, by in chosen]
    script, played, newest = Script.of("; ".join(texts)), list[str](), 0
    for version in sorted(versions):
        script.reached(version, lambda fault: played.append(fault.text))
        newest = version
    due = [text for text, (_, at, by) in zip(texts, chosen, strict=True) if by and at <= newest]
    assert sorted(played) == sorted(due)
    left = list(texts)
    for text in played:
        left.remove(text)
    missed = script.missed(played)
    assert sorted(missed) == sorted(
        f"not played, the run was over before: {t}" for t in left if "stop" not in t
    )
    assert sorted(fault.text for fault in script.rest(played).faults) == sorted(left)


def test_of_two_equal_lines_one_may_be_left() -> None:
    script = Script.of("add 1 at 2 s; add 1 at 2 s")
    assert len(script.missed(["add 1 at 2 s"])) == 1 and not script.missed(["add 1 at 2 s"] * 2)


def test_a_run_that_goes_on_has_the_lines_before_it_behind_it() -> None:
    text = "add 1 at version 3; add 2 at version 4; stop at 2 s; kill learner 1 at 2.5 s"
    assert [fault.text for fault in Script.of(text).after(3, 2.0).faults] == [
        "add 2 at version 4",
        "kill learner 1 at 2.5 s",
    ]


# -- what is refused -----------------------------------------------------------------------------------------

BESIDE, APART = Cluster(beside=True), Cluster()


def spec(topology: str = "servers:2", sync: str = "softsync:1", *, batch: Any = None) -> RunSpec:
    course = Course.of(sync)
    place = parse_topology(topology) if topology != "servers:2" else Servers(2, True)
    plan = RunPlan(course=course, learners=4, topology=place, batch_size=2)
    return RunSpec(task=Task(print), plan=plan, batch=batch)


@pytest.mark.parametrize(("line", "given", "cluster", "error", "words"), [
    ("pause shard 0 for 1 s at 1 s", spec(batch=object()), APART, NotYetError, "under sandblaster"),
    ("change to async at 1 s", spec(batch=object()), APART, NotYetError, "under sandblaster"),
    ("kill node 0 at 1 s", spec(batch=object()), APART, NotYetError, "under sandblaster"),
    ("kill shard 0 at 1 s", spec(batch=object()), APART, None, ""),
    ("add 1 at 1 s", spec("allreduce", "hardsync"), APART, NotYetError, "over all-reduce"),
    ("kill node 0 at 1 s", spec("allreduce", "hardsync"), APART, NotYetError, "over all-reduce"),
    ("kill learner 0 at 1 s", spec("allreduce", "hardsync"), APART, None, ""),
    ("cut link 0-1 for 1 s at 1 s", spec("tree:2"), BESIDE, UsageError, "nodes are those of the tree"),
    ("pause node 0 for 1 s at 1 s", spec("tree:2"), APART, UsageError, "nodes are those of the tree"),
    ("kill node 0 at 1 s", spec("tree:2"), APART, None, ""),
    ("cut link 0-1 for 1 s at 1 s", spec(), APART, UsageError, "use one with beside=True"),
    ("cut link 0-1 for 1 s at 1 s", spec(), BESIDE, None, ""),
    ("pause node 0 for 1 s at 1 s", spec(), APART, None, ""),
    ("change to delayed:3 at 1 s", spec(sync="delayed:1"), APART, DialError, "keeps 4 versions, this run was started to keep 2"),
    ("change to delayed:3 at 1 s", spec(sync="delayed:3"), APART, None, ""),
    ("change to softsync:9 at 1 s", spec(), APART, DialError, "n <= learners"),
    ("change to backup:1 at 1 s", spec("tree:2"), APART, DialError, "taken whole"),
])  # fmt: skip
def test_lines_that_a_run_could_not_play_are_refused(
    line: str, given: RunSpec, cluster: Cluster, error: Any, words: str
) -> None:
    if error is None:
        check_script(Script.of(line), given, cluster)
        return
    with pytest.raises(error, match=words):
        check_script(Script.of(line), given, cluster)


# -- whom it strikes -----------------------------------------------------------------------------------------


class World:
    """Three learners and two shards on two machines; rank 1 has been replaced, and the first who had it is dead."""

    def __init__(self, topology: Any) -> None:
        self.clock, self.said, self.done = Clock(), list[tuple[str, str]](), list[Any]()
        self.clock.now = 5.0
        self.spec = SimpleNamespace(plan=SimpleNamespace(topology=topology))
        self.recorder = SimpleNamespace(
            event=lambda what, *rank, kind, **more: self.said.append((kind, what))
        )
        self.network = SimpleNamespace(cut=lambda *link: self.done.append(("cut", *link)))
        people = [("a", 0, 0, False), ("b", 1, 0, True), ("c", 1, 1, False), ("d", 2, 1, False)]
        self.live = {
            name: SimpleNamespace(name=name, rank=rank, machine=at, dead=dead)
            for name, rank, at, dead in people
        }
        self.servers = [
            SimpleNamespace(shard=shard, machine=shard, dead=False, pause=ClockPause()) for shard in (0, 1)
        ]

    def kill(self, learner: Any, why: str) -> None:
        self.done.append((learner.name, why))

    def pause(self, learner: Any, seconds: float) -> None:
        self.done.append((learner.name, seconds))

    def lose_shard(self, shard: int) -> None:
        self.done.append(("shard", shard))


SERVERS, TREE = Servers(2, True), parse_topology("tree:2")


@pytest.mark.parametrize(("line", "topology", "done", "kinds"), [
    ("kill learner 1", SERVERS, [("c", "killed by the script")], []),
    ("pause learner 2 for 3 s", SERVERS, [("d", 3.0)], ["paused"]),
    ("kill shard 1", SERVERS, [("shard", 1)], []),
    ("kill learner 9", SERVERS, [], ["missed"]),
    ("kill shard 2", SERVERS, [], ["missed"]),
    ("kill node 1", SERVERS, [(name, "killed by the script with its node") for name in "cd"] + [("shard", 1)], ["killed"]),
    ("pause node 0 for 2 s", SERVERS, [("a", 2.0)], ["paused"]),
    ("kill node 7", SERVERS, [], ["missed"]),
    ("kill node 1", TREE, [], ["missed"]),
    ("cut link 0-2 for 4 s", SERVERS, [("cut", 0, 2, 9.0)], ["cut"]),
])  # fmt: skip
def test_a_line_strikes_those_that_it_names(
    line: str, topology: Any, done: list[Any], kinds: list[str]
) -> None:
    world = World(topology)
    strike(world, Fault.parse(f"{line} at 5 s"))  # type: ignore[arg-type]
    assert world.done == done and [kind for kind, _ in world.said] == kinds
    held = [server.pause.until for server in world.servers]
    assert held == ([7.0, 0.0] if line.startswith("pause node 0") else [0.0, 0.0])


def test_a_shard_is_held_from_now_on() -> None:
    world = World(SERVERS)
    strike(world, Fault.parse("pause shard 1 for 2 s at 5 s"))  # type: ignore[arg-type]
    assert [server.pause.until for server in world.servers] == [0.0, 7.0]
    assert world.said == [("paused", "shard 1 is paused for 2 s")]
