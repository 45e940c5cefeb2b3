"""Ray's part, with a Ray that is a double: which cluster is meant, what is reserved on it, and what is given back."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from syncline.engines.ray import cluster as module
from syncline.engines.ray.agent import Agent
from syncline.engines.ray.cluster import RayCluster
from syncline.engines.ray.placement import Node
from syncline.errors import RunError, UsageError
from tests.unit.engines.ray.doubles import SECRET

NODES = [
    Node("a" * 12, "10.0.0.1", 4, home=True),
    Node("b" * 12, "10.0.0.2", 8, 2),
    Node("c" * 12, "10.0.0.3", 2),
]


class RayError(Exception):
    pass


class Actor:
    """One of Ray's; each of its methods is asked with `remote`."""

    def __init__(self, settings: dict[str, Any], given: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.settings, self.given, self.named = settings, given, named
        self.about = SimpleNamespace(remote=lambda: ("about", self))
        self.close = SimpleNamespace(remote=lambda: ("closing", self))


class Ray(ModuleType):
    """As much of it as is used."""

    exceptions = SimpleNamespace(RayError=RayError)

    def __init__(self) -> None:
        super().__init__("ray")
        self.inits: list[dict[str, Any]] = []
        self.attached = self.client = False
        self.refuses: Exception | None = None
        self.grants, self.fails = True, ""
        self.actors, self.ended, self.groups, self.removed = (
            list[Any](),
            list[Any](),
            list[Any](),
            list[Any](),
        )
        self.util = SimpleNamespace(
            client=SimpleNamespace(ray=SimpleNamespace(is_connected=lambda: self.client))
        )

    def is_initialized(self) -> bool:
        return self.attached

    def init(self, **options: Any) -> None:
        if self.refuses is not None and options["address"] == "auto":
            raise self.refuses
        self.inits.append(options)

    def shutdown(self) -> None:
        self.inits.clear()

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "b")

    def nodes(self) -> list[dict[str, Any]]:
        def node(name: str, alive: bool, **resources: float) -> dict[str, Any]:
            return {
                "NodeID": name,
                "NodeManagerAddress": f"at {name}",
                "Alive": alive,
                "Resources": resources,
            }

        return [node("a", True, CPU=4.0, GPU=1.0), node("dead", False, CPU=9.0), node("b", True, CPU=2.0)]

    def remote(self, kind: type) -> Any:
        assert kind is Agent

        def options(**settings: Any) -> Any:
            def make(*given: Any, **named: Any) -> Actor:
                self.actors.append(Actor(settings, given, named))
                return self.actors[-1]

            return SimpleNamespace(remote=make)

        return SimpleNamespace(options=options)

    def wait(self, references: list[Any], **options: Any) -> tuple[list[Any], list[Any]]:
        return references, []

    def get(self, reference: Any) -> Any:
        if self.fails:
            raise RayError(self.fails)
        return reference

    def kill(self, actor: Actor) -> None:
        self.ended.append(actor)

    def placement_group(self, bundles: list[Any], **options: Any) -> Any:
        self.groups.append((bundles, options["bundle_label_selector"]))
        return SimpleNamespace(wait=lambda seconds: self.grants)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    made = Ray()
    groups: Any = ModuleType("ray.util.placement_group")
    groups.placement_group, groups.remove_placement_group = made.placement_group, made.removed.append
    strategies: Any = ModuleType("ray.util.scheduling_strategies")
    strategies.PlacementGroupSchedulingStrategy = lambda group, placement_group_bundle_index: (
        placement_group_bundle_index
    )
    for name, each in (("ray", made), (groups.__name__, groups), (strategies.__name__, strategies)):
        monkeypatch.setitem(sys.modules, name, each)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(module, "READY", -1.0)  # nobody waits
    return made


def test_a_script_that_is_connected_stays_so(ray: Ray) -> None:
    ray.attached = True
    RayCluster(None, 3).close()
    assert ray.inits == []
    ray.inits.append({"address": "the script's"})
    RayCluster(None, 3).close()
    assert ray.inits == [{"address": "the script's"}]


def test_without_a_cluster_there_is_one_of_our_own_that_ends_with_the_run(ray: Ray) -> None:
    ray.refuses = ConnectionError("none")
    cluster = RayCluster(None, 3)
    assert [(each["address"], each["num_cpus"]) for each in ray.inits] == [("local", 3)]
    cluster.close()
    assert ray.inits == []


def test_a_cluster_that_was_named_is_the_one_or_none(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    RayCluster("auto", 3)
    assert [each["address"] for each in ray.inits] == ["auto"]
    ray.refuses = RuntimeError("no\n  head")
    with pytest.raises(UsageError, match="no Ray cluster at 'auto': no head"):
        RayCluster("auto", 3)
    monkeypatch.setenv("RAY_ADDRESS", "somewhere")
    with pytest.raises(UsageError, match="got 'somewhere'"):
        RayCluster(None, 3)


def test_a_driver_elsewhere_is_refused(ray: Ray) -> None:
    ray.attached = ray.client = True
    with pytest.raises(UsageError, match="ray job submit"):
        RayCluster(None, 3)


def test_nodes_are_those_that_live_and_the_callers_own_is_known(ray: Ray) -> None:
    assert RayCluster(None, 3).nodes() == [Node("a", "at a", 4, 1), Node("b", "at b", 2, home=True)]


def begun(loads: list[int], **options: Any) -> RayCluster:
    cluster = RayCluster(None, 3)
    cluster.begin(NODES, loads, SECRET, **{"gpus": False, "resources": None, **options})
    return cluster


@pytest.mark.parametrize(
    "options, bundles",
    [
        ({}, [(0, {"CPU": 2}), (1, {"CPU": 3})]),
        ({"gpus": True}, [(0, {"CPU": 2}), (1, {"CPU": 3, "GPU": 2})]),
        ({"resources": {"CPU": 1, "disk": 0}}, [(0, {"CPU": 1}), (1, {"CPU": 1}), (2, {"CPU": 1})]),
        (
            {"gpus": True, "resources": {"GPU": 1.5}},
            [(0, {"GPU": 1.5}), (1, {"GPU": 1.5}), (2, {"GPU": 1.5})],
        ),
    ],
)
def test_room_is_reserved_on_each_node_by_what_runs_there(
    ray: Ray, options: dict[str, Any], bundles: list[tuple[int, dict[str, float]]]
) -> None:
    nodes = NODES if "resources" in options else NODES[:2]
    cluster = RayCluster(None, 3)
    cluster.begin(nodes, [2, 3, 0][: len(nodes)], SECRET, **{"gpus": False, "resources": None, **options})
    ((found, selectors),) = ray.groups
    assert found == [bundle for _, bundle in bundles]
    assert [each["ray.io/node-id"] for each in selectors] == [NODES[index].id for index, _ in bundles]
    assert sorted(cluster.about) == list(range(1, len(nodes))), "the caller's own node needs no agent"


def test_each_agent_is_in_its_nodes_bundle_and_has_its_gpus(ray: Ray) -> None:
    begun([0, 3, 2], gpus=True)  # nothing is reserved on the first
    first, second = ray.actors
    assert [each.settings["scheduling_strategy"] for each in ray.actors] == [0, 1]
    assert (first.settings["num_gpus"], first.named["gpus"], second.named["gpus"]) == (2, 2, 0)
    assert [each.given for each in ray.actors] == [(SECRET, "10.0.0.2"), (SECRET, "10.0.0.3")]


def test_what_is_not_granted_is_named(ray: Ray) -> None:
    ray.grants = False
    with pytest.raises(UsageError, match=r"\{'CPU': 3\} on 10\.0\.0\.2 \(bbbbbbbb\).*`ray status`"):
        begun([0, 3, 0])


def test_an_agent_that_fails_is_said_with_its_last_words(ray: Ray) -> None:
    ray.fails = "a trace\n  ImportError: no syncline\n\n"
    with pytest.raises(
        RunError, match=r"the agent on 10\.0\.0\.2 .* failed: ImportError: no syncline; is syncline"
    ) as error:
        begun([1, 1, 1])
    assert "\n" not in str(error.value)


def test_all_is_given_back_be_it_of_one_node_or_of_the_run(ray: Ray) -> None:
    cluster = begun([1, 1, 1])
    cluster.add(3, Node("d" * 12, "10.0.0.4", 4), 4)
    cluster.drop(3)
    assert ray.ended == ray.actors[2:] and len(ray.removed) == 1
    cluster.close()
    assert ray.ended == [ray.actors[2], *ray.actors[:2]] and len(ray.removed) == 2
    assert cluster.closing.is_set() and ray.inits == []


def test_a_cluster_that_is_gone_does_not_keep_the_run_from_ending(
    ray: Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = begun([1, 1, 1])
    monkeypatch.setattr(ray, "kill", lambda actor: 1 / 0)
    cluster.close()
    assert ray.inits == []
