"""A node's agent, spoken to as its supervisor speaks to it; its processes and its part of the run are doubles."""

from __future__ import annotations

import contextlib
import queue
import select
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from syncline.dial import Course
from syncline.engines.authentication import connect
from syncline.engines.local.host_interface import Sites, Vitals
from syncline.engines.local.processes import Process
from syncline.engines.local.shared_pickle import unpack
from syncline.engines.ray import agent as module
from syncline.engines.ray.agent import TASK, Agent, Begin, Do, Ended, Ready, Said, Started, describe, versions
from syncline.engines.ray.frame_kinds import WORD, Kind, ObjectConnection
from syncline.engines.ray.relay import Link
from syncline.engines.run import RunSpec, Storage, Task
from syncline.roles.run_plan import RunPlan
from syncline.topologies import Servers
from tests.unit.engines.ray.doubles import SECRET

PLAN = RunPlan(course=Course.of("async"), learners=1, topology=Servers(1, fixed=True))
SPEC = RunSpec(task=Task(abs), plan=PLAN, storage=Storage(folder="/some/folder"))


class Processes:
    """None are started: what is watched is heard."""

    def __init__(self, heard: Any, ended: Any) -> None:
        self.heard, self.ended = heard, ended
        self.by_pid: dict[int, Process] = {}
        self._watched: dict[int, Any] = {}
        self.closed = False

    def watch(self, fd: int, action: Any) -> None:
        self._watched[fd] = action

    def work(self, seconds: float) -> None:
        for fd in select.select(list(self._watched), [], [], seconds)[0]:
            self._watched[fd]()

    def close(self, *, kill: bool) -> None:
        self.closed = kill


class Host:
    """This machine's part: says what it was told."""

    def __init__(
        self, spec: RunSpec, processes: Any, task: Any, heard: Any, ended: Any, **options: Any
    ) -> None:
        self.spec, self.task, self._forks, self.hear, self.lose = spec, task, processes, heard, ended
        self.options = options
        self.relay: Any = None
        self.generation, self.relay_beats = 0, 9
        self.linked: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self.closed = threading.Event()
        self.shown = Vitals({}, {}, {})

    def vitals(self) -> Vitals:
        return self.shown

    def start_learner(self, learner: int, rank: int) -> None:
        pid = 100 + len(self._forks.by_pid)
        self._forks.by_pid[pid] = Process("learner", learner, rank, pid, cast(Any, None))

    def start_servers(self, generation: int) -> None:
        self.generation = generation
        self.relay = SimpleNamespace(channel=SimpleNamespace(post=self._link))

    def _link(self, link: Link) -> None:
        self.linked.put((link.site, self.generation))

    def announce(self, word: int, value: int) -> None:
        """The process that has this pid says so, or ends."""
        process = self._forks.by_pid[word]
        self._forks.ended(process, "code 1") if value else self._forks.heard(process, "hello")

    def kill(self, process: Process) -> None:
        self._forks.heard(process, "killed")

    def close(self) -> None:
        assert self._forks.closed
        self.closed.set()


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    monkeypatch.setattr(module, "Processes", Processes)
    monkeypatch.setattr(module, "LocalHost", Host)
    with contextlib.closing(Agent(SECRET, "127.0.0.1", path=[], folder="")) as made:
        yield made


class Caller(ObjectConnection):
    """The supervisor's connection."""

    def __init__(self, agent: Agent) -> None:
        super().__init__(connect(agent.about().address, SECRET), SECRET)
        self.send(Kind.CONTROL)

    def hears(self, count: int) -> list[Any]:
        found: list[Any] = []
        while len(found) < count:
            if (frame := self.receive(None)) is not None and (parcel := self.gather(frame)) is not None:
                found.append(unpack(parcel[1]))
        return found

    def begins(
        self, *, token: str | None = None, addresses: dict[int, tuple[str, int]] | None = None
    ) -> Ready:
        self.tell("the task", place=TASK)
        self.tell(Begin(SPEC, Sites((1,), (0, 1, 2)), 1, addresses or {}, token))
        ready, vitals = self.hears(2)
        assert isinstance(vitals, Vitals)
        return ready


@pytest.fixture
def caller(agent: Agent) -> Iterator[Caller]:
    with contextlib.closing(Caller(agent)) as made:
        yield made


def test_it_says_where_it_is_and_what_it_is(agent: Agent) -> None:
    assert agent.about().address[0] == "127.0.0.1" and agent.about().versions == versions()


def test_versions_that_differ_are_named() -> None:
    mine = versions()
    assert describe(mine, mine) == ""
    assert describe((mine[0], "1.0", mine[2]), mine) == f"torch 1.0 (here {mine[1]})"


@pytest.mark.parametrize("sees", [True, False])
def test_whoever_does_not_see_the_folder_works_without_it(agent: Agent, caller: Caller, sees: bool) -> None:
    agent.sees = lambda token: sees and token == "token"
    assert caller.begins(token="token") == Ready(sees, {})
    host = cast(Any, agent.host)
    assert host.spec.storage == (SPEC.storage if sees else Storage())
    assert unpack(host.task) == "the task" and host.options["site"] == 1


def test_a_machine_that_it_cannot_reach_is_named(agent: Agent, caller: Caller) -> None:
    nowhere = ("127.0.0.1", 1)
    ready = caller.begins(addresses={0: agent.about().address, 2: nowhere, 3: nowhere})
    assert list(ready.cut) == [2] and "refused" in ready.cut[2]  # 3 is not of the run


def test_what_is_ordered_is_done_and_what_happens_is_told(agent: Agent, caller: Caller) -> None:
    caller.begins()
    for learner in (4, 5):
        caller.tell(Do("start_learner", (learner, 0), {}))
    assert caller.hears(2) == [Started("learner", 4, 0, 100), Started("learner", 5, 0, 101)]
    caller.tell(Do("announce", (101, 0), {}))
    caller.tell(Do("announce", (100, 1), {}))
    assert caller.hears(2) == [Said(101, "hello"), Ended(100, "code 1")]


def test_of_processes_of_one_number_the_last_is_meant(agent: Agent, caller: Caller) -> None:
    caller.begins()
    for _ in range(2):
        caller.tell(Do("start_learner", (4, 0), {}))
    caller.tell(Do("kill", ("learner", 9), {}))  # there is none
    caller.tell(Do("kill", ("learner", 4), {}))
    assert caller.hears(3)[-1] == Said(101, "killed")


def test_relays_that_connect_wait_for_the_relay_of_their_generation(agent: Agent, caller: Caller) -> None:
    caller.begins()
    links = []
    for site, generation in ((2, 1), (3, 2), (4, 0)):
        links.append(ObjectConnection(connect(agent.about().address, SECRET), SECRET))
        links[-1].send(Kind.LINK, place=site, generation=generation)
    linked = []
    for generation in (1, 2):
        caller.tell(Do("start_servers", (generation,), {}))
        linked.append(cast(Any, agent.host).linked.get())
    assert linked == [(2, 1), (3, 2)]
    for each in links:
        each.close()


def test_its_pulse_tells_of_its_relay_and_of_who_was_turned_away(agent: Agent, caller: Caller) -> None:
    caller.begins()
    with contextlib.closing(ObjectConnection(connect(agent.about().address, SECRET), SECRET)) as pulse:
        pulse.send(Kind.PULSE)
        frame = pulse.receive(None)
        assert frame is not None and list(WORD.iter_unpack(frame.body)) == [(0,), (9,)]


def test_when_its_caller_is_gone_nothing_stays(agent: Agent, caller: Caller) -> None:
    caller.begins()
    caller.close()
    assert cast(Any, agent.host).closed.wait()
