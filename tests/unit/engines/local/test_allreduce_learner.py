"""A learner under all-reduce: what it shows of itself, and how it says that it has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline import messages as m
from syncline.engines.local import allreduce_learner as learner
from syncline.engines.local.allreduce_learner import (
    CALLS,
    WAITS,
    AllReduceLearnerSpec,
    Broken,
    LocalCollectivePort,
    board_bytes,
    read_board,
    run_peer,
)
from syncline.engines.local.shared_memory import Region
from syncline.engines.run import Task
from syncline.ports import PeerLost, Progress, Reduction, RunStopped
from syncline.roles.allreduce_coordinator import Meet
from syncline.roles.run_plan import Seat
from tests.unit.engines.local.doubles import Post, spec_of

seen: list[int] = []  # whether it showed that it waits, in the middle of a collective


class Group:
    """In place of Gloo's: collectives look at the board meanwhile."""

    sliced, board, closed = True, Region(board_bytes(1000)).words, 0

    def __init__(self, *args: Any, **options: Any) -> None:
        seen.append(self.board[WAITS])

    def reduce(self, buffer: Any) -> Reduction:
        return Sum()

    def broadcast(self, buffer: Any) -> None:
        seen.append(self.board[WAITS])

    def close(self) -> None:
        Group.closed += 1


class Sum(Reduction):
    def wait(self, *, block: bool = True) -> bool:
        seen.append(Group.board[WAITS])
        if block:
            raise PeerLost("connection reset by peer")
        return False


@pytest.fixture
def spec(monkeypatch: pytest.MonkeyPatch) -> AllReduceLearnerSpec:
    monkeypatch.setattr(learner, "CollectiveGroup", Group)
    monkeypatch.setattr(learner.dist, "FileStore", lambda *given: None)
    monkeypatch.setattr(Group, "closed", 0)
    seen.clear()
    board = Region(board_bytes(1000))
    monkeypatch.setattr(Group, "board", board.words)
    return AllReduceLearnerSpec(Seat(plan=spec_of().plan, rank=1), "meeting", board, Region(8), False)


def ported(spec: AllReduceLearnerSpec, post: Any = None) -> LocalCollectivePort:
    return LocalCollectivePort(post or Post(), spec)


counts = st.integers(0, 2**62)


@settings(max_examples=50)
@given(
    counts,
    counts,
    counts,
    counts,
    st.floats(),
    st.dictionaries(st.integers(0, 1000), st.integers(1, 2**62)),
)
def test_what_a_learner_shows_is_read_as_it_was(
    started: int, version: int, gradients: int, examples: int, loss: float, histogram: dict[int, int]
) -> None:
    region = Region(board_bytes(1000))
    post: Any = Post()
    port = object.__new__(LocalCollectivePort)
    port._board, port._channel = region.words, post  # no group is joined
    region.words[WAITS], region.words[CALLS] = 1, 77
    port.tell(Progress(started, version, gradients, examples, loss, histogram))
    found = read_board(region.words)
    assert found[:4] == (started, version, gradients, examples) and found.histogram == histogram
    assert found.loss == loss or loss != loss != found.loss
    assert (region.words[WAITS], region.words[CALLS]) == (1, 77) and not post.said


def test_what_is_no_progress_goes_to_the_supervisor(spec: AllReduceLearnerSpec) -> None:
    post: Any = Post([["a", 2], ["b", 3]])
    port = ported(spec, post)
    port.tell(m.Log({"x": 1}))
    assert port.meet("session.mean", 3) == [["a", 2], ["b", 3]]
    assert post.said == [m.Log({"x": 1}), Meet("session.mean", 3)]


def test_collectives_are_counted_and_shown_while_they_wait(spec: AllReduceLearnerSpec) -> None:
    port, words = ported(spec), spec.board.words
    port.broadcast(torch.zeros(1))
    reduction = port.reduce(torch.zeros(1))
    assert not reduction.wait(block=False)
    with pytest.raises(PeerLost):
        reduction.wait()
    assert seen == [1, 1, 0, 1], "joining, a broadcast, a look, a wait"
    assert (words[CALLS], words[WAITS]) == (2, 0)


def test_the_stop_is_a_word_of_the_supervisors(spec: AllReduceLearnerSpec) -> None:
    port = ported(spec)
    assert not port.stopping()
    spec.stop.words[0] = 1
    assert port.stopping()


@pytest.mark.parametrize("sliced", [False, True])
def test_a_group_that_may_go_with_the_process_is_not_waited_for(
    sliced: bool, spec: AllReduceLearnerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Group, "sliced", sliced)
    ported(spec).close()
    assert Group.closed == (not sliced)


def ends(function: Callable[..., Any], spec: AllReduceLearnerSpec, *letters: Any) -> tuple[int, list[Any]]:
    """Its exit code, and its last words."""
    post: Any = Post(Task(function), *letters)
    return run_peer(post, spec), post.said


class Session:
    def __init__(self, *given: Any) -> None:
        pass

    def seed(self) -> None:
        pass

    @contextmanager
    def until_stopped(self) -> Iterator[None]:
        with suppress(RunStopped):
            yield

    def close(self) -> None:
        pass


def test_who_returns_stays_until_it_may_leave(
    spec: AllReduceLearnerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner, "AllReduceSession", Session)
    assert ends(lambda session: 42, spec, None) == (0, [m.Returned(42)])
    assert ends(lambda session: 42, spec) == (0, [m.Returned(42)]), "the supervisor is gone"


def test_who_raises_and_who_misses_another_say_so(
    spec: AllReduceLearnerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner, "AllReduceSession", Session)

    def raising(session: Any) -> None:
        raise ValueError("no data")

    def broken(session: Any) -> None:
        raise PeerLost("connection reset")

    code, (raised,) = ends(raising, spec)
    assert code == 1 and str(raised.error) == "no data" and "in raising" in raised.traceback
    assert ends(broken, spec) == (1, [Broken("connection reset")])
