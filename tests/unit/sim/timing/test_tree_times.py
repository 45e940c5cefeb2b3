"""Timing over trees of servers (R7, R8): the same gradients as over flat servers, fewer at the root, and hidden with broadcast."""

import pytest

import syncline as sl
from syncline.cluster import Cluster, Compute
from syncline.errors import DialError
from syncline.sim.timing.run_times import Timing

CLUSTER = Cluster.named("p775", compute=Compute(base=1.0))


def timed(
    topology: str, sync: str = "softsync:1", *, learners: int = 12, rounds: int = 10, **given: object
) -> Timing:
    options = {"examples": 4 * learners * rounds, "epochs": 1} | given
    return sl.Sim(CLUSTER).timing(
        parameters=25_000_000,
        learners=learners,
        batch_size=4,
        sync=sync,
        topology=topology,
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("topology", ["tree:4", "tree:2", "tree:2,servers=3", "tree:4,broadcast", "tree:12"])
@pytest.mark.parametrize("sync", ["hardsync", "delayed:1", "softsync:1", "softsync:3", "async", "ssp:1"])
def test_every_gradient_is_folded_once(topology: str, sync: str) -> None:
    timing = timed(topology, sync)
    assert timing.gradients == 120 and timing.dropped == 0
    assert timing.examples == 480 and [each.examples for each in timing.history] == [480]
    again = timed(topology, sync)
    assert (timing.seconds, timing.times, timing.staleness) == (again.seconds, again.times, again.staleness)
    if sync == "hardsync":
        assert timing.updates == 10 and timing.staleness.max == 0
    if sync == "delayed:1":
        assert timing.updates == 10 and timing.staleness.histogram == {0: 12, 1: 108}


def test_the_tree_relieves_the_root_and_broadcast_hides_the_rest() -> None:
    base, adv, star = (timed(each, learners=24) for each in ("servers:1", "tree:4", "tree:4,broadcast"))
    assert base.overlap < adv.overlap < star.overlap
    assert base.seconds > adv.seconds > star.seconds
    assert star.staleness.mean > adv.staleness.mean, "the price"
    assert adv.moved < base.moved, "one sum for four gradients"


def test_it_ends_after_updates_or_seconds() -> None:
    assert timed("tree:4", steps=5, epochs=None).updates == 5
    assert 3.0 <= timed("tree:4", seconds=3.0, epochs=None).seconds < 10.0


def test_updates_are_told_with_their_staleness() -> None:
    seen = []
    timed("tree:4", on_update=lambda version, seconds, staleness: seen.append((version, staleness)))
    assert [version for version, _ in seen] == list(range(1, len(seen) + 1))
    assert seen[0][1] == 0.0 and max(staleness for _, staleness in seen) > 0


@pytest.mark.parametrize("topology, sync, error, words", [
    ("tree:4", "backup:1", DialError, "a leaf's sum is taken whole, so a late gradient cannot be left out of it"),
    ("tree:4", "async:rate=staleness", DialError, "gradients are added before their staleness is known"),
    ("tree:4", "delayed:auto<=2", DialError, "the delay adapts over all-reduce only"),
    ("tree:4", "downpour:push=2,fetch=2,local_lr=0.1", sl.UsageError, "without steps of learners' own"),
    ("tree:4", "hardsync until 1 then async", sl.UsageError, "one dial"),
    ("tree", "hardsync", sl.UsageError, "F, the learners of a leaf, must be a whole number of at least 2, got ''"),
    ("tree:1", "hardsync", sl.UsageError, "at least 2, got '1'"),
    ("tree:4,servers=0", "hardsync", sl.UsageError, "servers must be a whole number of at least 1, got '0'"),
    ("tree:4,broadcats", "hardsync", sl.UsageError, "did you mean 'broadcast'"),
    ("tree:4,apply=end", "hardsync", sl.UsageError, "'apply=end' is none of broadcast, servers=S"),
    ("tree:4,broadcast,broadcast", "hardsync", sl.UsageError, "gives broadcast twice"),
])  # fmt: skip
def test_what_does_not_go_over_a_tree_is_refused(
    topology: str, sync: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        timed(topology, sync)
