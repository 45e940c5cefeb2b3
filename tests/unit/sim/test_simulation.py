"""A simulated run: who is lost when, what the run that goes on keeps, who is there for a script, and that nobody stays behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from syncline import messages as m
from syncline.cluster import Cluster
from syncline.dial import Course
from syncline.engines.event_script import Fault
from syncline.engines.run import RunSpec, Task
from syncline.errors import LostError
from syncline.ports import Computing
from syncline.protocols.lifecycle import Faults
from syncline.roles.run_plan import RunPlan
from syncline.sim.fault_player import Script
from syncline.sim.simulation import Simulation
from syncline.topologies import Servers, parse_topology

LATENCY = 0.25
CLUSTER = Cluster.equal(compute=1.0, transfer=0.0, latency=LATENCY)


def computes(session: Any, steps: int = 5) -> int:
    """So many seconds; it says something to the leading shard before each."""
    for _ in range(steps):
        session.port.stepped = True
        session.port.spend(Computing(1))
    return session.rank


def waits(session: Any) -> None:
    session.port.until(lambda: False, "what never comes")


# Learners are numbered from 1 on, ranks from 0.


def world(task: Any = computes, *, script: str = "", topology: Any = None, **given: Any) -> Simulation:
    plan = RunPlan(course=Course.of("hardsync"), learners=3, topology=topology or Servers(2, True))
    faults = given.pop("faults", Faults())
    return Simulation(
        RunSpec(task=Task(task), plan=plan, faults=faults), CLUSTER, script=Script.of(script), **given
    )


def steps_to(found: Simulation, moment: float) -> None:
    found.start()
    while found.clock.now < moment:
        found.clock.step()


def test_a_run_is_over_when_all_have_returned_and_says_where_the_time_went() -> None:
    outcome = world().run()
    assert outcome.returned == {0: 0, 1: 1, 2: 2} and outcome.seconds >= 5.0
    assert outcome.simulated is not None
    assert [each.compute for each in outcome.simulated.learners.values()] == [5.0] * 3


def test_a_run_that_stands_still_says_who_waits_for_what_and_nobody_stays_behind() -> None:
    found = world(waits)
    with pytest.raises(
        LostError, match=r"stands still at 0\.25 s; who waits for what: \{0: 'what never comes'"
    ):
        found.run()
    assert all(learner.fiber.done for learner in found.learners.values())


def test_a_loss_is_heard_of_after_all_that_was_sent() -> None:
    found = world()
    steps_to(found, 1.0)
    found.kill(found.live[2], "by the test")
    assert found.live[2].dead and not found.recorder.outcome.events
    while not found.recorder.outcome.events:
        found.clock.step()
    assert found.clock.now == 1.0 + LATENCY and 2 not in found.live
    assert [(event.kind, event.rank) for event in found.recorder.outcome.events] == [("lost", 1)]
    found.end()


def test_a_run_goes_on_from_a_checkpoint_only_with_losses_on_this_side_of_it() -> None:
    found = world(exact=True)
    steps_to(found, 1.0)
    found.kill(found.live[2], "by the test")
    assert found.goes_on() and 2 not in found.live, "it is noticed now"
    moment = found.moment(exact=True)
    assert (moment.learners, moment.seconds, moment.ranks, moment.last_rank) == (3, 1.0, [0, 2], 2)
    assert found.moment(exact=False).ranks == []
    assert found.states().keys() == {"random/0", "random/2"}
    found.servers[0].dead = True
    assert not found.goes_on()
    found.end()


@pytest.mark.parametrize("why", ["not exact", "stopping", "failed"])
def test_else_it_does_not(why: str) -> None:
    found = world(exact=why != "not exact")
    found.stopping = why == "stopping"
    if why == "failed":
        found.fail(KeyError("first")), found.fail(KeyError("second"))
        assert str(found.recorder.error) == "'first'"
    assert not found.goes_on()
    found.end()


@pytest.mark.parametrize(("line", "kinds"), [
    ("kill learner 1", ["lost"]), ("add 1", ["joined"]), ("kill learner 8", ["missed"]), ("stop", []),
    ("change to async", ["dial"]), ("pause learner 0 for 1 s", ["paused"]),
])  # fmt: skip
def test_lines_of_a_script_happen_at_their_moment(line: str, kinds: list[str]) -> None:
    found = world(script=f"{line} at 2 s")
    outcome = found.run()
    assert [event.kind for event in outcome.events if event.kind != "missed" or kinds == ["missed"]] == kinds
    assert all(event.seconds >= 2.0 for event in outcome.events)


def test_who_hangs_longer_than_patience_is_killed_where_that_is_wanted() -> None:
    fault = Fault.parse("pause learner 1 for 9 s at 1 s")
    found = world(faults=Faults(patience=2.0, kill_hung=True))
    steps_to(found, 1.0)
    found.play(fault)
    while found.clock.now < 4.0:
        found.clock.step()
    said = [(event.kind, event.rank) for event in found.recorder.outcome.events]
    assert said[:1] == [("paused", 1)] and ("lost", 1) in said
    found.end()
    patient = world(faults=Faults(patience=9.0, kill_hung=True))
    steps_to(patient, 1.0)
    patient.play(fault)
    while patient.clock.step():
        pass
    assert [event.kind for event in patient.recorder.outcome.events] == ["paused"]
    patient.end()


def test_norms_go_to_all_shards_when_all_have_brought_theirs() -> None:
    found = world()
    heard: list[tuple[int, Any]] = []
    for server in found.servers:
        server.handle = lambda event, shard=server.shard: heard.append((shard, event))  # type: ignore[method-assign]
    found.tables[0] = type("Table", (), {"layout": type("Layout", (), {"shards": 2})})  # type: ignore[assignment]
    norms = [torch.tensor([1.0]), torch.tensor([2.0])]
    found.share_norms(1, 0, 4, norms[1])
    found.share_norms(0, 0, 5, norms[0])
    assert not found.clock.step()
    found.share_norms(0, 0, 4, norms[0])
    while found.clock.step():
        pass
    assert [shard for shard, _ in heard] == [0, 1]
    assert all(
        isinstance(event, m.Norms) and event.version == 4 and event.norms == norms for _, event in heard
    )
    found.end()


def test_lanes_are_kept_until_every_shard_has_forgotten_their_learner() -> None:
    found = world()
    lane: Any = object()
    found.tables[0] = lane
    found.lanes[0, 1] = found.lanes[0, 2] = lane
    found.forget(1)
    assert (0, 1) in found.lanes
    found.forget(1)
    assert found.lanes.keys() == {(0, 2)}
    found.end()


def test_a_tree_that_is_planted_anew_has_the_learners_that_live() -> None:
    found = world(topology=parse_topology("tree:2"))
    old = dict(found.nodes)
    assert found.tree.leaf == {1: 0, 2: 0, 3: 1}
    del found.live[1]
    found.replant()
    assert sorted(found.tree.leaf) == [2, 3] and len(found.nodes) == len(old)
    assert all(node.dead for node in old.values()) and not any(node.dead for node in found.nodes.values())
    found.end()
