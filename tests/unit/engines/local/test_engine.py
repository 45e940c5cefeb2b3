"""The local engine's front door: which supervisor runs what, and what a caller hears of its run."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from syncline import messages as m
from syncline.engines import live_runs as live
from syncline.engines.local import engine
from syncline.engines.local.engine import Local, LocalHandle
from syncline.engines.local.processes import Process
from syncline.errors import RunError, UsageError
from syncline.topologies import AllReduce, Servers, Trees
from tests.unit.engines.local.doubles import spec_of


class Run:
    """In place of a supervisor: goes on until it is told to stop, or fails."""

    made: Any = None

    def __init__(self, *given: Any) -> None:
        Run.made = self
        self.given, self.done, self.told = given, threading.Event(), threading.Event()
        self.error: BaseException | None = None
        self.outcome = SimpleNamespace(interrupted=False)
        channel: Any = None
        self.processes = [Process("shard", 0, 0, 7, channel), Process("learner", 3, 1, 8, channel)]
        self.processes.append(Process("learner", 4, 2, 9, channel, state="lost"))

    def prepare(self) -> None:
        pass

    def main(self) -> None:
        self.told.wait()
        self.done.set()

    def stop(self, *, interrupted: bool = False) -> None:
        self.outcome.interrupted = interrupted
        self.told.set()

    def fail(self, error: BaseException) -> None:
        self.error = error
        self.told.set()

    def command(self, action: Any) -> None:
        action()

    def ask_statistics(self) -> m.Statistics:
        return m.Statistics(5)


@pytest.fixture(autouse=True)
def kinds(monkeypatch: pytest.MonkeyPatch) -> dict[str, type[Run]]:
    found = {
        name: type(name, (Run,), {}) for name in ("Supervisor", "AllReduceSupervisor", "BatchSupervisor")
    }
    for name, kind in found.items():
        monkeypatch.setattr(engine, name, kind)
    return found


@pytest.mark.parametrize(
    "topology, batch, kind",
    [
        (Servers(2, True), None, "Supervisor"),
        (Trees(fan_in=2), None, "Supervisor"),
        (AllReduce(), None, "AllReduceSupervisor"),
        (Servers(2, True), object(), "BatchSupervisor"),
    ],
)
def test_each_kind_of_run_has_its_supervisor(topology: Any, batch: Any, kind: str, kinds: Any) -> None:
    handle = LocalHandle(spec_of(topology=topology, batch=batch), {"shard 0": 3})
    assert type(Run.made) is kinds[kind] and ({"shard 0": 3} in Run.made.given) == (
        kind != "AllReduceSupervisor"
    )
    handle.stop()
    handle.wait()


def test_a_run_goes_on_until_it_is_told_to_stop_and_then_gives_what_is_left_of_it() -> None:
    handle = Local().start(spec_of())
    assert not handle.done and handle.pids() == {"shard 0": 7, "learner 1": 8}
    with pytest.raises(TimeoutError, match=r"the run goes on after 0\.0 s"):
        handle.wait(0.0)
    assert handle.statistics() == m.Statistics(5)
    handle.interrupt(2)
    assert handle.wait() is Run.made.outcome and handle.done and Run.made.outcome.interrupted


def test_what_a_run_failed_with_is_raised_to_whoever_waits() -> None:
    handle = LocalHandle(spec_of())
    Run.made.fail(RunError("no data"))
    with pytest.raises(RunError, match="no data"):
        handle.wait()


def test_a_run_that_does_not_stop_in_time_is_ended_in_the_middle() -> None:
    handle = LocalHandle(spec_of())
    handle.end(0.0)
    with pytest.raises(KeyboardInterrupt):
        handle.wait()


def test_a_run_that_stopped_in_time_is_not_ended() -> None:
    handle = LocalHandle(spec_of())
    handle.stop()
    handle.end(60.0)
    assert handle.wait() is Run.made.outcome


def test_a_run_is_known_as_live_until_all_of_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(live, "began", lambda run: order.append("began"))
    monkeypatch.setattr(live, "ended", lambda run: order.append("ended"))
    monkeypatch.setattr(LocalHandle, "_closed", lambda run: order.append("closed"))
    handle = LocalHandle(spec_of())
    handle.stop()
    handle.wait()
    assert order == ["began", "ended", "closed"]


def test_another_system_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.sys, "platform", "darwin")
    Run.made = None
    with pytest.raises(UsageError, match=r'engine="local" needs Linux .*darwin; use engine="sim"'):
        Local().start(spec_of())
    assert Run.made is None
