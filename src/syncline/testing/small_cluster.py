"""Small clusters for tests: the agents of several nodes on this machine, without Ray.

Real processes and real connections; only what Ray does (placing and watching actors) is done here.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from syncline.engines.authentication import Secret
from syncline.engines.local import forkserver
from syncline.engines.ray.agent import About, Agent
from syncline.engines.ray.cluster import RayCluster
from syncline.engines.ray.engine import Ray
from syncline.engines.ray.link_measurement import Address, Echo
from syncline.engines.ray.placement import Node
from syncline.testing.leftovers import children

Through = Callable[[tuple[str, int]], tuple[str, int]]


class ApartAgent:
    """A node of its own processes: they can be killed, frozen and thawed."""

    def __init__(self, about: About) -> None:
        self._about = about

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
        self.signal(signal.SIGCONT, all_of_it=True)


def _agent(secret: Secret, path: list[str], folder: str) -> Agent:
    return Agent(secret, "127.0.0.1", path=path, folder=folder)


def serve() -> None:
    """Starts the agents of nodes that are apart, each from one warm process; they end when its input does."""
    out, life = os.dup(1), os.pipe()
    os.dup2(2, 1)
    forkserver._warm_up()
    with contextlib.suppress(EOFError):
        while True:
            settings = pickle.load(sys.stdin.buffer)
            if os.fork() == 0:
                os.close(life[1])
                _live(settings, out, life[0])
    os.close(out)
    os.close(life[1])
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


def _live(settings: Any, out: int, life: int) -> NoReturn:
    forkserver.start_here()
    agent = _agent(*settings)
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
        self._starter: subprocess.Popen[bytes] | None = None
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
        if self._apart:
            made: list[Any] = [ApartAgent(about) for about in self._start_apart(len(indices), here)]
        else:
            made = [_agent(*here) for _ in indices]
        for index, agent in zip(indices, made, strict=True):
            self.agents[index] = agent
            about = agent.about()
            self.about[index] = replace(about, address=self._through(about.address))
            if self._blind:
                agent.sees = lambda token: False

    def _start_apart(self, count: int, settings: Any) -> list[About]:
        if self._starter is None:
            code = "from syncline.testing.small_cluster import serve; serve()"
            paths = os.pathsep.join(path for path in sys.path if path)
            self._starter = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": paths},
            )
        words, answers = self._starter.stdin, self._starter.stdout
        assert words is not None and answers is not None
        for _ in range(count):
            pickle.dump(settings, words)
        words.flush()
        return [pickle.load(answers) for _ in range(count)]

    @contextlib.contextmanager
    def echoes(self, nodes: Sequence[Node], secret: Secret) -> Iterator[list[Address]]:
        with contextlib.ExitStack() as undo:
            echoes = [undo.enter_context(contextlib.closing(Echo("127.0.0.1", secret))) for _ in nodes]
            yield [echo.address() for echo in echoes]

    def close(self) -> None:
        for agent in self.agents.values():
            agent.close()
        starter, self._starter = self._starter, None
        if starter is not None:
            starter.communicate()


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
