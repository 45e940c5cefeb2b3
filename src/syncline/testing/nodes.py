"""Small clusters for tests: the agents of several nodes on this machine, without Ray.

Real processes and real connections; only what Ray does (placing and watching actors) is done here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from syncline.engines.ray.agent import About, Agent
from syncline.engines.ray.cluster import Agents, RayCluster
from syncline.engines.ray.engine import Ray
from syncline.engines.ray.handshake import Secret
from syncline.engines.ray.measuring import Address, Echo, Echoes
from syncline.engines.ray.placement import Node


class SmallAgents(Agents):
    """One of each node but the caller's, in this process."""

    def __init__(self, counts: Sequence[int], secret: Secret) -> None:
        self.agents = {
            index: Agent(secret, "127.0.0.1", learners=count, path=list(sys.path), folder=os.getcwd())
            for index, count in enumerate(counts)
            if index > 0 and count
        }
        self.about: dict[int, About] = {index: agent.about() for index, agent in self.agents.items()}

    def alive(self, index: int) -> bool:
        return index in self.agents and not self.agents[index].closed

    def close(self) -> None:
        for agent in self.agents.values():
            agent.close()


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

    def __init__(self, count: int, cores: int) -> None:
        self._nodes = [Node(f"node {index}", "127.0.0.1", cores, home=index == 0) for index in range(count)]

    def nodes(self) -> list[Node]:
        return self._nodes

    def agents(
        self,
        nodes: Sequence[Node],
        counts: Sequence[int],
        secret: Secret,
        *,
        gpus: bool,
        resources: Mapping[str, float] | None,
    ) -> SmallAgents:
        self.running = SmallAgents(counts, secret)
        return self.running

    def close(self) -> None:
        pass


class Nodes(Ray):
    """In place of `sl.Ray`; `cluster.running.agents` are the last run's."""

    def __init__(self, count: int = 2, cores: int = 4, **options: Any) -> None:
        super().__init__(**options)
        self.cluster = SmallCluster(count, cores)

    def _attach(self, cores: int) -> SmallCluster:
        return self.cluster

    def _echoes(self, nodes: list[Node], secret: Secret) -> SmallEchoes:
        return SmallEchoes(nodes, secret)
