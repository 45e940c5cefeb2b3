"""Groups as learners: how seats crowd their machine, and what a group has of machines and cards."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.cluster import Cluster, Compute, Cost, Link
from syncline.sim.group_times import groups_of, seats_of

USUAL = Cluster(
    compute=Compute(base=1.0),
    crowding=0.1,
    learners_per_machine=8,
    speeds=(1.0, 0.5, 1.0),
    card=Link(bandwidth=1e6),
)


def test_seats_crowd_their_machine_and_groups_have_the_cards_of_all_their_machines() -> None:
    assert seats_of(USUAL, 4).compute.base == pytest.approx(1.3)
    groups = groups_of(USUAL, 4, seats_of(USUAL, 4).compute)
    assert groups.learners_per_machine == 2 and groups.card.bandwidth == 1e6 and groups.speeds == (0.5,)
    both = groups.step_seconds(8, rank=1, step=0, seed=0, learners=2)
    assert both == pytest.approx(USUAL.step_seconds(8, rank=7, step=0, seed=0, learners=8))
    wide = groups_of(USUAL, 16, USUAL.compute)
    assert wide.learners_per_machine == 1 and wide.card.bandwidth == 2e6
    few = replace(USUAL, crowding=0.0, cores=2)
    crowded = seats_of(replace(USUAL, cores=2), 4).compute.base
    assert crowded == pytest.approx(2.2), "two at a time, which slow each other"
    assert seats_of(few, 4).compute.base == 2.0 and groups_of(few, 2, few.compute).cores == 1


@given(st.integers(1, 8), st.floats(0, 1), st.floats(0, 1))
def test_a_full_machine_of_groups_is_as_slow_as_one_of_seats(
    group: int, crowding: float, each: float
) -> None:
    """Whatever the size of its groups: they do the same work on the same machine."""
    usual = replace(
        USUAL,
        compute=Compute(base=0.5, per_example=each),
        crowding=crowding,
        learners_per_machine=group * 2,
        speeds=(),
    )
    groups = groups_of(usual, group, seats_of(usual, group).compute)
    mine = groups.step_seconds(4, rank=0, step=0, seed=0, learners=2)
    assert mine == pytest.approx(usual.step_seconds(4, rank=0, step=0, seed=0, learners=2 * group))


def test_a_group_is_as_slow_as_its_slowest_seat_and_copies_with_all_of_them() -> None:
    cluster = replace(USUAL, speeds=(1.0, 2.0, 0.5, 1.0, 4.0), copy=Cost(fixed=0.5, per_byte=4.0))
    groups = groups_of(cluster, 2, cluster.compute)
    assert groups.speeds == (1.0, 0.5, 1.0), "the last seat, which nobody names, has 1"
    assert groups.copy == Cost(fixed=0.5, per_byte=2.0)


def test_one_machine_for_all_stays_one_without_limits() -> None:
    together = replace(USUAL, learners_per_machine=None, card=Link(), speeds=())
    groups = groups_of(together, 4, together.compute)
    assert groups.learners_per_machine is None and groups.card.bandwidth is None and groups.cores is None
    assert seats_of(together, 4).compute.base == pytest.approx(1.3)
