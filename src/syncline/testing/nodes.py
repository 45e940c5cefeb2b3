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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from syncline.engines.local import forkserver
from syncline.engines.ray.agent import About, Agent
from syncline.engines.ray.authentication import Secret
from syncline.engines.ray.cluster import Agents, RayCluster
from syncline.engines.ray.engine import Ray
from syncline.engines.ray.link_measurement import Address, Echo, Echoes
from syncline.engines.ray.placement import Node
from syncline.testing.leftovers import children

Through = Callable[[tuple[str, int]], tuple[str, int]]


class ApartAgent:
    """A node of its own processes: they can be killed, frozen and thawed."""

    def __init__(self, about: About) -> None:
        self._about = about

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


class SmallAgents(Agents):
    """One of each node but the caller's, in this process or apart."""

    def __init__(self, count: int, secret: Secret, *, apart: bool, through: Through) -> None:
        self.secret, here = secret, (list(sys.path), os.getcwd())
        self.agents: dict[int, Any]
        self._starter: subprocess.Popen[bytes] | None = None
        if apart:
            self.about = self._start_apart((secret.run, secret.key, count, *here))
            self.agents = {index: ApartAgent(about) for index, about in self.about.items()}
        else:
            self.agents = {index: _agent(secret, *here) for index in range(1, count)}
            self.about = {index: agent.about() for index, agent in self.agents.items()}
        for index, about in self.about.items():
            self.about[index] = replace(about, address=through(about.address))

    def _start_apart(self, settings: Any) -> dict[int, About]:
        code = "from syncline.testing.nodes import serve; serve()"
        paths = os.pathsep.join(path for path in sys.path if path)
        self._starter = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": paths},
        )
        assert self._starter.stdin is not None and self._starter.stdout is not None
        self._starter.stdin.write(pickle.dumps(settings))
        self._starter.stdin.flush()
        return {index: pickle.load(self._starter.stdout) for index in range(1, settings[2])}

    def close(self) -> None:
        for agent in self.agents.values():
            agent.close()
        if self._starter is not None:
            self._starter.communicate()


def _agent(secret: Secret, path: list[str], folder: str) -> Agent:
    return Agent(secret, "127.0.0.1", path=path, folder=folder)


def serve() -> None:
    """Starts the agents of nodes that are apart, all from one warm process; they end when its input does."""
    run, key, count, path, folder = pickle.load(sys.stdin.buffer)
    out = os.dup(1)
    os.dup2(2, 1)
    forkserver._warm_up()
    for _ in range(1, count):
        if os.fork() == 0:
            forkserver.start_here()
            agent = _agent(Secret(run, key), path, folder)
            os.write(out, pickle.dumps(agent.about()))
            os.close(out)
            os.read(0, 1)
            agent.close()
            forkserver.shutdown()
            os._exit(0)
    os.close(out)
    os.read(0, 1)
    for _ in range(1, count):
        os.wait()


class SmallEchoes(Echoes):
    """One of each node but the caller's, in this process."""

    def __init__(self, nodes: Sequence[Node], secret: Secret) -> None:
        self._echoes = {node: Echo("127.0.0.1", secret) for node in nodes}

    def address(self, node: Node) -> Address:
        return self._echoes[node].address

    def close(self) -> None:
        for echo in self._echoes.values():
            echo.close()


class SmallCluster(RayCluster):
    """So many nodes of so many cores; the first is the caller's."""

    def __init__(self, count: int, cores: int, *, apart: bool, through: Through, blind: bool = False) -> None:
        self._blind = blind
        self._nodes = [Node(f"node {index}", "127.0.0.1", cores, home=index == 0) for index in range(count)]
        self._apart, self._through = apart, through

    def nodes(self) -> list[Node]:
        return self._nodes

    def agents(
        self,
        nodes: Sequence[Node],
        loads: Sequence[int],
        secret: Secret,
        *,
        gpus: bool,
        resources: Mapping[str, float] | None,
    ) -> SmallAgents:
        self.running = SmallAgents(len(nodes), secret, apart=self._apart, through=self._through)
        for agent in self.running.agents.values() if self._blind else ():
            agent.sees = lambda token: False
        return self.running

    def close(self) -> None:
        pass


class Nodes(Ray):
    """In place of `sl.Ray`; `cluster.running.agents` are the last run's.

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

    def _echoes(self, nodes: list[Node], secret: Secret) -> SmallEchoes:
        return SmallEchoes(nodes, secret)
