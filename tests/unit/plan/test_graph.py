"""The graph that a plan is looked for in: what moves between layers, found once for those that are alike."""

from __future__ import annotations

import pytest
import torch

from syncline.parallel import Group, partition
from syncline.plan import graph, plan
from syncline.plan.graph import LayerGraph
from tests.unit.plan.planned_networks import ETHERNET, Ways, mlp


def test_bytes_are_those_that_the_partitioned_model_moves() -> None:
    model, x = Ways(), torch.empty(8, 3, 8, 8)
    given = {
        "first": "spatial",
        "one": "model",
        "two": "spatial",
        "add": "spatial",
        "add_1": "spatial",
        "out": "model",
    }
    graph = LayerGraph(model, x, 4)
    graph.find_ways(("data", "model", "spatial"))
    names = [unit.name for unit in graph.units]
    moved = 0
    for link in graph.links:
        if link.target[0] >= 0:
            a, b = names[link.source[0]], names[link.target[0]]
            moved += sum(route.moved for route, _ in graph.routes(link, given[a], given[b]))
    group = Group()
    group.size = 4
    mine = partition(model, given, x, group)
    (program,) = mine._programs.values()
    assert program.moved <= moved  # a value that two layers read moves once
    assert program.moved >= 0.8 * moved


def test_moves_of_layers_that_are_alike_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    route = graph.route
    monkeypatch.setattr(graph, "route", lambda *args, **how: found.append(args) or route(*args, **how))
    for layers in (10, 40):
        found.clear()
        deep = plan(mlp(*[64] * layers), torch.empty(8, 64), ETHERNET, 4)
        assert len(deep.rows) == layers - 1 and len(found) <= 6
