"""Who is declared dead, and who is not: the clock is the test's, agents are scripts, and the test ends in the thread's own look."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from syncline.engines.local.shared_memory import WakeUp
from syncline.engines.ray import heartbeat
from syncline.engines.ray.bulk_connection import SILENT, Frame, Lost
from syncline.engines.ray.frame_kinds import WORD, Kind
from syncline.engines.ray.heartbeat import EVERY, Heartbeat

STEP = 0.25  # seconds that pass between two looks


class Agent:
    """One, and the connection to it: it answers so many of its caller's words."""

    def __init__(
        self, *, answers: float = float("inf"), beats: Callable[[int], int] = lambda count: 0
    ) -> None:
        self._answers, self._beats, self._bell = answers, beats, WakeUp()
        self._bell.ring()
        self.asked = self.answered = 0
        self.breaks = self.closed = False
        self.node = "node b"

    def connect(self) -> Agent:
        return self

    def notice_silence(self) -> None:
        pass

    def fileno(self) -> int:
        return self._bell.fd

    def send(self, kind: int) -> None:
        assert kind == Kind.PULSE
        self.asked += 1

    def receive(self, seconds: float) -> Frame | None:
        if self.breaks:
            raise Lost("the connection broke")
        if self.answered >= min(self.asked, self._answers):
            return None
        self.answered += 1
        body = WORD.pack(self.answered) + WORD.pack(self._beats(self.answered))
        return Frame(Kind.PULSE, 0, 0, memoryview(body))

    def close(self) -> None:
        self.closed = True


class Watch:
    """So many looks at these agents."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, undo: contextlib.ExitStack) -> None:
        self.now, self.step = 100.0, STEP
        self._undo = undo
        monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: self.now))

    def over(
        self, *agents: Agent, looks: int = 40, then: Callable[[int], Any] = lambda look: None
    ) -> Heartbeat:
        over, end, count = threading.Event(), threading.Event(), 0

        def look() -> None:
            nonlocal count
            self.now += self.step
            then(count)
            count += 1
            if count == looks:
                over.set()
                end.wait()  # nothing moves while the test looks

        pulse = self.pulse = Heartbeat(dict(enumerate(agents, 1)))  # type: ignore[arg-type]
        self._undo.callback(pulse.close)
        self._undo.callback(end.set)
        pulse.look = look  # no time has passed before
        over.wait()
        return pulse


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    with contextlib.ExitStack() as undo:
        yield Watch(monkeypatch, undo)


def declared(pulse: Heartbeat) -> list[tuple[int, str]]:
    found = []
    while not pulse.dead.empty():
        found.append(pulse.dead.get())
    return found


def test_who_answers_is_asked_again_every_second_and_lives(watch: Watch) -> None:
    agent = Agent(beats=lambda count: count)
    pulse = watch.over(agent)
    assert declared(pulse) == [] and pulse.alive(1) and not pulse.alive(2)
    assert agent.asked == pytest.approx(40 * STEP / EVERY, abs=1)
    assert pulse.refused == agent.answered


def test_who_is_silent_is_declared_dead_once_and_heard_no_more(
    watch: Watch, capsys: pytest.CaptureFixture[str]
) -> None:
    silent, other = Agent(answers=2), Agent()
    pulse = watch.over(silent, other, looks=60)
    assert declared(pulse) == [(1, f"it has not answered for {SILENT:g} s")]
    assert silent.closed and not pulse.alive(1) and pulse.alive(2)
    assert capsys.readouterr().err == f"syncline: node node b is lost: it has not answered for {SILENT:g} s\n"


def test_who_is_asked_seldom_is_not_silent(watch: Watch) -> None:
    """The caller's own process stands still again and again, for longer than a node may."""
    watch.step = 2 * SILENT
    pulse = watch.over(Agent(), Agent(answers=0))
    assert declared(pulse) == []


def test_nobody_is_silent_because_the_caller_stood_still_in_the_middle_of_a_look(watch: Watch) -> None:
    class Last(Agent):
        def send(self, kind: int) -> None:
            super().send(kind)
            if self.asked == 3:
                watch.now += 2 * SILENT

    pulse = watch.over(Agent(), Last())
    assert declared(pulse) == []


def test_a_relay_that_stands_still_is_its_nodes_end_and_one_that_has_not_begun_is_not(watch: Watch) -> None:
    pulse = watch.over(Agent(beats=lambda count: min(count, 3)), Agent(), Agent(beats=lambda count: count))
    assert declared(pulse) == [(1, f"its relay has done nothing for {SILENT:g} s")]


def test_a_connection_that_breaks_is_the_end_at_once(watch: Watch) -> None:
    agent = Agent()

    def breaks(look: int) -> None:
        agent.breaks = look >= 3

    pulse = watch.over(agent, Agent(), looks=8, then=breaks)
    assert declared(pulse) == [(1, "the connection broke")]


def test_the_first_reason_counts(watch: Watch) -> None:
    def declares(look: int) -> None:
        if look == 10:
            watch.pulse.declare(2, "no way")
            watch.pulse.declare(2, "another reason")

    pulse = watch.over(Agent(), Agent(), looks=20, then=declares)
    assert declared(pulse) == [(2, "no way")] and pulse.alive(1)


def test_a_way_that_cannot_be_had_leaves_no_connection_behind() -> None:
    first = Agent()
    second = SimpleNamespace(connect=lambda: (_ for _ in ()).throw(OSError("no way")))
    with pytest.raises(OSError, match="no way"):
        Heartbeat({1: first, 2: second})  # type: ignore[dict-item]
    assert first.closed


def test_all_connections_are_closed_at_the_end() -> None:
    agents = [Agent(), Agent()]
    Heartbeat(dict(enumerate(agents))).close()  # type: ignore[arg-type]
    assert all(agent.closed for agent in agents)
