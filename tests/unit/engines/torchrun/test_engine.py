"""One process of torchrun's: what it hears of the others from rank 0's server, and what its port passes on. The server is a script."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch

from syncline.dial import Course, Sync
from syncline.engines.collectives import CollectiveGroup
from syncline.engines.run import Outcome, RunSpec, Task
from syncline.engines.torchrun.connection import Apart, Hello, MeetingValues, RunFailure, StopRun
from syncline.engines.torchrun.engine import Line, Torchrun, TorchrunPort
from syncline.engines.torchrun.rank_and_store import TorchrunPlace
from syncline.errors import LostError, RunError, UsageError
from syncline.ports import PeerLost, Progress
from syncline.roles.allreduce_coordinator import Meet, PeerClosed
from syncline.roles.run_plan import RunPlan
from syncline.topologies import AllReduce

PLACE = TorchrunPlace(rank=2, learners=3, local_rank=0, local=1, master="host")


class Clerk:
    """Rank 0's end of the connection."""

    def __init__(self) -> None:
        self.says: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.sent: list[Any] = []
        self.gone = False
        self.heard = threading.Semaphore(0)  # counts what the line has taken in, or is about to wait for

    def receive(self) -> Any:
        self.heard.release()
        said = self.says.get()
        if said is EOFError:
            raise EOFError
        return said

    def send(self, message: Any) -> None:
        if self.gone:
            raise OSError("gone")
        self.sent.append(message)

    def close(self) -> None:
        pass


@pytest.fixture
def clerk() -> Iterator[Clerk]:
    made = Clerk()
    yield made
    made.says.put(EOFError)


@pytest.fixture
def line(clerk: Clerk) -> Line:
    made = Line(cast(Any, clerk), 2)
    clerk.heard.acquire()
    return made


def say(clerk: Clerk, *said: Any) -> None:
    """Until the line has taken it in."""
    for each in said:
        clerk.says.put(each)
        clerk.heard.acquire()


def test_a_meeting_is_answered_by_the_clerk(clerk: Clerk, line: Line) -> None:
    clerk.says.put(MeetingValues([1, 2, 3]))
    assert line.meet("a test", 7) == [1, 2, 3]
    assert clerk.sent == [Hello(2), Meet("a test", 7)]


def test_who_cannot_reach_rank_0_has_lost_it(clerk: Clerk, line: Line) -> None:
    clerk.gone = True
    with pytest.raises(PeerLost, match="rank 0 cannot be reached: gone"):
        line.send("word")


def test_the_end_of_the_connection_is_rank_0s_end(clerk: Clerk, line: Line) -> None:
    clerk.says.put(EOFError)
    with pytest.raises(PeerLost):
        line.meet("a test", 7)
    with pytest.raises(LostError, match="learner 0 is lost: its process ended, and the record with it"):
        line.end()


def test_the_record_comes_at_the_end(clerk: Clerk, line: Line) -> None:
    outcome = Outcome()
    clerk.says.put(outcome)
    assert line.end() is outcome


def test_what_has_failed_is_known_as_soon_as_it_is_said(clerk: Clerk, line: Line) -> None:
    assert line.why(0) is None
    clerk.says.put(RunFailure.of(RunError("why")))
    assert str(line.why(20.0)) == "why"


def test_a_run_that_is_to_end_says_so_and_so_does_somebody_here(clerk: Clerk, line: Line) -> None:
    port = TorchrunPort(PLACE, cast(Any, None), line, None, mute=False)
    assert not port.stopping()
    port.asked = lambda: True
    assert port.stopping()
    port.asked = lambda: False
    say(clerk, StopRun())
    assert port.stopping()


class Group:
    """In place of torch's."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def reduce(self, buffer: Any) -> str:
        self.calls.append("reduce")
        return "running"

    def broadcast(self, buffer: Any) -> None:
        self.calls.append("broadcast")


@pytest.fixture
def port(line: Line) -> TorchrunPort:
    return TorchrunPort(PLACE, cast(CollectiveGroup, Group()), line, None, mute=False)


def collectives(port: TorchrunPort, count: int) -> None:
    for _ in range(count):
        port.broadcast(torch.zeros(1))


@pytest.mark.parametrize(
    "other, words",
    [
        (Apart(1, 3, steps=3), "learner 1"),
        (Apart(1, 3, what="the end of an epoch"), "the end of an epoch"),
    ],
)
def test_nobody_waits_in_a_collective_that_somebody_takes_no_part_in(
    clerk: Clerk, line: Line, port: TorchrunPort, other: Apart, words: str
) -> None:
    collectives(port, 2)
    say(clerk, other)
    collectives(port, 1)
    with pytest.raises(PeerLost):
        port.reduce(torch.zeros(1))
    assert words in str(line.failure) and cast(Any, port)._group.calls == ["broadcast"] * 3


def test_who_is_ahead_already_is_told_at_once(clerk: Clerk, line: Line, port: TorchrunPort) -> None:
    collectives(port, 4)
    clerk.says.put(Apart(1, 3, steps=3))
    assert line.why(20.0) is not None


def test_a_meeting_that_all_came_to_holds_nobody_up_and_an_end_still_does(
    clerk: Clerk, line: Line, port: TorchrunPort
) -> None:
    say(clerk, Apart(1, 0, what="a test"), Apart(0, 2, steps=2), MeetingValues([1]))
    assert port.meet("a test", 1) == [1]
    collectives(port, 2)
    with pytest.raises(PeerLost):
        collectives(port, 1)
    assert "learner 0" in str(line.failure)


def test_of_a_meeting_the_clerk_knows_after_how_many_collectives(clerk: Clerk, port: TorchrunPort) -> None:
    collectives(port, 2)
    clerk.says.put(MeetingValues([]))
    port.meet("a test", 7)
    assert clerk.sent[-1] == Meet("a test", 7, 2)


def test_seats_but_the_first_tell_nothing_but_their_end_and_save_nothing(clerk: Clerk, line: Line) -> None:
    port = TorchrunPort(PLACE, cast(Any, None), line, None, mute=True)
    before = len(clerk.sent)
    port.tell("word")
    port.save(0, "part", {}, {})
    assert len(clerk.sent) == before
    names = PeerClosed.__dataclass_fields__
    port.tell(PeerClosed(**{**dict.fromkeys(names), "copies": {1: 2}}))
    assert clerk.sent[-1].copies == {}


def test_progress_is_shown_here_and_told_to_nobody(clerk: Clerk, line: Line, port: TorchrunPort) -> None:
    before, histogram = len(clerk.sent), {1: 1}
    given = Progress(*[0] * len(Progress._fields))._replace(histogram=histogram)
    port.tell(given)
    histogram[2] = 2
    assert len(clerk.sent) == before and port.progress is not None
    assert port.progress.histogram == {1: 1}, "a copy: the session goes on counting"


def test_what_cannot_be_among_equals_is_one_line() -> None:
    plan = RunPlan(course=Course.of("hardsync"), learners=3, topology=AllReduce())
    handle = Torchrun(PLACE).start(RunSpec(task=Task(print), plan=plan, threads=torch.get_num_threads()))
    with pytest.raises(UsageError, match="fixed membership"):
        handle.add_learners(1)
    with pytest.raises(UsageError, match="give a course"):
        handle.change(Sync.parse("async"))
    with pytest.raises(RunError, match="has not begun"):
        handle.statistics()
    with pytest.raises(TimeoutError):
        handle.wait(0)
    assert not handle.done
