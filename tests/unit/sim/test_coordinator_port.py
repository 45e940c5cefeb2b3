"""The simulated coordinator's effects, and the moment of a run that a checkpoint keeps."""

from __future__ import annotations

from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest

from syncline import messages as m
from syncline.dial import Course, as_sync
from syncline.engines.run import RunSpec, Storage, Task
from syncline.roles.run_plan import RunPlan
from syncline.sim.coordinator_port import Moment, SimCoordinator
from tests.unit.sim.small_world import LATENCY, SmallWorld, layout_of


class Listener:
    """In a learner's place."""

    machine = 0

    def __init__(self, world: SmallWorld, learner: int) -> None:
        self._world, self._learner = world, learner

    def answer(self, message: Any) -> None:
        self._world.hear(f"answer {self._learner}", message)

    def call(self) -> None:
        self._world.hear("call", self._learner)

    def wake(self) -> None:
        self._world.hear("wake", self._learner)


class World(SmallWorld):
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.learners = {learner: Listener(self, learner) for learner in (0, 1)}
        self.live = {1: self.learners[1]}

    def soon_at(self, learner: Any, action: Any) -> None:
        self.soon(action)


def heard(world: World) -> list[tuple[str, Any]]:
    world.run()
    assert all(moment == LATENCY for moment, _, _ in world.heard)
    return [(who, what) for _, who, what in world.heard]


# -- moments -------------------------------------------------------------------------------------------------

KEPT = Moment(
    learners=2, seconds=9.0, ranks=[0, 3], last_rank=3, returned=[1], losses=[(3, 1)], played=["add 2"]
)


def spec(kept: dict[str, Any] | None, learners: int = 2) -> RunSpec:
    plan = RunPlan(course=Course.of("async"), learners=learners)
    restored: Any = SimpleNamespace(name="/run/12", simulated=kept)
    return RunSpec(
        task=Task(print), plan=plan, storage=Storage(restored=restored if kept is not None else None)
    )


def test_a_run_goes_on_at_its_checkpoints_moment() -> None:
    written = {**asdict(KEPT), "losses": [[3, 1]]}  # as JSON has it
    assert Moment.of(spec(written)) == KEPT


@pytest.mark.parametrize(("kept", "learners", "seconds"), [
    (None, 2, 0.0),
    (asdict(KEPT), 5, 9.0),  # as many as the run has now
    (asdict(replace(KEPT, ranks=[])), 2, 9.0),  # learners of functions begin again
])  # fmt: skip
def test_else_all_learners_begin_at_its_time(kept: Any, learners: int, seconds: float) -> None:
    ranks = list(range(learners))
    assert Moment.of(spec(kept, learners)) == Moment(learners=learners, seconds=seconds, ranks=ranks)


# -- answers -------------------------------------------------------------------------------------------------


def test_a_tables_first_learner_makes_its_memory_and_the_others_get_theirs() -> None:
    world = World()
    port, layout = SimCoordinator(world), layout_of()  # type: ignore[arg-type]
    port.reply(0, m.Initialise(0, layout))
    port.tell_shards(m.JoinTable(0, 1, 1, first=False))
    port.reply(1, m.Opened(0, layout))
    port.reply(1, "something else")
    (_, first), (_, opened), (_, other) = [each for each in heard(world) if each[0].startswith("answer")]
    assert first.handle is opened.handle is world.tables[0] and other == "something else"
    assert first.lane is world.lanes[0, 0] and opened.lane is world.lanes[0, 1]


def test_who_rejoins_gets_its_tables_and_the_new_desk() -> None:
    world = World()
    table = world.open_table(1, 1)
    SimCoordinator(world).reply(1, m.Rejoined([m.Opened(0, table.layout)]))  # type: ignore[arg-type]
    ((_, back),) = heard(world)
    assert back.desk is world.servers[0]
    assert back.tables[0].handle is table and back.tables[0].lane is world.lanes[0, 1]


# -- to all --------------------------------------------------------------------------------------------------


def test_all_shards_hear_what_concerns_tables() -> None:
    world = World(shards=2)
    dial = m.Dial(4, as_sync("async"), None)
    SimCoordinator(world).tell_shards(dial)  # type: ignore[arg-type]
    assert world.dials[4] == dial.sync
    assert heard(world) == [("shard 1", dial), ("shard 0", dial)], "the leading one last: it acts on it"


@pytest.mark.parametrize(("what", "said"), [
    (m.Stop(), ("stop", None)), (m.Call(), ("call", 1)), (m.Renewed(), ("wake", 1))
])  # fmt: skip
def test_those_that_live_hear_of_it(what: Any, said: tuple[str, Any]) -> None:
    world = World()
    SimCoordinator(world).announce(what)  # type: ignore[arg-type]
    if isinstance(what, m.Stop):
        assert [(who, each) for _, who, each in world.heard] == [said]
    else:
        assert heard(world) == [said]


# -- checkpoints ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exact", [True, False])
def test_a_checkpoint_keeps_the_moment_and_an_exact_run_goes_on_from_it(
    exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world: Any = World()
    world.goes_on = lambda: exact
    world.moment = lambda *, exact: replace(KEPT, ranks=[0] if exact else [])
    written: list[dict[str, Any]] = []
    world.supervision.commit = lambda number, manifest, files, *, prune: (
        written.append(manifest) or f"at {number}"
    )
    monkeypatch.setattr("syncline.sim.coordinator_port.find", lambda path: path)
    monkeypatch.setattr("syncline.sim.coordinator_port.restored", lambda found: ("goes on", found))
    assert SimCoordinator(world).commit(7, {}, [])
    assert written[0]["simulated"]["ranks"] == ([0] if exact else [])
    assert world.next == (("goes on", "at 7") if exact else None)


def test_a_checkpoint_that_was_not_written_changes_nothing() -> None:
    world: Any = World()
    asked: list[bool] = []
    world.goes_on = lambda: asked.append(True) or True
    world.supervision.commit = lambda number, manifest, files, *, prune: None
    assert not SimCoordinator(world).commit(7, None, [])
    assert world.next is None and not asked, "else losses would be noticed for it"
