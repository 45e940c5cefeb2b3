"""Rank 0's clerk, on real sockets: strangers keep nobody waiting, and whoever ends, fails or leaves is known to all."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from syncline import messages as m
from syncline.dial import Course
from syncline.engines.authentication import HELLO, WAITING, Secret, introduce
from syncline.engines.run import RunSpec, Task
from syncline.engines.torchrun.engine import Line
from syncline.engines.torchrun.run_server import Apart, ControlConnection, Left, RunServer
from syncline.errors import LearnerError, LostError
from syncline.roles.allreduce_coordinator import Meet
from syncline.roles.run_plan import RunPlan
from syncline.topologies import AllReduce

PATIENCE = 20.0  # seconds until something counts as hung
ANSWER = 32 + 32


@pytest.fixture
def clerk() -> Iterator[RunServer]:
    plan = RunPlan(course=Course.of("hardsync"), learners=1, topology=AllReduce())
    clerk = RunServer(RunSpec(task=Task(print), plan=plan), "127.0.0.1")
    clerk.start()
    yield clerk
    with contextlib.suppress(OSError, LostError), call(clerk) as end:  # it may have ended
        wire = ControlConnection(end)
        wire.introduce(1, clerk.secret)  # of rank 0 there may be one
        wire.send(LostError("enough"))
    clerk.join()
    assert not any(thread.name == "syncline-clerk" for thread in threading.enumerate())


def call(clerk: RunServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", clerk.port), timeout=PATIENCE)


def meets(clerk: RunServer) -> None:
    """A learner comes in, and is answered."""
    found: list[object] = []
    line = Line(ControlConnection(call(clerk)), 0, clerk.secret)
    asking = threading.Thread(target=lambda: found.append(line.ask(Meet("a test", 7))), daemon=True)
    asking.start()
    asking.join(PATIENCE)
    line.send(LostError("enough"))
    line.why(PATIENCE)
    line.close()
    assert found == [[7]]


def exactly(end: socket.socket, length: int) -> bytes:
    return end.recv(length, socket.MSG_WAITALL)


def closed(end: socket.socket) -> bool:
    try:
        while end.recv(100):
            pass
    except ConnectionResetError:
        pass
    return True  # else the timeout is raised


def test_strangers_that_stay_silent_keep_nobody_waiting(clerk: RunServer) -> None:
    silent = [call(clerk) for _ in range(3)]
    meets(clerk)
    for end in silent:
        end.close()


def test_more_strangers_than_there_is_room_for_drive_each_other_out(clerk: RunServer) -> None:
    crowd = [call(clerk) for _ in range(WAITING + 3)]
    assert all(closed(end) for end in crowd[:3])
    meets(clerk)
    for end in crowd:
        end.close()


@pytest.mark.parametrize(
    "said", [bytes(ANSWER), b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n" + bytes(ANSWER)]
)
def test_who_says_something_else_is_turned_away(clerk: RunServer, said: bytes) -> None:
    with call(clerk) as end:
        end.sendall(said)
        assert closed(end)
    meets(clerk)


def test_what_was_heard_once_cannot_be_said_again(clerk: RunServer) -> None:
    """Somebody between a learner and rank 0 passes everything on, and says it again to rank 0 later."""
    ours, between = socket.socketpair()
    with ours, between, call(clerk) as there:
        learner = threading.Thread(target=introduce, args=(ours, clerk.secret))
        learner.start()
        between.sendall(exactly(there, len(HELLO) + 32))
        answer = exactly(between, ANSWER)
        there.sendall(answer)
        between.sendall(exactly(there, 32))
        learner.join(PATIENCE)
        assert not learner.is_alive()
        with call(clerk) as again:
            again.sendall(answer)
            assert closed(again)
        assert clerk.recorder.error is None


def wire(clerk: RunServer, rank: int) -> ControlConnection:
    found = ControlConnection(call(clerk))
    found.introduce(rank, clerk.secret)
    return found


def test_a_learner_that_ends_without_a_word_is_the_runs_end(clerk: RunServer) -> None:
    wire(clerk, 0).close()
    clerk.join()
    assert "learner 0 is lost: its process ended without a word" in str(clerk.recorder.error)
    assert [event.kind for event in clerk.recorder.outcome.events] == ["lost"]


def test_what_one_raises_is_told_to_all_with_its_traceback(clerk: RunServer) -> None:
    learner = wire(clerk, 0)
    learner.send(m.Raised(None, "a trace\nValueError: no"))
    error = learner.receive()
    assert isinstance(error, LearnerError) and error.rank == 0 and "ValueError: no" in str(error)
    learner.close()


def test_who_waits_in_a_meeting_and_who_has_left_is_known_to_all(clerk: RunServer) -> None:
    learner = wire(clerk, 0)
    learner.send(Meet("a test", 7, 3))
    assert [learner.receive(), learner.receive()] == [Apart(0, 3, what="a test"), [7]]
    learner.send(Left("value", 5, 4, signal=15))
    assert learner.receive() == Apart(0, 5, 4)
    outcome = clerk.recorder.outcome
    assert (outcome.returned, outcome.signal, outcome.interrupted) == ({0: "value"}, 15, True)
    learner.send(LostError("enough"))
    assert str(learner.receive()) == "enough"
    learner.close()


def test_rank_0_has_to_prove_itself_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        ours, (theirs, _) = socket.create_connection(door.getsockname()), door.accept()
    with ours, theirs:
        theirs.sendall(HELLO + bytes(64))
        with pytest.raises(LostError, match="is not rank 0 of this run"):
            ControlConnection(ours).introduce(1, Secret.new())
