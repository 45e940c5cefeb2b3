"""On which machine each shard is, whatever machines come and go."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.engines.local.host_interface import Seats, Sites
from tests.unit.engines.local.doubles import spec_of


def test_servers_are_told_the_leading_shards_machine_first() -> None:
    sites = Sites((2, 0, 2, 1), (0, 1, 2, 3))
    assert sites.servers == [2, 0, 1]
    assert [sites.of(site) for site in (0, 1, 2, 3)] == [[1], [3], [0, 2], []]


def test_shards_of_a_lost_machine_go_to_those_with_the_fewest_and_the_others_stay() -> None:
    assert Sites((0, 1, 1, 2), (0, 1, 2, 3)).without(1) == Sites((0, 3, 0, 2), (0, 2, 3))


def test_a_machine_joins_once_and_gets_no_shard() -> None:
    sites = Sites((0, 0), (0, 1))
    assert sites.joined_by(1) is sites
    assert sites.joined_by(2) == Sites((0, 0), (0, 1, 2))


@settings(max_examples=40)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=8), st.permutations(range(5)), st.integers(1, 4))
def test_while_a_machine_lives_each_shard_has_one_and_no_loss_piles_them_up(
    where: list[int], order: list[int], losses: int
) -> None:
    sites = Sites(tuple(where), tuple(range(5)))
    for lost in order[:losses]:
        before, sites = sites, sites.without(lost)
        assert lost not in sites.live and set(sites.shards) <= set(sites.live)
        assert all(new == old for new, old in zip(sites.shards, before.shards, strict=True) if old != lost)
        counts = {site: len(sites.of(site)) for site in sites.live}
        for site in sites.live:
            assert sites.of(site) == before.of(site) or counts[site] <= min(counts.values()) + 1


def test_a_seat_here_is_that_of_its_rank_with_devices_dealt_in_turn() -> None:
    seats = Seats()
    spec = spec_of(3, devices=("cuda:0", "cuda:1"))
    assert [seats(spec, learner, rank).device for learner, rank in ((7, 0), (8, 1), (9, 2))] == [
        "cuda:0",
        "cuda:1",
        "cuda:0",
    ]
