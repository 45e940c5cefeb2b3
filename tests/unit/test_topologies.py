"""Topologies by name, what does not go over them, and how many shards a run gets that names no number."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from syncline.dial import Course
from syncline.errors import UsageError
from syncline.learn.server_session import shards_for
from syncline.protocols.lifecycle import Faults
from syncline.topologies import AllReduce, Servers, Trees, parse_topology

HALF_A_MEGABYTE = 1 << 17  # float32 parameters


def table(parameters: int) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(parameters))], lr=0.1)


def sized(learners: int, cores: int, *, lockstep: bool = False) -> Servers:
    found = parse_topology("servers").sized(learners, cores, lockstep=lockstep)
    assert isinstance(found, Servers)
    return found


@pytest.mark.parametrize("learners, cores, expected", [
    (2, 2, 1), (4, 2, 1), (3, 16, 1), (4, 6, 2), (8, 16, 3), (14, 16, 2), (15, 16, 1),
])  # fmt: skip
def test_many_learners_that_leave_cores_have_a_small_table_cut(
    learners: int, cores: int, expected: int
) -> None:
    assert shards_for(table(3 * HALF_A_MEGABYTE), sized(learners, cores)) == expected


def test_large_tables_are_cut_in_any_case_and_named_numbers_hold() -> None:
    cut = partial(shards_for, table(32 * HALF_A_MEGABYTE))
    assert cut(sized(2, 16)) == 4 and cut(sized(2, 2)) == 2
    assert shards_for(table(8), Servers(5, True).sized(8, 16, lockstep=True)) == 5


@pytest.mark.parametrize("text, expected, again", [
    ("servers", Servers(2, False), "servers:2"),
    ("servers:3", Servers(3, True), "servers:3"),
    ("tree:4", Trees(fan_in=4), "tree:4,servers=2"),
    ("tree: 4, broadcast , servers=3", Trees(fan_in=4, broadcast=True, root=Servers(3, True)), "tree:4,broadcast,servers=3"),
    ("allreduce", AllReduce(), "allreduce:blocking"),
    ("allreduce:layerwise,apply=arrival", AllReduce(mode="layerwise", apply="arrival"), "allreduce:layerwise,apply=arrival"),
    ("allreduce:layerwise,bucket=0.5MiB", AllReduce(mode="layerwise", bucket=1 << 19), "allreduce:layerwise,bucket=524288"),
])  # fmt: skip
def test_a_text_is_read_and_written_again(text: str, expected: Any, again: str) -> None:
    found = parse_topology(text)
    assert found == expected and str(found) == again
    assert str(parse_topology(again)) == again


@pytest.mark.parametrize("text, words", [
    (3, "topology must be a text"), ("ring", "unknown topology 'ring'"),
    ("servers:0", "shards must be a whole number of at least 1"), ("servers:x", "shards must be a whole number"),
    ("tree", "F, the learners of a leaf, must be a whole number of at least 2, got ''"), ("tree:1", "at least 2, got '1'"),
    ("tree:4,servers=0", "servers must be a whole number of at least 1"),
    ("tree:4,brodcast", "'brodcast' is none of .*did you mean 'broadcast'"),
    ("tree:4,fan_in=3", "'fan_in=3' is none of broadcast, servers=S"),
    ("tree:4,broadcast,broadcast", "gives broadcast twice"), ("tree:4,servers=1,servers=2", "gives servers twice"),
    ("allreduce:bucket=0", "bucket is a size .* of at least one byte, got '0'"), ("allreduce:bucket=3 miles", "bucket is a size"),
    ("allreduce:blocking,layerwise", "gives mode twice"),
])  # fmt: skip
def test_what_is_no_topology_is_refused(text: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_topology(text)


@pytest.mark.parametrize("text, sync, changes, words", [
    ("servers", "delayed:auto<=3", {}, "the delay adapts over all-reduce only"),
    ("tree:2", "delayed:auto<=3", {}, "the delay adapts over all-reduce only"),
    ("tree:2", "hardsync until 1 then backup:1", {}, "a late gradient cannot be left out"),
    ("tree:2", "async:rate=staleness", {}, "none can be damped by its own"),
    ("allreduce", "async", {}, "a collective waits for everybody"),
    ("allreduce", "hardsync until 1 then delayed:auto<=3", {}, "does not go into a course"),
    ("allreduce:layerwise,apply=arrival", "delayed:1", {}, "leave apply= out"),
    ("allreduce:layerwise,apply=arrival", "hardsync", {"clip_norm": 1.0}, "use apply=end"),
    ("allreduce", "hardsync", {"clocks": True}, "vector clocks are the servers'"),
    ("allreduce", "hardsync", {"warm": 1}, "warmstart=1"),
    ("allreduce", "hardsync", {"faults": Faults(on_error="continue")}, 'on_error="continue"'),
    ("allreduce", "hardsync", {"faults": Faults(replace=True)}, "replace=True"),
])  # fmt: skip
def test_what_does_not_go_over_a_topology_is_refused(
    text: str, sync: str, changes: dict[str, Any], words: str
) -> None:
    given: dict[str, Any] = {"faults": Faults(), "clip_norm": None, "warm": 0, "clocks": False}
    found = parse_topology(text)
    found.check(Course.of("hardsync"), **given)
    with pytest.raises(UsageError, match=words):
        found.check(Course.of(sync), **{**given, **changes})


def test_only_servers_are_a_matter_of_cores() -> None:
    ring = AllReduce(mode="layerwise")
    assert ring.sized(8, 16, lockstep=True) is ring and ring.shards == 0
    assert parse_topology("tree:4").sized(2, 16, lockstep=False) == Trees(fan_in=4, root=sized(2, 16))
