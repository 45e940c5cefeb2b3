"""The cluster at hand as a record: over real connections of this machine. No test asserts a rate that was measured."""

import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

import syncline as sl
from syncline.cluster import Cluster, Compute, Link
from syncline.engines.authentication import Secret
from syncline.engines.ray import link_measurement as measuring
from syncline.engines.ray.link_measurement import Echo, Way, measure_way, measured
from syncline.engines.ray.placement import Node
from syncline.errors import RunError, UsageError
from syncline.testing import Nodes

HOME, OTHER, THIRD = (
    Node("a" * 12, "10.0.0.1", 4, home=True),
    Node("b" * 12, "10.0.0.2", 4),
    Node("c", "h", 2),
)
WAYS = [Way(0.001, 100e6, 120e6), Way(0.003, 140e6, 120e6)]


def test_links_are_the_middle_ones_and_cores_the_fewest() -> None:
    cluster = measured([HOME, OTHER, THIRD], WAYS, None, learners=None, most=None, servers=0)
    assert cluster.card == Link(latency=0.002, bandwidth=120e6)
    assert (cluster.cores, cluster.learners_per_machine, cluster.beside) == (2, 4, True)
    assert [cluster.machine_of_shard(shard) for shard in (0, 5)] == [0, 0]
    assert cluster.memory.bandwidth is not None


def test_learners_are_dealt_as_a_run_deals_them() -> None:
    found = measured([HOME, OTHER], WAYS[:1], None, learners=3, most=None, servers=0)
    assert found.learners_per_machine == 2
    alone = measured([HOME, OTHER], WAYS[:1], None, learners=3, most=3, servers=1)
    assert (alone.learners_per_machine, alone.beside, alone.machine_of_shard(1)) == (3, False, -1)
    with pytest.raises(UsageError, match="learners=9 need as many cores"):
        measured([HOME, OTHER], WAYS[:1], None, learners=9, most=None, servers=0)


def test_what_computing_costs_is_taken_over() -> None:
    costs = Cluster(name="this-machine", compute=Compute(base=0.1), memory=Link(latency=0.01))
    found = measured([HOME, OTHER], WAYS[:1], costs, learners=2, most=None, servers=0)
    assert (found.name, found.compute, found.memory) == ("this-cluster", costs.compute, costs.memory)
    assert found.card.latency == pytest.approx(0.011)  # what a message costs here, and the way


def test_one_node_has_no_link() -> None:
    found = measured([HOME], [], None, learners=None, most=None, servers=0)
    assert (found.card, found.learners_per_machine, found.cores) == (Link(), None, 4)


def test_blocks_are_counted_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is the test's: a second for each look at it."""
    ticks = iter(range(10_000))
    clock = SimpleNamespace(perf_counter=lambda: float(next(ticks)))
    monkeypatch.setattr(measuring, "time", clock)
    secret = Secret.new()
    echo = Echo("127.0.0.1", secret)
    way = measure_way(echo.address(), secret, here=HOME, there=OTHER)
    echo.close()
    # four blocks, pushed or pulled between two looks
    assert way == Way(0.5, 4.0 * measuring.BLOCK, 4.0 * measuring.BLOCK)


def test_a_node_that_cannot_be_reached_is_named_with_the_other() -> None:
    secret = Secret.new()
    echo = Echo("127.0.0.1", secret)
    with pytest.raises(
        RunError, match=r"10\.0\.0\.1 \(aaaaaaaa\) cannot reach 10\.0\.0\.2 \(bbbbbbbb\)"
    ) as error:
        measure_way(echo.address(), Secret.new(), here=HOME, there=OTHER)
    assert "\n" not in str(error.value)
    echo.close()
    with pytest.raises(RunError, match="open that way between them"):
        measure_way(echo.address(), secret, here=HOME, there=OTHER)


def test_a_node_that_falls_silent_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    over, secret = threading.Event(), Secret.new()

    def says_nothing(self: Echo, end: socket.socket) -> None:
        with end:
            over.wait()

    monkeypatch.setattr(measuring, "SILENT", 0.05)
    monkeypatch.setattr(Echo, "_answer", says_nothing)
    echo = Echo("127.0.0.1", secret)
    with pytest.raises(RunError, match="no answer within"):
        measure_way(echo.address(), secret, here=HOME, there=OTHER)
    over.set()
    echo.close()


def test_the_nodes_at_hand_are_a_cluster_that_the_simulator_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UsageError, match=r"'this-cluster' is not measured yet .*measure\(keep=True\)"):
        Cluster.named("this-cluster")
    found = Nodes(3, 4).measure(Cluster(compute=Compute(base=0.01)), learners=6, keep=True)
    assert (found.cores, found.learners_per_machine) == (4, 2)
    assert found.card.bandwidth is not None and found.card.latency > 0
    assert Cluster.named("this-cluster") == found
    timing = sl.Sim("this-cluster").timing(
        parameters=1_000_000, examples=120, batch_size=4, learners=6, epochs=1, sync="softsync:1"
    )
    assert timing.gradients == 30 and set(timing.cards) == {0, 1, 2}
