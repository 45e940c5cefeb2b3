"""Small clusters for tests: the agents of several nodes on this machine, without Ray.

Real processes and real connections; only what Ray does (placing and watching actors) is done here.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NoReturn

from syncline.engines.authentication import Secret
from syncline.engines.local import forkserver
from syncline.engines.ray.agent import About, Agent
from syncline.engines.ray.cluster import RayCluster
from syncline.engines.ray.engine import Ray
from syncline.engines.ray.link_measurement import Address, Echo
from syncline.engines.ray.placement import Node
from syncline.testing import leftovers
from syncline.testing.leftovers import children

PATIENCE = 30.0  # seconds that an agent has to end
Through = Callable[[tuple[str, int]], tuple[str, int]]


class ApartAgent:
    """A node of its own processes: they can be killed, frozen and thawed."""

    def __init__(self, about: About) -> None:
        self._about, self._end = about, os.pidfd_open(about.pid)

    def about(self) -> About:
        return self._about

    @property
    def pids(self) -> list[int]:
        """The agent first, then what it has started."""
        found = [self._about.pid]
        for pid in found:
            found += children(pid)
        return found

    def signal(self, number: int, *, all_of_it: bool) -> None:
        """To the agent alone, or to the whole node."""
        for pid in self.pids if all_of_it else self.pids[:1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self) -> None:
        """It ends when its cluster's pipe is closed."""
        self.signal(signal.SIGCONT, all_of_it=True)

    def wait(self) -> None:
        if not select.select([self._end], [], [], PATIENCE)[0]:
            self.signal(signal.SIGKILL, all_of_it=True)
        os.close(self._end)


def _agent(secret: Secret, path: list[str], folder: str, *, own_process: bool) -> Agent:
    return Agent(secret, "127.0.0.1", path=path, folder=folder, own_process=own_process)


@cache
def _warm_starter() -> socket.socket:
    """To ask the one process that this process's agents apart are forked from for one more."""
    ask, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    code = f"from syncline.testing.small_cluster import serve; serve({theirs.fileno()})"
    paths = os.pathsep.join(path for path in sys.path if path)
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": paths},
    )
    theirs.close()
    leftovers.warm.add(process.pid)
    atexit.register(process.wait)
    atexit.register(ask.close)  # before the other
    return ask


def serve(fd: int) -> None:
    """Starts agents of nodes that are apart until nobody asks any more."""
    ask = socket.socket(fileno=fd)
    forkserver._warm_up()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them here
    while True:
        settings, fds, _, _ = socket.recv_fds(ask, 1 << 18, 2)
        if not settings:
            return
        if os.fork() == 0:
            ask.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _live(pickle.loads(settings), *fds)
        for each in fds:
            os.close(each)


def _live(settings: Any, out: int, life: int) -> NoReturn:
    """Until the other end of its life line is closed."""
    forkserver.start_here()
    agent = _agent(*settings, own_process=True)
    os.write(out, pickle.dumps(agent.about()))
    os.close(out)
    os.read(life, 1)
    agent.close()
    forkserver.shutdown()
    os._exit(0)


class SmallCluster(RayCluster):
    """So many nodes of so many cores; the first is the caller's."""

    def __init__(self, count: int, cores: int, *, apart: bool, through: Through, blind: bool) -> None:
        self._apart, self._through, self._blind = apart, through, blind
        self._at_hand: list[Node] = []
        self.agents: dict[int, Any] = {}
        self._apart_ones: list[ApartAgent] = []  # of this run, lost ones too
        self._life: tuple[int, int] | None = None  # a pipe: they end when it is closed
        for _ in range(count):
            self.add_node(cores)

    def add_node(self, cores: int) -> None:
        """Joins the cluster."""
        index = len(self._at_hand)
        self._at_hand.append(Node(f"node {index}", "127.0.0.1", cores, home=index == 0))

    def nodes(self) -> list[Node]:
        return list(self._at_hand)

    def begin(self, nodes: Sequence[Node], loads: Sequence[int], secret: Secret, **options: Any) -> None:
        self.secret, self.closing = secret, threading.Event()
        self.agents, self.about = {}, {}
        self._start_all(range(1, len(nodes)))

    def add(self, index: int, node: Node, load: int) -> None:
        self._start_all([index])

    def drop(self, index: int) -> None:
        if index in self.agents:
            self.agents.pop(index).close()

    def _start_all(self, indices: Sequence[int]) -> None:
        here = (self.secret, list(sys.path), os.getcwd())
        for index in indices:
            agent: Any = self._start_apart(here) if self._apart else _agent(*here, own_process=False)
            self.agents[index] = agent
            about = agent.about()
            self.about[index] = replace(about, address=self._through(about.address))
            if self._blind:
                agent.sees = lambda token: False

    def _start_apart(self, settings: Any) -> ApartAgent:
        if self._life is None:
            self._life = os.pipe()
        answer, out = os.pipe()
        socket.send_fds(_warm_starter(), [pickle.dumps(settings)], [out, self._life[0]])
        os.close(out)
        with open(answer, "rb") as said:
            self._apart_ones.append(ApartAgent(pickle.load(said)))
        return self._apart_ones[-1]

    @contextlib.contextmanager
    def echoes(self, nodes: Sequence[Node], secret: Secret) -> Iterator[list[Address]]:
        with contextlib.ExitStack() as undo:
            echoes = [undo.enter_context(contextlib.closing(Echo("127.0.0.1", secret))) for _ in nodes]
            yield [echo.address() for echo in echoes]

    def close(self) -> None:
        for agent in self.agents.values():
            agent.close()
        if self._life is not None:
            for end in self._life:
                os.close(end)
            for agent in self._apart_ones:
                agent.wait()
            self._life, self._apart_ones = None, []


class Nodes(Ray):
    """In place of `sl.Ray`; `cluster.agents` are the last run's, `cluster.add_node(cores)` lets another join.

    `apart=True`: each in processes of its own. `through` gives the address at which an agent's own is reached. `blind=True`:
    they do not see the caller's files.
    """

    def __init__(
        self,
        count: int = 2,
        cores: int = 4,
        *,
        apart: bool = False,
        through: Through = lambda address: address,
        blind: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.cluster = SmallCluster(count, cores, apart=apart, through=through, blind=blind)

    def _attach(self, cores: int) -> SmallCluster:
        return self.cluster
