"""An all-reduce run, as its supervisor hears of it: who is to blame when one is gone, and what learners' boards say."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from syncline import messages as m
from syncline.dial import Sync
from syncline.engines.local import allreduce_supervisor as supervisor
from syncline.engines.local.allreduce_learner import CALLS, HISTOGRAM, LOSS, WAITS, Broken
from syncline.engines.local.allreduce_supervisor import AllReduceSupervisor
from syncline.errors import LearnerError, LostError, RunError, UsageError
from syncline.roles.allreduce_coordinator import Meet, PeerClosed
from syncline.topologies import AllReduce
from tests.unit.engines.local.doubles import Children, Story, lives, said_to, spec_of


def run_of(learners: int = 2, **options: Any) -> AllReduceSupervisor:
    return AllReduceSupervisor(spec_of(learners, AllReduce(), **options))


def board(children: Children, rank: int) -> memoryview:
    return children.spec_of("learner", rank).board.words  # type: ignore[no-any-return]


def closes(children: Children, rank: int) -> None:
    children.says("learner", rank, PeerClosed(3, 0.5, {}, {}))
    children.says("learner", rank, m.Returned(rank))


def test_all_learners_leave_together_when_the_last_has_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(threads=3)

    def story(children: Children) -> Story:
        assert [children.threads[children.of("learner", rank).pid] for rank in (0, 1)] == [3, 3]
        specs = [children.spec_of("learner", rank) for rank in (0, 1)]
        assert specs[0].meeting == specs[1].meeting and [spec.seat.rank for spec in specs] == [0, 1]
        closes(children, 0)
        yield
        assert None not in said_to(children.of("learner"))
        closes(children, 1)

    children = lives(run, story, monkeypatch)
    assert run.error is None and run.outcome.returned == {0: 0, 1: 1} and children.closed is False
    assert [said_to(children.of("learner", rank))[-1] for rank in (0, 1)] == [None, None]
    assert run.outcome.statistics.steps == {0: 3, 1: 3}


def failure(story: Any, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[str, AllReduceSupervisor]:
    run = run_of(**options)
    children = lives(run, story, monkeypatch)
    assert run.error is not None and children.closed is True
    assert all(None not in said_to(process) for process in children.by_pid.values()), (
        "nobody leaves by itself"
    )
    return f"{type(run.error).__name__}: {run.error}", run


def test_a_process_that_ends_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def story(children: Children) -> Story:
        children.ends("learner", 1)
        yield

    said, run = failure(story, monkeypatch)
    assert said.startswith(
        "LostError: learner 1 (pid 101) ended with signal SIGKILL; under all-reduce the others"
    )
    assert [event.kind for event in run.outcome.events] == ["lost"]


def test_who_broke_a_collective_is_told_before_those_under_whom_it_broke(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def story(children: Children) -> Story:
        children.says("learner", 0, Broken("connection reset"))
        yield
        children.says("learner", 1, m.Raised(ValueError("odd"), "the trace"))
        yield

    said, _ = failure(story, monkeypatch)
    assert said.startswith(LearnerError.__name__) and "ValueError: odd" in said


def test_a_collective_that_nobody_broke_is_told_of_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "BLAME", -1.0)

    def story(children: Children) -> Story:
        children.says("learner", 1, Broken("connection reset"))
        children.says("learner", 0, Broken("another text"))
        yield

    assert failure(story, monkeypatch)[0] == "RunError: a collective failed in learner 1: connection reset"


def test_who_returns_before_the_others_are_done_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def story(children: Children) -> Story:
        closes(children, 0)
        yield
        board(children, 1)[CALLS] = 1
        yield

    said, _ = failure(story, monkeypatch)
    assert "learner 0 returned after 3 steps while learner 1 is at a further step" in said


def test_who_meets_while_another_steps_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def story(children: Children) -> Story:
        for rank in (0, 1):
            board(children, rank)[CALLS] = 4
        children.says("learner", 0, Meet("session.mean", 1))
        yield
        board(children, 1)[CALLS] = 5
        yield

    said, _ = failure(story, monkeypatch)
    assert "learner 0 is at session.mean while learner 1 is at a further collective" in said


def test_what_all_brought_to_a_meeting_goes_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of()

    def story(children: Children) -> Story:
        children.says("learner", 1, Meet("mean", "b"))
        children.says("learner", 0, Meet("mean", "a"))
        yield
        assert [said_to(children.of("learner", rank))[-1] for rank in (0, 1)] == [["a", "b"]] * 2
        run.fail(RunError("enough"))

    lives(run, story, monkeypatch)


@pytest.mark.parametrize("late", [False, True])
def test_learners_have_a_while_to_finish_their_step_after_a_stop(
    late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "GRACE", -1.0 if late else 1000.0)
    run = run_of()

    def story(children: Children) -> Story:
        closes(children, 0)
        run.stop()
        yield
        assert children.spec_of("learner", 1).stop.words[0] == 1
        yield
        closes(children, 1)

    lives(run, story, monkeypatch)
    words = "learners 1 did not finish their step within -1 s of the stop"
    assert str(run.error) == (words if late else "None")


def test_who_waits_for_the_others_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[set[int]] = []
    run = run_of(3)
    monkeypatch.setattr(run._hanging, "look", lambda now, progress, idle, processes: looks.append(set(idle)))

    def story(children: Children) -> Story:
        board(children, 2)[WAITS] = 1
        children.says("learner", 0, Meet("mean", 1))
        yield
        run.fail(LostError("enough"))

    lives(run, story, monkeypatch)
    assert looks[-1] == {0, 2}


def test_statistics_are_what_the_boards_show(monkeypatch: pytest.MonkeyPatch) -> None:
    run, got = run_of(), list[m.Statistics]()
    monkeypatch.setattr(run, "_answer", got.append)

    def story(children: Children) -> Story:
        first, second = board(children, 0), board(children, 1)
        for word, value in enumerate((5, 4, 8, 64)):
            first[word] = value
        first[HISTOGRAM + 1] = 8
        first[LOSS] = struct.unpack("q", struct.pack("d", 0.25))[0]
        second[0], second[WAITS], second[LOSS] = 6, 1, struct.unpack("q", struct.pack("d", float("nan")))[0]
        run.command(lambda: run._questioned(3))
        yield
        run.fail(RunError("enough"))

    lives(run, story, monkeypatch)
    (said,) = got
    assert (said.number, said.steps, said.losses, said.tables) == (3, {0: 5, 1: 6}, {0: 0.25}, {})
    assert [(each.rank, each.state, each.steps) for each in said.processes] == [
        (0, "computing", 5),
        (1, "waits for the others", 6),
    ]


def test_members_and_dial_are_fixed() -> None:
    with pytest.raises(UsageError, match="no learners can be added; use topology='servers'"):
        run_of().add_learners(1)
    with pytest.raises(UsageError, match="cannot change its dial in the middle; give a course"):
        run_of().change(Sync.parse("async"))
