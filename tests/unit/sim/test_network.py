"""The network and the cores: nothing moves faster than it can, nothing overtakes, nothing stands idle for no reason."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.cluster import Cluster, Link
from syncline.sim.machine_cores import Cores
from syncline.sim.network import SimNetwork, Way

CARD = Link(latency=0.25, bandwidth=100.0)
MEMORY = Link(latency=0.0625, bandwidth=1000.0)


class Sent(NamedTuple):
    now: float
    source: int
    target: int
    nbytes: int
    arrival: float


sends = st.lists(
    st.tuples(st.floats(0, 3), st.integers(0, 3), st.integers(-2, 3), st.sampled_from([0, 1, 50, 100, 400])),
    max_size=40,
)


def play(events: list[tuple[float, int, int, int]]) -> list[Sent]:
    network, now, sent = SimNetwork(Cluster(card=CARD, memory=MEMORY)), 0.0, []
    for wait, source, target, nbytes in events:
        now += wait
        sent.append(Sent(now, source, target, nbytes, network.send(now, source, target, nbytes)))
    return sent


@given(sends)
def test_nothing_is_faster_than_its_link(events: list[tuple[float, int, int, int]]) -> None:
    for each in play(events):
        link = MEMORY if each.source == each.target else CARD
        assert each.arrival >= each.now + link.latency + link.seconds(each.nbytes) - 1e-9


@given(sends)
def test_what_one_machine_sends_another_arrives_in_order(events: list[tuple[float, int, int, int]]) -> None:
    sent = play(events)
    for pair in {(each.source, each.target) for each in sent}:
        arrivals = [each.arrival for each in sent if (each.source, each.target) == pair]
        assert arrivals == sorted(arrivals)


@given(sends)
def test_no_card_moves_more_than_its_bandwidth(events: list[tuple[float, int, int, int]]) -> None:
    """Any bytes that came in over a card took at least their time since the first of them was sent."""
    bulk = [each for each in play(events) if each.nbytes and each.source != each.target]
    for side in ("source", "target"):
        for machine in {getattr(each, side) for each in bulk}:
            mine = [each for each in bulk if getattr(each, side) == machine]
            for first in mine:
                since = [each for each in mine if each.now >= first.now]
                for last in since:
                    moved = sum(each.nbytes for each in since if each.arrival <= last.arrival)
                    assert moved <= CARD.bandwidth * (last.arrival - first.now) + 1e-6  # type: ignore[operator]


@given(sends, st.integers(0, 3), st.integers(-2, 3))
def test_more_bytes_never_arrive_earlier(
    events: list[tuple[float, int, int, int]], source: int, target: int
) -> None:
    arrivals = [play([*events, (0.0, source, target, nbytes)])[-1].arrival for nbytes in (1, 10, 100, 1000)]
    assert arrivals == sorted(arrivals)


def test_senders_to_one_card_take_turns() -> None:
    """Two learners push 100 bytes to one shard at once: the second waits for the first."""
    first, second = play([(0.0, 0, -1, 100), (0.0, 1, -1, 100)])
    assert first.arrival == pytest.approx(1.25)
    assert second.arrival == pytest.approx(2.25)


def test_a_card_that_waits_for_a_busy_sender_serves_others_meanwhile() -> None:
    sent = play([(0.0, 0, 1, 400), (0.0, 0, -1, 100), (0.0, 2, -1, 100)])
    assert sent[1].arrival == pytest.approx(5.25)  # behind 400 bytes on its own card
    assert sent[2].arrival == pytest.approx(1.25)


def test_without_a_limit_nobody_queues() -> None:
    network = SimNetwork(Cluster.equal(transfer=0.5, latency=0.25))
    assert {network.send(1.0, source, -1, 10**9) for source in range(50)} == {1.75}
    assert network.send(1.0, 60, -1) == 1.25
    assert (network.moved, network.copied) == (50 * 10**9, 0)


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0.01, 3)), max_size=30))
def test_a_way_is_never_taken_twice_and_keeps_no_past(asked: list[tuple[float, float]]) -> None:
    way, spans, now = Way(), [], 0.0
    for ready, seconds in asked:
        now += 0.25
        start = way.book(now, now + ready, seconds)
        assert start >= now + ready
        spans.append((start, start + seconds))
    for (_, end), (start, _) in pairwise(sorted(spans)):
        assert start >= end - 1e-9
    way.book(1e6, 1e6, 1.0)
    assert len(way._starts) == 1


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.floats(0, 2), st.floats(0.01, 3)), min_size=1, max_size=20),
)
def test_cores_give_everybody_the_same_and_no_more_than_there_is(
    count: int, arriving: list[tuple[float, float]]
) -> None:
    cores, now, begun, ended = Cores(count), 0.0, {}, {}
    for index, (wait, seconds) in enumerate(arriving):
        until = now + wait
        while (moment := cores.next()) is not None and moment <= until:
            ended[cores.done(moment)] = moment
        now = until
        begun[index] = now
        cores.add(now, seconds, index)
    while (moment := cores.next()) is not None:
        ended[cores.done(moment)] = moment
    work = sum(seconds for _, seconds in arriving)
    span = max(ended.values()) - min(begun.values())
    assert work <= count * span + 1e-6
    for index, (_, seconds) in enumerate(arriving):
        assert ended[index] - begun[index] >= seconds - 1e-9
        assert ended[index] - begun[index] <= seconds * max(1.0, len(arriving) / count) + 1e-6


def test_three_on_two_cores() -> None:
    cores = Cores(2)
    for task in "abc":
        cores.add(0.0, 1.0, task)
    assert cores.next() == pytest.approx(1.5)
    cores.remove(0.75, "b")  # half done; the other two go on alone
    assert cores.next() == pytest.approx(1.25)
    assert [cores.done(1.25), cores.done(1.25)] == ["a", "c"]
    assert cores.next() is None


def test_what_is_sent_over_a_cut_link_leaves_when_it_is_mended() -> None:
    network = SimNetwork(Cluster.equal(transfer=0.5, latency=0.25))
    assert network.late(1.0, 1.25, 0, 1) == 1.25
    network.cut(0, 1, until=5.0)
    assert network.send(1.0, 0, 1) == network.late(1.0, 1.25, 1, 0) == 5.25
    assert network.send(2.0, 0, 1, 100) == 5.75  # three seconds until then, and its own time
    assert network.send(1.0, 0, 2) == 1.25 and network.late(1.0, 1.25, 1, 1) == 1.25
    assert network.send(6.0, 0, 1) == 6.25


def test_delays_are_drawn_by_the_seed_and_keep_the_order() -> None:
    cluster = replace(Cluster.equal(latency=0.25), delay=0.5)

    def arrivals(seed: int) -> list[float]:
        network = SimNetwork(cluster, seed)
        return [network.send(number / 100, 0, 1) for number in range(400)]

    found = arrivals(3)
    assert found == arrivals(3) != arrivals(4)
    assert found == sorted(found) and all(late > number / 100 + 0.25 for number, late in enumerate(found))
    alone = SimNetwork(cluster, 5)
    delays = [alone.send(100.0 * number, 0, 1) - 100.0 * number - 0.25 for number in range(2000)]
    assert sum(delays) / 2000 == pytest.approx(0.5, rel=0.1)
    assert alone.send(1e6, 2, 2) == 1e6 + cluster.memory.latency  # nothing is late inside a machine
