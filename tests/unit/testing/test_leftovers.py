"""What outlives its test is named and ended; what may stay does. Processes are made up, threads are real."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from syncline.engines import live_runs as live
from syncline.engines.local import forkserver
from syncline.testing import leftovers
from syncline.testing.leftovers import children, end_leftovers

ME, SERVER, WARM = os.getpid(), 2**22 + 1, 2**22 + 2  # pids that no process has


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Three processes are this one's, one is the fork server's, one a warm one's."""
    family = {ME: {SERVER, WARM, 2**22 + 3}, SERVER: {2**22 + 4}, WARM: {2**22 + 5}}
    found: list[int] = []
    monkeypatch.setattr(leftovers, "children", family.__getitem__)
    monkeypatch.setattr(forkserver, "pid", lambda: SERVER)
    monkeypatch.setattr(leftovers, "warm", {WARM})
    monkeypatch.setattr(os, "kill", lambda pid, number: found.append(pid))
    return found


def test_processes_are_ended_but_for_those_that_stay_from_test_to_test(killed: list[int]) -> None:
    said = end_leftovers()
    assert sorted(killed) == [2**22 + 3, 2**22 + 4, 2**22 + 5]
    assert sorted(said) == [f"process {pid}: gone" for pid in sorted(killed)]


def test_torch_s_and_python_s_own_are_left_alone(killed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "children", lambda pid: {ME})
    own = Path("/proc/self/cmdline").read_text().replace("\0", " ").strip()[:200]
    assert end_leftovers() == [f"process {ME}: {own}"] and killed == [ME]
    monkeypatch.setattr(leftovers, "KEPT", ("what nobody runs", own[:20]))
    assert end_leftovers() == [] and killed == [ME]


def test_a_thread_of_ours_is_waited_for_and_named_if_it_stays(
    killed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    goes, stays = threading.Event(), threading.Event()
    monkeypatch.setattr(leftovers, "PATIENCE", 0.0)
    ours = threading.Thread(target=stays.wait, name="syncline-writer", daemon=True)
    other = threading.Thread(target=goes.wait, name="a-user-s", daemon=True)
    for thread in (ours, other):
        thread.start()
    assert [each for each in end_leftovers() if "thread" in each] == ["thread syncline-writer"]
    stays.set()
    monkeypatch.setattr(leftovers, "PATIENCE", None)  # until it has ended
    assert not [each for each in end_leftovers() if "thread" in each]
    goes.set()
    other.join()


class GoesOn:
    """A run that somebody forgot."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def stop(self) -> None:
        self.said.append("stop")

    def end(self, seconds: float) -> None:
        self.said.append(seconds)
        live.ended(cast(Any, self))


def test_a_run_that_goes_on_is_ended(killed: list[int]) -> None:
    run = GoesOn()
    live.began(cast(Any, run))
    assert end_leftovers()[0] == "a run that goes on (GoesOn)"
    assert run.said == ["stop", live.LONGEST] and live.live() == []


def test_children_of_nobody_are_none() -> None:
    assert children(2**22 + 9) == set()
