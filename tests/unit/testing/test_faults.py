"""A script is played on a run of real processes: who is struck, when, and what is missed. The processes are made up."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from syncline.errors import UsageError
from syncline.messages import ProcessStatistics, Statistics, TableStatistics
from syncline.protocols.staleness import Staleness
from syncline.testing import faults
from syncline.testing.faults import Faults

NONE = Staleness(gradients=0, mean=0.0, max=0, histogram={})


def process(role: str, rank: int, pid: int, state: str = "running", machine: str = "") -> ProcessStatistics:
    return ProcessStatistics(role=role, rank=rank, pid=pid, state=state, machine=machine)


class MadeUpRun:
    """Each look at it is the next of `looks`, a version and its processes; then it is over."""

    def __init__(self, *looks: tuple[int, list[ProcessStatistics]]) -> None:
        self._looks = [*looks]
        self.asked: list[tuple[str, Any]] = []
        self.refuse_dials = 0

    @property
    def done(self) -> bool:
        return not self._looks

    def statistics(self) -> Statistics:
        version, processes = self._looks[0]
        if threading.current_thread() is not threading.main_thread():  # `play` looks once, too
            self._looks.pop(0)
        table = TableStatistics(version, 0, 0, 0, NONE, {}, [], 0)
        return Statistics(0, {0: table} if version >= 0 else {}, processes=tuple(processes))

    def add_learners(self, count: int) -> None:
        self.asked.append(("add", count))

    def change(self, dial: str) -> None:
        if self.refuse_dials:
            self.refuse_dials -= 1
            raise UsageError("too early")
        self.asked.append(("change", dial))

    def stop(self) -> None:
        self.asked.append(("stop", None))


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What processes would have got."""
    got: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: got.append((pid, number)))
    monkeypatch.setattr(faults, "POLL", 0)
    return got


def played(script: str, run: MadeUpRun) -> Faults:
    found = Faults(script).play(cast(Any, run))
    found.join()
    return found


def texts(found: Faults) -> list[tuple[str, int]]:
    return [(fault.text, version) for fault, version in found.played]


def test_each_is_played_once_at_its_version_and_the_rest_is_missed(signals: list[tuple[int, int]]) -> None:
    there = [process("learner", 0, 10), process("learner", 1, 11)]
    run = MadeUpRun((-1, there), (1, there), (3, there), (4, there), (5, there))
    found = played("kill learner 1 at version 3; add 2 at version 4; stop at version 9", run)
    assert texts(found) == [("kill learner 1 at version 3", 3), ("add 2 at version 4", 4)]
    assert signals == [(11, signal.SIGKILL)] and run.asked == [("add", 2)]
    assert [fault.text for fault in found.missed] == ["stop at version 9"]


def test_after_a_kill_the_next_waits_for_another_look(signals: list[tuple[int, int]]) -> None:
    there = [process("learner", 0, 10), process("learner", 1, 11)]
    run = MadeUpRun((5, there), (2, there), (6, there))
    found = played("kill learner 0 at version 5; kill learner 1 at version 5", run)
    assert [version for _, version in found.played] == [5, 6], "the run had gone back meanwhile"


def test_the_newest_that_lives_is_struck_and_none_twice(signals: list[tuple[int, int]]) -> None:
    old = [process("learner", 0, 10), process("learner", 0, 11)]
    lost = process("learner", 0, 40, state="lost")
    looks = [[*old, process("learner", 0, 20)]] * 3 + [[*old, process("learner", 0, 30), lost]]
    run = MadeUpRun(*[(1, processes) for processes in looks])
    found = played("kill learner 0 at version 1; kill learner 0 at version 1", run)
    assert signals == [(20, signal.SIGKILL), (30, signal.SIGKILL)] and not found.missed


def test_no_shard_is_struck_while_the_loss_of_another_is_not_noticed(signals: list[tuple[int, int]]) -> None:
    before = [process("shard", 0, 10), process("shard", 1, 11)]
    after = [process("shard", 0, 10, state="lost"), process("shard", 1, 12)]
    found = played(
        "kill shard 0 at version 1; kill shard 1 at version 1",
        MadeUpRun((1, before), (1, before), (2, before), (7, after)),
    )
    assert signals == [(10, signal.SIGKILL), (12, signal.SIGKILL)]
    assert [version for _, version in found.played] == [1, 7]


def test_who_is_paused_goes_on(signals: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    later: list[tuple[float, Callable[[], None]]] = []

    class AtOnce:
        daemon = False

        def __init__(self, seconds: float, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
            later.append((seconds, lambda: function(*args)))

        def start(self) -> None:
            pass

    monkeypatch.setattr(threading, "Timer", AtOnce)
    played("pause shard 1 for 2.5 s at version 0", MadeUpRun((0, [process("shard", 1, 11)])))
    assert signals == [(11, signal.SIGSTOP)] and [seconds for seconds, _ in later] == [2.5]
    later[0][1]()
    assert signals[1:] == [(11, signal.SIGCONT)]


def test_a_process_that_is_just_gone_and_a_dial_that_is_refused_are_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[int] = []

    def kill(pid: int, number: int) -> None:
        tried.append(pid)
        if len(tried) == 1:
            raise ProcessLookupError

    monkeypatch.setattr(os, "kill", kill)
    monkeypatch.setattr(faults, "POLL", 0)
    run = MadeUpRun(*[(version, [process("learner", 0, 10)]) for version in range(4)])
    run.refuse_dials = 2
    found = played("change to async at version 0; kill learner 0 at version 0", run)
    assert tried == [10, 10] and run.asked == [("change", "async")] and not found.missed


def test_what_cannot_be_played_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match="'cut link 0-1 for 1 s at 3 s': links are cut in simulated"):
        Faults("stop at 9 s; cut link 0-1 for 1 s at 3 s").play(cast(Any, MadeUpRun()))
    with pytest.raises(UsageError, match="runs of real processes: use engine='local'"):
        Faults("stop at 9 s").play(cast(Any, MadeUpRun((0, []))))
