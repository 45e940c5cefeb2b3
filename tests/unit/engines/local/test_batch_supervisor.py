"""A batch method's run, as its supervisor hears of it: scalars and decisions pass, and whoever is lost is made up for."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from syncline import messages as m
from syncline.batch import commands as c
from syncline.batch import messages as b
from syncline.batch.coordinator import slots_of
from syncline.batch.portions import Samples
from syncline.dial import Sync
from syncline.engines.local.batch_supervisor import BatchSupervisor
from syncline.engines.local.shared_memory import Region, whole_pages
from syncline.errors import LearnerError, LostError, LostWarning, RunError, UsageError
from syncline.learn.portion_worker import BatchPlan, batch_layout
from tests.unit.engines.local.doubles import Children, Story, lives, said_to, spec_of

MODEL = nn.Linear(2, 1, bias=False)


class Twice:
    """A method that looks at the gradient in two iterations, then ends."""

    vectors = ("x", "g")

    def __call__(self, state: c.State | None = None) -> Generator[Any, c.Scalars, c.End]:
        for iteration in (1, 2):
            got = yield (c.Evaluate(), c.Dot("g.g", "g", "g"))
            yield c.Iteration({}, c.Record(iteration, got["loss"], 1.0, got["g.g"], iteration))
        return c.End("decrease", "small enough", 2, 2, 0.5)


def run_of(*, deterministic: bool = False, limit: int | None = None, **options: Any) -> BatchSupervisor:
    layout = batch_layout(MODEL, 2)
    made = {
        "model": MODEL,
        "data": TensorDataset(torch.zeros(8, 2)),
        "collate": None,
        "seed": 0,
        "fixed": {},
    }
    plan = BatchPlan(
        objective=len,
        samples=Samples(8, 4),
        layout=layout,
        method=Twice(),
        deterministic=deterministic,
        **made,  # type: ignore[arg-type]
    )
    return BatchSupervisor(spec_of(2, plan={"limit": limit}, batch=plan, **options))


class Parties:
    """Shards and learners that do what they are told when the story lets them; what each was told lately."""

    def __init__(self, children: Children) -> None:
        self.children, self._read = children, dict[int, int]()

    def told(self, role: str, rank: int, kind: type) -> list[Any]:
        process = self.children.of(role, rank)
        start, self._read[process.pid] = self._read.get(process.pid, 0), len(said_to(process))
        return [each for each in said_to(process)[start:] if isinstance(each, kind)]

    def ready(self, *learners: int) -> None:
        for shard in (0, 1):
            self.children.says("shard", shard, b.Ready())
        for rank in learners:
            self.children.says("learner", rank, b.Ready())

    def shards(self, square: float = 2.0) -> None:
        """They carry out what they were told, with these squares of their parts of the gradient."""
        for shard in (0, 1):
            for message in self.told("shard", shard, b.Run | b.Add):  # type: ignore[arg-type]
                if isinstance(message, b.Add):
                    self.children.says("shard", shard, b.Added(shard, message.slot))
                else:
                    measured = (square,) * sum(isinstance(each, c.Dot) for each in message.commands)
                    self.children.says("shard", shard, b.Ran(shard, message.number, measured))

    def answers(self, rank: int, loss: float = 8.0) -> int:
        """A learner computes all that it has; how many tasks those were."""
        tasks = self.told("learner", rank, b.Give)
        for task in tasks:
            examples = 4 * (task.stop - task.start)
            self.children.says("learner", rank, b.Answered(task.evaluation, task.task, loss, examples))
        return len(tasks)

    def goes(self, run: BatchSupervisor, *learners: int) -> Story:
        """On, until the method has ended or the run has failed."""
        while run._finished is None and run.error is None:
            self.shards()
            for rank in learners:
                self.answers(rank)
            yield


def test_a_method_runs_to_its_end_and_its_weights_are_those_of_the_last_iterate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = run_of()

    def story(children: Children) -> Story:
        parties = Parties(children)
        assert children.spec_of("shard").names == ("x", "g")
        assert {each.rank for each in children.by_pid.values() if each.role == "learner"} == {0, 1}
        parties.ready(0, 1)
        yield from parties.goes(run, 0, 1)

    lives(run, story, monkeypatch)
    assert run.error is None and [each.kind for each in run.outcome.events] == ["converged"]
    assert [(each.version, each.loss, each.notes["gradient"]) for each in run.outcome.history] == [
        (1, 2.0, 4.0),
        (2, 2.0, 4.0),
    ]
    version, state = run.outcome.tables[0]
    assert version == 2 and torch.equal(state["weight"], MODEL.weight.detach())


def test_nothing_is_said_to_shards_before_all_of_them_have_their_vectors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = run_of()

    def story(children: Children) -> Story:
        children.says("shard", 1, b.Ready())
        yield
        assert not [each for each in said_to(children.of("shard")) if isinstance(each, b.Run)]
        assert not Parties(children).told("learner", 0, b.Give)
        Parties(children).ready(0)
        yield
        assert Parties(children).told("learner", 0, b.Give)
        run.fail(RunError("enough"))

    lives(run, story, monkeypatch)


def test_a_lost_learners_portions_are_computed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of()

    def story(children: Children) -> Story:
        parties = Parties(children)
        parties.ready(0, 1)
        yield
        with pytest.warns(LostWarning, match="learner 0 lost: its process .*; 1 other learner goes on"):
            children.ends("learner", 0)
        yield from parties.goes(run, 1)

    lives(run, story, monkeypatch)
    assert run.error is None and run.outcome.history[-1].version == 2
    states = {(each.role, each.rank): each.state for each in run.outcome.statistics.processes}
    assert states["learner", 0] == "lost" and states["learner", 1] == "returned"


@pytest.mark.parametrize(
    "role, what, kind, words",
    [
        ("learner", m.Raised(ValueError("odd"), "the trace"), LearnerError, "ValueError: odd"),
        ("shard", m.ShardRaised(1, None, "the trace"), RunError, "shard 1 failed:\nthe trace"),
        ("shard", "signal SIGKILL", LostError, r"shard 1 \(pid 101\) ended with signal SIGKILL"),
    ],
)
def test_what_ends_a_run(
    role: str, what: Any, kind: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of()

    def story(children: Children) -> Story:
        Parties(children).ready(0, 1)
        (children.ends if isinstance(what, str) else children.says)(role, 1, what)
        yield

    assert lives(run, story, monkeypatch).closed is True
    with pytest.raises(kind, match=words):
        raise run.error or AssertionError


def test_who_dies_after_the_end_is_noted_and_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of()

    def story(children: Children) -> Story:
        parties = Parties(children)
        parties.ready(0, 1)
        yield from parties.goes(run, 0, 1)

    run._over = lambda: run._finished is not None and len(run.outcome.events) == 3  # type: ignore[method-assign]

    def late(children: Children) -> Story:
        yield from story(children)
        children.ends("learner", 0), children.ends("shard", 1)

    lives(run, late, monkeypatch)
    assert run.error is None and [each.kind for each in run.outcome.events] == [
        "converged",
        "lost",
        "shard lost",
    ]


def test_learners_that_are_added_come_with_room_for_their_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of()

    def story(children: Children) -> Story:
        parties = Parties(children)
        size = whole_pages(run.spec.batch.layout.parameters.nbytes)  # type: ignore[union-attr]
        assert [region.nbytes // size for region in children.spec_of("shard").pools] == [
            slots_of(2, deterministic=False)
        ]
        run.add_learners(2)
        yield
        assert [pool.nbytes // size for pool in parties.told("shard", 1, Region)] == [4]
        assert len(parties.told("learner", 0, Region)) == 1 and not parties.told("learner", 3, Region)
        assert len(children.spec_of("learner", 3).pools) == 2
        run.fail(RunError("enough"))

    lives(run, story, monkeypatch)


def test_a_stop_ends_the_run_after_its_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of()

    def story(children: Children) -> Story:
        parties = Parties(children)
        parties.ready(0, 1)
        run.stop(interrupted=True)
        yield from parties.goes(run, 0, 1)

    lives(run, story, monkeypatch)
    assert run.error is None and len(run.outcome.history) == 1 and run.outcome.interrupted


def test_statistics_say_who_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    run, got = run_of(), list[m.Statistics]()
    monkeypatch.setattr(run, "_answer", got.append)

    def story(children: Children) -> Story:
        parties = Parties(children)
        parties.ready(0)
        parties.answers(0)
        run.command(lambda: run._questioned(5))
        yield
        run.fail(RunError("enough"))

    lives(run, story, monkeypatch)
    rows = [(each.role, each.rank, each.state, each.steps, each.loss) for each in got[0].processes]
    assert got[0].number == 5 and rows[:2] == [
        ("shard", 0, "running", 0, None),
        ("shard", 1, "running", 0, None),
    ]
    assert rows[3] == ("learner", 1, "waits", 0, None)
    assert rows[2][:3] == ("learner", 0, "computing") and rows[2][3] > 0 and rows[2][4] == 2.0


@pytest.mark.parametrize(
    "options, threads", [({"deterministic": True}, 1), ({"deterministic": True, "threads": 3}, 3)]
)
def test_bits_do_not_depend_on_cores(
    options: dict[str, Any], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(**options)

    def story(children: Children) -> Story:
        run.fail(RunError("enough"))
        yield

    children = lives(run, story, monkeypatch)
    assert (
        children.threads[children.of("learner").pid] == threads
        and children.threads[children.of("shard").pid] == 1
    )


def test_a_batch_method_has_no_dial() -> None:
    with pytest.raises(UsageError, match="sandblaster has no dial to change"):
        run_of().change(Sync.parse("async"))
