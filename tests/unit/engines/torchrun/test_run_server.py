"""Rank 0's server on real sockets: strangers cannot block ranks, and the end or failure of one rank reaches all."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from syncline import messages as m
from syncline.dial import Course
from syncline.engines.authentication import HELLO, WAITING, Secret, introduce
from syncline.engines.run import EpochRecord, Event, Outcome, RunSpec, Task
from syncline.engines.torchrun.connection import (
    Address,
    Apart,
    ControlConnection,
    Hello,
    MeetingValues,
    RankLeft,
    RunFailure,
    StopRun,
    encode,
    pickled,
    reach,
)
from syncline.engines.torchrun.engine import Line
from syncline.engines.torchrun.rank_and_store import TorchrunPlace
from syncline.engines.torchrun.run_server import RunServer
from syncline.errors import LearnerError, LostError, SynclineWarning, UsageError
from syncline.roles.allreduce_coordinator import Meet, PeerCut, PeerEpoch
from syncline.roles.run_plan import RunPlan
from syncline.topologies import AllReduce

PATIENCE = 20.0  # seconds until something counts as hung
ANSWER = 32 + 32
WORDS = "sixteen characters or more"
SEVERAL_HOSTS = TorchrunPlace(rank=0, learners=1, local_rank=0, local=1, master="127.0.0.1")
ONE_HOST = replace(SEVERAL_HOSTS, one_host=True)
ENOUGH = RunFailure.of(LostError("enough"))


@contextlib.contextmanager
def serving(place: TorchrunPlace, learners: int = 1, **options: Any) -> Iterator[RunServer]:
    plan = RunPlan(course=Course.of("hardsync"), learners=learners, topology=AllReduce())
    server = RunServer(RunSpec(task=Task(print), plan=plan, **options), place)
    server.start()
    try:
        yield server
    finally:
        with contextlib.suppress(OSError, LostError):  # the run may have ended
            wire = rank(server, place)
            wire.send(ENOUGH)
            wire.close()
        server.join()
        assert not any(thread.name == "syncline-run-server" for thread in threading.enumerate())


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[RunServer]:
    """Serve at a TCP port."""
    monkeypatch.setenv("SYNCLINE_SECRET", WORDS)
    with serving(SEVERAL_HOSTS) as made:
        yield made


def rank(server: RunServer, place: TorchrunPlace = SEVERAL_HOSTS) -> ControlConnection:
    """Connect as a learner."""
    found = reach(place, server.address)
    found.send(Hello(0))
    return found


def call(server: RunServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.address.port), timeout=PATIENCE)


def meets(server: RunServer, place: TorchrunPlace = SEVERAL_HOSTS) -> None:
    """Connect as a learner and be answered in a meeting."""
    found: list[object] = []
    line = Line(reach(place, server.address), 0)
    asking = threading.Thread(target=lambda: found.append(line.meet("a test", 7)), daemon=True)
    asking.start()
    asking.join(PATIENCE)
    line.send(ENOUGH)
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


def test_strangers_that_stay_silent_keep_nobody_waiting(server: RunServer) -> None:
    silent = [call(server) for _ in range(3)]
    meets(server)
    for end in silent:
        end.close()


def test_more_strangers_than_there_is_room_for_drive_each_other_out(server: RunServer) -> None:
    crowd = [call(server) for _ in range(WAITING + 3)]
    assert all(closed(end) for end in crowd[:3])
    meets(server)
    for end in crowd:
        end.close()


@pytest.mark.parametrize(
    "said", [bytes(ANSWER), b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n" + bytes(ANSWER)]
)
def test_who_says_something_else_is_turned_away(server: RunServer, said: bytes) -> None:
    with call(server) as end:
        end.sendall(said)
        assert closed(end)
    meets(server)


def test_what_was_heard_once_cannot_be_said_again(server: RunServer) -> None:
    """Relay a learner's handshake to rank 0, then replay it on another connection."""
    secret = Secret.shared(server.address.run, WORDS)
    ours, between = socket.socketpair()
    with ours, between, call(server) as there:
        learner = threading.Thread(target=introduce, args=(ours, secret))
        learner.start()
        between.sendall(exactly(there, len(HELLO) + 32))
        answer = exactly(between, ANSWER)
        there.sendall(answer)
        between.sendall(exactly(there, 32))
        learner.join(PATIENCE)
        assert not learner.is_alive()
        with call(server) as again:
            again.sendall(answer)
            assert closed(again)
        assert server.recorder.error is None


def test_a_learner_that_ends_without_a_word_is_the_runs_end(server: RunServer) -> None:
    rank(server).close()
    server.join()
    assert "learner 0 is lost: its process ended without a word" in str(server.recorder.error)
    assert [event.kind for event in server.recorder.outcome.events] == ["lost"]


def test_what_one_raises_is_told_to_all_with_its_traceback(server: RunServer) -> None:
    learner = rank(server)
    learner.send(m.Raised(None, "a trace\nValueError: no"))
    error = learner.receive().error()
    assert isinstance(error, LearnerError) and error.rank == 0 and "ValueError: no" in str(error)
    learner.close()


def test_who_waits_in_a_meeting_and_who_has_left_is_known_to_all(server: RunServer) -> None:
    learner = rank(server)
    learner.send(Meet("a test", 7, 3))
    assert [learner.receive(), learner.receive()] == [Apart(0, 3, what="a test"), MeetingValues([7])]
    learner.send(RankLeft(*pickled("value"), 5, 4, signal=15))
    assert learner.receive() == Apart(0, 5, 4)
    outcome = server.recorder.outcome
    assert (outcome.returned, outcome.signal, outcome.interrupted) == ({0: pickled("value")[0]}, 15, True)
    learner.send(ENOUGH)
    assert str(learner.receive().error()) == "enough"
    learner.close()


def test_a_value_that_does_not_travel_is_named_and_nothing_else_is_lost(server: RunServer) -> None:
    learner = rank(server)

    def leave() -> None:
        learner.send(RankLeft(*pickled(threading.Lock()), 5, 4))
        assert learner.receive() == Apart(0, 5, 4)

    with pytest.warns(SynclineWarning, match=r"what learner 0 returned could not travel.*lock"):
        leave()
    assert server.recorder.outcome.returned == {0: None}
    learner.send(ENOUGH)
    learner.close()


@pytest.mark.parametrize(
    "said",
    [pickle.dumps("a pickle"), encode(StopRun())[0][:1] + bytes(7) + b"\x01\xc1", bytes([99]) + bytes(8)],
)
def test_what_is_no_message_ends_the_run_and_is_never_unpickled(server: RunServer, said: bytes) -> None:
    learner = rank(server)
    learner.socket.sendall(said + bytes(64))
    learner.socket.shutdown(socket.SHUT_WR)
    assert "learner 0 is lost" in str(learner.receive().error())
    learner.close()


def test_a_rank_that_comes_twice_is_refused_the_second_time() -> None:
    with serving(ONE_HOST, learners=2) as server:
        first = rank(server, ONE_HOST)
        first.send(Meet("a test", 7))
        assert first.receive() == Apart(0, 0, what="a test")
        second = rank(server, ONE_HOST)
        with pytest.raises(EOFError):
            second.receive()
        first.send(ENOUGH)
        assert str(first.receive().error()) == "enough"
        for wire in (first, second):
            wire.close()


def failing(record: EpochRecord) -> None:
    raise ValueError("a callback's own")


def test_every_rank_hears_that_a_callback_failed() -> None:
    with serving(ONE_HOST, callbacks=(failing,)) as server:
        learner = rank(server, ONE_HOST)
        learner.send(PeerEpoch(epoch=0, version=1, examples=1, loss=1.0, count=1))
        assert "a callback failed: ValueError: a callback's own" in str(learner.receive().error())
        learner.close()


def test_ranks_of_one_host_meet_in_a_folder_that_is_gone_when_all_have_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of TMPDIR may be longer than that of any Unix socket."""
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with serving(ONE_HOST) as server:
        folder = Path(server.address.folder)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and folder.parent == deep
        assert server.address == Address(folder=str(folder)), "nothing else is in the store"
        meets(server, ONE_HOST)
        server.join()
        assert list(deep.iterdir()) == []


AS_NOBODY = """
import os, socket, sys
path = sys.argv[2]
os.setuid(65534)
end = socket.socket(socket.AF_UNIX)
if sys.argv[1] == "calls":
    end.connect(path)
    sys.exit(end.recv(1) != b"")
end.bind(path)
end.listen()
print("listens", flush=True)
caller, _ = end.accept()
caller.recv(1)
"""
only_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


@only_root
def test_another_user_that_reaches_the_socket_is_refused() -> None:
    """Open the folder first, which keeps other users out by itself."""
    with serving(ONE_HOST) as server:
        folder = Path(server.address.folder)
        folder.chmod(0o755)
        (folder / "rank0").chmod(0o777)
        assert subprocess.run([sys.executable, "-c", AS_NOBODY, "calls", folder / "rank0"]).returncode == 0
        meets(server, ONE_HOST)


@only_root
def test_a_socket_of_another_user_is_not_rank_0() -> None:
    """Reach for a socket that another user has written into the store."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        command = [sys.executable, "-c", AS_NOBODY, "listens", f"{folder}/rank0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None and other.stdout.readline() == "listens\n"
            with pytest.raises(LostError, match="it runs as user 65534, this process as user 0"):
                reach(ONE_HOST, Address(folder=folder))
        assert other.returncode == 0


def test_rank_0_has_to_prove_itself_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCLINE_SECRET", WORDS)
    with socket.create_server(("127.0.0.1", 0)) as door:

        def pretend() -> None:
            end, _ = door.accept()
            with end:
                end.sendall(HELLO + bytes(64))
                exactly(end, ANSWER)

        threading.Thread(target=pretend, daemon=True).start()
        with pytest.raises(LostError, match="does not know the run's secret"):
            reach(SEVERAL_HOSTS, Address(port=door.getsockname()[1], run=bytes(8)))


def test_an_address_that_was_changed_in_the_store_talks_no_rank_out_of_its_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SYNCLINE_SECRET", WORDS)
    with pytest.raises(UsageError, match="rank 0 has SYNCLINE_SECRET and rank 0 has not"):
        reach(SEVERAL_HOSTS, Address(port=1, run=bytes(8), token=bytes(32)))


TENSORS = [
    torch.tensor(3.5),
    torch.zeros(0, 4),
    torch.arange(12.0).reshape(3, 4).T,
    torch.tensor([True, False]),
    torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    torch.tensor([1 + 2j], dtype=torch.complex128),
    torch.arange(5, dtype=torch.int16).requires_grad_(False),
]
OUTCOME = Outcome(
    returned={0: b"pickled", 1: None},
    tables={0: (7, {str(number): tensor for number, tensor in enumerate(TENSORS)})},
    history=[EpochRecord(epoch=0, version=7, seconds=1.0, examples=8, loss=float("inf"), losses={1: 0.5})],
    logs=[(1, 0.5, {"loss": 1.0, "name": "text", "many": [1, 2]})],
    events=[Event(seconds=1.0, what="lost", rank=1, kind="lost", details={"learner": 1})],
)
PART = PeerCut(
    number=7,
    personal=m.Personal(3, b"random", {0: TENSORS}),
    losses=(1.0, 8),
    flights={0: [(0.5, 4)]},
)


def alike(ours: Any, theirs: Any) -> bool:
    """Return whether two messages are equal, tensors in shape, dtype and values."""
    if isinstance(ours, Tensor):
        return ours.dtype == theirs.dtype and ours.shape == theirs.shape and torch.equal(ours, theirs)
    if is_dataclass(ours):
        return type(ours) is type(theirs) and all(
            alike(getattr(ours, each.name), getattr(theirs, each.name)) for each in fields(ours)
        )
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(alike(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, (list, tuple)):
        pairs = zip(ours, theirs, strict=True)
        return type(ours) is type(theirs) and all(alike(one, other) for one, other in pairs)
    return bool(ours == theirs)


@pytest.mark.parametrize(
    "message", [OUTCOME, PART, RunFailure("LearnerError", [1, "trace", "what"], OUTCOME)]
)
def test_messages_arrive_as_they_were_sent(message: Any) -> None:
    ours, theirs = map(ControlConnection, socket.socketpair())
    ours.send(message)
    assert alike(theirs.receive(), message)
    for wire in (ours, theirs):
        wire.close()


def test_states_of_optimizers_travel_in_meetings() -> None:
    state = {0: {"step": torch.tensor(1.0), "exp_avg": torch.float64, "lr": numpy.float64(0.5)}, (1, 2): None}
    ours, theirs = map(ControlConnection, socket.socketpair())
    ours.send(Meet("a state", state))
    assert alike(theirs.receive().value, state)
    with pytest.raises(
        UsageError, match="Meet holds a value of type object, which does not travel between ranks"
    ):
        ours.send(Meet("a state", object()))
    for wire in (ours, theirs):
        wire.close()
