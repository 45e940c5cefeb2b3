"""In place of a run's processes: who was started and what each was told; and of waiting: whoever would wait hears how a story goes on."""

from __future__ import annotations

import gc
import os
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from syncline.dial import Course
from syncline.engines.local import supervisor_base
from syncline.engines.local.control_channel import NOTHING, Closed
from syncline.engines.local.processes import Process
from syncline.engines.local.shared_pickle import Parcel, pack, unpack
from syncline.engines.run import RunSpec, Task
from syncline.roles.run_plan import RunPlan
from syncline.table.layout import Layout, lay_out
from syncline.topologies import Servers, Topology

Story = Iterator[None]
ONE_SHARD = Servers(1, True)


def unpack_again(parcel: Parcel) -> Any:
    """As another process would: with descriptors of its own."""
    fds = [os.dup(fd) for fd in parcel.fds]
    return unpack(Parcel(parcel.pickled, parcel.inline, fds, parcel.bulk))


def open_descriptors() -> set[str]:
    """Of this process; what earlier tests have left to the garbage collector is closed before."""
    gc.collect()
    return set(os.listdir("/proc/self/fd"))


def sent(message: Any) -> Any:
    """As it arrives in another process."""
    parcel = message if isinstance(message, Parcel) else pack(message)
    found = unpack_again(parcel)
    if parcel is not message:
        parcel.close()
    return found


class Post:
    """One end of a control channel: `said` has arrived at the other, `letters` lie here to be received."""

    def __init__(self, *letters: Any) -> None:
        self.said: list[Any] = []
        self.letters = deque(letters)

    def post(self, message: Any) -> None:
        self.said.append(sent(message))

    send = try_send = post

    def receive(self) -> Any:
        if not self.letters:
            raise Closed
        return self.letters.popleft()

    def take(self) -> Any:
        return self.letters.popleft() if self.letters else NOTHING

    def fileno(self) -> int:
        return 1000

    def close(self) -> None:
        pass

    def of(self, kind: type) -> list[Any]:
        """What was said of that kind."""
        return [message for message in self.said if isinstance(message, kind)]


class Turns:
    """In place of a waiter: the story goes on wherever it would wait; at its end the channel closes."""

    def __init__(self, story: Story, post: Post | None = None) -> None:
        self._story, self._post = story, post

    def watch(self, fd: int) -> None:
        pass

    def busy(self) -> None:
        pass

    def turn(self, *, worked: bool, seconds: float = 1.0) -> set[int]:
        return set() if worked else self.wait(seconds)

    def wait(self, seconds: float = 1.0) -> set[int]:
        for _ in self._story:
            return {self._post.fileno()} if self._post is not None and self._post.letters else set()
        raise Closed


class Children:
    """In place of a run's processes."""

    def __init__(self, heard: Any = None, ended: Any = None, story: Story | None = None) -> None:
        self._heard, self._ended, self._story = heard, ended, story or iter(())
        self.by_pid: dict[int, Process] = {}
        self.runs: dict[int, Any] = {}
        self.threads: dict[int, int] = {}
        self._watched: list[Any] = []
        self._told = False  # all of the story
        self.killed: list[Process] = []
        self.closed: bool | None = None

    def fork(
        self,
        role: str,
        number: int,
        rank: int,
        run: Any,
        bell: Any = None,
        threads: int = 1,
        part: str | None = None,
    ) -> Process:
        pid = 100 + len(self.by_pid)
        channel: Any = Post()
        self.by_pid[pid] = Process(role, number, rank, pid, channel, bell)
        self.runs[pid], self.threads[pid] = run, threads
        return self.by_pid[pid]

    def of(self, role: str, rank: int = 0) -> Process:
        """The last that was started."""
        return [each for each in self.by_pid.values() if (each.role, each.rank) == (role, rank)][-1]

    def spec_of(self, role: str, rank: int = 0) -> Any:
        return self.runs[self.of(role, rank).pid].keywords["spec"]

    def says(self, role: str, rank: int, message: Any) -> None:
        self._heard(self.of(role, rank), message)

    def ends(self, role: str, rank: int, how: str = "signal SIGKILL") -> None:
        self._ended(self.of(role, rank), how)

    def watch(self, fd: int, action: Any) -> None:
        self._watched.append(action)

    def work(self, seconds: float) -> None:
        for action in self._watched:
            action()
        for _ in self._story:
            return
        assert not self._told, "the run goes on when its story is over"
        self._told = True

    def kill(self, process: Process) -> None:
        self.killed.append(process)

    def kill_and_reap(self, processes: list[Process]) -> None:
        for process in processes:
            process.state = "killed"

    def close(self, *, kill: bool) -> None:
        self.closed = kill


def lives(run: Any, story: Callable[[Children], Story], monkeypatch: pytest.MonkeyPatch) -> Children:
    """All of a run, on this thread: the story tells what happens whenever its supervisor waits; timers are looked at always."""
    made: list[Children] = []

    def children(heard: Any, ended: Any, crashes: Any, run: str) -> Children:
        def told() -> Story:
            yield from story(made[0])

        made.append(Children(heard, ended, told()))
        return made[0]

    monkeypatch.setattr(supervisor_base, "Processes", children)
    monkeypatch.setattr(supervisor_base, "LOOK", -1.0)
    run.prepare()
    run.main()
    assert run.done.is_set()
    if isinstance(run.error, AssertionError):
        raise run.error
    return made[0]


def said_to(process: Process) -> list[Any]:
    post: Any = process.channel
    return post.said  # type: ignore[no-any-return]


def layout_of(*sizes: int, shards: int = 1, buffers: int = 0) -> Layout:
    """Of parameters of so many elements; cut between shards where that pays."""
    model = nn.ParameterList([torch.zeros(size) for size in sizes])
    if buffers:
        model.register_buffer("means", torch.zeros(buffers))
    return lay_out(model, [model.parameters()], cuttable=True, shards=shards)[0]


def spec_of(
    learners: int = 2,
    topology: Topology = ONE_SHARD,
    *,
    dial: str = "hardsync",
    plan: dict[str, Any] | None = None,
    **options: Any,
) -> RunSpec:
    made = RunPlan(course=Course.of(dial), learners=learners, topology=topology, **(plan or {}))
    return RunSpec(task=Task(print), plan=made, **options)
