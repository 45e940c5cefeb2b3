"""Clusters: records that refuse nonsense, draws that depend on their place alone, names and texts."""

from __future__ import annotations

import json
import math
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.cluster import KINDS, Cluster, Compute, Cost, Jitter, Link, keep, uniform
from syncline.engines.event_script import parse_script
from syncline.errors import UsageError
from syncline.sim.engine import Sim


@pytest.mark.parametrize(
    "make",
    [
        lambda: Compute(base=-1),
        lambda: Cost(per_byte=float("nan")),
        lambda: Link(bandwidth=0),
        lambda: Link(latency=True),
        lambda: Jitter(kind="gauss"),
        lambda: Jitter(kind="uniform", spread=1.0),
        lambda: Cluster(stragglers=1.5),
        lambda: Cluster(slowdown=0.5),
        lambda: Cluster(speeds=(1.0, 0.0)),
        lambda: Cluster(cores=0),
        lambda: Cluster(learners_per_machine=1.5),  # type: ignore[arg-type]
        lambda: Cluster.equal(transfer=-1),
        lambda: Cluster(speeds=2.0),  # type: ignore[arg-type]
        lambda: Cluster(beside="yes"),  # type: ignore[arg-type]
        lambda: Cluster.named(["p775"]),  # type: ignore[arg-type]
        lambda: Cluster.named("cray"),
    ],
)
def test_nonsense_is_refused_when_it_is_built(make: Any) -> None:
    with pytest.raises(UsageError):
        make()


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            {"jitter": "lognormal"},
            r"jitter is a Jitter, got 'lognormal'; write jitter=Jitter\(kind='lognormal'",
        ),
        ({"compute": 3}, r"compute is a Compute, got 3; write compute=Compute\(base="),
        ({"card": 1e9}, r"card is a Link, got .*; write card=Link\("),
        ({"memory": Cost()}, "memory is a Link, got Cost"),
        ({"fold": None}, r"fold is a Cost, got None; write fold=Cost\("),
        ({"straglers": 0.1}, "no field 'straglers', did you mean 'stragglers'"),
    ],
)
def test_parts_and_their_names_are_checked(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Cluster.named("p775", **changes)


@pytest.mark.parametrize("name", ["compute", "transfer", "latency"])
def test_fixed_times_are_numbers(name: str) -> None:
    with pytest.raises(UsageError, match=f"Sim: {name} must be a number >= 0, got 'a'"):
        Sim(**{name: "a"})  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "none"])
def test_a_jitter_as_text_has_a_spread(kind: str) -> None:
    for text in (kind, f"{kind}:"):
        with pytest.raises(UsageError, match=f"needs a spread; write for example '{kind}:0.2'"):
            Jitter.parse(text)
    assert Jitter.parse(f"{kind}:0.2") == Jitter(kind=kind, spread=0.2)
    assert Jitter.parse("none") == Jitter()


def test_a_cluster_is_a_record() -> None:
    cluster = Cluster.named("p775")
    with pytest.raises(FrozenInstanceError):
        cluster.name = "other"  # type: ignore[misc]
    assert Cluster.from_record(json.loads(json.dumps(cluster.record()))) == cluster
    with pytest.raises(UsageError, match="colour"):
        Cluster.from_record({"colour": "red"})


@given(st.integers(0, 2**40), st.lists(st.integers(-1, 2**40), min_size=1, max_size=3))
def test_a_draw_depends_on_its_place_alone(seed: int, place: list[int]) -> None:
    first = uniform(seed, *place)
    assert 0 < first < 1
    uniform(seed + 1, *place)
    assert uniform(seed, *place) == first


def test_draws_are_even_and_independent_of_their_neighbours() -> None:
    drawn = [uniform(3, learner, step) for learner in range(50) for step in range(200)]
    assert len(set(drawn)) == len(drawn)
    assert sum(drawn) / len(drawn) == pytest.approx(0.5, abs=0.01)
    tenths = [sum(1 for x in drawn if tenth <= 10 * x < tenth + 1) for tenth in range(10)]
    assert min(tenths) > 880
    assert max(tenths) < 1120
    pairs = [(drawn[i] - 0.5) * (drawn[i + 1] - 0.5) for i in range(len(drawn) - 1)]
    assert abs(sum(pairs) / len(pairs)) < 0.003


@pytest.mark.parametrize(
    "kind, mean",
    [("uniform", 1.0), ("normal", 1.0), ("lognormal", 1.0), ("exponential", 1.3), ("pareto", 1.3)],
)
def test_jitters_mean(kind: str, mean: float) -> None:
    jitter = Jitter(kind=kind, spread=0.3)
    count = 20_000
    factors = [jitter.factor((index + 0.5) / count) for index in range(count)]
    assert sum(factors) / count == pytest.approx(mean, rel=0.01)
    assert factors == sorted(factors)


@given(st.sampled_from(KINDS), st.floats(0, 0.99), st.floats(1e-15, 1 - 1e-15))
def test_no_step_takes_no_time(kind: str, spread: float, share: float) -> None:
    factor = Jitter(kind=kind, spread=spread).factor(share)
    assert factor > 0
    assert math.isfinite(factor)


@given(st.floats(0, 1), st.integers(0, 1000), st.integers(1, 100))
def test_the_share_of_stragglers_holds_for_any_number_of_learners(
    share: float, seed: int, learners: int
) -> None:
    cluster = Cluster(stragglers=share)
    slow = sum(cluster.straggles(rank, seed) for rank in range(learners))
    assert abs(slow - share * learners) <= 1 + 1e-9


def test_who_is_slow_and_by_how_much() -> None:
    cluster = Cluster(compute=Compute(base=1.0, per_example=0.5), speeds=(2.0,), stragglers=1.0, slowdown=3.0)
    assert cluster.step_seconds(4, rank=0, step=0, seed=0, learners=2) == pytest.approx(4.5)
    assert cluster.step_seconds(4, rank=1, step=0, seed=0, learners=2) == pytest.approx(9.0)


def test_places_and_crowds() -> None:
    cluster = Cluster(learners_per_machine=4, shards_per_machine=2, crowding=0.1)
    assert [cluster.machine_of_learner(rank) for rank in (0, 3, 4, 9)] == [0, 0, 1, 2]
    assert [cluster.machine_of_shard(shard) for shard in (0, 1, 2)] == [-1, -1, -2]
    assert [cluster.crowd(rank, 10) for rank in (0, 7, 8, 9)] == [4, 4, 2, 2]
    assert cluster.pace(8, seed=0, learners=10) == pytest.approx(1.1)
    assert replace(cluster, cores=2).pace(0, seed=0, learners=10) == pytest.approx(1.1)  # two at a time
    assert replace(cluster, beside=True).machine_of_shard(2) == 1
    alone = Cluster(learners_per_machine=None, shards_per_machine=None, beside=True)
    assert {alone.machine_of_learner(9), alone.machine_of_shard(3)} == {0}
    assert alone.crowd(3, 7) == 7


@pytest.mark.parametrize("name", ["p775", "ethernet-1g", "dgx-1", "equal"])
def test_named_clusters(name: str) -> None:
    cluster = Cluster.named(name, stragglers=0.25)
    assert cluster.name == name
    assert cluster.stragglers == 0.25
    assert Cluster.parse(f"{name}:stragglers=0.25") == cluster


def test_the_papers_baselines() -> None:
    """Rudra's (0, 128, 1): 22,392 s for 140 epochs of 391 steps; SINGA's one node: 27.3 s for 256 images."""
    steps = 140 * 391
    assert steps * Cluster.named("p775").compute.seconds(128) == pytest.approx(22_392, rel=0.01)
    assert Cluster.named("ethernet-1g").compute.seconds(256) == pytest.approx(27.3, rel=0.01)


def test_a_text() -> None:
    text = "ethernet-1g: jitter=lognormal:0.2, speeds=1/0.5, cores=4, learners_per_machine=all, beside=true, latency=1e-3, base=2"
    cluster = Cluster.parse(text)
    assert cluster.jitter == Jitter(kind="lognormal", spread=0.2)
    assert cluster.speeds == (1.0, 0.5)
    assert (cluster.cores, cluster.learners_per_machine, cluster.beside) == (4, None, True)
    assert cluster.card == Link(latency=1e-3, bandwidth=125e6)
    assert cluster.compute.base == 2
    assert Cluster.parse("equal:cores=2,slice=4e-3,spin=1e-3").slice == 4e-3


@pytest.mark.parametrize(
    "text, words",
    [
        ("p775:stragglers", "key=value"),
        ("p775:colour=red", "unknown key 'colour'"),
        ("p775:cores=two", "whole number"),
        ("p775:slowdown=fast", "takes a number"),
        ("p775:beside=yes", "true or false"),
        ("nowhere:cores=2", "unknown cluster 'nowhere'"),
        ("p77", "unknown cluster 'p77', did you mean 'p775'"),
        ("p775:", "nothing is behind the colon"),
        ("p775: ,", "nothing is behind the colon"),
        ("p775:straglers=0.1", "unknown key 'straglers', did you mean 'stragglers'"),
        ("p775:jitter=lognormal", "needs a spread"),
    ],
)
def test_no_text(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Cluster.parse(text)


def test_this_machine_is_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UsageError, match=r"not measured yet .*calibrate"):
        Cluster.named("this-machine")
    measured = Cluster(name="this-machine", compute=Compute(base=0.001), cores=2)
    path = keep(measured)
    assert path == tmp_path / "syncline" / "this-machine.json"
    assert Cluster.parse("this-machine:cores=4") == replace(measured, cores=4)
    path.write_text("{}}")
    with pytest.raises(UsageError, match="measure again"):
        Cluster.named("this-machine")


def test_seconds_of_a_script_are_numbers() -> None:
    lines = parse_script("stop at 1 s; stop at 1. s; stop at 0.25 s; pause shard 0 for .5 s at 007 s")
    assert [line.seconds for line in lines] == [1.0, 1.0, 0.25, 7.0] and lines[3].length == 0.5
