"""The simulator's front door: which world a run gets, how it goes on from world to world, and what its handle passes on."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

import syncline as sl
from syncline.cluster import Cluster, Compute
from syncline.dial import Course, as_sync
from syncline.engines.run import Outcome, RunSpec, Task
from syncline.errors import NotYetError, RunError, UsageError
from syncline.learn.train_and_evaluate import run_training
from syncline.roles.run_plan import RunPlan
from syncline.sim import engine as engine_module
from syncline.sim.engine import Sim, SimHandle
from syncline.topologies import Servers, parse_topology


def spec(topology: Any = Servers(1, True), function: Any = print, **given: Any) -> RunSpec:  # noqa: B008
    plan = RunPlan(course=Course.of("hardsync"), learners=2, topology=topology, seed=7)
    return RunSpec(task=Task(function), plan=plan, **given)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """The worlds that are made, by kind and with what; they do nothing."""
    found: list[tuple[str, dict[str, Any]]] = []

    def kind(name: str) -> Any:
        class World:
            next = None

            def __init__(self, spec: RunSpec, cluster: Cluster, **given: Any) -> None:
                self.spec, self.commands = spec, list[Any]()
                found.append((name, given))
                if name == "servers" and len(found) < 3 and given["exact"]:
                    self.next = f"checkpoint {len(found)}"

            def run(self) -> Outcome:
                return Outcome(seconds=float(len(found)))

        return World

    for name, attribute in (
        ("servers", "Simulation"),
        ("equals", "AllReduceSimulation"),
        ("batch", "BatchSimulation"),
    ):
        monkeypatch.setattr(engine_module, attribute, kind(name))
    return found


@pytest.mark.parametrize(("given", "name"), [
    (spec(), "servers"), (spec(parse_topology("tree:2")), "servers"),
    (spec(parse_topology("allreduce")), "equals"), (spec(batch=object()), "batch"),
])  # fmt: skip
def test_a_run_gets_the_world_of_its_topology(given: RunSpec, name: str, made: list[Any]) -> None:
    Sim().run(given)
    assert [kind for kind, _ in made] == [name] and made[0][1]["seed"] == 7


def test_an_exact_run_goes_on_from_checkpoint_to_checkpoint(made: list[Any]) -> None:
    followed: list[Any] = []
    outcome = Sim(seed=3).run(spec(function=run_training), followed.append)
    assert outcome.seconds == 3.0 and len(followed) == 3
    assert [given["previous"] for _, given in made] == [None, *followed[:2]]
    assert [world.spec.storage.restored for world in followed] == [None, "checkpoint 1", "checkpoint 2"]
    assert [given["seed"] for _, given in made] == [3] * 3


@pytest.mark.parametrize(("engine", "function", "devices", "exact", "together"), [
    (Sim(), run_training, "cpu", True, False),
    (Sim(), print, "cpu", False, False),  # would begin again at each checkpoint
    (Sim(exact=True), print, "cpu", True, False),
    (Sim(exact=False), run_training, "cpu", False, False),
    (Sim(), print, "cuda:0", False, True),  # on a GPU many at once
    (Sim(batched=False), print, "cuda:0", False, False),
    (Sim(batched=True), print, "cpu", False, True),
])  # fmt: skip
def test_what_is_not_given_follows_from_the_run(
    engine: Sim, function: Any, devices: str, exact: bool, together: bool, made: list[Any]
) -> None:
    engine.world(spec(function=function, devices=(devices,)))
    ((_, given),) = made
    assert given["exact"] == exact and (given["ways"] is not None) == together


def test_a_cluster_is_a_record_a_name_or_fixed_times() -> None:
    assert Sim(compute=2.0).cluster.compute == Compute(base=2.0)
    named = Sim("p775:stragglers=0.5")
    assert named.cluster.stragglers == 0.5 and named.cluster_name == "p775:stragglers=0.5"
    assert Sim(replace(Cluster.equal(), name="mine")).cluster_name == "mine"


@pytest.mark.parametrize(("engine", "given", "error", "words"), [
    (Sim(check=True), spec(batch=object()), UsageError, "sandblaster has none"),
    (Sim(check=True), spec(parse_topology("allreduce")), UsageError, "over all-reduce there are none"),
    (Sim(script="add 1 at 2 s"), spec(parse_topology("allreduce")), NotYetError, "learners can be killed"),
])  # fmt: skip
def test_what_cannot_be_is_refused_before_a_thread_begins(
    engine: Sim, given: RunSpec, error: type[Exception], words: str
) -> None:
    before = threading.active_count()
    with pytest.raises(error, match=words):
        engine.start(given)
    assert threading.active_count() == before


# -- a handle ------------------------------------------------------------------------------------------------


class Asked:
    """A world that runs until it is told to end, and notes what it was asked."""

    def __init__(self) -> None:
        self.commands: list[Any] = []
        self.heard: list[Any] = []
        self.begun, self.ends = threading.Event(), threading.Event()
        self.error: BaseException | None = None

    def run(self, spec: RunSpec, follow: Any) -> Outcome:
        if self.error is not None:
            raise self.error
        follow(self)
        self.begun.set()
        self.ends.wait()
        for command in self.commands:
            command(self)
        return Outcome()

    def statistics(self) -> str:
        return "as it is"

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.heard.append((name, *given))


def test_what_a_handle_is_asked_is_done_between_two_events_of_the_run() -> None:
    world: Any = Asked()
    handle = SimHandle(world, spec())
    handle.add_learners(3)
    handle.change(as_sync("async"))
    handle.interrupt(2)
    assert not world.heard and not handle.done
    with pytest.raises(TimeoutError, match="goes on after 0 s"):
        handle.wait(0)
    world.ends.set()
    assert handle.wait().interrupted
    assert world.heard == [("ask_add", 3), ("change", as_sync("async")), ("ask_stop",)] and handle.done
    assert handle.statistics() == "as it is", "and afterwards from whoever asks"


def test_a_run_that_did_not_start_says_why_to_who_waits() -> None:
    world: Any = Asked()
    world.error = KeyError("no model")
    handle = SimHandle(world, spec())
    with pytest.raises(KeyError, match="no model"):
        handle.wait()
    handle.stop()
    with pytest.raises(RunError, match="did not start"):
        handle.statistics()


def test_a_timing_over_servers_or_a_topology() -> None:
    sizes: dict[str, Any] = {
        "parameters": 100,
        "examples": 8,
        "learners": 2,
        "batch_size": 2,
        "epochs": 1,
        "sync": "hardsync",
    }
    timings = [sl.Sim().timing(**sizes, topology=each) for each in (None, "servers:1", "tree:2", "allreduce")]
    assert [each.updates for each in timings] == [2] * 4 and timings[0].seconds == timings[1].seconds
