"""A small cluster: which nodes a run gets, who has an agent, under which address it is reached. The agents are made up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest

from syncline.engines.authentication import Secret
from syncline.engines.ray.agent import About
from syncline.testing import small_cluster
from syncline.testing.small_cluster import Nodes


@dataclass
class MadeUpAgent:
    secret: Secret
    host: str
    path: list[str]
    folder: str
    own_process: bool
    closed: bool = False

    def about(self) -> About:
        return About((self.host, 4000), ("1", "2", "3"), pid=7)

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def _made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_cluster, "Agent", MadeUpAgent)


def begun(nodes: Nodes) -> tuple[Any, Secret]:
    cluster, secret = nodes.cluster, Secret.new()
    cluster.begin(cluster.nodes(), [1] * len(cluster.nodes()), secret)
    return cast(Any, cluster), secret


def test_the_first_node_is_the_caller_s_and_has_no_agent() -> None:
    cluster, secret = begun(Nodes(3, cores=2))
    assert [(node.home, node.cores) for node in cluster.nodes()] == [(True, 2), (False, 2), (False, 2)]
    assert sorted(cluster.agents) == sorted(cluster.about) == [1, 2]
    assert {agent.secret for agent in cluster.agents.values()} == {secret}


def test_another_node_may_join_between_runs_and_on_the_way() -> None:
    nodes = Nodes(2)
    cluster, _ = begun(nodes)
    cluster.add_node(8)
    assert len({node.id for node in cluster.nodes()}) == 3 and cluster.nodes()[2].cores == 8
    assert sorted(cluster.agents) == [1], "of the run it is none yet"
    cluster.add(2, cluster.nodes()[2], 1)
    assert sorted(cluster.agents) == [1, 2]
    first = cluster.agents[1]
    assert begun(nodes)[0].agents[1] is not first, "each run has its own"


def test_who_is_dropped_is_closed_once_and_the_others_at_the_end() -> None:
    cluster, _ = begun(Nodes(3))
    one, two = cluster.agents[1], cluster.agents[2]
    for _ in range(2):
        cluster.drop(1)
    assert one.closed and not two.closed and sorted(cluster.agents) == [2]
    cluster.close()
    assert two.closed


def test_agents_are_reached_through_another_address_and_may_not_see_the_caller_s_files() -> None:
    cluster, _ = begun(Nodes(2, through=lambda address: (address[0], address[1] + 1), blind=True))
    assert cluster.about[1] == About(("127.0.0.1", 4001), ("1", "2", "3"), pid=7)
    assert not cluster.agents[1].sees("a token")
    assert not hasattr(begun(Nodes(2))[0].agents[1], "sees"), "else as agents do"
