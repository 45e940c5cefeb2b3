"""Another machine as the supervisor has it, over a connection that is a script: verbs go there in their order, events come back."""

from __future__ import annotations

from collections import deque
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import pytest

from syncline import messages as m
from syncline.engines.local.host_interface import Sites, Vitals
from syncline.engines.local.processes import Process
from syncline.engines.local.shared_pickle import pack
from syncline.engines.ray import remote_host
from syncline.engines.ray.agent import TASK, Begin, Do, Ended, Ready, Said, Started
from syncline.engines.ray.bulk_connection import Lost
from syncline.engines.ray.frame_kinds import Kind
from syncline.engines.ray.remote_host import RemoteHost, Way
from syncline.errors import RunError
from syncline.table.checkpoints import Folder
from tests.unit.engines.ray.doubles import SECRET

SITES = Sites((0, 1, 1), (0, 1))
BEGIN = Begin(cast(Any, None), SITES, 1, {}, None)
VITALS = Vitals({3: (1, False)}, {}, {})


class Script:
    """The connection to an agent: what it says, and what it is told. None: nothing came; an error: it breaks."""

    def __init__(self) -> None:
        self.says, self.told, self.kinds = deque[Any](), list[tuple[int, Any]](), list[int]()
        self.lost = self.closed = False

    def fileno(self) -> int:
        return -1

    def send(self, kind: int) -> None:
        self.kinds.append(kind)

    def tell(self, message: Any, *, place: int = 0) -> None:
        self.told.append((place, message))

    def keep_sending(self) -> None:
        pass

    def receive(self, seconds: float) -> Any:
        if self.lost:
            raise Lost("the connection is lost")
        said = self.says.popleft() if self.says else None
        if isinstance(said, Lost):
            self.lost = True
            raise said
        return said

    def gather(self, frame: Any) -> Any:
        return None if frame == "half" else (0, pack(frame))

    def close(self) -> None:
        self.closed = True


class Machine:
    """One, what it says, and who was told what of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.there, self.events = Script(), list[Any]()
        way = Way(("10.0.0.2", 7), SECRET, "node b", "node a", "b")
        monkeypatch.setattr(Way, "connect", lambda self: machine.there)
        machine = self
        self.host = RemoteHost(way, cast(Any, "task"), BEGIN)
        self.first = self.there.told[:]
        self.there.told.clear()
        self.host.listen(
            lambda process, word: self.events.append((process.role, process.number, word)),
            lambda process, how: self.events.append(("ended", process.role, process.number, how)),
            lambda site, why: self.events.append(("broken", site, why)),
        )

    def says(self, *said: Any) -> list[Any]:
        self.there.says.extend(said)
        self.host.receive()
        found, self.events = self.events, []
        return found

    def started(self, process: Process, pid: int) -> Process:
        assert self.says(Started(process.role, process.number, process.rank, pid)) == []
        return process


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_it_is_told_whose_connection_this_is_then_the_task_then_the_run(machine: Machine) -> None:
    assert machine.there.kinds == [Kind.CONTROL]
    assert machine.first == [(TASK, "task"), (0, BEGIN)] and machine.host.site == 1


def test_verbs_go_there_in_their_order(machine: Machine) -> None:
    host = machine.host
    shards = host.start_servers(2, SITES, {5: 1}, again=True)
    host.introduce(5, 0, 1)
    learner = host.start_learner(5, 0)
    host.tell_shards("word")
    host.announce(1, 2)
    host.kill(learner)
    host.end(shards[0])
    assert [told for _, told in machine.there.told] == [
        Do("start_servers", (2, SITES, {5: 1}), {"again": True}),
        Do("introduce", (5, 0, 1), {}),
        Do("start_learner", (5, 0), {}),
        Do("tell_shards", ("word",), {}),
        Do("announce", (1, 2), {}),
        Do("kill", ("learner", 5), {}),
        Do("end", ("shard", 1), {}),
    ]
    assert [(each.role, each.number) for each in shards] == [("shard", 1), ("shard", 2)]
    assert all(each.machine == "b" for each in host.processes)


def test_words_and_ends_belong_to_the_process_of_that_pid(machine: Machine) -> None:
    first, second = (machine.started(machine.host.start_learner(each, each), 100 + each) for each in (1, 2))
    assert machine.says(Said(102, "hello"), "half", Said(101, "yes")) == [
        ("learner", 2, "hello"),
        ("learner", 1, "yes"),
    ]
    assert machine.says(Ended(101, "signal 9")) == [("ended", "learner", 1, "signal 9")]
    assert first.reaped and not second.reaped
    machine.started(machine.host.start_learner(1, 1), 201)  # another one of that number
    assert machine.says(Said(201, "again")) == [("learner", 1, "again")]


def test_whose_end_is_ordered_is_heard_no_more_be_it_known_or_not(machine: Machine) -> None:
    known = machine.started(machine.host.start_learner(1, 0), 101)
    unknown = machine.host.start_learner(2, 0)
    machine.host.end(known)
    machine.host.end(unknown)
    machine.started(unknown, 102)
    assert machine.says(Said(101, "late"), Ended(101, "x"), Said(102, "late"), Ended(102, "x")) == []
    assert known.state == unknown.state == "killed"


def test_a_pid_that_comes_again_is_the_last_ones_that_had_it(machine: Machine) -> None:
    machine.host.end(machine.started(machine.host.start_learner(1, 0), 101))
    machine.started(machine.host.start_learner(2, 0), 101)
    assert machine.says(Said(101, "here")) == [("learner", 2, "here")]


def test_servers_that_are_ended_are_heard_no_more_and_learners_are(machine: Machine) -> None:
    shards = machine.host.start_servers(1, SITES, {}, again=False)
    machine.started(shards[0], 50)
    machine.started(machine.host.start_learner(1, 0), 101)
    machine.host.end_servers()
    assert machine.says(Ended(50, "x"), Said(101, "here")) == [("learner", 1, "here")]


def test_a_machine_without_its_relay_is_broken(machine: Machine) -> None:
    machine.host.start_servers(1, SITES, {}, again=False)
    machine.started(next(each for each in machine.host.processes if each.role == "relay"), 9)
    assert machine.says(Ended(9, "code 1")) == [("broken", 1, "its relay (pid 9) ended with code 1")]


def test_nodes_of_a_tree_are_known_when_their_machine_says_so(machine: Machine) -> None:
    machine.says(Started("node", 4, 4, 77), Started("shard", 9, 9, 78), VITALS)
    assert [(each.role, each.number, each.pid) for each in machine.host.processes] == [("node", 4, 77)]
    assert machine.host.vitals() == VITALS


def test_a_connection_that_breaks_is_said_once(machine: Machine) -> None:
    assert machine.says(VITALS, Lost("gone")) == [("broken", 1, "its agent is gone: gone")]
    assert machine.says() == [] and machine.host.vitals() == VITALS


@pytest.mark.parametrize(
    "said, words",
    [
        (
            [None, Lost("gone")],
            r"node a cannot reach the agent on node b at 10\.0\.0\.2:7: gone; open that way",
        ),
        ([None], "it does not answer any more"),
        ([Ready(True, {2: "refused"})], r"node b cannot reach the agent on node c at 10\.0\.0\.3:8: refused"),
    ],
)
def test_a_machine_that_is_not_ready_is_one_line(machine: Machine, said: list[Any], words: str) -> None:
    machine.there.says.extend(said)
    ways = {2: Way(("10.0.0.3", 8), SECRET, "node c", "node a")}
    with pytest.raises(RunError, match=words) as error:
        machine.host.wait_ready(lambda: bool(machine.there.says), None, ways)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("sees", [True, False])
def test_a_machine_that_does_not_see_the_folder_gets_its_content(
    machine: Machine, sees: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def content(message: m.MakeTable, folder: Folder) -> m.MakeTable:
        return replace(message, content=cast(Any, folder.root))

    monkeypatch.setattr(remote_host, "with_content", content)
    machine.there.says.append(Ready(sees, {}))
    machine.host.wait_ready(lambda: True, Folder(tmp_path), {})
    others: dict[str, Any] = dict.fromkeys(field.name for field in fields(m.MakeTable))
    asked = m.MakeTable(**{**others, "source": "checkpoint"})
    machine.host.tell_shards(asked)
    (told,) = machine.there.told[-1][1].given
    read = replace(asked, source=None, content=cast(Any, tmp_path))
    assert told == (asked if sees else read)
